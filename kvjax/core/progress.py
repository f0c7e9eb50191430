"""How far long work has come, for whoever wants to show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
HEARS_COMPILERS: ContextVar[Callable[[bool], None] | None] = ContextVar("compiles", default=None)
"""The callback for JAX's events of compilation, which ``generation/results.py`` forwards."""


@contextmanager
def heard_by(listener: Listener, compiles: Callable[[bool], None] | None = None) -> Iterator[None]:
    """Tell ``listener`` of all that is done inside, in this thread; ``compiles``: told when a
    program begins to be compiled there, and when it has been."""
    token, other = _listener.set(listener), HEARS_COMPILERS.set(compiles)
    try:
        yield
    finally:
        _listener.reset(token)
        HEARS_COMPILERS.reset(other)


def tell(what: str, done: int, total: int, behind: Any = None) -> None:
    """Say how far something has come. Where that is heard, arrays ``behind`` which it is so far are
    waited for: what is dispatched is not done."""
    listener = _listener.get()
    if listener is not None:
        jax.block_until_ready(behind)
        listener(what, done, total)
