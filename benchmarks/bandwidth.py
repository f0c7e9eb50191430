"""How fast this machine reads memory: the ceiling a decode step is measured against."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cores() -> int:
    """The cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as the platform names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def cpu_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second read from an array of `nbytes`, by method: NumPy reductions, a thread a core.

    `nbytes` must be far beyond the last-level cache. The best of several reductions is the
    bandwidth: each is a lower bound.
    """
    from kvjax import bench  # an engine without JAX asks this file for its processor's name

    return bench.cpu_bandwidth(nbytes, repeats)


def jax_bandwidth(nbytes: int, repeats: int = 8) -> dict[str, float]:
    """Bytes a second a jitted reduction reads from an array of `nbytes` on JAX's device."""
    from kvjax import bench

    return bench.jax_bandwidth(nbytes, repeats)
