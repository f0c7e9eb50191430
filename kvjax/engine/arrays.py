"""Numbers and parameters as programs are given them."""

from typing import Any

import jax
import numpy as np

from kvjax.core.device import committed
from kvjax.generation.loaded_model import check_like, strong


def ints(*numbers: int) -> Any:
    """int32[n]."""
    return np.array(numbers, np.int32)


def flag(truth: bool) -> Any:
    """bool[1]."""
    return np.array([truth])


def sent(params: Any) -> Any:
    """Parameters as programs are given them: arrays of JAX, committed, none weakly typed."""
    there = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jax.device_put(x), params)
    return committed(strong(there))


def alike(params: Any, those: Any) -> Any:
    """Parameters that are to be sent in the place of ``those``, committed.

    Raises:
      ValueError: if they are not of the same shapes, dtypes and devices.
    """
    try:
        check_like(params, those)
    except ValueError as error:
        raise ValueError(f"the parameters are not those of the engine's model: {error}") from None
    params = sent(params)
    each = zip(jax.tree.leaves(params), jax.tree.leaves(those), strict=True)
    if any(x.sharding != there.sharding for x, there in each):
        raise ValueError(
            "the parameters are not those of the engine's model: they are on other devices, or "
            "divided otherwise; lm.put(params) moves them"
        )
    return params
