"""Logits to tokens: the filters of Transformers, in its order, and one draw a row.

The order is bias, repetition penalty, frequency and presence penalties, ``min_new_tokens``, what is
allowed, no n-gram twice; then, where tokens are drawn, temperature, top-k, top-p, min-p, typical-p.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import UInt

from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import is_traced
from kvjax.sampling.filters import (
    ALL_ALLOWED,
    Allowed,
    Logits,
    Ranking,
    add_bias,
    argmax,
    count_tokens,
    keep_allowed,
    keep_min_p,
    keep_new_ngrams,
    keep_top_k,
    keep_top_p,
    keep_typical,
    penalize,
    penalize_counts,
    ranked_by_k,
    ranked_by_p,
    ranked_by_typicality,
    set_at,
)
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays


def draw_filtered(
    logits: Logits, filters: Filters, settings: SamplingArrays, count: PerRow
) -> PerRow:
    """Drawn of what ``narrowed`` keeps: the largest of logits and noise. Where the largest of more
    tokens is one that is kept, it is the largest of these too: they are searched for only where
    it is not."""
    noise = _noise(settings.seeds, count, logits.shape[1])

    def searched(logits: Logits) -> PerRow:
        return argmax(apply_draw_filters(logits, filters, settings) + noise)

    if filters.mesh:  # whether all rows are fine, its devices would have to ask each other
        return searched(logits)
    warm = _scale_by_temperature(logits, settings)
    # The one's sums are those of what the other has left: only top-k is compiled in before them.
    sums, unknown = filters.top_p | filters.typical_p, filters.top_p & filters.typical_p
    if is_traced(sums):
        unknown |= filters.top_k & sums
    elif filters.top_k and sums:
        warm = keep_top_k(warm, settings.top_k)
    likely = apply_if(filters.min_p, lambda x: keep_min_p(x, settings.min_p), warm)
    token = argmax(likely + noise)
    kept: list[Any] = []
    for needed, ranked, among, limit in (
        (filters.top_k, ranked_by_k, warm, settings.top_k),
        (filters.top_p, ranked_by_p, warm, settings.top_p),
        (filters.typical_p, ranked_by_typicality, likely, settings.typical_p),
    ):
        if is_traced(needed) or needed:
            keeps = functools.partial(_keeps, ranked, among, limit)
            kept.append(cond(needed, keeps, lambda x: x >= 0, token))
    if not kept:
        return token
    if not is_traced(unknown) and unknown:
        return searched(logits)
    fine = jnp.all(jnp.stack(kept)) & ~jnp.asarray(unknown)
    return lax.cond(fine, lambda x: token, searched, logits)


def _keeps(ranked: Callable[..., Ranking], among: Logits, limit: Array, token: PerRow) -> RowMask:
    return ranked(among, limit).keeps(token)


def apply_draw_filters(logits: Logits, filters: Filters, settings: SamplingArrays) -> Logits:
    """With what else tokens that are drawn are subject to."""
    logits = _scale_by_temperature(logits, settings)
    logits = apply_if(filters.top_k, lambda x: keep_top_k(x, settings.top_k), logits)
    logits = apply_if(filters.top_p, lambda x: keep_top_p(x, settings.top_p), logits)
    logits = apply_if(filters.min_p, lambda x: keep_min_p(x, settings.min_p), logits)
    return apply_if(filters.typical_p, lambda x: keep_typical(x, settings.typical_p), logits)


def _scale_by_temperature(logits: Logits, settings: SamplingArrays) -> Logits:
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
    return argmax(logits + _noise(seeds, count, logits.shape[1]))


def _noise(seeds: UInt[Array, "batch 2"], count: PerRow, vocab: int) -> Logits:
    """Gumbel's, of each row's seed and number of its draw alone."""

    def one(seed: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
        return jax.random.gumbel(jax.random.fold_in(key, count), (vocab,), jnp.float32)

    return jax.vmap(one)(seeds, count)


def apply_if(needed: bool | Array, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """``change``, if it is needed."""
    return cond(needed, change, lambda x: x, logits)


def cond(which: bool | Array, one: Callable[..., Any], other: Callable[..., Any], x: Any) -> Any:
    """One of two ways to take: as the program is compiled, or as it runs."""
    if is_traced(which):
        return lax.cond(which, one, other, x)
    return one(x) if which else other(x)


def sample(
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    *,
    count: PerRow,
    past: TokenHistory | None = None,
    allowed: Allowed | None = None,
) -> tuple[PerRow, RowMask]:
    """Choose each row's next token, and say whether its logits were finite numbers; where they
    were not, the token means nothing.

    Args:
      logits, filters, settings: the last two as ``make_settings`` gives them.
      count: new tokens of each row so far: with its seed, all its draw depends on.
      past: each row's text so far, as far as filters go by it.
      allowed: bits of those that may be chosen; by default all.
    """
    logits = logits.astype(jnp.float32)
    # Of a hook minus infinity is no mistake: it forbids a token, as long as one is left.
    finite = jnp.isfinite(logits) if filters.hook is None else logits < jnp.inf
    finite = jnp.all(finite, axis=-1)
    logits = _apply_penalties(logits, filters, settings, count, past, allowed)
    if filters.hook is not None:
        finite &= jnp.any(logits > -jnp.inf, axis=-1)

    def some(logits: Logits) -> PerRow:
        token = draw_filtered(logits, filters, settings, count)
        if not is_traced(filters.greedy):
            return token
        return jnp.where(settings.temperature > 0, token, argmax(logits))

    return cond(filters.greedy, argmax, some, logits), finite


def filter_logits(
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    *,
    count: PerRow,
    past: TokenHistory | None = None,
    allowed: Allowed | None = None,
) -> Logits:
    """The logits that ``sample``, with the same arguments, draws from; where it is greedy, the
    largest of them is its token. What can't be drawn is at minus infinity."""
    logits = _apply_penalties(logits, filters, settings, count, past, allowed)
    return cond(
        filters.greedy, lambda x: x, lambda x: apply_draw_filters(x, filters, settings), logits
    )


def _apply_penalties(
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    count: PerRow,
    past: TokenHistory | None,
    allowed: Allowed | None,
) -> Logits:
    """With what changes the likeliest token too."""

    def bias(logits: Logits) -> Logits:
        return add_bias(logits, settings.biased, settings.bias)

    def penalty(logits: Logits) -> Logits:
        assert past is not None and past.seen is not None
        return penalize(logits, past.seen, settings.repetition_penalty)

    def penalties(logits: Logits) -> Logits:
        tokens, length = _text(past)
        counts = count_tokens(tokens, length - count, length, logits.shape[1])
        return penalize_counts(
            logits, counts, settings.frequency_penalty, settings.presence_penalty
        )

    def no_ngram(logits: Logits) -> Logits:
        return keep_new_ngrams(logits, *_text(past), settings.no_repeat_ngram_size)

    def no_end(logits: Logits) -> Logits:
        early = (count < settings.min_new_tokens)[:, None]
        return jnp.where(early, set_at(logits, settings.eos, -jnp.inf), logits)

    logits = apply_if(filters.bias, bias, logits)
    logits = apply_if(filters.repetition_penalty, penalty, logits)
    logits = apply_if(filters.counts, penalties, logits)
    logits = apply_if(filters.min_new_tokens, no_end, logits)
    if allowed is not None:
        guided = jnp.any(allowed != ALL_ALLOWED)
        logits = apply_if(guided, lambda x: keep_allowed(x, allowed), logits)
    # The last one, for it gives way to the others.
    return apply_if(filters.ngrams, no_ngram, logits)


def _text(past: TokenHistory | None) -> tuple[Array, PerRow]:
    """All tokens of the rows, and how many."""
    assert past is not None and past.tokens is not None and past.length is not None
    return past.tokens, past.length
