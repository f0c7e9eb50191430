"""The run-time checker of shapes that ``conftest`` puts on every function of kvjax."""

import types
import typing
from typing import Any

import beartype
import jaxtyping
import numpy as np


def check(function: Any) -> Any:
    """Check dtypes and shapes of arrays, of NumPy's too; the type checker has the rest already."""
    if function.__name__ == "__init__":  # JAX rebuilds a state around whatever a tree map gives
        return function
    hints = getattr(function, "__annotations__", {})
    arrays = {name: _arrays(hint) for name, hint in hints.items()}
    function.__annotations__ = {name: hint for name, hint in arrays.items() if hint is not None}
    return beartype.beartype(function)


def _arrays(hint: Any) -> Any:
    """The hint with NumPy's arrays allowed, or None where it is not of arrays alone."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        parts = [p if p is type(None) else _arrays(p) for p in typing.get_args(hint)]
        return None if None in parts else typing.Union[tuple(parts)]  # noqa: UP007
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return hint.dtype[jaxtyping.Array | np.ndarray, hint.dim_str]
    return None
