"""How the slots of a layer are divided: a raw tail and a body of blocks, and shards of a mesh."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core.array_ops import expand_over_rows, xp
from kvjax.core.typing import Cursors, PerRow, PositionPerSlot, Positions, Scalar, Slots
from kvjax.core.validation import UNLIMITED
from kvjax.layouts.layout import Layout, Region, Run
from kvjax.layouts.ring import Ring


class Shard(NamedTuple):
    """The ``index``-th of ``count`` shares of the slots; the index is traced."""

    index: Scalar
    count: int


@dataclass(frozen=True, eq=False)
class LayoutSlice:
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
        there = expand_over_rows(slots, length) + self.offset
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
            part = LayoutSlice(self.layout, self.slots, self.offset, low, high)
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


def split_slots(layout: Layout, share: Shard) -> LayoutSlice:
    """A share of the slots, as many as every other."""
    slots = layout.slots // share.count
    return LayoutSlice(layout, slots, share.index * slots)


def mask_slots(layout: Layout, share: Shard) -> LayoutSlice:
    """All slots, of which only a share is looked at, for each device has all of them."""
    each = -(-layout.slots // share.count)
    return LayoutSlice(layout, layout.slots, 0, share.index * each, (share.index + 1) * each)


@dataclass(frozen=True)
class Split:
    """The rule of sight: the query at position ``p`` sees its own block and the ``recent`` blocks
    before it raw, and everything older as its codec gives it back.

    ``layout``: the layer's, resolved. ``block``: tokens of a block. ``recent``: blocks. ``parts``,
    ``grain``: of what the body's slots and the tail's are a multiple: the body is divided among
    devices, and ``share``: the one that is looked at, None for
    the whole.

    The first tokens that a ring keeps for ever stay raw as well. A block is encoded when the first
    query that is not to see it raw comes; by then the tail has held it whole. What stands in the
    body follows from the row's length alone, and what is there too early, after a rewind, no query
    sees.
    """

    layout: Layout
    block: int
    recent: int
    parts: int = 1
    grain: int = 1
    share: Shard | None = None

    @property
    def tail(self) -> Ring:
        """Slots of the newest tokens. One block more than queries see, so that a call of a block
        overwrites nothing that its own queries see, and a block can be taken back."""
        newest = Ring((self.recent + 1) * self.block, self.layout.sinks, self.block)
        return newest.rounded(self.grain)

    @property
    def body(self) -> Any:
        """Slots of blocks."""
        whole: Layout = self.layout.in_blocks(self.block, self.recent).rounded(self.parts)
        return whole if self.share is None else split_slots(whole, self.share)

    def flushed(self, tokens: Any) -> Any:
        """Blocks that have left the tail, where the text has so many tokens."""
        return xp(tokens).maximum((tokens - 1) // self.block - self.recent, 0)

    def raw_from(self, positions: Int[Array, "..."]) -> Int[Array, "..."]:
        """The first position that queries at ``positions`` see raw."""
        return jnp.maximum(positions // self.block - self.recent, 0) * self.block

    def is_raw(self, positions: Array, raw_from: Array) -> Array:
        """Whether queries that see all from ``raw_from`` on raw see ``positions`` so."""
        return (positions >= raw_from) | (positions < self.tail.sinks)

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """The position that each of the body's slots of tokens holds, a row; -1 where it is empty,
        or holds what is no longer part of the text."""
        slots = expand_over_rows(slots, length)
        blocks = slots // self.block
        ids = self.body.positions(self.flushed(length), self.flushed(written), blocks)
        return jnp.where(ids >= 0, ids * self.block + slots % self.block, -1)

    def body_bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Lowest and highest position in so many of the body's slots; see ``Layout.bounds``."""
        low, high = self.body.bounds(self.flushed(length), start, size)
        return low * self.block, (high + 1) * self.block - 1

    def slot_of(self, positions: Positions) -> Positions:
        """Where the body has a position, counted in tokens, if it has it at all."""
        return self.body.slot_of(positions // self.block) * self.block + positions % self.block

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """How many of its newest tokens each row can forget: at least a block, for the tail still
        has what the next query sees raw, and the block that it makes leave; but no more than the
        slack of a ring that was given less."""
        kept = written - self.tail.slots + self.layout.sinks  # the tail's ring has it from here on
        blocks = -(-kept // self.block) + self.recent
        least = jnp.where(kept > 0, blocks * self.block + 1, 0)
        return jnp.minimum(jnp.maximum(length - least, 0), self.layout.rewindable(length, written))
