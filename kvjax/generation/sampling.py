"""Logits to tokens: the filters of Transformers, in its order, and one draw a row.

The order is bias, repetition penalty, frequency and presence penalties, ``min_new_tokens``, what is
allowed, no n-gram twice; then, where tokens are drawn, temperature, top-k, top-p, min-p, typical-p.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt

from kvjax.core.checks import is_traced
from kvjax.core.trees import state
from kvjax.core.typing import Rows, SomeRows
from kvjax.generation.filters import (
    EVERY,
    Allowed,
    Logits,
    Ranking,
    biased,
    counted,
    discourage,
    keep_allowed,
    keep_min_p,
    keep_new_ngrams,
    keep_top_k,
    keep_top_p,
    keep_typical,
    likeliest,
    penalize,
    ranked_by_k,
    ranked_by_p,
    ranked_by_typicality,
)
from kvjax.generation.past import LogitsHook, Past

NO_TOKEN = np.int32(2**31 - 1)


@dataclass(frozen=True)
class Filters:
    """Which steps of ``sample`` there are: compiled in, hashable, as a static argument of ``jit``;
    or taken as the program runs, where they are traced (``Sampling.filters``). ``counts``: the
    frequency and presence penalties; ``ngrams``: ``no_repeat_ngram_size``; ``hook``: a user's own,
    that comes before all of them (``Past.hooked``)."""

    greedy: bool | Array = True
    top_k: bool | Array = False
    top_p: bool | Array = False
    min_p: bool | Array = False
    typical_p: bool | Array = False
    repetition_penalty: bool | Array = False
    counts: bool | Array = False
    ngrams: bool | Array = False
    min_new_tokens: bool | Array = False
    bias: bool | Array = False
    hook: LogitsHook | None = None

    @property
    def marks(self) -> bool:
        """Whether they ask which tokens a row has, compiled in."""
        return bool(self.repetition_penalty)

    @property
    def whole(self) -> bool:
        """Whether they ask for all of a row's tokens, in their order."""
        return bool(self.counts) or bool(self.ngrams) or self.hook is not None


@state
class Sampling:
    """The numbers of ``sample``, traced, so that a new value compiles nothing: [batch] each, one a
    row. A row that a filter is not for has a number with which it changes nothing.

    ``seeds``: uint32[batch, 2], low and high word. ``eos``: int32[batch, n], padded with a number
    that is no token's. ``biased``, ``bias``: int32 and float32[batch, m], tokens, padded so, and
    what is added to their logits.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    repetition_penalty: Array
    frequency_penalty: Array
    presence_penalty: Array
    no_repeat_ngram_size: Array
    min_new_tokens: Array
    seeds: Array
    eos: Array
    biased: Array
    bias: Array

    @property
    def filters(self) -> Filters:
        """Those that some row needs, as truth values."""
        return Filters(
            greedy=jnp.all(self.temperature == 0),
            top_k=jnp.any(self.top_k < NO_TOKEN),
            top_p=jnp.any(self.top_p < 1),
            min_p=jnp.any(self.min_p > 0),
            typical_p=jnp.any(self.typical_p < 1),
            repetition_penalty=jnp.any(self.repetition_penalty != 1),
            counts=jnp.any((self.frequency_penalty != 0) | (self.presence_penalty != 0)),
            ngrams=jnp.any(self.no_repeat_ngram_size > 0),
            min_new_tokens=jnp.any(self.min_new_tokens > 0),
            bias=jnp.any(self.biased < NO_TOKEN),
        )


def sample(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: Rows,
    past: Past | None = None,
    allowed: Allowed | None = None,
) -> tuple[Rows, SomeRows]:
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

    def drawn(logits: Logits) -> Rows:
        token = _drawn(logits, filters, settings, count)
        if not is_traced(filters.greedy):
            return token
        return jnp.where(settings.temperature > 0, token, likeliest(logits))

    return _either(filters.greedy, likeliest, drawn, logits), finite


def filter_logits(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: Rows,
    past: Past | None = None,
    allowed: Allowed | None = None,
) -> Logits:
    """The logits that ``sample``, with the same arguments, draws from; where it is greedy, the
    largest of them is its token. What can't be drawn is at minus infinity."""
    logits = _changed(logits, filters, settings, count, past, allowed)
    return _either(filters.greedy, lambda x: x, lambda x: _narrowed(x, filters, settings), logits)


def _changed(
    logits: Logits, filters: Filters, settings: Sampling, count: Rows, past: Past | None,
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
        rows = jnp.arange(logits.shape[0])[:, None]
        masked = logits.at[rows, settings.eos].set(-jnp.inf, mode="drop")
        return jnp.where(early, masked, logits)

    logits = _where(filters.bias, bias, logits)
    logits = _where(filters.repetition_penalty, penalty, logits)
    logits = _where(filters.counts, penalties, logits)
    logits = _where(filters.min_new_tokens, no_end, logits)
    if allowed is not None:
        guided = jnp.any(allowed != EVERY)
        logits = _where(guided, lambda x: keep_allowed(x, allowed), logits)
    # The last one, for it gives way to the others.
    return _where(filters.ngrams, no_ngram, logits)


def _drawn(logits: Logits, filters: Filters, settings: Sampling, count: Rows) -> Rows:
    """Drawn of what ``_narrowed`` keeps. What is drawn of more tokens, and is among those, is what
    would be drawn of them: they are looked for only where it is not."""
    noise = _noise(settings.seeds, count, logits.shape[1])

    def searched(logits: Logits) -> Rows:
        return likeliest(_narrowed(logits, filters, settings) + noise)

    def looked(logits: Logits) -> Rows:
        warm = _warmed(logits, settings)
        # The other's sums are those of what top-k has left.
        sums = filters.top_p | filters.typical_p
        warm = _where(filters.top_k & sums, lambda x: keep_top_k(x, settings.top_k), warm)
        likely = _where(filters.min_p, lambda x: keep_min_p(x, settings.min_p), warm)
        token = likeliest(likely + noise)
        kept: list[Array] = []
        for needed, ranked, among, limit in (
            (filters.top_k, ranked_by_k, warm, settings.top_k),
            (filters.top_p, ranked_by_p, warm, settings.top_p),
            (filters.typical_p, ranked_by_typicality, likely, settings.typical_p),
        ):
            if is_traced(needed) or needed:
                keeps = functools.partial(_keeps, ranked, among, limit)
                kept.append(_either(needed, keeps, lambda x: x >= 0, token))
        if not kept:
            return token
        return lax.cond(jnp.all(jnp.stack(kept)), lambda x: token, searched, logits)

    # Typical-p sums what top-p has left.
    return _either(filters.top_p & filters.typical_p, searched, looked, logits)


def _keeps(ranked: Callable[..., Ranking], among: Logits, limit: Array, token: Rows) -> SomeRows:
    return ranked(among, limit).keeps(token)


def _narrowed(logits: Logits, filters: Filters, settings: Sampling) -> Logits:
    """With what else tokens that are drawn are subject to."""
    logits = _warmed(logits, settings)
    logits = _where(filters.top_k, lambda x: keep_top_k(x, settings.top_k), logits)
    logits = _where(filters.top_p, lambda x: keep_top_p(x, settings.top_p), logits)
    logits = _where(filters.min_p, lambda x: keep_min_p(x, settings.min_p), logits)
    return _where(filters.typical_p, lambda x: keep_typical(x, settings.typical_p), logits)


def _warmed(logits: Logits, settings: Sampling) -> Logits:
    """Divided by the temperature. The largest is moved to 0 first, so that none can make it
    overflow."""
    largest = jnp.max(logits, axis=-1, keepdims=True)
    warm = settings.temperature > 0
    return (logits - largest) / jnp.where(warm, settings.temperature, 1)[:, None]


def _text(past: Past | None) -> tuple[Array, Rows]:
    """All tokens of the rows, and how many."""
    assert past is not None and past.tokens is not None and past.length is not None
    return past.tokens, past.length


def _where(needed: bool | Array, change: Callable[[Logits], Logits], logits: Logits) -> Logits:
    """``change``, if it is needed."""
    return _either(needed, change, lambda x: x, logits)


def _either(which: bool | Array, one: Callable[..., Any], other: Callable[..., Any], x: Any) -> Any:
    """One of two ways to take: as the program is compiled, or as it runs."""
    if is_traced(which):
        return lax.cond(which, one, other, x)
    return one(x) if which else other(x)


def draw(logits: Logits, seeds: UInt[Array, "batch 2"], count: Rows) -> Rows:
    """Draw one token a row, in proportion to ``exp(logits)``; never one at minus infinity.

    Equal ``seeds`` (low and high word) and ``count``, the row's how-manieth draw this is, draw
    equally, in any batch and on any platform.
    """
    return likeliest(logits + _noise(seeds, count, logits.shape[1]))


def _noise(seeds: UInt[Array, "batch 2"], count: Rows, vocab: int) -> Logits:
    """Gumbel's, of each row's seed and number of its draw alone."""

    def one(seed: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
        return jax.random.gumbel(jax.random.fold_in(key, count), (vocab,), jnp.float32)

    return jax.vmap(one)(seeds, count)
