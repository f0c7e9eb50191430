"""Output for people: progress callbacks, byte counts as text, and matplotlib."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType

import jax
from jaxtyping import PyTree

ProgressCallback = Callable[[str, int, int], None]
"""A function that is called with the name of the work, the amount that is done, and the total
amount."""

_callback: ContextVar[ProgressCallback | None] = ContextVar("progress", default=None)
COMPILE_CALLBACK: ContextVar[Callable[[bool], None] | None] = ContextVar("compiles", default=None)
"""Receives JAX's compilation events, which ``generation/results.py`` forwards."""


@contextmanager
def progress_callback(
    callback: ProgressCallback, compiles: Callable[[bool], None] | None = None
) -> Iterator[None]:
    """Within this context and thread, call ``callback`` when work makes progress.

    ``compiles`` is called with True when a compilation starts and with False when it ends.
    """
    token, compile_token = _callback.set(callback), COMPILE_CALLBACK.set(compiles)
    try:
        yield
    finally:
        _callback.reset(token)
        COMPILE_CALLBACK.reset(compile_token)


def report_progress(what: str, done: int, total: int, result: PyTree = None) -> None:
    """Report progress to the current callback, if there is one.

    ``result`` has arrays to wait for first, because JAX returns arrays before they are computed.
    """
    callback = _callback.get()
    if callback is not None:
        jax.block_until_ready(result)
        callback(what, done, total)


_UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", 1)
    for kind, base in (("b", 1000), ("ib", 1024))
}


def readable_bytes(count: float) -> str:
    """Format a number of bytes in decimal units, such as ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def parse_bytes(text: str) -> int:
    """Parse a size such as ``80GiB``, ``40 GB`` or ``123B``, and return the number of bytes.

    Raises:
      ValueError: if ``text`` is not a size, or has no unit.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: give a number with B, MB, GB, MiB or GiB")
    if not match[2]:
        raise ValueError(f"{text!r} has no unit: give {text}GB or {text}B")
    return int(float(match[1]) * _UNITS[match[2]])


def pyplot() -> ModuleType:
    """Import Matplotlib's ``pyplot`` with a backend that draws into files.

    Raises:
      ValueError: if matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('plots need matplotlib: pip install "kvjax[plots]"')
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    return pyplot
