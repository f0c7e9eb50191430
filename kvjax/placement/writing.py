"""Write the tokens of a call into the slots of each row, in place."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from kvjax.core import control_flow
from kvjax.core.compat import jax_0_8_scatters_in_place, jax_0_10_indexes_in_place
from kvjax.core.target import current_platform
from kvjax.core.typing import Array, PerRow
from kvjax.layouts import Run
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS, LANES, Order, Row
from kvjax.placement.pages import run_pages, scatter_units, write_pages


def write_rows(
    into: Array,
    x: Array,
    runs: Sequence[Run],
    count: PerRow,
    order: Order = AS_IS,
    table: Array | None = None,
    layer: Array | None = None,
) -> Array:
    """Write ``x[:, :, :count]`` to the slots of each row that ``runs`` specify, in place.

    Args:
      into: an array of a store, in its storage order.
      x: new units, as a codec returns them.
      runs: the slots to which they are written.
      count: int32[batch], how many of the new units each row takes.
      order: the storage order of ``into``.
      table: int32[batch, columns], the pages of each row, if ``into`` is an array of pages. Units
        for a page that does not exist are dropped.
      layer: int32[], the index of the layer, if ``into`` is [layers, batch, ...].
    """
    platform, scatters = current_platform(), table is not None or layer is not None
    in_place = jax_0_10_indexes_in_place(platform) and jax_0_8_scatters_in_place(platform)
    if platform == "tpu" or (scatters and not in_place):
        # Reading all rows together, to keep their old content, would make the compiler choose a
        # different order of axes, and copy the whole array.
        return _row_by_row(into, x, runs, count, order, table, layer)
    for run in runs:
        if table is not None:
            into = write_pages(into, x, run, count, table, layer)
            continue
        if layer is not None:
            into = _into_layer(into, x, run, count, layer)
            continue

        def one(
            into: Array, x: Array, start: Array, skip: Array, count: Array, run: Run = run
        ) -> Array:
            origin, x, real = _window(run, x, start, skip, count)
            old = lax.dynamic_slice_in_dim(into, origin, x.shape[1], axis=1)
            return lax.dynamic_update_slice_in_dim(into, jnp.where(real, x, old), origin, axis=1)

        into = jax.vmap(one)(into, x, run.start, _skipped(run, count), count)
    return into


def _into_layer(into: Array, x: Array, run: Run, count: PerRow, layer: Array) -> Array:
    """Do the work of ``write_rows`` for one run and one layer of an array [layers, batch, ...]."""

    def one(row: Array, x: Array, start: Array, skip: Array, count: Array) -> tuple[Array, Array]:
        origin, x, real = _window(run, x, start, skip, count)
        old = AS_IS.slice_row(into, (layer, row), origin, x[None])[0]
        return origin, jnp.where(real, x, old)

    rows, skip = jnp.arange(x.shape[0], dtype=jnp.int32), _skipped(run, count)
    if len(rows) == 1:
        origin, new = one(rows[0], x[0], run.start[0], skip[0], count[0])
        return AS_IS.update_row(into, (layer, rows[0]), origin, new[None])
    origin, new = jax.vmap(one)(rows, x, run.start, skip, count)
    index = jnp.stack([jnp.broadcast_to(layer, rows.shape), rows, origin], axis=1)
    return scatter_units(into, index, new)


def write_far(
    placement: Device,
    into: Array,
    near: Array | None,
    x: Array,
    runs: Sequence[Run],
    count: PerRow,
    order: Order = AS_IS,
    table: Array | None = None,
    layer: Array | None = None,
) -> tuple[Array, Array | None]:
    """Do the work of ``write_rows`` for an array in host memory, and for its copy on the device,
    ``near``, if there is one.

    Arrays in host memory do not support scatters, so rows are written one at a time. If no row has
    anything to write, nothing is transferred.
    """
    for run in runs:
        copy = near = None if near is None else write_rows(near, x, [run], count, order, table)
        into = _row_by_row(into, x, [run], count, order, table, layer, placement, copy)
    return into, near


def _row_by_row(
    into: Array,
    x: Array,
    runs: Sequence[Run],
    count: PerRow,
    order: Order,
    table: Array | None,
    layer: Array | None = None,
    placement: Device | None = None,
    copy: Array | None = None,
) -> Array:
    """Do the work of ``write_rows`` in a loop over rows.

    ``placement`` is given if ``into`` is in host memory. Nothing is then transferred if no row has
    anything to write. ``copy`` is the updated copy of ``into`` on the device.
    """
    moved: Any = () if placement is None else (placement.near, placement.far, copy)
    for run in runs:

        def one(row: Array, into: Array, run: Run = run) -> Array:
            units = lax.dynamic_index_in_dim(x, row, keepdims=False)
            return write_row(into, row, units, run, count, order, table, layer, *moved)

        rows = x.shape[0]
        if placement is not None:
            rows = jnp.where(jnp.any(count > run.skip), rows, 0)
        # A constant trip count keeps the loop differentiable.
        into = control_flow.fori_loop(0, rows, one, into)
    return into


def write_row(
    into: Array,
    row: Array,
    x: Array,
    run: Run,
    count: PerRow,
    order: Order,
    table: Array | None = None,
    layer: Array | None = None,
    near: Callable[[Array], Array] = lambda old: old,
    far: Callable[[Array], Array] = lambda new: new,
    copy: Array | None = None,
) -> Array:
    """Do the work of ``write_rows`` for one run and one row, whose units are ``x`` ([kv_heads, new,
    ...]).

    ``near`` and ``far`` move arrays from the memory of ``into`` to the device and back. ``copy`` is
    an updated copy of ``into`` on the device, from which the new content is taken.
    """
    if run.columns is not None and table is not None:
        return _row_into_pages(into, row, x, run, count, order, table, layer, near, far, copy)
    span = run.start[row], _skipped(run, count)[row], count[row]
    at = row if layer is None else (layer, row)
    return _write_one(into, at, x, run, span, order, near, far, copy)


def _row_into_pages(
    into: Array,
    row: Array,
    x: Array,
    run: Run,
    count: PerRow,
    order: Order,
    table: Array,
    layer: Array | None,
    near: Callable[[Array], Array],
    far: Callable[[Array], Array],
    copy: Array | None,
) -> Array:
    """Do the work of ``write_row`` for one page after another. Units for a page that does not exist
    are dropped."""
    row_pages = run_pages(table, run)[row]

    def one(number: Array, into: Array) -> Array:
        page = row_pages[number]
        pages = into.shape[0 if layer is None else 1]
        real = jnp.where((page >= 0) & (page < pages), count[row], 0)
        span = run.start[row] - number * run.high, jnp.int32(0), real
        at = page if layer is None else (layer, page)
        return _write_one(into, at, x, run, span, order, near, far, copy)

    if len(row_pages) == 1:
        return one(jnp.int32(0), into)
    return control_flow.fori_loop(0, len(row_pages), one, into)


def _write_one(
    into: Array,
    row: Row,
    x: Array,
    run: Run,
    span: tuple[Array, ...],
    order: Order,
    near: Callable[[Array], Array],
    far: Callable[[Array], Array],
    copy: Array | None,
) -> Array:
    """Write units of one row. ``span`` has the row's start slot, its ``skip`` and its ``count``.
    Units from ``skip`` up to ``count`` are written."""
    x = jnp.pad(x, ((0, 0), (0, max(order.min_units - x.shape[1], 0)), *[(0, 0)] * (x.ndim - 2)))
    origin, new, real = _window(run, x, *span)
    like = jax.eval_shape(order.arrange, new[None])
    if copy is None:
        old = near(order.slice_row(into, row, origin, like))
        merged = order.arrange(jnp.where(real, new, order.restore(old)[0])[None])
    else:
        merged = order.slice_row(copy, row, origin, like)
    into = order.update_row(into, row, origin, far(merged))
    if order.tileable and into.shape[-1] % LANES == 0:
        # Keep the current memory layout, which kernels need. In a loop, a TPU's compiler would
        # choose the layout that suits the update, and copy the array.
        return with_layout_constraint(into, Layout(major_to_minor=tuple(range(into.ndim))))
    return into


def _skipped(run: Run, count: PerRow) -> PerRow:
    """Return ``run.skip`` for each row."""
    return jnp.broadcast_to(jnp.asarray(run.skip, jnp.int32), count.shape)


def _window(
    run: Run, x: Array, start: Array, skip: Array, count: Array
) -> tuple[Array, Array, Array]:
    """Return the first slot to write, the new content from this slot on, and a mask of the real
    tokens in the content.

    ``dynamic_update_slice`` would clamp the start of a chunk whose padding extends past the end,
    and so write its real tokens to lower slots. Here the window is moved to where it fits, and the
    mask keeps the old content.
    """
    size = min(x.shape[1], run.high - run.low)
    origin = jnp.clip(start, run.low, run.high - size)
    shift = start - origin
    token = jnp.arange(size, dtype=jnp.int32) - shift
    if x.shape[1] > 1:
        x = jnp.roll(x, shift, axis=1)[:, :size]
    real = (token >= skip) & (token < count)
    if run.bounds is not None:
        slot = token + start
        real &= (slot >= run.bounds[0]) & (slot < run.bounds[1])
    return origin, x, real.reshape(size, *[1] * (x.ndim - 2))
