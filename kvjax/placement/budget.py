"""A memory to keep to: which layers stay on the device, and which go to the host."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvjax.core.checks import keep_whole
from kvjax.placement.device import Device, check_placement
from kvjax.placement.host import Host

_BACK = 0.75
"""What part of the memory may be full once a layer has come back: the rest keeps it from being
sent away again by the next few tokens."""


class Sizes(NamedTuple):
    """Bytes of a layer: of the device where it is there, and where it is on the host (its tail),
    and of the host then; ``grows``: whether it may be enlarged."""

    device: int
    tail: int
    host: int
    grows: bool = False


@dataclass(frozen=True)
class Budget:
    """Bytes that a cache may take of the device, and where layers go that would be too much.

    A layer that moves or grows is there twice for a moment: where layers on the device may grow,
    room for the largest of them is kept free.
    """

    memory: int
    placement: Device = field(default_factory=Host)

    def __post_init__(self) -> None:
        keep_whole(self, "memory", 1)
        check_placement(self.placement)
        if not self.placement.behind_tail:
            raise ValueError(f"{self.placement!r}: layers that are too much go to the host")

    def away(self, sizes: Sequence[Sizes], out: Collection[int]) -> frozenset[int]:
        """Which layers are to be on the host, the last ones first.

        Args:
          sizes: of each layer.
          out: those that are on the host now. They come back, the first ones first, where that
            leaves a quarter of the memory free.

        Raises:
          ValueError: if the device can't hold what stays there of layers on the host.
        """
        chosen = set(out)
        while self._taken(sizes, chosen) > self.memory:
            here = [n for n, size in enumerate(sizes) if n not in chosen and _leaves(size)]
            if not here:
                fetched = " and the layers fetched ahead" if self.placement.ahead else ""
                raise ValueError(
                    f"the cache may take {self.memory:,} bytes of the device, but with every layer "
                    f"on the host its newest tokens{fetched} would take "
                    f"{self._taken(sizes, chosen):,}"
                )
            chosen.add(here[-1])
        for n in sorted(chosen):
            if n in out and self._taken(sizes, chosen - {n}) <= _BACK * self.memory:
                chosen.remove(n)
        return frozenset(chosen)

    def _taken(self, sizes: Sequence[Sizes], out: Collection[int]) -> int:
        here = [size for n, size in enumerate(sizes) if n not in out]
        there = [size for n, size in enumerate(sizes) if n in out]
        free = max((size.device for size in here if size.grows and _leaves(size)), default=0)
        fetched = ahead_bytes([(size.host, self.placement) for size in there])
        return sum(s.device for s in here) + sum(s.tail for s in there) + free + fetched


def ahead_bytes(bodies: Sequence[tuple[int, Device]]) -> int:
    """Bytes of the device that layers take which are fetched ahead, at most: of bodies with so many
    bytes, and their placements."""
    most = max((placement.ahead for _, placement in bodies), default=0)
    fetched = sorted((size for size, placement in bodies if placement.ahead), reverse=True)
    return sum(fetched[: most + 1])


def _leaves(size: Sizes) -> bool:
    """Whether the device has less of the layer when it is on the host."""
    return size.tail < size.device
