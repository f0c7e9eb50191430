"""Small array functions: integer arithmetic on host or device, and products with weights."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kvjax.core.compat import jax_0_9_matmul
from kvjax.core.target import current_target, on_cpu


def xp(*numbers: object) -> ModuleType:
    """Return ``jax.numpy`` if any argument is a JAX array, otherwise NumPy.

    With NumPy, arithmetic on host integers compiles nothing and does not wait for a device. The
    name ``xp`` follows the array API standard.
    """
    return jnp if any(isinstance(x, jax.Array) for x in numbers) else np


def expand_over_slots(cursor: Any) -> Any:
    """Reshape per-row numbers [batch] to [batch, 1], to combine them with slots.

    A scalar is returned unchanged, for kernels, which compute on a single row.
    """
    return cursor[:, None] if np.ndim(cursor) else cursor


def expand_over_rows(slots: Any, cursor: Any) -> Any:
    """Reshape slots [n] to [1, n] if ``cursor`` has one number per row."""
    return slots[None] if np.ndim(cursor) and np.ndim(slots) == 1 else slots


def flag_where(rows: Array, bit: int) -> Array:
    """Return ``bit`` where the mask ``rows`` is True, and 0 elsewhere, as int32.

    ``jnp.where`` of two Python numbers would be int64 if 64-bit types are enabled.
    """
    return rows.astype(jnp.int32) * bit


def arange_row(count: int) -> Array:
    """Return the numbers 0 to ``count - 1`` as int32[1, count]."""
    return jnp.arange(count, dtype=jnp.int32)[None]


FEW = 64
"""Up to this number of rows, a CPU multiplies faster with the float32 weights as the first
factor."""


def contract_last(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Array:
    """Compute ``x @ weight.T`` in float32, without transposing. Returns float32[..., out]."""
    rows = x.size // x.shape[-1]
    if not on_cpu():
        return _before_ampere(x, weight) if current_target().before_ampere else _dot(x, weight)
    flat, narrow = x.reshape(rows, x.shape[-1]), x.dtype.itemsize < 4
    if narrow and (product := jax_0_9_matmul(flat, weight)) is not None:
        return product.reshape(*x.shape[:-1], weight.shape[0])
    if rows > FEW:
        return _dot(x, weight)
    if narrow and rows == 1:
        # For one row in 16 bits, XLA converts all weights to float32, which is ten times as slow as
        # two rows.
        product = _dot(jnp.pad(flat, [(0, 1), (0, 0)]), weight)[:1]
    elif narrow or rows == 1:
        product = _dot(flat, weight)
    else:
        # Without the barrier the compiler would swap the factors back.
        product = lax.optimization_barrier(_dot(weight, flat)).T
    return product.reshape(*x.shape[:-1], weight.shape[0])


def _before_ampere(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Array:
    """Do the work of ``contract_last`` on GPUs before Ampere, where only cuBLAS multiplies
    matrices.

    Without the barrier, XLA concatenates the weights of products that share a factor, which copies
    them. For a single row it converts them to float32, which also copies them.
    """
    x, weight = lax.optimization_barrier((x, weight))
    if x.size > x.shape[-1]:
        return _dot(x, weight)
    return jnp.sum(x[..., None, :].astype(jnp.float32) * weight.astype(jnp.float32), axis=-1)


def _dot(x: Float[Array, "... in"], y: Float[Array, "out in"]) -> Array:
    axes = (((x.ndim - 1,), (1,)), ((), ()))
    return lax.dot_general(x, y, axes, preferred_element_type=jnp.float32)
