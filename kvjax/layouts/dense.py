"""The layout in which every position has a slot of its own, and the one that grows into it."""

from dataclasses import dataclass, replace

import jax.numpy as jnp

from kvjax.core.checks import UNLIMITED, keep_whole
from kvjax.core.numbers import beside_slots, slots_beside
from kvjax.core.typing import (
    Cursors,
    PerRow,
    PositionPerSlot,
    Positions,
    RowMask,
    Scalar,
    SlotMask,
    SlotPositions,
    Slots,
)
from kvjax.layouts.layout import Layout, Region, Run, check_growth


@dataclass(frozen=True)
class Dense:
    """Position ``p`` stands in slot ``p``. What its members are, ``Layout`` says.

    ``max_len``: positions, None until ``resolve``. ``grows_to``: how far ``kvjax.grow`` and
    ``kvjax.generate`` may enlarge it, None for not at all; see ``Growing``.
    """

    max_len: int | None = None
    grows_to: int | None = None

    chunk = window = None
    sinks = 0

    def __post_init__(self) -> None:
        keep_whole(self, "max_len", 1, optional=True)
        keep_whole(self, "grows_to", self.max_len or 1, optional=True)

    def resolve(
        self, max_len: int | None, window: int | None, room: int | None = None, back: int = 16
    ) -> "Dense":
        """Fix the capacity: a ``max_len`` given to the layout itself must be the same."""
        if None not in (self.max_len, max_len) and self.max_len != max_len:
            raise ValueError(f"the layout holds {self.max_len} positions, max_len asks {max_len}")
        given = [tokens for tokens in (self.max_len, max_len, room) if tokens is not None]
        if not given:
            raise ValueError("a dense cache needs max_len, the tokens a row can hold")
        return replace(self, max_len=given[0])

    @property
    def open_ended(self) -> bool:
        """Whether the capacity is fixed already."""
        return self.max_len is not None

    @property
    def slots(self) -> int:
        if self.max_len is None:
            raise ValueError("this Dense has no max_len yet: init_cache gives it one")
        return self.max_len

    limit = slots

    @property
    def reach(self) -> int:
        """Distances stay below the capacity, the largest that it may ever have."""
        return self.slots if self.grows_to is None else self.grows_to

    def grown(self, to: int) -> "Dense":
        check_growth(to, self.slots, self.grows_to)
        return replace(self, max_len=to)

    def rounded(self, parts: int) -> "Dense":
        more = -self.slots % parts
        return Dense(self.slots + more, None) if more else self

    def joined(self, other: Layout) -> "Dense":
        """The larger capacity; it grows if one of them does."""
        if not isinstance(other, Dense):
            raise ValueError(f"{self} and {other} are different layouts")
        larger, last = max(self.slots, other.slots), max(self.reach, other.reach)
        grows = self.grows_to is not None or other.grows_to is not None
        return Dense(larger, max(larger, last) if grows else None)

    def in_blocks(self, block: int, recent: int) -> "Dense":
        """A slot for every block that a full row has put out of its tail."""
        return Dense(max((self.slots - 1) // block - recent, 1))

    def runs(self, length: PerRow, new: int) -> list[Run]:
        return [Run(length, 0, self.slots)]

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        slots = slots_beside(slots, length)
        return jnp.where(slots < beside_slots(length), slots, -1)

    def slot_of(self, positions: Positions) -> Positions:
        return positions

    def regions(self) -> tuple[Region, ...]:
        return (Region(0, self.slots),)

    def occupied(self, length: PerRow) -> Scalar:
        return jnp.max(length)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        low = jnp.asarray(start, jnp.int32)
        return low, jnp.minimum(low + size, jnp.max(length)) - 1

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """Nothing may be missing."""
        return length, jnp.any(missing, axis=1)

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        return length


@dataclass(frozen=True)
class Growing:
    """A ``Dense`` that begins small and is doubled between dispatches, as the text needs it.

    ``start``: slots at first. ``generate`` grows it by itself; in a loop of one's own
    ``kvjax.grow`` does, before a step whose tokens would pass ``cache.max_len``: what does not
    fit is dropped, and ``kvjax.check`` raises. Inside ``jit`` an array can't grow.
    """

    start: int = 256

    open_ended = True
    """It grows for ever unless ``max_len`` says how far."""

    def __post_init__(self) -> None:
        keep_whole(self, "start", 1)

    def resolve(
        self, max_len: int | None, window: int | None, room: int | None = None, back: int = 16
    ) -> Dense:
        """The first ``Dense``; ``max_len`` is how far it may grow."""
        limit = UNLIMITED if max_len is None else max_len
        return Dense(min(self.start, limit), grows_to=limit)
