"""Operations on rows: copy, select, repeat, empty and rewind rows, and branch in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.checks import NO_SUCH_ROW, OUT_OF_PAGES, REWOUND_TOO_FAR, validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.paging import fork_pages, free_pages, trim_pages
from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.core import control_flow
from kvjax.core.array_ops import flag_where
from kvjax.core.typing import Array, Counts, PerRow, RowMask
from kvjax.core.validation import UNLIMITED, ArgumentError, as_int, is_traced
from kvjax.operations.capacity import grow_pools_for
from kvjax.operations.conversion import with_policies, without_pages
from kvjax.operations.stacks import layer_by_layer
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS, Order


@automatic_axes
def fork(cache: KVCache) -> KVCache:
    """Copy a cache. The copy survives the donation of the original.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      kept = kvjax.fork(cache)  # survives when ``cache`` is donated
      ```
    """
    cache = validated("kvjax.fork", cache, between=False)
    copied = _map_rows(cache, LayerCache.copy, jnp.copy)
    return replace(copied, pools=jax.tree.map(jnp.copy, cache.pools))


@layer_by_layer
@automatic_axes
def select(cache: KVCache, rows: Sequence[int] | Array) -> KVCache:
    """Select rows, in any order and with repetitions.

    This reorders the beams of a beam search (``reorder_cache``), and drops finished rows.

    Args:
      cache: the cache.
      rows: int[n], row indices.

    Raises:
      ValueError: if ``rows`` is not a list of integers, or has an index out of range. For a traced
        index out of range, the nearest row is taken and gets the status ``NO_SUCH_ROW`` instead.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, batch=3, max_len=64)
      cache = kvjax.select(cache, [2, 0])  # two rows, in this order
      ```
    """
    cache = validated("kvjax.select", cache, between=False)
    index = as_int_array("rows must be a list of integers", rows)
    if index.ndim != 1 or not index.size:
        raise ArgumentError(f"rows must be a list of integers, got {rows!r:.80}", param="rows")
    if not is_traced(index):
        wrong = [int(row) for row in np.asarray(index) if not 0 <= row < cache.batch]
        if wrong:
            raise ValueError(f"row {wrong[0]} is out of range: the cache has {cache.batch} rows")
    if cache.mesh_sharding is not None:
        cache.mesh_sharding.check_rows(index.shape[0])
    missing = (index < 0) | (index >= cache.batch)
    if cache.pools and cache.mesh_sharding is not None and cache.mesh_sharding.rows > 1:
        # Each device has its own pool, and rows may move to a different device.
        policies = [layer.policy.with_pool(index.shape[0]) for layer in cache.layers]
        selected = with_policies(_select(without_pages(cache), index), policies)
    else:
        selected = _select(cache, index)
    return with_rows(selected, status=selected.status | flag_where(missing, NO_SUCH_ROW))


@layer_by_layer
@automatic_axes
def repeat(cache: KVCache, times: int) -> KVCache:
    """Repeat every row ``times`` times, in adjacent rows, for several continuations of one prompt.

    Raises:
      ValueError: if ``times`` is not a positive integer.

    Example:
      ```python
      cache, logits = kvjax.prefill(lm, ["The json module"], max_len=64)
      cache, logits = kvjax.repeat(cache, 4), jnp.repeat(logits, 4, axis=0)
      ```
    """
    cache = validated("kvjax.repeat", cache, between=False)
    times = as_int("times", times, 1)
    per_device = (
        cache.batch if cache.mesh_sharding is None else cache.batch // cache.mesh_sharding.rows
    )
    rows = jnp.arange(cache.batch, dtype=jnp.int32) % per_device
    cache, allocated = _fork_pages(cache, jnp.repeat(rows, times))
    repeated = _map_rows(
        cache, lambda layer: layer.repeat_rows(times), lambda x: jnp.repeat(x, times, axis=0)
    )
    return empty_unallocated(repeated, allocated)


def _select(cache: KVCache, index: Array) -> KVCache:
    """Select rows. A row for which the pool has no page to write to becomes empty."""
    cache, allocated = _fork_pages(cache, jnp.clip(index, 0, cache.batch - 1))
    selected = _map_rows(
        cache,
        lambda layer: layer.take_rows(index),
        lambda x: jnp.take(x, index, axis=0, mode="clip"),
    )
    return empty_unallocated(selected, allocated)


def _fork_pages(cache: KVCache, rows: Array) -> tuple[KVCache, RowMask | None]:
    """Grow the pools for ``rows``, and call ``fork_pages``. Returns (cache, None) if no layer is
    paged."""
    return fork_pages(grow_pools_for(cache, len(rows)), rows) if cache.pools else (cache, None)


def empty_unallocated(cache: KVCache, allocated: RowMask | None) -> KVCache:
    """Empty the rows that got no pages, and give them the status ``OUT_OF_PAGES``."""
    if allocated is None:
        return cache
    length, status = jnp.where(allocated, cache.length, 0), flag_where(~allocated, OUT_OF_PAGES)
    return replace(cache, length=length, status=cache.status | status)


@automatic_axes
def reset(cache: KVCache, rows: Array | None = None) -> KVCache:
    """Empty rows and clear their status, without touching the layers' arrays.

    Args:
      cache: the cache.
      rows: bool[batch], the rows to empty; by default all.

    Raises:
      ValueError: if ``rows`` is not bool[batch].

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, batch=2, max_len=64)
      cache = kvjax.reset(cache, jnp.array([True, False]))
      ```
    """
    cache = validated("kvjax.reset", cache)
    keep = jnp.zeros(cache.batch, bool)
    if rows is not None:
        if np.shape(rows) != (cache.batch,) or jnp.asarray(rows).dtype != bool:
            raise ArgumentError(
                f"rows must be bool[batch={cache.batch}], got {rows!r:.80}", param="rows"
            )
        keep = ~jnp.asarray(rows)
    length, status = (jnp.where(keep, x, 0) for x in (cache.length, cache.status))
    written = jnp.where(keep[:, None], cache.written, 0)
    layers = tuple(
        layer if layer.low is None else replace(layer, low=jnp.where(keep, layer.low, 0))
        for layer in cache.layers
    )
    if cache.pools:
        cache = replace(cache, pools=free_pages(cache, ~keep))
    return with_rows(cache, layers=layers, length=length, written=written, status=status)


def _map_rows(
    cache: KVCache,
    change_layer: Callable[[LayerCache], LayerCache],
    change_array: Callable[[Array], Array],
) -> KVCache:
    """Apply ``change_layer`` to every layer, and ``change_array`` to the cache's own arrays [batch,
    ...]."""
    layers = tuple(change_layer(layer) for layer in cache.layers)
    own = jax.tree.map(change_array, replace(cache, layers=(), pools=()))
    return with_rows(own, layers=layers, pools=cache.pools)


@automatic_axes
def rewindable(cache: KVCache) -> PerRow:
    """Return how many of the newest tokens ``rewind`` can remove from each row, int32[batch].

    A ring overwrites tokens that are older than its window and slack, so it can't be rewound to a
    position whose queries would see overwritten tokens.

    Example:
      ```python
      cache, _ = kvjax.prefill(lm, ["The json module"], max_len=64)
      print(kvjax.rewindable(cache))  # how many tokens each row can forget
      ```
    """
    cache = validated("kvjax.rewindable", cache)
    per_layer = [
        _rewindable(layer, cache.length, cache.written[:, entry])
        for entry, layer in enumerate(cache.layers)
    ]
    return jnp.min(jnp.stack(per_layer), axis=0)


@automatic_axes
def rewind(cache: KVCache, tokens: int | Counts) -> KVCache:
    """Remove the newest tokens of each row.

    Args:
      cache: the cache.
      tokens: one number of tokens for all rows, or int32[batch], one number per row.

    Returns:
      The cache. A row that can't be rewound this far (see ``rewindable``) is not changed and gets
      the status ``REWOUND_TOO_FAR``. A paged row returns pages to its pool. If its last page is
      shared, the page is copied. If no page is free for the copy, the row is not changed and gets
      the status ``OUT_OF_PAGES``.

    Raises:
      ValueError: if ``tokens`` is not an integer or int32[batch], or is negative. If it is traced,
        negative numbers give the status ``REWOUND_TOO_FAR`` instead.

    Example:
      ```python
      cache, _ = kvjax.prefill(lm, ["The json module"], max_len=64)
      cache = kvjax.rewind(cache, 1)  # without the last token of the prompt
      ```
    """
    cache = validated("kvjax.rewind", cache)
    back = as_int_array("tokens must be an integer, or one per row", tokens)
    if back.shape not in ((), (cache.batch,)):
        raise ArgumentError(
            f"tokens must be an integer or int32[batch={cache.batch}], got shape "
            f"{list(back.shape)}",
            param="tokens",
        )
    if not is_traced(back) and np.any(np.asarray(back) < 0):
        raise ArgumentError(f"tokens must be >= 0, got {np.min(back)}", param="tokens")
    # Numbers that exceed int32 are too large in any case.
    back = jnp.asarray(back.clip(-1, UNLIMITED), jnp.int32)
    back = jnp.broadcast_to(back, cache.length.shape)
    wrong = (back > rewindable(cache)) | (back < 0)
    length = jnp.where(wrong, cache.length, cache.length - back)
    status = cache.status | flag_where(wrong, REWOUND_TOO_FAR)
    if cache.pools:
        cache, trimmed = trim_pages(cache, length)
        length = jnp.where(trimmed, length, cache.length)
        status |= flag_where(~trimmed, OUT_OF_PAGES)
    return with_rows(cache, length=length, status=status)


def _rewindable(layer: LayerCache, length: PerRow, written: PerRow) -> PerRow:
    tokens = layer.policy.rewindable(length, written)
    if layer.low is None:
        return tokens
    window = layer.policy.layout.window or 0  # 0: a dense layer keeps every token
    back = length - (layer.low + window - 1)
    most = jnp.where(layer.low > 0, jnp.clip(back, 0, tokens), tokens)
    return most if layer.stack is None else jnp.min(most, axis=0)


def as_int_array(expected: str, x: Any) -> Any:
    """Convert ``x`` to an integer array, traced or not. Raises a ``ValueError`` that begins with
    ``expected`` if this is impossible."""
    if not is_traced(x):
        try:
            x = np.asarray(x)
        except ValueError:
            raise ValueError(f"{expected}, got {x!r:.80}") from None
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{expected}, got {x!r:.80}")
    if is_traced(x):
        return x if x.dtype.itemsize > 4 else x.astype(jnp.int32)
    return x.astype(np.int64)


_COPY_TOKENS = 256
"""The number of tokens per copy."""


def branch_rows(cache: KVCache, rows: PerRow, since: PerRow) -> KVCache:
    """Let rows continue from other rows with a common prefix, in place. This runs inside ``jit``.

    A step of a beam search does this. Rows from which others continue stay unchanged, so nothing is
    overwritten before it is copied. Only rows that continue from another row are overwritten, from
    the end of the common prefix on. ``select`` would copy every row.

    Args:
      cache: a cache that is not within a call.
      rows: int32[batch], the row from which each row continues. A row from which another row
        continues must continue from itself: ``rows[rows[i]] == rows[i]``. On a mesh, the two rows
        must be on the same devices.
      since: int32[batch], the length of the prefix that each row has in common with all rows from
        which it may continue.

    Returns:
      The cache. Paged rows share their full pages. A row for which the pool has no page becomes
      empty and gets the status ``OUT_OF_PAGES``.
    """
    mesh_sharding = cache.mesh_sharding
    local = rows % (cache.batch if mesh_sharding is None else cache.batch // mesh_sharding.rows)
    allocated = None
    if cache.pools:
        cache, allocated = fork_pages(cache, local)
    groups, layers = [(layer.policy, layer.stack) for layer in cache.layers], list(cache.layers)
    for group in dict.fromkeys(groups):
        # Identical layers use one loop, because each loop is compiled separately.
        entries = [n for n, other in enumerate(groups) if other == group]
        branched = _branch_layers([layers[n] for n in entries], local, cache.length, since)
        for n, layer in zip(entries, branched, strict=True):
            layers[n] = layer

    def take(own: PyTree, rows: PerRow) -> PyTree:
        return jax.tree.map(lambda x: x[rows], own)

    own = cache.length, cache.written, cache.status
    if mesh_sharding is None:
        length, written, status = take(own, local)
    else:
        length, written, status = mesh_sharding.run(
            take, mesh_sharding.row_spec(), mesh_sharding.row_spec(), own, local
        )
    cache = replace(cache, layers=tuple(layers))
    return empty_unallocated(
        with_rows(cache, length=length, written=written, status=status), allocated
    )


def _branch_layers(
    layers: list[LayerCache], rows: PerRow, length: PerRow, since: PerRow
) -> list[LayerCache]:
    """Do the work of ``branch_rows`` for layers with the same policy. This changes the arrays of
    rows, but not the pools."""
    policy, stack = layers[0].policy, layers[0].stack
    paged, mesh_sharding = policy.page_group is not None, policy.placement.mesh_sharding
    arrays = [(() if paged else (x.keys, x.values), x.tail, x.low) for x in layers]
    first, last = jnp.zeros_like(length), jnp.full_like(length, UNLIMITED)
    if policy.layout.window is None and policy.placement.parts == 1:
        # Slots are in the order of positions, so only slots from `since` on differ.
        units = policy.split.flushed if policy.has_tail else lambda tokens: tokens
        first, last = units(since), units(length)

    def branch(arrays: PyTree, rows: PerRow, first: PerRow, last: PerRow) -> PyTree:
        bodies, tails, lows = zip(*arrays, strict=True)
        if not paged:
            orders = tuple(x.orders for x in layers)
            size = _COPY_TOKENS // policy.unit
            bodies = _copy_rows(bodies, orders, policy.placement, rows, first, last, size, stack)
        if tails[0] is not None:
            whole = jnp.zeros_like(first), jnp.full_like(first, UNLIMITED)
            orders = jax.tree.map(lambda _: AS_IS, tails)
            tails = _copy_rows(tails, orders, Device(), rows, *whole, _COPY_TOKENS, stack)
            lows = [low[rows] if stack is None else low[:, rows] for low in lows]
        return [*zip(bodies, tails, lows, strict=True)]

    if mesh_sharding is None:
        arrays = branch(arrays, rows, first, last)
    else:
        per_row, specs = mesh_sharding.row_spec(), [x.partition_specs() for x in layers]
        own = [(() if paged else (x.keys, x.values), x.tail, x.low) for x in specs]
        arrays = mesh_sharding.run(
            branch, (own, per_row, per_row, per_row), own, arrays, rows, first, last
        )
    branched = []
    for layer, (body, tail, low) in zip(layers, arrays, strict=True):
        own_body = {} if paged else {"keys": body[0], "values": body[1]}
        branched.append(replace(layer, tail=tail, low=low, **own_body))
    return branched


def _copy_rows(
    stores: PyTree,
    orders: PyTree,
    placement: Device,
    rows: PerRow,
    first: PerRow,
    last: PerRow,
    size: int,
    stack: int | None,
) -> PyTree:
    """Copy the units ``first`` to ``last`` of each row's source ``rows[row]`` to the row, in place.

    ``stores`` are arrays [batch, ...], or [layers, batch, ...] for a stack. Each copy moves up to
    ``size`` units.
    """
    before = stores
    if stack is not None:
        stores = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stores)
    batch, layers = len(rows), stack or 1
    store, order = jax.tree.leaves(stores)[0], jax.tree.leaves(orders)[0]
    units = store.shape[order.axis] // order.stride
    size = min(max(size, 1), units)

    def copy_row(number: Array, stores: PyTree) -> PyTree:
        row = number % batch
        source, begin = rows[row], first[row]
        end = jnp.minimum(last[source], units)
        copies = jnp.where(source == row, 0, -(-jnp.maximum(end - begin, 0) // size))

        def copy(i: Array, stores: PyTree) -> PyTree:
            start = jnp.minimum(begin + i * size, units - size)
            copy_units = _unit_copier(placement, number - row, source, row, start, size)
            return jax.tree.map(copy_units, stores, orders)

        return control_flow.fori_loop(0, copies, copy, stores)

    stores = control_flow.fori_loop(0, batch * layers, copy_row, stores)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), stores, before)


def _unit_copier(
    placement: Device, base: Array, source: Array, row: Array, start: Array, size: int
) -> Callable[[Array, Order], Array]:
    def copy_units(store: Array, order: Order) -> Array:
        shape = [1, *store.shape[1:]]
        shape[order.axis] = size * order.stride
        like = jax.ShapeDtypeStruct(tuple(shape), store.dtype)
        units = order.slice_row(store, base + source, start, like)
        return order.update_row(store, base + row, start, placement.far(placement.near(units)))

    return copy_units
