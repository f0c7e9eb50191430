"""Output for people: progress callbacks, byte counts as text, and matplotlib."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

ProgressCallback = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

_listener: ContextVar[ProgressCallback | None] = ContextVar("listener", default=None)
COMPILE_CALLBACK: ContextVar[Callable[[bool], None] | None] = ContextVar("compiles", default=None)
"""The callback for JAX's events of compilation, which ``generation/results.py`` forwards."""


@contextmanager
def progress_callback(
    listener: ProgressCallback, compiles: Callable[[bool], None] | None = None
) -> Iterator[None]:
    """Tell ``listener`` of all that is done inside, in this thread; ``compiles``: told when a
    program begins to be compiled there, and when it has been."""
    token, other = _listener.set(listener), COMPILE_CALLBACK.set(compiles)
    try:
        yield
    finally:
        _listener.reset(token)
        COMPILE_CALLBACK.reset(other)


def report_progress(what: str, done: int, total: int, behind: Any = None) -> None:
    """Say how far something has come. Where that is heard, arrays ``behind`` which it is so far are
    waited for: what is dispatched is not done."""
    listener = _listener.get()
    if listener is not None:
        jax.block_until_ready(behind)
        listener(what, done, total)


_UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", 1)
    for kind, base in (("b", 1000), ("ib", 1024))
}


def readable_bytes(count: float) -> str:
    """Bytes in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def parse_bytes(words: str) -> int:
    """Bytes from ``80GiB``, ``40 GB`` or ``123B``.

    Raises:
      ValueError: if it is none, or has no unit.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", words.lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{words!r} is no size: give a number with B, MB, GB, MiB or GiB")
    if not found[2]:
        raise ValueError(f"{words!r} is a size without a unit: {words}GB, perhaps, or {words}B")
    return int(float(found[1]) * _UNITS[found[2]])


def pyplot() -> Any:
    """Matplotlib, drawing into files.

    Raises:
      ValueError: if it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError('a plot needs matplotlib: pip install "kvjax[plots]" installs it')
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    return pyplot
