"""Move layers between device and host, or a whole cache to another mesh."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from kvjax.cache.checks import LOST, validated
from kvjax.cache.layer import LayerCache
from kvjax.cache.paging import pool_for
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import flag_where
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import commit_together, put_on_default_device
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, as_int
from kvjax.layouts import as_paged
from kvjax.operations.conversion import convert_layer, with_policies, without_pages
from kvjax.operations.stacks import layer_by_layer
from kvjax.paging.allocator import PageAllocator, PageGroup
from kvjax.placement.device import Device, check_placement, on_device_of
from kvjax.placement.mesh import MeshSharding, shard_over
from kvjax.placement.order import arrange, restore
from kvjax.policies.cache_policy import CachePolicy

KEEP: Any = object()
"""The default of ``mesh`` in ``migrate``, which means to stay on the current devices."""


@without_mesh_context
@layer_by_layer
def migrate(
    cache: KVCache,
    placement: Device | None = None,
    layers: Sequence[int] | None = None,
    *,
    mesh: Mesh | None = KEEP,
) -> KVCache:
    """Move a cache, or some of its layers, to another place, without changing any value.

    This runs outside ``jit``, layer by layer, and deletes the argument's arrays after copying them,
    so that at most one layer exists twice at any time. A ``fork`` of the argument survives. The
    transfer of the last layer may still be running when this returns. A raw layer has a tail only
    while it is on the host, so its arrays are converted when it moves. If a layer is moved and
    moved back, generation continues with bitwise the same results.

    Args:
      cache: the cache. The arrays of moved layers are deleted.
      placement: the new placement, ``Device()`` or ``Host()``. By default layers stay in their kind
        of memory.
      layers: the indices of the model's layers to move; by default all.
      mesh: a mesh from ``make_mesh`` to which the whole cache is moved, or None for the default
        device. By default the cache stays on its devices.

    Raises:
      ValueError: if a layer does not exist, ``placement`` is not a placement, the cache's arrays
        have been donated or deleted, the mesh does not divide the rows, or both ``layers`` and
        ``mesh`` are given; or inside ``jit``.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=256)
      cache = kvjax.migrate(cache, kvjax.Host(), layers=[2, 3])
      print(kvjax.nbytes(cache))
      ```
    """
    cache = validated("kvjax.migrate", cache, outside=True)
    if mesh is not KEEP:
        if layers is not None:
            raise ValueError(
                "give layers or mesh, not both: all layers of a cache are on the same devices"
            )
        mesh_sharding = None if mesh is None else shard_over(mesh, cache.common_heads)
        cache = (
            cache if mesh_sharding == cache.mesh_sharding else _move_to_mesh(cache, mesh_sharding)
        )
    if placement is None and mesh is not KEEP:
        return cache
    placement = check_placement(placement)
    entries = range(len(cache.layers))
    if layers is not None:
        if not isinstance(layers, Iterable):
            raise ArgumentError(
                f"layers must be a list of integers, got {layers!r:.80}", param="layers"
            )
        entries = sorted({cache.entry(as_int("layer", number, 0)) for number in layers})
    return move_layers(cache, placement, entries)


def move_layers(
    cache: KVCache, placement: Device, entries: Iterable[int], *, keep: bool = False
) -> KVCache:
    """Move some of ``KVCache.layers``. The arrays of moved layers are deleted, unless ``keep``."""
    layers, marks, status = list(cache.layers), _columns(cache.written), cache.status
    moving: Any = None
    with on_device_of(cache.length):
        entries = list(entries)
        policies = [
            layer.policy.with_placement(placement) if n in entries else layer.policy
            for n, layer in enumerate(layers)
        ]
        pools, lacking = _pools_for(cache, policies)
        status |= flag_where(lacking, LOST)
        for entry in entries:
            old, policy = layers[entry], policies[entry]
            table = None if policy.page_group is None else pools[policy.page_group].whole
            if policy.placement.place == old.policy.placement.place:
                layers[entry] = replace(old, policy=policy)
                continue
            jax.block_until_ready(moving)
            if policy.has_tail == old.policy.has_tail:
                moving = _reorder(old, policy)
                keys, values = policy.placement.store((moving.keys, moving.values), moving.orders)
                moving = replace(moving, keys=keys, values=values)
                if not keep:
                    delete_unshared(old, moving)
            else:
                # Delete the old arrays after the conversion and before the transfer, so that at
                # most two copies exist.
                tables = cache.table(entry, whole=True), table
                converted, marks[entry], _, lost = _convert_layer(
                    old, cache.length, marks[entry], policy, tables
                )
                if not keep:
                    delete_unshared(old, converted)
                moving = converted.placed()
                del converted
                status |= flag_where(lost, LOST)
            layers[entry] = moving
        result = replace(
            cache,
            layers=tuple(layers),
            written=jnp.stack(marks, axis=1),
            status=status,
            pools=tuple(pools.values()),
        )
        return commit_together(result)


def _pools_for(
    cache: KVCache, policies: Sequence[CachePolicy]
) -> tuple[dict[PageGroup, PageAllocator], Array]:
    """Return the pools for other policies on the same devices, and the rows that get no pages in
    them."""
    pools: dict[PageGroup, PageAllocator] = {}
    before, lacking = dict(zip(cache.page_groups, cache.pools, strict=True)), cache.status < 0
    for page_group in dict.fromkeys(policy.page_group for policy in policies):
        if page_group in before:
            pools[page_group] = before[page_group]
        elif page_group is not None:
            pool, lacking_here = pool_for(page_group, cache)
            pools[page_group] = cache.layers[0].policy.placement.put(pool)
            lacking |= lacking_here
    return pools, lacking


def _columns(array: Array) -> list[Array]:
    """Return the columns of an array. Iterating over the array would fail if other processes have a
    part of it."""
    return [array[:, n] for n in range(array.shape[1])]


def _move_to_mesh(cache: KVCache, mesh_sharding: MeshSharding | None) -> KVCache:
    """Move a cache to another mesh or to the default device. The argument's arrays are deleted."""
    if mesh_sharding is not None:
        mesh_sharding.check_rows(cache.batch)
    elif not cache.length.is_fully_addressable:
        raise ValueError(
            "mesh=None is a single device, but several processes hold the cache: give a mesh"
        )
    before, after = (1 if x is None else x.rows for x in (cache.mesh_sharding, mesh_sharding))
    if cache.pools and before != after:
        return _move_pages_to_mesh(cache, mesh_sharding)
    layers, marks, status = [], _columns(cache.written), cache.status
    for entry, old in enumerate(cache.layers):
        policy = replace(
            old.policy, placement=old.policy.placement.on_mesh(mesh_sharding).with_target()
        )
        layer = old
        if policy.stored_layout != old.policy.stored_layout:
            # A different mesh may need a different number of slots, to divide them evenly.
            tables = (cache.table(entry, whole=True),) * 2
            layer, marks[entry], _, lost = _convert_layer(
                old, cache.length, marks[entry], policy, tables
            )
            status |= flag_where(lost, LOST)
        # Move through device memory: JAX does not copy between the host memories of two meshes.
        near = Device(mesh_sharding=mesh_sharding).with_target()
        on_host = policy.placement.needs_tail
        layer = _reorder(layer.near() if on_host else layer, replace(policy, placement=near))
        moved = put_on_default_device(layer) if mesh_sharding is None else layer.placed()
        moved = _reorder(moved, policy)
        moved = jax.block_until_ready(moved.placed() if on_host else moved)
        _delete_unshared_buffers(old, moved)
        layers.append(moved)
    put = put_on_default_device if mesh_sharding is None else layers[0].policy.placement.put
    length, written, status, pools = put(
        (cache.length, jnp.stack(marks, axis=1), status, cache.pools)
    )
    return replace(
        cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
    )


def _move_pages_to_mesh(cache: KVCache, mesh_sharding: MeshSharding | None) -> KVCache:
    """Do the work of ``_move_to_mesh`` if a different number of devices divides the rows of a paged
    cache.

    Each device has its own pool, so the rows are moved without pages.
    """
    whole = _move_to_mesh(without_pages(cache), mesh_sharding)
    policies = []
    for old, new in zip(cache.layers, whole.layers, strict=True):
        layout, policy = old.policy.layout, new.policy
        if as_paged(layout):
            layout = replace(layout, inner=policy.layout, pool=None)
            policy = replace(policy, layout=layout).with_pool(cache.batch)
        policies.append(policy)
    result = with_policies(whole, policies)
    for old, new in zip(cache.layers, result.layers, strict=True):
        delete_unshared(old, new)
    return result


def _delete_unshared_buffers(old: LayerCache, new: LayerCache) -> None:
    """Do the same as ``delete_unshared``, but compare buffers instead of arrays, because a move may
    return arrays that share buffers."""

    def buffers(arrays: list[Array]) -> set[int]:
        return {s.data.unsafe_buffer_pointer() for x in arrays for s in x.addressable_shards}

    used = buffers(jax.tree.leaves(new))
    for array in jax.tree.leaves(old):
        if not buffers([array]) & used:
            array.delete()


def _reorder(old: LayerCache, policy: CachePolicy) -> LayerCache:
    """Give a layer another policy that stores the same numbers, and arrange them in the new
    policy's order.

    If the order differs, the numbers are rearranged on the device.
    """
    new = replace(old, policy=policy)
    if new.orders == old.orders:
        return new
    near = old.near()
    keys, values = _rearrange((near.keys, near.values), old.orders, new.orders)
    return replace(near, keys=keys, values=values, policy=policy)


@functools.partial(jax.jit, static_argnames=("before", "after"))
def _rearrange(body: PyTree, before: PyTree, after: PyTree) -> PyTree:
    return arrange(restore(body, before), after)


def delete_unshared(old: LayerCache, new: LayerCache) -> None:
    """Delete the arrays of ``old`` that ``new`` does not use. Running programs still finish."""
    used = {id(array) for array in jax.tree.leaves(new)}
    for array in jax.tree.leaves(old):
        if id(array) not in used:
            array.delete()


# Without jit, every operation would be compiled separately and keep its result.
_convert_layer = jax.jit(convert_layer, static_argnames="policy")
