"""What traced steps can't raise: recorded as bits of ``KVCache.status``, and raised later."""

from dataclasses import replace
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np

from kvjax.core.checks import refuse_traced
from kvjax.core.device import fetch
from kvjax.core.errors import CacheOverflowError, NonFiniteError
from kvjax.core.typing import Array, Rows

OVERFLOW = 1
"""Status bit: tokens past the capacity were dropped."""
NON_FINITE = 2
"""Status bit: the model gave logits that are not finite."""
REWOUND_TOO_FAR = 4
"""Status bit: a rewind asked for more tokens than the row holds."""
BAD_LENGTHS = 8
"""Status bit: ``lengths`` was negative or more than the tokens of its call."""
LOST = 16
"""Status bit: the cache was converted to a layout that keeps tokens it did not hold."""
NO_SUCH_ROW = 32
"""Status bit: the row was made by ``select`` from a number that is none of a row."""

BAD_NUMBERS = 64
"""Status bit: keys or values that are no finite numbers were given to a quantized cache."""


class Checked(Protocol):
    """What is asked of a ``KVCache``."""

    @property
    def status(self) -> Rows: ...
    @property
    def max_len(self) -> int: ...
    @property
    def grows_to(self) -> int | None: ...


_Cache = TypeVar("_Cache", bound=Any)


def note_non_finite(cache: _Cache, rows: Array) -> _Cache:
    """Record that the logits of ``rows``, bool[batch], are not finite numbers; see ``check``."""
    return replace(cache, status=cache.status | jnp.where(rows, NON_FINITE, 0))


def check(cache: Checked) -> None:
    """Raise what traced steps could only record.

    Raises:
      CacheOverflowError: if a row was given more tokens than it can hold, or was to be rewound
        by more than it could.
      NonFiniteError: if the model gave logits that are not finite, or keys or values that are
        not to a quantized cache.
      ValueError: if ``lengths`` was negative or more than the tokens of its call, or ``select``
        was given a number that is no row's; inside ``jit``.
    """
    refuse_traced("kvjax.check", cache.status)
    status = fetch(cache.status)

    def rows(bit: int) -> str:
        return ", ".join(str(row) for row in np.flatnonzero(status & bit))

    if np.any(status & OVERFLOW):
        grows = cache.grows_to is not None and cache.max_len < cache.grows_to
        way = "kvjax.grow it before the step" if grows else "start with a larger max_len"
        raise CacheOverflowError(
            f"the cache holds {cache.max_len} tokens a row, and row(s) {rows(OVERFLOW)} were given "
            f"more than there was room for: those calls' tokens were dropped; {way}"
        )
    if np.any(status & REWOUND_TOO_FAR):
        raise CacheOverflowError(
            f"row(s) {rows(REWOUND_TOO_FAR)} were to forget more tokens than kvjax.rewindable says "
            "they can, and were left as they are"
        )
    if np.any(status & LOST):
        raise CacheOverflowError(
            f"row(s) {rows(LOST)} had forgotten tokens that the layout they were converted to keeps"
        )
    if np.any(status & NO_SUCH_ROW):
        raise ValueError(f"row(s) {rows(NO_SUCH_ROW)} were selected by a number that is no row's")
    if np.any(status & BAD_LENGTHS):
        raise ValueError(
            f"lengths of row(s) {rows(BAD_LENGTHS)} was negative or above the tokens of its call"
        )
    if np.any(status & BAD_NUMBERS):
        raise NonFiniteError(
            f"keys or values of row(s) {rows(BAD_NUMBERS)} are not finite numbers: a quantized "
            "cache can't hold them"
        )
    if np.any(status & NON_FINITE):
        raise NonFiniteError(f"the logits of row(s) {rows(NON_FINITE)} are not finite numbers")


def clear_status(cache: _Cache) -> _Cache:
    """The cache without what ``check`` would raise: when the reason has been dealt with."""
    status = jnp.zeros_like(cache.status)
    if cache.spread is not None:
        status = cache.spread.put(status, cache.spread.of_rows)
    return replace(cache, status=status)
