"""Concatenate the rows of several caches."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.checks import validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.paging import fork_pages
from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, is_traced
from kvjax.layouts import UNLIMITED, Layout, as_paged, unpaged_layout
from kvjax.operations.capacity import grown_mark, pad_layer
from kvjax.operations.conversion import convert_entry, with_policies, without_pages
from kvjax.operations.rows import empty_unallocated
from kvjax.operations.stacks import stack, unstack
from kvjax.policies.cache_policy import CachePolicy


@automatic_axes
def concatenate(caches: Iterable[KVCache]) -> KVCache:
    """Concatenate the rows of several caches. The result has the largest of their capacities.

    Rows may have different lengths. Layouts may differ in capacity. Some may keep whole sequences,
    and others only the layer's window; the result then keeps only the window. Rows can't be rewound
    to tokens that the result does not keep. Layers are moved to the placement of the first cache.

    Args:
      caches: caches of one model whose policies have the same codecs and show queries the same
        range of tokens.

    Raises:
      ValueError: if the list is empty; if the caches belong to different models or are on different
        devices; if their layers have different codecs or show queries different ranges of tokens;
        if their keys were rotated for different lengths (dynamic, longrope); or if a ring has
        overwritten tokens that the layout of the result needs.

    Example:
      ```python
      caches = [kvjax.init_cache(lm.config, batch=n, max_len=64) for n in (1, 2)]
      print(kvjax.concatenate(caches).batch)  # 3
      ```
    """
    if isinstance(caches, KVCache) or not isinstance(caches, Iterable):
        raise ArgumentError(
            f"caches must be a list of caches, got a {type(caches).__name__}", param="caches"
        )
    caches = list(caches)
    if wrong := [cache for cache in caches if not isinstance(cache, KVCache)]:
        raise ArgumentError(
            f"caches must be a list of caches, got a list with a {type(wrong[0]).__name__}",
            param="caches",
        )
    caches = [validated("kvjax.concatenate", cache) for cache in caches]
    if not caches:
        raise ArgumentError("caches must not be empty", param="caches")
    if any(cache.stacks is not None for cache in caches):
        return stack(concatenate([unstack(cache) for cache in caches]))
    first = caches[0]
    for cache in caches:
        if cache.rotary_len != first.rotary_len:
            raise ValueError(
                f"keys rotated for lengths {first.rotary_len} and {cache.rotary_len} can't be "
                "concatenated: create all caches with the same max_len or rotary_len"
            )
        if _model_shape(cache) != _model_shape(first):
            raise ValueError("the caches are of different models: their layers differ")
        if cache.mesh_sharding != first.mesh_sharding or not _on_same_devices(cache, first):
            raise ValueError(
                "the caches are on different devices: use kvjax.migrate(cache, mesh=...), where "
                "mesh=None is the default device"
            )
    if any(cache.pools for cache in caches):
        return _concatenate_paged(caches)
    return _concatenate_unpaged(caches)


def _concatenate_unpaged(caches: Sequence[KVCache]) -> KVCache:
    """Concatenate caches without pages."""
    first = caches[0]
    entries = range(len(first.layers))
    policies = [_common_policy(n, [cache.layers[n] for cache in caches]) for n in entries]
    caches = [_with_layouts(cache, policies) for cache in caches]
    layers = [
        same[0].concatenate(same[1:]) for same in zip(*(c.layers for c in caches), strict=True)
    ]
    return with_rows(first, layers=tuple(layers), **_row_state(caches))


def _concatenate_paged(caches: Sequence[KVCache]) -> KVCache:
    """Concatenate caches if at least one has pages."""
    first, policies = caches[0], [[layer.policy for layer in cache.layers] for cache in caches]
    sharded = first.mesh_sharding is not None and first.mesh_sharding.rows > 1
    if sharded or any(other != policies[0] for other in policies):
        # Rows may move to a different device or policy, so they can't keep their pages.
        whole = _concatenate_unpaged([without_pages(cache) for cache in caches])
        paged_policies = [
            _with_pages([own[entry] for own in policies], layer.policy, whole.batch)
            for entry, layer in enumerate(whole.layers)
        ]
        return with_policies(whole, paged_policies)
    one_pool = all(_page_arrays(cache) == _page_arrays(first) for cache in caches)
    layers = []
    for same in zip(*(cache.layers for cache in caches), strict=True):
        policy = same[0].policy
        shared = one_pool and policy.page_group is not None
        parts = [replace(x, keys=None, values=None) if shared else x for x in same]
        layer = parts[0].concatenate(parts[1:])
        if shared:
            layer = replace(layer, keys=same[0].keys, values=same[0].values)
        elif policy.page_group is not None:
            layer = replace(layer, policy=_with_pages([x.policy for x in same], policy, 1))
        layers.append(layer)
    pools = [
        same[0].joined(same[1:], same=one_pool)
        for same in zip(*(cache.pools for cache in caches), strict=True)
    ]
    cache = with_rows(first, layers=tuple(layers), pools=tuple(pools), **_row_state(caches))
    # Two rows may now share a page that is not full. Only one of them may write to it.
    return empty_unallocated(*fork_pages(cache, jnp.arange(cache.batch, dtype=jnp.int32)))


def _page_arrays(cache: KVCache) -> list[int]:
    """Return the ids of the arrays with a cache's pages."""
    layers = [layer for layer in cache.layers if layer.policy.page_group is not None]
    return [id(x) for layer in layers for x in jax.tree.leaves((layer.keys, layer.values))]


def _with_pages(policies: Sequence[CachePolicy], joined: CachePolicy, rows: int) -> CachePolicy:
    """Return the policy ``joined`` with the page size of the first policy, and with a pool for the
    pages of all policies."""
    layouts = [as_paged(policy.layout) for policy in policies]
    first = layouts[0]
    if first is None:
        return joined
    inner = unpaged_layout(joined.layout)
    pool = sum(layout.pool or 0 for layout in layouts if layout is not None)
    pages = None if first.pages is None else max(pool, first.pages)
    whole = replace(first, inner=inner, pages=pages, pool=pool)
    return replace(joined, layout=whole).with_pool(rows)


def _row_state(caches: Sequence[KVCache]) -> dict[str, Array]:
    """Concatenate the lengths and the other per-row arrays."""
    names = "length", "written", "status"
    return {name: jnp.concatenate([getattr(cache, name) for cache in caches]) for name in names}


def _on_same_devices(cache: KVCache, other: KVCache) -> bool:
    """Return whether two caches are on the same devices; True if either is traced."""
    if is_traced(cache.length) or is_traced(other.length):
        return True
    return cache.length.devices() == other.length.devices()


def _common_policy(entry: int, layers: Sequence[LayerCache]) -> CachePolicy:
    """Return a policy that keeps all tokens that queries of these layers see.

    It is the first layer's policy with the largest capacity. If some layers keep no more than the
    window that queries see in all layers, it has the layout of these layers.

    Raises:
      ValueError: if no such policy exists.
    """
    first, layouts = layers[0].policy, [layer.policy.layout for layer in layers]
    try:
        layout = functools.reduce(lambda a, b: a.joined(b), layouts)
    except ValueError:
        layout = min(layouts, key=lambda x: (x.window is None, x.limit is not None, -x.slots))
        if len({_visible_range(layer) for layer in layers}) > 1:
            layout = None
    if layout is None or any(layer.policy.storage_key != first.storage_key for layer in layers):
        kinds = " and ".join(dict.fromkeys(str(layer.policy) for layer in layers))
        raise ValueError(
            f"layer {entry} has the policies {kinds}, which store or show different tokens: "
            "kvjax.convert the caches to one policy first"
        )
    return replace(first, layout=layout)


def _visible_range(layer: LayerCache) -> tuple[int, int]:
    """Return the window that a layer's queries see, and the number of sinks."""
    layout = layer.policy.layout
    return min(layout.window or UNLIMITED, layer.window or UNLIMITED), layout.sinks


def _with_layouts(cache: KVCache, policies: Sequence[CachePolicy]) -> KVCache:
    """Pad or convert the layers of a cache to policies of ``_common_policy``."""
    layers, marks, status = [], [], cache.status
    for entry, (old, policy) in enumerate(zip(cache.layers, policies, strict=True)):
        layout, written = policy.layout, cache.written[:, entry]
        same = replace(old.policy, layout=layout) == policy
        if same and _is_prefix_of(old.policy.layout, layout):
            layer, written = pad_layer(old, layout), grown_mark(old, layout, written)
        else:
            layer, written, lost = convert_entry(cache, entry, policy)
            status |= lost
        layers.append(layer)
        marks.append(written)
    return replace(cache, layers=tuple(layers), written=jnp.stack(marks, 1), status=status)


def _is_prefix_of(layout: Layout, larger: Layout) -> bool:
    """Return whether the slots of a layout are the first slots of a larger one."""
    try:
        return layout.joined(larger) == larger
    except ValueError:
        return False


def _model_shape(cache: KVCache) -> Any:
    """Return the properties that are equal in all caches of one model."""
    layers = [(layer.kv_heads, layer.head_dim, layer.window) for layer in cache.layers]
    return layers, cache.sources, cache.positions
