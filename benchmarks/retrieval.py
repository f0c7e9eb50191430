"""Retrieval from compressed caches, by RULER's tasks: ``python -m benchmarks.retrieval``.

Each item is a prompt that hides facts in a haystack and asks for them
(``benchmarks.retrieval_tasks``). Each policy's cache is scored by the likelihood of the right
answers and by the answers in greedy text (``benchmarks.retrieval_scores``). An interrupted run
continues where it stopped: each cell, a task at a length, has a JSON file in the folder ``cells``
of ``--out``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

import kvjax
from benchmarks import retrieval_report as report
from benchmarks.bandwidth import cpu_name
from benchmarks.decode import default_folder
from benchmarks.retrieval_scores import FULL, score_item
from benchmarks.retrieval_tasks import DISTRACTORS, TASKS, Item, make_item
from kvjax import models
from kvjax.generation.loaded_model import LanguageModel
from kvjax.models.tiny.corpus import read_documents
from kvjax.policies.presets import PolicyChoice, parse_policy, per_layer
from kvjax.quality.evaluation import cache_bytes

LENGTHS, ITEMS = "1024,2048,4096,8192", "20,12,6,3"
POLICIES = "raw,8,4,3,2,sinks,hybrid"
SEEN, SINKS = 512, 4
"""Tokens that a query sees in the ring with sinks, and the first tokens among them."""


def policy_of(name: str) -> PolicyChoice:
    """A policy from the command line: ``raw``, bits, ``sinks``, or as ``kvjax eval`` has it."""
    if name == "raw":
        return FULL
    if name == "sinks":
        return kvjax.policy("sliding_window", window=SEEN - SINKS, sinks=SINKS)
    return parse_policy(f"bits={name}" if name.isdigit() else name)


def standard_library_prose() -> str:
    """The sentences in the documentation of the standard library, without code and tables."""
    paragraphs = (
        " ".join(paragraph.split())
        for entries in read_documents().values()
        for entry in entries
        for paragraph in re.split(r"\n\s*\n", entry)
    )
    whole = re.compile(r"[A-Z][\w\s,;:.'\"()-]{80,}\.")
    return " ".join(dict.fromkeys(p for p in paragraphs if whole.fullmatch(p) and "__" not in p))


def row_bytes(lm: LanguageModel, policy: PolicyChoice, length: int) -> float:
    """The bytes of a cache with one row of ``length`` tokens, relative to bfloat16."""
    cache = jax.eval_shape(lambda: kvjax.init_cache(lm.config, policy, batch=1, max_len=length))
    return cache_bytes(cache, length).row_of_bfloat16


def depth_of(number: int) -> float:
    """The depth of an item: 1/2, 1/4, 3/4, 1/8, 5/8 and so on, so more items can be added later."""
    digits = f"{number + 1:b}"[::-1]
    return int(digits, 2) / 2 ** len(digits)


def fingerprint(item: Item) -> str:
    """A hash of an item's tokens and candidates."""
    text = json.dumps([item.prompt_ids, [asdict(step) for step in item.steps]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Cell:
    """A task at a length: its items' scores, in a file."""

    def __init__(self, folder: Path, task: str, length: int, settings: Mapping[str, Any]) -> None:
        self.task, self.length = task, length
        name = re.sub(r"[^a-z0-9]+", "-", f"{task} {length}".lower())
        self.file = folder / "cells" / f"{name}.json"
        self.settings, self.items = dict(settings), list[dict[str, Any]]()
        if self.file.exists():
            saved = json.loads(self.file.read_text(encoding="utf-8"))
            if saved["settings"] != self.settings:
                raise ValueError(f"{self.file} has other settings: give another --out")
            self.items = saved["items"]

    def entry(self, item: Item, number: int) -> dict[str, Any]:
        """The saved entry of an item, new if there is none.

        Raises:
          ValueError: if the saved scores are of another prompt.
        """
        new = {
            "seed": number, "depth": depth_of(number), "fingerprint": fingerprint(item),
            "prompt_tokens": len(item.prompt_ids), "answers": list(item.answers),
            "distractors": list(item.distractors), "present": item.present,
            "depths": list(item.depths), "scores": {},
        }  # fmt: skip
        for saved in self.items:
            if saved["seed"] == number:
                if saved["fingerprint"] != new["fingerprint"]:
                    raise ValueError(f"{self.file} has scores of other prompts: give another --out")
                return saved
        self.items.append(new)
        return new

    def save(self) -> None:
        """Replace the file."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        content = {"task": self.task, "length": self.length, "settings": self.settings}
        part = self.file.with_suffix(".part")
        text = json.dumps({**content, "items": self.items}, indent=1)
        part.write_text(text + "\n", encoding="utf-8")
        os.replace(part, self.file)


def run_cell(
    lm: LanguageModel,
    cell: Cell,
    policies: Sequence[str],
    items: int,
    *,
    prefill: str,
    prose: str,
    capacity: int,
) -> None:
    """Score a cell's items with the policies that its file does not have yet."""
    chosen = {name: policy_of(name) for name in policies}
    for number in range(items):
        item = make_item(
            cell.task, lm.tokenizer, length=cell.length, seed=number, depth=depth_of(number),
            prose=prose,
        )  # fmt: skip
        entry = cell.entry(item, number)
        missing = {n: policy for n, policy in chosen.items() if n not in entry["scores"]}
        if not missing:
            continue
        start, used = time.perf_counter(), time.process_time()
        scores = score_item(lm, item, missing, prefill=prefill, capacity=capacity)
        entry["scores"] |= {name: asdict(score) for name, score in scores.items()}
        cell.save()
        print(
            f"{cell.task}, {cell.length}: item {number + 1} of {items}, "
            f"{time.perf_counter() - start:.1f} s, {time.process_time() - used:.1f} s of cores",
            file=sys.stderr,
            flush=True,
        )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.retrieval", description=__doc__)
    parser.add_argument("--model", help="folder, file or hub id; default: the embedded model")
    parser.add_argument("--name", help="the model's name in the results; default: of its file")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", help=f"separated by ';', default all: {'; '.join(TASKS)}")
    parser.add_argument("--lengths", default=LENGTHS, help="tokens, separated by ','")
    parser.add_argument("--items", default=ITEMS, help="per cell: a number, or one per length")
    parser.add_argument(
        "--policies", default=POLICIES,
        help="raw, bits, sinks, hybrid, or other policies, separated by ',' (with settings: ';')",
    )  # fmt: skip
    parser.add_argument(
        "--prefill", choices=("exact", "policy"), default="exact",
        help="exact: once with a full-precision cache, then converted; policy: with each policy",
    )  # fmt: skip
    parser.add_argument("--prose", type=Path, nargs="*", help="text files for haystacks")
    parser.add_argument("--out", type=Path, help="default: named after device and model")
    parser.add_argument("--quick", action="store_true", help="one item of 768 tokens: a trial run")
    given = parser.parse_args(arguments)
    if given.quick:
        given.lengths, given.items = "768", "1"
    given.tasks = [x.strip() for x in given.tasks.split(";")] if given.tasks else list(TASKS)
    given.lengths = [int(x) for x in given.lengths.split(",")]
    names = given.policies.split(";" if ";" in given.policies else ",")
    given.policies = [name.strip() for name in names]
    counts = [int(x) for x in given.items.split(",")]
    given.items = counts * len(given.lengths) if len(counts) == 1 else counts
    if len(given.items) != len(given.lengths):
        parser.error("--items needs one number, or one per length")
    if wrong := [x for x in given.tasks if x not in TASKS]:
        parser.error(f"unknown task {wrong[0]!r}: use {', '.join(map(repr, TASKS))}")
    if given.policies[0] != "raw":
        parser.error("the first policy must be raw: the others are compared with it")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, and write ``retrieval.json``, ``.md`` and ``.png``."""
    given = parse(arguments)
    lm = models.load(given.model, dtype=given.dtype)
    if given.prose:
        prose = "\n".join(path.read_text(encoding="utf-8") for path in given.prose)
    else:
        prose = standard_library_prose()
    name = given.name or Path(given.model or "embedded").name.removesuffix(".gguf")
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "model": name, "parameters": repr(lm).partition(", from")[0].removeprefix("LanguageModel("),
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__,
                     "python": sys.version.split()[0]},
        "dtype": given.dtype, "prefill": given.prefill, "lengths": given.lengths,
        "policies": given.policies, "chat_template": bool(lm.tokenizer.templates),
        "distractors": DISTRACTORS,
    }  # fmt: skip
    out = given.out or default_folder(results) / f"retrieval-{name.lower()}"
    if given.quick and given.out is None:
        out = Path(tempfile.mkdtemp())
    raw = per_layer(FULL, lm.config)
    same = [x for x in given.policies[1:] if per_layer(policy_of(x), lm.config) == raw]
    results["same_as_raw"] = same
    results["bytes"] = {
        policy: [row_bytes(lm, policy_of(policy), length) for length in given.lengths]
        for policy in given.policies
    }
    shared = ("model", "dtype", "prefill", "distractors", "chat_template")
    settings = {key: results[key] for key in shared}
    cells = [
        (Cell(out, task, length, settings), items)
        for length, items in zip(given.lengths, given.items, strict=True)
        for task in given.tasks
    ]
    distinct = [policy for policy in given.policies if policy not in same]
    results |= {"created": time.strftime("%Y-%m-%d"), "missing": len(cells), "cells": []}
    for cell, items in cells:
        run_cell(
            lm, cell, distinct, items, prefill=given.prefill, prose=prose,
            capacity=max(given.lengths),
        )  # fmt: skip
        summary = report.summary(cell.task, cell.length, cell.items[:items], distinct)
        results["cells"].append(summary)
        results["missing"] -= 1
        report.write(results, out)
    print((out / "retrieval.md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
