"""What is done with whole rows: pure functions, for every layout."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.cache.status import NO_SUCH_ROW
from kvjax.cache.usable import usable
from kvjax.core.checks import is_traced, whole_number
from kvjax.core.typing import Array
from kvjax.layouts import UNLIMITED, Layout
from kvjax.operations.conversion import laid_out_anew
from kvjax.operations.growth import mark, padded_to
from kvjax.operations.rewinding import whole_numbers
from kvjax.policies.cache_policy import CachePolicy


def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    return _changed(usable("kvjax.fork", cache, between=False), LayerCache.copied, jnp.copy)


def select(cache: KVCache, rows: Sequence[int] | Array) -> KVCache:
    """The cache of some rows, in the order asked for; one row may be asked for often.

    The reordering of a beam search (``reorder_cache``), and the way to drop rows that are done.

    Args:
      cache: the cache.
      rows: int[n], numbers of rows.

    Raises:
      ValueError: if ``rows`` is not a list of whole numbers, or names a row that is not there
        (where traced: the nearest row, and the status ``NO_SUCH_ROW``).
    """
    cache = usable("kvjax.select", cache, between=False)
    index = whole_numbers("rows must be a list of whole numbers", rows)
    if index.ndim != 1 or not index.size:
        raise ValueError(f"rows must be a list of whole numbers, got {rows!r:.80}")
    if not is_traced(index):
        wrong = [int(row) for row in np.asarray(index) if not 0 <= row < cache.batch]
        if wrong:
            raise ValueError(f"row {wrong[0]}: the cache has {cache.batch}, 0 the first")
    if cache.spread is not None:
        cache.spread.check_rows(index.shape[0])
    chosen = _changed(
        cache,
        lambda layer: layer.taken(index),
        lambda x: jnp.take(x, index, axis=0, mode="clip"),
    )
    missing = (index < 0) | (index >= cache.batch)
    return with_rows(chosen, status=chosen.status | jnp.where(missing, NO_SUCH_ROW, 0))


def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row ``times`` times, one behind the other: one prompt, several continuations.

    Raises:
      ValueError: if ``times`` is no whole number, at least 1.
    """
    cache = usable("kvjax.repeat", cache, between=False)
    times = whole_number("times", times, 1)
    return _changed(
        cache, lambda layer: layer.repeated(times), lambda x: jnp.repeat(x, times, axis=0)
    )


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
    caches = [usable("kvjax.concatenate", cache) for cache in caches]
    if not caches:
        raise ValueError("no caches: the list is empty")
    first = caches[0]
    for cache in caches:
        if _model_of(cache) != _model_of(first):
            raise ValueError("the caches are of models that differ in their layers")
        if cache.spread != first.spread or not _together(cache, first):
            raise ValueError(
                "the caches are on different devices: kvjax.migrate(cache, mesh=mesh) moves one to "
                "a mesh, and mesh=None to the default device"
            )
        if cache.turned_for != first.turned_for:
            raise ValueError(
                f"keys turned for texts of {first.turned_for} and of {cache.turned_for} tokens "
                "don't go together: give all caches one max_len"
            )
    wanted = [_common(n, [c.layers[n] for c in caches]) for n in range(len(first.layers))]
    alike = [_as_policies(cache, wanted) for cache in caches]
    layers = [held[0].joined(held[1:]) for held in zip(*(c.layers for c in alike), strict=True)]
    length, written, status = (
        jnp.concatenate([getattr(cache, name) for cache in alike])
        for name in ("length", "written", "status")
    )
    return with_rows(first, layers=tuple(layers), length=length, written=written, status=status)


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
    if layout is None or any(layer.policy.stores_as != first.stores_as for layer in layers):
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
            layer, written = padded_to(held, layout), mark(held, layout, written)
        else:
            layer, written, lost = laid_out_anew(cache, entry, policy)
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


def reset(cache: KVCache, rows: Array | None = None) -> KVCache:
    """Empty rows, status and all, without touching the arrays.

    Args:
      cache: the cache.
      rows: bool[batch], which; by default all.

    Raises:
      ValueError: if ``rows`` is not one truth value a row.
    """
    cache = usable("kvjax.reset", cache)
    keep = jnp.zeros(cache.batch, bool)
    if rows is not None:
        if np.shape(rows) != (cache.batch,) or jnp.asarray(rows).dtype != bool:
            raise ValueError(f"rows must be bool[batch={cache.batch}], got {rows!r:.80}")
        keep = ~jnp.asarray(rows)
    length, status = (jnp.where(keep, x, 0) for x in (cache.length, cache.status))
    written = jnp.where(keep[:, None], cache.written, 0)
    layers = tuple(
        layer if layer.low is None else replace(layer, low=jnp.where(keep, layer.low, 0))
        for layer in cache.layers
    )
    return with_rows(cache, layers=layers, length=length, written=written, status=status)


def _changed(
    cache: KVCache,
    layer: Callable[[LayerCache], LayerCache],
    rows: Callable[[Array], Array],
) -> KVCache:
    """The same of every layer, and of every array [batch, ...] of the cache's own."""
    layers = tuple(layer(held) for held in cache.layers)
    return with_rows(jax.tree.map(rows, replace(cache, layers=())), layers=layers)


def _model_of(cache: KVCache) -> Any:
    """What caches of one model have in common."""
    layers = [(layer.kv_heads, layer.head_dim, layer.window) for layer in cache.layers]
    return layers, cache.sources, cache.positions
