"""Bytes as text: read from it, and written as it."""

import re

_UNITS = {"": 1, "b": 1} | {
    f"{letter}{kind}": base**power
    for power, letter in enumerate("kmgt", 1)
    for kind, base in (("b", 1000), ("ib", 1024))
}


def readable_bytes(count: float) -> str:
    """Bytes in decimal units: ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def parse_bytes(words: str) -> int:
    """Bytes from ``80GiB``, ``40 GB`` or ``123B``.

    Raises:
      ValueError: if it is none, or has no unit.
    """
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", words.lower())
    if not found or found[2] not in _UNITS:
        raise ValueError(f"{words!r} is no size: give a number with B, MB, GB, MiB or GiB")
    if not found[2]:
        raise ValueError(f"{words!r} is a size without a unit: {words}GB, perhaps, or {words}B")
    return int(float(found[1]) * _UNITS[found[2]])
