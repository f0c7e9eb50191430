"""Checks of arguments that more than one file makes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

USED_UP = (
    "the cache given was used up by an earlier call: go on with the one that it gave back, or give "
    "it a kvjax.fork next time"
)
UNLIMITED = 2**30
"""Positions of a text that nothing else limits, and those that rotary tables reach."""
SIZED = 2**40
"""Rows and tokens at most, of arrays whose bytes can be told."""
COUNTED = 2**31 - 1
"""Rows, tokens and pages at most: programs count them in int32."""


def plain(value: Any) -> Any:
    """A number of NumPy or JAX, or an array of one without axes, as Python's own; anything else,
    traced arrays among it, as it is."""
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray | jax.Array)
        and not is_traced(value)
        and value.ndim == 0
        and not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)  # keys of jax.random
    ):
        return value.item()
    return value


def short(value: Any) -> str:
    """A wrong value as an error shows it: its beginning, in one line."""
    try:
        return " ".join(f"{value!r}".split())[:80]
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return "a number of thousands of digits"


def listed(name: str, value: Any, wanted: str) -> list[Any]:
    """The entries of a list, or a ``ValueError`` that names it where it is none."""
    try:
        return list(value)
    except TypeError:
        raise ValueError(f"{name} must be {wanted}, got {short(value)}") from None


def whole_number(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int, or a ``ValueError`` that names it and its limits."""
    value = plain(value)
    if most is not None and isinstance(value, int) and value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {short(value)}")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(f"{name} must be a whole number, at least {least}, got {short(value)}")
    return int(value)


def whole_or_none(name: str, value: Any, least: int, most: int | None = None) -> int | None:
    """``whole_number`` of what may be None as well."""
    return None if value is None else whole_number(name, value, least, most)


def keep_whole(
    settings: Any, name: str, least: int, most: int | None = None, *, optional: bool = False
) -> Any:
    """Check a field of a frozen dataclass, and keep it as Python's own whole number, or as None
    where it is ``optional``: settings are compared and hashed. Gives it back.

    Raises:
      ValueError: as of ``whole_number``.
    """
    check = whole_or_none if optional else whole_number
    value = check(name, getattr(settings, name), least, most)
    object.__setattr__(settings, name, value)
    return value


def truth_value(name: str, value: Any) -> bool:
    """``value`` as a bool, or a ``ValueError`` that names it where it is neither True nor False."""
    value = plain(value)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {short(value)}, and must be True or False")
    return value


def keep_truth(settings: Any, name: str) -> None:
    """``keep_whole`` for a field that is True or False."""
    object.__setattr__(settings, name, truth_value(name, getattr(settings, name)))


def check_unicode(what: str, text: str) -> None:
    """Raise ``ValueError`` for a text with half a character, which has no bytes: a lone surrogate,
    as Python makes of a byte of an argument that is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{what} is not Unicode: character {error.start} is half of one, U+{ord(half):04X}"
        ) from None


def is_traced(x: Any) -> bool:
    """Whether an array's numbers are not there to be looked at: inside ``jit`` and its like."""
    return isinstance(x, Tracer)


def refuse_traced(what: str, *arrays: Any) -> None:
    """A ``ValueError`` inside ``jit`` and its like, for what must look at the numbers."""
    if any(is_traced(array) for array in arrays):
        raise ValueError(f"{what} can't stand inside jit, vmap or scan: call it outside")


def refuse_used_up(cache: Any) -> None:
    """A ``ValueError`` for a cache whose arrays were donated or deleted."""
    leaves = jax.tree.leaves(cache)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if any(x.is_deleted() for x in arrays):
        raise ValueError(USED_UP)


@contextlib.contextmanager
def given_a_cache(given: bool) -> Iterator[None]:
    """``refuse_used_up``, where another call used the cache up that the work inside was given, when
    that had looked at it already."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if given and "has been deleted" in str(error):  # JAX's words, of errors of three kinds
            raise ValueError(USED_UP) from error
        raise


def refuse_symbolic(what: str, shape: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` for sizes that ``jax.export`` has left open."""
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(
            f"{what} are {list(map(str, shape))}: slots are given by numbers, so a program with a "
            "cache is of one size; export it for a chunk, feed a longer text in several and a "
            "shorter one padded, with lengths"
        )
