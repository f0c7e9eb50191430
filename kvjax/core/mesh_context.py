"""Support for scripts that set a mesh with ``jax.set_mesh``.

The shardings of kvjax's arrays include their mesh, so kvjax's programs must not depend on the mesh
that a script has set.
"""

import functools
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jaxtyping import PyTree

from kvjax.core.validation import is_traced

_P = ParamSpec("_P")
_T = TypeVar("_T")
_NO_MESH = Mesh(np.empty((), object), ())
_explicit_mesh: ContextVar[Mesh | None] = ContextVar("explicit_mesh", default=None)


def allow_host_to_device(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate ``function`` so that ``jax_transfer_guard`` treats its host-to-device transfers as
    explicit.

    The guards "log" and "disallow" then allow them, but the guards "log_explicit" and
    "disallow_explicit" do not. Transfers to the host stay guarded.
    """

    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        guard = jax.config.jax_transfer_guard_host_to_device  # pyright: ignore[reportAttributeAccessIssue]
        if guard in ("log_explicit", "disallow_explicit"):
            return function(*args, **kwargs)
        with jax.transfer_guard_host_to_device("allow"):
            return function(*args, **kwargs)

    return wrapped


def without_mesh_context(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate ``function`` so that it runs as if no mesh were set. Use this for functions that
    start programs, outside ``jit``.

    Arguments on a mesh with explicit axes are converted to the same mesh with automatic axes, which
    changes only their type. Results are converted back.
    """

    @allow_host_to_device
    @functools.wraps(function)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if not jax.sharding.get_abstract_mesh().empty and not is_traced(jnp.zeros(())):
            with jax.set_mesh(_NO_MESH):
                return wrapped(*args, **kwargs)
        mesh = _find_explicit_mesh((args, kwargs))
        if mesh is None:
            return function(*args, **kwargs)
        token = _explicit_mesh.set(mesh)
        try:
            args, kwargs = jax.tree.map(_to_automatic, (args, kwargs))
            return to_explicit_mesh(function(*args, **kwargs), mesh)
        finally:
            _explicit_mesh.reset(token)

    return wrapped


def explicit_mesh() -> Mesh | None:
    """Return the mesh with explicit axes on which the current call of a ``without_mesh_context``
    function received its arguments, or None."""
    return _explicit_mesh.get()


def to_explicit_mesh(tree: _T, mesh: Mesh | None) -> _T:
    """Convert arrays to ``mesh``, which is a result of ``explicit_mesh``. If ``mesh`` is None,
    return the arrays unchanged."""
    return tree if mesh is None else jax.tree.map(functools.partial(_to_explicit, mesh), tree)


def _find_explicit_mesh(tree: PyTree) -> Mesh | None:
    """Return the first mesh with explicit axes among the meshes of a pytree's arrays, or None."""
    for x in jax.tree.leaves(tree):
        if (mesh := _mesh_of(x)) is not None and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def _mesh_of(x: object) -> Mesh | None:
    """Return the mesh of an array; None for traced arrays and arrays without a mesh."""
    if not isinstance(x, jax.Array) or is_traced(x) or not isinstance(x.sharding, NamedSharding):
        return None
    mesh = x.sharding.mesh
    return mesh if isinstance(mesh, Mesh) else None


@functools.lru_cache(maxsize=16)
def _automatic(mesh: Mesh) -> Mesh:
    """Return a mesh with the same devices and axis names, but automatic axes."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _to_automatic(x: Any) -> Any:
    mesh = _mesh_of(x)
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return x
    sharding = NamedSharding(_automatic(mesh), x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return jax.device_put(x, sharding)


def _to_explicit(mesh: Mesh, x: Any) -> Any:
    if _mesh_of(x) != _automatic(mesh):
        return x
    sharding = NamedSharding(mesh, x.sharding.spec, memory_kind=x.sharding.memory_kind)
    return jax.device_put(x, sharding)


def has_auto_axes() -> bool:
    """Return whether the mesh set with ``jax.set_mesh`` has an automatic axis of several
    devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return False
    axes = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return any(kind is AxisType.Auto and size > 1 for kind, size in axes)


def check_mesh_context(sizes: Mapping[str, int]) -> None:
    """Raise ``ValueError`` if programs on the arrays' mesh can't be traced under the mesh set with
    ``jax.set_mesh``.

    Under a mesh, JAX accepts only its axes, and results get shardings on it.

    Args:
      sizes: axis sizes of the arrays' mesh, in order; axes of size 1 may be missing.
    """
    context = jax.sharding.get_abstract_mesh()
    if context.empty or AxisType.Manual in context.axis_types:
        return
    same = _nontrivial(context.shape) == _nontrivial(sizes)
    if AxisType.Explicit not in context.axis_types and same:
        return
    kinds = ", ".join(dict.fromkeys(kind.name for kind in context.axis_types))
    raise ValueError(
        f"jax.set_mesh has set a mesh {dict(context.shape)} of {kinds} axes, but the arrays are on "
        f"a mesh {dict(sizes)} of Auto axes: set the mesh that kvjax.make_mesh returned, or none"
    )


def _nontrivial(sizes: Mapping[str, int]) -> list[tuple[str, int]]:
    return [(name, size) for name, size in sizes.items() if size > 1]
