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

from kvjax.cache.layer import LayerCache
from kvjax.cache.paging import forked
from kvjax.cache.state import KVCache, with_rows
from kvjax.core import control_flow
from kvjax.core.typing import Array, PerRow
from kvjax.core.validation import UNLIMITED
from kvjax.operations.rows import without
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS

_PIECE = 256
"""Tokens that are copied in one go."""


def branched(cache: KVCache, rows: PerRow, since: PerRow) -> KVCache:
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
        length, written, status = spread.run(taken, spread.of_rows(), spread.of_rows(), own, here)
    cache = replace(cache, layers=tuple(layers))
    return without(with_rows(cache, length=length, written=written, status=status), had)


def _of_layers(
    layers: list[LayerCache], rows: PerRow, length: PerRow, since: PerRow
) -> list[LayerCache]:
    """The own arrays of layers of one policy; those of a pool stay as they are."""
    policy, stack = layers[0].policy, layers[0].stack
    paged, spread = policy.paging is not None, policy.placement.spread
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
        each, specs = spread.of_rows(), [x.specs() for x in layers]
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

        return control_flow.fori_loop(0, turns, copy, stores)

    stores = control_flow.fori_loop(0, batch * layers, row_of, stores)
    return jax.tree.map(lambda x, like: x.reshape(like.shape), stores, given)


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
