"""What a compiled program says of itself: the operations of its products, and its collectives."""

import re
from collections import Counter
from typing import Any

import numpy as np

from kvjax.memory import hlo
from kvjax.memory.hlo import Collective

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.-]+) (?:\(.*)?\{\s*$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.-]+) = (?P<shape>\(.*?\)|\S+) (?P<op>[\w-]+)\((?P<rest>.*)$"
)
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_BRANCHES = re.compile(
    r"(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.-]+))"
)
_TRIPS = re.compile(r'known_trip_count[^\d]*"?n"?[^\d]*(\d+)')


def collectives(compiled: Any) -> list[Collective]:
    """Those of a compiled program, each once, however often it runs."""
    return hlo.collectives(compiled.as_text())


def counted(compiled: Any) -> Counter[str]:
    """How many there are of each kind."""
    return Counter(each.kind for each in collectives(compiled))


def operations(compiled: Any) -> int:
    """Multiplications and additions of a device's matrix products: of a loop as often as it turns,
    of a choice those of the branch that has most.

    Raises:
      ValueError: if the program does not say how often a loop turns.
    """
    bodies, entry = _computations(compiled.as_text())
    known: dict[str, int] = {}

    def total(name: str) -> int:
        if name not in known:
            known[name] = sum(cost(match, shapes) for match, shapes in bodies[name])
        return known[name]

    def cost(match: re.Match[str], shapes: dict[str, str]) -> int:
        op, rest = match["op"], match["rest"]
        if op == "dot":
            return _product(match["shape"], rest, shapes)
        if op == "while":
            called, trips = _CALLED.search(rest), _TRIPS.search(rest)
            inside = total(called[1]) if called else 0
            if inside and not trips:
                raise ValueError(f"no trip count: {match[0][:200]}")
            return inside * int(trips[1]) if trips else 0
        if op == "conditional":
            names = [
                name.strip().lstrip("%")
                for several, one in _BRANCHES.findall(rest)
                for name in (several or one).split(",")
            ]
            return max((total(name) for name in names), default=0)
        called = _CALLED.search(rest) if op in ("fusion", "call") else None
        return total(called[1]) if called else 0

    return total(entry)


_Body = list[tuple[re.Match[str], dict[str, str]]]


def _computations(text: str) -> tuple[dict[str, _Body], str]:
    """The instructions of each, with the shapes of what has a name in it, and the first's name."""
    bodies: dict[str, _Body] = {}
    shapes: dict[str, str] = {}
    name = entry = ""
    for line in text.splitlines():
        if opened := _COMPUTATION.match(line):
            name, shapes = opened["name"], {}
            bodies[name] = []
            entry = name if opened["entry"] else entry
        elif name and (match := _INSTRUCTION.match(line)):
            shapes[match["name"]] = match["shape"]
            bodies[name].append((match, shapes))
    return bodies, entry


def _product(result: str, rest: str, shapes: dict[str, str]) -> int:
    """Of a dot: two for every pair of numbers that are multiplied."""
    first = rest.split(",")[0].split(")")[0].split()[-1].lstrip("%")
    sides = _ARRAY.findall(shapes[first])[0][1].split(",")
    axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
    contracted = [int(sides[int(axis)]) for axis in axes[1].split(",") if axis] if axes else []
    return 2 * _count(_ARRAY.findall(result)[0][1]) * int(np.prod(contracted))


def _count(shape: str) -> int:
    return int(np.prod([int(n) for n in shape.split(",") if n]))
