"""What pages cost a step, and what they save: `python -m benchmarks.paging`.

Steps in a dense cache and in pages of several sizes, in turn, at equal lengths; the bytes of pages
that several samples of a prompt have, to those of one; and the time to the first token of a prompt
whose beginning is in a tree of prefixes, to that of one whose is not.
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
from kvjax.core.reporting import pyplot

LIMIT, TIMES, BLOCK = 1.10, 10, 64
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
            used.append(kvjax.memory.page_map(cache).pools[0].used)
        found.append({"page": size, "pages": used, "ratio": used[1] / used[0]})
    return found


def prefixes(engine: KvjaxEngine, sizes: Sizes, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds to the first token where the prompt is known but for its last tokens, and where
    nothing of it is."""
    found, lm = [], engine.lm
    prefix = prompt_tokens(sizes, 1, given.prompt, 1)[0].tolist()
    for codec, settings in CODECS.items():
        tree = kvjax.PrefixTree(
            lm, kvjax.policy("paged", page_size=given.page, **settings),
            pages=2 * given.room // given.page, max_len=given.room, prefill_chunk=given.page,
        )  # fmt: skip
        seconds: dict[str, list[float]] = {"miss": [], "hit": []}
        for turn in range(given.rounds + 1):
            tree.clear()
            for name, times in seconds.items():
                own = prompt_tokens(sizes, 1, given.own, 2 + turn)[0].tolist()
                result = kvjax.generate(
                    lm, [prefix + own], max_new_tokens=1, eos_token_ids=(), prefix_cache=tree
                )
                known = given.prompt // given.page * given.page if name == "hit" else 0
                assert result.stats.cached_tokens == known
                times += [result.stats.prefill_seconds] if turn else []  # the first one compiles
        ms = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
        ratio = paired_ratio(seconds["miss"], seconds["hit"])
        found.append({"codec": codec, **ms, "ratio": ratio})
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
        "",
        f"Milliseconds to the first token behind a prefix of {results['prompt']:,} tokens and "
        f"{results['own']} of a prompt's own, in pages and chunks of {results['page']}:",
        "",
        "| codec | nothing known | the prefix known | times as fast |",
        "| --- | --- | --- | --- |",
        *(
            f"| {x['codec']} | {x['miss']:.1f} | {x['hit']:.1f} | {x['ratio']:.1f} |"
            for x in results["prefixes"]
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
            "samples": 8, "new": 32, "page": 256, "own": 16}  # fmt: skip
    quick = {"prompt": 64, "room": 128, "rows": [2], "pages": [16, 64], "rounds": 2, "steps": 2,
             "samples": 3, "new": 8, "page": 64, "own": 4}  # fmt: skip
    for name, value in (full | (quick if given.quick else {})).items():
        setattr(given, name, value)
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write ``paging.json``, ``.md`` and ``.png``; 1 if a step in pages is further than
    ``LIMIT`` from one in a dense cache, or a known prefix saves less than all but a ``TIMES``-th of
    the time."""
    given = parse(arguments)
    sizes = TINY if given.quick else Sizes()
    kept = ("prompt", "room", "rows", "pages", "rounds", "steps", "samples", "new", "page", "own")
    results: dict[str, Any] = {name: getattr(given, name) for name in kept}
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), sizes)
        engine = KvjaxEngine(folder, "float32")
        results |= {key: engine.describe()[key] for key in ("device", "versions")}
        results["prefixes"] = prefixes(engine, sizes, given)
        results["steps_of"] = measure(engine, sizes, given)
    results["shared"] = shared(given)
    print(markdown(results))
    out = given.out
    if out is None:
        out = Path(tempfile.mkdtemp()) if given.quick else default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "paging.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (out / "paging.md").write_text(markdown(results), encoding="utf-8")
    draw(results, out / "paging.png")
    slow = max(x["ratio"] for x in results["steps_of"]) > LIMIT
    slow |= min(x["ratio"] for x in results["prefixes"]) < TIMES
    return int(not given.quick and slow)


if __name__ == "__main__":
    raise SystemExit(main())
