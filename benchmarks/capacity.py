"""What a step costs in a large and in a small cache: `python -m benchmarks.capacity`.

After a short prompt, every codec, the ring and the host's memory with room for 1,024 and for 65,536
tokens; and a ring of 1,024 tokens behind 2,000 and behind 100,000 of them, all of which it was fed.
A dynamic cache has no capacity to speak of and is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvjax
from benchmarks.cells import prompt_tokens
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from benchmarks.engine_kvjax import KvjaxEngine
from kvjax.codecs import Float8, Integer, Rotated

LIMIT = 1.05


def policies(window: int) -> dict[str, Any]:
    """Every kind of cache, by the name it has in the tables; `window`: of rings."""
    policy, float8 = kvjax.policy, Float8()
    rotated = Rotated(Integer(4, "token", zero_point=True))
    return {
        "raw": policy(),
        "8 bits": policy(bits=8),
        "4 bits": policy(bits=4),
        "4 bits, keys, and 2, values": policy(key_bits=4, value_bits=2),
        "2 bits": policy(bits=2),
        "float8": kvjax.CachePolicy(keys=float8, values=float8),
        "4 bits, rotated": kvjax.CachePolicy(keys=rotated, values=rotated),
        "ring": policy("sliding_window", window=window),
        "ring, 4 sinks": policy("sliding_window", window=window, sinks=4),
        "ring, 4 bits": policy("sliding_window", window=window, bits=4),
        "on the host": policy("offloaded_static"),
        "on the host, 4 bits": policy("offloaded_static", bits=4),
    }


def pair(
    engine: KvjaxEngine, make: Callable[[Any], tuple[Any, Any]], sizes: Sequence[int],
    given: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds of steps in two caches in turn, and the second's to the first's."""
    made = {size: make(size) for size in sizes}
    token = made[sizes[0]][0][:, 0]
    caches = {size: cache for size, (_, cache) in made.items()}
    del made
    seconds = engine.in_turn(caches, token, 2, given.steps, given.rounds)
    # A program is memory maps, of which the system lets a process have only so many.
    jax.clear_caches()
    small, large = (seconds[size] for size in sizes)
    ms = [[1e3 * second / given.steps for second in found] for found in (small, large)]
    return {"sizes": list(sizes), "ms": ms, "ratio": paired_ratio(large, small)}


def measure(engine: KvjaxEngine, sizes: Sizes, given: argparse.Namespace) -> dict[str, Any]:
    """All pairs on one engine."""
    prompt = prompt_tokens(sizes, 1, given.prompt, 0)
    found: dict[str, Any] = {"capacity": {}, "position": {}}
    for name, policy in policies(given.window).items():
        print(f"{name} ...", file=sys.stderr)
        engine.policy = policy
        found["capacity"][name] = pair(
            engine, lambda room: engine.filled(prompt, room), given.capacities, given
        )
    text = prompt_tokens(sizes, 1, max(given.positions), 1)
    for name in ("ring", "ring, 4 sinks"):
        print(f"{name}, {max(given.positions):,} tokens ...", file=sys.stderr)
        engine.policy = policies(given.window)[name]
        room = max(given.positions) + given.steps + 2
        found["position"][name] = pair(
            engine,
            lambda length, room=room: engine.filled(text[:, :length], room),
            given.positions,
            given,
        )
    return found


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    small, large = results["capacities"]
    near, far = results["positions"]
    lines = [
        "# A step in a small and in a large cache",
        "",
        f"{results['device']}, JAX {results['versions']['jax']}, one row; medians of "
        f"{results['rounds']} rounds of {results['steps']} steps, both caches in turn. The ratio "
        f"is the median of the rounds' and may be at most {LIMIT}.",
        "",
        f"Behind {results['prompt']:,} tokens, with room for {small:,} and for {large:,}:",
        "",
    ]
    headed = {"capacity": (f"{small:,}", f"{large:,}"), "position": (f"{near:,}", f"{far:,}")}
    for kind, columns in headed.items():
        if kind == "position":
            lines += [
                "",
                f"A ring of {results['window']:,} tokens behind {near:,} and behind {far:,}, all "
                "of which went through the model, in calls of as many as the ring takes:",
                "",
            ]
        lines += [
            f"| dtype | cache | {columns[0]}: ms | {columns[1]}: ms | ratio |",
            "| --- | --- | --- | --- | --- |",
        ]
        for dtype, found in results["dtypes"].items():
            for name, row in found[kind].items():
                ms = " | ".join(f"{statistics.median(each):.2f}" for each in row["ms"])
                lines.append(f"| {dtype} | {name} | {ms} | {row['ratio']:.3f} |")
    return "\n".join([*lines, ""])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.capacity", description=__doc__)
    parser.add_argument("--dtypes", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a round")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    full = {"prompt": 100, "capacities": [1024, 65_536], "window": 1024,
            "positions": [2000, 100_000]}  # fmt: skip
    quick = {"prompt": 20, "capacities": [64, 256], "window": 32, "positions": [80, 300],
             "rounds": 2, "steps": 2}  # fmt: skip
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``capacity.json`` and ``.md``; 1 if a pair is further apart than ``LIMIT``."""
    given = parse(arguments)
    sizes = TINY if given.quick else Sizes()
    kept = ("prompt", "capacities", "window", "positions", "rounds", "steps")
    results: dict[str, Any] = {name: getattr(given, name) for name in kept}
    results["dtypes"] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        for dtype in given.dtypes.split(","):
            engine = KvjaxEngine(folder, dtype)
            results |= {key: engine.describe()[key] for key in ("device", "versions")}
            results["dtypes"][dtype] = measure(engine, sizes, given)
    print(markdown(results))
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "capacity.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "capacity.md").write_text(markdown(results), encoding="utf-8")
    ratios = [
        row["ratio"]
        for found in results["dtypes"].values()
        for rows in found.values()
        for row in rows.values()
    ]
    return int(not given.quick and float(np.max(ratios)) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
