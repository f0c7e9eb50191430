"""Take, share, copy and free the pages of a cache's pools."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import is_traced
from kvjax.paging.allocator import Copies, PageAllocator, PageGroup
from kvjax.placement.pages import copy_pages

Pools = tuple[PageAllocator, ...]


def with_pools(cache: KVCache) -> KVCache:
    """Give a cache with empty rows its pools, in which all pages are free."""
    pools = tuple(empty_pool(group, cache) for group in cache.page_groups)
    return replace(cache, pools=cache.layers[0].policy.placement.put(pools))


def empty_pool(group: PageGroup, cache: KVCache) -> PageAllocator:
    """Create a pool for the rows of a cache as NumPy arrays. All its pages are free."""
    pages, mesh_sharding = group.layout.pool, cache.mesh_sharding
    assert pages is not None
    shards = 1 if mesh_sharding is None else mesh_sharding.rows
    return PageAllocator.create(pages, cache.batch, group.layout.columns, shards)


def pool_for(group: PageGroup, cache: KVCache) -> tuple[PageAllocator, RowMask]:
    """Create a pool in which each row of a cache has the pages that its tokens need.

    Returns:
      The pool, and bool[batch], the rows that got no pages because there are too few.
    """
    layout, pool = group.layout, empty_pool(group, cache)
    pool = PageAllocator(*(jnp.asarray(x) for x in (pool.table, pool.refs, pool.stack, pool.left)))

    def fill(pool: PageAllocator, length: PerRow) -> tuple[PageAllocator, RowMask]:
        units = group.units(length)
        pages = layout.pages_in(units)
        needed = (pages < layout.filled(units)[:, None]) & layout.is_kept(pages, units[:, None])
        columns = jnp.broadcast_to(arange_row(layout.columns), pages.shape)
        return pool.append(columns, needed)

    pool, ok = _on_each_shard(cache, fill, pool, cache.length)
    return pool, ~ok


def take_pages(cache: KVCache, new: int, requested: PerRow) -> tuple[Pools, RowMask, RowMask]:
    """Take the pages that a call writes to, and free pages that are out of the window.

    Args:
      cache: a cache with pools.
      new: the maximum number of tokens of a row.
      requested: int32[batch], the number of tokens of each row.

    Returns:
      The new pools; the rows that got all their pages in every pool (other rows got no page in any
      pool); and the rows whose page table refers to a page outside the pool.
    """
    groups = cache.page_groups

    def take(
        pools: Pools, length: PerRow, marks: list[PerRow], requested: PerRow
    ) -> tuple[Pools, RowMask, RowMask]:
        requests = [
            PageRequest(group, pool, length, mark, requested, new)
            for group, pool, mark in zip(groups, pools, marks, strict=True)
        ]
        results = [request.granted() for request in requests]
        ok = functools.reduce(jnp.logical_and, [granted for _, granted in results])
        after = tuple(pool for pool, _ in results)
        if len(requests) > 1:
            after = tuple(request.granted(ok)[0] for request in requests)
        invalid = jnp.zeros(length.shape, bool)
        for request, pool in zip(requests, after, strict=True):
            invalid |= request.invalid(pool, ok)
        return after, ok, invalid

    marks = [_marks(cache, group) for group in groups]
    return _on_each_shard(cache, take, cache.pools, cache.length, marks, requested)


class PageRequest:
    """The pages that a call takes from one pool, and the pages that it frees."""

    def __init__(
        self,
        group: PageGroup,
        pool: PageAllocator,
        length: PerRow,
        marks: PerRow,
        requested: PerRow,
        new: int,
    ) -> None:
        layout, units = group.layout, group.units
        self.layout, self.pool = layout, pool
        self.begin, self.end = units(length), units(length + requested)
        self.new = max(group.new_units(new), 1)
        pages = layout.filled(self.begin)[:, None] + arange_row(layout.filled(self.new))
        self.needed = pages < layout.filled(self.end)[:, None]
        self.columns = layout.column_of(pages)
        self.freed: tuple[Array, Array] | None = None
        if not layout.straight:
            before = layout.first_visible_page(units(jnp.maximum(marks, length)))[:, None]
            after = layout.first_visible_page(units(jnp.maximum(marks, length + requested)))[
                :, None
            ]
            pages = before + arange_row(layout.spanned(self.new))
            which = (pages >= layout.sink_pages) & (pages < after)
            self.freed = layout.column_of(pages), which

    def granted(self, rows: RowMask | None = None) -> tuple[PageAllocator, RowMask]:
        """Take and free the pages, for all rows or only for ``rows``. Returns the new pool, and the
        rows that got all their pages."""
        needed, freed = self.needed, self.freed
        if rows is not None:
            needed = needed & rows[:, None]
            freed = freed and (freed[0], freed[1] & rows[:, None])
        return self.pool.append(self.columns, needed, freed)

    def invalid(self, pool: PageAllocator, rows: RowMask) -> RowMask:
        """Return which of ``rows`` would write to a page that does not exist."""
        size = self.layout.page_size
        pages = (self.begin // size)[:, None] + arange_row(self.layout.spanned(self.new))
        columns = self.layout.column_of(pages)
        numbers = jnp.take_along_axis(pool.table, columns, 1, mode="fill", fill_value=-1)
        written = (pages * size < self.end[:, None]) & (self.begin < self.end)[:, None]
        bad = written & ((numbers < 0) | (numbers >= pool.pages))
        return rows & jnp.any(bad, axis=1)


def fork_pages(cache: KVCache, rows: Array) -> tuple[KVCache, RowMask]:
    """Give new rows the pages of the old rows ``rows`` (int32[n]) that they continue.

    The new rows share the pages of the old rows, except that pages to which they will write are
    copied. On a mesh, each entry of ``rows`` is an index among its device's rows.

    Returns:
      The cache with new pools and layers, and bool[n], the new rows that got all pages that they
      need.
    """
    groups, pending = cache.page_groups, cache.pending
    count = jnp.zeros_like(cache.length) if pending is None else pending.count
    new = 0 if pending is None else pending.new

    def fork(pools: Pools, length: PerRow, count: PerRow, rows: Array) -> PyTree:
        results, ok = [], jnp.ones(rows.shape, bool)
        for group, pool in zip(groups, pools, strict=True):
            columns = [x[rows] for x in _written_columns(group, length, count, new)]
            results.append(pool.fork(rows, columns))
            ok &= results[-1][2]
        pools = tuple(pool.free(~ok) for pool, _, _ in results)
        return pools, [copies for _, copies, _ in results], ok

    pools, copies, ok = _on_each_shard(cache, fork, cache.pools, cache.length, count, rows)
    return replace(cache, pools=pools, layers=_copied(cache, copies)), ok


def trim_pages(cache: KVCache, length: PerRow) -> tuple[KVCache, RowMask]:
    """Free pages of a cache, so that its rows keep only their first ``length`` tokens.

    Returns:
      The cache with new pools and layers, and bool[batch], the rows that have a page to continue
      in. Other rows keep all their pages.
    """
    groups = cache.page_groups

    def trim(pools: Pools, before: PerRow, marks: list[PerRow], length: PerRow) -> PyTree:
        ok, changes = jnp.ones(length.shape, bool), []
        for group, pool, mark in zip(groups, pools, marks, strict=True):
            layout = group.layout
            last_pages = layout.pages_in(group.units(jnp.maximum(mark, before)))
            after_end = last_pages >= layout.filled(group.units(length))[:, None]
            (last,) = _written_columns(group, length, jnp.zeros_like(length), 0)
            last = jnp.where(length < before, last, -1)
            changes.append((pool, after_end & (pool.table >= 0), last))
            ok &= pool.writable(last)
        results = []
        for pool, after_end, last in changes:
            pool, copies = pool.unshare(jnp.where(ok, last, -1))
            results.append((pool.drop(after_end & ok[:, None]), copies))
        return tuple(pool for pool, _ in results), [copies for _, copies in results], ok

    marks = [_marks(cache, group) for group in groups]
    pools, copies, ok = _on_each_shard(cache, trim, cache.pools, cache.length, marks, length)
    return replace(cache, pools=pools, layers=_copied(cache, copies)), ok


def free_pages(cache: KVCache, rows: RowMask) -> Pools:
    """Free the pages of the rows where ``rows`` (bool[batch]) is true. Returns the cache's new
    pools."""

    def free(pools: Pools, rows: RowMask) -> Pools:
        return tuple(pool.free(rows) for pool in pools)

    return _on_each_shard(cache, free, cache.pools, rows)


def _written_columns(group: PageGroup, length: PerRow, count: PerRow, new: int) -> list[Array]:
    """Return the columns of pages that rows of length ``length`` already have and will write to.

    Each array in the list is int32[batch], with -1 for rows without such a page. ``count`` and
    ``new`` describe the call in progress: the tokens of each row, and their maximum.
    """
    layout = group.layout
    begin, end = group.units(length), group.units(length + count)
    first = begin // layout.page_size
    columns = []
    for number in range(layout.spanned(group.new_units(new) + 1)):
        page = first + number
        is_written = (page * layout.page_size < end) & ((page + 1) * layout.page_size > begin)
        columns.append(jnp.where(is_written, layout.column_of(page), -1))
    return columns


def _marks(cache: KVCache, group: PageGroup) -> PerRow:
    """Return the minimum of ``written`` over the layers of a group, int32[batch]."""
    groups = enumerate(layer.policy.page_group for layer in cache.layers)
    entries = np.array([n for n, own in groups if own == group], np.int32)
    return jnp.min(cache.written[:, entries], axis=1)


def _copied(cache: KVCache, copies: Iterable[Copies]) -> tuple[LayerCache, ...]:
    """Copy pages, given as one ``Copies`` for each of the cache's page groups. Returns the cache's
    new layers."""
    by_group = dict(zip(cache.page_groups, copies, strict=True))
    sources = [pages.source for pages in by_group.values()]
    if not any(is_traced(x) or np.any(fetch(x) >= 0) for x in sources):
        return cache.layers  # the same arrays, which were not donated

    def one(layer_cache: LayerCache) -> LayerCache:
        group, stack = layer_cache.policy.page_group, layer_cache.stack
        if group is None:
            return layer_cache
        placement, orders = layer_cache.policy.placement, layer_cache.orders

        def copy(body: PyTree, source: Array, target: Array) -> PyTree:
            if stack is None:
                return copy_pages(body, orders, placement, source, target)
            # Treat the pages of all layers as one pool.
            pool = jax.tree.leaves(body)[0].shape[1]
            first = pool * jnp.arange(stack, dtype=jnp.int32)[:, None]
            pages = [jnp.where(x >= 0, x + first, -1).ravel() for x in (source, target)]
            flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), body)
            copied = copy_pages(flat, orders, placement, *pages)
            return jax.tree.map(lambda x, like: x.reshape(like.shape), copied, body)

        body = (layer_cache.keys, layer_cache.values)
        mesh_sharding = placement.mesh_sharding
        pages = by_group[group]
        if mesh_sharding is None:
            keys, values = copy(body, *pages)
        else:
            specs = layer_cache.partition_specs()
            body_specs, rows = (specs.keys, specs.values), mesh_sharding.row_spec()
            keys, values = mesh_sharding.run(
                copy, (body_specs, rows, rows), body_specs, body, *pages
            )
        return replace(layer_cache, keys=keys, values=values)

    return tuple(map(one, cache.layers))


def _on_each_shard(cache: KVCache, function: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """Apply ``function`` to pools and to arrays [batch, ...]. On a mesh, apply it on each device to
    the device's own part."""
    mesh_sharding = cache.mesh_sharding
    if mesh_sharding is None:
        return function(*args)
    rows = mesh_sharding.row_spec()
    return mesh_sharding.run(function, rows, rows, *args)
