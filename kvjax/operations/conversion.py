"""The same text in a cache of another policy."""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.layer import LayerCache, Tail
from kvjax.cache.sizes import within
from kvjax.cache.state import KVCache, with_rows
from kvjax.cache.status import LOST
from kvjax.codecs import tokens_of
from kvjax.core.checks import is_traced, whole_number
from kvjax.core.device import fetch
from kvjax.core.typing import Array, Rows
from kvjax.layouts import UNLIMITED, Layout
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer


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
    resolved = []
    for place, old in enumerate(cache.layers):
        wanted = policies[sources.index(place)]
        wanted = replace(wanted, placement=wanted.placement.over(old.policy.placement.spread))
        asked = max_len
        if asked is None and not wanted.layout.open_ended and cache.max_len < UNLIMITED:
            asked = cache.max_len
        new = wanted.resolve(
            limit if asked is None else asked, old.window, old.policy.keys.dtype,
            values_dtype=old.policy.values.dtype,
        )  # fmt: skip
        if new.keys.before_rotary != old.policy.keys.before_rotary:
            raise ValueError(
                f"layer {place}: keys that are stored with their positions and such as are without "
                "(Unrotated) can't be converted into one another"
            )
        if new.layout.grows_to is not None:
            new = replace(new, layout=_with_room(new.layout, cache))
        resolved.append(new)
    budget = budget_of(policy)
    if budget is not None:
        some = [(cache.batch, layer.kv_heads, layer.head_dim) for layer in cache.layers]
        resolved = within(budget, resolved, some)
    layers, status, written = [], cache.status, []
    for place, new in enumerate(resolved):
        old, marks = cache.layers[place], cache.written[:, place]
        layer, mark, long, lost = converted(old, cache.length, marks, new)
        if not is_traced(long) and np.any(fetch(long)):
            row = int(np.argmax(fetch(long)))
            raise ValueError(
                f"row {row} has {int(fetch(cache.length)[row])} tokens, {new.layout} of layer "
                f"{place} holds {new.layout.limit}"
            )
        if not is_traced(lost) and np.any(fetch(lost)):
            raise ValueError(
                f"layer {place} does not hold all tokens of row {int(np.argmax(fetch(lost)))} that "
                f"{new.layout} is to keep"
            )
        layers.append(layer.placed())
        written.append(mark)
        status |= jnp.where(long | lost, LOST, 0)
    return with_rows(
        cache, layers=tuple(layers), written=jnp.stack(written, 1), status=status, budget=budget
    )


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
        tokens = int(np.max(fetch(cache.length)))
    to = layout.slots
    while to < tokens:
        to *= 2
    return layout.grown(min(to, max(layout.grows_to or to, layout.slots)))


def converted(
    old: LayerCache, length: Rows, marks: Rows, policy: CachePolicy
) -> tuple[LayerCache, Rows, Array, Array]:
    """A layer under another policy, on the device; the ``written`` that tells what it lacks, and
    which rows it can't be had for, bool[batch]: those that are too long, and those that lack
    tokens. ``length`` and ``marks``: the cache's, and its ``written`` for this layer."""
    old = old.near()
    layout = policy.layout
    tail = low = None
    if policy.raw is None:
        stored = policy.stored
        wanted = stored.positions(length, length, jnp.arange(stored.slots, dtype=jnp.int32))
        keys, values, there = _fetched(old, length, marks, wanted)
        written, lost = stored.hiding(length, wanted, (wanted >= 0) & ~there)
        keys, values = policy.keys.encode(keys), policy.values.encode(values)
    else:
        split, written = policy.split, length
        wanted = split.tail.positions(length, length, jnp.arange(split.tail.slots, dtype=jnp.int32))
        raw_keys, raw_values, in_tail = _fetched(old, length, marks, wanted)
        tail = Tail(policy.raw[0].encode(raw_keys), policy.raw[1].encode(raw_values))
        keys, values, older, in_body = _body(old, length, marks, policy)
        wanted = jnp.concatenate([wanted, older], axis=1)
        missing = (wanted >= 0) & ~jnp.concatenate([in_tail, in_body], axis=1)
        needed = wanted < layout.sinks
        needed |= wanted > (length - (layout.window or UNLIMITED))[:, None]
        lost = jnp.any(missing & needed, axis=1)
        low = jnp.max(jnp.where(missing, wanted + 1, 0), axis=1)
    limit = UNLIMITED if layout.limit is None else layout.limit
    layer = replace(
        old, keys=keys, values=values, policy=policy, tail=tail, strip=None, low=low, fetched=None
    )
    return layer, written, length > limit, lost


def _fetched(
    old: LayerCache, length: Rows, marks: Rows, wanted: Array
) -> tuple[Array, Array, Array]:
    """Keys and values [batch, kv_heads, n, head_dim] of the tokens at ``wanted`` int32[batch, n],
    as exact as the layer has them, and which of them it has, bool[batch, n]; the others are 0."""
    policy = old.policy
    if old.tail is None:
        stores = [(policy.keys.decode(old.keys), policy.values.decode(old.values), policy.stored)]
    else:
        raw, split = policy.raw, policy.split
        assert raw is not None
        stores = [
            (raw[0].decode(old.tail.keys), raw[1].decode(old.tail.values), split.tail),
            (
                tokens_of(policy.keys.decode(old.keys)),
                tokens_of(policy.values.decode(old.values)),
                split,
            ),
        ]
    keys = values = jnp.zeros((), stores[0][0].dtype)
    there = jnp.zeros(wanted.shape, bool)
    for some_keys, some_values, layout in stores:
        slots = jnp.arange(some_keys.shape[2], dtype=jnp.int32)
        held = layout.positions(length, marks, slots)
        source = jnp.clip(layout.slot_of(wanted), 0, some_keys.shape[2] - 1)
        found = (jnp.take_along_axis(held, source, axis=1) == wanted) & (wanted >= 0) & ~there
        if old.low is not None:  # an earlier conversion had nothing for these
            found &= (wanted >= old.low[:, None]) | (wanted < policy.layout.sinks)
        keys, values = (
            jnp.where(
                found[:, None, :, None],
                jnp.take_along_axis(x, source[:, None, :, None], axis=2),
                before,
            )
            for x, before in ((some_keys, keys), (some_values, values))
        )
        there |= found
    return keys, values, there


def _body(
    old: LayerCache, length: Rows, marks: Rows, policy: CachePolicy
) -> tuple[Any, Any, Array, Array]:
    """The body's keys and values under ``policy``, the positions of its tokens, and which of them
    there are. What the same codec has encoded already stays as it is."""
    split, batch = policy.split, length.shape[0]
    blocks = jnp.arange(split.body.slots, dtype=jnp.int32)
    wanted = split.body_positions(length, length, blocks)
    keys, values, there = _fetched(old, length, marks, wanted)
    shape = (batch, old.kv_heads, split.body.slots, split.block, old.head_dim)
    held_of = there.reshape(batch, 1, split.body.slots, split.block, 1)
    # What a block lacks are its first tokens: the last one in their place leaves the scales of the
    # others what they are.
    keys, values = (
        jnp.where(held_of, x, x[:, :, :, -1:]) for x in (keys.reshape(shape), values.reshape(shape))
    )
    stores = policy.keys.encode(keys), policy.values.encode(values)
    if old.tail is None or old.policy.block != policy.block:
        return *stores, wanted, there
    before = old.policy.split
    ids = split.body.positions(split.flushed(length), split.flushed(length), blocks)
    source = jnp.clip(before.body.slot_of(ids), 0, before.body.slots - 1)
    every = jnp.arange(before.body.slots, dtype=jnp.int32)
    held = before.body.positions(before.flushed(length), before.flushed(marks), every)
    same = (jnp.take_along_axis(held, source, axis=1) == ids) & (ids >= 0)

    def kept(new: Array, store: Array) -> Array:
        ones = [1] * (new.ndim - 3)
        at = source.reshape(batch, 1, -1, *ones)
        return jnp.where(
            same.reshape(batch, 1, -1, *ones), jnp.take_along_axis(store, at, axis=2), new
        )

    encoded = [
        jax.tree.map(kept, new, store) if codec == own else new
        for new, store, codec, own in zip(
            stores, (old.keys, old.values), (policy.keys, policy.values),
            (old.policy.keys, old.policy.values), strict=True,
        )
    ]  # fmt: skip
    return *encoded, wanted, there
