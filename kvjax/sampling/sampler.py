"""Sampling: penalties and filters in the order of Transformers, and one draw per row.

The order is bias, repetition penalty, frequency and presence penalties, ``min_new_tokens``, allowed
tokens, and no repeated n-grams. Unless decoding is greedy, these are followed by temperature,
top-k, top-p, min-p, typical-p, and exclusion of top choices (XTC).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, UInt

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
    exclude_top_choices,
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


def sample(
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    *,
    count: PerRow,
    past: TokenHistory | None = None,
    allowed: Allowed | None = None,
) -> tuple[PerRow, RowMask]:
    """Choose the next token of each row.

    Args:
      logits: the logits of the next token.
      filters, sampling: the results of ``SamplingParams.prepare``.
      count: the number of new tokens that each row already has. The random numbers of the draw
        depend only on it and on the row's seed.
      past: the tokens of each row, if an enabled step needs them.
      allowed: the bit mask of the tokens that may be chosen; by default all.

    Returns:
      The tokens, and whether each row's logits were finite. If they were not, the row's token is
      meaningless.
    """
    logits = logits.astype(jnp.float32)
    # A hook may forbid tokens by setting their logits to -inf, if at least one token is left.
    finite = jnp.isfinite(logits) if filters.hook is None else logits < jnp.inf
    finite = jnp.all(finite, axis=-1)
    logits = _apply_penalties(logits, filters, sampling, count, past, allowed)
    if filters.hook is not None:
        finite &= jnp.any(logits > -jnp.inf, axis=-1)

    def draw_rows(logits: Logits) -> PerRow:
        token = draw_filtered(logits, filters, sampling, count)
        if not is_traced(filters.greedy):
            return token
        return jnp.where(sampling.temperature > 0, token, argmax(logits))

    return cond(filters.greedy, argmax, draw_rows, logits), finite


def filter_logits(
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    *,
    count: PerRow,
    past: TokenHistory | None = None,
    allowed: Allowed | None = None,
) -> Logits:
    """Return the logits from which ``sample`` draws or, if decoding is greedy, takes the maximum.
    Tokens that can't be drawn have minus infinity. Arguments are as for ``sample``."""
    logits = _apply_penalties(logits, filters, sampling, count, past, allowed)
    return cond(
        filters.greedy,
        lambda x: x,
        lambda x: apply_draw_filters(x, filters, sampling, count),
        logits,
    )


def draw(logits: Logits, seeds: UInt[Array, "batch 2"], count: PerRow) -> PerRow:
    """Draw one token per row, in proportion to ``exp(logits)``. Tokens with minus infinity are
    never drawn.

    The draw depends on ``logits``, ``seeds`` (low and high word) and ``count``, the index of this
    draw within the row, but not on the other rows or the platform.
    """
    return argmax(logits + _gumbel_noise(seeds, count, logits.shape[1]))


def draw_filtered(
    logits: Logits, filters: Filters, sampling: SamplingArrays, count: PerRow
) -> PerRow:
    """Draw from the filtered distribution: the maximum of logits plus Gumbel noise.

    The maximum over all tokens is computed first. If the filters keep this token, it is also the
    maximum over the tokens that they keep. Checking one token is cheaper than filtering all tokens.
    If the filters drop it, all tokens are filtered.
    """
    noise = _gumbel_noise(sampling.seeds, count, logits.shape[1])

    def draw_exactly(logits: Logits) -> PerRow:
        return argmax(apply_draw_filters(logits, filters, sampling, count) + noise)

    # A filter that sums probabilities must see only the tokens that earlier filters kept. Top-k
    # alone is applied before the shortcut. Any other combination of such filters excludes the
    # shortcut, and so does XTC, which drops likely tokens.
    sums = filters.top_p | filters.typical_p
    ruled_out = filters.xtc | (filters.top_p & filters.typical_p)
    # On a mesh, the shortcut would need a reduction over all devices.
    if filters.mesh or (not is_traced(ruled_out) and ruled_out):
        return draw_exactly(logits)
    scaled = _scale_by_temperature(logits, sampling)
    if is_traced(sums):
        ruled_out |= filters.top_k & sums
    elif filters.top_k and sums:
        scaled = keep_top_k(scaled, sampling.top_k)
    likely = apply_if(filters.min_p, lambda x: keep_min_p(x, sampling.min_p), scaled)
    token = argmax(likely + noise)
    kept: list[Array] = []
    for enabled, ranked, among, limit in (
        (filters.top_k, ranked_by_k, scaled, sampling.top_k),
        (filters.top_p, ranked_by_p, scaled, sampling.top_p),
        (filters.typical_p, ranked_by_typicality, likely, sampling.typical_p),
    ):
        if is_traced(enabled) or enabled:
            keeps = functools.partial(_keeps, ranked, among, limit)
            kept.append(cond(enabled, keeps, lambda x: x >= 0, token))
    if not kept:
        return token
    all_kept = jnp.all(jnp.stack(kept)) & ~jnp.asarray(ruled_out)
    return lax.cond(all_kept, lambda x: token, draw_exactly, logits)


def apply_draw_filters(
    logits: Logits, filters: Filters, sampling: SamplingArrays, count: PerRow
) -> Logits:
    """Apply the temperature, and the filters that greedy decoding ignores."""

    def exclude(logits: Logits) -> Logits:
        rows = _random_share(sampling.seeds, count) < sampling.xtc_probability
        return exclude_top_choices(logits, sampling.xtc_threshold, rows, sampling.eos)

    logits = _scale_by_temperature(logits, sampling)
    logits = apply_if(filters.top_k, lambda x: keep_top_k(x, sampling.top_k), logits)
    logits = apply_if(filters.top_p, lambda x: keep_top_p(x, sampling.top_p), logits)
    logits = apply_if(filters.min_p, lambda x: keep_min_p(x, sampling.min_p), logits)
    logits = apply_if(filters.typical_p, lambda x: keep_typical(x, sampling.typical_p), logits)
    return apply_if(filters.xtc, exclude, logits)


def apply_if(enabled: bool | Array, step: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """Return ``step(logits)`` if the step is enabled, otherwise ``logits``."""
    return cond(enabled, step, lambda x: x, logits)


def cond(
    predicate: bool | Array, if_true: Callable[..., Any], if_false: Callable[..., Any], operand: Any
) -> Any:
    """Call ``lax.cond`` for a traced predicate. For a Python value, only one branch is traced."""
    if is_traced(predicate):
        return lax.cond(predicate, if_true, if_false, operand)
    return if_true(operand) if predicate else if_false(operand)


def _apply_penalties(
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    count: PerRow,
    past: TokenHistory | None,
    allowed: Allowed | None,
) -> Logits:
    """Apply the steps that also affect greedy decoding."""

    def bias(logits: Logits) -> Logits:
        return add_bias(logits, sampling.biased, sampling.bias)

    def penalize_repetition(logits: Logits) -> Logits:
        assert past is not None and past.seen is not None
        return penalize(logits, past.seen, sampling.repetition_penalty)

    def penalize_frequency(logits: Logits) -> Logits:
        tokens, length = _tokens(past)
        counts = count_tokens(tokens, length - count, length, logits.shape[1])
        return penalize_counts(
            logits, counts, sampling.frequency_penalty, sampling.presence_penalty
        )

    def forbid_ngrams(logits: Logits) -> Logits:
        return keep_new_ngrams(logits, *_tokens(past), sampling.no_repeat_ngram_size)

    def forbid_end(logits: Logits) -> Logits:
        early = (count < sampling.min_new_tokens)[:, None]
        return jnp.where(early, set_at(logits, sampling.eos, -jnp.inf), logits)

    logits = apply_if(filters.bias, bias, logits)
    logits = apply_if(filters.repetition_penalty, penalize_repetition, logits)
    logits = apply_if(filters.counts, penalize_frequency, logits)
    logits = apply_if(filters.min_new_tokens, forbid_end, logits)
    if allowed is not None:
        guided = jnp.any(allowed != ALL_ALLOWED)
        logits = apply_if(guided, lambda x: keep_allowed(x, allowed), logits)
    # N-grams come last, because this step does nothing if it would leave a row without tokens.
    return apply_if(filters.ngrams, forbid_ngrams, logits)


def _scale_by_temperature(logits: Logits, sampling: SamplingArrays) -> Logits:
    """Divide by the temperature, after shifting the maximum to 0 so that nothing overflows."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    warm = sampling.temperature > 0
    return (logits - largest) / jnp.where(warm, sampling.temperature, 1)[:, None]


def _keeps(ranked: Callable[..., Ranking], among: Logits, limit: Array, token: PerRow) -> RowMask:
    return ranked(among, limit).keeps(token)


def _gumbel_noise(seeds: UInt[Array, "batch 2"], count: PerRow, vocab: int) -> Logits:
    """Compute Gumbel noise, which depends only on each row's seed and ``count``."""

    def noise(seed: Array, count: Array) -> Array:
        return jax.random.gumbel(_draw_key(seed, count), (vocab,), jnp.float32)

    return jax.vmap(noise)(seeds, count)


def _random_share(seeds: UInt[Array, "batch 2"], count: PerRow) -> Float[Array, "batch"]:
    """Return a random number from 0 to 1 per row, independent of the noise of the same draw."""

    def share(seed: Array, count: Array) -> Array:
        return jax.random.uniform(jax.random.fold_in(_draw_key(seed, count), 1), (), jnp.float32)

    return jax.vmap(share)(seeds, count)


def _draw_key(seed: Array, count: Array) -> Array:
    key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
    return jax.random.fold_in(key, count)


def _tokens(past: TokenHistory | None) -> tuple[Array, PerRow]:
    """Return all tokens of each row, and their number."""
    assert past is not None and past.tokens is not None and past.length is not None
    return past.tokens, past.length
