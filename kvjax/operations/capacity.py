"""Grow a cache, and keep it within a memory budget."""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.checks import validated
from kvjax.cache.creation import as_memory_error
from kvjax.cache.sizes import layer_sizes
from kvjax.cache.state import KVCache, LayerCache
from kvjax.core import control_flow
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.pytree import tree_bytes
from kvjax.core.typing import Array, PerRow
from kvjax.core.validation import INT32_MAX, as_int, is_traced
from kvjax.layouts import Layout
from kvjax.layouts.layout import check_growth
from kvjax.operations.migration import move_layers
from kvjax.operations.stacks import layer_by_layer
from kvjax.paging.allocator import PageAllocator
from kvjax.placement.device import Device, on_device_of
from kvjax.placement.order import Order
from kvjax.policies.cache_policy import CachePolicy


@allow_host_to_device
@layer_by_layer
def grow(cache: KVCache, to: int) -> KVCache:
    """Grow a cache to a capacity of ``to`` tokens per row.

    This runs outside ``jit``, layer by layer, and deletes the argument's arrays after copying them,
    so that at most one layer exists twice at any time. A ``fork`` of the argument survives. Layers
    that are large enough, and layers that keep only a window, are not changed.

    Args:
      cache: the cache. Its arrays are deleted.
      to: the new capacity in tokens per row.

    Raises:
      ValueError: if ``to`` is less than the current capacity, or more than the layout's limit or
        the model's positions; if no layer can grow; or inside ``jit``.
      CacheMemoryError: if the device or the host has too little memory.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, "dynamic")
      cache = kvjax.grow(cache, 512)
      ```
    """
    cache = validated("kvjax.grow", cache, outside=True)
    to = as_int("to", to, 1, INT32_MAX)
    layouts = [layer.policy.layout for layer in cache.layers]
    if all(layout.limit is None for layout in layouts):
        raise ValueError("a ring can't grow: its capacity is its window")
    if cache.positions is not None and to > cache.positions:
        raise ValueError(f"can't grow to {to}: {cache.last_position}")
    check_growth(to, cache.max_len, None)
    # Check all layers before any array is deleted.
    layouts_after = enlarged_layouts(cache, to)
    layers, marks = [], []
    with (
        on_device_of(cache.length),
        as_memory_error(
            lambda: (
                f"not enough memory to grow the cache to {to:,} tokens per row; layers that have "
                "grown are used up"
            )
        ),
    ):
        for entry, (layer, layout) in enumerate(zip(cache.layers, layouts_after, strict=True)):
            larger = pad_layer(layer, layout)
            marks.append(grown_mark(layer, layout, cache.written[:, entry]))
            if larger is not layer:
                larger = jax.block_until_ready(larger.placed())
                if _first_shape(larger) != _first_shape(layer):
                    # Only the body grows. The new layer uses the same tail.
                    for array in jax.tree.leaves((layer.keys, layer.values)):
                        array.delete()
            layers.append(larger)
        larger = replace(cache, layers=tuple(layers), written=jnp.stack(marks, axis=1))
        return replace(larger, pools=enlarged_pools(cache, larger))


def _first_shape(layer: LayerCache) -> tuple[int, ...]:
    shape: tuple[int, ...] = jax.tree.leaves(layer.keys)[0].shape
    return shape


def grow_pools_for(cache: KVCache, rows: int) -> KVCache:
    """Grow the pools of a cache for ``rows`` rows, except pools of a fixed number of pages."""
    policies = [layer.policy.with_pool(rows) for layer in cache.layers]
    if all(new == layer.policy for new, layer in zip(policies, cache.layers, strict=True)):
        return cache
    layers = [_pad_pages(x, new) for x, new in zip(cache.layers, policies, strict=True)]
    larger = replace(cache, layers=tuple(layers))
    return replace(larger, pools=enlarged_pools(cache, larger))


def enlarged_pools(cache: KVCache, larger: KVCache) -> tuple[PageAllocator, ...]:
    """Return the pools for a cache whose layers have grown."""
    pools_after = {}
    for old, new in zip(cache.layers, larger.layers, strict=True):
        before, after = old.policy.page_group, new.policy.page_group
        if before is not None and after is not None and after not in pools_after:
            pool = cache.pools[cache.page_groups.index(before)]
            pools_after[after] = pool.grown(after.layout.pool or 0, after.layout.columns)
    pools: tuple[PageAllocator, ...] = larger.layers[0].policy.placement.put(
        tuple(pools_after.values())
    )
    return pools


def enlarged_layouts(cache: KVCache, to: int) -> list[Layout]:
    """Return the layouts of a cache after growing to ``to`` tokens per row."""
    policies = [layer.policy for layer in cache.layers]
    return [
        policy.layout
        if policy.layout.limit is None or policy.layout.limit >= to
        else replace(policy, layout=policy.layout.grown(to)).with_pool(cache.batch).layout
        for policy in policies
    ]


def pad_layer(layer: LayerCache, layout: Layout) -> LayerCache:
    """Pad a layer to a larger layout of the same type, or return it if the layout is the same."""
    if layout == layer.policy.layout:
        return layer
    policy = replace(layer.policy, layout=layout)
    more = policy.stored_layout.slots - layer.policy.stored_layout.slots
    if policy.page_group is not None:
        return _pad_pages(layer, policy)

    def pad(x: Array, order: Order) -> Array:
        wider = [(0, 0)] * x.ndim
        wider[order.axis] = (0, more * order.stride)
        if (
            policy.placement.needs_tail
            and not is_traced(x)
            and policy.placement.mesh_sharding is None
        ):
            # Copy within the host's memory, with only one unit at a time on the device.
            shape = tuple(n + after for n, (_, after) in zip(x.shape, wider, strict=True))
            into = policy.placement.store(np.zeros(shape, x.dtype), order)
            return _copy_into(into, x, policy.placement, order)
        return policy.placement.far(jnp.pad(policy.placement.near(x), wider))

    keys, values = layer.keys, layer.values
    if more:
        keys, values = jax.tree.map(pad, (keys, values), layer.orders)
    return replace(layer, keys=keys, values=values, policy=policy)


def _pad_pages(layer: LayerCache, policy: CachePolicy) -> LayerCache:
    """Enlarge a layer in pages to the pool of another policy. On a mesh, each device's part is
    enlarged."""
    page_group = policy.page_group
    if page_group is None:
        return layer
    placement, pages = policy.placement, page_group.layout.pool or 0
    mesh_sharding = placement.mesh_sharding
    shares = 1 if mesh_sharding is None else mesh_sharding.rows

    def pad(x: Array) -> Array:
        near = placement.near(x).reshape(shares, -1, *x.shape[1:])
        wider = [(0, 0), (0, (pages - x.shape[0]) // shares), *[(0, 0)] * (x.ndim - 1)]
        return placement.far(jnp.pad(near, wider).reshape(pages, *x.shape[1:]))

    keys, values = layer.keys, layer.values
    if pages > jax.tree.leaves(keys)[0].shape[0]:
        keys, values = jax.tree.map(pad, (keys, values))
    return replace(layer, keys=keys, values=values, policy=policy)


@functools.partial(jax.jit, static_argnames=("placement", "order"), donate_argnums=0)
def _copy_into(into: Array, x: Array, placement: Device, order: Order) -> Array:
    def one(unit: Array, into: Array) -> Array:
        part = placement.far(placement.near(order.slice_units(x, unit, 1)))
        return lax.dynamic_update_slice_in_dim(into, part, unit * order.stride, axis=order.axis)

    return control_flow.fori_loop(0, x.shape[order.axis] // order.stride, one, into)


def grown_mark(layer: LayerCache, layout: Layout, written: PerRow) -> PerRow:
    """Return ``written`` for a larger layout.

    A value above the number of slots hides tokens that a conversion could not supply (see
    ``Layout.hiding``). Such a value is increased so that it hides the same tokens in the larger
    layout.
    """
    slots, wider = layer.policy.mark_base, replace(layer.policy, layout=layout).mark_base
    return jnp.where(written > slots, written + wider - slots, written)


@dataclass(frozen=True)
class Move:
    """A layer that ``make_room`` has moved.

    Attributes:
      layer: index in ``KVCache.layers``.
      place: the new place of the layer, ``"device"`` or ``"host"``.
      bytes: the size of its body in bytes.
      tokens: the number of tokens per row for which ``make_room`` was called.
    """

    layer: int
    place: str
    bytes: int
    tokens: int


@layer_by_layer
def make_room(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """Grow a cache, if it can grow, until ``tokens`` tokens per row fit, within its memory budget.

    With ``policy("auto")``, this first moves layers to the host, last layers first, until the
    others fit on the device. A layer moves back only if a quarter of the budget stays free, so that
    no layer moves back and forth. Call this outside ``jit``. The cache that it receives is deleted.

    Args:
      cache: the cache.
      tokens: the number of tokens per row that must fit.

    Returns:
      The cache, and the moves.

    Raises:
      ValueError: for the same reasons as ``grow``, or if the newest tokens of layers on the host,
        which stay on the device, exceed the budget.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy("auto", memory=2**24))
      cache, moves = kvjax.make_room(cache, 512)
      ```
    """
    cache = validated("kvjax.make_room", cache, outside=True)
    tokens = as_int("tokens", tokens, 1)
    grows = cache.grows_to is not None and tokens > cache.max_len
    moves = []
    if cache.budget is not None:
        before = _host_layers(cache)
        after = _layers_for_host(cache, tokens if grows else cache.max_len)
        cache, moves = _apply_moves(cache, after - before, before - after, tokens)
    return (grow(cache, tokens) if grows else cache), moves


def settle_in_budget(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """Keep a cache within its budget without growing it. Returns the cache and the moves.

    Layers move back to the device if they still fit there when rows have ``tokens`` tokens. The
    argument's arrays are deleted.

    Raises:
      ValueError: if ``tokens`` tokens per row exceed the budget even with all layers on the host.
    """
    if cache.budget is None:
        return cache, []
    on_host = _host_layers(cache)
    to_host = _layers_for_host(cache, cache.max_len) - on_host
    to_device: frozenset[int] = frozenset()
    if not to_host:
        to_device = on_host - _layers_for_host(cache, max(tokens, cache.max_len))
    return _apply_moves(cache, to_host, to_device, tokens)


def check_budget(cache: KVCache, tokens: int) -> None:
    """Raise ``ValueError`` if ``tokens`` tokens per row exceed the cache's budget."""
    if cache.budget is not None:
        _layers_for_host(cache, max(tokens, cache.max_len))


def _host_layers(cache: KVCache) -> frozenset[int]:
    """Return the indices of the layers on the host."""
    away = [layer.policy.placement.needs_tail for layer in cache.layers]
    return frozenset(n for n, on_host in enumerate(away) if on_host)


def _layers_for_host(cache: KVCache, tokens: int) -> frozenset[int]:
    """Return the indices of the layers that must be on the host when rows have ``tokens``
    tokens."""
    assert cache.budget is not None
    sizes = [
        layer_sizes(
            replace(layer.policy, layout=layout),
            cache.budget.placement,
            cache.batch,
            layer.kv_heads,
            layer.head_dim,
        )
        for layer, layout in zip(cache.layers, enlarged_layouts(cache, tokens), strict=True)
    ]
    return cache.budget.offloaded(sizes, _host_layers(cache))


def _apply_moves(
    cache: KVCache, to_host: frozenset[int], to_device: frozenset[int], tokens: int
) -> tuple[KVCache, list[Move]]:
    """Move layers to the host, last layers first, then others to the device."""
    assert cache.budget is not None
    moves: list[Move] = []
    moves_to_host = [(entry, cache.budget.placement) for entry in sorted(to_host, reverse=True)]
    moves_to_device = [(entry, Device()) for entry in sorted(to_device)]
    for entry, placement in [*moves_to_host, *moves_to_device]:
        cache = move_layers(cache, placement, [entry])
        size = tree_bytes((cache.layers[entry].keys, cache.layers[entry].values))
        moves.append(Move(entry, placement.place, size, tokens))
    return cache, moves
