"""The base class of layouts, and `Dense`, whose slots are the positions themselves.

A layout says which slot of a row has which position. It is integer arithmetic on positions and does
not depend on keys, values or devices.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

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

Integers = TypeVar("Integers", int, np.ndarray, jax.Array)
"""Python integers or integer arrays. A function returns the same kind that it receives."""


class Run(NamedTuple):
    """Consecutive slots to which tokens of a call are written: token ``i`` to slot ``start + i``.

    A token is written if its index is at least ``skip`` and its slot is in ``[low, high)``. If
    ``bounds`` is given, the slot must also be in ``[bounds[0], bounds[1])``, which may be traced.

    For paged layouts, ``columns`` (int[batch, pages]) selects entries of the row's page table. The
    run then continues through the pages in these entries, ``start`` is counted from the first slot
    of the first of these pages, and ``high`` is the page size.

    Example:
      ```python
      layout = kvjax.layouts.Ring(window=4).resolve(64, None)
      for run in layout.runs(jnp.array([3]), 2):
          print(run.start, run.low, run.high)
      ```
    """

    start: PerRow
    low: int
    high: int
    skip: PerRow | int = 0
    bounds: tuple[Scalar, Scalar] | None = None
    columns: PageColumns | None = None


class Region(NamedTuple):
    """Slots ``first`` to ``first + size - 1``, which attention reads together.

    ``capped`` marks sinks, whose distance to a query is capped below ``Layout.reach``.

    Example:
      ```python
      for region in kvjax.layouts.Ring(window=4, sinks=2).resolve(64, None).regions():
          print(region.first, region.size, region.capped)
      ```
    """

    first: int
    size: int
    capped: bool = False


class LayoutSpec(ABC):
    """The type of a `CachePolicy`'s layout: a `Layout`, or settings that resolve to one.

    ``open_ended`` says whether ``resolve`` works without a ``max_len``.
    """

    if TYPE_CHECKING:  # read-only properties, so that fields of frozen dataclasses satisfy them

        @property
        def open_ended(self) -> bool: ...
    else:
        open_ended = False

    @abstractmethod
    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        initial_len: int | None = None,
        min_rewind: int = 16,
    ) -> "Layout":
        """Return the layout of one layer, with all settings resolved.

        Args:
          max_len: the maximum number of tokens per row; None for no limit.
          window: the layer's attention window in the model's config; None for full attention.
          initial_len: the number of tokens per row that must fit at first, if ``max_len`` is None.
            A layout that can grow starts with it.
          min_rewind: the minimum number of newest tokens that a row can remove at any time, unless
            the layout itself sets a different number.

        Raises:
          ValueError: if a value that the layout needs is missing, or contradicts the layout's
            settings.
        """

    def starting_at(self, slots: int) -> Self:
        """Return the layout with ``slots`` slots from the start. A layout that does not grow is
        returned unchanged."""
        return self

    def with_slack(self, slack: int) -> Self:
        """Return the layout with a slack of at least ``slack``. A layout that never overwrites
        tokens is returned unchanged."""
        return self


class Layout(LayoutSpec):
    """The rule that says which slot of a row has which position. A layout is frozen, hashable and
    static. The lengths of rows are arguments of its methods.

    A subclass defines ``slots``, ``resolve``, ``runs``, ``positions`` and ``slot_of``. The other
    members have defaults that are correct for any layout that keeps every token of a row. Override
    them to limit what queries see (``window``, ``sinks``), to overwrite old tokens (``limit``,
    ``slack``, ``rewindable``), to let the layout grow (``grows_to``, ``grown``), or to make
    attention faster (``occupied``, ``bounds``).

    Attributes:
      slots: the number of slots per row.
      limit: the maximum number of tokens per row; None for no limit. By default it is ``slots``.
      window: the number of positions that a query sees, including its own; None for all.
      sinks: the number of first positions of a row that all queries see.
      slack: the number of slots in addition to what queries see. A call of up to ``slack + 1``
        tokens overwrites nothing that its own queries see.
      grows_to: the limit to which the layout may grow; None if it can't grow.

    Example:
      ```python
      layout = kvjax.layouts.Ring(window=4).resolve(64, None)
      slots = jnp.arange(layout.slots)
      print(layout.positions(jnp.array([6]), jnp.array([6]), slots))
      ```
    """

    if TYPE_CHECKING:

        @property
        def slots(self) -> int: ...
        @property
        def window(self) -> int | None: ...
        @property
        def sinks(self) -> int: ...
        @property
        def slack(self) -> int | None: ...
        @property
        def grows_to(self) -> int | None: ...
    else:
        slots: int
        window = slack = grows_to = None
        sinks = 0

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens per row; None for no limit."""
        return self.slots

    @property
    def chunk(self) -> int | None:
        """The maximum number of tokens that one call can append; None for no limit."""
        return None if self.limit is not None or self.slack is None else self.slack + 1

    @property
    def reach(self) -> int:
        """An upper bound: all distances between queries and the keys that they see are smaller."""
        last = UNLIMITED if self.limit is None else self.grows_to or self.limit
        return last if self.window is None else min(self.sinks + self.window, last)

    @abstractmethod
    def runs(self, length: PerRow, new: int) -> list[Run]:
        """Return where the ``new`` tokens of a call are written, in rows that have ``length``
        tokens. Each token is in exactly one run."""

    @abstractmethod
    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """Return the position in each of ``slots``, for each row. It is -1 if the slot is empty or
        its token no longer counts.

        The attention mask is computed from these positions alone.

        Args:
          length: int32[batch], the number of tokens of each row.
          written: int32[batch], the maximum number of tokens that each row has ever had. After a
            rewind it is larger than ``length``, because slots then have tokens that no longer
            count.
          slots: int32[n], the slots.
        """

    @abstractmethod
    def slot_of(self, positions: Positions) -> Positions:
        """Return the slot of each position. The layout may have reused the slot for a later
        position."""

    def regions(self) -> tuple[Region, ...]:
        """Return the regions in the order in which attention reads them. Each slot is in one
        region."""
        rest = Region(self.sinks, self.slots - self.sinks)
        return (Region(0, self.sinks, capped=True), rest) if self.sinks else (rest,)

    def region_layouts(self) -> Sequence[tuple[Region, Any]]:
        """Return the regions, each with the layout or `LayoutSlice` whose methods describe its
        slots."""
        return [(region, self) for region in self.regions()]

    def occupied(self, length: PerRow) -> Scalar:
        """Return how many slots, from the first on, may have a token in any row."""
        return jnp.int32(self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Return the lowest and the highest position in slots ``start`` to ``start + size - 1``,
        over all rows.

        Attention uses them to skip blocks. The range may be too wide, but never too narrow. The
        highest is below the lowest if all slots are empty.
        """
        return jnp.int32(0), jnp.max(length) - 1

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """Mark slots as empty if a conversion could not supply their tokens.

        Args:
          length: int32[batch], the number of tokens of each row.
          positions: the position that each slot should have.
          missing: the slots whose tokens are not available.

        Returns:
          A value of ``written`` with which the method ``positions`` reports the missing slots as
          empty, and a mask of the rows for which this is impossible, because their queries see a
          missing token.
        """
        return length, jnp.any(missing, axis=1)

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """Return how many of its newest tokens each row can remove while all other tokens stay."""
        if self.limit is not None:
            return length
        return jnp.maximum(length - jnp.maximum(written - (self.slack or 0), 0), 0)

    def grown(self, to: int) -> "Layout":
        """Return the layout for rows of ``to`` tokens.

        Raises:
          ValueError: if the layout can't grow to this length.
        """
        raise ValueError(f"{self} does not grow")

    def rounded(self, parts: int) -> "Layout":
        """Return the layout with its slots rounded up to a multiple of ``parts``, for devices that
        divide them or for whole tiles. The result is the layout of the stored arrays. It does not
        change the limit of a row, which is still the limit of the original layout.

        Raises:
          ValueError: if it can't have more slots.
        """
        if self.slots % parts:
            raise ValueError(
                f"{self} has {self.slots} slots, which is not a multiple of {parts}: give it "
                "a capacity that is"
            )
        return self

    def joined(self, other: "Layout") -> "Layout":
        """Return a layout in which the rows of both layouts fit.

        Raises:
          ValueError: if the layouts differ in more than their capacity.
        """
        if self != other:
            raise ValueError(f"{self} and {other} are different layouts")
        return self

    def in_blocks(self, block: int, recent: int) -> "Layout":
        """Return the layout of the body. Each of its slots has a block of ``block`` tokens. A block
        enters the body when the row has ``recent`` later full blocks and has begun one more."""
        if self.limit is None:
            raise ValueError(f"{self} can't hold its tokens in blocks")
        return Dense(max((self.slots - 1) // block - recent, 1))


def check_growth(to: int, current: int, grows_to: int | None) -> None:
    """Raise ``ValueError`` if a capacity of ``current`` tokens can't grow to ``to``."""
    if grows_to is not None and to > grows_to:
        raise ValueError(f"the cache may grow to {grows_to} tokens a row, not to {to}")
    if to < current:
        raise ValueError(f"can't grow to {to} tokens a row: the capacity is already {current}")


@dataclass(frozen=True)
class Dense(Layout):
    """Position ``p`` is in slot ``p``.

    ``max_len`` is the maximum number of tokens per row; ``init_cache`` sets it if it is None.
    ``grows_to`` is the capacity to which ``kvjax.grow`` and ``kvjax.generate`` may enlarge it, or
    None if they may not; see `Growing`.

    Example:
      ```python
      policy = kvjax.CachePolicy(kvjax.layouts.Dense())
      cache = kvjax.init_cache(lm.config, policy, max_len=64)
      ```
    """

    max_len: int | None = None
    grows_to: int | None = None

    def __post_init__(self) -> None:
        normalize_int_field(self, "max_len", 1, optional=True)
        normalize_int_field(self, "grows_to", self.max_len or 1, optional=True)

    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        initial_len: int | None = None,
        min_rewind: int = 16,
    ) -> "Dense":
        if None not in (self.max_len, max_len) and self.max_len != max_len:
            raise ValueError(f"the layout holds {self.max_len} positions, but max_len is {max_len}")
        for capacity in (self.max_len, max_len, initial_len):
            if capacity is not None:
                return replace(self, max_len=capacity)
        raise ValueError("a dense cache needs max_len, the number of tokens that a row can hold")

    @property
    def open_ended(self) -> bool:
        return self.max_len is not None

    @property
    def slots(self) -> int:
        if self.max_len is None:
            raise ValueError("this Dense has no max_len yet: init_cache sets it")
        return self.max_len

    def grown(self, to: int) -> "Dense":
        check_growth(to, self.slots, self.grows_to)
        return replace(self, max_len=to)

    def rounded(self, parts: int) -> "Dense":
        more = -self.slots % parts
        return Dense(self.slots + more) if more else self

    def joined(self, other: Layout) -> "Dense":
        """Return a `Dense` with the larger capacity. It can grow if one of the two can."""
        if not isinstance(other, Dense):
            raise ValueError(f"{self} and {other} are different layouts")
        capacity = max(self.slots, other.slots)
        grows = self.grows_to is not None or other.grows_to is not None
        return Dense(capacity, max(capacity, self.reach, other.reach) if grows else None)

    def runs(self, length: PerRow, new: int) -> list[Run]:
        return [Run(length, 0, self.slots)]

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        slots = expand_over_rows(slots, length)
        return jnp.where(slots < expand_over_slots(length), slots, -1)

    def slot_of(self, positions: Positions) -> Positions:
        return positions

    def occupied(self, length: PerRow) -> Scalar:
        return jnp.max(length)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        low = jnp.asarray(start, jnp.int32)
        return low, jnp.minimum(low + size, jnp.max(length)) - 1


@dataclass(frozen=True)
class Growing(LayoutSpec):
    """A `Dense` that starts small and is doubled between dispatches (runs of a compiled program)
    when its rows need it.

    ``start`` is the number of slots at first. ``kvjax.generate`` grows the cache automatically. In
    your own loop, call ``kvjax.grow`` before a step that would exceed ``cache.max_len``. Otherwise
    a row in which the step's tokens do not fit stays unchanged, and ``kvjax.check`` raises an
    error. Arrays can't grow inside ``jit``.

    Example:
      ```python
      policy = kvjax.CachePolicy(kvjax.layouts.Growing(start=64))
      cache = kvjax.init_cache(lm.config, policy)
      print(cache.max_len, cache.grows_to)
      ```
    """

    start: int = 256

    open_ended: ClassVar[bool] = True

    def __post_init__(self) -> None:
        normalize_int_field(self, "start", 1)

    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        initial_len: int | None = None,
        min_rewind: int = 16,
    ) -> Dense:
        """Return the initial `Dense`, which may grow to ``max_len``."""
        limit = UNLIMITED if max_len is None else max_len
        return Dense(min(self.start, limit), grows_to=limit)

    def starting_at(self, slots: int) -> "Growing":
        return Growing(slots)
