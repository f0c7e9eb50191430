"""Where the arrays of a cache are stored, and their sizes in bytes."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding

from kvjax.cache.checks import check_cache
from kvjax.cache.layer import LayerCache, layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.topology import check_host_memory
from kvjax.placement.device import Budget, Device, LayerBytes
from kvjax.placement.mesh import MeshSharding
from kvjax.policies.cache_policy import CachePolicy


def array_shardings(cache: KVCache, device: Any = None) -> Any:
    """The sharding of each array of a cache: on its mesh, or on a device. A pytree like it.

    Raises:
      ValueError: if it has bodies on the host of a device that is not here and knows none.
    """
    spread = cache.spread
    if device is not None and any(x.policy.placement.needs_tail for x in cache.layers):
        check_host_memory(device)
    near = SingleDeviceSharding(device) if spread is None else spread.sharding(spread.row_spec())

    def of(layer: Any) -> Any:
        kind = layer.policy.placement.memory_kind
        if spread is not None:
            specs, of_body = layer.partition_specs(), functools.partial(spread.sharding, kind=kind)
            every = jax.tree.map(spread.sharding, specs)
            body = jax.tree.map(of_body, (specs.keys, specs.values))
        else:
            far = near if kind is None else SingleDeviceSharding(device, memory_kind=kind)
            every = jax.tree.map(lambda _: near, layer)
            body = jax.tree.map(lambda _: far, (layer.keys, layer.values))
        return replace(every, keys=body[0], values=body[1])

    every = jax.tree.map(lambda _: near, cache)
    return replace(every, layers=tuple(of(layer) for layer in cache.layers))


def abstract_arguments(tree: Any, array_shardings: Any) -> Any:
    """Arrays that are not there, in the kinds of memory that their shardings say, for a program
    that is given these shardings as its own."""

    def one(x: Any, place: Any) -> Any:
        far = place.memory_kind == "pinned_host"
        space = jax.memory.Space.Host if far else jax.memory.Space.Device
        return ShapedArray(x.shape, x.dtype, memory_space=space)

    return jax.tree.map(one, tree, array_shardings)


def nbytes(cache: KVCache, spread: MeshSharding | None = None) -> dict[str, int]:
    """Bytes of all layers' keys and values, by the place where they are.

    Args:
      cache: the cache, on one device or on a mesh.
      spread: counts what one device would have of it, were it spread so; ``cache.spread`` is what
        one has of a cache on a mesh.

    Raises:
      ValueError: if it is no cache.
    """
    check_cache("kvjax.nbytes", cache)
    totals: dict[str, int] = {}
    for layer in cache.layers:
        if spread is not None:
            layer = shard_of(layer, spread)
        body, rest = (layer.keys, layer.values), (layer.tail, layer.strip, layer.fetched)
        for place, held in ((layer.policy.placement.place, body), ("device", rest)):
            if jax.tree.leaves(held):
                totals[place] = totals.get(place, 0) + tree_bytes(held)
    return totals


def shard_of(held: LayerCache, spread: MeshSharding) -> LayerCache:
    """What a device has of an empty layer like this one, as shapes."""
    policy = replace(held.policy, placement=held.policy.placement.on_mesh(spread))
    whole = layer_shapes(policy, held.batch, held.kv_heads, held.head_dim, held.stack)

    def part(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spread.sharding(spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(part, whole, whole.partition_specs())


def shards_of(cache: KVCache, spread: MeshSharding | None) -> list[LayerCache]:
    """A cache's layers, or what a device has of each, as shapes, where some share it."""
    return [layer if spread is None else shard_of(layer, spread) for layer in cache.layers]


@functools.lru_cache(maxsize=1024)
def layer_sizes(
    policy: CachePolicy, host: Device, batch: int, kv_heads: int, head_dim: int
) -> LayerBytes:
    """What a layer of a resolved policy takes, on the device and with ``host``; on a mesh, of one
    of its devices."""

    def parts(placement: Device) -> tuple[int, int]:
        layer = layer_shapes(policy.with_placement(placement), batch, kv_heads, head_dim)
        spread = policy.placement.spread
        layer = layer if spread is None else shard_of(layer, spread)
        return tree_bytes((layer.keys, layer.values)), tree_bytes(layer.tail)

    body, tail = parts(host)
    return LayerBytes(sum(parts(Device())), tail, body, policy.layout.grows_to is not None)


def place_within(
    budget: Budget, policies: Sequence[CachePolicy], shapes: Sequence[tuple[int, int, int]]
) -> list[CachePolicy]:
    """Resolved policies of layers with batch, kv_heads and head_dim, with so many of them on the
    host as a budget asks for."""
    sizes = [
        layer_sizes(policy, budget.placement, *shape)
        for policy, shape in zip(policies, shapes, strict=True)
    ]
    away = budget.offloaded(sizes, ())
    return [
        policy.with_placement(budget.placement if n in away else Device())
        for n, policy in enumerate(policies)
    ]
