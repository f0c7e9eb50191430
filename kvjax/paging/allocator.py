"""Page tables: which pages of a pool each row holds."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import INT32_MAX, as_int
from kvjax.layouts import Paged, Split


@dataclass(frozen=True)
class PageGroup:
    """What layers have in common that go by the same tables: their ``layout``, of tokens or, where
    ``split`` says how these are divided, of a body's blocks."""

    layout: Paged
    split: Split | None = None

    def units(self, tokens: Any) -> Any:
        """Units that stand in pages where the text has so many tokens."""
        return tokens if self.split is None else self.split.flushed(tokens)

    def new_units(self, tokens: int) -> int:
        """Units that a call of so many tokens puts into pages, at most."""
        return tokens if self.split is None else -(-tokens // self.split.block)


class Copies(NamedTuple):
    """Pages to copy before anything is written: int32[n] each, −1 for none."""

    source: Array
    target: Array


@pytree_dataclass
class PageAllocator:
    """Rows' tables of pages, and what is free: a small state of whole numbers, of pure functions,
    inside ``jit`` and outside. A page that is taken or given back costs the same in any pool.

    ``table``: int32[rows, columns], the page of each column, −1 for none. ``refs``: int32[pages],
    how many have each: rows, and whoever called ``retain``. ``stack``: int32[pages], of which
    the first ``left`` are free. ``left``: int32[shares], on a mesh one for each share of the
    rows and of the pages, whose numbers are its own; else int32[1].
    No page has two writers: rows write behind their texts, where what they share is copied.
    """

    table: Array
    refs: Array
    stack: Array
    left: Array

    @classmethod
    def create(cls, pages: int, rows: int, columns: int, shares: int = 1) -> "PageAllocator":
        """All pages free; as NumPy's arrays.

        Args:
          pages: of the pool.
          rows: that take some.
          columns: pages that a row can have.
          shares: of a mesh, that have as many rows and pages each.

        Raises:
          ValueError: if one is no positive whole number, or does not divide what it shares.
        """
        for name, value in {"pages": pages, "rows": rows, "columns": columns}.items():
            as_int(name, value, 1, INT32_MAX)
        if pages % as_int("shares", shares, 1) or rows % shares:
            raise ValueError(f"{shares} shares divide neither {pages} pages nor {rows} rows")
        each = pages // shares
        stack = np.tile(np.arange(each - 1, -1, -1, dtype=np.int32), shares)
        refs, left = np.zeros(pages, np.int32), np.full(shares, each, np.int32)
        return cls(np.full((rows, columns), -1, np.int32), refs, stack, left)  # type: ignore[arg-type]

    @property
    def pages(self) -> int:
        return self.refs.shape[0]

    @property
    def whole(self) -> Array:
        """The table with numbers of the whole pool, for what is not done on each share."""
        rows, shares = self.table.shape[0], self.left.shape[0]
        first = (
            jnp.arange(rows, dtype=jnp.int32)[:, None] // (rows // shares) * (self.pages // shares)
        )
        return jnp.where(self.table >= 0, self.table + first, -1)

    def room(self, wanted: PerRow, spare: PerRow | int = 0) -> RowMask:
        """bool[rows]: the rows that can have so many pages, int32[rows], the first ones first.
        ``spare``: pages of its own that each gives back before."""
        more = jnp.maximum(wanted - spare, 0)
        return (more == 0) | (jnp.cumsum(more, dtype=jnp.int32) <= self.left[0])

    def append(
        self, columns: Array, wanted: Array, gone: tuple[Array, Array] | None = None
    ) -> tuple["PageAllocator", RowMask]:
        """A page more in some columns of each row.

        Args:
          columns: int32[rows, n], each row's own.
          wanted: bool[rows, n], which of them want one.
          gone: columns, and which of them, whose pages rows that get theirs give back before, and
            those that stand in ``columns``; by default none, and none stands there.

        Returns:
          The allocator, and bool[rows], the rows that have got all their pages; others got none.
        """
        before, at, new, spare = self, columns, wanted, 0
        old = jnp.zeros(wanted.shape, bool)
        if gone is not None:
            again = (gone[0][:, :, None] == columns[:, None]) & wanted[:, None]
            at = jnp.concatenate([columns, gone[0]], axis=1)
            new = jnp.pad(wanted, ((0, 0), (0, gone[0].shape[1])))
            old = jnp.concatenate([wanted, gone[1] & ~jnp.any(again, axis=2)], axis=1)
            pages = jnp.where(old, jnp.take_along_axis(self.table, at, axis=1, mode="clip"), -1)
            alone = self.refs[pages.clip(0, self.pages - 1)] == 1
            spare = (alone & (pages >= 0)).sum(1, dtype=jnp.int32)
        had = self.room(wanted.sum(1, dtype=jnp.int32), spare)
        new, old = new & had[:, None], old & had[:, None]
        if gone is not None:
            before = self.release(jnp.where(old, pages, -1).ravel())
        page, left = before._popped(new.ravel())
        page, rows = page.reshape(new.shape), jnp.arange(len(columns), dtype=jnp.int32)[:, None]
        # In one go, behind all that is read of the old table: else that would be copied.
        there = jnp.where(new | old, at, self.table.shape[1])
        table = self.table.at[rows, there].set(page, mode="drop")
        refs = before.refs.at[self._valid(page)].set(1, mode="drop")
        return replace(before, table=table, refs=refs, left=left), had

    def allocate(self, row: Array | int, pages: Array | int) -> tuple["PageAllocator", Array]:
        """Pages for a row's first columns that have none; and bool[], whether it has them all."""
        columns = jnp.broadcast_to(
            jnp.arange(self.table.shape[1], dtype=jnp.int32), self.table.shape
        )
        mine = jnp.arange(self.table.shape[0], dtype=jnp.int32) == row
        fits = jnp.asarray(pages) <= self.table.shape[1]
        wanted = mine[:, None] & fits & (columns < pages) & (self.table < 0)
        after, had = self.append(columns, wanted)
        return after, fits & jnp.any(had & mine)

    def drop(self, which: Array) -> "PageAllocator":
        """Without the pages of columns, bool[rows, columns]: free, if nobody else has them."""
        page = jnp.where(which, self.table, -1).ravel()
        return replace(self, table=jnp.where(which, -1, self.table)).release(page)

    def free(self, rows: RowMask) -> "PageAllocator":
        """Without all pages of some rows, bool[rows]."""
        return self.drop(jnp.broadcast_to(rows[:, None], self.table.shape))

    def retain(self, pages: Array) -> "PageAllocator":
        """With one more who has ``pages``, int32[n], −1 for none."""
        return replace(self, refs=self.refs.at[self._valid(pages)].add(1, mode="drop"))

    def release(self, pages: Array) -> "PageAllocator":
        """With one fewer who has ``pages``, int32[n], −1 for none; free, if nobody else does."""
        at = jnp.sort(self._valid(pages))
        refs = self.refs.at[at].add(-1, mode="drop")
        # A page may be named often, and is freed once.
        first = at != jnp.concatenate([jnp.full(1, -1, jnp.int32), at[:-1]])
        none = refs[jnp.minimum(at, self.pages - 1)] == 0
        return self._pushed(refs, at, first & none & (at < self.pages))

    def fork(
        self, rows: Array, written: Sequence[Array]
    ) -> tuple["PageAllocator", Copies, RowMask]:
        """The tables of rows that go on from ``rows``, which share their pages; a page that is
        still written to, and that another one has, is copied.

        Args:
          rows: int32[n], the old row of each new one.
          written: columns int32[n] that each new row will write in where it has pages there, −1 for
            none: of a text the last one, if it is not full.

        Returns:
          The allocator of the new rows; what to copy; and bool[n], those that have what they need.
          The others have no pages.
        """
        table = jnp.take(self.table, rows, axis=0, mode="clip")
        after = self.retain(table.ravel()).drop(jnp.ones(self.table.shape, bool))
        after, had, copies = replace(after, table=table), jnp.ones(len(rows), bool), []
        for column in written:
            enough = after.writable(column)
            after, copied = after.apart(column)
            had &= enough
            copies.append(copied)
        source, target = (jnp.concatenate(x) for x in zip(*copies, strict=True))
        return after.free(~had), Copies(source, target), had

    def writable(self, column: Array) -> RowMask:
        """bool[rows]: those that can have a page of their own in ``column``, int32[rows], or −1."""
        return self.room(self._shared(column)[1].astype(jnp.int32))

    def apart(self, column: Array) -> tuple["PageAllocator", Copies]:
        """With a page of its own in ``column`` for rows that are ``writable``; and what to copy."""
        page, shared = self._shared(column)
        copied = shared & self.room(shared.astype(jnp.int32))
        target, left = self._popped(copied)
        refs = self.refs.at[self._valid(target)].set(1, mode="drop")
        at = jnp.where(copied, column, self.table.shape[1])
        table = self.table.at[jnp.arange(len(column), dtype=jnp.int32), at].set(target, mode="drop")
        source = jnp.where(copied, page, -1)
        after = replace(self, table=table, refs=refs, left=left).release(source)
        return after, Copies(source, target)

    def _shared(self, column: Array) -> tuple[Array, RowMask]:
        """Each row's page in a column, and whether it must be copied to be written: its first
        writer keeps one that nobody else has."""
        number = jnp.arange(len(column), dtype=jnp.int32)
        page = self.table[number, jnp.clip(column, 0, self.table.shape[1] - 1)]
        page = jnp.where(column >= 0, page, -1)
        valid = self._valid(page) < self.pages
        same = (page[:, None] == page[None]) & valid[None]
        earlier = jnp.any(same & (number[None] < number[:, None]), axis=1)
        others = self.refs[jnp.clip(page, 0, self.pages - 1)] > same.sum(1, dtype=jnp.int32)
        return page, valid & (others | earlier)

    def joined(self, others: Sequence["PageAllocator"], *, same: bool) -> "PageAllocator":
        """The rows of this and others: of the ``same`` pool, or of pools one behind the other."""
        every = [self, *others]
        held = [jnp.zeros_like(x.refs).at[x._valid(x.table)].add(1, mode="drop") for x in every]
        if same:
            pinned = [x.refs - rows for x, rows in zip(every, held, strict=True)]
            refs = functools.reduce(jnp.maximum, pinned) + functools.reduce(jnp.add, held)
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
        """With more pages, all of them free, and columns."""
        shares, more = len(self.left), pages - self.pages
        each = self.pages // shares
        fresh = jnp.tile(jnp.arange(each, pages // shares, dtype=jnp.int32), (shares, 1))
        refs = jnp.pad(self.refs.reshape(shares, -1), ((0, 0), (0, more // shares)))
        # Below those that are free already.
        stack = jnp.concatenate([fresh, self.stack.reshape(shares, -1)], axis=1)
        wider = ((0, 0), (0, columns - self.table.shape[1]))
        table = jnp.pad(self.table, wider, constant_values=-1)
        return PageAllocator(table, refs.ravel(), stack.ravel(), self.left + more // shares)

    def _valid(self, pages: Array) -> Array:
        """Pages, and one that is not there in place of what is none."""
        return jnp.where((pages >= 0) & (pages < self.pages), pages, self.pages)

    def _popped(self, wanted: Array) -> tuple[Array, Array]:
        """A free page for each of ``wanted``, bool[n], −1 for the others, and what is left."""
        count = jnp.cumsum(wanted, dtype=jnp.int32)
        page = jnp.take(self.stack, self.left[0] - count, mode="clip")
        return jnp.where(wanted, page, -1), self.left - count[-1]

    def _pushed(self, refs: Array, pages: Array, freed: Array) -> "PageAllocator":
        count = jnp.cumsum(freed, dtype=jnp.int32)
        at = jnp.where(freed, self.left[0] + count - 1, self.pages)
        stack = self.stack.at[at].set(pages, mode="drop")
        return replace(self, refs=refs, stack=stack, left=self.left + count[-1])


@pytree_dataclass
class FixedPageTables:
    """Rows' tables alone, in the place of a ``PageAllocator``: a call finds the pages that it
    writes in there already, or takes none of its tokens.

    ``table``: int32[rows, columns], the page of each column, −1 for none; ``pages``: of the pool.
    Whoever fills it in must see to it that no page has two writers, and that none is given away
    which a query may see yet.
    """

    table: Array
    pages: int = static_field()

    @property
    def whole(self) -> Array:
        """The table."""
        return self.table

    def append(
        self, columns: Array, wanted: Array, gone: tuple[Array, Array] | None = None
    ) -> tuple["GivenPages", RowMask]:
        """As it is, and bool[rows], the rows that have a page in all columns, int32[rows, n], where
        one is wanted, bool[rows, n]."""
        found = jnp.take_along_axis(self.table, columns, axis=1, mode="fill", fill_value=-1)
        return self, jnp.all(~wanted | (found >= 0), axis=1)
