"""The mesh of ``jax.set_mesh``, where a script has set one: arrays here say themselves where they
are."""

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import jax
from jax.sharding import AxisType

_P = ParamSpec("_P")
_T = TypeVar("_T")


def outside(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """``call`` as it is where no mesh is set. For what begins its own programs, outside ``jit``."""

    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if jax.sharding.get_abstract_mesh().empty:
            return call(*args, **kwargs)
        with jax.set_mesh(None):
            return call(*args, **kwargs)

    return called


def check_context(sizes: Mapping[str, int]) -> None:
    """Raise ``ValueError`` if a mesh is set that programs on arrays of another can't be traced in:
    JAX takes no other axes than theirs, and results get shardings that those it has set can say.

    Args:
      sizes: of the arrays' mesh, by axis, in order; those of one device may be missing.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.empty or AxisType.Manual in context.axis_types:
        return
    if AxisType.Explicit not in context.axis_types and _divided(context.shape) == _divided(sizes):
        return
    kinds = ", ".join(dict.fromkeys(kind.name for kind in context.axis_types))
    raise ValueError(
        f"jax.set_mesh has set a mesh {dict(context.shape)} of {kinds} axes, but the arrays are on "
        f"a mesh {dict(sizes)} of Auto axes: set the one that kvjax.make_mesh gave, or none"
    )


def _divided(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, size) for name, size in sizes.items() if size > 1]
