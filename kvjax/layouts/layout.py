"""What a layout defines, and the dense layout."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import jax.numpy as jnp

from kvjax.core.array_ops import expand_over_rows, expand_over_slots
from kvjax.core.typing import (
    Cursors,
    PageColumns,
    PerRow,
    PositionPerSlot,
    Positions,
    RowMask,
    Scalar,
    SlotMask,
    SlotPositions,
    Slots,
)
from kvjax.core.validation import UNLIMITED, normalize_int_field


class Run(NamedTuple):
    """Where tokens of a call go: token ``i`` of a row to slot ``start + i``.

    Of this run are the tokens from ``skip`` on whose slot is at least ``low`` and below ``high``,
    and, where they are traced, between ``bounds`` as well. ``columns``: int[batch, pages], where
    slots count through pages of ``high`` of them, the columns of the row's table that name these;
    else None.
    """

    start: PerRow
    low: int
    high: int
    skip: PerRow | int = 0
    bounds: tuple[Scalar, Scalar] | None = None
    columns: PageColumns | None = None


class Region(NamedTuple):
    """Slots ``first`` to ``first + size - 1``, which attention walks together.

    ``capped``: sinks, which queries look at from a capped distance.
    """

    first: int
    size: int
    capped: bool = False


class Layout(Protocol):
    """A layout. Frozen, hashable, and static: cursors come as arrays.

    ``slots``: places a row has. ``limit``: tokens a row's text can have, or None. ``chunk``: the
    most tokens that one call can append, or None. ``window``, ``sinks``: what queries see of the
    positions before theirs, None for all. ``reach``: positions that the distances between
    queries and keys stay below. ``grows_to``: the limit that the layout may be grown to, or None
    where it does not grow. ``open_ended``: whether ``resolve`` can do without a ``max_len``.
    """

    @property
    def open_ended(self) -> bool: ...
    @property
    def slots(self) -> int: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def chunk(self) -> int | None: ...
    @property
    def window(self) -> int | None: ...
    @property
    def sinks(self) -> int: ...
    @property
    def reach(self) -> int: ...
    @property
    def grows_to(self) -> int | None: ...

    @abstractmethod
    def resolve(
        self, max_len: int | None, window: int | None, room: int | None = None, back: int = 16
    ) -> "Layout":
        """Fix what was left open, from the limit asked for and the layer's own window.

        ``room``: tokens that the text will have for now, where ``max_len`` does not say: a layout
        that can be enlarged later begins with that. ``back``: tokens that a row should be able to
        forget at any time, at least, unless the layout itself says how many.
        """

    @abstractmethod
    def grown(self, to: int) -> "Layout":
        """The layout with room for ``to`` tokens of text; a ``ValueError`` where it can't grow."""

    @abstractmethod
    def rounded(self, parts: int) -> "Layout":
        """The layout with more slots, so that so many devices can have a share of them each; for
        the arrays alone, what a text can have is not more."""

    @abstractmethod
    def joined(self, other: "Layout") -> "Layout":
        """The layout that holds what this and ``other`` hold; a ``ValueError`` where they differ in
        more than capacity."""

    @abstractmethod
    def in_blocks(self, block: int, recent: int) -> "Layout":
        """The layout of whole blocks of ``block`` tokens, where each stands in a slot of its own
        once ``recent`` later ones and the newest token's have begun."""

    @abstractmethod
    def runs(self, length: PerRow, new: int) -> list[Run]:
        """Where a call's ``new`` tokens go, at most one run a token."""

    @abstractmethod
    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """The position that each of ``slots`` holds, a row; -1 where it is empty or stale."""

    @abstractmethod
    def slot_of(self, positions: Positions) -> Positions:
        """The slot where a position stands, if it is held at all."""

    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """The parts that attention walks, in order; together all slots."""

    @abstractmethod
    def occupied(self, length: PerRow) -> Scalar:
        """Slots from the first on that may hold anything, in any row."""

    @abstractmethod
    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Lowest and highest position in slots ``start`` to ``start + size - 1``, over all rows.

        May be wider than the truth, never narrower; the highest is below the lowest where all
        are empty.
        """

    @abstractmethod
    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """The ``written`` under which slots that lack their ``positions`` count as empty, and the
        rows for which there is none: what their queries will see is among the missing."""

    @abstractmethod
    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """How many of its newest tokens each row can forget and go on exactly."""


def check_growth(to: int, held: int, grows_to: int | None) -> None:
    """Raise ``ValueError`` where a text's ``held`` tokens can't become ``to``."""
    if grows_to is not None and to > grows_to:
        raise ValueError(f"the cache may grow to {grows_to} tokens a row, not to {to}")
    if to < held:
        raise ValueError(f"the cache holds {held} tokens a row: {to} would be fewer")


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
        normalize_int_field(self, "max_len", 1, optional=True)
        normalize_int_field(self, "grows_to", self.max_len or 1, optional=True)

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
        slots = expand_over_rows(slots, length)
        return jnp.where(slots < expand_over_slots(length), slots, -1)

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
        normalize_int_field(self, "start", 1)

    def resolve(
        self, max_len: int | None, window: int | None, room: int | None = None, back: int = 16
    ) -> Dense:
        """The first ``Dense``; ``max_len`` is how far it may grow."""
        limit = UNLIMITED if max_len is None else max_len
        return Dense(min(self.start, limit), grows_to=limit)
