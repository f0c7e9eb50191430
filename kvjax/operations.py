"""What is done with a cache beside filling it: pure functions, for every layout.

All but ``grow`` can stand inside ``jit``, where the shapes allow.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._checks import is_traced, whole_number
from kvjax._typing import Array, Counts, Rows
from kvjax.cache import LOST, REWOUND_TOO_FAR, KVCache, LayerCache
from kvjax.layouts import UNLIMITED, Layout
from kvjax.policy import CachePolicy, PolicyChoice, per_layer


def rewindable(cache: KVCache) -> Rows:
    """int32[batch]: how many of its newest tokens each row can forget, and go on exactly.

    A ring has overwritten what lies further back than its slack.
    """
    each = [layer.policy.layout.rewindable(cache.length, cache.written) for layer in cache.layers]
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
      ValueError: if ``tokens`` is negative or no whole number, or has not one number a row.
    """
    if isinstance(tokens, (int, np.integer)) and tokens < 0:
        raise ValueError(f"rewind takes tokens away: {tokens} is negative")
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape not in ((), (cache.batch,)):
        raise ValueError(
            f"rewind takes a whole number, or int32[batch={cache.batch}], got {tokens.dtype}"
            f"{list(tokens.shape)}"
        )
    tokens = jnp.broadcast_to(tokens.astype(jnp.int32), cache.length.shape)
    wrong = (tokens > rewindable(cache)) | (tokens < 0)
    length = jnp.where(wrong, cache.length, cache.length - tokens)
    status = cache.status | jnp.where(wrong, REWOUND_TOO_FAR, 0)
    return replace(cache, length=length, status=status)


def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    return jax.tree.map(jnp.copy, cache)


def select(cache: KVCache, rows: Sequence[int] | Array) -> KVCache:
    """The cache of some rows, in the order asked for; one row may be asked for often.

    The reordering of a beam search (``reorder_cache``), and the way to drop rows that are done.

    Args:
      cache: the cache.
      rows: int[n], numbers of rows.

    Raises:
      ValueError: if ``rows`` is not a list of whole numbers, or names a row that is not there.
    """
    index = jnp.asarray(rows)
    if index.ndim != 1 or not jnp.issubdtype(index.dtype, jnp.integer) or not index.size:
        raise ValueError(f"rows must be a list of whole numbers, got {rows!r:.80}")
    if not is_traced(index):
        wrong = [int(row) for row in np.asarray(index) if not 0 <= row < cache.batch]
        if wrong:
            raise ValueError(f"row {wrong[0]}: the cache has {cache.batch}, 0 the first")
    return jax.tree.map(lambda x: jnp.take(x, index, axis=0, mode="clip"), cache)


def repeat(cache: KVCache, times: int) -> KVCache:
    """Every row ``times`` times, one behind the other: one prompt, several continuations.

    Raises:
      ValueError: if ``times`` is no whole number, at least 1.
    """
    times = whole_number("times", times, 1)
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), cache)


def concatenate(caches: Sequence[KVCache]) -> KVCache:
    """The rows of several caches in one, which holds as much as the largest of them.

    Rows may be of different lengths.

    Args:
      caches: of one model, and of policies that differ in their capacity at most.

    Raises:
      ValueError: if there are none, or their layers differ in more than capacity.
    """
    caches = list(caches)
    if not caches:
        raise ValueError("no caches: the list is empty")
    layers = []
    for number in range(len(caches[0].layers)):
        if any(len(cache.layers) != len(caches[0].layers) for cache in caches):
            raise ValueError("caches of models with different numbers of layers")
        held = [cache.layers[number] for cache in caches]
        limits = [layer.policy.layout.limit for layer in held]
        largest = UNLIMITED if None in limits else max(n for n in limits if n is not None)
        padded = [_padded(layer, largest) for layer in held]
        if len(set(map(_shape_of, padded))) > 1:
            raise ValueError(
                f"layer {number} is of {' and '.join(dict.fromkeys(map(_shape_of, held)))}: "
                "convert the caches to one policy first"
            )
        layers.append(jax.tree.map(_joined, *padded))
    cursors = [
        jnp.concatenate([getattr(cache, name) for cache in caches])
        for name in ("length", "written", "status")
    ]
    return KVCache(tuple(layers), *cursors, sources=caches[0].sources)


def reset(cache: KVCache, rows: Array | None = None) -> KVCache:
    """Empty rows, status and all, without touching the arrays.

    Args:
      cache: the cache.
      rows: bool[batch], which; by default all.
    """
    keep = jnp.zeros(cache.batch, bool) if rows is None else ~jnp.asarray(rows, bool)
    if keep.shape != (cache.batch,):
        raise ValueError(f"rows must be bool[batch={cache.batch}], got {list(keep.shape)}")
    length, written, status = (
        jnp.where(keep, x, 0) for x in (cache.length, cache.written, cache.status)
    )
    return replace(cache, length=length, written=written, status=status)


def grow(cache: KVCache, to: int) -> KVCache:
    """A cache with room for ``to`` tokens a row, and the same content.

    It is done outside ``jit``, one layer after the other, and the cache given is used up, so that
    never more than one layer is held twice; a ``fork`` of it survives. Layers that hold a window
    only stay as they are.

    Args:
      cache: the cache; its arrays are deleted.
      to: tokens a row.

    Raises:
      ValueError: if ``to`` is fewer than it holds already, more than it may grow to, or no layer
        has a capacity that could grow.
    """
    to = whole_number("to", to, 1)
    if all(layer.policy.layout.limit is None for layer in cache.layers):
        raise ValueError("a ring does not grow: it holds its window however long the text is")
    for layer in cache.layers:
        if layer.policy.layout.limit is not None:
            layer.policy.layout.grown(to)  # raises before anything is deleted
    layers = []
    for layer in cache.layers:
        larger = _padded(layer, to)
        if larger is not layer:
            larger = jax.block_until_ready(layer.policy.placement.put(larger))
            for array in jax.tree.leaves(layer):
                array.delete()
        layers.append(larger)
    return replace(cache, layers=tuple(layers))


def convert(cache: KVCache, policy: PolicyChoice, *, max_len: int | None = None) -> KVCache:
    """The same text in a cache of another policy: dense to ring, float32 to bfloat16.

    What queries will see under the new layout must be there: a ring that has forgotten the
    beginning of a row can't become dense.

    Args:
      cache: the cache; it stays as it is.
      policy: as for ``init_cache``.
      max_len: as for ``init_cache``; a dense layout takes the old cache's where it has one. A
        growing layout begins with what the text needs, or, inside ``jit``, with what there was.

    Raises:
      ValueError: if a row holds more tokens than the new cache can, or lacks some that the new
        layout keeps (where traced: the status ``LOST``).
    """
    windows = tuple(layer.window for layer in cache.layers)
    policies = per_layer(policy, _Layers(len(cache.layers), windows))
    layers, status, written = [], cache.status, cache.length
    for number, (old, wanted) in enumerate(zip(cache.layers, policies, strict=True)):
        dtype = old.policy.keys.decode(old.keys).dtype.name
        limited = max_len is None and not wanted.layout.open_ended and cache.max_len < UNLIMITED
        new = wanted.resolve(cache.max_len if limited else max_len, old.window, dtype)
        if new.layout.grows_to is not None:
            new = replace(new, layout=_with_room(new.layout, cache))
        layer, needed, lost = _converted(cache, old, new)
        if not is_traced(lost) and np.any(lost):
            raise ValueError(
                f"layer {number} does not hold all tokens of row {int(np.argmax(lost))} that "
                f"{new.layout} is to keep"
            )
        layers.append(layer)
        status, written = status | jnp.where(lost, LOST, 0), jnp.maximum(written, needed)
    return replace(cache, layers=tuple(layers), written=written, status=status)


@dataclass(frozen=True)
class _Layers:
    """What a policy asks of a model's config, from a cache."""

    num_hidden_layers: int
    windows: tuple[int | None, ...]


def _with_room(layout: Layout, cache: KVCache) -> Layout:
    """A growing layout, doubled until it holds what the rows hold."""
    if is_traced(cache.length):
        tokens = min(cache.max_len, layout.grows_to or cache.max_len)
    else:
        tokens = int(np.max(cache.length))
    to = layout.slots
    while to < tokens:
        to *= 2
    return layout.grown(min(to, max(layout.grows_to or to, layout.slots)))


def _converted(
    cache: KVCache, old: LayerCache, policy: CachePolicy
) -> tuple[LayerCache, Rows, Array]:
    """A layer under another policy, the ``written`` that tells what it lacks, and which rows it
    can't be had for, bool[batch]."""
    layout, before = policy.layout, old.policy.layout
    slots = jnp.arange(layout.slots, dtype=jnp.int32)
    wanted = layout.positions(cache.length, cache.length, slots)
    source = jnp.clip(before.slot_of(wanted), 0, before.slots - 1)
    every = jnp.arange(before.slots, dtype=jnp.int32)
    held = before.positions(cache.length, cache.written, every)
    missing = (wanted >= 0) & (jnp.take_along_axis(held, source, axis=1) != wanted)
    written, lost = layout.hiding(cache.length, wanted, missing)
    limit = UNLIMITED if layout.limit is None else layout.limit

    def moved(store: Any, codec: Any, into: Any) -> Any:
        numbers = codec.decode(store)
        return into.encode(jnp.take_along_axis(numbers, source[:, None, :, None], axis=2))

    keys = moved(old.keys, old.policy.keys, policy.keys)
    values = moved(old.values, old.policy.values, policy.values)
    keys, values = policy.placement.put((keys, values))
    layer = replace(old, keys=keys, values=values, policy=policy)
    return layer, written, lost | (cache.length > limit)


def _padded(layer: LayerCache, to: int) -> LayerCache:
    """A layer with room for ``to`` tokens; one that has it already is given back as it is."""
    layout = layer.policy.layout
    if layout.limit is None or layout.limit == to:
        return layer
    grown = layout.grown(to)

    def pad(x: Array) -> Array:
        more = grown.slots - layout.slots
        return jnp.pad(x, [(0, 0), (0, 0), (0, more), *[(0, 0)] * (x.ndim - 3)])

    return replace(
        layer,
        keys=jax.tree.map(pad, layer.keys),
        values=jax.tree.map(pad, layer.values),
        policy=replace(layer.policy, layout=grown),
    )


def _shape_of(layer: LayerCache) -> str:
    return f"{layer.policy} with kv_heads={layer.kv_heads}, head_dim={layer.head_dim}"


def _joined(*arrays: Array) -> Array:
    return jnp.concatenate(arrays)
