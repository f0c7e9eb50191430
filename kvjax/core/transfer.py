"""Moving arrays between the host and devices, and committing them to devices."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import ArrayLike
from jaxtyping import PyTree

from kvjax.core.target import JaxDevice, default_device
from kvjax.core.topology import is_target_device
from kvjax.core.validation import is_traced

_T = TypeVar("_T")


def default_memory_kind(device: JaxDevice) -> str | None:
    """Return JAX's name for the memory in which a device computes; None for target devices without
    such names."""
    try:
        kind: str = device.default_memory().kind
    except jax.errors.JaxRuntimeError:  # target GPUs don't implement this
        return None
    return kind


def to_device_memory(tree: _T) -> _T:
    """Move a pytree's arrays to the memory in which their devices compute.

    NumPy arrays go to the default device, uncommitted. JAX arrays stay on their devices.
    """
    return jax.tree.map(_to_device_memory, tree)


def _to_device_memory(x: Any) -> jax.Array:
    if is_traced(x):
        on_host = jax.typeof(x).memory_space == jax.memory.Space.Host
        return jax.device_put(x, jax.memory.Space.Device) if on_host else x
    if not isinstance(x, jax.Array):
        return jnp.asarray(x)
    kind = default_memory_kind(next(iter(x.devices())))
    if kind is None or x.sharding.memory_kind in (None, kind):
        return x
    return jax.device_put(x, x.sharding.with_memory_kind(kind))


def put_on_default_device(tree: _T) -> _T:
    """Move a pytree's arrays from any place to the default device, and commit them."""
    device = default_device()
    sharding = SingleDeviceSharding(device, memory_kind=default_memory_kind(device))
    return jax.device_put(tree, sharding)


def put_like_rows(tree: _T, rows: jax.Array) -> _T:
    """Put a pytree's numbers and arrays on the devices of ``rows``. They are committed if ``rows``
    is.

    ``rows`` has one number per row and may be sharded. Arrays with one entry per row are sharded
    like it, and all others are replicated.
    """
    sharding = rows.sharding
    if isinstance(sharding, NamedSharding):
        kind = sharding.memory_kind
        replicated = NamedSharding(sharding.mesh, PartitionSpec(), memory_kind=kind)

        def put(x: ArrayLike) -> jax.Array:
            per_row = np.shape(x)[:1] == rows.shape
            return jax.device_put(x, sharding if per_row else replicated)

        return jax.tree.map(put, tree)
    if rows.committed:
        return jax.device_put(tree, sharding)
    with jax.default_device(next(iter(rows.devices()))):
        return jax.tree.map(jnp.asarray, tree)


def commit_together(tree: _T) -> _T:
    """Commit all arrays of a pytree if any of them is committed.

    A program commits all its results if any argument is committed. If only some arguments of the
    first call were committed, a second call on its results would compile again.
    """
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not is_traced(x)]
    if not any(x.committed for x in leaves):
        return tree
    return commit(tree)


def commit_like(tree: _T, others: PyTree) -> _T:
    """Commit all arrays of a pytree if any array of ``others`` is committed. Use this for calls
    that receive both."""
    arrays = (x for x in jax.tree.leaves(others) if isinstance(x, jax.Array) and not is_traced(x))
    if (one := next((x for x in arrays if x.committed), None)) is None:
        return tree
    if isinstance(one.sharding, NamedSharding):
        return jax.tree.map(functools.partial(_replicate, one.sharding.mesh), tree)
    return commit(tree)


def _replicate(mesh: Mesh | AbstractMesh, x: _T) -> _T:
    """Replicate an uncommitted array over a mesh."""
    if not isinstance(x, jax.Array) or is_traced(x) or x.committed:
        return x
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec()))


def commit(tree: _T) -> _T:
    """Commit a pytree's arrays to their current devices."""
    return jax.tree.map(_commit, tree)


def _commit(x: _T) -> _T:
    if not isinstance(x, jax.Array) or is_traced(x) or x.committed:
        return x
    return jax.device_put(x, x.sharding)


def fetch(tree: PyTree) -> PyTree:
    """Convert a pytree's arrays to NumPy arrays.

    If some of the devices belong to other processes, all processes must call this.
    """
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable or x.is_fully_replicated for x in leaves):
        return jax.device_get(tree)
    meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    replicated = NamedSharding(meshes[0], PartitionSpec())
    return jax.device_get(_gather(replicated)(tree))


def check_not_target_mesh(mesh: Mesh | AbstractMesh | None) -> None:
    """Raise ``ValueError`` if arrays would be put on a mesh of target devices."""
    if not isinstance(mesh, Mesh) or not is_target_device(mesh.devices.flat[0]):
        return
    if not is_traced(jnp.zeros(())):
        kind = mesh.devices.flat[0].device_kind
        raise ValueError(
            f"arrays can't be put on a {kind} that is not attached: only compile or plan for it "
            "(kvjax.compile, kvjax.memory.plan_on)"
        )


def put_on_mesh(x: ArrayLike, sharding: NamedSharding) -> jax.Array:
    """Put an array on a mesh. This also works inside ``jit``.

    If some of the devices belong to other processes, each process passes the whole array and sends
    the shards of its own devices.
    """
    check_not_target_mesh(sharding.mesh)
    # The test with zeros detects jit, inside which ``x`` may be a constant.
    if sharding.is_fully_addressable or is_traced(x) or is_traced(jnp.zeros(())):
        return jax.device_put(x, sharding)
    if isinstance(x, jax.Array) and x.sharding.device_set == sharding.device_set:
        return jax.device_put(x, sharding)
    host = np.asarray(fetch(x))
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


@functools.lru_cache(maxsize=64)
def _gather(replicated: NamedSharding) -> Callable[[PyTree], PyTree]:
    return jax.jit(lambda tree: tree, out_shardings=replicated)
