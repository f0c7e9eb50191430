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


def bit_where(rows: Any, bit: int) -> Any:
    """int32: ``bit`` where ``rows``, bool, are true, and 0 elsewhere: ``jnp.where`` of two Python
    numbers is int64 where 64 bits are enabled."""
    return rows.astype(jnp.int32) * bit


def slots_beside(slots: Any, cursor: Any) -> Any:
    """Numbers of slots, [n] or [batch, n], as they go with ``beside_slots(cursor)``."""
    return slots[None] if np.ndim(cursor) and np.ndim(slots) == 1 else slots


def each_place(count: int) -> Any:
    """int32[1, count]: the places of every row, 0 to ``count`` - 1."""
    return jnp.arange(count, dtype=jnp.int32)[None]
