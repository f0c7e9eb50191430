"""What is done with a cache beside filling it: pure functions, for every layout.

All but ``grow`` can stand inside ``jit``, where the shapes allow.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.state import KVCache, LayerCache, with_rows
from kvjax.cache.status import NO_SUCH_ROW, REWOUND_TOO_FAR
from kvjax.core.checks import is_traced, refuse_traced, whole_number
from kvjax.core.typing import Array, Counts, Rows
from kvjax.layouts import UNLIMITED, Layout
from kvjax.placement.device import Device, beside


def rewindable(cache: KVCache) -> Rows:
    """int32[batch]: how many of its newest tokens each row can forget, and go on exactly.

    A ring has overwritten what lies further back than its slack.
    """
    each = [
        _rewindable(layer, cache.length, cache.written[:, place])
        for place, layer in enumerate(cache.layers)
    ]
    return jnp.min(jnp.stack(each), axis=0)


def rewind(cache: KVCache, tokens: int | Counts) -> KVCache:
    """Forget the newest tokens.

    Args:
      cache: the cache.
      tokens: how many, for all rows, or int32[batch], one number a row.

    Returns:
      The cache. A row that can't forget so many (see ``rewindable``) is left as it is and gets
      the status ``REWOUND_TOO_FAR``.

    Raises:
      ValueError: if ``tokens`` is negative (where traced: the status) or no whole number, or has
        not one number a row.
    """
    back = _whole_numbers("rewind takes a whole number, or one a row", tokens)
    if back.shape not in ((), (cache.batch,)):
        raise ValueError(
            f"rewind takes a whole number, or int32[batch={cache.batch}], got {list(back.shape)}"
        )
    if not is_traced(back) and np.any(np.asarray(back) < 0):
        raise ValueError(f"rewind takes tokens away: {np.min(back)} is negative")
    # A number that int32 can't hold is too many in any case.
    back = jnp.asarray(back.clip(-1, UNLIMITED), jnp.int32)
    back = jnp.broadcast_to(back, cache.length.shape)
    wrong = (back > rewindable(cache)) | (back < 0)
    length = jnp.where(wrong, cache.length, cache.length - back)
    status = cache.status | jnp.where(wrong, REWOUND_TOO_FAR, 0)
    return with_rows(cache, length=length, status=status)


def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    return _each_array(jnp.copy, cache)


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
    index = _whole_numbers("rows must be a list of whole numbers", rows)
    if index.ndim != 1 or not index.size:
        raise ValueError(f"rows must be a list of whole numbers, got {rows!r:.80}")
    if not is_traced(index):
        wrong = [int(row) for row in np.asarray(index) if not 0 <= row < cache.batch]
        if wrong:
            raise ValueError(f"row {wrong[0]}: the cache has {cache.batch}, 0 the first")
    _check_rows(cache, index.shape[0])
    chosen = _each_array(lambda x: jnp.take(x, index, axis=0, mode="clip"), cache)
    missing = (index < 0) | (index >= cache.batch)
    return with_rows(chosen, status=chosen.status | jnp.where(missing, NO_SUCH_ROW, 0))


def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row ``times`` times, one behind the other: one prompt, several continuations.

    Raises:
      ValueError: if ``times`` is no whole number, at least 1.
    """
    times = whole_number("times", times, 1)
    return _each_array(lambda x: jnp.repeat(x, times, axis=0), cache)


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
    for place in range(len(first.layers)):
        held = [cache.layers[place] for cache in caches]
        try:
            layout = functools.reduce(lambda a, b: a.joined(b), (h.policy.layout for h in held))
        except ValueError:
            layout = held[0].policy.layout
        padded = [_padded(layer, layout) for layer in held]
        if any(layer.policy != padded[0].policy for layer in padded):
            kinds = dict.fromkeys(str(layer.policy) for layer in held)
            raise ValueError(
                f"layer {place} is of {' and '.join(kinds)}: convert the caches to one policy first"
            )
        layers.append(_away(jax.tree.map(_joined, *(layer.near() for layer in padded))))
        each = zip(held, caches, strict=True)
        marks.append(_joined(*(_mark(h, layout, c.written[:, place]) for h, c in each)))
    length, status = (_joined(*(getattr(c, name) for c in caches)) for name in ("length", "status"))
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
    """
    refuse_traced("kvjax.grow", cache.length)
    to = whole_number("to", to, 1)
    layouts = [layer.policy.layout for layer in cache.layers]
    if all(layout.limit is None for layout in layouts):
        raise ValueError("a ring does not grow: it holds its window however long the text is")
    if cache.positions is not None and to > cache.positions:
        raise ValueError(f"grow to {to}: the model has only {cache.positions} positions")
    if to < cache.max_len:
        raise ValueError(f"the cache holds {cache.max_len} tokens a row: {to} would be fewer")
    # All of them first: none may raise when others have been deleted.
    wanted = enlarged(cache, to)
    with beside(cache.length):
        return _grown(cache, wanted)


def _grown(cache: KVCache, wanted: list[Layout]) -> KVCache:
    layers, marks = [], []
    for place, (layer, layout) in enumerate(zip(cache.layers, wanted, strict=True)):
        larger = _padded(layer, layout)
        marks.append(_mark(layer, layout, cache.written[:, place]))
        if larger is not layer:
            larger = jax.block_until_ready(larger.placed())
            if larger.policy.stored.slots != layer.policy.stored.slots:
                # A tail has not grown, and goes on as it is.
                for array in jax.tree.leaves((layer.keys, layer.values)):
                    array.delete()
        layers.append(larger)
    return replace(cache, layers=tuple(layers), written=jnp.stack(marks, axis=1))


def enlarged(cache: KVCache, to: int) -> list[Layout]:
    """The layouts of a cache grown to hold ``to`` tokens a row."""
    layouts: list[Layout] = [layer.policy.layout for layer in cache.layers]
    return [
        layout if layout.limit is None or layout.limit >= to else layout.grown(to)
        for layout in layouts
    ]


def _each_array(change: Callable[[Array], Array], cache: KVCache) -> KVCache:
    """The same for every array; a body that is kept elsewhere comes near for it, a layer at a
    time."""
    layers = tuple(_away(jax.tree.map(change, layer.near())) for layer in cache.layers)
    rest = jax.tree.map(change, replace(cache, layers=()))
    return with_rows(rest, layers=layers)


def _check_rows(cache: KVCache, rows: int) -> None:
    if cache.spread is not None:
        cache.spread.check_rows(rows)


def _away(layer: LayerCache) -> LayerCache:
    place = layer.policy.placement
    if place.spread is not None:
        return layer.placed()
    return replace(layer, keys=place.far(layer.keys), values=place.far(layer.values))


def _model_of(cache: KVCache) -> Any:
    """What caches of one model have in common."""
    layers = [(layer.kv_heads, layer.head_dim, layer.window) for layer in cache.layers]
    return layers, cache.sources, cache.positions


def _whole_numbers(wanted: str, x: Any) -> Any:
    """An integer array, traced or not, or a ``ValueError`` that says what was wanted."""
    if not is_traced(x):
        try:
            x = np.asarray(x)
        except ValueError:
            raise ValueError(f"{wanted}, got {x!r:.80}") from None
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{wanted}, got {x!r:.80}")
    if is_traced(x):
        return x if x.dtype.itemsize > 4 else x.astype(jnp.int32)
    return x.astype(np.int64)


def _rewindable(layer: LayerCache, length: Rows, written: Rows) -> Rows:
    tokens = layer.policy.rewindable(length, written)
    if layer.low is None:
        return tokens
    window = layer.policy.layout.window or 0  # a dense layer lacks nothing
    back = length - (layer.low + window - 1)
    return jnp.where(layer.low > 0, jnp.clip(back, 0, tokens), tokens)


def _padded(layer: LayerCache, layout: Layout) -> LayerCache:
    """A layer in a larger layout of its kind; one that has it already is given back as it is."""
    if layout == layer.policy.layout:
        return layer
    policy = replace(layer.policy, layout=layout)
    more = policy.stored.slots - layer.policy.stored.slots

    def pad(x: Array) -> Array:
        if policy.placement.behind_tail and not is_traced(x) and policy.placement.spread is None:
            return _enlarged(x, more, policy.placement)
        wider = [(0, 0), (0, 0), (0, more), *[(0, 0)] * (x.ndim - 3)]
        return policy.placement.far(jnp.pad(policy.placement.near(x), wider))

    return replace(
        layer,
        keys=jax.tree.map(pad, layer.keys) if more else layer.keys,
        values=jax.tree.map(pad, layer.values) if more else layer.values,
        policy=policy,
    )


def _enlarged(x: Array, more: int, place: Device) -> Array:
    """An array with more of axis 2, where it is: no more than one unit of that is on the device."""
    shape = (*x.shape[:2], x.shape[2] + more, *x.shape[3:])
    return _carried_over(place.store(np.zeros(shape, x.dtype)), x, place)


@functools.partial(jax.jit, static_argnames="place", donate_argnums=0)
def _carried_over(into: Array, x: Array, place: Device) -> Array:
    def one(unit: Array, into: Array) -> Array:
        part = place.near(lax.dynamic_slice_in_dim(x, unit, 1, axis=2))
        return lax.dynamic_update_slice_in_dim(into, place.far(part), unit, axis=2)

    return lax.fori_loop(0, x.shape[2], one, into)


def _mark(layer: LayerCache, layout: Layout, written: Rows) -> Rows:
    """``written`` in a larger layout. Above the slots there were, it is a mark that hides what a
    conversion did not have (see ``Layout.hiding``), and hides the same in more slots."""
    slots, wider = layer.policy.stored.slots, replace(layer.policy, layout=layout).stored.slots
    if layer.policy.has_tail:
        slots, wider = layer.policy.layout.slots, layout.slots
    return jnp.where(written > slots, written + wider - slots, written)


def _joined(*arrays: Array) -> Array:
    return jnp.concatenate(arrays)
