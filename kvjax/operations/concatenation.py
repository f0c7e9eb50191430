"""The rows of several caches in one."""

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
from kvjax.core.validation import is_traced
from kvjax.layouts import UNLIMITED, Layout, paged, unpaged_layout
from kvjax.operations.capacity import grown_mark, pad_layer
from kvjax.operations.conversion import convert_entry, with_policies, without_pages
from kvjax.operations.rows import empty_unallocated
from kvjax.operations.stacks import stack, unstack
from kvjax.policies.cache_policy import CachePolicy


@automatic_axes
def concatenate(caches: Iterable[KVCache]) -> KVCache:
    """The rows of several caches in one, which holds as much as the largest of them.

    Rows may be of different lengths. Policies may differ in what changes nothing: layers go to
    where those of the first cache are, growing ones with static ones, and with such as keep no more
    than the layer's own window shows (of what is no longer kept, no row can be rewound to).

    Args:
      caches: of one model, and of policies that store alike and show queries the same.

    Raises:
      ValueError: if there are none, they are of different models or on different devices, their
        layers store numbers in different ways or show different tokens, or their keys were turned
        for different lengths of text (dynamic, longrope); as ``convert``, if a ring has forgotten
        what another one's layout keeps.
    """
    if isinstance(caches, KVCache) or not isinstance(caches, Iterable):
        raise ValueError(f"concatenate takes a list of caches, not a {type(caches).__name__}")
    caches = list(caches)
    if wrong := [cache for cache in caches if not isinstance(cache, KVCache)]:
        raise ValueError(f"concatenate takes a list of caches, one is a {type(wrong[0]).__name__}")
    caches = [validated("kvjax.concatenate", cache) for cache in caches]
    if not caches:
        raise ValueError("no caches: the list is empty")
    if any(cache.stacks is not None for cache in caches):
        return stack(concatenate([unstack(cache) for cache in caches]))
    first = caches[0]
    for cache in caches:
        if cache.rotary_len != first.rotary_len:
            raise ValueError(
                f"keys turned for texts of {first.rotary_len} and of {cache.rotary_len} tokens "
                "don't go together: give all caches one max_len, or one rotary_len"
            )
        if _model_of(cache) != _model_of(first):
            raise ValueError("the caches are of models that differ in their layers")
        if cache.spread != first.spread or not _together(cache, first):
            raise ValueError(
                "the caches are on different devices: kvjax.migrate(cache, mesh=mesh) moves one to "
                "a mesh, and mesh=None to the default device"
            )
    return _in_pages(caches) if any(cache.pools for cache in caches) else _joined(caches)


def _joined(caches: Sequence[KVCache]) -> KVCache:
    """The rows of caches whose rows have slots of their own."""
    first = caches[0]
    wanted = [_common(n, [c.layers[n] for c in caches]) for n in range(len(first.layers))]
    alike = [_as_policies(cache, wanted) for cache in caches]
    layers = [
        held[0].concatenate(held[1:]) for held in zip(*(c.layers for c in alike), strict=True)
    ]
    return with_rows(first, layers=tuple(layers), **_rows_of(alike))


def _in_pages(caches: Sequence[KVCache]) -> KVCache:
    """The rows of caches of which some are in pages."""
    first, policies = caches[0], [[layer.policy for layer in c.layers] for c in caches]
    divided = first.spread is not None and first.spread.rows > 1
    if divided or any(each != policies[0] for each in policies):
        # Rows leave the pages of their device, or policy.
        whole = _joined([without_pages(cache) for cache in caches])
        wanted = [
            _repaged([of[entry] for of in policies], layer.policy, whole.batch)
            for entry, layer in enumerate(whole.layers)
        ]
        return with_policies(whole, wanted)
    same = all(_pages_of(cache) == _pages_of(first) for cache in caches)
    layers = []
    for held in zip(*(cache.layers for cache in caches), strict=True):
        policy, of_one = held[0].policy, same and held[0].policy.page_group is not None
        every = [replace(x, keys=None, values=None) if of_one else x for x in held]
        joined = every[0].joined(every[1:])
        if of_one:
            joined = replace(joined, keys=held[0].keys, values=held[0].values)
        elif policy.page_group is not None:
            joined = replace(joined, policy=_repaged([x.policy for x in held], policy, 1))
        layers.append(joined)
    pools = [of[0].joined(of[1:], same=same) for of in zip(*(c.pools for c in caches), strict=True)]
    cache = with_rows(first, layers=tuple(layers), pools=tuple(pools), **_rows_of(caches))
    # A page that is not full can stand in two rows of one pool.
    return empty_unallocated(*fork_pages(cache, jnp.arange(cache.batch, dtype=jnp.int32)))


def _pages_of(cache: KVCache) -> list[int]:
    """Which arrays a cache's pages are."""
    layers = [held for held in cache.layers if held.policy.page_group is not None]
    return [id(x) for held in layers for x in jax.tree.leaves((held.keys, held.values))]


def _repaged(policies: Sequence[CachePolicy], joined: CachePolicy, rows: int) -> CachePolicy:
    """Of policies of rows that are joined the first one's, with room for all that they had."""
    layouts = [paged(each.layout) for each in policies]
    first = layouts[0]
    if first is None:
        return joined
    inner = unpaged_layout(joined.layout)
    pool = sum(layout.pool or 0 for layout in layouts if layout is not None)
    pages = None if first.pages is None else max(pool, first.pages)
    whole = replace(first, inner=inner, pages=pages, pool=pool)
    return replace(joined, layout=whole).with_pool(rows)


def _rows_of(caches: Sequence[KVCache]) -> dict[str, Array]:
    """The cursors of all rows."""
    names = "length", "written", "status"
    return {name: jnp.concatenate([getattr(cache, name) for cache in caches]) for name in names}


def _together(cache: KVCache, other: KVCache) -> bool:
    """Whether two caches are on the same devices, as far as that can be seen."""
    if is_traced(cache.length) or is_traced(other.length):
        return True
    return cache.length.devices() == other.length.devices()


def _common(entry: int, layers: Sequence[LayerCache]) -> CachePolicy:
    """The policy under which layers of one model go on as they were: the first one's, as large as
    the largest; where some keep no more than all of them show, as those do.

    Raises:
      ValueError: if there is none.
    """
    first, layouts = layers[0].policy, [layer.policy.layout for layer in layers]
    try:
        layout = functools.reduce(lambda a, b: a.joined(b), layouts)
    except ValueError:
        order = lambda each: (each.window is None, each.limit is not None, -each.slots)  # noqa: E731
        layout = min(layouts, key=order)
        if len({_shown(layer) for layer in layers}) > 1:
            layout = None
    if layout is None or any(layer.policy.storage_key != first.storage_key for layer in layers):
        kinds = " and ".join(dict.fromkeys(str(layer.policy) for layer in layers))
        raise ValueError(
            f"layer {entry} is of {kinds}, whose rows do not go on alike: kvjax.convert the caches "
            "to one policy first"
        )
    return replace(first, layout=layout)


def _shown(layer: LayerCache) -> tuple[int, int]:
    """How far back a layer shows tokens to queries, and how many of the first it always does."""
    layout = layer.policy.layout
    return min(layout.window or UNLIMITED, layer.window or UNLIMITED), layout.sinks


def _as_policies(cache: KVCache, wanted: Sequence[CachePolicy]) -> KVCache:
    """A cache under policies that keep all that it shows."""
    layers, marks, status = [], [], cache.status
    for entry, (held, policy) in enumerate(zip(cache.layers, wanted, strict=True)):
        layout, written = policy.layout, cache.written[:, entry]
        if replace(held.policy, layout=layout) == policy and _fits(held.policy.layout, layout):
            layer, written = pad_layer(held, layout), grown_mark(held, layout, written)
        else:
            layer, written, lost = convert_entry(cache, entry, policy)
            status |= lost
        layers.append(layer)
        marks.append(written)
    return replace(cache, layers=tuple(layers), written=jnp.stack(marks, 1), status=status)


def _fits(layout: Layout, larger: Layout) -> bool:
    """Whether the slots of a layout are the first of a larger one."""
    try:
        return layout.joined(larger) == larger
    except ValueError:
        return False


def _model_of(cache: KVCache) -> Any:
    """What caches of one model have in common."""
    layers = [(layer.kv_heads, layer.head_dim, layer.window) for layer in cache.layers]
    return layers, cache.sources, cache.positions
