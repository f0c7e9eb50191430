"""Read a layer as numbers: all of it, or the tokens at given positions."""

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
    """Return the decoded keys and values of a layer, for your own attention.

    If the layer has a tail, the slots of the body come first, then the slots of the tail. Each
    position is in one of the two: raw or decoded, as a query at the row's newest token sees it.
    Between ``append`` and ``advance``, the tokens of the call are included, and the last of them is
    the newest token.

    Args:
      cache: the cache.
      layer: the index of the layer, as in ``append``.
      rotary: the layer's rotary table, if its codec stores keys unrotated (``Unrotated``).

    Returns:
      Rotated keys, values (both [batch, kv_heads, slots, head_dim]), and the position in each slot
      (int32[batch, slots]), -1 if the slot is empty or its token no longer counts.

    Example:
      ```python
      cache = kvjax.prefill(lm, ["The json module"], max_len=64)[0]
      keys, values, positions = kvjax.read(cache, 0)
      print(keys.shape, positions)
      ```
    """
    cache = validated("kvjax.read", cache, layer=layer, between=False)
    (entry, index), pending = cache.at(layer), cache.pending
    layer_cache = cache.layers[entry]
    before = length = cache.length
    if pending is not None and index is None and entry in pending.entries:
        length = length + pending.count
    has_strip = None
    if pending is not None and index is not None:
        length = length + jnp.where(pending.append_counts[entry][index] > 0, pending.count, 0)
        has_strip = check_strip(layer_cache, index, pending.new)
    policy = layer_cache.policy
    raw_from = policy.split.raw_from(length - 1) if policy.has_tail else length
    if policy.prefill == "exact":
        raw_from = jnp.minimum(raw_from, before)
    keys, values, positions = [], [], []
    table = cache.table(entry, whole=True)
    marks = cache.written[:, entry]
    view = LayerView(layer_cache, before, length, marks, pages=table, index=index).unstacked()
    layer_cache = view.layer_cache
    # With a strip, the sinks of a ring are in the tail, and the call's other tokens in a separate
    # section.
    for section in sections(view, together=layer_cache.strip is None):
        section_keys, section_values, at = section.numbers()
        if section.split is not None:
            raw = section.split.is_raw(at, raw_from[:, None])
            at = jnp.where(_is_available(layer_cache, at) & (raw == section.raw), at, -1)
        keys.append(section_keys)
        values.append(section_values)
        positions.append(at)
    rotated, at = jnp.concatenate(keys, axis=2), jnp.concatenate(positions, axis=1)
    if policy.keys.before_rotary:
        rotated = apply_rotary(rotated, at.clip(0), rotary)
    if has_strip is not None:
        rotated = jnp.where(has_strip, rotated, jnp.nan)
    return rotated, jnp.concatenate(values, axis=2), at


def tokens_at(
    layer_cache: LayerCache, length: PerRow, marks: PerRow, pages: Array | None, positions: Array
) -> tuple[Array, Array, Array]:
    """Return the tokens at ``positions`` (int32[batch, n]), raw where the layer has them raw.

    ``length``, ``marks`` and ``pages`` are as in ``LayerView``.

    Returns:
      Keys, values (both [batch, kv_heads, n, head_dim]), and bool[batch, n], which of the tokens
      the layer has. Missing tokens are 0.
    """
    keys = values = jnp.zeros((), layer_cache.policy.keys.dtype)
    available = jnp.zeros(positions.shape, bool)
    view = LayerView(layer_cache, length, length, marks, pages=pages)
    for section in reversed(sections(view, together=True)):  # raw sections first
        section_keys, section_values, at = section.numbers()
        source = jnp.clip(section.slot_of(positions), 0, at.shape[1] - 1)
        is_here = jnp.take_along_axis(at, source, axis=1) == positions
        is_here &= (positions >= 0) & ~available & _is_available(layer_cache, positions)
        keys, values = (
            jnp.where(
                is_here[:, None, :, None],
                jnp.take_along_axis(x, source[:, None, :, None], axis=2),
                before,
            )
            for x, before in ((section_keys, keys), (section_values, values))
        )
        available |= is_here
    return keys, values, available


def blocks_at(
    layer_cache: LayerCache, length: PerRow, marks: PerRow, pages: Array | None, ids: Array
) -> tuple[Body, Array]:
    """Return the encoded blocks ``ids`` (int32[batch, n]) of a body, and bool[batch, n], which of
    them the body has. Missing blocks have undefined values."""
    split, batch = layer_cache.policy.split, ids.shape[0]
    source = jnp.clip(split.body.slot_of(ids), 0, split.body.slots - 1)
    every = jnp.arange(split.body.slots, dtype=jnp.int32)
    at = split.body.positions(split.flushed(length), split.flushed(marks), every)
    available = (jnp.take_along_axis(at, source, axis=1) == ids) & (ids >= 0)

    def take(store: Array) -> Array:
        index = source.reshape(batch, 1, -1, *[1] * (store.ndim - 3))
        return jnp.take_along_axis(store, index, axis=2)

    body = sections(LayerView(layer_cache, length, length, marks, pages=pages))[0]
    return jax.tree.map(take, body.stores()), available


def _is_available(layer_cache: LayerCache, positions: Array) -> Array:
    """Return which positions the last conversion of the layer could supply; see
    ``LayerCache.low``."""
    if layer_cache.low is None:
        return jnp.ones((), bool)
    sinks = positions < layer_cache.policy.layout.sinks
    return (positions >= layer_cache.low[:, None]) | sinks
