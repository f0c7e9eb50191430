"""Write a call's tokens into the slots of each row, in place, and nothing else."""

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
from kvjax.placement.pages import into_pages, pages_of, scattered


def write_rows(
    into: Array,
    x: Array,
    runs: Sequence[Run],
    count: PerRow,
    order: Order = AS_IS,
    table: Array | None = None,
    layer: Array | None = None,
) -> Array:
    """Write ``x[:, :, :count]`` into each row where the runs say, in place, and nothing else.

    Args:
      into: an array of a store, as it is kept.
      x: new units, as codecs make them.
      runs: where they go.
      count: int32[batch], how many of them each row takes.
      order: in which ``into`` is kept.
      table: int32[batch, columns], the pages of each row, where ``into`` is of pages: what is to go
        to a page that is none is dropped.
      layer: int32[], whose rows, where ``into`` is [layers, batch, ...].
    """
    platform, scatters = current_platform(), table is not None or layer is not None
    in_place = jax_0_10_indexes_in_place(platform) and jax_0_8_scatters_in_place(platform)
    if platform == "tpu" or (scatters and not in_place):
        # What reads all rows at once, to put back what stands there, wants another order of axes,
        # and would copy the whole array for it.
        return _row_by_row(into, x, runs, count, order, table, layer)
    for run in runs:
        if table is not None:
            into = into_pages(into, x, run, count, table, layer)
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
    """``write_rows`` of a run into the rows of a layer of [layers, batch, ...]."""

    def one(row: Array, x: Array, start: Array, skip: Array, count: Array) -> tuple[Array, Array]:
        origin, x, real = _window(run, x, start, skip, count)
        old = AS_IS.of_row(into, (layer, row), origin, x[None])[0]
        return origin, jnp.where(real, x, old)

    rows, skip = jnp.arange(x.shape[0], dtype=jnp.int32), _skipped(run, count)
    if len(rows) == 1:
        origin, new = one(rows[0], x[0], run.start[0], skip[0], count[0])
        return AS_IS.with_row(into, (layer, rows[0]), origin, new[None])
    origin, new = jax.vmap(one)(rows, x, run.start, skip, count)
    index = jnp.stack([jnp.broadcast_to(layer, rows.shape), rows, origin], axis=1)
    return scattered(into, index, new)


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
    """``write_rows`` into an array that is kept elsewhere, and into its copy on the device where
    there is one: row by row, for such an array takes no scatter, and not at all where no row has
    anything to write."""
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
    """``write_rows`` in a loop. ``placement``: of ``into``, if it is elsewhere, and then nothing is
    moved where no row has anything to write; ``copy``: the same numbers where it is computed."""
    moved: Any = () if placement is None else (placement.near, placement.far, copy)
    for run in runs:

        def one(row: Array, into: Array, run: Run = run) -> Array:
            mine = lax.dynamic_index_in_dim(x, row, keepdims=False)
            return write_row(into, row, mine, run, count, order, table, layer, *moved)

        rows: Any = x.shape[0]
        if placement is not None:
            rows = jnp.where(jnp.any(count > run.skip), rows, 0)
        # With as many turns as rows it is differentiable.
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
    """``write_rows`` of one row's units ``x``, [kv_heads, new, ...], where a run says."""
    if run.columns is not None and table is not None:
        return _row_into_pages(into, row, x, run, count, order, table, layer, near, far, copy)
    found = run.start[row], _skipped(run, count)[row], count[row]
    at = row if layer is None else (layer, row)
    return _write_one(into, at, x, run, found, order, near, far, copy)


def _row_into_pages(
    into: Array, row: Array, x: Array, run: Run, count: PerRow, order: Order, table: Array,
    layer: Array | None, near: Any, far: Any, copy: Array | None,
) -> Array:  # fmt: skip
    """``write_row`` into one page after the other; what is to go to one that is none is dropped."""
    mine = pages_of(table, run)[row]

    def one(number: Array, into: Array) -> Array:
        page = mine[number]
        pages = into.shape[0 if layer is None else 1]
        real = jnp.where((page >= 0) & (page < pages), count[row], 0)
        found = run.start[row] - number * run.high, jnp.int32(0), real
        at = page if layer is None else (layer, page)
        return _write_one(into, at, x, run, found, order, near, far, copy)

    return (
        one(jnp.int32(0), into)
        if len(mine) == 1
        else control_flow.fori_loop(0, len(mine), one, into)
    )


def _write_one(
    into: Array, row: Row, x: Array, run: Run, found: tuple[Array, ...], order: Order, near: Any,
    far: Any, copy: Array | None,
) -> Array:  # fmt: skip
    """One row's units, from ``found`` start on, between skip and count of them."""
    x = jnp.pad(x, ((0, 0), (0, max(order.min_units - x.shape[1], 0)), *[(0, 0)] * (x.ndim - 2)))
    origin, new, real = _window(run, x, *found)
    like = jax.eval_shape(order.arrange, new[None])
    if copy is None:
        old = near(order.slice_row(into, row, origin, like))
        merged = order.arrange(jnp.where(real, new, order.restore(old)[0])[None])
    else:
        merged = order.slice_row(copy, row, origin, like)
    into = order.update_row(into, row, origin, far(merged))
    if order.tileable and into.shape[-1] % LANES == 0:
        # As it is given, and as kernels want it: in a loop a TPU's compiler would choose what suits
        # the update, and copy the array for that.
        return with_layout_constraint(into, Layout(major_to_minor=tuple(range(into.ndim))))
    return into


def _skipped(run: Run, count: PerRow) -> PerRow:
    """``run.skip`` of each row."""
    return jnp.broadcast_to(jnp.asarray(run.skip, jnp.int32), count.shape)


def _window(
    run: Run, x: Array, start: Array, skip: Array, count: Array
) -> tuple[Array, Array, Array]:
    """Where a row's new content goes, the content, and which of it is real.

    A chunk that is padded past the end must not push its real tokens to lower slots, as
    ``dynamic_update_slice`` would: the window is moved to where it fits, and the old content put
    back.
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
