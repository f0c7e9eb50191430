"""Products with a model's weights."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kvjax.core.compat import jax_0_9_products
from kvjax.core.target import current_target, on_cpu

FEW = 64
"""Rows up to which a CPU multiplies float32 weights faster as the first factor."""


def contract_last(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Array:
    """float32[..., out]: ``x @ weight.T`` without the transpose."""
    rows = x.size // x.shape[-1]
    if not on_cpu():
        return _before_ampere(x, weight) if current_target().before_ampere else _products(x, weight)
    flat, narrow = x.reshape(rows, x.shape[-1]), x.dtype.itemsize < 4
    if narrow and (found := jax_0_9_products(flat, weight)) is not None:
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
