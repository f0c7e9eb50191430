"""The mesh of ``jax.set_mesh``, where a script has set one: arrays here say themselves where they
are."""

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from kvjax.core.validation import is_traced

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NONE = Mesh(np.empty((), object), ())
_home: ContextVar[Mesh | None] = ContextVar("home", default=None)


def allow_host_to_device(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """``call``, whose transfers from the host to a device count as explicit: the guards "log" and
    "disallow" of ``jax_transfer_guard`` let them pass, and those of explicit transfers do not. What
    it fetches stays guarded."""

    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]
        if guard in ("log_explicit", "disallow_explicit"):
            return call(*args, **kwargs)
        with jax.transfer_guard_host_to_device("allow"):
            return call(*args, **kwargs)

    return called


def without_mesh_context(call: Callable[_P, _T]) -> Callable[_P, _T]:
    """``call`` as it is where no mesh is set. For what begins its own programs, outside ``jit``.

    Arrays on a mesh of explicit axes are given to it on automatic ones, the same arrays under
    another type, and what it gives is on the mesh of those again.
    """

    @allow_host_to_device
    @functools.wraps(call)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not jax.sharding.get_abstract_mesh().empty and not is_traced(jnp.zeros(())):
            with jax.set_mesh(_NONE):
                return called(*args, **kwargs)
        explicit_mesh = _explicit((args, kwargs))
        if explicit_mesh is None:
            return call(*args, **kwargs)
        token = _home.set(explicit_mesh)
        try:
            args, kwargs = jax.tree.map(_on_automatic, (args, kwargs))
            return to_explicit_mesh(call(*args, **kwargs), explicit_mesh)
        finally:
            _home.reset(token)

    return called


def explicit_mesh() -> Mesh | None:
    """The explicit mesh of the arguments of the running ``without_mesh_context`` call, or None."""
    return _home.get()


def to_explicit_mesh(tree: _T, explicit_mesh: Mesh | None) -> _T:
    """Arrays on the mesh that ``explicit_mesh`` gave, where it gave one."""
    return (
        tree
        if explicit_mesh is None
        else jax.tree.map(functools.partial(_on_explicit, explicit_mesh), tree)
    )


def _explicit(tree: Any) -> Mesh | None:
    """A mesh of explicit axes that arrays are on."""
    for x in jax.tree.leaves(tree):
        if (mesh := _mesh_of(x)) is not None and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _mesh_of(x: Any) -> Mesh | None:
    """The mesh that an array is on; none of one that is traced."""
    if not isinstance(x, jax.Array) or is_traced(x) or not isinstance(x.sharding, NamedSharding):
        return None
    mesh = x.sharding.mesh
    return mesh if isinstance(mesh, Mesh) else None


@functools.lru_cache(maxsize=16)
def _automatic(mesh: Mesh) -> Mesh:
    """The same devices and names, with automatic axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _on_automatic(x: Any) -> Any:
    mesh = _mesh_of(x)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return x
    there = NamedSharding(_automatic(mesh), x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return jax.device_put(x, there)


def _on_explicit(explicit_mesh: Mesh, x: Any) -> Any:
    if _mesh_of(x) != _automatic(explicit_mesh):
        return x
    there = NamedSharding(explicit_mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return jax.device_put(x, there)


def has_auto_axes() -> bool:
    """Whether the mesh that is set has automatic axes of several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind is AxisType.Auto and size > 1 for kind, size in axes)


def check_mesh_context(sizes: Mapping[str, int]) -> None:
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
