"""Tokens a second against the number of rows: `python -m benchmarks.scaling`.

kvjax and peers decode 1 to 32 rows behind prompts of one length, checked and timed in turn as in
`benchmarks.decode`; writes `scaling.json`, `scaling.md` and `scaling.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cells, peers
from benchmarks.agreement import check_greedy, check_logits
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint, write_for_llama_cpp
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from benchmarks.process import Worker

MARKERS = "os^Dvx*P<>h"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--batches", default="1,2,4,8,16,32")
    parser.add_argument("--context", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="groups of steps")
    parser.add_argument("--steps", type=int, default=12, help="timed steps in a group")
    peers.add_arguments(parser, "transformers-static-sdpa")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    if given.quick:
        given.batches, given.context, given.dtypes = "1,2", 40, "float32"
        given.repeats, given.steps = 2, 3
    return given


def scaled(
    workers: Mapping[str, Worker], sizes: Sizes, dtype: str, batch: int, context: int,
    settings: cells.Settings,
) -> dict[str, Any]:  # fmt: skip
    """Check and time every engine on one number of rows."""
    engines: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.npy"
        np.save(path, cells.prompt_tokens(sizes, batch, context, settings.seed))
        for name, worker in workers.items():
            worker.ask("drop")
            engines[name] = worker.ask("setup", prompt=str(path), max_len=settings.max_len(context))
        check, token = check_logits(
            workers, sizes, batch, dtype, Path(folder),
            steps=settings.check_steps, seed=settings.seed, whole=False,
        )  # fmt: skip
        made = cells.decode(workers, engines, token, settings)
        check_greedy(workers, check, token, made, Path(folder))
    cells.add_speeds(workers, engines, sizes, dtype, batch, context, settings)
    for worker in workers.values():
        worker.ask("drop")
    return {"dtype": dtype, "batch": batch, "engines": engines, "check": check}


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All numbers of rows in all dtypes; returns the results as they are saved."""
    sizes = TINY if given.quick else Sizes()
    settings = cells.Settings(repeats=given.repeats, steps=given.steps)
    interpreters, left_out = peers.interpreters(given, sizes.head_dim)
    results: dict[str, Any] = {
        "context": given.context,
        "settings": asdict(settings),
        "versions": {},
        "left_out": left_out,
        "cells": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes, settings.seed)
        for dtype in given.dtypes.split(","):
            write_for_llama_cpp(Path(folder), interpreters, dtype)
            with contextlib.ExitStack() as stack:
                workers = {
                    name: stack.enter_context(Worker(name, Path(folder), dtype, [interpreter]))
                    for name, interpreter in interpreters.items()
                }
                for worker in workers.values():
                    worker.ready()
                    results["versions"] |= worker.about["versions"]
                results |= {key: workers["kvjax"].about[key] for key in ("device", "threads")}
                for batch in map(int, given.batches.split(",")):
                    print(f"{dtype}, batch {batch} ...", file=sys.stderr)
                    results["cells"].append(
                        scaled(workers, sizes, dtype, batch, given.context, settings)
                    )
    return results


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        f"# Decoding more rows behind {results['context']:,} tokens each",
        "",
        f"`{results['command']}`: {results['device']}, {results['threads']} threads; {versions}; "
        f"medians of {results['settings']['repeats']} groups of {results['settings']['steps']} "
        "steps, engines in turn. kvjax / peer: the median of the groups' ratios.",
        "",
        "![Tokens a second against rows](scaling.png)",
        "",
        "| dtype | rows | engine | ms a step | tokens/s | to one row | kvjax / peer |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    first: dict[tuple[str, str], float] = {}
    for cell in results["cells"]:
        ours = cell["engines"]["kvjax"]["decode_seconds"]
        for name, found in cell["engines"].items():
            speed = found["tokens_per_second"]
            growth = speed / first.setdefault((cell["dtype"], name), speed)
            ratio = f"{paired_ratio(ours, found['decode_seconds']):.2f}" if name != "kvjax" else ""
            lines.append(
                f"| {cell['dtype']} | {cell['batch']} | {name} "
                f"| {found['milliseconds_per_token']:.1f} | {speed:.1f} | {growth:.2f} | {ratio} |"
            )
    wrong = [cell for cell in results["cells"] if not cell["check"]["passed"]]
    sentences = [f"{c['dtype']}, {c['batch']} rows: engines differ: {c['check']}" for c in wrong]
    return "\n".join([*lines, "", *results["left_out"], *sentences, ""])


def draw(results: dict[str, Any], path: Path) -> None:
    """Save tokens a second against rows, a panel a dtype."""
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(cell["dtype"] for cell in results["cells"]))
    figure = Figure(figsize=(0.9 + 4.6 * len(dtypes), 4.2), layout="constrained")
    panels = figure.subplots(1, len(dtypes), squeeze=False, sharey=True)[0]
    for axes, dtype in zip(panels, dtypes, strict=True):
        here = [cell for cell in results["cells"] if cell["dtype"] == dtype]
        for name, marker in zip(here[0]["engines"], MARKERS, strict=False):
            speeds = [cell["engines"][name]["tokens_per_second"] for cell in here]
            axes.plot([cell["batch"] for cell in here], speeds, marker=marker, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks([cell["batch"] for cell in here])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(f"rows, behind {results['context']:,} tokens each")
        axes.set_title(dtype, fontsize=10)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
    panels[0].set_ylabel("tokens a second")
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write the three files; 1 if engines differ."""
    given = parse(arguments)
    try:
        results = run(given)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    words = peers.without_paths(sys.argv[1:] if arguments is None else arguments)
    results["command"] = " ".join(["python -m benchmarks.scaling", *words])
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "scaling.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "scaling.md").write_text(markdown(results), encoding="utf-8")
    draw(results, out / "scaling.png")
    print(markdown(results))
    return int(not all(cell["check"]["passed"] for cell in results["cells"]))


if __name__ == "__main__":
    raise SystemExit(main())
