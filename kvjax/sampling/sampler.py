"""Logits to tokens: the filters of Transformers, in its order, and one draw a row.

The order is bias, repetition penalty, frequency and presence penalties, ``min_new_tokens``, what is
allowed, no n-gram twice; then, where tokens are drawn, temperature, top-k, top-p, min-p, typical-p.
"""

import jax.numpy as jnp

from kvjax.core.checks import is_traced
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.sampling.controls import Filters, Sampling
from kvjax.sampling.draws import drawn, either, narrowed, where
from kvjax.sampling.filters import (
    EVERY,
    Allowed,
    Logits,
    biased,
    counted,
    discourage,
    keep_allowed,
    keep_new_ngrams,
    likeliest,
    penalize,
    with_set,
)
from kvjax.sampling.past import Past


def sample(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: PerRow,
    past: Past | None = None,
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
    logits = _changed(logits, filters, settings, count, past, allowed)
    if filters.hook is not None:
        finite &= jnp.any(logits > -jnp.inf, axis=-1)

    def some(logits: Logits) -> PerRow:
        token = drawn(logits, filters, settings, count)
        if not is_traced(filters.greedy):
            return token
        return jnp.where(settings.temperature > 0, token, likeliest(logits))

    return either(filters.greedy, likeliest, some, logits), finite


def filter_logits(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: PerRow,
    past: Past | None = None,
    allowed: Allowed | None = None,
) -> Logits:
    """The logits that ``sample``, with the same arguments, draws from; where it is greedy, the
    largest of them is its token. What can't be drawn is at minus infinity."""
    logits = _changed(logits, filters, settings, count, past, allowed)
    return either(filters.greedy, lambda x: x, lambda x: narrowed(x, filters, settings), logits)


def _changed(
    logits: Logits, filters: Filters, settings: Sampling, count: PerRow, past: Past | None,
    allowed: Allowed | None,
) -> Logits:  # fmt: skip
    """With what changes the likeliest token too."""

    def bias(logits: Logits) -> Logits:
        return biased(logits, settings.biased, settings.bias)

    def penalty(logits: Logits) -> Logits:
        assert past is not None and past.seen is not None
        return penalize(logits, past.seen, settings.repetition_penalty)

    def penalties(logits: Logits) -> Logits:
        tokens, length = _text(past)
        counts = counted(tokens, length - count, length, logits.shape[1])
        return discourage(
            logits, counts, settings.frequency_penalty, settings.presence_penalty
        )  # fmt: skip

    def no_ngram(logits: Logits) -> Logits:
        return keep_new_ngrams(logits, *_text(past), settings.no_repeat_ngram_size)

    def no_end(logits: Logits) -> Logits:
        early = (count < settings.min_new_tokens)[:, None]
        return jnp.where(early, with_set(logits, settings.eos, -jnp.inf), logits)

    logits = where(filters.bias, bias, logits)
    logits = where(filters.repetition_penalty, penalty, logits)
    logits = where(filters.counts, penalties, logits)
    logits = where(filters.min_new_tokens, no_end, logits)
    if allowed is not None:
        guided = jnp.any(allowed != EVERY)
        logits = where(guided, lambda x: keep_allowed(x, allowed), logits)
    # The last one, for it gives way to the others.
    return where(filters.ngrams, no_ngram, logits)


def _text(past: Past | None) -> tuple[Array, PerRow]:
    """All tokens of the rows, and how many."""
    assert past is not None and past.tokens is not None and past.length is not None
    return past.tokens, past.length
