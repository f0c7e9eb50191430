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
from kvjax.layouts import UNLIMITED, Dense, Region
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
    chunk: int | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    path: str = "blocks",
) -> Mixed:
    """Attention of a call's queries to all that their rows hold: after ``append``, before
    ``advance``.

    What the layout forgets (``Ring``), no query sees, whatever ``window`` says.

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
      chunk: the query at ``p`` sees positions from ``p // chunk * chunk`` on only (Llama 4's
        ``attention_chunk_size``).
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
      bias: added to the scores, see ``Bias``.
      causal: False lets every query see what a query at the row's last token would, wherever it
        stands itself: cross-attention to a cache that was filled once. Nothing is appended for it.
      path: ``"blocks"``, or ``"reference"``: over every slot in one piece.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype. A query that sees nothing gets zeros.

    Raises:
      ValueError: if shapes do not fit the cache, ``window`` or ``soft_cap`` is not positive,
        ``sinks`` are more than a ring keeps, or ``path`` is not known.
    """
    place = cache.place(layer)
    held = cache.layers[place]
    _check_queries(queries, held, cache.batch)
    new = queries.shape[2]
    if path not in _PATHS:
        raise ValueError(f"unknown attention path {path!r}: there are {', '.join(_PATHS)}")
    layout = held.policy.layout
    if layout.window is not None and sinks > layout.sinks:
        raise ValueError(f"sinks={sinks}, but the layer's ring keeps {layout.sinks} for ever")
    windows = [w for w in (window, layout.window) if w is not None]
    at, length = query_positions(cache, new), cache.length
    if causal:
        length = length + accepted(cache, new, lengths)
    else:
        at = jnp.broadcast_to(jnp.maximum(length - 1, 0)[:, None], at.shape)
    # A window of the model's own may be narrower than the ring.
    cap = layout.sinks + min(windows) - 1 if layout.sinks else UNLIMITED
    sight = Sight(
        at, _scale(queries, scale), min(windows, default=None), max(sinks, layout.sinks), chunk,
        cap, soft_cap, bias,
    )  # fmt: skip
    capped = turned = apply_rotary(queries, at, rotary)
    if layout.sinks and rotary is not None:
        capped = apply_rotary(queries, jnp.minimum(at, cap), rotary)
    written = jnp.maximum(cache.written[:, place], length)
    return _PATHS[path]((turned, capped), held, length, written, sight)


def self_attend(
    queries: Queries,
    keys: KeysValues,
    values: KeysValues,
    *,
    rotary: RotaryTable | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> Mixed:
    """Causal attention of a text to itself, without a cache: the training pass.

    Args:
      queries: [batch, heads, new, head_dim], unrotated, at positions 0 to ``new - 1``.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary, scale, window, sinks, chunk, soft_cap, bias: as in ``attend``.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype; differentiable.

    Raises:
      ValueError: if shapes do not fit, or ``window`` or ``soft_cap`` is not positive.
    """
    policy = CachePolicy(Dense(keys.shape[2]), Raw(keys.dtype.name), Raw(values.dtype.name))
    held = LayerCache(keys, values, policy, keys.shape[1], keys.shape[3])
    _check_queries(queries, held, keys.shape[0])
    batch, _, new, _ = queries.shape
    positions = jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), (batch, new))
    queries = apply_rotary(queries, positions, rotary)
    keys = apply_rotary(keys, positions, rotary)
    held = replace(held, keys=keys)
    sight = Sight(
        positions, _scale(queries, scale), window, sinks, chunk, soft_cap=soft_cap, bias=bias
    )
    length = jnp.full((batch,), new, jnp.int32)
    return _blockwise((queries, queries), held, length, length, sight)


_Turned = tuple[Mixed, Mixed]
"""Queries at their positions, and capped as the layout's sinks want them."""


def _at_once(both: _Turned, held: LayerCache, length: Rows, written: Rows, sight: Sight) -> Mixed:
    """Softmax over all slots together."""
    queries, capped = both
    slots = jnp.arange(held.policy.layout.slots, dtype=jnp.int32)
    positions = held.policy.layout.positions(length, written, slots)
    keys = held.policy.keys.decode(held.keys)
    values = _present(held.policy.values.decode(held.values), positions)
    scores, seen = sight.scores(_grouped(queries, held), keys, positions)
    if held.policy.layout.sinks:
        near, _ = sight.scores(_grouped(capped, held), keys, positions, capped=True)
        is_sink = positions < held.policy.layout.sinks
        scores = jnp.where(is_sink[:, None, None, None], near, scores)
    scores = jnp.where(seen, scores, _LOWEST)
    highest = lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
    total = weights.sum(-1, keepdims=True)
    mixed = _mix(weights, values.astype(queries.dtype)) / jnp.where(total == 0, 1.0, total)
    return mixed.reshape(queries.shape).astype(queries.dtype)


def _blockwise(both: _Turned, held: LayerCache, length: Rows, written: Rows, sight: Sight) -> Mixed:
    """Softmax block by block, for some queries at a time."""
    # The same queries twice are carried once.
    kinds = both[:1] if both[0] is both[1] else both
    new = both[0].shape[2]
    whole = new // QUERIES * QUERIES if new > QUERIES else 0

    def some(part: tuple[tuple[Array, ...], Array]) -> Array:
        turned, at = part
        return _walk((turned[0], turned[-1]), held, length, written, replace(sight, queries=at))

    parts = []
    if whole:
        split = tuple(
            jnp.stack(jnp.split(x[:, :, :whole], whole // QUERIES, axis=2)) for x in kinds
        )
        at = jnp.stack(jnp.split(sight.queries[:, :whole], whole // QUERIES, axis=1))
        parts = list(lax.map(some, (split, at)))
    if whole < new:
        rest = tuple(x[:, :, whole:] for x in kinds)
        parts.append(some((rest, sight.queries[:, whole:])))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)


_Merged = tuple[Array, Array, Array]
"""Of the blocks so far, float32: the highest score and the sum of weights [batch, kv_heads, group,
new], and the weighted sum of values [batch, kv_heads, group, new, head_dim]."""


def _walk(both: _Turned, held: LayerCache, length: Rows, written: Rows, sight: Sight) -> Mixed:
    """The layout's regions, one after the other."""
    grouped = [_grouped(queries, held) for queries in both]
    rows = grouped[0].shape[:-1]
    merged = (
        jnp.full(rows, _LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(grouped[0].shape, jnp.float32),
    )
    for region in held.policy.layout.regions():
        queries = grouped[1] if region.capped else grouped[0]
        merged = _walk_region(merged, region, queries, held, length, written, sight)
    _, total, mixed = merged
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return mixed.reshape(both[0].shape).astype(both[0].dtype)


def _walk_region(
    merged: _Merged,
    region: Region,
    grouped: Array,
    held: LayerCache,
    length: Rows,
    written: Rows,
    sight: Sight,
) -> _Merged:
    """Coarse blocks up to where all is filled, fine ones after that."""
    layout, stop = held.policy.layout, region.first + region.size
    fine, coarse = _block_sizes(region.size)

    def visit(start: Array, size: int, merged: _Merged) -> _Merged:
        # A last block that would pass the end is moved down; what it shares is not seen twice.
        origin = jnp.minimum(start, stop - size)
        slots = origin + jnp.arange(size, dtype=jnp.int32)
        positions = layout.positions(length, written, slots)
        positions = jnp.where(slots >= start, positions, -1)
        keys = held.policy.keys.decode(_slice(held.keys, origin, size))
        values = held.policy.values.decode(_slice(held.values, origin, size))
        values = _present(values, positions).astype(grouped.dtype)
        scores, seen = sight.scores(grouped, keys, positions, capped=region.capped)
        return _merge(merged, scores, seen, values)

    def walk(merged: _Merged, first: Array, blocks: int, size: int, end: Array) -> _Merged:
        def one(carry: tuple[Array, _Merged], _: None) -> tuple[tuple[Array, _Merged], None]:
            start, merged = carry
            wanted = (start < end) & sight.reaches(*layout.bounds(length, start, size))
            merged = lax.cond(wanted, lambda m: visit(start, size, m), lambda m: m, merged)
            return (start + size, merged), None

        # The start is carried: a list of starts would be memory that grows with the capacity.
        step = jax.checkpoint(one, prevent_cse=False)
        return lax.scan(step, (first, merged), length=blocks)[0][1]

    begin = jnp.int32(region.first)
    if coarse == fine:
        return walk(merged, begin, -(-region.size // fine), fine, jnp.int32(stop))
    # Tokens behind the last of these queries need not be walked to.
    near = jnp.minimum(length, jnp.max(sight.queries, axis=1) + 1)
    filled = jnp.clip(layout.occupied(near) - region.first, 0, region.size) // coarse * coarse
    merged = walk(merged, begin, region.size // coarse, coarse, begin + filled)
    return walk(merged, begin + filled, -(-coarse // fine), fine, jnp.int32(stop))


_PATHS = {"blocks": _blockwise, "reference": _at_once}


def _merge(merged: _Merged, scores: Array, seen: Array, values: Array) -> _Merged:
    """Take one more block in, by the online softmax."""
    highest, total, mixed = merged
    scores = jnp.where(seen, scores, _LOWEST)
    new_highest = jnp.maximum(highest, scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - new_highest[..., None]), 0.0)
    shrink = jnp.exp(highest - new_highest)
    total = total * shrink + weights.sum(-1)
    return (
        new_highest,
        total,
        mixed * shrink[..., None] + _mix(weights, values),
    )


def _present(values: Array, positions: Array) -> Array:
    """Values [batch, kv_heads, n, head_dim], zero in slots that hold nothing: what an earlier text
    left there may be no number, and no weight makes that nothing."""
    return jnp.where(positions[:, None, :, None] >= 0, values, 0)


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


def _check_queries(queries: Queries, held: LayerCache, batch: int) -> None:
    shape = jnp.shape(queries)
    fits = len(shape) == 4 and shape[0] == batch and shape[3] == held.head_dim
    if not fits or shape[1] % held.kv_heads or 0 in shape[1:3]:
        raise ValueError(
            f"queries [batch, heads, new, head_dim] {list(shape)} do not fit keys with "
            f"batch={batch}, kv_heads={held.kv_heads}, head_dim={held.head_dim}"
        )
    if not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ValueError(f"queries must be floating-point numbers, got {queries.dtype}")


def _grouped(queries: Mixed, held: LayerCache) -> Array:
    """Queries [batch, heads, new, head_dim] as [batch, kv_heads, group, new, head_dim]."""
    batch, heads, new, head_dim = queries.shape
    return queries.reshape(batch, held.kv_heads, heads // held.kv_heads, new, head_dim)


def _scale(queries: Queries, scale: float | None) -> float:
    return queries.shape[3] ** -0.5 if scale is None else scale
