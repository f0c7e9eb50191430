"""Calls in several threads at once."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """What ``call(number)`` gives in so many threads that begin at once."""
    start = threading.Barrier(count)

    def called(number: int) -> Any:
        start.wait()
        return call(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(called, range(count)))
