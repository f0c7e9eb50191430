"""The memory of this process, and how far it rose since a mark."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")


def _status(field: str) -> int | None:
    if not STATUS.exists():
        return None
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    return None


def release() -> None:
    """Collect garbage and give freed pages back, so that the next mark starts low."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def mark_peak() -> bool:
    """Start the resident set's high-water mark afresh; false where the system can't."""
    try:
        # 5 resets only the high-water mark: page tables stay as they are.
        CLEAR_REFS.write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The most bytes resident since `mark_peak`, or since the process began where that failed."""
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
