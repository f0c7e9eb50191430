"""Which pages of a kind of layers a text needs, to go on from a position."""

import functools
from dataclasses import dataclass

from kvjax.paging.allocator import PageGroup


@dataclass(frozen=True)
class Kind:
    """Layers that go by the same tables: ``entries`` of ``KVCache.layers``, and what ``page_bytes``
    a page of all of them takes. Positions and pages are counted through a text, by whole numbers.
    """

    page_group: PageGroup
    entries: tuple[int, ...] = ()
    page_bytes: int = 0

    @property
    def page(self) -> int:
        """Tokens of a page."""
        split = self.page_group.split
        return self.page_group.layout.page_size * (1 if split is None else split.block)

    @property
    def moves(self) -> bool:
        """Whether a window leaves pages behind."""
        return not self.page_group.layout.straight

    def needed(self, tokens: int) -> tuple[tuple[int, ...], int | None]:
        """The full pages that a text of so many tokens has, and that which is not full, or None."""
        return _needed(self.page_group, tokens)

    def column(self, page: int) -> int:
        """Where a row's table has a page."""
        return _column(self.page_group, page)

    def most(self, tokens: int) -> int:
        """Pages that a row has at once, at most, on its way to so many tokens."""
        layout = self.page_group.layout
        return min(-(-tokens // self.page), layout.columns)


@functools.lru_cache(maxsize=65536)
def _needed(page_group: PageGroup, tokens: int) -> tuple[tuple[int, ...], int | None]:
    layout, units = page_group.layout, int(page_group.units(tokens))
    first, full = int(layout.gone_before(units)), units // layout.page_size
    pages = (q for q in range(full) if q >= first or q < layout.sink_pages)
    return tuple(pages), full if units % layout.page_size else None


@functools.lru_cache(maxsize=65536)
def _column(page_group: PageGroup, page: int) -> int:
    return int(page_group.layout.column_of(page))
