"""How fast this machine reads memory: the ceiling a decode step is measured against."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np


def cores() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as the platform names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def best_seconds(call: Callable[[], Any], repeats: int) -> float:
    """The shortest of `repeats` calls in seconds, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def cpu_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second read from an array of `nbytes`, by method: NumPy reductions, a thread a core.

    `nbytes` must be far beyond the last-level cache. The best of several reductions is the
    bandwidth: each is a lower bound.
    """
    array = np.ones(nbytes // 4, np.float32)
    threads = cores()
    parts = np.array_split(array, threads)
    reductions = {
        "numpy max": np.max,
        "numpy dot": lambda part: np.dot(part, part),
    }
    with ThreadPoolExecutor(threads) as pool:
        return {
            name: array.nbytes / best_seconds(lambda r=reduction: list(pool.map(r, parts)), repeats)
            for name, reduction in reductions.items()
        }


def jax_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second a jitted reduction reads from an array of `nbytes` on JAX's device."""
    import jax
    import jax.numpy as jnp

    array = jnp.ones(nbytes // 4, jnp.float32)
    found = {}
    for name, reduction in {"jax sum": jnp.sum, "jax max": jnp.max}.items():
        compiled = jax.jit(reduction).lower(array).compile()
        seconds = best_seconds(lambda c=compiled: jax.block_until_ready(c(array)), repeats)
        found[name] = array.nbytes / seconds
    return found
