"""Rows that go on from others of their text, in place: what a step of a beam search does.

Every row that others go on from stays where it is, so nothing is overwritten before it is copied,
and a step copies as many rows as have ended, of each what they have not in common: a select would
make every row anew.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.layer import LayerCache
from kvjax.cache.paging import forked
from kvjax.cache.state import KVCache, with_rows
from kvjax.core.typing import Array, Rows
from kvjax.operations.rows import without
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS

_PIECE = 256
"""Tokens that are copied in one go."""


def branched(cache: KVCache, rows: Rows, since: Rows) -> KVCache:
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
        cache, had = forked(cache, here)
    layers = tuple(_of_layer(held, here, cache.length, since) for held in cache.layers)

    def taken(own: Any, rows: Rows) -> Any:
        return jax.tree.map(lambda x: x[rows], own)

    own = cache.length, cache.written, cache.status
    if spread is None:
        length, written, status = taken(own, here)
    else:
        length, written, status = spread.run(taken, spread.of_rows(), spread.of_rows(), own, here)
    cache = replace(cache, layers=layers)
    return without(with_rows(cache, length=length, written=written, status=status), had)


def _of_layer(held: LayerCache, rows: Rows, length: Rows, since: Rows) -> LayerCache:
    """A layer's own arrays; those of a pool stay as they are."""
    policy, paged = held.policy, held.policy.paging is not None
    body: Any = () if paged else (held.keys, held.values)
    parts = body, held.tail, held.low
    first, last = jnp.zeros_like(length), jnp.full_like(length, 2**30)
    if policy.layout.window is None and policy.placement.parts == 1:
        # Positions stand in their order, and those up to `since` are there.
        units = policy.split.flushed if policy.has_tail else lambda tokens: tokens
        first, last = units(since), units(length)

    def change(parts: Any, rows: Rows, first: Rows, last: Rows) -> Any:
        body, tail, low = parts
        if body:
            body = _copied(
                body, held.orders, policy.placement, rows, first, last, _PIECE // policy.unit,
                held.stack,
            )  # fmt: skip
        if tail is not None:
            none, every = jnp.zeros_like(first), jnp.full_like(first, 2**30)
            orders = jax.tree.map(lambda _: AS_IS, tail)
            tail = _copied(tail, orders, Device(), rows, none, every, _PIECE, held.stack)
        if low is not None:
            low = low[rows] if held.stack is None else low[:, rows]
        return body, tail, low

    spread = policy.placement.spread
    if spread is None:
        body, tail, low = change(parts, rows, first, last)
    else:
        specs, each = held.specs(), spread.of_rows()
        own = () if paged else (specs.keys, specs.values)
        found = own, specs.tail, specs.low
        body, tail, low = spread.run(
            change, (found, each, each, each), found, parts, rows, first, last
        )
    held = replace(held, tail=tail, low=low)
    return held if paged else replace(held, keys=body[0], values=body[1])


def _copied(
    stores: Any, orders: Any, placement: Device, rows: Rows, first: Rows, last: Rows, piece: int,
    stack: int | None,
) -> Any:  # fmt: skip
    """Kept arrays [batch, ...], or of a stack [layers, batch, ...], with units ``first`` to
    ``last`` of the rows that others go on from copied to these, in place."""
    shapes = jax.tree.map(lambda x: x.shape, stores, is_leaf=lambda x: isinstance(x, jax.Array))
    if stack is not None:
        stores = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), stores)
    batch, layers = len(rows), stack or 1
    store, order = jax.tree.leaves(stores)[0], jax.tree.leaves(orders)[0]
    units = store.shape[order.axis] // order.step
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

        return lax.fori_loop(0, turns, copy, stores)

    stores = lax.fori_loop(0, batch * layers, row_of, stores)
    return jax.tree.map(lambda x, shape: x.reshape(shape), stores, shapes) if stack else stores


def _one(
    placement: Device, base: Array, source: Array, row: Array, start: Array, size: int
) -> Callable[[Array, Any], Array]:
    def one(store: Array, order: Any) -> Array:
        shape = [1, *store.shape[1:]]
        shape[order.axis] = size * order.step
        like: Any = jax.ShapeDtypeStruct(tuple(shape), store.dtype)
        units = order.of_row(store, base + source, start, like)
        return order.with_row(store, base + row, start, placement.far(placement.near(units)))

    return one
