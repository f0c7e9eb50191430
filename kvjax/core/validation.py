"""Checks of arguments that more than one file makes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

DONATED = (
    "the cache given was used up by an earlier call: go on with the one that it gave back, or give "
    "it a kvjax.fork next time"
)
UNLIMITED = 2**30
"""Positions of a text that nothing else limits, and those that rotary tables reach."""
MAX_DIMENSION = 2**40
"""Rows and tokens at most, of arrays whose bytes can be told."""
INT32_MAX = 2**31 - 1
"""Rows, tokens and pages at most: programs count them in int32."""


def as_python(value: Any) -> Any:
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


def short_repr(value: Any) -> str:
    """A wrong value as an error shows it: its beginning, in one line."""
    try:
        return " ".join(f"{value!r}".split())[:80]
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return "a number of thousands of digits"


def as_list(name: str, value: Any, wanted: str) -> list[Any]:
    """The entries of a list, or a ``ValueError`` that names it where it is none."""
    try:
        return list(value)
    except TypeError:
        raise ValueError(f"{name} must be {wanted}, got {short_repr(value)}") from None


def as_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an int, or a ``ValueError`` that names it and its limits."""
    value = as_python(value)
    if most is not None and isinstance(value, int) and value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {short_repr(value)}")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ValueError(
            f"{name} must be a whole number, at least {least}, got {short_repr(value)}"
        )
    return int(value)


def as_optional_int(name: str, value: Any, least: int, most: int | None = None) -> int | None:
    """``as_int`` of what may be None as well."""
    return None if value is None else as_int(name, value, least, most)


def normalize_int_field(
    settings: Any, name: str, least: int, most: int | None = None, *, optional: bool = False
) -> Any:
    """Check a field of a frozen dataclass, and keep it as Python's own whole number, or as None
    where it is ``optional``: settings are compared and hashed. Gives it back.

    Raises:
      ValueError: as of ``as_int``.
    """
    check = as_optional_int if optional else as_int
    value = check(name, getattr(settings, name), least, most)
    object.__setattr__(settings, name, value)
    return value


def as_bool(name: str, value: Any) -> bool:
    """``value`` as a bool, or a ``ValueError`` that names it where it is neither True nor False."""
    value = as_python(value)
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {short_repr(value)}, and must be True or False")
    return value


def normalize_bool_field(settings: Any, name: str) -> None:
    """``normalize_int_field`` for a field that is True or False."""
    object.__setattr__(settings, name, as_bool(name, getattr(settings, name)))


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


def check_not_traced(what: str, *arrays: Any) -> None:
    """A ``ValueError`` inside ``jit`` and its like, for what must look at the numbers."""
    if any(is_traced(array) for array in arrays):
        raise ValueError(f"{what} can't stand inside jit, vmap or scan: call it outside")


def check_not_donated(cache: Any) -> None:
    """A ``ValueError`` for a cache whose arrays were donated or deleted."""
    leaves = jax.tree.leaves(cache)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if any(x.is_deleted() for x in arrays):
        raise ValueError(DONATED)


@contextlib.contextmanager
def donation_errors(given: bool) -> Iterator[None]:
    """Raise the error of ``check_not_donated`` if another call donates the cache in between."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if given and "has been deleted" in str(error):  # JAX's words, of errors of three kinds
            raise ValueError(DONATED) from error
        raise


def check_not_symbolic(what: str, shape: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` for sizes that ``jax.export`` has left open."""
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(
            f"{what} are {list(map(str, shape))}: slots are given by numbers, so a program with a "
            "cache is of one size; export it for a chunk, feed a longer text in several and a "
            "shorter one padded, with lengths"
        )
