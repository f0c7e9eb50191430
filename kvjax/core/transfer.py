"""Arrays put on devices, and fetched from them."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from kvjax.core.target import default_device
from kvjax.core.topology import is_target_device
from kvjax.core.validation import is_traced

_T = TypeVar("_T")


def default_memory_kind(device: Any) -> str:
    """The kind of memory that a device computes in, by JAX's name."""
    try:
        kind: str = device.default_memory().kind
    except jax.errors.JaxRuntimeError:  # of a GPU that is not here
        kind = "device"
    return kind


def to_device_memory(tree: _T) -> _T:
    """A pytree's arrays in the memory that devices compute in: NumPy's on the default device,
    uncommitted, as ``jnp.zeros`` is, and JAX's on the devices that they are on."""
    return jax.tree.map(_put_here, tree)


def _put_here(x: Any) -> Any:
    if is_traced(x):
        far = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if far else x
    if not isinstance(x, jax.Array):
        return jnp.asarray(x)
    kind = default_memory_kind(next(iter(x.devices())))
    near = x.sharding.memory_kind in (None, kind)
    return x if near else jax.device_put(x, x.sharding.with_memory_kind(kind))


def put_on_default_device(tree: _T) -> _T:
    """A pytree's arrays on the default device, committed, from wherever they are."""
    device = default_device()
    return jax.device_put(
        tree, SingleDeviceSharding(device, memory_kind=default_memory_kind(device))
    )


def put_like_rows(tree: _T, rows: jax.Array) -> _T:
    """A pytree's numbers and arrays where ``rows`` is, and as committed as that: an array with a
    number for each row, of several devices which may have some each."""
    place = rows.sharding
    if isinstance(place, NamedSharding):
        everywhere = NamedSharding(place.mesh, PartitionSpec(), memory_kind=place.memory_kind)

        def one(x: Any) -> Any:
            return jax.device_put(x, place if np.shape(x)[:1] == rows.shape else everywhere)

        return jax.tree.map(one, tree)
    if rows.committed:
        return jax.device_put(tree, place)
    with jax.default_device(next(iter(rows.devices()))):
        return jax.tree.map(jnp.asarray, tree)


def commit_together(tree: _T) -> _T:
    """Arrays as they are, or all committed where some of them are. Programs give back committed all
    that they compute beside such, and would be compiled again when they are given that."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not is_traced(x)]
    if not any(x.committed for x in leaves):
        return tree
    return commit(tree)


def commit_like(tree: _T, others: Any) -> _T:
    """Arrays as they are, or all committed where some of ``others`` are, which programs are given
    beside them."""
    arrays = (x for x in jax.tree.leaves(others) if isinstance(x, jax.Array) and not is_traced(x))
    named = (x for x in arrays if x.committed)
    if (one := next(named, None)) is None:
        return tree
    if isinstance(one.sharding, NamedSharding):
        return jax.tree.map(functools.partial(_on_mesh, one.sharding.mesh), tree)
    return commit(tree)


def _on_mesh(mesh: Any, x: Any) -> Any:
    """An array on all devices of a mesh, if it is on none."""
    if not isinstance(x, jax.Array) or is_traced(x) or x.committed:
        return x
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def commit(tree: _T) -> _T:
    """The same arrays where they are, committed."""
    return jax.tree.map(_committed, tree)


def _committed(x: Any) -> Any:
    if not isinstance(x, jax.Array) or is_traced(x) or x.committed:
        return x
    return jax.device_put(x, x.sharding)


def fetch(tree: Any) -> Any:
    """A pytree's numbers on the host, though other processes have some of the devices: then all
    processes must ask for them."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable or x.is_fully_replicated for x in leaves):
        return jax.device_get(tree)
    meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    whole = NamedSharding(meshes[0], PartitionSpec())
    return jax.device_get(_gathered(whole)(tree))


def check_not_target_mesh(mesh: Any) -> None:
    """Raise ``ValueError`` where arrays are put on a mesh of devices that are not here."""
    if not isinstance(mesh, Mesh) or not is_target_device(mesh.devices.flat[0]):
        return
    if not is_traced(jnp.zeros(())):
        kind = mesh.devices.flat[0].device_kind
        raise ValueError(
            f"arrays can't be put on a {kind} that is not here: compile for it, or plan "
            "(kvjax.compile, kvjax.memory.plan_on)"
        )


def put_on_mesh(x: Any, sharding: NamedSharding) -> Any:
    """An array on a mesh; inside ``jit`` too. Where other processes have some of its devices, each
    gives its own what they are to have of an array that all have."""
    check_not_target_mesh(sharding.mesh)
    # Inside ``jit`` zeros are traced, though a number that is given need not be.
    if sharding.is_fully_addressable or is_traced(x) or is_traced(jnp.zeros(())):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and x.sharding.device_set == sharding.device_set:
        return jax.device_put(x, sharding)
    host = np.asarray(fetch(x))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@functools.lru_cache(maxsize=64)
def _gathered(whole: NamedSharding) -> Any:
    return jax.jit(lambda found: found, out_shardings=whole)
