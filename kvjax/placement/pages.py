"""Read, write and copy pages of a pool."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.codecs import Store
from kvjax.core import control_flow
from kvjax.core.array_ops import arange_row
from kvjax.core.compat import jax_0_10_indexes_in_place
from kvjax.core.target import current_platform
from kvjax.core.typing import Array, PerRow
from kvjax.layouts import Run
from kvjax.placement.device import Device
from kvjax.placement.order import Order, Orders


def read_pages(
    stores: Store,
    orders: Orders,
    placement: Device,
    table: Array,
    page: int,
    start: Any,
    size: int,
    layer: Array | None = None,
) -> Store:
    """Read units ``start`` to ``start + size - 1`` of every row. Returns arrays [batch, ...] on the
    device.

    Args:
      stores: a pytree of arrays of pages, [pages, ...].
      orders: the storage order of each array. The result has the same orders.
      placement: the placement of the arrays.
      table: int32[batch, columns], the pages of each row.
      page: the number of units per page.
      start, size: the range of units, which must be within one page or be whole pages. Units are
        counted through the columns.
      layer: int32[], the index of the layer, if the arrays are [layers, pages, ...].
    """
    count = max(size // page, 1)
    column = lax.dynamic_slice_in_dim(table, start // page, count, axis=1)
    offset, each = start % page, min(size, page)

    def one(store: Array, order: Order) -> Array:
        begin, length = offset * order.stride, each * order.stride
        if placement.needs_tail or current_platform() == "tpu":
            return _one_by_one(store, order, placement, column, begin, length, layer)
        return _gathered(store, order, column, begin, length, layer)

    return jax.tree.map(one, stores, orders)


def fit_units(page: int, units: int, of: int) -> int:
    """Return a number of units close to ``units`` that is a multiple of ``of``, and divides a page
    or is a multiple of a page. Reads of this size, at multiples of it, are within one page or are
    whole pages."""
    if units >= page:
        return units // page * page
    parts = (n for n in range(units, units // 2, -1) if page % n == 0 and n % of == 0)
    return next(parts, of if of > 1 else page)


def _gathered(
    store: Array, order: Order, pages: Array, begin: Array, length: int, layer: Array | None
) -> Array:
    """Read pages with one gather. The result has the pages of each row concatenated."""
    batch, count = pages.shape
    leading = () if layer is None else (layer,)
    before = len(leading) + 1
    axis, shape = order.axis, list(store.shape[before - 1 :])
    if not jax_0_10_indexes_in_place(current_platform()):  # whole pages, and a part of them then
        index = jnp.stack([jnp.broadcast_to(x, pages.shape) for x in (*leading, pages)], 2)
        dims = lax.GatherDimensionNumbers(
            offset_dims=tuple(range(2, len(shape) + 1)),
            collapsed_slice_dims=tuple(range(before)),
            start_index_map=tuple(range(before)),
        )
        result = lax.gather(store, index, dims, (*[1] * before, *shape[1:]), mode="clip")
        result = jnp.moveaxis(lax.dynamic_slice_in_dim(result, begin, length, axis + 1), 1, axis)
        return result.reshape(batch, *shape[1:axis], count * length, *shape[axis + 1 :])
    shape[axis] = length
    index = jnp.stack([*(jnp.broadcast_to(x, pages.shape) for x in (*leading, pages, begin))], 2)
    # The result is [batch, ..., count, length, ...].
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(n for n in range(1, len(shape) + 1) if n != axis),
        collapsed_slice_dims=tuple(range(before)),
        start_index_map=(*range(before), axis + before - 1),
    )
    # A column without a page has no tokens. The numbers that are read for it are masked.
    result = lax.gather(store, index, dims, (*[1] * before, *shape[1:]), mode="clip")
    return result.reshape(batch, *shape[1:axis], count * length, *shape[axis + 1 :])


def _one_by_one(
    store: Array,
    order: Order,
    placement: Device,
    pages: Array,
    begin: Array,
    length: int,
    layer: Array | None,
) -> Array:
    """Read pages with one slice per page. Arrays in host memory can't be gathered, and a TPU's
    compiler would transpose the whole pool for a gather."""
    batch, count = pages.shape
    of_pages = store.shape if layer is None else store.shape[1:]
    axis, shape = order.axis, [1, *of_pages[1:]]
    shape[axis] = length
    like = jax.ShapeDtypeStruct(shape, store.dtype)

    def one(page: Array) -> Array:
        at = page if layer is None else (layer, page)
        part: Array = order.slice_row(store, at, begin // order.stride, like)
        return placement.near(part)[0]

    known = jnp.clip(pages, 0, of_pages[0] - 1)
    result = lax.map(one, known.ravel()).reshape(batch, count, *shape[1:])
    result = jnp.moveaxis(result, 1, axis)
    return result.reshape(batch, *shape[1:axis], count * length, *shape[axis + 1 :])


def copy_pages(
    stores: Store, orders: Orders, placement: Device, source: Array, target: Array
) -> Store:
    """Copy each page in ``source`` (int32[n]) to the page at the same index in ``target``
    (int32[n]), in place. Pairs of -1 are skipped.

    Pages are copied one after another. With n = 0, nothing is read or written.
    """

    def one(store: Array, order: Order) -> Array:
        like = jax.ShapeDtypeStruct((1, *store.shape[1:]), store.dtype)
        start = jnp.int32(0)

        def copy(number: Array, into: Array) -> Array:
            known = jnp.clip(source[number], 0, store.shape[0] - 1)
            page = order.slice_row(into, known, start, like)
            is_copied = (source[number] >= 0) & (target[number] >= 0)
            at = jnp.where(is_copied, target[number], known)  # -1: copy a page onto itself
            return order.update_row(into, at, start, placement.far(placement.near(page)))

        count = jnp.where(jnp.any(source >= 0), len(source), 0)
        return control_flow.fori_loop(0, count, copy, store)

    return jax.tree.map(one, stores, orders)


def to_pages(stores: Store, table: Array, page: int, pages: int) -> Store:
    """Move rows [batch, kv_heads, units, ...] into the pages in ``table`` (int32[batch, columns]).
    ``page`` is the number of units per page, and ``pages`` the number of pages in the pool."""
    columns = table.shape[1]
    at = jnp.where(table >= 0, table, pages).ravel()

    def one(x: Array) -> Array:
        batch, heads, _, *rest = x.shape
        x = jnp.moveaxis(x.reshape(batch, heads, columns, page, *rest), 2, 1)
        pool = jnp.zeros((pages, heads, page, *rest), x.dtype)
        return pool.at[at].set(x.reshape(-1, heads, page, *rest), mode="drop")

    return jax.tree.map(one, stores)


def gather_pages(stores: Store, orders: Orders, placement: Device, pages: Array) -> Store:
    """Return the contents of ``pages`` (int32[n]) on the device, [n, ...]. They are undefined for
    entries of -1."""

    def one(store: Array, order: Order) -> Array:
        like = jax.ShapeDtypeStruct((1, *store.shape[1:]), store.dtype)

        def of(page: Array) -> Array:
            part: Array = order.slice_row(store, page, jnp.int32(0), like)
            return placement.near(part)[0]

        return lax.map(of, jnp.clip(pages, 0, store.shape[0] - 1))

    return jax.tree.map(one, stores, orders)


def scatter_pages(
    stores: Store, orders: Orders, placement: Device, pages: Array, contents: Store
) -> Store:
    """Write ``contents``, which have the form of the result of ``gather_pages``, to ``pages``
    (int32[n]), in place. Entries of -1 must come last and are skipped."""

    def one(store: Array, order: Order, new: Array) -> Array:
        def write(number: Array, into: Array) -> Array:
            unit = placement.far(lax.dynamic_slice_in_dim(new, number, 1))
            return order.update_row(into, pages[number], jnp.int32(0), unit)

        return control_flow.fori_loop(0, jnp.sum(pages >= 0, dtype=jnp.int32), write, store)

    return jax.tree.map(one, stores, orders, contents)


def write_pages(
    into: Array, x: Array, run: Run, count: PerRow, table: Array, layer: Array | None
) -> Array:
    """Do the work of ``write_rows`` for one run of paged slots, with one scatter."""
    page, size = run_pages(table, run), min(x.shape[2], run.high)
    batch, pages = page.shape
    # For each page, compute the first token of the call that belongs to it, and the unit to which
    # this token is written.
    first = arange_row(pages) * run.high - run.start[:, None]
    origin = jnp.clip(-first, 0, run.high - size)
    tokens = (first + origin)[:, :, None] + arange_row(size)[None]
    real = (tokens >= 0) & (tokens < count[:, None, None])
    page = jnp.where(jnp.any(real, axis=2), page, -1).ravel()
    new = x
    if pages > 1:
        at = tokens.reshape(batch, 1, -1, *[1] * (x.ndim - 3))
        new = jnp.take_along_axis(x, at, axis=2, mode="clip")
        new = jnp.moveaxis(new.reshape(batch, x.shape[1], pages, size, *x.shape[3:]), 2, 1)
        new = new.reshape(-1, *new.shape[2:])
    leading = () if layer is None else (jnp.broadcast_to(layer, page.shape),)
    before = len(leading) + 1
    index = jnp.stack([*leading, page, origin.ravel()], axis=1)
    inside = tuple(range(1, new.ndim))
    at_page = *range(before), before + 1
    if size > 1:
        dims = lax.GatherDimensionNumbers(
            offset_dims=inside, collapsed_slice_dims=tuple(range(before)), start_index_map=at_page
        )
        old = lax.gather(into, index, dims, (*[1] * before, *new.shape[1:]), mode="fill")
        new = jnp.where(real.reshape(-1, 1, size, *[1] * (x.ndim - 3)), new, old)
    return scatter_units(into, index, new)


def run_pages(table: Array, run: Run) -> Array:
    """Return the pages of each row to which ``run`` writes, int32[batch, pages]."""
    assert run.columns is not None
    return jnp.take_along_axis(table, run.columns, 1, mode="fill", fill_value=-1)


def scatter_units(into: Array, index: Array, new: Array) -> Array:
    """Write units ``new`` ([n, kv_heads, size, ...]) in place. ``index`` (int32[n, axes]) has the
    row (or the layer and the row) of each entry, and its first unit. Out-of-range rows are
    dropped."""
    before = index.shape[1] - 1
    where = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, new.ndim)),
        inserted_window_dims=tuple(range(before)),
        scatter_dims_to_operand_dims=(*range(before), before + 1),
    )
    return lax.scatter(into, index, new, where, mode="drop")
