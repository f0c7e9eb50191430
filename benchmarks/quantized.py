"""Decoding with quantized caches beside a raw one: ``python -m benchmarks.quantized``.

The random checkpoint of ``benchmarks.decode``; one prompt fills a raw cache, which is converted to
each policy. Groups of steps are timed in turn, so that all policies meet the same machine, and a
policy's figure is the median over rounds of its time against raw's in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from benchmarks.cells import prompt_tokens
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint
from benchmarks.decode import default_folder
from benchmarks.engine_kvjax import KvjaxEngine
from kvjax.quality.evaluation import cache_bytes

POLICIES = {
    "raw": {},
    "bits=8": {"bits": 8},
    "bits=4": {"bits": 4},
    "key_bits=4,value_bits=2": {"key_bits": 4, "value_bits": 2},
    "bits=2": {"bits": 2},
}
REQUIRED = ("bits=8", "bits=4")
"""Policies that may not be slower than raw."""


def measure(
    engine: KvjaxEngine,
    prompt: np.ndarray,
    rounds: int,
    steps: int,
    policies: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """Milliseconds a step of each policy, round by round, and the bytes of its cache; the first
    policy is what the others are compared with."""
    tokens, full = engine.filled(prompt, prompt.shape[1] + steps + 2)
    caches = {
        name: kvjax.convert(kvjax.fork(full), kvjax.policy(**given))
        for name, given in policies.items()
    }
    first = next(iter(caches))
    del full
    held = {name: cache_bytes(cache, prompt.shape[1]) for name, cache in caches.items()}
    times: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(rounds + 1):
        order = list(caches) if turn % 2 else list(caches)[::-1]
        for name in order:
            cache, seconds, _ = engine.group(caches.pop(name), tokens[:, 0], 1, steps)
            kvjax.check(cache)
            caches[name] = kvjax.rewind(cache, steps + 1)
            if turn:  # the first round compiles
                times[name].append(1000 * seconds / steps)
    return {
        name: {
            "ms": times[name],
            "ratio": statistics.median(
                own / raw for own, raw in zip(times[name], times[first], strict=True)
            ),
            "body_bytes": held[name].body * prompt.shape[1],
            "of_bfloat16": held[name].of_bfloat16,
        }
        for name in times
    }


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    lines = [
        f"# Decoding after a prompt of {results['prompt']:,} tokens, one row",
        "",
        f"{results['device']}, JAX {results['versions']['jax']}; medians of {results['rounds']} "
        f"rounds of {results['steps']} steps.",
        "",
        "| dtype | cache | body, MB | ms a token | to raw |",
        "| --- | --- | --- | --- | --- |",
    ]
    for dtype, found in results["dtypes"].items():
        for name, row in found.items():
            lines.append(
                f"| {dtype} | {name} | {row['body_bytes'] / 1e6:.0f} "
                f"| {statistics.median(row['ms']):.1f} | {row['ratio']:.2f} |"
            )
    return "\n".join([*lines, ""])


def run(
    name: str,
    about: str | None,
    policies: Mapping[str, Mapping[str, Any]],
    page: Callable[[dict[str, Any]], str],
    arguments: Sequence[str] | None,
    *,
    dtypes: str,
    before: Callable[[bool], dict[str, Any]] = lambda quick: {},
) -> dict[str, Any]:
    """Measure policies as the command line asks, print the page, and write ``name.json`` and
    ``.md``; ``before(quick)``: what is measured once, before all else."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--dtypes", default=dtypes)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a round")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    sizes, prompt = (TINY, 300) if given.quick else (Sizes(), given.prompt)
    rounds, steps = (2, 2) if given.quick else (given.rounds, given.steps)
    results: dict[str, Any] = {"prompt": prompt, "rounds": rounds, "steps": steps, "dtypes": {}}
    results |= before(given.quick)
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        for dtype in given.dtypes.split(","):
            engine = KvjaxEngine(folder, dtype)
            described = engine.describe()
            results |= {key: described[key] for key in ("device", "versions")}
            tokens = prompt_tokens(sizes, 1, prompt, 0)
            results["dtypes"][dtype] = measure(engine, tokens, rounds, steps, policies)
    print(page(results))
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / f"{name}.md").write_text(page(results), encoding="utf-8")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``quantized.json`` and ``.md``; 1 if one of ``REQUIRED`` is slower."""
    results = run("quantized", __doc__, POLICIES, markdown, arguments, dtypes="float32,bfloat16")
    ratios = [found[name]["ratio"] for found in results["dtypes"].values() for name in REQUIRED]
    return int(max(ratios) > 1)


if __name__ == "__main__":
    raise SystemExit(main())
