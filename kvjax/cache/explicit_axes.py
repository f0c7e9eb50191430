"""Run functions of caches under a mesh with explicit axes, set with ``jax.set_mesh``.

Under such a mesh, the type of every array says how it is divided. JAX rejects operations whose
result could be divided in several ways, such as most writes into a cache. So kvjax's functions run
with automatic axes, where the compiler decides, and then divide their results like their arguments.
"""

import functools
import itertools
from collections.abc import Callable, Container
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import PyTree

from kvjax.cache.state import KVCache
from kvjax.core.mesh_context import allow_host_to_device

_P = ParamSpec("_P")
_T = TypeVar("_T")


def automatic_axes(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate ``function`` so that it runs with the mesh's explicit axes turned into automatic
    ones.

    Each array of a returned cache is divided like the same array of the cache argument. Other
    arrays are divided like an argument of the same shape, or else along their rows. A cache on a
    mesh of ``kvjax.make_mesh`` is rejected, because the mesh set by ``jax.set_mesh`` has different
    axes.
    """

    @allow_host_to_device
    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        mesh = jax.sharding.get_abstract_mesh()
        kinds = () if mesh.empty else zip(mesh.axis_names, mesh.axis_types, strict=True)
        explicit = {name: AxisType.Auto for name, kind in kinds if kind is AxisType.Explicit}
        if not explicit:
            return function(*args, **kwargs)
        divisions = _Divisions(mesh, args, kwargs)
        with jax.sharding.use_abstract_mesh(mesh.update_axis_types(explicit)):
            args, kwargs = jax.tree.map(functools.partial(_without, explicit), (args, kwargs))
            result = function(*args, **kwargs)
        return divisions.apply(result)

    return wrapped


def _without(names: Container[str], x: object) -> object:
    """Remove the axes ``names`` from the sharding in the type of an array."""
    if not isinstance(x, jax.Array):
        return x
    axes = []
    for entry in jax.typeof(x).sharding.spec:
        kept = tuple(name for name in _axis_names(entry) if name not in names)
        axes.append(kept[0] if len(kept) == 1 else kept or None)
    return jax.sharding.reshard(x, PartitionSpec(*axes))


def _axis_names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a ``PartitionSpec``."""
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)


class _Divisions:
    """How the arrays of a function's arguments are divided."""

    def __init__(self, mesh: AbstractMesh, *args: object) -> None:
        self.mesh = mesh
        leaves = jax.tree.leaves(args, is_leaf=_is_cache)
        arrays = [x for x in leaves if isinstance(x, jax.Array)]
        caches = [x for x in leaves if _is_cache(x)]
        for cache in caches:
            if cache.mesh_sharding is not None:
                cache.mesh_sharding.check_context()
        self.cache = {
            path: jax.typeof(x).sharding.spec
            for path, x in jax.tree_util.tree_leaves_with_path(caches[0] if caches else ())
            if isinstance(x, jax.Array)
        }
        self.arrays = {x.shape: jax.typeof(x).sharding.spec for x in reversed(arrays)}
        rows = [caches[0].length] if caches else arrays
        first = tuple(jax.typeof(rows[0]).sharding.spec) if rows else ()
        self.rows = first[0] if first else None

    def apply(self, result: _T) -> _T:
        """Divide the result of the function like its arguments."""

        def one(x: PyTree) -> PyTree:
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
        for size, entry in itertools.zip_longest(x.shape, spec):
            shards = np.prod([sizes[name] for name in _axis_names(entry)], dtype=int)
            axes.append(None if size % shards else entry)
        return jax.sharding.reshard(x, PartitionSpec(*axes))


def _is_cache(x: object) -> bool:
    return isinstance(x, KVCache)
