"""What one of several devices has of a layout."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core.checks import UNLIMITED
from kvjax.layouts.layout import Layout, Region, Run

Counts = Int[Array, " batch"]


class Share(NamedTuple):
    """The ``index``-th of ``count`` shares of the slots; the index is traced."""

    index: Int[Array, ""]
    count: int


@dataclass(frozen=True, eq=False)
class Part:
    """``slots`` slots of a layout from slot ``offset`` on, which count from 0 here. Of these, the
    ones from ``low`` on and below ``high``, slots of the whole, belong to it; the others are no
    business of its."""

    layout: Layout
    slots: int
    offset: Int[Array, ""] | int = 0
    low: Int[Array, ""] | int = 0
    high: Int[Array, ""] | int = UNLIMITED

    def runs(self, length: Counts, new: int) -> list[Run]:
        """Where a call's tokens go, as far as they go here."""
        return [
            Run(
                run.start - self.offset, 0, self.slots, run.skip,
                (
                    jnp.maximum(run.low, self.low) - self.offset,
                    jnp.minimum(run.high, self.high) - self.offset,
                ),
            )
            for run in self.layout.runs(length, new)
        ]  # fmt: skip

    def positions(
        self, length: Counts, written: Counts, slots: Int[Array, " slots"]
    ) -> Int[Array, "batch slots"]:
        """The position that each of ``slots`` holds, a row; -1 where there is none of its."""
        there = slots + self.offset
        mine = (there >= self.low) & (there < jnp.minimum(self.high, self.layout.slots))
        return jnp.where(mine, self.layout.positions(length, written, there), -1)

    def slot_of(self, positions: Int[Array, "batch n"]) -> Int[Array, "batch n"]:
        """Where a position stands here, if it does."""
        return self.layout.slot_of(positions) - self.offset

    def regions(self) -> list[tuple[Region, "Part"]]:
        """What attention walks here, and the part of which it is."""
        found = []
        for region in self.layout.regions():
            low = jnp.maximum(self.low, region.first)
            high = jnp.minimum(self.high, region.first + region.size)
            part = Part(self.layout, self.slots, self.offset, low, high)
            # What comes first in the whole does so in every share.
            size = min(self.slots, region.first + region.size)
            found.append((Region(0, size, region.capped), part))
        return found

    def occupied(self, length: Counts) -> Int[Array, ""]:
        """Slots from the first on that may hold anything."""
        whole = jnp.minimum(self.layout.occupied(length), self.high)
        return jnp.clip(whole - self.offset, 0, self.slots)

    def bounds(
        self, length: Counts, start: Int[Array, ""] | int, size: int
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Lowest and highest position in so many slots; see ``Layout.bounds``."""
        first = start + self.offset
        low, high = self.layout.bounds(length, first, size)
        mine = (first < self.high) & (first + size > self.low)
        return low, jnp.where(mine, high, -1)


def shared(layout: Layout, share: Share) -> Part:
    """A share of the slots, as many as every other."""
    slots = layout.slots // share.count
    return Part(layout, slots, share.index * slots)


def divided(layout: Layout, share: Share) -> Part:
    """All slots, of which only a share is looked at, for each device has all of them."""
    each = -(-layout.slots // share.count)
    return Part(layout, layout.slots, 0, share.index * each, (share.index + 1) * each)
