"""What is done with whole rows: pure functions, for every layout."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import NO_SUCH_ROW, OUT_OF_PAGES, usable
from kvjax.cache.explicit_axes import automatic
from kvjax.cache.paging import forked, freed
from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.core.array_ops import flag_where
from kvjax.core.typing import Array, RowMask
from kvjax.core.validation import as_int, is_traced
from kvjax.operations.conversion import under, unpaged
from kvjax.operations.growth import with_pages_for
from kvjax.operations.rewinding import whole_numbers
from kvjax.operations.stacks import layer_by_layer


@automatic
def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    cache = usable("kvjax.fork", cache, between=False)
    copied = _changed(cache, LayerCache.copied, jnp.copy)
    return replace(copied, pools=jax.tree.map(jnp.copy, cache.pools))


@layer_by_layer
@automatic
def select(cache: KVCache, rows: Sequence[int] | Array) -> KVCache:
    """The cache of some rows, in the order asked for; one row may be asked for often.

    The reordering of a beam search (``reorder_cache``), and the way to drop rows that are done.

    Args:
      cache: the cache.
      rows: int[n], numbers of rows.

    Raises:
      ValueError: if ``rows`` is not a list of whole numbers, or names a row that is not there
        (where traced: the nearest row, and the status ``NO_SUCH_ROW``).
    """
    cache = usable("kvjax.select", cache, between=False)
    index = whole_numbers("rows must be a list of whole numbers", rows)
    if index.ndim != 1 or not index.size:
        raise ValueError(f"rows must be a list of whole numbers, got {rows!r:.80}")
    if not is_traced(index):
        wrong = [int(row) for row in np.asarray(index) if not 0 <= row < cache.batch]
        if wrong:
            raise ValueError(f"row {wrong[0]}: the cache has {cache.batch}, 0 the first")
    if cache.spread is not None:
        cache.spread.check_rows(index.shape[0])
    missing = (index < 0) | (index >= cache.batch)
    across = cache.pools and cache.spread is not None and cache.spread.rows > 1
    if across:
        # Each device has pages of its own, which rows leave.
        chosen = under(_of_rows(unpaged(cache), index), [layer.policy for layer in cache.layers])
    else:
        chosen = _of_rows(cache, index)
    return with_rows(chosen, status=chosen.status | flag_where(missing, NO_SUCH_ROW))


@layer_by_layer
@automatic
def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row ``times`` times, one behind the other: one prompt, several continuations.

    Raises:
      ValueError: if ``times`` is no whole number, at least 1.
    """
    cache = usable("kvjax.repeat", cache, between=False)
    times = as_int("times", times, 1)
    each = cache.batch if cache.spread is None else cache.batch // cache.spread.rows
    cache, had = _forked(cache, jnp.repeat(jnp.arange(cache.batch, dtype=jnp.int32) % each, times))
    repeated = _changed(
        cache, lambda layer: layer.repeated(times), lambda x: jnp.repeat(x, times, axis=0)
    )
    return without(repeated, had)


def _of_rows(cache: KVCache, index: Array) -> KVCache:
    """The cache of some rows; those that find no page to write in are empty."""
    cache, had = _forked(cache, jnp.clip(index, 0, cache.batch - 1))
    chosen = _changed(
        cache, lambda layer: layer.taken(index), lambda x: jnp.take(x, index, axis=0, mode="clip")
    )
    return without(chosen, had)


def _forked(cache: KVCache, rows: Array) -> tuple[KVCache, RowMask | None]:
    """``forked``, of a cache that has pools; with pages for all that the rows may become."""
    return forked(with_pages_for(cache, len(rows)), rows) if cache.pools else (cache, None)


def without(cache: KVCache, had: RowMask | None) -> KVCache:
    """A cache in which the rows that have not got their pages are empty."""
    if had is None:
        return cache
    length, status = jnp.where(had, cache.length, 0), flag_where(~had, OUT_OF_PAGES)
    return replace(cache, length=length, status=cache.status | status)


@automatic
def reset(cache: KVCache, rows: Array | None = None) -> KVCache:
    """Empty rows, status and all, without touching the arrays.

    Args:
      cache: the cache.
      rows: bool[batch], which; by default all.

    Raises:
      ValueError: if ``rows`` is not one truth value a row.
    """
    cache = usable("kvjax.reset", cache)
    keep = jnp.zeros(cache.batch, bool)
    if rows is not None:
        if np.shape(rows) != (cache.batch,) or jnp.asarray(rows).dtype != bool:
            raise ValueError(f"rows must be bool[batch={cache.batch}], got {rows!r:.80}")
        keep = ~jnp.asarray(rows)
    length, status = (jnp.where(keep, x, 0) for x in (cache.length, cache.status))
    written = jnp.where(keep[:, None], cache.written, 0)
    layers = tuple(
        layer if layer.low is None else replace(layer, low=jnp.where(keep, layer.low, 0))
        for layer in cache.layers
    )
    if cache.pools:
        cache = replace(cache, pools=freed(cache, ~keep))
    return with_rows(cache, layers=layers, length=length, written=written, status=status)


def _changed(
    cache: KVCache,
    layer: Callable[[LayerCache], LayerCache],
    rows: Callable[[Array], Array],
) -> KVCache:
    """The same of every layer, and of every array [batch, ...] of the cache's own."""
    layers = tuple(layer(held) for held in cache.layers)
    own = jax.tree.map(rows, replace(cache, layers=(), pools=()))
    return with_rows(own, layers=layers, pools=cache.pools)
