"""The same text in a cache of another policy."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax._checks import is_traced, whole_number
from kvjax._typing import Array, Rows
from kvjax.cache import KVCache, LayerCache
from kvjax.layouts import UNLIMITED, Layout
from kvjax.policy import CachePolicy, PolicyChoice, per_layer
from kvjax.status import LOST


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
    if max_len is not None:
        max_len = whole_number("max_len", max_len, 1)
    limit = cache.positions
    if limit is not None and (max_len or 0) > limit:
        raise ValueError(f"max_len is {max_len}, but the model has only {limit} positions")
    # Which layer of the model each entry was made for: the first that reads it.
    sources = cache.sources or tuple(range(len(cache.layers)))
    windows = tuple(cache.layers[place].window for place in sources)
    policies = per_layer(policy, _Layers(len(sources), windows))
    layers, status, written = [], cache.status, []
    for place, old in enumerate(cache.layers):
        wanted = policies[sources.index(place)]
        asked = max_len
        if asked is None and not wanted.layout.open_ended and cache.max_len < UNLIMITED:
            asked = cache.max_len
        new = wanted.resolve(
            limit if asked is None else asked, old.window, old.policy.keys.dtype,
            values_dtype=old.policy.values.dtype,
        )  # fmt: skip
        if new.layout.grows_to is not None:
            new = replace(new, layout=_with_room(new.layout, cache))
        layer, mark, long, lost = _converted(cache, place, new)
        if not is_traced(long) and np.any(long):
            row = int(np.argmax(long))
            raise ValueError(
                f"row {row} has {int(cache.length[row])} tokens, {new.layout} of layer {place} "
                f"holds {new.layout.limit}"
            )
        if not is_traced(lost) and np.any(lost):
            raise ValueError(
                f"layer {place} does not hold all tokens of row {int(np.argmax(lost))} that "
                f"{new.layout} is to keep"
            )
        layers.append(layer)
        written.append(mark)
        status |= jnp.where(long | lost, LOST, 0)
    return replace(cache, layers=tuple(layers), written=jnp.stack(written, 1), status=status)


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
    cache: KVCache, place: int, policy: CachePolicy
) -> tuple[LayerCache, Rows, Array, Array]:
    """A layer under another policy, the ``written`` that tells what it lacks, and which rows it
    can't be had for, bool[batch]: those that are too long, and those that lack tokens."""
    old = cache.layers[place]
    layout, before = policy.layout, old.policy.layout
    slots = jnp.arange(layout.slots, dtype=jnp.int32)
    wanted = layout.positions(cache.length, cache.length, slots)
    source = jnp.clip(before.slot_of(wanted), 0, before.slots - 1)
    every = jnp.arange(before.slots, dtype=jnp.int32)
    held = before.positions(cache.length, cache.written[:, place], every)
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
    return layer, written, cache.length > limit, lost
