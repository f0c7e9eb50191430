"""Where each array of a cache is, and arrays that are not there, to compile for."""

import functools
from dataclasses import replace
from typing import Any

import jax
from jax.core import ShapedArray
from jax.sharding import SingleDeviceSharding

from kvjax.cache.state import KVCache
from kvjax.core.absent import check_host


def places(cache: KVCache, device: Any = None) -> Any:
    """The sharding of each array of a cache: on its mesh, or on a device. A pytree like it.

    Raises:
      ValueError: if it has bodies on the host of a device that is not here and knows none.
    """
    spread = cache.spread
    if device is not None and any(x.policy.placement.behind_tail for x in cache.layers):
        check_host(device)
    near = SingleDeviceSharding(device) if spread is None else spread.sharding(spread.of_rows())

    def of(layer: Any) -> Any:
        kind = layer.policy.placement.memory_kind
        if spread is not None:
            specs, of_body = layer.specs(), functools.partial(spread.sharding, kind=kind)
            every = jax.tree.map(spread.sharding, specs)
            body = jax.tree.map(of_body, (specs.keys, specs.values))
        else:
            far = near if kind is None else SingleDeviceSharding(device, memory_kind=kind)
            every = jax.tree.map(lambda _: near, layer)
            body = jax.tree.map(lambda _: far, (layer.keys, layer.values))
        return replace(every, keys=body[0], values=body[1])

    every = jax.tree.map(lambda _: near, cache)
    return replace(every, layers=tuple(of(layer) for layer in cache.layers))


def arguments(tree: Any, places: Any) -> Any:
    """Arrays that are not there, in the kinds of memory that their shardings say, for a program
    that is given these shardings as its own."""

    def one(x: Any, place: Any) -> Any:
        far = place.memory_kind == "pinned_host"
        space = jax.memory.Space.Host if far else jax.memory.Space.Device
        return ShapedArray(x.shape, x.dtype, memory_space=space)

    return jax.tree.map(one, tree, places)
