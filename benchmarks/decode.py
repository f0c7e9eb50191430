"""Decode speed and memory of kvjax beside other engines: `python -m benchmarks.decode`.

Makes a random checkpoint, loads it in every engine, checks that all compute the same, times them
in turn, and writes `decode.json`, `decode.md`, `decode.png` and `speedup.png`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks import peers, report
from benchmarks.cells import ITEMSIZE, Settings, prompt_tokens, run_cell
from benchmarks.checkpoint import TINY, Sizes, convert_file, write_checkpoint, write_for_llama_cpp
from benchmarks.claims import all_claims
from benchmarks.process import Worker

CELLS = "1x64,1x256,1x1024,1x2048,1x8192,8x64,8x2048"
# Workers of one dtype live side by side; this load of the machine's cores is no quiet machine.
BUSY = 0.5


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--cells", help=f"batch x prompt, with commas; default {CELLS}")
    parser.add_argument("--dtypes", default=None, help="default float32,bfloat16")
    parser.add_argument("--repeats", type=int, help="groups of steps an engine and cell")
    parser.add_argument("--steps", type=int, help="timed steps in a group")
    parser.add_argument("--pass-repeats", type=int, help="rounds of prefill and uncached steps")
    peers.add_arguments(parser, "transformers")
    parser.add_argument("--gguf", type=Path, help="a Llama model to time instead of random weights")
    parser.add_argument("--generate", action="store_true", help="time kvjax.generate as well")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model and cells: a trial run")
    parser.add_argument("--strict", action="store_true", help="fail when a required claim fails")
    return parser.parse_args(arguments)


def parse_cells(text: str) -> list[tuple[int, int]]:
    """`"1x64,8x2048"` as pairs of batch and prompt length.

    Raises:
      ValueError: if a part is not two positive numbers with an x between.
    """
    cells = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d*)x([1-9]\d*)\s*", part)
        if match is None:
            raise ValueError(f"a cell is BATCHxPROMPT, such as 1x64; got {part!r}")
        cells.append((int(match[1]), int(match[2])))
    return cells


def settings_of(options: argparse.Namespace) -> Settings:
    """The number of repeats and steps, with what the command line sets."""
    settings = Settings()
    if options.quick:
        settings = Settings(repeats=2, steps=3, warm=1, check_steps=2, pass_repeats=1)
    chosen = {
        name: getattr(options, name)
        for name in ("repeats", "steps", "pass_repeats")
        if getattr(options, name) is not None
    }
    for name, value in chosen.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return Settings(**{**asdict(settings), **chosen})


def capacity_run(
    worker: Worker, sizes: Sizes, dtype: str, quick: bool, settings: Settings
) -> dict[str, Any]:
    """Steps after a short prompt in a small and in a large cache."""
    prompt, max_lens = (20, [64, 256]) if quick else (100, [1024, 65_536])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.npy"
        np.save(path, prompt_tokens(sizes, 1, prompt, settings.seed))
        found = worker.ask(
            "capacity",
            prompt=str(path),
            max_lens=max_lens,
            warm=settings.warm,
            steps=settings.steps,
            repeats=settings.repeats,
        )
    return {"dtype": dtype, "prompt": prompt, "max_lens": max_lens, **found}


def measure_bandwidth(worker: Worker, quick: bool) -> dict[str, Any]:
    """The best read bandwidth of several methods, in bytes a second."""
    nbytes = 2**24 if quick else 2**30
    methods = worker.ask("bandwidth", nbytes=nbytes)
    best = max(methods, key=lambda name: methods[name])
    return {
        "bytes_per_second": methods[best],
        "method": best,
        "array_bytes": nbytes,
        "methods": methods,
    }


def run(options: argparse.Namespace, checkpoint: Path, console: Console) -> dict[str, Any]:
    """All cells of all dtypes; returns the results as they are saved."""
    cells = parse_cells(options.cells or ("1x16,2x150" if options.quick else CELLS))
    dtypes = (options.dtypes or ("float32" if options.quick else "float32,bfloat16")).split(",")
    if unknown := set(dtypes) - set(ITEMSIZE):
        raise ValueError(f"unknown dtypes {sorted(unknown)}; there are {sorted(ITEMSIZE)}")
    settings, sizes = settings_of(options), TINY if options.quick else Sizes()
    if options.gguf is not None:
        sizes = convert_file(checkpoint, options.gguf)
    interpreters, left_out = peers.interpreters(options, sizes.head_dim)
    for sentence in left_out:
        console.print(sentence, style="yellow")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    if load is not None and load > BUSY and not options.quick:
        console.print(f"the machine is busy (load {load:.2f}): times will suffer", style="yellow")
    if options.gguf is None:
        write_checkpoint(checkpoint, sizes, settings.seed)
    results: dict[str, Any] = {
        "format": 1,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_before": load,
        "model": asdict(sizes),
        "file": options.gguf and options.gguf.name,
        "settings": {**asdict(settings), "full_size": not options.quick},
        "versions": {"python": ".".join(map(str, sys.version_info[:3]))},
        "left_out": left_out,
        "cells": [],
        "capacity": [],
    }
    for dtype in dtypes:
        write_for_llama_cpp(checkpoint, interpreters, dtype)
        with contextlib.ExitStack() as stack:
            workers = {
                name: stack.enter_context(Worker(name, checkpoint, dtype, [interpreter]))
                for name, interpreter in interpreters.items()
            }
            ours = workers["kvjax"]
            for worker in workers.values():
                worker.ready()
                results["versions"] |= worker.about["versions"]
            results |= {name: ours.about[name] for name in ("device", "platform", "threads")}
            if "bandwidth" not in results:
                results["bandwidth"] = measure_bandwidth(ours, options.quick)
            for batch, prompt in cells:
                console.print(f"{dtype}, batch {batch}, prompt {prompt:,} ...", style="dim")
                here = {
                    name: worker
                    for name, worker in workers.items()
                    if options.quick or peers.in_cell(name, batch, prompt)
                }
                cell = run_cell(here, sizes, dtype, batch, prompt, settings)
                if options.generate:
                    new_tokens = 4 if options.quick else 64
                    repeats = 3 if batch * prompt <= settings.pass_tokens else 1
                    cell["generate"] = ours.ask("generate", new_tokens=new_tokens, repeats=repeats)
                results["cells"].append(cell)
                steps = (
                    f"{name} {found['milliseconds_per_token']:.1f}"
                    for name, found in cell["engines"].items()
                )
                console.print(f"  ms a token: {', '.join(steps)}", style="dim")
            console.print(f"{dtype}, capacities ...", style="dim")
            results["capacity"].append(capacity_run(ours, sizes, dtype, options.quick, settings))
    results["claims"] = all_claims(results)
    return results


def default_folder(results: dict[str, Any]) -> Path:
    """`benchmarks/results/DEVICE-jaxVERSION`, the device as the platform names it, and after it the
    name of a GGUF file."""
    device = re.sub(r"[^a-z0-9]+", "-", results["device"].lower()).strip("-")
    name = f"{device}-jax{results['versions']['jax']}"
    if results.get("file"):
        name += f"-{Path(results['file']).stem.lower()}"
    return Path(__file__).resolve().parent / "results" / name


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; 1 if engines differ, or with `--strict` if a required claim fails."""
    options = parse(arguments)
    # In a pipe nothing says how wide a line may be.
    console = Console(width=None if sys.stdout.isatty() else 140)
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = run(options, Path(folder), Console(stderr=True))
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    words = peers.without_paths(sys.argv[1:] if arguments is None else arguments)
    results["command"] = " ".join(["python -m benchmarks.decode", *words])
    out = options.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if options.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "decode.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report.write(results, out)
    report.show(results, console)
    console.print(f"written to {out}")
    failed = bool(report.mismatches(results))
    if options.strict:
        failed |= any(claim["required"] and not claim["passed"] for claim in results["claims"])
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
