"""A layer's decoded content."""

from typing import Any

import jax.numpy as jnp

from kvjax.cache.state import KVCache
from kvjax.codecs import tokens_of
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.typing import Array, CachedKeysValues, Rows, SlotPositions
from kvjax.policies.cache_policy import CachePolicy


def read(
    cache: KVCache, layer: int, *, rotary: RotaryTable | None = None
) -> tuple[CachedKeysValues, CachedKeysValues, SlotPositions]:
    """A layer's decoded content, for attention of one's own.

    Behind a tail, the slots of the body come first, then those of the tail, and every position
    stands in one of them, as the query at the row's newest token sees it.

    Args:
      cache: the cache.
      layer: which layer.
      rotary: the layer's table, where its codec stores keys unrotated (``Unrotated``).

    Returns:
      Keys (rotated) and values [batch, kv_heads, slots, head_dim], and the position that each
      slot holds, int32[batch, slots], -1 where it is empty or stale.
    """
    place = cache.place(layer)
    held = cache.layers[place]
    policy, written = held.policy, cache.written[:, place]
    if held.tail is None:
        slots = jnp.arange(policy.stored.slots, dtype=jnp.int32)
        positions = policy.stored.positions(cache.length, written, slots)
        return policy.keys.decode(held.keys), policy.values.decode(held.values), positions
    keys, values, positions = decoded(held.near(), policy, cache.length, written)
    if policy.keys.before_rotary:
        keys = apply_rotary(keys, positions.clip(0), rotary)
    return keys, values, positions


def decoded(
    held: Any, policy: CachePolicy, length: Rows, written: Rows
) -> tuple[Array, Array, SlotPositions]:
    """Keys and values of a layer with a tail, as they are stored, body first, and the positions of
    their slots, each once, as the query at the row's newest token sees it."""
    split = policy.split
    assert policy.raw is not None
    blocks = jnp.arange(split.body.slots, dtype=jnp.int32)
    in_body = split.body_positions(length, written, blocks)
    in_tail = split.tail.positions(length, written, jnp.arange(split.tail.slots, dtype=jnp.int32))
    raw_from = split.raw_from(length - 1)[:, None]
    is_raw = (in_tail >= raw_from) | (in_tail < split.tail.sinks)
    coded = (in_body < raw_from) & (in_body >= split.tail.sinks)
    positions = jnp.concatenate(
        [jnp.where(coded, in_body, -1), jnp.where(is_raw, in_tail, -1)], axis=1
    )
    if held.low is not None:  # a conversion had nothing for these
        there = (positions >= held.low[:, None]) | (positions < split.tail.sinks)
        positions = jnp.where(there, positions, -1)
    keys = tokens_of(policy.keys.decode(held.keys)), policy.raw[0].decode(held.tail.keys)
    values = tokens_of(policy.values.decode(held.values)), policy.raw[1].decode(held.tail.values)
    return jnp.concatenate(keys, axis=2), jnp.concatenate(values, axis=2), positions
