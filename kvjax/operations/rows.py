"""Operations on whole rows: copy, select, repeat, empty, rewind and continue them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import NO_SUCH_ROW, OUT_OF_PAGES, REWOUND_TOO_FAR, validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.paging import fork_pages, free_pages, trim_pages
from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.core import control_flow
from kvjax.core.array_ops import flag_where
from kvjax.core.typing import Array, Counts, PerRow, RowMask
from kvjax.core.validation import UNLIMITED, as_int, is_traced
from kvjax.operations.capacity import grow_pools_for
from kvjax.operations.conversion import with_policies, without_pages
from kvjax.operations.stacks import layer_by_layer
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS


@automatic_axes
def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    cache = validated("kvjax.fork", cache, between=False)
    copied = _changed(cache, LayerCache.copy, jnp.copy)
    return replace(copied, pools=jax.tree.map(jnp.copy, cache.pools))


@layer_by_layer
@automatic_axes
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
    cache = validated("kvjax.select", cache, between=False)
    index = as_int_array("rows must be a list of whole numbers", rows)
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
        chosen = with_policies(
            _of_rows(without_pages(cache), index), [layer.policy for layer in cache.layers]
        )
    else:
        chosen = _of_rows(cache, index)
    return with_rows(chosen, status=chosen.status | flag_where(missing, NO_SUCH_ROW))


@layer_by_layer
@automatic_axes
def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row ``times`` times, one behind the other: one prompt, several continuations.

    Raises:
      ValueError: if ``times`` is no whole number, at least 1.
    """
    cache = validated("kvjax.repeat", cache, between=False)
    times = as_int("times", times, 1)
    each = cache.batch if cache.spread is None else cache.batch // cache.spread.rows
    cache, had = _forked(cache, jnp.repeat(jnp.arange(cache.batch, dtype=jnp.int32) % each, times))
    repeated = _changed(
        cache, lambda layer: layer.repeat_rows(times), lambda x: jnp.repeat(x, times, axis=0)
    )
    return empty_unallocated(repeated, had)


def _of_rows(cache: KVCache, index: Array) -> KVCache:
    """The cache of some rows; those that find no page to write in are empty."""
    cache, had = _forked(cache, jnp.clip(index, 0, cache.batch - 1))
    chosen = _changed(
        cache,
        lambda layer: layer.take_rows(index),
        lambda x: jnp.take(x, index, axis=0, mode="clip"),
    )
    return empty_unallocated(chosen, had)


def _forked(cache: KVCache, rows: Array) -> tuple[KVCache, RowMask | None]:
    """``fork_pages``, of a cache that has pools; with pages for all that the rows may become."""
    return fork_pages(grow_pools_for(cache, len(rows)), rows) if cache.pools else (cache, None)


def empty_unallocated(cache: KVCache, had: RowMask | None) -> KVCache:
    """A cache in which the rows that have not got their pages are empty."""
    if had is None:
        return cache
    length, status = jnp.where(had, cache.length, 0), flag_where(~had, OUT_OF_PAGES)
    return replace(cache, length=length, status=cache.status | status)


@automatic_axes
def reset(cache: KVCache, rows: Array | None = None) -> KVCache:
    """Empty rows, status and all, without touching the arrays.

    Args:
      cache: the cache.
      rows: bool[batch], which; by default all.

    Raises:
      ValueError: if ``rows`` is not one truth value a row.
    """
    cache = validated("kvjax.reset", cache)
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
        cache = replace(cache, pools=free_pages(cache, ~keep))
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


@automatic_axes
def rewindable(cache: KVCache) -> PerRow:
    """int32[batch]: how many of its newest tokens each row can forget, and go on exactly.

    A ring has overwritten what lies further back than its slack.
    """
    cache = validated("kvjax.rewindable", cache)
    each = [
        _rewindable(layer, cache.length, cache.written[:, entry])
        for entry, layer in enumerate(cache.layers)
    ]
    return jnp.min(jnp.stack(each), axis=0)


@automatic_axes
def rewind(cache: KVCache, tokens: int | Counts) -> KVCache:
    """Forget the newest tokens.

    Args:
      cache: the cache.
      tokens: how many, for all rows, or int32[batch], one number a row.

    Returns:
      The cache. A row that can't forget so many (see ``rewindable``) is left as it is and gets
      the status ``REWOUND_TOO_FAR``. Of a paged cache it gives pages back; where it ends in one
      that others have too, that is copied, or the row left, with the status ``OUT_OF_PAGES``.

    Raises:
      ValueError: if ``tokens`` is negative (where traced: the status) or no whole number, or has
        not one number a row.
    """
    cache = validated("kvjax.rewind", cache)
    back = as_int_array("rewind takes a whole number, or one a row", tokens)
    if back.shape not in ((), (cache.batch,)):
        raise ValueError(
            f"rewind takes a whole number, or int32[batch={cache.batch}], got {list(back.shape)}"
        )
    if not is_traced(back) and np.any(np.asarray(back) < 0):
        raise ValueError(f"rewind takes tokens away: {np.min(back)} is negative")
    # A number that int32 can't hold is too many in any case.
    back = jnp.asarray(back.clip(-1, UNLIMITED), jnp.int32)
    back = jnp.broadcast_to(back, cache.length.shape)
    wrong = (back > rewindable(cache)) | (back < 0)
    length = jnp.where(wrong, cache.length, cache.length - back)
    status = cache.status | flag_where(wrong, REWOUND_TOO_FAR)
    if cache.pools:
        cache, had = trim_pages(cache, length)
        length = jnp.where(had, length, cache.length)
        status |= flag_where(~had, OUT_OF_PAGES)
    return with_rows(cache, length=length, status=status)


def _rewindable(layer: LayerCache, length: PerRow, written: PerRow) -> PerRow:
    tokens = layer.policy.rewindable(length, written)
    if layer.low is None:
        return tokens
    window = layer.policy.layout.window or 0  # a dense layer lacks nothing
    back = length - (layer.low + window - 1)
    found = jnp.where(layer.low > 0, jnp.clip(back, 0, tokens), tokens)
    return found if layer.stack is None else jnp.min(found, axis=0)


def as_int_array(wanted: str, x: Any) -> Any:
    """An integer array, traced or not, or a ``ValueError`` that says what was wanted."""
    if not is_traced(x):
        try:
            x = np.asarray(x)
        except ValueError:
            raise ValueError(f"{wanted}, got {x!r:.80}") from None
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{wanted}, got {x!r:.80}")
    if is_traced(x):
        return x if x.dtype.itemsize > 4 else x.astype(jnp.int32)
    return x.astype(np.int64)


_PIECE = 256
"""Tokens that are copied in one go."""


def branch_rows(cache: KVCache, rows: PerRow, since: PerRow) -> KVCache:
    """A cache whose rows go on from ``rows``; inside ``jit``.

    Args:
      cache: between two calls.
      rows: int32[batch], which row each goes on from: one that stays, ``rows[rows[i]] == rows[i]``;
        on a mesh one on the same devices.
      since: int32[batch], the first tokens of each that those it may go on from have too.

    Returns:
      The cache. Of pages rows share the full ones. A row that finds no page to go on in is empty,
      with the status ``OUT_OF_PAGES``.
    """
    spread = cache.spread
    here = rows % (cache.batch if spread is None else cache.batch // spread.rows)
    had = None
    if cache.pools:
        cache, had = fork_pages(cache, here)
    kinds, layers = [(held.policy, held.stack) for held in cache.layers], list(cache.layers)
    for kind in dict.fromkeys(kinds):
        # Layers that are alike in one loop: each would be one more to compile.
        entries = [n for n, other in enumerate(kinds) if other == kind]
        alike = _of_layers([layers[n] for n in entries], here, cache.length, since)
        for n, held in zip(entries, alike, strict=True):
            layers[n] = held

    def taken(own: Any, rows: PerRow) -> Any:
        return jax.tree.map(lambda x: x[rows], own)

    own = cache.length, cache.written, cache.status
    if spread is None:
        length, written, status = taken(own, here)
    else:
        length, written, status = spread.run(taken, spread.row_spec(), spread.row_spec(), own, here)
    cache = replace(cache, layers=tuple(layers))
    return empty_unallocated(with_rows(cache, length=length, written=written, status=status), had)


def _of_layers(
    layers: list[LayerCache], rows: PerRow, length: PerRow, since: PerRow
) -> list[LayerCache]:
    """The own arrays of layers of one policy; those of a pool stay as they are."""
    policy, stack = layers[0].policy, layers[0].stack
    paged, spread = policy.page_group is not None, policy.placement.spread
    parts = [(() if paged else (x.keys, x.values), x.tail, x.low) for x in layers]
    first, last = jnp.zeros_like(length), jnp.full_like(length, UNLIMITED)
    if policy.layout.window is None and policy.placement.parts == 1:
        # Positions stand in their order, and those up to `since` are there.
        units = policy.split.flushed if policy.has_tail else lambda tokens: tokens
        first, last = units(since), units(length)

    def change(parts: Any, rows: PerRow, first: PerRow, last: PerRow) -> Any:
        bodies, tails, lows = zip(*parts, strict=True)
        if not paged:
            orders = tuple(x.orders for x in layers)
            piece = _PIECE // policy.unit
            bodies = _copied(bodies, orders, policy.placement, rows, first, last, piece, stack)
        if tails[0] is not None:
            every = jnp.zeros_like(first), jnp.full_like(first, UNLIMITED)
            orders = jax.tree.map(lambda _: AS_IS, tails)
            tails = _copied(tails, orders, Device(), rows, *every, _PIECE, stack)
            lows = [low[rows] if stack is None else low[:, rows] for low in lows]
        return [*zip(bodies, tails, lows, strict=True)]

    if spread is None:
        parts = change(parts, rows, first, last)
    else:
        each, specs = spread.row_spec(), [x.partition_specs() for x in layers]
        own = [(() if paged else (x.keys, x.values), x.tail, x.low) for x in specs]
        parts = spread.run(change, (own, each, each, each), own, parts, rows, first, last)
    after = []
    for held, (body, tail, low) in zip(layers, parts, strict=True):
        own_body = {} if paged else {"keys": body[0], "values": body[1]}
        after.append(replace(held, tail=tail, low=low, **own_body))
    return after


def _copied(
    stores: Any,
    orders: Any,
    placement: Device,
    rows: PerRow,
    first: PerRow,
    last: PerRow,
    piece: int,
    stack: int | None,
) -> Any:
    """Kept arrays [batch, ...], or of a stack [layers, batch, ...], with units ``first`` to
    ``last`` of the rows that others go on from copied to these, in place."""
    given = stores
    if stack is not None:
        stores = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stores)
    batch, layers = len(rows), stack or 1
    store, order = jax.tree.leaves(stores)[0], jax.tree.leaves(orders)[0]
    units = store.shape[order.axis] // order.stride
    size = min(max(piece, 1), units)

    def row_of(number: Array, stores: Any) -> Any:
        row = number % batch
        source, begin = rows[row], first[row]
        end = jnp.minimum(last[source], units)
        turns = jnp.where(source == row, 0, -(-jnp.maximum(end - begin, 0) // size))

        def copy(turn: Array, stores: Any) -> Any:
            start = jnp.minimum(begin + turn * size, units - size)
            return jax.tree.map(_one(placement, number - row, source, row, start, size),
                                stores, orders)  # fmt: skip

        return control_flow.fori_loop(0, turns, copy, stores)

    stores = control_flow.fori_loop(0, batch * layers, row_of, stores)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), stores, given)


def _one(
    placement: Device, base: Array, source: Array, row: Array, start: Array, size: int
) -> Callable[[Array, Any], Array]:
    def one(store: Array, order: Any) -> Array:
        shape = [1, *store.shape[1:]]
        shape[order.axis] = size * order.stride
        like: Any = jax.ShapeDtypeStruct(tuple(shape), store.dtype)
        units = order.slice_row(store, base + source, start, like)
        return order.update_row(store, base + row, start, placement.far(placement.near(units)))

    return one
