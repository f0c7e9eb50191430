"""A text twenty times as long as a model was trained for: ``python -m benchmarks.endless``.

Held-out documents of the embedded model, joined, are fed in chunks to three caches: a ring with
sinks, a ring without, and a dense one beyond the trained length. What counts is the loss of the
last tokens, against windows of the trained length computed afresh, and the memory along the way.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import kvjax
from kvjax import models
from kvjax.models.tiny.corpus import read_parts
from kvjax.models.tiny.data import encode
from kvjax.models.tiny.evaluation import window_losses

BUCKET = 512
LIMIT = 1.10
"""How much higher than the fresh passes' the perplexity of the ring with sinks may be."""


def policies(context: int, sinks: int) -> dict[str, Any]:
    """The caches that are compared; none of the rings' distances passes ``context``."""
    return {
        f"ring, {sinks} sinks": kvjax.policy("sliding_window", window=context - sinks, sinks=sinks),
        "ring": kvjax.policy("sliding_window", window=context),
        "dense": kvjax.policy("static"),
    }


def stream_losses(
    lm: models.LanguageModel, policy: Any, tokens: np.ndarray, chunk: int
) -> tuple[np.ndarray, list[int]]:
    """Nats of each token but the first, and the bytes of the cache after every chunk."""

    @jax.jit
    def feed(params: Any, cache: Any, part: Any, following: Any) -> tuple[Any, Any]:
        logits, cache = lm.architecture.apply(params, part, cache)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[0], following)
        return losses, cache

    cache = kvjax.init_cache(lm.config, policy, batch=1, max_len=len(tokens))
    chunk = min(chunk, cache.chunk or chunk)
    losses, held = [], []
    for start in range(0, len(tokens) - 1, chunk):
        part = np.resize(tokens[start : start + chunk], chunk)
        following = np.resize(tokens[start + 1 : start + 1 + chunk], chunk)
        found, cache = feed(lm.params, cache, jnp.asarray(part)[None], jnp.asarray(following))
        losses.append(np.asarray(found)[: len(tokens) - 1 - start])
        held.append(sum(kvjax.nbytes(cache).values()))
    return np.concatenate(losses), held


def fresh_losses(
    lm: models.LanguageModel, tokens: np.ndarray, last: int, context: int, stride: int
) -> np.ndarray:
    """Nats of the last tokens, each with ``context - stride`` to ``context`` tokens before it."""
    starts = range(len(tokens) - last, len(tokens), stride)
    windows = np.stack([tokens[s - 1 - context + stride : s + stride] for s in starts])
    return window_losses(lm.architecture, lm.params, windows)[:, -stride:].reshape(-1)


def run(times: int, last: int, sinks: int, context: int | None = None) -> dict[str, Any]:
    """All figures; ``context`` in place of the trained length tries the same on a smaller scale."""
    lm = models.load()
    context = int(context or lm.config.max_position_embeddings)
    documents = read_parts()["held_out"]
    backend = lm.tokenizer.backend if lm.tokenizer else None
    assert backend is not None
    tokens = np.concatenate(encode(backend, documents))[: times * context]
    if len(tokens) < times * context:
        raise SystemExit(f"the held-out text has only {len(tokens):,} tokens")
    fresh = float(fresh_losses(lm, tokens, last, context, stride=100).mean())
    rows = {}
    for name, policy in policies(context, sinks).items():
        losses, held = stream_losses(lm, policy, tokens, chunk=128)
        whole = len(losses) // BUCKET * BUCKET
        rows[name] = {
            "last_perplexity": math.exp(losses[-last:].mean()),
            "ratio": math.exp(losses[-last:].mean() - fresh),
            "cache_bytes_first": held[0],
            "cache_bytes_last": held[-1],
            "by_bucket": [float(x) for x in losses[:whole].reshape(-1, BUCKET).mean(1)],
        }
    return {
        "context": context,
        "tokens": len(tokens),
        "last": last,
        "fresh_perplexity": math.exp(fresh),
        "bucket": BUCKET,
        "jax": jax.__version__,
        "caches": rows,
    }


def markdown(results: dict[str, Any]) -> str:
    """The figures as a Markdown page."""
    lines = [
        f"# A text of {results['tokens']:,} tokens, {results['tokens'] // results['context']} "
        f"times the trained length, JAX {results['jax']}",
        "",
        f"Perplexity of the last {results['last']:,} tokens; computed afresh, in windows of the "
        f"trained {results['context']:,} tokens, it is {results['fresh_perplexity']:.2f}.",
        "",
        "| cache | perplexity | against fresh | cache at first, MB | at last, MB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in results["caches"].items():
        lines.append(
            f"| {name} | {row['last_perplexity']:.2f} | {row['ratio']:.3f} "
            f"| {row['cache_bytes_first'] / 1e6:.2f} | {row['cache_bytes_last'] / 1e6:.2f} |"
        )
    return "\n".join([*lines, "", "![Loss along the text](endless.png)", ""])


def draw(results: dict[str, Any], path: Path) -> None:
    """Loss along the text, a line a cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    styles = ("-", "--", "-")
    for (name, row), style in zip(results["caches"].items(), styles, strict=True):
        at = (np.arange(len(row["by_bucket"])) + 0.5) * results["bucket"]
        axes.plot(at, row["by_bucket"], style, label=name)
    axes.axvline(results["context"], color="0.6", linestyle=":", label="trained length")
    axes.set(xlabel="position", ylabel="nats a token", title="Beyond the trained length")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=130)


def main() -> int:
    """Run, write ``endless.json``, ``.md`` and ``.png``; 1 if the claim does not hold."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.endless", description=__doc__)
    parser.add_argument("--times", type=int, default=20, help="lengths of the trained context")
    parser.add_argument("--last", type=int, default=2000, help="tokens that are compared")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "endless")
    given = parser.parse_args()
    results = run(given.times, given.last, given.sinks)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "endless.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (given.out / "endless.md").write_text(markdown(results), encoding="utf-8")
    draw(results, given.out / "endless.png")
    console, table = Console(), Table("cache", "perplexity", "against fresh", "bytes at last")
    for name, row in results["caches"].items():
        figures = f"{row['last_perplexity']:.2f}", f"{row['ratio']:.3f}"
        table.add_row(name, *figures, f"{row['cache_bytes_last']:,}")
    console.print(table)
    first = next(iter(results["caches"].values()))
    flat = first["cache_bytes_first"] == first["cache_bytes_last"]
    return 0 if first["ratio"] <= LIMIT and flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
