"""The softmax over keys that several devices have a share of each."""

import jax.numpy as jnp
from jax import lax

from kvjax.core.typing import Array


def across(axis: str | None, highest: Array, total: Array, mixed: Array) -> tuple[Array, Array]:
    """Sum of weights and weighted sum of values over all devices along a mesh's axis, by their
    log-sum-exp (Milakov and Gimelshein, arXiv:1805.02867); what is given where there is none.

    Args:
      axis: of the mesh, or None.
      highest, total: float32[...], the highest score that a device has seen, and its weights' sum.
      mixed: float32[..., head_dim], its weighted sum of values.
    """
    if axis is None:
        return total, mixed
    # The highest of all is any number that makes none too large; a device's own is what its sums
    # were made with, and passes gradients as they do.
    shrink = jnp.exp(highest - lax.pmax(lax.stop_gradient(highest), axis))[..., None]
    # Together: each collective waits for the slowest device.
    both = lax.psum(jnp.concatenate([mixed, total[..., None]], axis=-1) * shrink, axis)
    return both[..., -1], both[..., :-1]
