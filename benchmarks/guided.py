"""What guides cost: `python -m benchmarks.guided`.

Texts of a random model of 135 million parameters, whose vocabulary of 49,152 tokens is learnt from
this Python's own library: free; with guides that allow everything, which has each token wait for
the host; and with grammars. All in turn, so that the difference of the last two is what masks cost
beside a step that runs meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import kvjax
from benchmarks.bandwidth import cpu_name
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from kvjax.generation.guides.masks import mask_words
from kvjax.models import load
from kvjax.sampling.filters import ALL_ALLOWED

LIMIT = 0.10
"""Of a guided step, the share that masks may have."""
END = 0
RECORDS = {
    "type": "array", "minItems": 1000,
    "items": {
        "type": "object", "additionalProperties": False, "required": ["name", "tags", "count"],
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
            "count": {"type": "integer", "minimum": 0, "maximum": 99_999},
        },
    },
}  # fmt: skip
SUMS = r"""
start: line+
line: sum "\n"
sum: product (/[+-]/ product)*
product: value ("*" value)*
value: /[a-z]{1,8}/ | /[0-9]{1,5}/ | "(" sum ")"
"""
GUIDES: dict[str, Any] = {
    "JSON schema": lambda guides: guides.json_schema(RECORDS),
    "regular expression": lambda guides: guides.regex(r"([A-Za-z]{2,9}[ ,.] ?)+"),
    "grammar": lambda guides: guides.grammar(SUMS),
}


class Anything:
    """A guide that costs nothing."""

    def __init__(self, words: int) -> None:
        self._bits = np.full(words, ALL_ALLOWED, np.uint32)

    def copy(self) -> Anything:
        return self

    def allowed(self) -> np.ndarray:
        return self._bits

    def accept(self, token: int, /) -> None:
        pass


class Timed:
    """A guide, and the seconds that it takes the host, with those of its copies."""

    def __init__(self, guide: Any, seconds: list[float]) -> None:
        self._guide, self.seconds = guide, seconds

    def copy(self) -> Timed:
        return Timed(self._guide.copy(), self.seconds)

    def allowed(self) -> np.ndarray:
        began = time.perf_counter()
        found = self._guide.allowed()
        self.seconds[0] += time.perf_counter() - began
        return found

    def accept(self, token: int, /) -> None:
        began = time.perf_counter()
        self._guide.accept(token)
        self.seconds[0] += time.perf_counter() - began


def write_tokenizer(folder: Path, size: int) -> int:
    """Learn a byte-level vocabulary of so many tokens from the standard library; how many it
    has."""
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = [str(file) for file in files if "site-packages" not in file.parts]
    if size < 1000:  # a trial run
        files = files[:1]
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(map(_text_of, files), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": END}), encoding="utf-8"
    )
    return tokenizer.get_vocab_size()


def _text_of(file: str) -> str:
    return Path(file).read_text(encoding="utf-8", errors="replace")


def measure(lm: Any, rows: int, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step of so many rows, by each guide and without one, in turn."""
    guides, seconds = kvjax.Guides(lm), [0.0]
    forms: dict[str, Any] = {"free": None, "everything": Anything(mask_words(lm.config))}
    forms |= {name: Timed(make(guides), seconds) for name, make in GUIDES.items()}
    step: dict[str, list[float]] = {name: [] for name in forms}
    host: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(given.rounds + 1):
        for name, guide in forms.items():
            seconds[0] = 0.0
            found = kvjax.generate(
                lm, [[1 + row] * given.prompt for row in range(rows)], guide=guide, seed=turn,
                max_new_tokens=given.steps + 1, max_len=given.room, temperature=1.0,
                logit_bias={END: -1e4},
            )  # fmt: skip
            if turn:  # the first one compiles
                ended = set(found.stats.finish_reasons) - {"length"}
                assert not ended, f"{name}: a text has ended by {ended}"
                step[name].append(found.stats.decode_seconds / given.steps)
                host[name].append(seconds[0] / given.steps)
    return [
        {
            "rows": rows, "guide": name, "ms": 1e3 * statistics.median(step[name]),
            "host ms": 1e3 * statistics.median(host[name]),
            "share": 1 - paired_ratio(step["everything"], step[name]),
            "of free": paired_ratio(step[name], step["free"]),
        }
        for name in forms
    ]  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    return "\n".join(
        [
            "# What guides cost",
            "",
            f"{results['device']}, JAX {results['versions']['jax']}: a step of a model of "
            f"{results['layers']} layers, {results['dtype']}, whose vocabulary has "
            f"{results['vocabulary']:,} tokens, behind {results['prompt']} of prompt; medians of "
            f"{results['rounds']} rounds of {results['steps']} steps, all in turn, temperature 1. "
            "A guided step waits for its token, and masks are made while the device computes: "
            "their share is what a step takes longer than with guides that allow everything.",
            "",
            "| rows | guide | ms of a step | times a free one | ms of the host for masks | "
            "share of masks |",
            "| --- | --- | --- | --- | --- | --- |",
            *(
                f"| {x['rows']} | {x['guide']} | {x['ms']:.2f} | {x['of free']:.3f} | "
                f"{x['host ms']:.3f} | {100 * x['share']:.1f} % |"
                for x in results["steps_of"]
            ),
            "",
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guided", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=48, help="tokens of a round")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    full = {"rows": [1, 4], "prompt": 64, "room": 256}
    quick = {"rows": [1], "prompt": 4, "room": 64, "rounds": 1, "steps": 6}
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``guided.json`` and ``.md``; 1 if masks have more than ``LIMIT`` of a step."""
    given = parse(arguments)
    device, sizes = jax.devices()[0], Sizes()
    if given.quick:
        sizes = replace(TINY, vocab_size=300, num_hidden_layers=1)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        learnt = write_tokenizer(Path(folder), sizes.vocab_size)
        lm = load(folder, dtype=given.dtype)
    results: dict[str, Any] = {
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
        **{name: value for name, value in vars(given).items() if name not in ("out", "quick")},
        "layers": sizes.num_hidden_layers, "vocabulary": learnt, "steps_of": [],
    }  # fmt: skip
    for rows in given.rows:
        print(f"{rows} row(s) ...", file=sys.stderr)
        results["steps_of"] += measure(lm, rows, given)
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "guided.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page = markdown(results)
    (out / "guided.md").write_text(page, encoding="utf-8")
    print(page)
    return int(not given.quick and max(x["share"] for x in results["steps_of"]) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
