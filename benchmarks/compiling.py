"""Seconds from a loaded model to compiled programs: `python -m benchmarks.compiling`.

A decode step and a prompt of `--prompt` tokens, for models of several depths: traced, lowered and
compiled in a process of their own with nothing compiled before, and again by a new process that
finds both in the compilation cache. Writes `compiling.json` and `compiling.md`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import kvjax
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint
from benchmarks.decode import default_folder
from benchmarks.engine_kvjax import KvjaxEngine

STAGES = ("trace", "lower", "compile")
FULL_DEPTH, COLD_LIMIT, WARM_LIMIT = Sizes().num_hidden_layers, 20.0, 3.0
"""Layers, and seconds that their step and prompt may take each, and both from the cache."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiling", description=__doc__)
    parser.add_argument("--depths", help="layers; default 4,8,15,30")
    parser.add_argument("--bits", default="0,8", help="of the caches, 0: raw; default 0,8")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    parser.add_argument("--once", metavar="CHECKPOINT", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.depths = given.depths or ("1,2" if given.quick else "4,8,15,30")
    if given.quick:
        given.bits, given.prompt, given.repeats = "0", 20, 1
    return given


def once(checkpoint: str, bits: int, prompt: int) -> dict[str, Any]:
    """What one process takes for the stages of both programs."""
    engine = KvjaxEngine(checkpoint, "float32")
    policy = kvjax.policy(bits=bits or None)
    cache = kvjax.init_cache(engine.lm.config, policy, batch=1, max_len=2 * prompt)
    found: dict[str, Any] = {"about": engine.describe()}
    tokens = jnp.zeros((1, prompt), jnp.int32)
    programs = engine.programs()
    for name, fed in (("step", tokens[:, 0]), ("prompt", tokens)):
        moments = [time.perf_counter()]
        traced = programs[name].trace(engine.lm.params, fed, cache)
        moments.append(time.perf_counter())
        lowered = traced.lower()
        moments.append(time.perf_counter())
        lowered.compile()
        moments.append(time.perf_counter())
        took = (later - earlier for earlier, later in itertools.pairwise(moments))
        found[name] = dict(zip(STAGES, took, strict=True))
    return found


def measure(checkpoint: Path, bits: int, given: argparse.Namespace) -> dict[str, Any]:
    """Cold and warm seconds of each program and stage, a number a process.

    Raises ``RuntimeError`` if a warm process compiled something anew.
    """
    found: dict[str, Any] = {"cold": [], "warm": []}
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as compiled:
            settings = os.environ | {
                "JAX_COMPILATION_CACHE_DIR": compiled,
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            }
            kept: list[list[str]] = []
            for state in found:
                command = [sys.executable, "-m", "benchmarks.compiling", "--once", str(checkpoint)]
                command += ["--bits", str(bits), "--prompt", str(given.prompt)]
                done = subprocess.run(
                    command,
                    env=settings,
                    check=True,
                    stdout=subprocess.PIPE,
                    encoding="utf-8",
                )
                found[state].append(json.loads(done.stdout.splitlines()[-1]))
                kept.append(sorted(path.name for path in Path(compiled).glob("*-cache")))
            if not kept[0] or kept[0] != kept[1]:
                raise RuntimeError("the second process did not find its programs in the cache")
    return found


def seconds(found: Sequence[dict[str, Any]], program: str, *stages: str) -> float:
    """The median over processes of what these stages take together."""
    return statistics.median(sum(each[program][stage] for stage in stages) for each in found)


def run(given: argparse.Namespace) -> dict[str, Any]:
    """All depths and caches; returns the results as they are saved."""
    sizes = TINY if given.quick else Sizes()
    results: dict[str, Any] = {"prompt": given.prompt, "repeats": given.repeats, "cells": []}
    for depth in map(int, given.depths.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), replace(sizes, num_hidden_layers=depth))
            for bits in map(int, given.bits.split(",")):
                print(f"{depth} layers, {bits or 'raw'} ...", file=sys.stderr)
                cell = {"layers": depth, "bits": bits, **measure(Path(folder), bits, given)}
                about = cell["cold"][0]["about"]
                results |= {key: about[key] for key in ("device", "versions", "threads")}
                results["cells"].append(cell)
    return results


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    lines = [
        "# Compiling a step and a prompt",
        "",
        f"{results['device']}, {results['threads']} threads, JAX {results['versions']['jax']}; one "
        f"row of float32, a prompt of {results['prompt']:,} tokens; seconds, medians of "
        f"{results['repeats']} processes each. Cold: nothing was compiled before. Warm: a new "
        "process finds the program in the compilation cache. Loading the model is in neither.",
        "",
        "| layers | cache | program | traced | lowered | compiled | cold | warm |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in results["cells"]:
        cache = f"{cell['bits']} bits" if cell["bits"] else "raw"
        for program in ("step", "prompt"):
            stages = [f"{seconds(cell['cold'], program, stage):.2f}" for stage in STAGES]
            totals = [f"{seconds(cell[state], program, *STAGES):.2f}" for state in ("cold", "warm")]
            words = [str(cell["layers"]), cache, program, *stages, *totals]
            lines.append(f"| {' | '.join(words)} |")
    return "\n".join([*lines, ""])


def slow(results: dict[str, Any]) -> list[str]:
    """Sentences on what takes longer than it may, in cells of the full model."""
    found = []
    for cell in results["cells"]:
        if cell["layers"] < FULL_DEPTH:
            continue
        name = f"{cell['layers']} layers, {cell['bits'] or 'raw'}"
        found += [
            f"{name}: {program} takes {took:.1f} s to compile, more than {COLD_LIMIT:.0f}"
            for program in ("step", "prompt")
            if (took := seconds(cell["cold"], program, *STAGES)) > COLD_LIMIT
        ]
        both = sum(seconds(cell["warm"], program, *STAGES) for program in ("step", "prompt"))
        if both > WARM_LIMIT:
            found.append(f"{name}: a warm start takes {both:.1f} s, more than {WARM_LIMIT:.0f}")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and write both files; 1 if a full model takes longer than it may."""
    given = parse(arguments)
    if given.once:
        print(json.dumps(once(given.once, int(given.bits), given.prompt)))
        return 0
    results = run(given)
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "compiling.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "compiling.md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))
    for sentence in slow(results):
        print(sentence, file=sys.stderr)
    return int(bool(slow(results)))


if __name__ == "__main__":
    raise SystemExit(main())
