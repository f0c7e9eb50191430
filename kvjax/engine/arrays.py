"""Numbers and parameters as programs are given them."""

from typing import Any

import jax
import numpy as np

from kvjax.core.device import committed


def ints(*numbers: int) -> Any:
    """int32[n]."""
    return np.array(numbers, np.int32)


def flag(truth: bool) -> Any:
    """bool[1]."""
    return np.array([truth])


def forms(params: Any) -> Any:
    """What must be alike of parameters that are sent to the same programs."""
    leaves, form = jax.tree.flatten(params)
    return form, [(x.shape, x.dtype, x.weak_type, x.sharding) for x in leaves]


def alike(params: Any, those: Any) -> Any:
    """Parameters that are to be sent in the place of ``those``, committed.

    Raises:
      ValueError: if they are not of the same shapes, dtypes and devices.
    """
    params = committed(params)
    if forms(params) != forms(those):
        raise ValueError(
            "the parameters are not those of the engine's model: the same names, shapes, dtypes "
            "and devices are needed"
        )
    return params
