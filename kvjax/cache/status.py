"""What traced steps can't raise: recorded as bits of ``KVCache.status``, and raised later."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from kvjax.cache.explicit import automatic
from kvjax.cache.state import KVCache
from kvjax.cache.usable import check_arrays
from kvjax.core.checks import refuse_traced
from kvjax.core.device import fetch
from kvjax.core.errors import CacheOverflowError, NonFiniteError
from kvjax.core.numbers import bit_where
from kvjax.core.typing import Array

(
    OVERFLOW,
    NON_FINITE,
    REWOUND_TOO_FAR,
    BAD_LENGTHS,
    LOST,
    NO_SUCH_ROW,
    BAD_NUMBERS,
    OUT_OF_STEP,
    NO_SUCH_TOKEN,
    OUT_OF_PAGES,
    BAD_PAGE,
    MISSED_LAYER,
) = (1 << bit for bit in range(12))
"""Bits of ``KVCache.status``; ``LOST``: the cache was converted to a layout that keeps tokens that
it did not hold. ``BAD_PAGE``: a table names a page that is none. ``MISSED_LAYER``: a call did not
give every layer of a stack its tokens once."""

_ERRORS: dict[type[Exception], dict[int, str]] = {
    CacheOverflowError: {
        OVERFLOW: (
            "the cache holds {cache.max_len} tokens a row, and row(s) {rows} were given more than "
            "there was room for: those calls' tokens were dropped; {way}"
        ),
        OUT_OF_PAGES: (
            "the pool has no pages left for row(s) {rows}: what they were given was dropped; give "
            "the policy more pages, or others' back (kvjax.reset, kvjax.rewind, kvjax.select)"
        ),
    },
    ValueError: {
        REWOUND_TOO_FAR: (
            "row(s) {rows} were to forget more tokens than kvjax.rewindable says they can, and "
            "were left as they are"
        ),
        LOST: "row(s) {rows} had forgotten tokens that the layout they were converted to keeps",
        NO_SUCH_ROW: "row(s) {rows} were selected by a number that is no row's",
        BAD_LENGTHS: "lengths of row(s) {rows} was negative or above the tokens of its call",
        BAD_PAGE: (
            "the tables of row(s) {rows} name pages that the pool has not: what was to be written "
            "there was dropped"
        ),
        MISSED_LAYER: (
            "a call of row(s) {rows} gave some layer of a stack its tokens more than once, or "
            "never: a scan goes over each layer's number, 0 the first, once"
        ),
        NO_SUCH_TOKEN: "row(s) {rows} were given a token id that is not in the vocabulary",
        OUT_OF_STEP: (
            "append or advance was given other lengths of row(s) {rows} than the first append of "
            "its call, by which they went"
        ),
    },
    NonFiniteError: {
        BAD_NUMBERS: (
            "keys or values of row(s) {rows} are not finite numbers: a quantized cache can't hold "
            "them"
        ),
        NON_FINITE: "the logits of row(s) {rows} are not finite numbers",
    },
}
"""What ``check`` raises, the first one first."""


def note_non_finite(cache: KVCache, rows: Array) -> KVCache:
    """Record that the logits of ``rows``, bool[batch], are not finite numbers; see ``check``."""
    return replace(cache, status=cache.status | bit_where(rows, NON_FINITE))


def note_tokens(cache: KVCache, rows: Array) -> KVCache:
    """Record that ``rows``, bool[batch], were given tokens that the vocabulary has not."""
    return replace(cache, status=cache.status | bit_where(rows, NO_SUCH_TOKEN))


def check(cache: KVCache) -> None:
    """Raise what traced steps could only record.

    Raises:
      CacheOverflowError: if a row was given more tokens than it can hold.
      NonFiniteError: if the model gave logits that are not finite, or keys or values that are
        not to a quantized cache.
      ValueError: if what was traced was wrong: ``lengths``, a token, a row's number, tokens to
        forget, what a conversion was to keep; inside ``jit``.
    """
    check_arrays("kvjax.check", cache)
    refuse_traced("kvjax.check", cache.status)
    status = fetch(cache.status)
    grows = cache.grows_to is not None and cache.max_len < cache.grows_to
    limit = "rotary_len" if cache.max_len == cache.positions == cache.turned_for else "max_len"
    way = "kvjax.grow it before the step" if grows else f"start with a larger {limit}"
    for error, words in _ERRORS.items():
        for bit, sentence in words.items():
            if np.any(status & bit):
                rows = ", ".join(str(row) for row in np.flatnonzero(status & bit))
                raise error(sentence.format(cache=cache, rows=rows, way=way))


@automatic
def clear_status(cache: KVCache) -> KVCache:
    """The cache without what ``check`` would raise: when the reason has been dealt with."""
    check_arrays("kvjax.clear_status", cache)
    status = jnp.zeros_like(cache.status)
    if cache.spread is not None:
        status = cache.spread.put(status, cache.spread.of_rows)
    return replace(cache, status=status)
