"""Pages of a cache's pools: taken as rows grow, given back, shared."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import is_traced
from kvjax.paging.allocator import Copies, PageAllocator, PageGroup
from kvjax.placement.pages import copied_pages

Pools = tuple[PageAllocator, ...]


def with_pools(cache: KVCache) -> KVCache:
    """A cache whose rows are empty, with pools of which all pages are free."""
    pools = tuple(empty_pool(kind, cache) for kind in cache.page_groups)
    return replace(cache, pools=cache.layers[0].policy.placement.put(pools))


def empty_pool(page_group: PageGroup, cache: KVCache) -> PageAllocator:
    """A pool for a cache's rows, of which all pages are free; as NumPy's arrays."""
    pool, spread = page_group.layout.pool, cache.spread
    assert pool is not None
    shares = 1 if spread is None else spread.rows
    return PageAllocator.create(pool, cache.batch, page_group.layout.columns, shares)


def pool_for(page_group: PageGroup, cache: KVCache) -> tuple[PageAllocator, RowMask]:
    """A pool of which the rows of a cache have what their texts need, and the rows for which there
    are not enough pages; they have none."""
    layout, pool = page_group.layout, empty_pool(page_group, cache)
    pool = PageAllocator(*(jnp.asarray(x) for x in (pool.table, pool.refs, pool.stack, pool.left)))

    def of(pool: PageAllocator, length: PerRow) -> Any:
        units = page_group.units(length)
        pages = layout.pages_in(units)
        wanted = (pages < layout.filled(units)[:, None]) & layout.is_kept(pages, units[:, None])
        columns = jnp.broadcast_to(arange_row(layout.columns), pages.shape)
        return pool.append(columns, wanted)

    pool, had = _on_each(cache, of, pool, cache.length)
    return pool, ~had


def take_pages(cache: KVCache, new: int, asked: PerRow) -> tuple[Pools, RowMask, RowMask]:
    """The pools, with the pages that a call of ``asked`` tokens a row, ``new`` at most, writes in,
    and without those that windows have left; the rows that have got all their pages, in every pool:
    the others none in any; and those whose tables are none."""
    page_groups = cache.page_groups

    def of(pools: Pools, length: PerRow, marks: list[PerRow], asked: PerRow) -> Any:
        requests = [
            PageRequest(page_group, pool, length, mark, asked, new)
            for page_group, pool, mark in zip(page_groups, pools, marks, strict=True)
        ]
        alone = [request.taken() for request in requests]
        had = functools.reduce(jnp.logical_and, [had for _, had in alone])
        after = tuple(pool for pool, _ in alone)
        if len(requests) > 1:
            after = tuple(request.taken(had)[0] for request in requests)
        bad = jnp.zeros(length.shape, bool)
        for request, pool in zip(requests, after, strict=True):
            bad |= request.astray(pool, had)
        return after, had, bad

    found: tuple[Pools, RowMask, RowMask] = _on_each(
        cache, of, cache.pools, cache.length, [_marks(cache, each) for each in page_groups], asked
    )
    return found


class PageRequest:
    """What a call wants of a pool, and what it leaves."""

    def __init__(
        self,
        page_group: PageGroup,
        pool: PageAllocator,
        length: PerRow,
        marks: PerRow,
        asked: PerRow,
        new: int,
    ) -> None:
        layout, units = page_group.layout, page_group.units
        self.layout, self.pool = layout, pool
        self.begin, self.end = units(length), units(length + asked)
        self.new = max(page_group.new_units(new), 1)
        pages = layout.filled(self.begin)[:, None] + arange_row(layout.filled(self.new))
        self.wanted = pages < layout.filled(self.end)[:, None]
        self.columns = layout.column_of(pages)
        self.gone: Any = None
        if not layout.straight:
            before = layout.gone_before(units(jnp.maximum(marks, length)))[:, None]
            after = layout.gone_before(units(jnp.maximum(marks, length + asked)))[:, None]
            pages = before + arange_row(layout.spanned(self.new))
            which = (pages >= layout.sink_pages) & (pages < after)
            self.gone = layout.column_of(pages), which

    def taken(self, rows: RowMask | None = None) -> tuple[PageAllocator, RowMask]:
        """The pool after the call of some rows, and those that have got their pages."""
        wanted, gone = self.wanted, self.gone
        if rows is not None:
            wanted = wanted & rows[:, None]
            gone = gone and (gone[0], gone[1] & rows[:, None])
        return self.pool.append(self.columns, wanted, gone)

    def astray(self, pool: PageAllocator, rows: RowMask) -> RowMask:
        """Rows that write where their table has no page."""
        size = self.layout.page_size
        pages = (self.begin // size)[:, None] + arange_row(self.layout.spanned(self.new))
        columns = self.layout.column_of(pages)
        found = jnp.take_along_axis(pool.table, columns, 1, mode="fill", fill_value=-1)
        written = (pages * size < self.end[:, None]) & (self.begin < self.end)[:, None]
        bad = written & ((found < 0) | (found >= pool.pages))
        return rows & jnp.any(bad, axis=1)


def fork_pages(cache: KVCache, rows: Array) -> tuple[KVCache, RowMask]:
    """A cache's pools and its layers' pages for rows that go on from ``rows``, int32[n], and which
    of these have got what they need. On a mesh ``rows`` are of a device's own."""
    page_groups, pending = cache.page_groups, cache.pending
    count = jnp.zeros_like(cache.length) if pending is None else pending.count
    new = 0 if pending is None else pending.new

    def of(pools: Pools, length: PerRow, count: PerRow, rows: Array) -> Any:
        found, had = [], jnp.ones(rows.shape, bool)
        for page_group, pool in zip(page_groups, pools, strict=True):
            columns = [x[rows] for x in _written(page_group, length, count, new)]
            found.append(pool.fork(rows, columns))
            had &= found[-1][2]
        pools = tuple(pool.free(~had) for pool, _, _ in found)
        return pools, [copies for _, copies, _ in found], had

    pools, copies, had = _on_each(cache, of, cache.pools, cache.length, count, rows)
    return replace(cache, pools=pools, layers=_copied(cache, copies)), had


def trim_pages(cache: KVCache, length: PerRow) -> tuple[KVCache, RowMask]:
    """A cache's pools and its layers' pages for rows that are to have the first ``length`` tokens
    alone; and the rows that find a page to go on in: the others have what they had."""
    page_groups = cache.page_groups

    def of(pools: Pools, before: PerRow, marks: list[PerRow], length: PerRow) -> Any:
        had, changes = jnp.ones(length.shape, bool), []
        for page_group, pool, mark in zip(page_groups, pools, marks, strict=True):
            layout = page_group.layout
            held = layout.pages_in(page_group.units(jnp.maximum(mark, before)))
            behind = held >= layout.filled(page_group.units(length))[:, None]
            (last,) = _written(page_group, length, jnp.zeros_like(length), 0)
            last = jnp.where(length < before, last, -1)
            changes.append((pool, behind & (pool.table >= 0), last))
            had &= pool.writable(last)
        found = []
        for pool, behind, last in changes:
            pool, copies = pool.apart(jnp.where(had, last, -1))
            found.append((pool.drop(behind & had[:, None]), copies))
        return tuple(pool for pool, _ in found), [copies for _, copies in found], had

    marks = [_marks(cache, each) for each in page_groups]
    pools, copies, had = _on_each(cache, of, cache.pools, cache.length, marks, length)
    return replace(cache, pools=pools, layers=_copied(cache, copies)), had


def free_pages(cache: KVCache, rows: RowMask) -> Pools:
    """A cache's pools without the pages of some rows, bool[batch]."""

    def of(pools: Pools, rows: RowMask) -> Pools:
        return tuple(pool.free(rows) for pool in pools)

    found: Pools = _on_each(cache, of, cache.pools, rows)
    return found


def _written(page_group: PageGroup, length: PerRow, count: PerRow, new: int) -> list[Array]:
    """The columns, int32[batch] each, that rows write in where they have pages there, -1 for none:
    behind ``length``, and of a call that has begun with ``count`` tokens, ``new`` at most."""
    layout = page_group.layout
    begin, end = page_group.units(length), page_group.units(length + count)
    first = begin // layout.page_size
    columns = []
    for number in range(layout.spanned(page_group.new_units(new) + 1)):
        page = first + number
        there = (page * layout.page_size < end) & ((page + 1) * layout.page_size > begin)
        columns.append(jnp.where(there, layout.column_of(page), -1))
    return columns


def _marks(cache: KVCache, page_group: PageGroup) -> PerRow:
    """int32[batch]: what all layers of a kind have written."""
    kinds = enumerate(layer.policy.page_group for layer in cache.layers)
    mine = np.array([n for n, kind in kinds if kind == page_group], np.int32)
    return jnp.min(cache.written[:, mine], axis=1)


def _copied(cache: KVCache, copies: Iterable[Copies]) -> tuple[LayerCache, ...]:
    """The layers, with the pages of each kind copied."""
    of_kind = dict(zip(cache.page_groups, copies, strict=True))
    sources = [found.source for found in of_kind.values()]
    if not any(is_traced(x) or np.any(fetch(x) >= 0) for x in sources):
        return cache.layers  # the arrays that they are, though nobody gave them away

    def one(held: LayerCache) -> LayerCache:
        page_group = held.policy.page_group
        if page_group is None:
            return held
        found, placement, orders = of_kind[page_group], held.policy.placement, held.orders

        def copy(body: Any, source: Array, target: Array) -> Any:
            if held.stack is None:
                return copied_pages(body, orders, placement, source, target)
            # Those of every layer of a stack, whose pages stand behind one another.
            pool = jax.tree.leaves(body)[0].shape[1]
            behind = pool * jnp.arange(held.stack, dtype=jnp.int32)[:, None]
            every = [jnp.where(x >= 0, x + behind, -1).ravel() for x in (source, target)]
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), body)
            copied = copied_pages(flat, orders, placement, *every)
            return jax.tree.map(lambda x, like: x.reshape(like.shape), copied, body)

        body, spread = (held.keys, held.values), placement.spread
        if spread is None:
            keys, values = copy(body, *found)
        else:
            specs = held.partition_specs()
            of_body, rows = (specs.keys, specs.values), spread.row_spec()
            keys, values = spread.run(copy, (of_body, rows, rows), of_body, body, *found)
        return replace(held, keys=keys, values=values)

    return tuple(map(one, cache.layers))


def _on_each(cache: KVCache, change: Callable[..., Any], *args: Any) -> Any:
    """``change`` of arrays [batch, ...] and pools; on a mesh each device's own."""
    spread = cache.spread
    if spread is None:
        return change(*args)
    rows = spread.row_spec()
    return spread.run(change, rows, rows, *args)
