"""How far long work has come, for whoever wants to show it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

Listener = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is done, and how much there is."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Tell ``listener`` of all that is done inside, in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(what: str, done: int, total: int, behind: Any = None) -> None:
    """Say how far something has come. Where that is heard, arrays ``behind`` which it is so far are
    waited for: what is dispatched is not done."""
    listener = _listener.get()
    if listener is not None:
        jax.block_until_ready(behind)
        listener(what, done, total)
