"""A cache's layers in other places: parked on the host, taken up again, on another mesh."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from kvjax.cache.checks import LOST, validated
from kvjax.cache.layer import LayerCache
from kvjax.cache.paging import pool_for
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import flag_where
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import commit_together, put_on_default_device
from kvjax.core.typing import Array
from kvjax.core.validation import as_int
from kvjax.layouts import paged
from kvjax.operations.conversion import convert_layer, with_policies, without_pages
from kvjax.operations.stacks import layer_by_layer
from kvjax.paging.allocator import PageAllocator, PageGroup
from kvjax.placement.device import Device, check_placement, on_device_of
from kvjax.placement.mesh import MeshSharding, shard_over
from kvjax.placement.order import arrange, restore
from kvjax.policies.cache_policy import CachePolicy

KEEP: Any = object()
"""Of ``migrate``: the devices where the cache is."""


@without_mesh_context
@layer_by_layer
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
    cache = validated("kvjax.migrate", cache, outside=True)
    if mesh is not KEEP:
        if layers is not None:
            raise ValueError("all layers are on the same devices: give layers or mesh, not both")
        spread = None if mesh is None else shard_over(mesh, cache.common_heads)
        cache = cache if spread == cache.spread else _respread(cache, spread)
    if placement is None and mesh is not KEEP:
        return cache
    placement = check_placement(placement)
    entries = range(len(cache.layers))
    if layers is not None:
        if not isinstance(layers, Iterable):
            raise ValueError(f"layers must be a list of numbers, got {layers!r:.80}")
        entries = sorted({cache.entry(as_int("layer", number, 0)) for number in layers})
    return move_layers(cache, placement, entries)


def move_layers(
    cache: KVCache, placement: Device, entries: Iterable[int], *, keep: bool = False
) -> KVCache:
    """``migrate`` of some of ``KVCache.layers``; with ``keep`` the cache given stays as it is."""
    held, marks, status = list(cache.layers), _columns(cache.written), cache.status
    moving: Any = None
    with on_device_of(cache.length):
        entries = list(entries)
        policies = [
            x.policy.with_placement(placement) if n in entries else x.policy
            for n, x in enumerate(held)
        ]
        pools, lacking = _pools_under(cache, policies)
        status |= flag_where(lacking, LOST)
        for entry in entries:
            old, policy = held[entry], policies[entry]
            table = None if policy.page_group is None else pools[policy.page_group].whole
            if policy.placement.place == old.policy.placement.place:
                held[entry] = replace(old, policy=policy)
                continue
            jax.block_until_ready(moving)
            if policy.has_tail == old.policy.has_tail:
                moving = _in_order(old, policy)
                keys, values = policy.placement.store((moving.keys, moving.values), moving.orders)
                moving = replace(moving, keys=keys, values=values)
                if not keep:
                    delete_unshared(old, moving)
            else:
                # What is laid out anew is there before the old arrays go, and those go before it
                # moves: never more than two of them.
                tables = cache.table(entry, whole=True), table
                anew, marks[entry], _, lost = _laid_out(
                    old, cache.length, marks[entry], policy, tables
                )
                if not keep:
                    delete_unshared(old, anew)
                moving = anew.placed()
                del anew
                status |= flag_where(lost, LOST)
            held[entry] = moving
        there = replace(
            cache, layers=tuple(held), written=jnp.stack(marks, axis=1), status=status,
            pools=tuple(pools.values()),
        )  # fmt: skip
        return commit_together(there)


def _pools_under(
    cache: KVCache, policies: Sequence[CachePolicy]
) -> tuple[dict[PageGroup, PageAllocator], Array]:
    """The pools of a cache's kinds of layers under other policies of the same devices, and the rows
    that find no pages in those that are new."""
    pools: dict[PageGroup, PageAllocator] = {}
    before, lacking = dict(zip(cache.page_groups, cache.pools, strict=True)), cache.status < 0
    for page_group in dict.fromkeys(each.page_group for each in policies):
        if page_group in before:
            pools[page_group] = before[page_group]
        elif page_group is not None:
            pool, without = pool_for(page_group, cache)
            pools[page_group] = cache.layers[0].policy.placement.put(pool)
            lacking |= without
    return pools, lacking


def _columns(array: Array) -> list[Array]:
    """What iterating over the columns gives, also where other processes have some of it."""
    return [array[:, n] for n in range(array.shape[1])]


def _respread(cache: KVCache, spread: MeshSharding | None) -> KVCache:
    """A cache on the devices of another mesh, or on the default one; the one given is used up."""
    if spread is not None:
        spread.check_rows(cache.batch)
    elif not cache.length.is_fully_addressable:
        raise ValueError(
            "the cache is on devices of several processes, and mesh=None is one device: give a mesh"
        )
    shares = [1 if x is None else x.rows for x in (cache.spread, spread)]
    if cache.pools and shares[0] != shares[1]:
        return _repaged(cache, spread)
    layers, marks, status = [], _columns(cache.written), cache.status
    for entry, old in enumerate(cache.layers):
        policy = replace(old.policy, placement=old.policy.placement.on_mesh(spread).with_target())
        anew = old
        if (
            policy.stored_layout != old.policy.stored_layout
        ):  # other numbers of slots can be divided there
            tables = (cache.table(entry, whole=True),) * 2
            anew, marks[entry], _, lost = _laid_out(old, cache.length, marks[entry], policy, tables)
            status |= flag_where(lost, LOST)
        # From device to device: between the hosts' memories of two meshes nothing is copied.
        near, far = Device(spread=spread).with_target(), policy.placement.needs_tail
        anew = _in_order(anew.near() if far else anew, replace(policy, placement=near))
        there = put_on_default_device(anew) if spread is None else anew.placed()
        moving = _in_order(there, policy)
        moving = jax.block_until_ready(moving.placed() if far else moving)
        _let_go_of_other(old, moving)
        layers.append(moving)
    put = put_on_default_device if spread is None else layers[0].policy.placement.put
    length, written, status, pools = put(
        (cache.length, jnp.stack(marks, axis=1), status, cache.pools)
    )
    return replace(
        cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
    )


def _repaged(cache: KVCache, spread: MeshSharding | None) -> KVCache:
    """``_respread`` to where another number of devices divide the rows, who have pages of their
    own: by way of rows without pages."""
    whole = _respread(without_pages(cache), spread)
    policies = []
    for old, new in zip(cache.layers, whole.layers, strict=True):
        layout, policy = old.policy.layout, new.policy
        if paged(layout):
            layout = replace(layout, inner=policy.layout, pool=None)
            policy = replace(policy, layout=layout).with_pool(cache.batch)
        policies.append(policy)
    found = with_policies(whole, policies)
    for old, new in zip(cache.layers, found.layers, strict=True):
        delete_unshared(old, new)
    return found


def _let_go_of_other(old: LayerCache, new: LayerCache) -> None:
    """Like ``delete_unshared``, but compares buffers: a move may return arrays that share them."""

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
    return arrange(restore(body, before), after)


def delete_unshared(old: LayerCache, new: LayerCache) -> None:
    """Delete the arrays that are no longer needed; what still reads them does so to the end."""
    kept = {id(array) for array in jax.tree.leaves(new)}
    for array in jax.tree.leaves(old):
        if id(array) not in kept:
            array.delete()


# In one program: operation by operation each of them would be compiled, and keep what it makes.
_laid_out = jax.jit(convert_layer, static_argnames="policy")
