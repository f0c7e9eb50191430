"""What rows have beside full pages, taken at a position and put back: by the rule of sight a text
can only go on from there with what was raw there, a window, and a page that is not full.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.paging.allocator import PageAllocator
from kvjax.placement.pages import pages_at
from kvjax.prefixes.pool import CacheGroup


class Checkpoint(NamedTuple):
    """What a row had beside its full pages where its text had so many ``tokens``: ``arrays``, and
    of each kind of layers with a window its table, int32[columns], of pages that were retained."""

    tokens: int
    arrays: list[np.ndarray]
    tables: list[np.ndarray | None]


@dataclass(frozen=True)
class PendingCheckpoints:
    """What was taken of a cache's rows, on its way to the host.

    ``which``, ``tokens``: bool[batch], of which rows, and int[batch], how many tokens they had.
    ``tables``: of each kind of layers with a window int32[batch, columns], the pages that were
    retained for whoever has this, -1 elsewhere; None of the others, whose rows keep theirs.
    ``rows``: arrays [batch, ...], see ``own``; ``parts``: pages that were not full, [batch, ...].
    """

    which: np.ndarray
    tokens: np.ndarray
    tables: list[Any]
    rows: Any
    parts: list[Any]

    def fetched(self) -> list[tuple[int, Checkpoint]]:
        """Of each row that it was taken of, on the host."""
        tables, *rest = fetch((self.tables, self.rows, self.parts))
        found = []
        for row in np.flatnonzero(self.which).tolist():
            arrays = [np.array(x[row]) for x in jax.tree.leaves(rest)]
            some = [None if x is None else x[row] for x in tables]
            found.append((row, Checkpoint(int(self.tokens[row]), arrays, some)))
        return found


def row_arrays(held: LayerCache) -> Any:
    """A layer's arrays that have rows."""
    body = None if held.policy.page_group else (held.keys, held.values)
    return body, held.tail, held.low


def with_row_arrays(held: LayerCache, arrays: Any) -> LayerCache:
    """A layer with these instead, placed."""
    body, tail, low = arrays
    placement = held.policy.placement
    if body is not None:
        keys, values = placement.store(body, held.orders)
        held = replace(held, keys=keys, values=values)
    return replace(held, tail=placement.put_tokens(tail), low=placement.put(low))


def take_checkpoints(
    cache: KVCache, groups: Sequence[CacheGroup], which: np.ndarray, tokens: np.ndarray
) -> tuple[KVCache, PendingCheckpoints]:
    """What rows of a cache have where their texts have so many tokens, without waiting for it; and
    the cache, in which pages that windows will leave are retained.

    Args:
      which: bool[batch], rows that it is taken of; of others it is anything.
      tokens: int[batch].
    """
    partly = []
    for group in groups:
        pages = [group.pages_for(int(n))[1] for n in tokens]
        columns = [0 if page is None else group.column(page) for page in pages]
        partly.append(np.array(columns, np.int32))
    static = tuple(
        (group.layers, group.windowed, group.page_group.split is not None) for group in groups
    )
    pools, *rest = _take(cache, which, partly, groups=static)
    found = PendingCheckpoints(which, tokens.copy(), *rest)
    for x in jax.tree.leaves((found.tables, found.rows, found.parts)):
        x.copy_to_host_async()
    return replace(cache, pools=pools), found


@functools.partial(jax.jit, static_argnames="groups")
def _take(cache: KVCache, which: Array, partly: list[Array], *, groups: Any) -> Any:
    pools: list[PageAllocator] = []
    tables: list[Array | None] = []
    parts: list[Any] = []
    for pool, columns, (entries, windowed, splits) in zip(cache.pools, partly, groups, strict=True):
        table = jnp.where(which[:, None], pool.table, -1)
        pools.append(pool.retain(table.ravel()) if windowed else pool)
        tables.append(table if windowed else None)
        page = jnp.take_along_axis(pool.table, columns[:, None], axis=1)[:, 0]
        for entry in entries if splits else ():
            held = cache.layers[entry]
            body, placement = (held.keys, held.values), held.policy.placement
            parts.append(pages_at(body, held.orders, placement, page))
    rows = [jax.tree.map(jnp.copy, row_arrays(held.near())) for held in cache.layers]
    return tuple(pools), tables, (rows, cache.written), parts


def checkpoint_bytes(cache_shapes: KVCache, groups: Sequence[CacheGroup]) -> int:
    """What a row's state takes, by the cache's shapes."""
    rows = tree_bytes([row_arrays(held) for held in cache_shapes.layers]) + tree_bytes(
        cache_shapes.written
    )
    parts = sum(group.page_bytes for group in groups if group.page_group.split is not None)
    return rows // cache_shapes.batch + parts


def restore_checkpoints(
    cache: KVCache, groups: Sequence[CacheGroup], states: Sequence[list[np.ndarray] | None]
) -> tuple[KVCache, list[list[list[np.ndarray] | None]]]:
    """A cache of empty rows, with the arrays of some rows' states; and of each kind, for each of
    these, what stands in the page that is not full.

    ``cache``: as shapes, which its pages stay.
    """
    like = [row_arrays(held) for held in cache.layers], cache.written
    cache_shapes, form = jax.tree.flatten(like)
    rows = []
    for number, x in enumerate(cache_shapes):
        array = np.zeros(x.shape, x.dtype)
        for row, state in enumerate(states):
            if state is not None:
                array[row] = state[number]
        rows.append(array)
    owns, written = jax.tree.unflatten(form, rows)
    layers = tuple(with_row_arrays(*each) for each in zip(cache.layers, owns, strict=True))
    cache = replace(cache, layers=layers, written=layers[0].policy.placement.put(written))
    parts: list[list[list[np.ndarray] | None]] = []
    at = len(cache_shapes)
    for group in groups:
        count = 0
        if group.page_group.split is not None:
            bodies = [(cache.layers[n].keys, cache.layers[n].values) for n in group.layers]
            count = len(jax.tree.leaves(bodies))
        parts.append([None if state is None else state[at : at + count] for state in states])
        at += count
    return cache, parts
