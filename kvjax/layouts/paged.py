"""The layout whose slots are in pages of a pool that rows share.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", arXiv:2309.06180.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
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
from kvjax.core.validation import INT32_MAX, UNLIMITED, ArgumentError, normalize_int_field
from kvjax.layouts.layout import Dense, Integers, Layout, LayoutSpec, Region, Run
from kvjax.layouts.split import LayoutSlice

MIN_PAGE_SIZE, MAX_PAGE_SIZE, PAGE_SIZE_MULTIPLE = 16, 1024, 8
"""The minimum and the maximum page size in tokens. Every page size is a multiple of the third
number."""


@dataclass(frozen=True)
class Paged(Layout):
    """Position ``p`` is in page ``p // page_size`` of its row, and the row's table says which page
    of the pool this is. Rows take pages as they grow, and can share pages.

    ``page_size`` is the number of tokens per page, a multiple of 8 from 16 to 1,024. If codecs
    encode blocks, it must also be a multiple of the block.

    ``inner`` says which tokens a row keeps. It is ``Dense()``, ``Growing()``, or a ``Ring``, whose
    pages are freed when they are out of its window.

    ``pages`` is the number of pages of the pool, for all rows together. The default is enough for
    all rows at their maximum length. ``pool`` is the resulting number, which ``init_cache`` sets.

    Slots are numbered through the columns of a row's table: column ``c`` has slots ``c *
    page_size`` to ``(c + 1) * page_size - 1``.

    Example:
      ```python
      policy = kvjax.CachePolicy(kvjax.layouts.Paged(page_size=16, pages=8))
      cache = kvjax.init_cache(lm.config, policy, batch=2, max_len=64)
      ```
    """

    page_size: int = 256
    inner: Any = field(default_factory=Dense)
    pages: int | None = None
    pool: int | None = None

    def __post_init__(self) -> None:
        normalize_int_field(self, "page_size", 1)
        normalize_int_field(self, "pages", 1, INT32_MAX, optional=True)

    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        initial_len: int | None = None,
        min_rewind: int = 16,
    ) -> "Paged":
        size = self.page_size
        if not MIN_PAGE_SIZE <= size <= MAX_PAGE_SIZE or size % PAGE_SIZE_MULTIPLE:
            raise ArgumentError(
                f"page_size={size}: pages have {MIN_PAGE_SIZE} to {MAX_PAGE_SIZE} tokens, a "
                f"multiple of {PAGE_SIZE_MULTIPLE}",
                param="page_size",
            )
        inner = self.inner.resolve(max_len, window, initial_len, min_rewind)
        return replace(self, inner=inner, pool=None)

    def starting_at(self, slots: int) -> "Paged":
        return replace(self, inner=self.inner.starting_at(slots))

    def with_slack(self, slack: int) -> "Paged":
        return replace(self, inner=self.inner.with_slack(slack))

    @property
    def open_ended(self) -> bool:
        return bool(self.inner.open_ended)

    @property
    def limit(self) -> int | None:
        return self.inner.limit

    @property
    def window(self) -> int | None:
        return self.inner.window

    @property
    def sinks(self) -> int:
        return self.inner.sinks

    @property
    def slack(self) -> int | None:
        return self.inner.slack

    @property
    def grows_to(self) -> int | None:
        return self.inner.grows_to

    @property
    def straight(self) -> bool:
        """Whether page ``p`` of a row is in column ``p``. Otherwise columns are reused in a
        circle."""
        return self.limit is not None

    @property
    def _kept(self) -> int:
        """The number of newest tokens that a row keeps; ``UNLIMITED`` if it keeps all."""
        return UNLIMITED if self.window is None else self.window + (self.slack or 0)

    @property
    def columns(self) -> int:
        """The maximum number of pages that a row can have at the same time."""
        if self.straight:
            return -(-self.inner.slots // self.page_size)
        # The kept tokens may begin anywhere in a page.
        return self.sink_pages + -(-(self._kept - 1) // self.page_size) + 1

    @property
    def slots(self) -> int:
        return self.columns * self.page_size

    def grown(self, to: int) -> "Paged":
        """Return the layout for rows of ``to`` tokens. ``kvjax.grow`` also enlarges the pool,
        unless ``pages`` is given."""
        return replace(self, inner=self.inner.grown(to))

    def rounded(self, parts: int) -> "Paged":
        """Return the layout unchanged, because pages already fill whole tiles."""
        return self

    def joined(self, other: Layout) -> "Paged":
        """Return a layout with the larger capacity. ``kvjax.concatenate`` joins the pools."""
        if not isinstance(other, Paged) or other.page_size != self.page_size:
            raise ValueError(f"{self} and {other} are different layouts")
        return replace(self, inner=self.inner.joined(other.inner))

    def in_blocks(self, block: int, recent: int) -> "Paged":
        """Return a layout whose pages have whole blocks."""
        if self.page_size % block:
            raise ArgumentError(
                f"page_size={self.page_size} must be a multiple of {block}, the tokens per "
                "block that codecs encode or placements move",
                param="page_size",
            )
        inner = self.inner.in_blocks(block, recent)
        return replace(self, page_size=self.page_size // block, inner=inner)

    @property
    def sink_pages(self) -> int:
        """The number of pages with sinks, which are never freed."""
        return -(-self.sinks // self.page_size)

    def column_of(self, pages: Integers) -> Integers:
        """Return the column in which each page of a row is while the row has it. ``pages`` may have
        any shape."""
        if self.straight:
            return pages
        reused = self.sink_pages + (pages - self.sink_pages) % (self.columns - self.sink_pages)
        return xp(pages).where(pages < self.sink_pages, pages, reused)

    def pages_in(self, written: PerRow) -> jax.Array:
        """Return the page of the row that is, or was last, in each column, int[batch, columns]. For
        an unused column, it is the first page that will be in it."""
        columns = arange_row(self.columns)
        if self.straight:
            return jnp.broadcast_to(columns, (*written.shape, self.columns))
        return self._page_in(columns, written[:, None])

    def _page_in(self, columns: jax.Array, written: jax.Array) -> jax.Array:
        newest = jnp.maximum(written - 1, 0) // self.page_size
        page = newest - (newest - columns) % (self.columns - self.sink_pages)
        return jnp.where((columns < self.sink_pages) | (page < self.sink_pages), columns, page)

    def first_visible_page(self, written: Integers) -> Integers:
        """Return the first page, apart from the sinks' pages, that queries of a row may still see,
        even after a rewind by ``rewindable`` tokens."""
        return xp(written).maximum(written - self._kept, 0) // self.page_size

    def is_kept(self, pages: jax.Array, written: jax.Array) -> jax.Array:
        """Return whether queries may still see ``pages``."""
        return (pages >= self.first_visible_page(written)) | (pages < self.sink_pages)

    def filled(self, tokens: Integers) -> Integers:
        """Return the number of pages for ``tokens`` tokens, including a last page that is not
        full."""
        return -(-tokens // self.page_size)

    def whole(self, slots: int) -> int:
        """Round ``slots`` up to whole pages, unless they fit in one page."""
        return slots if slots <= self.page_size else self.filled(slots) * self.page_size

    def spanned(self, new: int) -> int:
        """Return the maximum number of pages to which a call of ``new`` tokens writes."""
        return 1 + -(-(new - 1) // self.page_size)

    def runs(self, length: PerRow, new: int) -> list[Run]:
        """Return one run, in the slots of all pages to which the call may write."""
        first, size = length // self.page_size, self.page_size
        pages = first[:, None] + arange_row(self.spanned(new))
        return [Run(length - first * size, 0, size, columns=self.column_of(pages))]

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        slots = expand_over_rows(slots, written)
        position, marks, size = slots, expand_over_slots(written), self.page_size
        if not self.straight:
            position = self._page_in(slots // size, marks) * size + slots % size
        is_kept = position < expand_over_slots(length)
        if self.window is not None:
            is_kept &= (position >= marks - self._kept) | (position < self.sinks)
        return jnp.where(is_kept, position, -1)

    def slot_of(self, positions: Positions) -> Positions:
        column = self.column_of(positions // self.page_size)
        return column * self.page_size + positions % self.page_size

    def region_layouts(self) -> Sequence[tuple[Region, Layout | LayoutSlice]]:
        """Return the regions, each with its layout or slice of it.

        A page may have both sinks and other tokens. So each region reads whole pages from the first
        page on, and counts only its own slots.
        """
        if not self.sinks:
            return super().region_layouts()
        parts = []
        for region in self.regions():
            end = region.first + region.size
            part = LayoutSlice(self, self.slots, 0, region.first, end)
            parts.append((Region(0, self.whole(end), region.capped), part))
        return parts

    def occupied(self, length: PerRow) -> Scalar:
        return jnp.minimum(jnp.max(length), self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        start = jnp.asarray(start, jnp.int32)
        longest = jnp.max(length)
        straight = start, jnp.minimum(start + size, longest) - 1
        if self.straight:
            return straight
        # Columns that were reused may hold any of the newest positions.
        low = jnp.minimum(start, jnp.maximum(jnp.min(length) - self.slots, 0))
        reused = longest > self.slots
        return jnp.where(reused, low, start), jnp.where(reused, longest - 1, straight[1])

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """Mark slots as empty, as in `Layout.hiding`. The result is the same as if up to ``slack``
        more tokens had been written and rewound, so that the row no longer keeps the missing
        tokens."""
        if self.window is None:
            return super().hiding(length, positions, missing)
        newest = jnp.max(jnp.where(missing, positions, -1), axis=1)
        written = jnp.where(newest < 0, length, jnp.maximum(length, newest + self._kept + 1))
        in_sinks = jnp.any(missing & (positions < self.sinks), axis=1)
        return written, in_sinks | (written > length + (self.slack or 0))

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        if self.window is None:
            return length
        kept = jnp.where(written - self._kept > self.sinks, written - (self.slack or 0), 0)
        return jnp.maximum(length - kept, 0)


def unpaged_layout(layout: LayoutSpec) -> LayoutSpec:
    """Return the inner layout of a paged layout. Any other layout is returned unchanged."""
    return layout.inner if isinstance(layout, Paged) else layout


def as_paged(layout: LayoutSpec) -> Paged | None:
    """Return the layout if it is paged, otherwise None."""
    return layout if isinstance(layout, Paged) else None
