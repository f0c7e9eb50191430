"""Run functions of caches under a mesh with explicit axes."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import allow_host_to_device

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Path = tuple[Any, ...]


def automatic_axes(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """``call`` with the explicit axes of the mesh that is set as automatic ones.

    Of a cache that it gives, each array is divided as that of the cache that it was given; an array
    of the same shape as one that it was given, as that; and all others by their rows alone. A cache
    on a mesh of ``kvjax.make_mesh`` is refused: its axes are not those that are set.
    """

    @allow_host_to_device
    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        mesh = jax.sharding.get_abstract_mesh()
        kinds = () if mesh.empty else zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name: AxisType.Auto for name, kind in kinds if kind is AxisType.Explicit}
        if not explicit:
            return call(*args, **kwargs)
        given = _Given(mesh, args, kwargs)
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(explicit)):
            args, kwargs = jax.tree.map(functools.partial(_without, explicit), (args, kwargs))
            result = call(*args, **kwargs)
        return given.divided(result)

    return called


def _without(names: dict[str, Any], x: Any) -> Any:
    """An array whose type does not say that it is divided along these axes."""
    if not isinstance(x, jax.Array):
        return x
    axes = [_of(names, axis, kept=False) for axis in jax.typeof(x).sharding.spec]
    return jax.sharding.reshard(x, PartitionSpec(*axes))


def _of(names: Any, axis: Any, *, kept: bool) -> Any:
    """What of the axes that divide a dimension is among some names, or is not."""
    each = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
    found = tuple(name for name in each if (name in names) is kept)
    return found[0] if len(found) == 1 else found or None


class _Given:
    """How the arrays of some arguments are divided."""

    def __init__(self, mesh: AbstractMesh, *given: Any) -> None:
        self.mesh = mesh
        leaves = jax.tree.leaves(given, is_leaf=_is_cache)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        caches = [x for x in leaves if _is_cache(x)]
        for cache in caches:
            if cache.spread is not None:
                cache.spread.check_context()
        self.cache = {
            path: jax.typeof(x).sharding.spec
            for path, x in jax.tree_util.tree_leaves_with_path(caches[0] if caches else ())
            if isinstance(x, jax.Array)
        }
        self.arrays = {x.shape: jax.typeof(x).sharding.spec for x in reversed(arrays)}
        rows = [caches[0].length] if caches else arrays
        first = tuple(jax.typeof(rows[0]).sharding.spec) if rows else ()
        self.rows = first[0] if first else None

    def divided(self, result: _T) -> _T:
        """What a function gave, divided as what it was given."""

        def one(x: Any) -> Any:
            if not _is_cache(x):
                return self._put(x, self.arrays.get(np.shape(x)))
            return jax.tree_util.tree_map_with_path(
                lambda path, part: self._put(part, self.cache.get(path)), x
            )

        return jax.tree.map(one, result, is_leaf=_is_cache)

    def _put(self, x: Any, spec: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if spec is None or len(spec) > x.ndim:
            spec = (self.rows,) if x.ndim else ()
        sizes = self.mesh.shape
        axes = []
        for size, axis in itertools.zip_longest(x.shape, spec):
            each = () if axis is None else axis if isinstance(axis, tuple) else (axis,)
            axes.append(None if size % np.prod([sizes[n] for n in each], dtype=int) else axis)
        return jax.sharding.reshard(x, PartitionSpec(*axes))


def _is_cache(x: Any) -> bool:
    return isinstance(x, KVCache)
