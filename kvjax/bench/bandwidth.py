"""How fast a device reads and copies its memory, the ceiling of a decode step, and how much of it
was ever in use."""

import os
import sys
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.validation import as_int

ARRAY_BYTES = 2**28
"""Of the array that is read: far more than caches of processors hold."""


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second: ``read``, the best of the reductions; ``copy``, the best of the copies, what
    is read and what is written counted; ``methods``, each by its name, of arrays of
    ``array_bytes``."""

    read: float
    copy: float
    methods: dict[str, float]
    array_bytes: int


def measure_bandwidth(array_bytes: int = ARRAY_BYTES, repeats: int = 8) -> Bandwidth:
    """Measure the default device: each method is a lower bound, so the best of them is taken.

    On a CPU, where a compiled reduction may not keep all cores busy, reductions of NumPy, a thread
    a core, are tried as well. A figure is the shortest of ``repeats`` calls.

    Raises:
      ValueError: if the array has less than 4 KiB, or ``repeats`` is less than 1.
    """
    as_int("array_bytes", array_bytes, 4096)
    as_int("repeats", repeats, 1)
    reads = jax_bandwidth(array_bytes, repeats)
    if jax.default_backend() == "cpu":
        reads |= cpu_bandwidth(array_bytes, repeats)
    copies = copy_bandwidth(array_bytes, repeats)
    return Bandwidth(max(reads.values()), max(copies.values()), reads | copies, array_bytes)


def best_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The shortest of ``repeats`` calls, after one that is not counted."""
    call()
    return min(timeit.repeat(call, number=1, repeat=repeats))


def jax_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second that a jitted reduction reads from an array, by method."""
    array = jnp.ones(nbytes // 4, jnp.float32)

    def speed(reduction: Callable[..., Any]) -> float:
        reduced = jax.jit(reduction)
        return array.nbytes / best_seconds(lambda: reduced(array).block_until_ready(), repeats)

    return {"jax sum": speed(jnp.sum), "jax max": speed(jnp.max)}


def copy_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second that jitted copies read and write, by method."""
    array = jnp.ones(nbytes // 4, jnp.float32)

    def speed(copied: Callable[..., Any]) -> float:
        # Into an array that is there: asking for new pages at every call is slower than copying.
        into = jax.jit(lambda x, old: copied(x), donate_argnums=1, keep_unused=True)
        held = jnp.zeros_like(array)

        def call() -> None:
            nonlocal held
            held = into(array, held).block_until_ready()

        return 2 * array.nbytes / best_seconds(call, repeats)

    return {"jax copy": speed(jnp.copy), "jax add": speed(lambda x: x + 1)}


def cpu_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second that reductions of NumPy read from an array, a thread a core, by method."""
    array = np.ones(nbytes // 4, np.float32)
    allowed = getattr(os, "sched_getaffinity", None)  # the cores this process may run on
    threads = len(allowed(0)) if allowed else os.cpu_count() or 1
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:

        def speed(reduction: Callable[..., Any]) -> float:
            return array.nbytes / best_seconds(lambda: list(pool.map(reduction, parts)), repeats)

        return {"numpy max": speed(np.max), "numpy dot": speed(lambda part: np.dot(part, part))}


def peak_memory() -> tuple[int | None, str]:
    """The most bytes in use since the process began, and of what: the device's memory where it
    says, otherwise the process's resident set; None where neither is told."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"]), "device"
    if sys.platform == "win32":
        return None, "nothing"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
