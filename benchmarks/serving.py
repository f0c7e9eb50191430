"""What continuous batching gains: `python -m benchmarks.serving`.

Requests of mixed lengths, in the order in which they come: through `generate` in batches of eight,
through an engine whose pages take as many bytes, with `batch_invariant=False` and without, and
through Transformers' continuous batching on the same weights, where it is installed (the extra
`oracle`). All greedy, none ends early. Then the time to the first token of a prompt whose beginning
others have had, with and without sharing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.bandwidth import cpu_name
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from benchmarks.serving_ways import (
    continuous,
    first_tokens,
    host_share,
    static,
    transformers,
    work_of,
)
from kvjax import models

TIMES, PEER, SHARED, HOST = 2.0, 1.5, 5.0, 0.1
"""Times as fast as static batches, as Transformers, and as without sharing; the host's share."""
FASTEST = "engine, batch_invariant=False"
"""The way that the others are held against."""


def markdown(results: dict[str, Any]) -> str:
    """The tables, as a page."""
    given, total = results["settings"], results["total"]
    prompt, new = given["prompt"], given["new"]
    lines = [
        f"# Continuous batching, {results['device']}, JAX {results['versions']['jax']}",
        "",
        f"{given['requests']} requests with prompts of {prompt[0]} to {prompt[1]} tokens and "
        f"{new[0]} to {new[1]} new ones ({total:,} in all), float32, a random Llama of "
        f"{given['layers']} layers; caches of {results['tokens']:,} tokens. Medians of "
        f"{len(results['ways'][FASTEST])} runs, all ways in turn.",
        "",
        f"| way | seconds | new tokens a second | {FASTEST}: times as fast |",
        "| --- | --- | --- | --- |",
    ]
    for name, seconds in results["ways"].items():
        median, ratio = statistics.median(seconds), results["ratios"].get(name)
        told = "" if ratio is None else f"{ratio:.2f}"
        lines.append(f"| {name} | {median:.1f} | {total / median:.0f} | {told} |")
    first, engine = results["first"], results["engine"]
    if results["same_texts"] is not None:
        lines += [
            "", f"Transformers {results['transformers']}: {100 * results['same_texts']:.0f} % of "
            "its texts are the engine's.",
        ]  # fmt: skip
    return "\n".join([
        *lines, "",
        f"The engines: {given['rows']} rows, pages of {given['page']}, chunks of "
        f"{given['chunk']}, {given['chunks']} a step at most. With batch_invariant=False "
        f"{engine['steps']} steps, "
        f"{engine['padding']:,} tokens of padding, {engine['preemptions']} pre-emptions; half of "
        f"the requests had their first token after {engine['first_token']:.1f} s. The host takes "
        f"{100 * results['host']:.1f} % of a step of one chunk when nothing is sent ahead.",
        "",
        f"Behind {given['shared']} tokens that others began with, and {given['own']} of its own, "
        f"the first token takes {first['shared']:.1f} ms, and {first['alone']:.1f} where nothing "
        f"is shared: {first['alone'] / first['shared']:.1f} times as long.",
        "",
    ])  # fmt: skip


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--chunks", type=int, default=16, help="of a step")
    parser.add_argument("--page", type=int, default=64)
    given = parser.parse_args(arguments)
    full = {"requests": 64, "prompt": (16, 1024), "new": (8, 256), "batch": 8, "chunk": 256,
            "shared": 512, "own": 16, "rounds": 9, "seed": 0}  # fmt: skip
    quick = {"requests": 6, "prompt": (4, 40), "new": (2, 9), "batch": 2, "chunk": 32, "rows": 3,
             "page": 16, "shared": 32, "own": 4, "rounds": 2, "runs": 1, "layers": 2}  # fmt: skip
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def measure(folder: str, sizes: Sizes, given: argparse.Namespace) -> dict[str, Any]:
    """All ways in turn, so many times."""
    lm, work = models.load(folder), work_of(sizes, given)
    lengths = [len(p) + n for p, n in zip(work.prompts, work.new, strict=True)]
    order = {
        "static batches": list(range(given.requests)),
        "static batches, sorted": np.argsort(lengths, stable=True).tolist(),
    }
    ways: dict[str, list[float]] = {}
    engine: dict[str, Any] = {}
    same, version = None, None
    for run in range(given.runs):
        print(f"run {run + 1} of {given.runs} ...", file=sys.stderr)
        exact = continuous(lm, work, given, batch_invariant=True)
        ways.setdefault("engine", []).append(exact["seconds"])
        engine = continuous(lm, work, given, batch_invariant=False)
        ways.setdefault(FASTEST, []).append(engine["seconds"])
        for name, rows in order.items():
            ways.setdefault(name, []).append(static(lm, work, given.batch, rows))
        peer = transformers(folder, work, given)
        if peer is not None:
            ways.setdefault("Transformers", []).append(peer["seconds"])
            both = zip(peer["tokens"], engine["tokens"], strict=True)
            same = sum(a == b for a, b in both) / given.requests
            version = peer["version"]
        jax.clear_caches()
    engine.pop("tokens")
    ratios = {
        name: paired_ratio(seconds, ways[FASTEST])
        for name, seconds in ways.items()
        if name != FASTEST
    }
    return {
        "ways": ways, "ratios": ratios, "engine": engine, "same_texts": same,
        "transformers": version,
        "total": work.total, "tokens": work.tokens, "host": host_share(lm, work, given),
        "first": first_tokens(lm, sizes, given),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``serving.json`` and ``.md``; 1 if one of the limits is missed."""
    given = parse(arguments)
    sizes = TINY if given.quick else Sizes(num_hidden_layers=given.layers, vocab_size=16_384)
    results: dict[str, Any] = {
        "settings": {name: value for name, value in vars(given).items() if name != "out"},
        "device": cpu_name(), "versions": {"jax": jax.__version__},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        results |= measure(folder, sizes, given)
    print(markdown(results))
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "serving.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "serving.md").write_text(markdown(results), encoding="utf-8")
    first, ratios = results["first"], results["ratios"]
    missed = [
        ratios["static batches"] < TIMES, ratios.get("Transformers", PEER) < PEER,
        first["alone"] < SHARED * first["shared"], results["host"] > HOST,
    ]  # fmt: skip
    return int(not given.quick and any(missed))


if __name__ == "__main__":
    raise SystemExit(main())
