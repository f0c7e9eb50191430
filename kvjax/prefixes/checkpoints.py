"""Checkpoints: the part of a row's state at one position that its full pages do not contain.

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
    """The state of a row after ``tokens`` tokens.

    ``arrays`` are on the host. ``tables`` has, for each cache group with a window, a page table
    (int32[columns]) whose pages have been retained; None for other groups.
    """

    tokens: int
    arrays: list[np.ndarray]
    tables: list[np.ndarray | None]


@dataclass(frozen=True)
class PendingCheckpoints:
    """Checkpoints that are being copied to the host.

    Attributes:
      which: bool[batch], the rows that have a checkpoint.
      tokens: int[batch], the number of tokens of each checkpoint.
      tables: for each cache group with a window, the retained pages, int32[batch, columns], and -1
        in other columns. None for other groups, whose rows keep their pages.
      rows: the ``row_arrays`` of all layers, [batch, ...].
      parts: partly full pages, [batch, ...].
    """

    which: np.ndarray
    tokens: np.ndarray
    tables: list[Array | None]
    rows: PyTree
    parts: list[PyTree]

    def fetched(self) -> list[tuple[int, Checkpoint]]:
        """Wait for the copies. Returns the rows, each with its checkpoint."""
        tables, *arrays = fetch((self.tables, self.rows, self.parts))
        checkpoints = []
        for row in np.flatnonzero(self.which).tolist():
            state = [np.array(x[row]) for x in jax.tree.leaves(arrays)]
            row_tables = [None if table is None else table[row] for table in tables]
            checkpoints.append((row, Checkpoint(int(self.tokens[row]), state, row_tables)))
        return checkpoints


def row_arrays(layer: LayerCache) -> PyTree:
    """Return the arrays of a layer that have a batch axis, which are all except pages."""
    body = None if layer.policy.page_group else (layer.keys, layer.values)
    return body, layer.tail, layer.low


def with_row_arrays(layer: LayerCache, arrays: PyTree) -> LayerCache:
    """Replace the ``row_arrays`` of a layer. The new arrays are moved to the memory of the layer's
    placement."""
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

    Args:
      cache: the cache.
      groups: its cache groups.
      which: bool[batch], the rows to copy.
      tokens: int[batch], the number of tokens of these rows. Entries of other rows are ignored.

    Returns:
      The cache, in which pages of windows have an additional reference, and the checkpoints.
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
    """Return the bytes of one checkpoint. ``cache`` may have shapes instead of arrays."""
    rows = tree_bytes([row_arrays(layer) for layer in cache.layers]) + tree_bytes(cache.written)
    parts = sum(group.page_bytes for group in groups if group.page_group.split is not None)
    return rows // cache.batch + parts


def restore_checkpoints(
    cache: KVCache, groups: Sequence[CacheGroup], states: Sequence[list[np.ndarray] | None]
) -> tuple[KVCache, list[list[PageArrays | None]]]:
    """Make a cache whose rows start from checkpoints.

    Args:
      cache: the shapes of the cache. Its pages stay shapes.
      groups: its cache groups.
      states: for each row, the arrays of its checkpoint, or None for an empty row.

    Returns:
      The cache, and for each cache group and row the content of the partly full page, or None.
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
