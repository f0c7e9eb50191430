"""Checks of arguments, and exceptions. Errors name the argument, its value and the limit."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

DONATED = (
    "the cache was used up by an earlier call: use the cache which that call returned, or pass it "
    "kvjax.fork(cache)"
)
UNLIMITED = 2**30
"""The maximum length of a sequence that has no other limit. Rotary tables have this number of
positions."""
MAX_DIMENSION = 2**40
"""The maximum batch or length for which array sizes are computed."""
INT32_MAX = 2**31 - 1
"""The maximum number of rows, tokens or pages, because programs count them in int32."""


def as_python(value: object) -> Any:
    """Convert a NumPy or JAX scalar to a Python number; return any other value unchanged.

    Traced arrays and keys of ``jax.random`` are returned unchanged, too.
    """
    if isinstance(value, np.generic) or (
        isinstance(value, np.ndarray | jax.Array)
        and not is_traced(value)
        and value.ndim == 0
        and not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
    ):
        return value.item()
    return value


def short_repr(value: object) -> str:
    """Return the first 80 characters of a value's ``repr``, on one line, for error messages."""
    try:
        return " ".join(f"{value!r}".split())[:80]
    except ValueError:  # Python limits how many digits of an int it converts
        return "a number of thousands of digits"


def as_list(name: str, value: Any, expected: str, param: str | None = None) -> list[Any]:
    """Return ``list(value)``. Raises ``ArgumentError`` if the value is not iterable.

    ``param`` is the name of the argument, if ``name`` does not end with it.
    """
    try:
        return list(value)
    except TypeError:
        raise _argument_error(name, expected, value, param) from None


def _argument_error(
    name: str, expected: str, value: object, param: str | None = None
) -> "ArgumentError":
    """Create the error for an argument. ``name`` may be a phrase that ends with the argument's
    name."""
    message = f"{name} must be {expected}, got {short_repr(value)}"
    return ArgumentError(message, param=param or name.split()[-1])


def as_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return ``value`` as an int. Raises ``ArgumentError`` if it is not an integer between the
    limits."""
    value = as_python(value)
    if most is not None and isinstance(value, int) and value > most:
        raise _argument_error(name, f"at most {most:,}", value)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise _argument_error(name, f"an integer >= {least}", value)
    return int(value)


def as_optional_int(name: str, value: object, least: int, most: int | None = None) -> int | None:
    """Like ``as_int``, but None is allowed."""
    return None if value is None else as_int(name, value, least, most)


def normalize_int_field(
    settings: object, name: str, least: int, most: int | None = None, *, optional: bool = False
) -> Any:
    """Check an integer field of a frozen dataclass, store it as a Python int, and return it.

    Fields are compared and hashed, so they must not be NumPy integers. If ``optional``, None is
    allowed.

    Raises:
      ValueError: if the field is not an integer between the limits.
    """
    check = as_optional_int if optional else as_int
    value = check(name, getattr(settings, name), least, most)
    object.__setattr__(settings, name, value)
    return value


def as_bool(name: str, value: object) -> bool:
    """Return ``value`` as a bool. Raises ``ArgumentError`` if it is neither True nor False."""
    value = as_python(value)
    if not isinstance(value, bool):
        raise _argument_error(name, "True or False", value)
    return value


def normalize_bool_field(settings: object, name: str) -> None:
    """Check a boolean field of a frozen dataclass, and store it as a Python bool."""
    object.__setattr__(settings, name, as_bool(name, getattr(settings, name)))


def check_unicode(what: str, text: str, param: str) -> None:
    """Raise ``ArgumentError`` for a string with a lone surrogate, which can't be encoded.

    Python decodes bytes of command-line arguments that are not UTF-8 to lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        raise ArgumentError(
            f"{what} is not valid Unicode: character {error.start} is a lone surrogate, "
            f"U+{surrogate:04X}",
            param=param,
        ) from None


def is_traced(x: object) -> bool:
    """Return whether ``x`` is a tracer, whose values are unknown."""
    return isinstance(x, Tracer)


def check_not_traced(what: str, *arrays: object) -> None:
    """Raise ``ValueError`` if an array is traced, as inside ``jit`` and other transformations."""
    if any(is_traced(array) for array in arrays):
        raise ValueError(f"{what} can't run inside jit, vmap or scan: call it outside")


def check_not_donated(cache: PyTree) -> None:
    """Raise ``ValueError`` for a cache whose arrays were donated or deleted."""
    leaves = jax.tree.leaves(cache)
    arrays = [x for x in leaves if isinstance(x, jax.Array) and not isinstance(x, Tracer)]
    if any(x.is_deleted() for x in arrays):
        raise ValueError(DONATED)


@contextlib.contextmanager
def donation_errors(has_cache: bool) -> Iterator[None]:
    """Turn JAX's error about a deleted array into the error of ``check_not_donated``.

    The error can still occur after that check, because another thread may donate the cache.
    ``has_cache`` says whether the caller passed a cache.
    """
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if has_cache and "has been deleted" in str(error):  # JAX's text, in three types of errors
            raise ValueError(DONATED) from error
        raise


def check_not_symbolic(what: str, shape: tuple[object, ...]) -> None:
    """Raise ``ValueError`` for the symbolic dimensions of ``jax.export``."""
    if not all(isinstance(size, int) for size in shape):
        raise ValueError(
            f"{what} are {list(map(str, shape))}, but a program with a cache has fixed sizes: "
            "export it for one chunk size, split longer texts into chunks and pad shorter ones, "
            "with lengths"
        )


class KvjaxError(Exception):
    """Base class of kvjax's exceptions.

    Example:
      ```python
      try:
          models.load("./no-such-folder")
      except kvjax.KvjaxError as error:
          print(error)
      ```
    """


class ArgumentError(KvjaxError, ValueError):
    """An argument is wrong. ``param`` is its name, and the message says what is allowed.

    Example:
      ```python
      try:
          kvjax.generate(lm, "The json module", top_k=0)
      except kvjax.ArgumentError as error:
          print(error)
      ```
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.param)


class CheckpointError(KvjaxError, ValueError):
    """A checkpoint file is missing, damaged, or uses an unsupported feature.

    The message names the file, the field and the expected value.

    Example:
      ```python
      try:
          models.load("./no-such-folder")
      except kvjax.CheckpointError as error:
          print(error)
      ```
    """


class CacheOverflowError(KvjaxError, RuntimeError):
    """A traced step appended more tokens to a row than fit in the cache. The row was not changed.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=2)
      keys = values = jnp.ones((1, 2, 3, 64))  # one token too many
      for layer in range(lm.config.num_hidden_layers):
          cache = kvjax.append(cache, layer, keys, values)
      try:
          kvjax.check(kvjax.advance(cache, 3))
      except kvjax.CacheOverflowError as error:
          print(error)
      ```
    """


class CacheMemoryError(KvjaxError, MemoryError):
    """The device or its host has too little memory for a cache.

    Example:
      ```python
      try:
          cache = kvjax.init_cache(lm.config, batch=1, max_len=64)
      except kvjax.CacheMemoryError as error:
          print(error)  # says how many bytes the cache takes
      ```
    """


class NonFiniteError(KvjaxError, ArithmeticError):
    """Logits, or keys or values for a quantized cache, are NaN or infinite.

    Example:
      ```python
      params = jax.tree.map(lambda x: x * jnp.nan, lm.params)
      try:
          kvjax.generate(lm.with_params(params), "The json module", max_new_tokens=8)
      except kvjax.NonFiniteError as error:
          print(error)
      ```
    """


class MissingCompilerError(KvjaxError, ImportError):
    """The compiler for a target device is not installed. The message says how to install it."""
