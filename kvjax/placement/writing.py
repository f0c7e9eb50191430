"""Write a call's tokens into the slots of each row, in place, and nothing else."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.typing import Array, Rows
from kvjax.layouts import Run
from kvjax.placement.device import Device


def write_rows(into: Array, x: Array, runs: Sequence[Run], count: Rows) -> Array:
    """Write ``x[:, :, :count]`` into each row where the runs say, in place, and nothing else."""
    for run in runs:

        def one(
            into: Array, x: Array, start: Array, skip: Array, count: Array, run: Run = run
        ) -> Array:
            origin, x, real = _window(run, x, start, skip, count)
            old = lax.dynamic_slice_in_dim(into, origin, x.shape[1], axis=1)
            return lax.dynamic_update_slice_in_dim(into, jnp.where(real, x, old), origin, axis=1)

        into = jax.vmap(one)(into, x, run.start, jnp.broadcast_to(run.skip, count.shape), count)
    return into


def write_far(
    placement: Device, into: Array, near: Array | None, x: Array, runs: Sequence[Run], count: Rows
) -> tuple[Array, Array | None]:
    """``write_rows`` into an array that is kept elsewhere, and into its copy on the device where
    there is one: row by row, for such an array takes no scatter, and not at all where no row has
    anything to write."""
    for run in runs:
        skip = jnp.broadcast_to(run.skip, count.shape)
        copy = near = None if near is None else write_rows(near, x, [run], count)

        def one(
            row: Array, into: Array, run: Run = run, skip: Array = skip, copy: Array | None = copy
        ) -> Array:
            mine = lax.dynamic_index_in_dim(x, row, keepdims=False)
            origin, new, real = _window(run, mine, run.start[row], skip[row], count[row])
            at, shape = (row, 0, origin, *[0] * (into.ndim - 3)), (1, *new.shape)
            if copy is None:
                old = placement.near(lax.dynamic_slice(into, at, shape))
                merged = jnp.where(real, new, old[0])[None]
            else:
                merged = lax.dynamic_slice(copy, at, shape)
            return lax.dynamic_update_slice(into, placement.far(merged), at)

        rows = jnp.where(jnp.any(count > skip), into.shape[0], 0)
        into = lax.fori_loop(0, rows, one, into)
    return into, near


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
