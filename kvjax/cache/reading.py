"""What a layer holds, as numbers: all of it, or the tokens at some positions."""

import jax
import jax.numpy as jnp

from kvjax.cache.checks import validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import Body, LayerCache, check_strip
from kvjax.cache.sections import LayerView, sections
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.typing import Array, CachedKeysValues, LayerNumber, PerRow, SlotPositions


@automatic_axes
def read(
    cache: KVCache, layer: LayerNumber, *, rotary: RotaryTable | None = None
) -> tuple[CachedKeysValues, CachedKeysValues, SlotPositions]:
    """A layer's decoded content, for attention of one's own.

    Behind a tail, the slots of the body come first, then those of the tail, and every position
    stands in one of them, as the query at the row's newest token sees it. Between ``append`` and
    ``advance`` that is the newest of the call, whose tokens are there as ``attend`` finds them.

    Args:
      cache: the cache.
      layer: which layer, as of ``append``.
      rotary: the layer's table, where its codec stores keys unrotated (``Unrotated``).

    Returns:
      Keys (rotated) and values [batch, kv_heads, slots, head_dim], and the position that each
      slot holds, int32[batch, slots], -1 where it is empty or stale.
    """
    cache = validated("kvjax.read", cache, layer=layer, between=False)
    (entry, index), pending = cache.at(layer), cache.pending
    held = cache.layers[entry]
    before = length = cache.length
    if pending is not None and index is None and entry in pending.entries:
        length = length + pending.count
    mine = None
    if pending is not None and index is not None:
        length = length + jnp.where(pending.append_counts[entry][index] > 0, pending.count, 0)
        mine = check_strip(held, index, pending.new)
    raw_from = held.policy.split.raw_from(length - 1) if held.policy.has_tail else length
    if held.policy.prefill == "exact":
        raw_from = jnp.minimum(raw_from, before)
    keys, values, positions = [], [], []
    table = cache.table(entry, whole=True)
    view = LayerView(
        held, before, length, cache.written[:, entry], pages=table, index=index
    ).unstacked()
    held = view.layer_cache
    # A long call's own sinks have been written, its other tokens stand in a section of their own.
    for section in sections(view, together=held.strip is None):
        some_keys, some_values, at = section.numbers()
        if section.split is not None:
            raw = section.split.is_raw(at, raw_from[:, None])
            at = jnp.where(_there(held, at) & (raw == section.raw), at, -1)
        keys.append(some_keys)
        values.append(some_values)
        positions.append(at)
    rotated, at = jnp.concatenate(keys, axis=2), jnp.concatenate(positions, axis=1)
    if held.policy.keys.before_rotary:
        rotated = apply_rotary(rotated, at.clip(0), rotary)
    if mine is not None:
        rotated = jnp.where(mine, rotated, jnp.nan)
    return rotated, jnp.concatenate(values, axis=2), at


def tokens_at(
    held: LayerCache, length: PerRow, marks: PerRow, pages: Array | None, wanted: Array
) -> tuple[Array, Array, Array]:
    """Keys and values [batch, kv_heads, n, head_dim] of the tokens at ``wanted`` int32[batch, n],
    as exact as the layer has them, and which of them it has, bool[batch, n]; the others are 0.
    ``pages``: the rows' tables, where it is in pages."""
    keys = values = jnp.zeros((), held.policy.keys.dtype)
    there = jnp.zeros(wanted.shape, bool)
    view = LayerView(held, length, length, marks, pages=pages)
    for section in reversed(sections(view, together=True)):  # raw ones first
        some_keys, some_values, at = section.numbers()
        source = jnp.clip(section.slot_of(wanted), 0, at.shape[1] - 1)
        found = (jnp.take_along_axis(at, source, axis=1) == wanted) & (wanted >= 0) & ~there
        found &= _there(held, wanted)
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


def blocks_at(
    held: LayerCache, length: PerRow, marks: PerRow, pages: Array | None, ids: Array
) -> tuple[Body, Array]:
    """The blocks ``ids`` int32[batch, n] of a body as they are encoded, and which of them it has,
    bool[batch, n]; the others mean nothing."""
    split, batch = held.policy.split, ids.shape[0]
    source = jnp.clip(split.body.slot_of(ids), 0, split.body.slots - 1)
    every = jnp.arange(split.body.slots, dtype=jnp.int32)
    at = split.body.positions(split.flushed(length), split.flushed(marks), every)
    there = (jnp.take_along_axis(at, source, axis=1) == ids) & (ids >= 0)

    def taken(store: Array) -> Array:
        index = source.reshape(batch, 1, -1, *[1] * (store.ndim - 3))
        return jnp.take_along_axis(store, index, axis=2)

    body = sections(LayerView(held, length, length, marks, pages=pages))[0]
    return jax.tree.map(taken, body.stores()), there


def _there(held: LayerCache, positions: Array) -> Array:
    """Which positions a conversion has not left out."""
    if held.low is None:
        return jnp.ones((), bool)
    return (positions >= held.low[:, None]) | (positions < held.policy.layout.sinks)
