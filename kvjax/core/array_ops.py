"""Small array functions: integer arithmetic on host or device, and products with weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kvjax.core.compat import jax_0_9_matmul
from kvjax.core.target import current_target, on_cpu


def xp(*numbers: Any) -> Any:
    """NumPy where all are Python's or NumPy's numbers, so that nothing is compiled and no device is
    asked; ``jax.numpy`` else. (The name is that of the array API's standard.)"""
    return jnp if any(isinstance(x, jax.Array) for x in numbers) else np


def expand_over_slots(cursor: Any) -> Any:
    """Numbers of rows beside those of each row's slots, [batch, 1]; that of one row alone as it
    is, for kernels that have no arrays of one number."""
    return cursor[:, None] if np.ndim(cursor) else cursor


def flag_where(rows: Any, bit: int) -> Any:
    """int32: ``bit`` where ``rows``, bool, are true, and 0 elsewhere: ``jnp.where`` of two Python
    numbers is int64 where 64 bits are enabled."""
    return rows.astype(jnp.int32) * bit


def expand_over_rows(slots: Any, cursor: Any) -> Any:
    """Numbers of slots, [n] or [batch, n], as they go with ``expand_over_slots(cursor)``."""
    return slots[None] if np.ndim(cursor) and np.ndim(slots) == 1 else slots


def arange_row(count: int) -> Any:
    """int32[1, count]: the places of every row, 0 to ``count`` - 1."""
    return jnp.arange(count, dtype=jnp.int32)[None]


FEW = 64
"""Rows up to which a CPU multiplies float32 weights faster as the first factor."""


def contract_last(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Array:
    """float32[..., out]: ``x @ weight.T`` without the transpose."""
    rows = x.size // x.shape[-1]
    if not on_cpu():
        return _before_ampere(x, weight) if current_target().before_ampere else _products(x, weight)
    flat, narrow = x.reshape(rows, x.shape[-1]), x.dtype.itemsize < 4
    if narrow and (found := jax_0_9_matmul(flat, weight)) is not None:
        return found.reshape(*x.shape[:-1], weight.shape[0])
    if rows > FEW:
        return _products(x, weight)
    if narrow and rows == 1:
        # Of 16 bits, one row alone takes ten times as long as two: all weights are widened for it.
        found = _products(jnp.pad(flat, [(0, 1), (0, 0)]), weight)[:1]
    elif narrow or rows == 1:
        found = _products(flat, weight)
    else:
        # Without the barrier the compiler would exchange the factors again.
        found = lax.optimization_barrier(_products(weight, flat)).T
    return found.reshape(*x.shape[:-1], weight.shape[0])


def _before_ampere(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Array:
    """``contract_last`` for GPUs that have products from cuBLAS alone. Without the barrier XLA
    concatenates the weights of products that have a factor in common, and for one row it widens
    them, each in a copy."""
    x, weight = lax.optimization_barrier((x, weight))
    if x.size > x.shape[-1]:
        return _products(x, weight)
    return jnp.sum(x[..., None, :].astype(jnp.float32) * weight.astype(jnp.float32), axis=-1)


def _products(x: Float[Array, "... in"], y: Float[Array, "out in"]) -> Array:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)
