"""Cells of a product of parts: some that have every pair of parts, and shares of the others."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

_Cell = TypeVar("_Cell", bound=Hashable)


def pairs_of(cell: Any, kinds: Iterable[tuple[str, str]]) -> frozenset[Any]:
    """The pairs that a cell has, of each of ``kinds``, two fields' names; twice the same field is
    for its parts alone. A field may be a tuple, of several parts that a cell has at once."""
    return frozenset(
        (kind, a, b)
        for kind in kinds
        for a in _parts(getattr(cell, kind[0]))
        for b in (_parts(getattr(cell, kind[1])) if kind[0] != kind[1] else (a,))
    )


def covering(every: Sequence[_Cell], pairs: Callable[[_Cell], frozenset[Any]]) -> list[_Cell]:
    """Cells that together have all pairs that any cell has: again and again the cell with most
    pairs that none of them has yet, the first of several such, or the last, as fewer will do."""
    known = {cell: pairs(cell) for cell in every}
    return min((_greedy(order, known) for order in (every, every[::-1])), key=len)


def _greedy(every: Sequence[_Cell], known: dict[_Cell, frozenset[Any]]) -> list[_Cell]:
    left, chosen = frozenset().union(*known.values()), []
    while left:
        best = max(every, key=lambda cell: len(known[cell] & left))
        chosen.append(best)
        left -= known[best]
    return chosen


def share(every: Sequence[_Cell], chosen: Iterable[_Cell], number: int, parts: int) -> list[_Cell]:
    """Of the cells that were not chosen, one of so many parts; ``number`` counts round and round,
    so that a number of commits can be given."""
    taken = {*chosen}
    return [cell for cell in every if cell not in taken][number % parts :: parts]


def _parts(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
