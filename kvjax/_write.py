"""Write a call's tokens into the slots of each row, in place, and nothing else."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from kvjax._typing import Array, Rows
from kvjax.layouts import Run


def write_rows(into: Array, x: Array, runs: Sequence[Run], count: Rows) -> Array:
    """Write ``x[:, :, :count]`` into each row where the runs say, in place, and nothing else."""
    for run in runs:
        skip = jnp.broadcast_to(run.skip, count.shape)
        size = min(x.shape[2], run.high - run.low)
        write = functools.partial(_write_row, low=run.low, high=run.high, size=size)
        into = jax.vmap(write)(into, x, run.start, skip, count)
    return into


def _write_row(
    into: Array,
    x: Array,
    start: Array,
    skip: Array,
    count: Array,
    *,
    low: int,
    high: int,
    size: int,
) -> Array:
    """One row of a run.

    A chunk that is padded past the end must not push its real tokens to lower slots, as
    ``dynamic_update_slice`` would: the window is moved to where it fits, and the old content put
    back.
    """
    origin = jnp.clip(start, low, high - size)
    shift = start - origin
    token = jnp.arange(size, dtype=jnp.int32) - shift
    if x.shape[1] > 1:
        x = jnp.roll(x, shift, axis=1)[:, :size]
    old = lax.dynamic_slice_in_dim(into, origin, size, axis=1)
    real = (token >= skip) & (token < count)
    real = real.reshape(size, *[1] * (x.ndim - 2))
    return lax.dynamic_update_slice_in_dim(into, jnp.where(real, x, old), origin, axis=1)
