"""What is done with whole rows: pure functions, for every layout."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.cache.status import NO_SUCH_ROW
from kvjax.core.checks import is_traced, whole_number
from kvjax.core.typing import Array
from kvjax.operations.growth import mark, padded_to
from kvjax.operations.rewinding import whole_numbers


def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    return _changed(cache, LayerCache.copied, jnp.copy)


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
    times = whole_number("times", times, 1)
    return _changed(
        cache, lambda layer: layer.repeated(times), lambda x: jnp.repeat(x, times, axis=0)
    )


def concatenate(caches: Sequence[KVCache]) -> KVCache:
    """The rows of several caches in one, which holds as much as the largest of them.

    Rows may be of different lengths.

    Args:
      caches: of one model, and of policies that differ in their capacity at most.

    Raises:
      ValueError: if there are none, they are of different models, their layers differ in more than
        capacity, or their keys were turned for different lengths of text (dynamic, longrope).
    """
    if isinstance(caches, KVCache) or not all(isinstance(cache, KVCache) for cache in caches):
        raise ValueError("concatenate takes a list of caches")
    caches = list(caches)
    if not caches:
        raise ValueError("no caches: the list is empty")
    first = caches[0]
    for cache in caches:
        if _model_of(cache) != _model_of(first):
            raise ValueError("the caches are of models that differ in their layers")
        if cache.spread != first.spread:
            raise ValueError(
                "the caches are on different devices: kvjax.migrate(cache, mesh=...) moves them"
            )
        if cache.turned_for != first.turned_for:
            raise ValueError(
                f"keys turned for texts of {first.turned_for} and of {cache.turned_for} tokens "
                "don't go together: give all caches one max_len"
            )
    layers, marks = [], []
    for entry in range(len(first.layers)):
        held = [cache.layers[entry] for cache in caches]
        try:
            layout = functools.reduce(lambda a, b: a.joined(b), (h.policy.layout for h in held))
        except ValueError:
            layout = held[0].policy.layout
        padded = [padded_to(layer, layout) for layer in held]
        if any(layer.policy != padded[0].policy for layer in padded):
            kinds = dict.fromkeys(str(layer.policy) for layer in held)
            raise ValueError(
                f"layer {entry} is of {' and '.join(kinds)}: convert the caches to one policy first"
            )
        layers.append(padded[0].joined(padded[1:]))
        each = zip(held, caches, strict=True)
        marks.append(jnp.concatenate([mark(h, layout, c.written[:, entry]) for h, c in each]))
    length = jnp.concatenate([cache.length for cache in caches])
    status = jnp.concatenate([cache.status for cache in caches])
    return with_rows(
        first, layers=tuple(layers), length=length, written=jnp.stack(marks, 1), status=status
    )


def reset(cache: KVCache, rows: Array | None = None) -> KVCache:
    """Empty rows, status and all, without touching the arrays.

    Args:
      cache: the cache.
      rows: bool[batch], which; by default all.

    Raises:
      ValueError: if ``rows`` is not one truth value a row.
    """
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
