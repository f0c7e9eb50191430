"""Where the arrays of a cache are stored, and their sizes in bytes."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
from jax.core import ShapedArray
from jax.sharding import PartitionSpec, Sharding, SingleDeviceSharding
from jaxtyping import PyTree

from kvjax.cache.checks import check_cache
from kvjax.cache.layer import LayerCache, layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.target import JaxDevice
from kvjax.core.topology import check_host_memory
from kvjax.placement.device import Budget, Device, LayerBytes
from kvjax.placement.mesh import MeshSharding
from kvjax.policies.cache_policy import CachePolicy


def array_shardings(cache: KVCache, device: JaxDevice = None) -> PyTree:
    """Return the sharding of each array of a cache, on its mesh or on ``device``, as a pytree like
    the cache.

    Raises:
      ValueError: if bodies are in host memory, and ``device`` is a target device whose compiler
        does not support this.
    """
    mesh_sharding = cache.mesh_sharding
    if device is not None and any(x.policy.placement.needs_tail for x in cache.layers):
        check_host_memory(device)
    near = (
        SingleDeviceSharding(device)
        if mesh_sharding is None
        else mesh_sharding.sharding(mesh_sharding.row_spec())
    )

    def of_layer(layer: LayerCache) -> LayerCache:
        kind = layer.policy.placement.memory_kind
        if mesh_sharding is not None:
            specs = layer.partition_specs()
            far = functools.partial(mesh_sharding.sharding, kind=kind)
            shardings = jax.tree.map(mesh_sharding.sharding, specs)
            body = jax.tree.map(far, (specs.keys, specs.values))
        else:
            sharding = near if kind is None else SingleDeviceSharding(device, memory_kind=kind)
            shardings = jax.tree.map(lambda _: near, layer)
            body = jax.tree.map(lambda _: sharding, (layer.keys, layer.values))
        return replace(shardings, keys=body[0], values=body[1])

    shardings = jax.tree.map(lambda _: near, cache)
    return replace(shardings, layers=tuple(map(of_layer, cache.layers)))


def abstract_arguments(tree: PyTree, shardings: PyTree) -> PyTree:
    """Return abstract arrays in the kinds of memory of ``shardings``, to lower a program that has
    ``shardings`` as its ``in_shardings``."""

    def one(x: jax.ShapeDtypeStruct, sharding: Sharding) -> ShapedArray:
        far = sharding.memory_kind == "pinned_host"
        space = jax.memory.Space.Host if far else jax.memory.Space.Device
        return ShapedArray(x.shape, x.dtype, memory_space=space)

    return jax.tree.map(one, tree, shardings)


def nbytes(cache: KVCache, mesh_sharding: MeshSharding | None = None) -> dict[str, int]:
    """Return the bytes of all layers' keys and values, by place: ``"device"`` and ``"host"``.

    Args:
      cache: a cache on one device or on a mesh.
      mesh_sharding: if given, only one device's shard in this sharding is counted. Pass
        ``cache.mesh_sharding`` for the cache's own mesh. By default, all bytes are counted.

    Raises:
      ValueError: if ``cache`` is not a cache.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy(bits=8), max_len=64)
      print(kvjax.nbytes(cache))  # {"device": ...}
      ```
    """
    check_cache("kvjax.nbytes", cache)
    totals: dict[str, int] = {}
    for layer in cache.layers:
        if mesh_sharding is not None:
            layer = shard_of(layer, mesh_sharding)
        body, rest = (layer.keys, layer.values), (layer.tail, layer.strip, layer.fetched)
        for place, arrays in ((layer.policy.placement.place, body), ("device", rest)):
            if jax.tree.leaves(arrays):
                totals[place] = totals.get(place, 0) + tree_bytes(arrays)
    return totals


def shard_of(layer: LayerCache, mesh_sharding: MeshSharding) -> LayerCache:
    """Return the shapes of one device's shard of an empty layer like ``layer``."""
    policy = replace(layer.policy, placement=layer.policy.placement.on_mesh(mesh_sharding))
    whole = layer_shapes(policy, layer.batch, layer.kv_heads, layer.head_dim, layer.stack)

    def shard(x: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(mesh_sharding.sharding(spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(shard, whole, whole.partition_specs())


def shards_of(cache: KVCache, mesh_sharding: MeshSharding | None) -> list[LayerCache]:
    """Return the layers of a cache, or the shapes of one device's shard of each layer."""
    return [
        layer if mesh_sharding is None else shard_of(layer, mesh_sharding) for layer in cache.layers
    ]


@functools.lru_cache(maxsize=1024)
def layer_sizes(
    policy: CachePolicy, host: Device, batch: int, kv_heads: int, head_dim: int
) -> LayerBytes:
    """Compute the bytes that a layer with a resolved policy has if it is on the device, and if it
    has the placement ``host``. On a mesh, these are bytes per device."""

    def body_and_tail(placement: Device) -> tuple[int, int]:
        layer = layer_shapes(policy.with_placement(placement), batch, kv_heads, head_dim)
        mesh_sharding = policy.placement.mesh_sharding
        layer = layer if mesh_sharding is None else shard_of(layer, mesh_sharding)
        return tree_bytes((layer.keys, layer.values)), tree_bytes(layer.tail)

    body, tail = body_and_tail(host)
    return LayerBytes(sum(body_and_tail(Device())), tail, body, policy.layout.grows_to is not None)


def place_within(
    budget: Budget, policies: Sequence[CachePolicy], shapes: Sequence[tuple[int, int, int]]
) -> list[CachePolicy]:
    """Place as many layers on the host as a budget requires. Returns the resolved policies of all
    layers. ``shapes`` has the batch, kv_heads and head_dim of each layer."""
    sizes = [
        layer_sizes(policy, budget.placement, *shape)
        for policy, shape in zip(policies, shapes, strict=True)
    ]
    offloaded = budget.offloaded(sizes, ())
    return [
        policy.with_placement(budget.placement if n in offloaded else Device())
        for n, policy in enumerate(policies)
    ]
