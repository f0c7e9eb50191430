"""Units of rows out of the pages of a pool, and pages copied within it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.device import traced_for
from kvjax.core.typing import Array
from kvjax.placement.device import Device
from kvjax.placement.order import Order


def from_pages(
    stores: Any, orders: Any, placement: Device, table: Array, page: int, start: Any, size: int
) -> Any:
    """Of every row so many units from ``start`` on, near and as they are kept: [batch, ...].

    Args:
      stores: arrays of pages, [pages, ...], a pytree.
      orders: how each is kept.
      placement: where.
      table: int32[batch, columns], the pages of each row.
      page: units of a page.
      start, size: which units, counted through the columns: some of one page, or whole pages.
    """
    count = max(size // page, 1)
    column = lax.dynamic_slice_in_dim(table, start // page, count, axis=1)
    offset, each = start % page, min(size, page)

    def one(store: Array, order: Order) -> Array:
        begin, length = offset * order.step, each * order.step
        if placement.behind_tail or traced_for() == "tpu":
            return _one_by_one(store, order, placement, column, begin, length)
        return _gathered(store, order, column, begin, length)

    return jax.tree.map(one, stores, orders)


def fitting(page: int, units: int, of: int) -> int:
    """About so many units, a multiple ``of`` so many, such that those from any multiple of them on
    are a part of one page, or whole ones."""
    if units >= page:
        return units // page * page
    parts = (n for n in range(units, units // 2, -1) if page % n == 0 and n % of == 0)
    return next(parts, of if of > 1 else page)


def _gathered(store: Array, order: Order, pages: Array, begin: Array, length: int) -> Array:
    """By one gather, whose result has each row's pages one behind the other already."""
    batch, count = pages.shape
    axis, shape = order.axis, list(store.shape)
    shape[axis] = length
    index = jnp.stack([pages, jnp.broadcast_to(begin, pages.shape)], axis=2)
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(n for n in range(1, store.ndim + 1) if n != axis),
        collapsed_slice_dims=(0,),
        start_index_map=(0, axis),
    )
    # A column that has no page is of no token: whatever is read there is not seen.
    found = lax.gather(store, index, dims, (1, *shape[1:]), mode="clip")
    return found.reshape(batch, *shape[1:axis], count * length, *shape[axis + 1 :])


def _one_by_one(
    store: Array, order: Order, placement: Device, pages: Array, begin: Array, length: int
) -> Array:
    """By a slice of each page: what is kept elsewhere can't be gathered, and a TPU would turn it
    round."""
    batch, count = pages.shape
    axis, shape = order.axis, [1, *store.shape[1:]]
    shape[axis] = length
    like = jax.ShapeDtypeStruct(shape, store.dtype)

    def one(page: Array) -> Array:
        part: Array = order.of_row(store, page, begin // order.step, like)  # type: ignore[arg-type]
        return placement.near(part)[0]

    known = jnp.clip(pages, 0, store.shape[0] - 1)
    found = lax.map(one, known.ravel()).reshape(batch, count, *shape[1:])
    found = jnp.moveaxis(found, 1, axis)
    return found.reshape(batch, *shape[1:axis], count * length, *shape[axis + 1 :])


def copied_pages(stores: Any, orders: Any, placement: Device, source: Array, target: Array) -> Any:
    """Stores of pages with some copied, in place: int32[n] each, -1 for none. One after the other,
    and nothing at all where there is none."""

    def one(store: Array, order: Order) -> Array:
        like = jax.ShapeDtypeStruct((1, *store.shape[1:]), store.dtype)
        start = jnp.int32(0)

        def copy(number: Array, into: Array) -> Array:
            known = jnp.clip(source[number], 0, store.shape[0] - 1)
            page = order.of_row(into, known, start, like)  # type: ignore[arg-type]
            there = (source[number] >= 0) & (target[number] >= 0)
            at = jnp.where(there, target[number], known)  # where there is none, onto itself
            return order.with_row(into, at, start, placement.far(placement.near(page)))

        turns = jnp.where(jnp.any(source >= 0), len(source), 0)
        return lax.fori_loop(0, turns, copy, store)

    return jax.tree.map(one, stores, orders)


def in_pages(stores: Any, table: Array, page: int, pages: int) -> Any:
    """Stores of rows, [batch, kv_heads, units, ...], as pages of a pool of so many: where rows have
    any, by their ``table``, int32[batch, columns]."""
    columns = table.shape[1]
    at = jnp.where(table >= 0, table, pages).ravel()

    def one(x: Array) -> Array:
        batch, heads, _, *rest = x.shape
        x = jnp.moveaxis(x.reshape(batch, heads, columns, page, *rest), 2, 1)
        pool = jnp.zeros((pages, heads, page, *rest), x.dtype)
        return pool.at[at].set(x.reshape(-1, heads, page, *rest), mode="drop")

    return jax.tree.map(one, stores)


def pages_at(stores: Any, orders: Any, placement: Device, pages: Array) -> Any:
    """What stands in some pages, int32[n], near and as they are kept: [n, ...]; anything for -1."""

    def one(store: Array, order: Order) -> Array:
        like = jax.ShapeDtypeStruct((1, *store.shape[1:]), store.dtype)

        def of(page: Array) -> Array:
            found: Array = order.of_row(store, page, jnp.int32(0), like)  # type: ignore[arg-type]
            return placement.near(found)[0]

        return lax.map(of, jnp.clip(pages, 0, store.shape[0] - 1))

    return jax.tree.map(one, stores, orders)


def with_pages_at(stores: Any, orders: Any, placement: Device, pages: Array, contents: Any) -> Any:
    """Stores with the contents of some pages, int32[n], -1 for none, as ``pages_at`` gives them,
    written in place."""

    def one(store: Array, order: Order, new: Array) -> Array:
        def write(number: Array, into: Array) -> Array:
            unit = placement.far(lax.dynamic_slice_in_dim(new, number, 1))
            return order.with_row(into, pages[number], jnp.int32(0), unit)

        return lax.fori_loop(0, jnp.sum(pages >= 0), write, store)

    return jax.tree.map(one, stores, orders, contents)
