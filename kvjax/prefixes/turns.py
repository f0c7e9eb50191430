"""Whose the pages of a tree are: one request's after the other, whatever threads they run in."""

import contextlib
import gc
import threading
from collections.abc import Iterator

from kvjax.prefixes.lease import Lease


class Turns:
    """``lease``: the newest that the pages were lent by."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Keep other threads out of the pages: they wait for the end of this.

        Raises:
          ValueError: if a stream that has not ended holds them.
        """
        with self._lock:
            if self._lent:
                gc.collect()  # a stream that was dropped is part of a reference cycle
            if self._lent:
                raise ValueError(
                    "the prefix tree's pages are with a stream that has not ended: iterate it to "
                    "its end, or close it; a kvjax.Engine streams to many at once, and shares "
                    "prefixes too"
                )
            yield

    @property
    def _lent(self) -> bool:
        return self.lease is not None and not self.lease.settled
