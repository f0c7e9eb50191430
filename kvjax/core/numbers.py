"""Arithmetic on whole numbers that may be the host's or the device's."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def xp(*numbers: Any) -> Any:
    """NumPy where all are Python's or NumPy's numbers, so that nothing is compiled and no device is
    asked; ``jax.numpy`` else. (The name is that of the array API's standard.)"""
    return jnp if any(isinstance(x, jax.Array) for x in numbers) else np


def beside_slots(cursor: Any) -> Any:
    """Numbers of rows beside those of each row's slots, [batch, 1]; that of one row alone as it
    is, for kernels that have no arrays of one number."""
    return cursor[:, None] if np.ndim(cursor) else cursor
