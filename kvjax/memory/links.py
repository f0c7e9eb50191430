"""What devices of a mesh exchange when a compiled program runs."""

import math
import re
from dataclasses import dataclass

from kvjax.memory.traffic import Instruction, parse

KINDS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute",
    "reduce-scatter",
)  # fmt: skip
_LIST = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTS = re.compile(r"replica_groups=\[\d+,(\d+)\]<=")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
"""How a text says which devices take part with one another: by their numbers, by how many groups
there are of how many, or by the axes of a mesh."""


@dataclass(frozen=True)
class Collective:
    """A collective: its ``kind``, the ``bytes`` that a device has after it, and how many
    ``devices`` take part with one another."""

    kind: str
    bytes: int
    devices: int

    @property
    def sent(self) -> int:
        """Bytes that a device sends, at least: of what it gives, to the others round a ring."""
        others = self.devices - 1
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.bytes
        if self.kind == "reduce-scatter":
            return others * self.bytes
        twice = 2 if self.kind == "all-reduce" else 1
        return twice * others * self.bytes // max(self.devices, 1)


def collectives(text: str, devices: int = 1) -> list[Collective]:
    """Those of a compiled program, each once, however often it runs. ``devices``: of the mesh,
    among which are those that take part where the text does not say which."""
    return [
        Collective(instruction.kind, instruction.nbytes, _together(instruction, devices))
        for computation in parse(text).computations
        for instruction in computation.instructions
        if instruction.kind in KINDS
    ]


def _together(instruction: Instruction, devices: int) -> int:
    """How many devices take part with one another."""
    said = instruction.attributes
    if found := _LIST.search(said):
        return len(found[1].split(","))
    if found := _COUNTS.search(said):
        return int(found[1])
    if found := _MESH.search(said):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", found[1]))
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", found[2])  # of an axis perhaps a part
        return math.prod(int(part or sizes[name]) for name, part in axes)
    return devices
