"""Memory bandwidth of a device, which bounds a decode step, and its peak memory use."""

import os
import sys
import timeit
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.validation import as_int

ARRAY_BYTES = 2**28
"""Default size of the array: much larger than processor caches."""


@dataclass(frozen=True)
class Bandwidth:
    """Memory bandwidth in bytes per second.

    Attributes:
      read: the fastest reduction.
      copy: the fastest copy, counting bytes read and written.
      methods: every method by name.
      array_bytes: bytes of the array.
    """

    read: float
    copy: float
    methods: dict[str, float]
    array_bytes: int


def measure_bandwidth(array_bytes: int = ARRAY_BYTES, repeats: int = 8) -> Bandwidth:
    """Measure the memory bandwidth of the default device.

    Several methods are timed, each ``repeats`` times. Every time gives a lower bound, so the
    fastest call of the fastest method is the result. On a CPU, a compiled reduction may not use
    all cores, so multithreaded NumPy reductions are tried too.

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


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The time of the fastest of ``repeats`` calls, after a warm-up call."""
    call()
    return min(timeit.repeat(call, number=1, repeat=repeats))


def jax_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes per second that jitted reductions read from an array, by method."""
    array = jnp.ones(nbytes // 4, jnp.float32)

    def speed(reduction: Callable[..., object]) -> float:
        reduced = jax.jit(reduction)
        return array.nbytes / best_seconds(lambda: reduced(array).block_until_ready(), repeats)

    return {"jax sum": speed(jnp.sum), "jax max": speed(jnp.max)}


def copy_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes per second that jitted copies read and write, by method."""
    array = jnp.ones(nbytes // 4, jnp.float32)

    def speed(copied: Callable[..., object]) -> float:
        # Donate the output, because allocating new memory pages is slower than copying.
        into = jax.jit(lambda x, old: copied(x), donate_argnums=1, keep_unused=True)
        output = jnp.zeros_like(array)

        def call() -> None:
            nonlocal output
            output = into(array, output).block_until_ready()

        return 2 * array.nbytes / best_seconds(call, repeats)

    return {"jax copy": speed(jnp.copy), "jax add": speed(lambda x: x + 1)}


def cpu_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes per second that NumPy reductions read with one thread per core, by method."""
    array = np.ones(nbytes // 4, np.float32)
    allowed = getattr(os, "sched_getaffinity", None)  # the cores this process may run on
    threads = len(allowed(0)) if allowed else os.cpu_count() or 1
    parts = np.array_split(array, threads)
    with ThreadPoolExecutor(threads) as pool:

        def speed(reduction: Callable[..., object]) -> float:
            return array.nbytes / best_seconds(lambda: list(pool.map(reduction, parts)), repeats)

        return {"numpy max": speed(np.max), "numpy dot": speed(lambda part: np.dot(part, part))}


def peak_memory() -> tuple[int | None, str]:
    """The peak bytes in use since the process started, and where they were counted.

    That is the device if it reports its peak, otherwise the process's resident set. The bytes are
    None if neither is known.
    """
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"]), "device"
    if sys.platform == "win32":
        return None, "nothing"
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "process"
