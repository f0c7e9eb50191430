"""One draw a row, of what filters keep: of these alone, or looked up among them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, UInt

from kvjax.core.checks import is_traced
from kvjax.core.typing import PerRow, RowMask
from kvjax.sampling.controls import Filters, Sampling
from kvjax.sampling.filters import (
    Logits,
    Ranking,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    likeliest,
    ranked_by_k,
    ranked_by_p,
    ranked_by_typicality,
)


def drawn(logits: Logits, filters: Filters, settings: Sampling, count: PerRow) -> PerRow:
    """Drawn of what ``narrowed`` keeps: the largest of logits and noise. Where the largest of more
    tokens is one that is kept, it is the largest of these too: they are searched for only where
    it is not."""
    noise = _noise(settings.seeds, count, logits.shape[1])

    def searched(logits: Logits) -> PerRow:
        return likeliest(narrowed(logits, filters, settings) + noise)

    if filters.mesh:  # whether all rows are fine, its devices would have to ask each other
        return searched(logits)
    warm = _warmed(logits, settings)
    # The one's sums are those of what the other has left: only top-k is compiled in before them.
    sums, unknown = filters.top_p | filters.typical_p, filters.top_p & filters.typical_p
    if is_traced(sums):
        unknown |= filters.top_k & sums
    elif filters.top_k and sums:
        warm = keep_top_k(warm, settings.top_k)
    likely = where(filters.min_p, lambda x: keep_min_p(x, settings.min_p), warm)
    token = likeliest(likely + noise)
    kept: list[Any] = []
    for needed, ranked, among, limit in (
        (filters.top_k, ranked_by_k, warm, settings.top_k),
        (filters.top_p, ranked_by_p, warm, settings.top_p),
        (filters.typical_p, ranked_by_typicality, likely, settings.typical_p),
    ):
        if is_traced(needed) or needed:
            keeps = functools.partial(_keeps, ranked, among, limit)
            kept.append(either(needed, keeps, lambda x: x >= 0, token))
    if not kept:
        return token
    if not is_traced(unknown) and unknown:
        return searched(logits)
    fine = jnp.all(jnp.stack(kept)) & ~jnp.asarray(unknown)
    return lax.cond(fine, lambda x: token, searched, logits)


def _keeps(ranked: Callable[..., Ranking], among: Logits, limit: Array, token: PerRow) -> RowMask:
    return ranked(among, limit).keeps(token)


def narrowed(logits: Logits, filters: Filters, settings: Sampling) -> Logits:
    """With what else tokens that are drawn are subject to."""
    logits = _warmed(logits, settings)
    logits = where(filters.top_k, lambda x: keep_top_k(x, settings.top_k), logits)
    logits = where(filters.top_p, lambda x: keep_top_p(x, settings.top_p), logits)
    logits = where(filters.min_p, lambda x: keep_min_p(x, settings.min_p), logits)
    return where(filters.typical_p, lambda x: keep_typical(x, settings.typical_p), logits)


def _warmed(logits: Logits, settings: Sampling) -> Logits:
    """Divided by the temperature. The largest is moved to 0 first, so that none can make it
    overflow."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    warm = settings.temperature > 0
    return (logits - largest) / jnp.where(warm, settings.temperature, 1)[:, None]


def draw(logits: Logits, seeds: UInt[Array, "batch 2"], count: PerRow) -> PerRow:
    """Draw one token a row, in proportion to ``exp(logits)``; never one at minus infinity.

    Equal ``seeds`` (low and high word) and ``count``, the row's how-manieth draw this is, draw
    equally, in any batch and on any platform.
    """
    return likeliest(logits + _noise(seeds, count, logits.shape[1]))


def _noise(seeds: UInt[Array, "batch 2"], count: PerRow, vocab: int) -> Logits:
    """Gumbel's, of each row's seed and number of its draw alone."""

    def one(seed: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
        return jax.random.gumbel(jax.random.fold_in(key, count), (vocab,), jnp.float32)

    return jax.vmap(one)(seeds, count)


def where(needed: bool | Array, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """``change``, if it is needed."""
    return either(needed, change, lambda x: x, logits)


def either(which: bool | Array, one: Callable[..., Any], other: Callable[..., Any], x: Any) -> Any:
    """One of two ways to take: as the program is compiled, or as it runs."""
    if is_traced(which):
        return lax.cond(which, one, other, x)
    return one(x) if which else other(x)
