"""The device that everything is on unless somebody says otherwise."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.core.absent import is_absent
from kvjax.core.checks import is_traced


def default_device() -> Any:
    """JAX's default device: the first of its platform, where only a platform was named."""
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def own_memory(device: Any) -> str:
    """The kind of memory that a device computes in, by JAX's name."""
    try:
        kind: str = device.default_memory().kind
    except jax.errors.JaxRuntimeError:  # of a GPU that is not here
        kind = "device"
    return kind


_computing: ContextVar[str | None] = ContextVar("computing", default=None)


@contextmanager
def computing_on(platform: str) -> Iterator[None]:
    """Trace what is inside for a platform, whatever the default device is."""
    token = _computing.set(platform)
    try:
        yield
    finally:
        _computing.reset(token)


def traced_for() -> str:
    """The platform that is traced for here: by ``computing_on``, or else the default device's."""
    return _computing.get() or str(default_device().platform)


def on_cpu() -> bool:
    """Whether what is traced here is for a CPU."""
    return traced_for() == "cpu"


def fetch(tree: Any) -> Any:
    """A pytree's numbers on the host, though other processes have some of the devices: then all
    processes must ask for them."""
    leaves = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    if all(x.is_fully_addressable or x.is_fully_replicated for x in leaves):
        return jax.device_get(tree)
    meshes = [x.sharding.mesh for x in leaves if isinstance(x.sharding, NamedSharding)]
    whole = NamedSharding(meshes[0], PartitionSpec())
    return jax.device_get(_gathered(whole)(tree))


def check_here(mesh: Any) -> None:
    """Raise ``ValueError`` where arrays are put on a mesh of devices that are not here."""
    if not isinstance(mesh, Mesh) or not is_absent(mesh.devices.flat[0]):
        return
    if not is_traced(jnp.zeros(())):
        kind = mesh.devices.flat[0].device_kind
        raise ValueError(
            f"arrays can't be put on a {kind} that is not here: compile for it, or plan "
            "(kvjax.compile, kvjax.plan_on)"
        )


def put_over(x: Any, sharding: NamedSharding) -> Any:
    """An array on a mesh; inside ``jit`` too. Where other processes have some of its devices, each
    gives its own what they are to have of an array that all have."""
    check_here(sharding.mesh)
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
