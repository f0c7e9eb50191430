"""Ctrl-C while a device works: heard at once, and raised when that can be gone on from."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def held_back(heard: Callable[[], None]) -> Iterator[None]:
    """Let no interrupt out of the work inside, which would be lost half done: the first one calls
    ``heard``, and is raised behind the work; a second one is raised at once.

    Only the main thread hears of signals; elsewhere, and where a process ignores them, nothing is
    changed.
    """
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came = []

    def note(number: int, frame: object) -> None:
        came.append((number, frame))
        if len(came) > 1:
            usual(number, frame)  # type: ignore[arg-type]
        heard()

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if came:
        usual(*came[0])
