"""Page tables: which pages of a pool each row holds, and which are free.

Source: the block tables and reference counts of Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", arXiv:2309.06180, as pure functions.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import INT32_MAX, as_int
from kvjax.layouts import Paged, Split
from kvjax.layouts.layout import Integers


@dataclass(frozen=True)
class PageGroup:
    """Layers that share page tables, because they have the same ``layout`` and ``split``.

    ``split`` is None for layers without a tail, whose pages hold tokens. For layers with a tail,
    pages hold blocks of the body. A *unit* is such a token or block.
    """

    layout: Paged
    split: Split | None = None

    def units(self, tokens: Integers) -> Integers:
        """Return the number of units in the pages of a row that has ``tokens`` tokens."""
        return tokens if self.split is None else self.split.flushed(tokens)

    def new_units(self, tokens: int) -> int:
        """Return the maximum number of units that a call with ``tokens`` tokens writes to pages."""
        return tokens if self.split is None else -(-tokens // self.split.block)


class Copies(NamedTuple):
    """Pages to copy before anything is written to them.

    Each page in ``source`` (int32[n]) is copied to the page at the same index in ``target``
    (int32[n]). Pairs of -1 are skipped.
    """

    source: Array
    target: Array


@pytree_dataclass
class PageAllocator:
    """The page table of each row, and the free pages of a pool.

    Methods are pure and work inside ``jit``. Taking or freeing a page costs the same in a pool of
    any size.

    ``table`` (int32[rows, columns]) has the page in each column of a row, or -1 for empty columns.
    ``refs`` (int32[pages]) counts the references to each page: one per row that holds it, plus one
    per ``retain``. The first ``left`` entries of ``stack`` (int32[pages]) are the free pages.
    ``left`` is int32[1]. On a mesh it is int32[shares]: each shard of the rows has its own pages,
    numbered from 0.

    Two rows never write to the same page: rows only write after their last token, and a shared page
    is copied first.

    Example:
      ```python
      pool = kvjax.paging.PageAllocator.create(pages=8, rows=2, columns=4)
      pool, fits = jax.tree.map(jnp.asarray, pool).allocate(row=0, pages=2)
      print(pool.table)
      ```
    """

    table: Array
    refs: Array
    stack: Array
    left: Array

    @classmethod
    def create(cls, pages: int, rows: int, columns: int, shares: int = 1) -> "PageAllocator":
        """Create an allocator of NumPy arrays whose pages are all free.

        Args:
          pages: number of pages in the pool.
          rows: number of rows that take pages.
          columns: maximum number of pages of a row.
          shares: number of shards into which a mesh divides the rows and the pages.

        Raises:
          ValueError: if an argument is not a positive integer, or ``shares`` does not divide
            ``pages`` and ``rows``.
        """
        for name, value in {"pages": pages, "rows": rows, "columns": columns}.items():
            as_int(name, value, 1, INT32_MAX)
        if pages % as_int("shares", shares, 1) or rows % shares:
            raise ValueError(f"{shares} shares divide neither {pages} pages nor {rows} rows")
        own = pages // shares
        stack = np.tile(np.arange(own - 1, -1, -1, dtype=np.int32), shares)
        refs, left = np.zeros(pages, np.int32), np.full(shares, own, np.int32)
        return cls(np.full((rows, columns), -1, np.int32), refs, stack, left)  # type: ignore[arg-type]

    @property
    def pages(self) -> int:
        """The number of pages in the pool."""
        return self.refs.shape[0]

    @property
    def whole(self) -> Array:
        """The table with page numbers of the whole pool, for code that does not run per shard."""
        rows, shares = self.table.shape[0], self.left.shape[0]
        first = (
            jnp.arange(rows, dtype=jnp.int32)[:, None] // (rows // shares) * (self.pages // shares)
        )
        return jnp.where(self.table >= 0, self.table + first, -1)

    def _can_take(self, needed: PerRow, spare: PerRow | int = 0) -> RowMask:
        """Return which rows (bool[rows]) can take their number of pages in ``needed``
        (int32[rows]), if earlier rows take their pages first. ``spare`` is the number of pages that
        each row frees before."""
        more = jnp.maximum(needed - spare, 0)
        return (more == 0) | (jnp.cumsum(more, dtype=jnp.int32) <= self.left[0])

    def append(
        self, columns: Array, needed: Array, freed: tuple[Array, Array] | None = None
    ) -> tuple["PageAllocator", RowMask]:
        """Take pages for some columns of each row.

        Args:
          columns: int32[rows, n], columns of each row.
          needed: bool[rows, n], whether a column of ``columns`` needs a page.
          freed: a pair of columns (int32[rows, m]) and a mask of them (bool[rows, m]). A row frees
            its pages in these columns first, and also the pages that it already has in the
            ``needed`` columns. By default nothing is freed, and the ``needed`` columns must be
            empty.

        Returns:
          The new allocator, and bool[rows], the rows that got all their pages. Other rows are
          unchanged.
        """
        before, at, new, spare = self, columns, needed, 0
        old = jnp.zeros(needed.shape, bool)
        if freed is not None:
            again = (freed[0][:, :, None] == columns[:, None]) & needed[:, None]
            at = jnp.concatenate([columns, freed[0]], axis=1)
            new = jnp.pad(needed, ((0, 0), (0, freed[0].shape[1])))
            old = jnp.concatenate([needed, freed[1] & ~jnp.any(again, axis=2)], axis=1)
            pages = jnp.where(old, jnp.take_along_axis(self.table, at, axis=1, mode="clip"), -1)
            alone = self.refs[pages.clip(0, self.pages - 1)] == 1
            spare = (alone & (pages >= 0)).sum(1, dtype=jnp.int32)
        granted = self._can_take(needed.sum(1, dtype=jnp.int32), spare)
        new, old = new & granted[:, None], old & granted[:, None]
        if freed is not None:
            before = self.release(jnp.where(old, pages, -1).ravel())
        page, left = before._popped(new.ravel())
        page, rows = page.reshape(new.shape), jnp.arange(len(columns), dtype=jnp.int32)[:, None]
        # One write, after all reads of the old table: otherwise XLA copies the table.
        targets = jnp.where(new | old, at, self.table.shape[1])
        table = self.table.at[rows, targets].set(page, mode="drop")
        refs = before.refs.at[self._valid(page)].set(1, mode="drop")
        return replace(before, table=table, refs=refs, left=left), granted

    def allocate(self, row: Array | int, pages: Array | int) -> tuple["PageAllocator", Array]:
        """Take a page for each empty column among a row's first ``pages`` columns.

        Returns:
          The new allocator, and whether (bool[]) the row now has a page in all these columns. If
          not, the row took no page.
        """
        columns = jnp.broadcast_to(
            jnp.arange(self.table.shape[1], dtype=jnp.int32), self.table.shape
        )
        is_row = jnp.arange(self.table.shape[0], dtype=jnp.int32) == row
        fits = jnp.asarray(pages) <= self.table.shape[1]
        needed = is_row[:, None] & fits & (columns < pages) & (self.table < 0)
        after, granted = self.append(columns, needed)
        return after, fits & jnp.any(granted & is_row)

    def drop(self, which: Array) -> "PageAllocator":
        """Remove pages from the table where ``which`` (bool[rows, columns]) is true. Pages without
        other references become free."""
        page = jnp.where(which, self.table, -1).ravel()
        return replace(self, table=jnp.where(which, -1, self.table)).release(page)

    def free(self, rows: RowMask) -> "PageAllocator":
        """Remove all pages of the rows where ``rows`` (bool[batch]) is true. Pages without other
        references become free."""
        return self.drop(jnp.broadcast_to(rows[:, None], self.table.shape))

    def retain(self, pages: Array) -> "PageAllocator":
        """Increment the reference count of each page in ``pages`` (int32[n]; entries of -1 are
        skipped)."""
        return replace(self, refs=self.refs.at[self._valid(pages)].add(1, mode="drop"))

    def release(self, pages: Array) -> "PageAllocator":
        """Decrement the reference count of each page in ``pages`` (int32[n]; entries of -1 are
        skipped), and free pages whose count is then zero."""
        at = jnp.sort(self._valid(pages))
        refs = self.refs.at[at].add(-1, mode="drop")
        # A page may occur several times, and is freed once.
        first = at != jnp.concatenate([jnp.full(1, -1, jnp.int32), at[:-1]])
        none = refs[jnp.minimum(at, self.pages - 1)] == 0
        return self._pushed(refs, at, first & none & (at < self.pages))

    def fork(
        self, rows: Array, written: Sequence[Array]
    ) -> tuple["PageAllocator", Copies, RowMask]:
        """Make tables for new rows that continue ``rows`` and share their pages.

        A shared page that a new row will write to is copied.

        Args:
          rows: int32[n], the old row that each new row continues.
          written: a list of arrays int32[n]. Each has one column per new row, or -1. The new rows
            will write to their pages in these columns. Usually the list has one array, with the
            columns of last pages that are not full.

        Returns:
          The allocator of the new rows, the copies to make, and bool[n], the rows that got all
          pages that they need. The others have no pages.
        """
        table = jnp.take(self.table, rows, axis=0, mode="clip")
        after = self.retain(table.ravel()).drop(jnp.ones(self.table.shape, bool))
        after, had, copies = replace(after, table=table), jnp.ones(len(rows), bool), []
        for column in written:
            enough = after.writable(column)
            after, copied = after.unshare(column)
            had &= enough
            copies.append(copied)
        source, target = (jnp.concatenate(x) for x in zip(*copies, strict=True))
        return after.free(~had), Copies(source, target), had

    def writable(self, column: Array) -> RowMask:
        """Return for which rows (bool[rows]) the page in ``column`` is not shared, or can be copied
        to a free page. ``column`` (int32[rows]) has a column of each row, or -1."""
        return self._can_take(self._shared(column)[1].astype(jnp.int32))

    def unshare(self, column: Array) -> tuple["PageAllocator", Copies]:
        """Give each row that is ``writable`` its own page in ``column``, if its page there is
        shared.

        Returns:
          The new allocator, and the copies to make.
        """
        page, shared = self._shared(column)
        copied = shared & self._can_take(shared.astype(jnp.int32))
        target, left = self._popped(copied)
        refs = self.refs.at[self._valid(target)].set(1, mode="drop")
        at = jnp.where(copied, column, self.table.shape[1])
        table = self.table.at[jnp.arange(len(column), dtype=jnp.int32), at].set(target, mode="drop")
        source = jnp.where(copied, page, -1)
        after = replace(self, table=table, refs=refs, left=left).release(source)
        return after, Copies(source, target)

    def _shared(self, column: Array) -> tuple[Array, RowMask]:
        """Return each row's page in ``column``, and whether the row must copy it before writing. If
        only these rows hold a page, the first of them keeps it without a copy."""
        number = jnp.arange(len(column), dtype=jnp.int32)
        page = self.table[number, jnp.clip(column, 0, self.table.shape[1] - 1)]
        page = jnp.where(column >= 0, page, -1)
        valid = self._valid(page) < self.pages
        same = (page[:, None] == page[None]) & valid[None]
        earlier = jnp.any(same & (number[None] < number[:, None]), axis=1)
        others = self.refs[jnp.clip(page, 0, self.pages - 1)] > same.sum(1, dtype=jnp.int32)
        return page, valid & (others | earlier)

    def joined(self, others: Sequence["PageAllocator"], *, same: bool) -> "PageAllocator":
        """Concatenate the rows of several allocators. If ``same``, they have the same pool.
        Otherwise their pools are concatenated as well."""
        every = [self, *others]
        row_refs = [jnp.zeros_like(x.refs).at[x._valid(x.table)].add(1, mode="drop") for x in every]
        if same:
            pinned = [x.refs - rows for x, rows in zip(every, row_refs, strict=True)]
            refs = functools.reduce(jnp.maximum, pinned) + functools.reduce(jnp.add, row_refs)
            tables = [x.table for x in every]
        else:
            first = np.cumsum([0, *(x.pages for x in every)], dtype=np.int32)
            refs = jnp.concatenate([x.refs for x in every])
            tables = [
                jnp.where(x.table >= 0, x.table + offset, -1)
                for x, offset in zip(every, first[:-1], strict=True)
            ]
        used = refs > 0
        stack = jnp.argsort(used, stable=True).astype(jnp.int32)
        left = jnp.sum(~used, dtype=jnp.int32)[None]
        return PageAllocator(jnp.concatenate(tables), refs, stack, left)

    def grown(self, pages: int, columns: int) -> "PageAllocator":
        """Grow to ``pages`` pages and ``columns`` columns. The new pages are free."""
        shares, more = len(self.left), pages - self.pages
        own = self.pages // shares
        fresh = jnp.tile(jnp.arange(own, pages // shares, dtype=jnp.int32), (shares, 1))
        refs = jnp.pad(self.refs.reshape(shares, -1), ((0, 0), (0, more // shares)))
        # New pages go below the pages that are already free.
        stack = jnp.concatenate([fresh, self.stack.reshape(shares, -1)], axis=1)
        wider = ((0, 0), (0, columns - self.table.shape[1]))
        table = jnp.pad(self.table, wider, constant_values=-1)
        return PageAllocator(table, refs.ravel(), stack.ravel(), self.left + more // shares)

    def _valid(self, pages: Array) -> Array:
        """Replace page numbers that are out of range by ``self.pages``. Writes to that index are
        dropped."""
        return jnp.where((pages >= 0) & (pages < self.pages), pages, self.pages)

    def _popped(self, needed: Array) -> tuple[Array, Array]:
        """Return a free page for each True in ``needed`` (bool[n]) and -1 for the others, and the
        new ``left``."""
        count = jnp.cumsum(needed, dtype=jnp.int32)
        page = jnp.take(self.stack, self.left[0] - count, mode="clip")
        return jnp.where(needed, page, -1), self.left - count[-1]

    def _pushed(self, refs: Array, pages: Array, freed: Array) -> "PageAllocator":
        """Set ``refs``, and push the pages where ``freed`` (bool[n]) is true on the stack of free
        pages."""
        count = jnp.cumsum(freed, dtype=jnp.int32)
        at = jnp.where(freed, self.left[0] + count - 1, self.pages)
        stack = self.stack.at[at].set(pages, mode="drop")
        return replace(self, refs=refs, stack=stack, left=self.left + count[-1])


@pytree_dataclass
class FixedPageTables:
    """Page tables that the caller fills in, instead of a `PageAllocator`.

    A call only writes to pages that are in the table. If a page is missing, the row takes none of
    the call's tokens. The caller ensures that two rows never write to the same page, and that no
    page is reused while a query may still see it.

    ``table`` (int32[rows, columns]) has the page in each column of a row, or -1 for empty columns.
    ``pages`` is the number of pages in the pool.
    """

    table: Array
    pages: int = static_field()

    @property
    def whole(self) -> Array:
        """The table."""
        return self.table

    def append(
        self, columns: Array, needed: Array, freed: tuple[Array, Array] | None = None
    ) -> tuple["FixedPageTables", RowMask]:
        """Return the tables unchanged, and the rows that have a page in every ``needed`` column;
        see `PageAllocator.append`."""
        pages = jnp.take_along_axis(self.table, columns, axis=1, mode="fill", fill_value=-1)
        return self, jnp.all(~needed | (pages >= 0), axis=1)
