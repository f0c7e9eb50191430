"""What one of several devices has of a layout."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp

from kvjax.core.checks import UNLIMITED
from kvjax.core.numbers import slots_beside
from kvjax.core.typing import Cursors, PerRow, PositionPerSlot, Positions, Scalar, Slots
from kvjax.layouts.layout import Layout, Region, Run


class Share(NamedTuple):
    """The ``index``-th of ``count`` shares of the slots; the index is traced."""

    index: Scalar
    count: int


@dataclass(frozen=True, eq=False)
class Part:
    """``slots`` slots of a layout from slot ``offset`` on, which count from 0 here. Of these, the
    ones from ``low`` on and below ``high``, slots of the whole, belong to it; the others are no
    business of its. Its methods answer what a ``Layout``'s do, of these."""

    layout: Layout
    slots: int
    offset: Scalar | int = 0
    low: Scalar | int = 0
    high: Scalar | int = UNLIMITED

    def runs(self, length: PerRow, new: int) -> list[Run]:
        found = []
        for run in self.layout.runs(length, new):
            start = run.start - self.offset
            low = jnp.maximum(run.low, self.low) - self.offset
            high = jnp.minimum(run.high, self.high) - self.offset
            found.append(Run(start, 0, self.slots, run.skip, (low, high)))
        return found

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        there = slots_beside(slots, length) + self.offset
        mine = (there >= self.low) & (there < self.high) & (there < self.layout.slots)
        return jnp.where(mine, self.layout.positions(length, written, there), -1)

    def slot_of(self, positions: Positions) -> Positions:
        return self.layout.slot_of(positions) - self.offset

    def regions(self) -> list[tuple[Region, "Part"]]:
        """What attention walks here, and the part of which it is."""
        found = []
        for region in self.layout.regions():
            low = jnp.maximum(jnp.asarray(self.low, jnp.int32), region.first)
            high = jnp.minimum(jnp.asarray(self.high, jnp.int32), region.first + region.size)
            part = Part(self.layout, self.slots, self.offset, low, high)
            # What comes first in the whole does so in every share.
            size = min(self.slots, region.first + region.size)
            found.append((Region(0, size, region.capped), part))
        return found

    def occupied(self, length: PerRow) -> Scalar:
        whole = jnp.minimum(self.layout.occupied(length), self.high)
        return jnp.clip(whole - self.offset, 0, self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        first = start + self.offset
        low, high = self.layout.bounds(length, first, size)
        return low, jnp.where((first < self.high) & (first + size > self.low), high, -1)


def shared(layout: Layout, share: Share) -> Part:
    """A share of the slots, as many as every other."""
    slots = layout.slots // share.count
    return Part(layout, slots, share.index * slots)


def divided(layout: Layout, share: Share) -> Part:
    """All slots, of which only a share is looked at, for each device has all of them."""
    each = -(-layout.slots // share.count)
    return Part(layout, layout.slots, 0, share.index * each, (share.index + 1) * each)
