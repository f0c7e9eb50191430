"""The capacity of a cache: grow it, and keep it within a memory budget."""

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
    """A cache with room for ``to`` tokens a row, and the same content.

    It is done outside ``jit``, one layer after the other, and the cache given is used up, so that
    never more than one layer is held twice; a ``fork`` of it survives. Layers that have room
    enough, and those that hold a window only, stay as they are.

    Args:
      cache: the cache; its arrays are deleted.
      to: tokens a row.

    Raises:
      ValueError: if ``to`` is fewer than it holds already, more than it may grow to or than the
        model has positions, or no layer has a capacity that could grow; inside ``jit``.
      CacheMemoryError: if the device or the host has no memory for it.
    """
    cache = validated("kvjax.grow", cache, outside=True)
    to = as_int("to", to, 1, INT32_MAX)
    layouts = [layer.policy.layout for layer in cache.layers]
    if all(layout.limit is None for layout in layouts):
        raise ValueError("a ring does not grow: it holds its window however long the text is")
    if cache.positions is not None and to > cache.positions:
        raise ValueError(f"grow to {to}: {cache.last_position}")
    check_growth(to, cache.max_len, None)
    # All of them first: none may raise when others have been deleted.
    wanted = enlarged_layouts(cache, to)
    layers, marks = [], []
    with (
        on_device_of(cache.length),
        as_memory_error(
            lambda: (
                f"there is no memory to grow the cache to {to:,} tokens a row; the layers that "
                "have grown have used the cache up"
            )
        ),
    ):
        for entry, (layer, layout) in enumerate(zip(cache.layers, wanted, strict=True)):
            larger = pad_layer(layer, layout)
            marks.append(grown_mark(layer, layout, cache.written[:, entry]))
            if larger is not layer:
                larger = jax.block_until_ready(larger.placed())
                if _first_shape(larger) != _first_shape(layer):
                    # A tail has not grown, and goes on as it is.
                    for array in jax.tree.leaves((layer.keys, layer.values)):
                        array.delete()
            layers.append(larger)
        larger = replace(cache, layers=tuple(layers), written=jnp.stack(marks, axis=1))
        return replace(larger, pools=enlarged_pools(cache, larger))


def _first_shape(layer: LayerCache) -> tuple[int, ...]:
    shape: tuple[int, ...] = jax.tree.leaves(layer.keys)[0].shape
    return shape


def grow_pools_for(cache: KVCache, rows: int) -> KVCache:
    """A cache with pools for so many rows, but for those that were given their pages."""
    policies = [layer.policy.with_pool(rows) for layer in cache.layers]
    if all(new == layer.policy for new, layer in zip(policies, cache.layers, strict=True)):
        return cache
    layers = [_more_pages(x, new) for x, new in zip(cache.layers, policies, strict=True)]
    larger = replace(cache, layers=tuple(layers))
    return replace(larger, pools=enlarged_pools(cache, larger))


def enlarged_pools(cache: KVCache, larger: KVCache) -> tuple[PageAllocator, ...]:
    """The pools of a cache whose layers have grown."""
    found = {}
    for old, new in zip(cache.layers, larger.layers, strict=True):
        before, after = old.policy.page_group, new.policy.page_group
        if before is not None and after is not None and after not in found:
            pool = cache.pools[cache.page_groups.index(before)]
            found[after] = pool.grown(after.layout.pool or 0, after.layout.columns)
    pools: tuple[PageAllocator, ...] = larger.layers[0].policy.placement.put(tuple(found.values()))
    return pools


def enlarged_layouts(cache: KVCache, to: int) -> list[Layout]:
    """The layouts of a cache grown to hold ``to`` tokens a row."""
    policies = [layer.policy for layer in cache.layers]
    return [
        each.layout
        if each.layout.limit is None or each.layout.limit >= to
        else replace(each, layout=each.layout.grown(to)).with_pool(cache.batch).layout
        for each in policies
    ]


def pad_layer(layer: LayerCache, layout: Layout) -> LayerCache:
    """A layer in a larger layout of its kind; one that has it already is given back as it is."""
    if layout == layer.policy.layout:
        return layer
    policy = replace(layer.policy, layout=layout)
    more = policy.stored_layout.slots - layer.policy.stored_layout.slots
    if policy.page_group is not None:
        return _more_pages(layer, policy)

    def pad(x: Array, order: Order) -> Array:
        wider = [(0, 0)] * x.ndim
        wider[order.axis] = (0, more * order.stride)
        if policy.placement.needs_tail and not is_traced(x) and policy.placement.spread is None:
            # Where it is: no more than one unit of it is on the device.
            shape = tuple(n + after for n, (_, after) in zip(x.shape, wider, strict=True))
            into = policy.placement.store(np.zeros(shape, x.dtype), order)
            return _carried_over(into, x, policy.placement, order)
        return policy.placement.far(jnp.pad(policy.placement.near(x), wider))

    keys, values = layer.keys, layer.values
    if more:
        keys, values = jax.tree.map(pad, (keys, values), layer.orders)
    return replace(layer, keys=keys, values=values, policy=policy)


def _more_pages(layer: LayerCache, policy: CachePolicy) -> LayerCache:
    """A layer with the pages of another policy's pool, the new ones behind those of each share."""
    page_group = policy.page_group
    if page_group is None:
        return layer
    placement, spread, pages = (
        policy.placement,
        policy.placement.spread,
        page_group.layout.pool or 0,
    )
    shares = 1 if spread is None else spread.rows

    def pad(x: Array) -> Array:
        near = placement.near(x).reshape(shares, -1, *x.shape[1:])
        wider = [(0, 0), (0, (pages - x.shape[0]) // shares), *[(0, 0)] * (x.ndim - 1)]
        return placement.far(jnp.pad(near, wider).reshape(pages, *x.shape[1:]))

    keys, values = layer.keys, layer.values
    if pages > jax.tree.leaves(keys)[0].shape[0]:
        keys, values = jax.tree.map(pad, (keys, values))
    return replace(layer, keys=keys, values=values, policy=policy)


@functools.partial(jax.jit, static_argnames=("placement", "order"), donate_argnums=0)
def _carried_over(into: Array, x: Array, placement: Device, order: Order) -> Array:
    def one(unit: Array, into: Array) -> Array:
        part = placement.far(placement.near(order.slice_units(x, unit, 1)))
        return lax.dynamic_update_slice_in_dim(into, part, unit * order.stride, axis=order.axis)

    return control_flow.fori_loop(0, x.shape[order.axis] // order.stride, one, into)


def grown_mark(layer: LayerCache, layout: Layout, written: PerRow) -> PerRow:
    """``written`` in a larger layout. Above the slots there were, it is a mark that hides what a
    conversion did not have (see ``Layout.hiding``), and hides the same in more slots."""
    slots, wider = layer.policy.mark_base, replace(layer.policy, layout=layout).mark_base
    return jnp.where(written > slots, written + wider - slots, written)


@dataclass(frozen=True)
class Move:
    """A layer that was moved: which of ``KVCache.layers``, the ``place`` where it is now, the
    ``bytes`` of its body, and the ``tokens`` a row that room was made for."""

    layer: int
    place: str
    bytes: int
    tokens: int


@layer_by_layer
def make_room(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """Grow a cache until rows hold so many tokens, where it can grow, and keep to its memory.

    A cache of ``policy("auto")`` first moves layers to the host, the last ones first, where the
    device would not hold them all; one comes back only where that leaves a quarter of the memory
    free, so that none goes to and fro. It is done outside ``jit``, and the cache given is used up.

    Args:
      cache: the cache.
      tokens: what each row is to hold.

    Returns:
      The cache, and what was moved.

    Raises:
      ValueError: as of ``grow``; if what stays on the device of layers on the host, the newest
        tokens, takes more than the memory.
    """
    cache = validated("kvjax.make_room", cache, outside=True)
    tokens = as_int("tokens", tokens, 1)
    grows = cache.grows_to is not None and tokens > cache.max_len
    moves = []
    if cache.budget is not None:
        out, away = _out(cache), _away(cache, tokens if grows else cache.max_len)
        cache, moves = _rearranged(cache, away - out, out - away, tokens)
    return (grow(cache, tokens) if grows else cache), moves


def settle_in_budget(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """A cache that keeps to its memory as it is, with those layers back on the device that there is
    room for even when rows hold so many tokens; and what was moved. The cache given is used up.

    Raises:
      ValueError: if the memory has no room for so many tokens though all layers are on the host.
    """
    if cache.budget is None:
        return cache, []
    out = _out(cache)
    leave = _away(cache, cache.max_len) - out
    back = frozenset() if leave else out - _away(cache, max(tokens, cache.max_len))
    return _rearranged(cache, leave, back, tokens)


def check_budget(cache: KVCache, tokens: int) -> None:
    """Raise ``ValueError`` if a cache's memory has no room for so many tokens a row."""
    if cache.budget is not None:
        _away(cache, max(tokens, cache.max_len))


def _out(cache: KVCache) -> frozenset[int]:
    """Layers that are on the host."""
    away = [layer.policy.placement.needs_tail for layer in cache.layers]
    return frozenset(n for n, on_host in enumerate(away) if on_host)


def _away(cache: KVCache, tokens: int) -> frozenset[int]:
    """Layers that are to be on the host when rows hold so many tokens."""
    assert cache.budget is not None
    sizes = [
        layer_sizes(
            replace(layer.policy, layout=layout), cache.budget.placement, cache.batch,
            layer.kv_heads, layer.head_dim,
        )
        for layer, layout in zip(cache.layers, enlarged_layouts(cache, tokens), strict=True)
    ]  # fmt: skip
    return cache.budget.offloaded(sizes, _out(cache))


def _rearranged(
    cache: KVCache, leave: frozenset[int], back: frozenset[int], tokens: int
) -> tuple[KVCache, list[Move]]:
    """Layers moved to the host, the last ones first, and others to the device."""
    assert cache.budget is not None
    moves: list[Move] = []
    steps = [(entry, cache.budget.placement) for entry in sorted(leave, reverse=True)]
    for entry, placement in [*steps, *((entry, Device()) for entry in sorted(back))]:
        cache = move_layers(cache, placement, [entry])
        size = tree_bytes((cache.layers[entry].keys, cache.layers[entry].values))
        moves.append(Move(entry, placement.place, size, tokens))
    return cache, moves
