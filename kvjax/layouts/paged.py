"""The layout whose slots stand in pages of a pool that rows share.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", arXiv:2309.06180.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from kvjax.core.array_ops import arange_row, expand_over_rows, expand_over_slots, xp
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
from kvjax.core.validation import INT32_MAX, UNLIMITED, normalize_int_field
from kvjax.layouts.layout import Dense, Layout, Region, Run

LEAST, MOST, MULTIPLE = 16, 1024, 8
"""Tokens of a page."""


@dataclass(frozen=True)
class Paged:
    """Position ``p`` stands in page ``p // page_size`` of its row, in a place that the row's table
    names: arrays of pages are a pool, of which rows have as many as their texts fill, and which
    they can have in common.

    ``page_size``: tokens, a multiple of 8 from 16 to 1,024, and of a block where codecs work on
    blocks. ``inner``: what a row holds: ``Dense()``, ``Growing()``, or a ``Ring``, whose pages are
    given back when its window has left them. ``pages``: of the pool, over all rows; by default as
    many as the rows can need. ``pool``: how many there are; ``init_cache`` sets it.

    What its members are, ``Layout`` says; slots count through the columns of a row's table.
    """

    page_size: int = 256
    inner: Any = field(default_factory=Dense)
    pages: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        normalize_int_field(self, "page_size", 1)
        normalize_int_field(self, "pages", 1, INT32_MAX, optional=True)

    def resolve(
        self, max_len: int | None, window: int | None, room: int | None = None, back: int = 16
    ) -> "Paged":
        if not LEAST <= self.page_size <= MOST or self.page_size % MULTIPLE:
            raise ValueError(
                f"page_size={self.page_size}: pages have {LEAST} to {MOST} tokens, a multiple of "
                f"{MULTIPLE}"
            )
        return replace(self, inner=self.inner.resolve(max_len, window, room, back), pool=None)

    @property
    def open_ended(self) -> bool:
        """Whether ``inner`` can do without a capacity."""
        return bool(self.inner.open_ended)

    @property
    def straight(self) -> bool:
        """Whether every page has a column of its own; else columns are used again."""
        return self.inner.limit is not None

    @property
    def _seen(self) -> int:
        """Tokens behind the sinks that are kept, at least; more than there can be where all are."""
        window = self.inner.window
        return UNLIMITED if window is None else window + (self.inner.slack or 0)

    @property
    def columns(self) -> int:
        """Pages that a row can have at once."""
        if self.straight:
            return -(-self.inner.slots // self.page_size)
        # So many tokens can begin anywhere in a page.
        return self.sink_pages + -(-(self._seen - 1) // self.page_size) + 1

    @property
    def slots(self) -> int:
        return self.columns * self.page_size

    @property
    def limit(self) -> int | None:
        return self.inner.limit

    @property
    def chunk(self) -> int | None:
        return self.inner.chunk

    @property
    def window(self) -> int | None:
        return self.inner.window

    @property
    def sinks(self) -> int:
        return self.inner.sinks

    @property
    def reach(self) -> int:
        return self.inner.reach

    @property
    def grows_to(self) -> int | None:
        return self.inner.grows_to

    def grown(self, to: int) -> "Paged":
        """A pool that was not given its pages grows with the tables, see ``kvjax.grow``."""
        return replace(self, inner=self.inner.grown(to))

    def rounded(self, parts: int) -> "Paged":
        """As it is: pages are whole tiles already."""
        return self

    def joined(self, other: Layout) -> "Paged":
        """The larger capacity; the pools are joined by ``kvjax.concatenate``."""
        if not isinstance(other, Paged) or other.page_size != self.page_size:
            raise ValueError(f"{self} and {other} are different layouts")
        return replace(self, inner=self.inner.joined(other.inner))

    def in_blocks(self, block: int, recent: int) -> "Paged":
        """Pages of whole blocks."""
        if self.page_size % block:
            raise ValueError(
                f"page_size={self.page_size} is no multiple of the block of {block} tokens that "
                "codecs encode, or placements move, at once"
            )
        inner = self.inner.in_blocks(block, recent)
        return replace(self, page_size=self.page_size // block, inner=inner)

    @property
    def sink_pages(self) -> int:
        """Pages of the sinks, which are kept for ever."""
        return -(-self.sinks // self.page_size)

    def column_of(self, pages: Any) -> Any:
        """The columns of a row's table where ``pages``, of any shape, stand while it has them."""
        if self.straight:
            return pages
        around = self.sink_pages + (pages - self.sink_pages) % (self.columns - self.sink_pages)
        return xp(pages).where(pages < self.sink_pages, pages, around)

    def pages_in(self, written: PerRow) -> Any:
        """int[batch, columns]: the last page that each column was used for, or will be first."""
        columns = arange_row(self.columns)
        if self.straight:
            return jnp.broadcast_to(columns, (*written.shape, self.columns))
        return self._page_in(columns, written[:, None])

    def _page_in(self, columns: Any, written: Any) -> Any:
        newest = jnp.maximum(written - 1, 0) // self.page_size
        held = newest - (newest - columns) % (self.columns - self.sink_pages)
        return jnp.where((columns < self.sink_pages) | (held < self.sink_pages), columns, held)

    def gone_before(self, written: Any) -> Any:
        """The first page behind the sinks' that queries of a row may see, even when ``rewindable``
        tokens are forgotten; 0 for all."""
        return xp(written).maximum(written - self._seen, 0) // self.page_size

    def is_kept(self, pages: Any, written: Any) -> Any:
        """Whether queries may see pages, so."""
        return (pages >= self.gone_before(written)) | (pages < self.sink_pages)

    def filled(self, tokens: Any) -> Any:
        """Pages that so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def whole(self, slots: int) -> int:
        """So many slots from the first on, up to the end of a page where they are more than one."""
        return slots if slots <= self.page_size else self.filled(slots) * self.page_size

    def spanned(self, new: int) -> int:
        """Pages that a call of so many tokens writes in, at most."""
        return 1 + -(-(new - 1) // self.page_size)

    def runs(self, length: PerRow, new: int) -> list[Run]:
        """One run, in slots of the pages that the call may write in, one behind the other."""
        first, size = length // self.page_size, self.page_size
        pages = first[:, None] + arange_row(self.spanned(new))
        return [Run(length - first * size, 0, size, columns=self.column_of(pages))]

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        slots = expand_over_rows(slots, written)
        held, marks, size = slots, expand_over_slots(written), self.page_size
        if not self.straight:
            held = self._page_in(slots // size, marks) * size + slots % size
        there = held < expand_over_slots(length)
        if self.window is not None:
            there &= (held >= marks - self._seen) | (held < self.sinks)
        return jnp.where(there, held, -1)

    def slot_of(self, positions: Positions) -> Positions:
        column = self.column_of(positions // self.page_size)
        return column * self.page_size + positions % self.page_size

    def regions(self) -> tuple[Region, ...]:
        rest = Region(self.sinks, self.slots - self.sinks)
        return (Region(0, self.sinks, capped=True), rest) if self.sinks else (rest,)

    def occupied(self, length: PerRow) -> Scalar:
        return jnp.minimum(jnp.max(length), self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        start = jnp.asarray(start, jnp.int32)
        longest = jnp.max(length)
        straight = start, jnp.minimum(start + size, longest) - 1
        if self.straight:
            return straight
        # Where columns have been used again, they hold anything that is left of the text.
        low = jnp.minimum(start, jnp.maximum(jnp.min(length) - self.slots, 0))
        again = longest > self.slots
        return jnp.where(again, low, start), jnp.where(again, longest - 1, straight[1])

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """As if so many tokens more had been written, and taken back, that the missing ones left
        what is kept: up to ``slack``."""
        if self.window is None:
            return length, jnp.any(missing, axis=1)
        newest = jnp.max(jnp.where(missing, positions, -1), axis=1)
        written = jnp.where(newest < 0, length, jnp.maximum(length, newest + self._seen + 1))
        in_sinks = jnp.any(missing & (positions < self.sinks), axis=1)
        return written, in_sinks | (written > length + (self.inner.slack or 0))

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        if self.window is None:
            return length
        kept = jnp.where(written - self._seen > self.sinks, written - (self.inner.slack or 0), 0)
        return jnp.maximum(length - kept, 0)


def unpaged_layout(layout: Any) -> Any:
    """A layout of pages without them, or any other as it is."""
    pages = paged(layout)
    return layout if pages is None else pages.inner


def paged(layout: Any) -> Paged | None:
    """A layout of pages, or None for any other."""
    return layout if isinstance(layout, Paged) else None
