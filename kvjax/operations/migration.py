"""A cache's layers in other places: parked on the host, taken up again, on another mesh."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache
from kvjax.cache.status import LOST
from kvjax.cache.usable import usable
from kvjax.core.checks import whole_number
from kvjax.core.context import outside
from kvjax.core.typing import Array
from kvjax.operations.conversion import converted
from kvjax.placement.device import Device, beside, check_placement
from kvjax.placement.order import given, kept
from kvjax.placement.spread import Spread, spread_over
from kvjax.policies.cache_policy import CachePolicy

KEEP: Any = object()
"""Of ``migrate``: the devices where the cache is."""


@outside
def migrate(
    cache: KVCache,
    placement: Device | None = None,
    layers: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = KEEP,
) -> KVCache:
    """Move a cache, or some of its layers, to another place; numbers stay what they are.

    It is done outside ``jit``, one layer after the other, and the cache given is used up, so that
    never more than one layer is held twice; a ``fork`` of it survives. The last layer may still be
    on its way when this returns. A raw layer has a tail on the host alone, and is laid out anew
    when it moves; others move as they are. There and back, a text goes on bit for bit.

    Args:
      cache: the cache; the arrays of what moves are deleted.
      placement: where to: ``Device()``, ``Host()``; by default each layer stays in its kind of
        memory.
      layers: which layers of the model; by default all.
      mesh: the devices to spread the whole cache over, see ``make_mesh``, or None for the default
        one; if it is not given, those where it is.

    Raises:
      ValueError: if there is no such layer, the placement is none, the cache has been used up, the
        mesh does not divide the rows, or some layers alone are to be on another mesh; inside
        ``jit``.
    """
    cache = usable("kvjax.migrate", cache, outside=True)
    if mesh is not KEEP:
        if layers is not None:
            raise ValueError("all layers are on the same devices: give layers or mesh, not both")
        spread = None if mesh is None else spread_over(mesh, cache.common_heads)
        cache = cache if spread == cache.spread else _respread(cache, spread)
    if placement is None and mesh is not KEEP:
        return cache
    placement = check_placement(placement)
    entries = range(len(cache.layers))
    if layers is not None:
        if not isinstance(layers, Iterable):
            raise ValueError(f"layers must be a list of numbers, got {layers!r:.80}")
        entries = sorted({cache.entry(whole_number("layer", number, 0)) for number in layers})
    return moved(cache, placement, entries)


def moved(
    cache: KVCache, placement: Device, entries: Iterable[int], *, keep: bool = False
) -> KVCache:
    """``migrate`` of some of ``KVCache.layers``; with ``keep`` the cache given stays as it is."""
    held, marks, status = list(cache.layers), _columns(cache.written), cache.status
    moving: Any = None
    with beside(cache.length):
        for entry in entries:
            old = held[entry]
            policy = old.policy.elsewhere(placement)
            if policy.placement.memory_kind == old.policy.placement.memory_kind:
                held[entry] = replace(old, policy=policy)
                continue
            jax.block_until_ready(moving)
            if policy.has_tail == old.policy.has_tail:
                moving = _in_order(old, policy)
                keys, values = policy.placement.store((moving.keys, moving.values), moving.orders)
                moving = replace(moving, keys=keys, values=values)
                if not keep:
                    let_go(old, moving)
            else:
                # What is laid out anew is there before the old arrays go, and those go before it
                # moves: never more than two of them.
                anew, marks[entry], _, lost = _laid_out(old, cache.length, marks[entry], policy)
                if not keep:
                    let_go(old, anew)
                moving = anew.placed()
                del anew
                status |= jnp.where(lost, LOST, 0)
            held[entry] = moving
        return replace(cache, layers=tuple(held), written=jnp.stack(marks, axis=1), status=status)


def _columns(array: Array) -> list[Array]:
    """What iterating over the columns gives, also where other processes have some of it."""
    return [array[:, n] for n in range(array.shape[1])]


def _respread(cache: KVCache, spread: Spread | None) -> KVCache:
    """A cache on the devices of another mesh, or on the default one; the one given is used up."""
    if spread is not None:
        spread.check_rows(cache.batch)
    elif not cache.length.is_fully_addressable:
        raise ValueError(
            "the cache is on devices of several processes, and mesh=None is one device: give a mesh"
        )
    layers, marks, status = [], _columns(cache.written), cache.status
    for entry, old in enumerate(cache.layers):
        policy = replace(old.policy, placement=old.policy.placement.over(spread).fixed())
        anew = old
        if policy.stored != old.policy.stored:  # other numbers of slots can be divided there
            anew, marks[entry], _, lost = _laid_out(old, cache.length, marks[entry], policy)
            status |= jnp.where(lost, LOST, 0)
        # From device to device: between the hosts' memories of two meshes nothing is copied.
        near, far = Device(spread=spread).fixed(), policy.placement.behind_tail
        anew = _in_order(anew.near() if far else anew, replace(policy, placement=near))
        moving = _in_order(anew.placed(), policy)
        moving = jax.block_until_ready(moving.placed() if far else moving)
        _let_go_of_other(old, moving)
        layers.append(moving)
    put = layers[0].policy.placement.put
    length, written, status = put((cache.length, jnp.stack(marks, axis=1), status))
    return replace(cache, layers=tuple(layers), length=length, written=written, status=status)


def _let_go_of_other(old: LayerCache, new: LayerCache) -> None:
    """``let_go`` of what lies elsewhere: a move to where an array is already copies nothing."""

    def memory(arrays: list[Any]) -> set[int]:
        return {s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards}

    kept = memory(jax.tree.leaves(new))
    for array in jax.tree.leaves(old):
        if not memory([array]) & kept:
            array.delete()


def _in_order(old: LayerCache, policy: CachePolicy) -> LayerCache:
    """A layer under another policy that stores the same, perhaps in another order: then it is
    turned on the device."""
    new = replace(old, policy=policy)
    if new.orders == old.orders:
        return new
    near = old.near()
    keys, values = _reordered((near.keys, near.values), old.orders, new.orders)
    return replace(near, keys=keys, values=values, policy=policy)


@functools.partial(jax.jit, static_argnames=("before", "after"))
def _reordered(body: Any, before: Any, after: Any) -> Any:
    return kept(given(body, before), after)


def let_go(old: LayerCache, new: LayerCache) -> None:
    """Delete the arrays that are no longer needed; what still reads them does so to the end."""
    kept = {id(array) for array in jax.tree.leaves(new)}
    for array in jax.tree.leaves(old):
        if id(array) not in kept:
            array.delete()


# In one program: operation by operation each of them would be compiled, and keep what it makes.
_laid_out = jax.jit(converted, static_argnames="policy")
