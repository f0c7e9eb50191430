"""Queries against a cache: causal by position, with cost that follows the filled length.

``attend`` walks the cache in blocks and merges them by the online softmax (Milakov and
Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135), so no score matrix and no decoded copy
of a layer exist. Blocks that hold nothing to see are skipped by ``lax.cond`` inside a ``scan`` of
static length: as cheap as a loop of dynamic length, and differentiable. The path ``reference`` is
the same in one piece, for tests and for reading.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvjax._sight import Bias, Sight, product
from kvjax._typing import (
    Array,
    Counts,
    KeysValues,
    Mixed,
    Queries,
    Rows,
)
from kvjax.cache import KVCache, LayerCache, accepted, query_positions
from kvjax.codecs import Raw
from kvjax.layouts import Dense
from kvjax.policy import CachePolicy
from kvjax.rotary import RotaryTable, apply_rotary

FINE = 128
"""Slots of a block where the filled part ends."""
COARSE = 1024
"""Slots of a block elsewhere: large enough that its copy is shared among the CPU's threads."""
QUERIES = 256
"""Queries that walk the blocks together: more of them would see more blocks in vain."""
_LOWEST = -1e30


def attend(
    queries: Queries,
    cache: KVCache,
    layer: int,
    *,
    rotary: RotaryTable | None = None,
    lengths: Counts | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    bias: Bias | None = None,
    path: str = "blocks",
) -> Mixed:
    """Attention of a call's queries to all that their rows hold: after ``append``, before
    ``advance``.

    Args:
      queries: [batch, heads, new, head_dim], unrotated; ``heads`` is a multiple of the cache's
        ``kv_heads``, and consecutive heads share one.
      cache: the cache that this call's keys and values were appended to.
      layer: which layer.
      rotary: the table that ``append`` was given.
      lengths: int32[batch], as ``append`` was given.
      scale: what scores are multiplied by; by default ``head_dim ** -0.5``.
      window: the query at ``p`` sees positions above ``p - window`` only.
      sinks: positions below ``sinks`` stay visible in spite of ``window``.
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
      bias: added to the scores, see ``Bias``.
      path: ``"blocks"``, or ``"reference"``: over every slot in one piece.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype. A query that sees nothing gets zeros.

    Raises:
      ValueError: if shapes do not fit the cache, ``window`` or ``soft_cap`` is not positive, or
        ``path`` is not known.
    """
    held = cache.layers[layer]
    if path not in _PATHS:
        raise ValueError(f"unknown attention path {path!r}: there are {', '.join(_PATHS)}")
    new = queries.shape[2]
    sight = Sight(
        query_positions(cache, new), _scale(queries, scale), window, sinks, soft_cap, bias
    )
    queries = apply_rotary(queries, sight.queries, rotary)
    length = cache.length + accepted(cache, layer, new, lengths)
    return _PATHS[path](queries, held, length, jnp.maximum(cache.written, length), sight)


def self_attend(
    queries: Queries,
    keys: KeysValues,
    values: KeysValues,
    *,
    rotary: RotaryTable | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> Mixed:
    """Causal attention of a text to itself, without a cache: the training pass.

    Args:
      queries: [batch, heads, new, head_dim], unrotated, at positions 0 to ``new - 1``.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary, scale, window, sinks, soft_cap, bias: as in ``attend``.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype; differentiable.

    Raises:
      ValueError: if shapes do not fit, or ``window`` or ``soft_cap`` is not positive.
    """
    batch, _, new, _ = queries.shape
    positions = jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), (batch, new))
    queries = apply_rotary(queries, positions, rotary)
    keys = apply_rotary(keys, positions, rotary)
    policy = CachePolicy(Dense(new), Raw(keys.dtype.name), Raw(values.dtype.name))
    sight = Sight(positions, _scale(queries, scale), window, sinks, soft_cap, bias)
    length = jnp.full((batch,), new, jnp.int32)
    held = LayerCache(keys, values, policy, keys.shape[1], keys.shape[3])
    return _blockwise(queries, held, length, length, sight)


def _at_once(queries: Mixed, held: LayerCache, length: Rows, written: Rows, sight: Sight) -> Mixed:
    """Softmax over all slots together."""
    slots = jnp.arange(held.policy.layout.slots, dtype=jnp.int32)
    positions = held.policy.layout.positions(length, written, slots)
    keys = held.policy.keys.decode(held.keys)
    values = held.policy.values.decode(held.values)
    scores, seen = sight.scores(_grouped(queries, held), keys, positions)
    scores = jnp.where(seen, scores, _LOWEST)
    highest = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    total = weights.sum(-1, keepdims=True)
    mixed = _mix(weights, values.astype(queries.dtype)) / jnp.where(total == 0, 1.0, total)
    return mixed.reshape(queries.shape).astype(queries.dtype)


def _blockwise(
    queries: Mixed, held: LayerCache, length: Rows, written: Rows, sight: Sight
) -> Mixed:
    """Softmax block by block, for some queries at a time."""
    new = queries.shape[2]
    whole = new // QUERIES * QUERIES if new > QUERIES else 0

    def some(part: tuple[Array, Array]) -> Array:
        return _walk(part[0], held, length, written, replace(sight, queries=part[1]))

    parts = []
    if whole:
        split = jnp.stack(jnp.split(queries[:, :, :whole], whole // QUERIES, axis=2))
        at = jnp.stack(jnp.split(sight.queries[:, :whole], whole // QUERIES, axis=1))
        parts = list(lax.map(some, (split, at)))
    if whole < new:
        parts.append(some((queries[:, :, whole:], sight.queries[:, whole:])))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)


def _walk(queries: Mixed, held: LayerCache, length: Rows, written: Rows, sight: Sight) -> Mixed:
    """Coarse blocks up to where all is filled, fine ones after that."""
    layout, grouped = held.policy.layout, _grouped(queries, held)
    fine, coarse = _block_sizes(layout.slots)

    def visit(start: Array, size: int, merged: _Merged) -> _Merged:
        # A last block that would pass the end is moved down; what it shares is not seen twice.
        origin = jnp.minimum(start, layout.slots - size)
        slots = origin + jnp.arange(size, dtype=jnp.int32)
        positions = layout.positions(length, written, slots)
        positions = jnp.where(slots >= start, positions, -1)
        keys = held.policy.keys.decode(_slice(held.keys, origin, size))
        values = held.policy.values.decode(_slice(held.values, origin, size))
        return _merge(merged, grouped, keys, values, positions, sight)

    def walk(merged: _Merged, first: Array, blocks: int, size: int, end: Array) -> _Merged:
        def one(carry: tuple[Array, _Merged], _: None) -> tuple[tuple[Array, _Merged], None]:
            start, merged = carry
            wanted = (start < end) & sight.reaches(*layout.bounds(length, start, size))
            merged = lax.cond(wanted, lambda m: visit(start, size, m), lambda m: m, merged)
            return (start + size, merged), None

        # The start is carried: a list of starts would be memory that grows with the capacity.
        step = jax.checkpoint(one, prevent_cse=False)
        return lax.scan(step, (first, merged), length=blocks)[0][1]

    rows = grouped.shape[:-1]
    merged = (
        jnp.full(rows, _LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(grouped.shape, jnp.float32),
    )
    first, rest = jnp.int32(0), layout.slots
    if coarse > fine:
        # Tokens behind the last of these queries need not be walked to.
        near = jnp.minimum(length, jnp.max(sight.queries, axis=1) + 1)
        first, rest = layout.occupied(near) // coarse * coarse, coarse
        merged = walk(merged, jnp.int32(0), layout.slots // coarse, coarse, first)
    merged = walk(merged, first, -(-rest // fine), fine, jnp.int32(layout.slots))
    _, total, mixed = merged
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return mixed.reshape(queries.shape).astype(queries.dtype)


_PATHS = {"blocks": _blockwise, "reference": _at_once}

_Merged = tuple[Array, Array, Array]
"""Of the blocks so far, float32: the highest score and the sum of weights [batch, kv_heads, group,
new], and the weighted sum of values [batch, kv_heads, group, new, head_dim]."""


def _merge(
    merged: _Merged, queries: Array, keys: Array, values: Array, positions: Array, sight: Sight
) -> _Merged:
    """Take one more block in, by the online softmax."""
    highest, total, mixed = merged
    scores, seen = sight.scores(queries, keys, positions)
    scores = jnp.where(seen, scores, _LOWEST)
    new_highest = jnp.maximum(highest, scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - new_highest[..., None]), 0.0)
    shrink = jnp.exp(highest - new_highest)
    total = total * shrink + weights.sum(-1)
    return (
        new_highest,
        total,
        mixed * shrink[..., None] + _mix(weights, values.astype(queries.dtype)),
    )


def _mix(weights: Array, values: Array) -> Array:
    """Weights [batch, kv_heads, group, new, n] times values [batch, kv_heads, n, head_dim]."""
    batch, kv_heads, group, new, slots = weights.shape
    flat = weights.reshape(batch, kv_heads, group * new, slots)
    mixed = product("bhqk,bhkd->bhqd", flat.astype(values.dtype), values)
    return mixed.reshape(batch, kv_heads, group, new, -1)


def _slice(store: Array, start: Array, size: int) -> Array:
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=2), store)


def _block_sizes(slots: int) -> tuple[int, int]:
    """Fine and coarse block sizes: a coarse block is at most a quarter of a layer."""
    fine = min(FINE, slots)
    quarter = 1 << max(slots // 4, 1).bit_length() - 1
    return fine, max(fine, min(COARSE, quarter))


def _grouped(queries: Mixed, held: LayerCache) -> Array:
    """Queries [batch, heads, new, head_dim] as [batch, kv_heads, group, new, head_dim]."""
    batch, heads, new, head_dim = queries.shape
    kv_heads = held.kv_heads
    if heads % kv_heads or head_dim != held.head_dim:
        raise ValueError(
            f"queries [batch, heads, new, head_dim] {list(queries.shape)} do not fit keys with "
            f"kv_heads={kv_heads}, head_dim={held.head_dim}"
        )
    return queries.reshape(batch, kv_heads, heads // kv_heads, new, head_dim)


def _scale(queries: Queries, scale: float | None) -> float:
    return queries.shape[3] ** -0.5 if scale is None else scale
