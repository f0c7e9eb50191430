"""How the tokens of a layer are divided between a raw tail and a body of encoded blocks."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.core.numbers import slots_beside, xp
from kvjax.core.typing import Cursors, PerRow, PositionPerSlot, Positions, Scalar, Slots
from kvjax.layouts.layout import Layout
from kvjax.layouts.part import Share, shared
from kvjax.layouts.ring import Ring


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
    share: Share | None = None

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
        return whole if self.share is None else shared(whole, self.share)

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
        slots = slots_beside(slots, length)
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
