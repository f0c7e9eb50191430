"""Division of a layer's slots into a raw tail and a body of blocks, and among devices."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core.array_ops import expand_over_rows, xp
from kvjax.core.typing import Cursors, PerRow, PositionPerSlot, Positions, Scalar, Slots
from kvjax.core.validation import UNLIMITED
from kvjax.layouts.layout import Integers, Layout, Region, Run
from kvjax.layouts.ring import Ring


class Shard(NamedTuple):
    """The shard with the index ``index`` among ``count`` equal shards of the slots. The index is
    traced."""

    index: Scalar
    count: int


@dataclass(frozen=True, eq=False)
class LayoutSlice:
    """A range of a layout's slots, with the methods of `Layout`.

    It has ``slots`` slots. Its slot 0 is the slot ``offset`` of the whole layout. Only slots in
    ``[low, high)`` of the whole layout belong to the slice. The others are empty and are not
    written.
    """

    layout: Layout
    slots: int
    offset: Scalar | int = 0
    low: Scalar | int = 0
    high: Scalar | int = UNLIMITED

    def runs(self, length: PerRow, new: int) -> list[Run]:
        runs = []
        for run in self.layout.runs(length, new):
            start = run.start - self.offset
            low = jnp.maximum(run.low, self.low) - self.offset
            high = jnp.minimum(run.high, self.high) - self.offset
            runs.append(Run(start, 0, self.slots, run.skip, (low, high)))
        return runs

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        whole = expand_over_rows(slots, length) + self.offset
        inside = (whole >= self.low) & (whole < self.high) & (whole < self.layout.slots)
        return jnp.where(inside, self.layout.positions(length, written, whole), -1)

    def slot_of(self, positions: Positions) -> Positions:
        return self.layout.slot_of(positions) - self.offset

    def region_layouts(self) -> list[tuple[Region, "LayoutSlice"]]:
        """Return the regions of the layout, each with a slice of the region's slots that are also
        in this slice."""
        parts = []
        for region in self.layout.regions():
            low = jnp.maximum(jnp.asarray(self.low, jnp.int32), region.first)
            high = jnp.minimum(jnp.asarray(self.high, jnp.int32), region.first + region.size)
            part = LayoutSlice(self.layout, self.slots, self.offset, low, high)
            # Regions keep their order in every shard.
            size = min(self.slots, region.first + region.size)
            parts.append((Region(0, size, region.capped), part))
        return parts

    def occupied(self, length: PerRow) -> Scalar:
        whole = jnp.minimum(self.layout.occupied(length), self.high)
        return jnp.clip(whole - self.offset, 0, self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        first = start + self.offset
        low, high = self.layout.bounds(length, first, size)
        return low, jnp.where((first < self.high) & (first + size > self.low), high, -1)


def split_slots(layout: Layout, shard: Shard) -> LayoutSlice:
    """Return the slots of one shard, if each device stores only its own slots."""
    slots = layout.slots // shard.count
    return LayoutSlice(layout, slots, shard.index * slots)


def mask_slots(layout: Layout, shard: Shard) -> LayoutSlice:
    """Return the slots of one shard, if every device stores all slots."""
    slots = -(-layout.slots // shard.count)
    return LayoutSlice(layout, layout.slots, 0, shard.index * slots, (shard.index + 1) * slots)


@dataclass(frozen=True)
class Split:
    """The rule of sight, which divides a layer into a raw tail and a body of encoded blocks.

    The query at position ``p`` sees its own block and the ``recent`` blocks before it raw, and
    everything older through the codec. The first tokens stay raw as well: the layout's sinks, or
    ``sinks`` of them in a layout that keeps all tokens.

    A block is encoded when the first query arrives that must not see it raw. At this point the
    whole block is still in the tail. Which blocks are in the body depends only on the row's length.
    After a rewind, the body may have a block that should not be in it yet, but no query sees it
    there.

    ``layout`` is the layer's resolved layout. ``block`` is the number of tokens per block. The
    number of slots is a multiple of ``parts`` in the body, and a multiple of ``grain`` in the tail.
    ``shard`` is the shard of the body that a device stores; None for the whole body.
    """

    layout: Layout
    block: int
    recent: int
    parts: int = 1
    grain: int = 1
    shard: Shard | None = None
    sinks: int = 0

    @property
    def tail(self) -> Ring:
        """The layout of the newest tokens. It has one more block than queries see, so that a call
        of one block overwrites nothing that its own queries see, and one block can be rewound."""
        sinks = self.sinks if self.layout.window is None else self.layout.sinks
        newest = Ring((self.recent + 1) * self.block, sinks, self.block)
        return newest.rounded(self.grain)

    @property
    def body(self) -> Any:
        """The layout of the blocks, or a slice of it if there is a shard."""
        whole: Layout = self.layout.in_blocks(self.block, self.recent).rounded(self.parts)
        return whole if self.shard is None else split_slots(whole, self.shard)

    def flushed(self, tokens: Integers) -> Integers:
        """Return the number of blocks that have left the tail of a row that has ``tokens``
        tokens."""
        return xp(tokens).maximum((tokens - 1) // self.block - self.recent, 0)

    def raw_from(self, positions: Int[Array, "..."]) -> Int[Array, "..."]:
        """Return the first position, apart from sinks, that queries at ``positions`` see raw."""
        return jnp.maximum(positions // self.block - self.recent, 0) * self.block

    def is_raw(self, positions: Array, raw_from: Array) -> Array:
        """Return whether queries see ``positions`` raw. ``raw_from`` is the result of the method
        ``raw_from`` for the queries."""
        return (positions >= raw_from) | (positions < self.tail.sinks)

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """Return `Layout.positions` of the body. A slot here is a token instead of a block."""
        slots = expand_over_rows(slots, length)
        blocks = slots // self.block
        ids = self.body.positions(self.flushed(length), self.flushed(written), blocks)
        return jnp.where(ids >= 0, ids * self.block + slots % self.block, -1)

    def body_bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Return `Layout.bounds` of blocks of the body, in tokens."""
        low, high = self.body.bounds(self.flushed(length), start, size)
        return low * self.block, (high + 1) * self.block - 1

    def slot_of(self, positions: Positions) -> Positions:
        """Return `Layout.slot_of` of the body. A slot here is a token instead of a block."""
        return self.body.slot_of(positions // self.block) * self.block + positions % self.block

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """Return `Layout.rewindable`. Unless the layout itself has less slack, it is at least a
        block, because the tail still has the tokens that the next query sees raw and the block that
        will be encoded next."""
        kept = written - self.tail.slots + self.tail.sinks  # first position in the tail's ring
        blocks = -(-kept // self.block) + self.recent
        least = jnp.where(kept > 0, blocks * self.block + 1, 0)
        return jnp.minimum(jnp.maximum(length - least, 0), self.layout.rewindable(length, written))
