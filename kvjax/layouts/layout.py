"""The base class of layouts, and `Dense`, whose slots are the positions themselves.

A layout says which slot of a row holds which position. It is integer arithmetic on positions and
knows nothing about keys, values or devices.
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
"""Python or array integers; a function returns the kind that it receives."""


class Run(NamedTuple):
    """Consecutive slots that tokens of a call are written to: token ``i`` to slot ``start + i``.

    A token is written if its index is at least ``skip`` and its slot is in ``[low, high)``. If
    ``bounds`` is given, the slot must also be in ``[bounds[0], bounds[1])``, which may be traced.

    ``columns``, int[batch, pages], is given for paged layouts and selects entries of the row's page
    table. Slots are then numbered through the pages in these entries, and ``high`` is the page
    size.

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

    ``capped``: these are sinks; their distance to a query is capped below ``Layout.reach``.

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
    """What `CachePolicy` accepts as its layout: a `Layout`, or settings that resolve to one.

    ``open_ended``: whether ``resolve`` works without a ``max_len``.
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
        """The layout of one layer, with all settings resolved.

        Args:
          max_len: tokens that a row can hold; None for no limit.
          window: the layer's own attention window, from the model's config; None for none.
          initial_len: tokens that a row must hold at first, if ``max_len`` is None. A layout that
            can grow starts with it.
          min_rewind: the least number of tokens that a row can forget at any time, unless the
            layout itself sets another number.

        Raises:
          ValueError: if something that the layout needs is missing or contradicts it.
        """

    def starting_at(self, slots: int) -> Self:
        """The same layout with ``slots`` slots from the start, if it starts small and grows."""
        return self

    def with_slack(self, slack: int) -> Self:
        """The same layout with a slack of at least ``slack``, if it overwrites old tokens."""
        return self


class Layout(LayoutSpec):
    """Which slot of a row holds which position. A layout is frozen, hashable and static: the
    lengths of rows are arguments of its methods.

    A subclass defines ``slots``, ``resolve``, ``runs``, ``positions`` and ``slot_of``. The other
    members have defaults, which are right for any layout that keeps every token of a row. Override
    them to limit what queries see (``window``, ``sinks``), to overwrite old tokens (``limit``,
    ``slack``, ``rewindable``), to let the layout grow (``grows_to``, ``grown``), or to make
    attention faster (``occupied``, ``bounds``).

    ``slots``: slots per row. ``limit``: tokens that a row can hold, None for no limit; by default
    ``slots``. ``window``: how many positions back queries see, None for all. ``sinks``: the
    first positions of a row, which all queries see. ``slack``: slots in excess of what
    queries see, so that a call of ``slack + 1`` tokens overwrites nothing that its own queries
    see. ``grows_to``: the limit that the layout may grow to, None if it can't grow.

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
        """Tokens that a row can hold, None for no limit."""
        return self.slots

    @property
    def chunk(self) -> int | None:
        """The most tokens that one call can append, None for any number."""
        return None if self.limit is not None or self.slack is None else self.slack + 1

    @property
    def reach(self) -> int:
        """All distances between queries and the keys that they see are smaller than this."""
        last = UNLIMITED if self.limit is None else self.grows_to or self.limit
        return last if self.window is None else min(self.sinks + self.window, last)

    @abstractmethod
    def runs(self, length: PerRow, new: int) -> list[Run]:
        """Where the ``new`` tokens of a call are written, in rows of ``length``. Each token is in
        exactly one run."""

    @abstractmethod
    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """The position that each of ``slots`` holds, for each row; -1 if it is empty or stale.

        The attention mask is computed from this alone.

        Args:
          length: int32[batch], tokens that each row holds.
          written: int32[batch], the most tokens that each row has ever held. It is larger than
            ``length`` after a rewind: slots then hold tokens that no longer count.
          slots: int32[n].
        """

    @abstractmethod
    def slot_of(self, positions: Positions) -> Positions:
        """The slot of each position, if the row still holds it."""

    def regions(self) -> tuple[Region, ...]:
        """The slots in the order in which attention reads them; each slot once."""
        rest = Region(self.sinks, self.slots - self.sinks)
        return (Region(0, self.sinks, capped=True), rest) if self.sinks else (rest,)

    def region_layouts(self) -> Sequence[tuple[Region, Any]]:
        """Each region, and the layout or `LayoutSlice` whose methods describe its slots."""
        return [(region, self) for region in self.regions()]

    def occupied(self, length: PerRow) -> Scalar:
        """The number of leading slots that may hold a token, in any row."""
        return jnp.int32(self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Lowest and highest position in slots ``start`` to ``start + size - 1``, over all rows.

        Attention skips blocks by these. The range may be too wide, but never too narrow; the
        highest is below the lowest if all slots are empty.
        """
        return jnp.int32(0), jnp.max(length) - 1

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """How to mark slots as empty if a conversion could not supply their tokens.

        Args:
          length: int32[batch].
          positions: the position that each slot should hold.
          missing: the slots whose tokens are not available.

        Returns:
          The ``written`` that makes ``positions`` report those slots as empty, and a mask of the
          rows for which that is impossible, because their queries see a missing token.
        """
        return length, jnp.any(missing, axis=1)

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """How many of its newest tokens each row can forget without any change to the others."""
        if self.limit is not None:
            return length
        return jnp.maximum(length - jnp.maximum(written - (self.slack or 0), 0), 0)

    def grown(self, to: int) -> "Layout":
        """The layout for rows of ``to`` tokens.

        Raises:
          ValueError: if it can't grow to that.
        """
        raise ValueError(f"{self} does not grow")

    def rounded(self, parts: int) -> "Layout":
        """The layout with its slots rounded up to a multiple of ``parts``, for devices that share
        them or for whole tiles. What a row can hold stays the same.

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
        """The layout that holds the rows of both.

        Raises:
          ValueError: if they differ in more than their capacity.
        """
        if self != other:
            raise ValueError(f"{self} and {other} are different layouts")
        return self

    def in_blocks(self, block: int, recent: int) -> "Layout":
        """The layout of the body. Each of its slots holds a block of ``block`` tokens. A block
        enters the body once the row has ``recent`` later blocks and has begun another one."""
        if self.limit is None:
            raise ValueError(f"{self} can't hold its tokens in blocks")
        return Dense(max((self.slots - 1) // block - recent, 1))


def check_growth(to: int, current: int, grows_to: int | None) -> None:
    """Raise ``ValueError`` if a row of ``current`` tokens can't grow to ``to``."""
    if grows_to is not None and to > grows_to:
        raise ValueError(f"the cache may grow to {grows_to} tokens a row, not to {to}")
    if to < current:
        raise ValueError(f"can't grow to {to} tokens a row: the capacity is already {current}")


@dataclass(frozen=True)
class Dense(Layout):
    """Position ``p`` is in slot ``p``.

    ``max_len``: tokens that a row can hold; ``init_cache`` sets it if it is None. ``grows_to``: how
    far ``kvjax.grow`` and ``kvjax.generate`` may enlarge it, None for not at all; see `Growing`.

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
        """The larger capacity; it can grow if one of the two can."""
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
    """A `Dense` that starts small and is doubled between dispatches, as its rows need it.

    ``start``: slots at first. ``kvjax.generate`` grows the cache by itself. In your own loop, call
    ``kvjax.grow`` before a step that would exceed ``cache.max_len``: tokens that do not fit are
    dropped, and ``kvjax.check`` raises. Arrays can't grow inside ``jit``.

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
        """The first `Dense`, which may grow to ``max_len``."""
        limit = UNLIMITED if max_len is None else max_len
        return Dense(min(self.start, limit), grows_to=limit)

    def starting_at(self, slots: int) -> "Growing":
        return Growing(slots)
