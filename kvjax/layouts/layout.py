"""What a layout answers: which slot holds which position. Integer maths, no numbers of a model."""

from abc import abstractmethod
from typing import NamedTuple, Protocol

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
