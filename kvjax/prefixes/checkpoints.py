"""Checkpoints: the state of a row at one position that its full pages do not hold.

If rows have such state (a raw tail, a window outside of pages, a partial page of blocks), a cached
sequence can only be resumed where a checkpoint was taken.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.paging.allocator import PageAllocator
from kvjax.placement.pages import gather_pages
from kvjax.prefixes.pool import CacheGroup, PageArrays


class Checkpoint(NamedTuple):
    """A row's state after ``tokens`` tokens: ``arrays`` on the host, and for each windowed cache
    group a page table, int32[columns], whose pages have been retained (None for other groups)."""

    tokens: int
    arrays: list[np.ndarray]
    tables: list[np.ndarray | None]


@dataclass(frozen=True)
class PendingCheckpoints:
    """Checkpoints that are being copied to the host.

    ``which``: bool[batch], the rows that have one; ``tokens``: int[batch], their lengths;
    ``tables``: for each windowed cache group int32[batch, columns], the retained pages, -1
    elsewhere, and None for other groups, whose rows keep their pages;
    ``rows``: the layers' ``row_arrays``, [batch, ...]; ``parts``: partial pages, [batch, ...].
    """

    which: np.ndarray
    tokens: np.ndarray
    tables: list[Array | None]
    rows: PyTree
    parts: list[PyTree]

    def fetched(self) -> list[tuple[int, Checkpoint]]:
        """Wait for the copies; the rows, and their checkpoints."""
        tables, *arrays = fetch((self.tables, self.rows, self.parts))
        checkpoints = []
        for row in np.flatnonzero(self.which).tolist():
            state = [np.array(x[row]) for x in jax.tree.leaves(arrays)]
            row_tables = [None if table is None else table[row] for table in tables]
            checkpoints.append((row, Checkpoint(int(self.tokens[row]), state, row_tables)))
        return checkpoints


def row_arrays(layer: LayerCache) -> PyTree:
    """The arrays of a layer that have a batch axis: all but pages."""
    body = None if layer.policy.page_group else (layer.keys, layer.values)
    return body, layer.tail, layer.low


def with_row_arrays(layer: LayerCache, arrays: PyTree) -> LayerCache:
    """A layer with other ``row_arrays``, moved to where its placement keeps them."""
    body, tail, low = arrays
    placement = layer.policy.placement
    if body is not None:
        keys, values = placement.store(body, layer.orders)
        layer = replace(layer, keys=keys, values=values)
    return replace(layer, tail=placement.put_tokens(tail), low=placement.put(low))


def take_checkpoints(
    cache: KVCache, groups: Sequence[CacheGroup], which: np.ndarray, tokens: np.ndarray
) -> tuple[KVCache, PendingCheckpoints]:
    """Start copying the state of some rows to the host, without waiting for it.

    Returns the cache too: in it, pages that windows will leave later have one more reference.

    Args:
      which: bool[batch], the rows to copy.
      tokens: int[batch], tokens that each row holds; any number for other rows.
    """
    partial_columns = []
    for group in groups:
        partial = [group.pages_for(int(n))[1] for n in tokens]
        columns = [0 if page is None else group.column(page) for page in partial]
        partial_columns.append(np.array(columns, np.int32))
    static = tuple(
        (group.layers, group.windowed, group.page_group.split is not None) for group in groups
    )
    pools, *copies = _take(cache, which, partial_columns, groups=static)
    pending = PendingCheckpoints(which, tokens.copy(), *copies)
    for x in jax.tree.leaves((pending.tables, pending.rows, pending.parts)):
        x.copy_to_host_async()
    return replace(cache, pools=pools), pending


@functools.partial(jax.jit, static_argnames="groups")
def _take(cache: KVCache, which: Array, partial_columns: list[Array], *, groups: Any) -> PyTree:
    pools: list[PageAllocator] = []
    tables: list[Array | None] = []
    parts: list[PyTree] = []
    for pool, columns, group in zip(cache.pools, partial_columns, groups, strict=True):
        layers, windowed, has_split = group
        table = jnp.where(which[:, None], pool.table, -1)
        pools.append(pool.retain(table.ravel()) if windowed else pool)
        tables.append(table if windowed else None)
        page = jnp.take_along_axis(pool.table, columns[:, None], axis=1)[:, 0]
        for number in layers if has_split else ():
            layer = cache.layers[number]
            body, placement = (layer.keys, layer.values), layer.policy.placement
            parts.append(gather_pages(body, layer.orders, placement, page))
    rows = [jax.tree.map(jnp.copy, row_arrays(layer.near())) for layer in cache.layers]
    return tuple(pools), tables, (rows, cache.written), parts


def checkpoint_bytes(cache: KVCache, groups: Sequence[CacheGroup]) -> int:
    """Bytes of one checkpoint; ``cache`` may hold shapes."""
    rows = tree_bytes([row_arrays(layer) for layer in cache.layers]) + tree_bytes(cache.written)
    parts = sum(group.page_bytes for group in groups if group.page_group.split is not None)
    return rows // cache.batch + parts


def restore_checkpoints(
    cache: KVCache, groups: Sequence[CacheGroup], states: Sequence[list[np.ndarray] | None]
) -> tuple[KVCache, list[list[PageArrays | None]]]:
    """Make a cache whose rows start from checkpoints.

    Args:
      cache: the cache as shapes; its pages stay shapes.
      states: for each row the arrays of its checkpoint, or None for an empty row.

    Returns:
      The cache, and for each cache group and row the content of the partial page.
    """
    shapes, structure = jax.tree.flatten(
        ([row_arrays(layer) for layer in cache.layers], cache.written)
    )
    leaves = []
    for number, x in enumerate(shapes):
        array = np.zeros(x.shape, x.dtype)
        for row, state in enumerate(states):
            if state is not None:
                array[row] = state[number]
        leaves.append(array)
    by_layer, written = jax.tree.unflatten(structure, leaves)
    layers = tuple(map(with_row_arrays, cache.layers, by_layer))
    cache = replace(cache, layers=layers, written=layers[0].policy.placement.put(written))
    parts: list[list[PageArrays | None]] = []
    start = len(shapes)
    for group in groups:
        count = 0
        if group.page_group.split is not None:
            bodies = [(cache.layers[n].keys, cache.layers[n].values) for n in group.layers]
            count = len(jax.tree.leaves(bodies))
        end = start + count
        parts.append([None if state is None else state[start:end] for state in states])
        start = end
    return cache, parts
