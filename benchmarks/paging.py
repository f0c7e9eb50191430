"""What pages cost a step, and what they save: `python -m benchmarks.paging`.

Steps in a dense cache and in pages of several sizes, in turn, at equal lengths; and the bytes of
pages that several samples of a prompt have, to those of one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from benchmarks.cells import prompt_tokens
from benchmarks.checkpoint import TINY, Sizes, write_checkpoint
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from benchmarks.engine_kvjax import KvjaxEngine
from kvjax.core.plots import pyplot

LIMIT, BLOCK = 1.10, 64
CODECS: dict[str, dict[str, Any]] = {"raw": {}, "8 bits": {"bits": 8}, "4 bits": {"bits": 4}}


def policies(codec: str, pages: Sequence[int]) -> dict[str, Any]:
    """A dense cache and those in pages, of sizes that blocks divide."""
    settings = CODECS[codec]
    found: dict[str, Any] = {"dense": kvjax.policy(**settings)}
    for size in pages:
        if not settings or size % BLOCK == 0:
            found[str(size)] = kvjax.policy("paged", page_size=size, **settings)
    return found


def measure(engine: KvjaxEngine, sizes: Sizes, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a step, every cache in turn."""
    found = []
    for codec in CODECS:
        for rows in given.rows:
            print(f"{codec}, {rows} row(s) ...", file=sys.stderr)
            prompt = prompt_tokens(sizes, rows, given.prompt, 0)
            caches, token = {}, None
            for name, policy in policies(codec, given.pages).items():
                engine.policy = policy
                token, caches[name] = engine.filled(prompt, given.room)
            assert token is not None
            seconds = engine.in_turn(caches, token[:, 0], 2, given.steps, given.rounds)
            jax.clear_caches()
            dense = seconds["dense"]
            for name, each in seconds.items():
                ms = 1e3 * statistics.median(each) / given.steps
                ratio = paired_ratio(each, dense)
                found.append(
                    {"codec": codec, "rows": rows, "cache": name, "ms": ms, "ratio": ratio}
                )
    return found


def shared(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes of the pages that samples of one prompt have, after so many tokens of each."""
    found = []
    config: Any = SimpleNamespace(
        num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
        dtype="float32",
    )  # fmt: skip
    for size in given.pages:
        used, most = [], given.prompt + given.new
        for samples in (1, given.samples):
            pages = -(-most // size) + samples * -(-given.new // size)
            policy = kvjax.policy("paged", page_size=size, pages=pages)
            cache = kvjax.init_cache(config, policy, batch=1, max_len=most)
            cache = kvjax.repeat(_fed(cache, given.prompt), samples)
            cache = _fed(cache, given.new)
            kvjax.check(cache)
            used.append(kvjax.page_map(cache).pools[0].used)
        found.append({"page": size, "pages": used, "ratio": used[1] / used[0]})
    return found


def _fed(cache: Any, tokens: int) -> Any:
    numbers = jnp.zeros((cache.batch, 1, tokens, 8))
    return kvjax.advance(kvjax.append(cache, 0, numbers, numbers), tokens)


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    lines = [
        "# Pages beside a dense cache",
        "",
        f"{results['device']}, JAX {results['versions']['jax']}, float32, behind "
        f"{results['prompt']:,} tokens with room for {results['room']:,}; medians of "
        f"{results['rounds']} rounds of {results['steps']} steps, all caches in turn. The ratio is "
        "the median of the rounds'.",
        "",
        "| codec | rows | page | ms a step | to dense |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {x['codec']} | {x['rows']} | {x['cache']} | {x['ms']:.2f} | {x['ratio']:.3f} |"
            for x in results["steps_of"]
        ),
        "",
        f"Pages of {results['samples']} samples of a prompt of {results['prompt']:,} tokens, "
        f"{results['new']} new ones each, to those of one:",
        "",
        "| page | pages of one | of all | ratio |",
        "| --- | --- | --- | --- |",
        *(
            f"| {x['page']} | {x['pages'][0]} | {x['pages'][1]} | {x['ratio']:.2f} |"
            for x in results["shared"]
        ),
    ]
    return "\n".join([*lines, ""])


def draw(results: dict[str, Any], path: Path) -> None:
    """Ratios by the size of a page."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    series: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for x in results["steps_of"]:
        if x["cache"] != "dense":
            series.setdefault((x["codec"], x["rows"]), []).append((int(x["cache"]), x["ratio"]))
    for (codec, rows), points in series.items():
        axes.plot(*zip(*points, strict=True), "o-", label=f"{codec}, {rows} row(s)")
    axes.axhline(1, color="black", linewidth=1)
    axes.axhline(LIMIT, color="grey", linestyle="--", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(results["pages"], [str(size) for size in results["pages"]])
    axes.set(
        xlabel="tokens of a page", ylabel="time of a step to that of a dense cache",
        title=f"{results['device']}, JAX {results['versions']['jax']}",
    )  # fmt: skip
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paging", description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a round")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/DEVICE-jaxVERSION")
    parser.add_argument("--quick", action="store_true", help="a tiny model: a trial run")
    given = parser.parse_args(arguments)
    full = {"prompt": 1024, "room": 1536, "rows": [1, 4], "pages": [16, 64, 256, 1024],
            "samples": 8, "new": 32}  # fmt: skip
    quick = {"prompt": 64, "room": 128, "rows": [2], "pages": [16, 64], "rounds": 2, "steps": 2,
             "samples": 3, "new": 8}  # fmt: skip
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``paging.json``, ``.md`` and ``.png``; 1 if a step in pages is further than
    ``LIMIT`` from one in a dense cache."""
    given = parse(arguments)
    sizes = TINY if given.quick else Sizes()
    kept = ("prompt", "room", "rows", "pages", "rounds", "steps", "samples", "new")
    results: dict[str, Any] = {name: getattr(given, name) for name in kept}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        engine = KvjaxEngine(folder, "float32")
        results |= {key: engine.describe()[key] for key in ("device", "versions")}
        results["steps_of"] = measure(engine, sizes, given)
    results["shared"] = shared(given)
    print(markdown(results))
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "paging.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "paging.md").write_text(markdown(results))
    draw(results, out / "paging.png")
    return int(not given.quick and max(x["ratio"] for x in results["steps_of"]) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
