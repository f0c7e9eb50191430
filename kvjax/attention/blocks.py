"""Softmax over segments: block by block, merged as it goes, or in one piece."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention.mask import Sight
from kvjax.attention.segments import Segment
from kvjax.attention.softmax import across
from kvjax.core.device import on_cpu
from kvjax.core.typing import Array, Mixed, Rows

FINE = 128
"""Tokens of a block where the filled part ends."""
COARSE = 1024
"""Tokens of a block elsewhere, at most: large enough that its copy is shared among the CPU's
threads."""
NUMBERS = 3 * 2**17
"""Numbers of a block's keys, at most: small enough that its copy stays in the CPU's caches."""
QUERIES = 256
"""Queries that walk the blocks together: more of them would see more blocks in vain."""
WIDENED = 16
"""Rows below which a CPU multiplies 16-bit numbers faster after widening them."""
FEW = 16
"""Rows of queries that take a coarse block more rather than walk fine ones."""
SPARE = 4
"""Of that block, the part that must be filled."""
FILLED = 5 / 8
"""Of a segment, the part that must be seen for it to be multiplied in one piece."""
SCORES = 4
"""Arrays of scores that a segment in one piece is counted with: products, and turned round, masked
scores, weights."""
LOWEST = -2e38
"""The score of what is not seen. Scores below half of it are taken for it."""

Turned = tuple[Mixed, Mixed]
"""Queries [batch, heads, new, head_dim] at their positions, and capped as the layout's sinks want
them."""

_Merged = tuple[Array, Array, Array]
"""Of the blocks so far, float32: the highest score and the sum of weights [batch, kv_heads, rows],
and the weighted sum of values [batch, kv_heads, rows, head_dim]."""


def at_once(both: Turned, kv_heads: int, parts: list[Segment], length: Rows, sight: Sight) -> Mixed:
    """Softmax over all slots together."""
    found = []
    for segment in parts:
        units = segment.first + jnp.arange(segment.size, dtype=jnp.int32)
        positions = segment.positions(units, segment.first)
        stores = segment.part_of(jnp.int32(segment.first), segment.size)
        grouped = _grouped(both[1 if segment.capped else 0], kv_heads)
        found.append((stores, positions, _scored(segment, stores, grouped, positions, sight)))
    scores = jnp.concatenate([scores for _, _, (scores, _) in found], axis=-1)
    seen = jnp.concatenate([seen for _, _, (_, seen) in found], axis=-1)
    highest = lax.stop_gradient(jnp.where(seen, scores, LOWEST).max(-1, keepdims=True))
    total, mixed = 0.0, 0.0
    for segment, (stores, positions, (scores, seen)) in zip(parts, found, strict=True):
        weights = jnp.where(seen, jnp.exp(scores - highest), 0.0)
        total += weights.sum(-1, keepdims=True)
        mixed += segment.mix(weights, stores[1], positions, both[0].dtype.name)
    total, mixed = across(
        sight.axis, highest[..., 0], jnp.asarray(total)[..., 0], jnp.asarray(mixed)
    )
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return mixed.reshape(both[0].shape).astype(both[0].dtype)


def blockwise(
    both: Turned, kv_heads: int, parts: list[Segment], length: Rows, sight: Sight
) -> Mixed:
    """Softmax block by block, for some queries at a time."""
    # The same queries twice are carried once.
    kinds = both[:1] if both[0] is both[1] else both
    new = both[0].shape[2]
    whole = new // QUERIES * QUERIES if new > QUERIES else 0

    def some(turned: tuple[Array, ...], at: Array) -> Array:
        kinds = turned[0], turned[-1]
        return _walk(kinds, kv_heads, parts, length, replace(sight, queries=at))

    def next_part(split: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], None]:
        turned = tuple(lax.dynamic_index_in_dim(x, number, keepdims=False) for x in split)
        mixed = some(turned, lax.dynamic_index_in_dim(at, number, keepdims=False))
        # Written over the queries that it is of: zeros to write over, which depend on nothing, a
        # CPU makes for all layers before the first, and keeps.
        return (lax.dynamic_update_index_in_dim(split[0], mixed, number, 0), *split[1:]), None

    mixed = []
    if whole:
        count = whole // QUERIES
        split = tuple(jnp.stack(jnp.split(x[:, :, :whole], count, axis=2)) for x in kinds)
        at = jnp.stack(jnp.split(sight.queries[:, :whole], count, axis=1))
        found = lax.scan(next_part, split, jnp.arange(count))[0][0]
        mixed = list(found)
    if whole < new:
        rest = tuple(x[:, :, whole:] for x in kinds)
        mixed.append(some(rest, sight.queries[:, whole:]))
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=2)


def _walk(both: Turned, kv_heads: int, parts: list[Segment], length: Rows, sight: Sight) -> Mixed:
    """The segments, one after the other."""
    grouped = [_grouped(queries, kv_heads) for queries in both]
    rows = grouped[0].shape[:-1]
    merged = (
        jnp.full(rows, LOWEST, jnp.float32),
        jnp.zeros(rows, jnp.float32),
        jnp.zeros(grouped[0].shape, jnp.float32),
    )
    for segment in parts:
        merged = _walk_segment(merged, segment, grouped[1 if segment.capped else 0], length, sight)
    total, mixed = across(sight.axis, *merged)
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return mixed.reshape(both[0].shape).astype(both[0].dtype)


def _walk_segment(
    merged: _Merged, segment: Segment, grouped: Array, length: Rows, sight: Sight
) -> _Merged:
    """In one piece where that is faster, else block by block."""
    whole = segment.whole and on_cpu() and _fits(segment, grouped) and _all_seen(segment, sight)

    def walk(merged: _Merged) -> _Merged:
        narrow = grouped.dtype.itemsize == 2 and grouped.shape[2] < WIDENED and on_cpu()
        wide = grouped.astype(jnp.float32) if narrow else grouped
        return _by_blocks(merged, segment, wide, length, sight)

    if not whole:
        return walk(merged)
    # Slices are copied before they are multiplied, a whole array is not: worth it where most of it
    # is filled. What an earlier text left in empty slots may be no number, which no weight makes 0:
    # then the blocks are walked, which leave it out.
    full = jnp.max(segment.filled(length)) >= FILLED * segment.size

    @jax.checkpoint
    def in_one_piece(merged: _Merged) -> tuple[_Merged, Array]:
        units = jnp.arange(segment.size, dtype=jnp.int32)
        stores, positions = (segment.keys, segment.values), segment.positions(units, 0)
        found = _merged(merged, segment, stores, grouped, positions, sight, whole=True)
        return found, jnp.all(jnp.isfinite(found[2]))

    found, done = lax.cond(full, in_one_piece, lambda merged: (merged, jnp.bool_(False)), merged)
    return lax.cond(done, lambda found, _: found, lambda _, merged: walk(merged), found, merged)


def _fits(segment: Segment, grouped: Array) -> bool:
    """Whether a segment's numbers can be multiplied as they are, and all of its scores take no more
    memory than the copies of a block do, in float32: so memory does not grow with the capacity."""
    batch, kv_heads, rows, head_dim = grouped.shape
    stored = {leaf.dtype.name for leaf in jax.tree.leaves((segment.keys, segment.values))}
    stored |= {str(codec.dtype) for codec in segment.codecs}
    # Kept as bits, or in float16, all would be copied in another form first.
    if stored != {grouped.dtype.name} or grouped.dtype == jnp.float16:
        return False
    coarse = _block_sizes(segment.size, segment.unit, batch * kv_heads * head_dim)[1]
    return SCORES * rows * segment.size <= 2 * coarse * head_dim


def _all_seen(segment: Segment, sight: Sight) -> bool:
    """Whether queries may see most of a segment: else the blocks that they do not see are left
    out."""
    return min(sight.window or segment.size, sight.chunk or segment.size) >= FILLED * segment.size


def _by_blocks(
    merged: _Merged, segment: Segment, grouped: Array, length: Rows, sight: Sight
) -> _Merged:
    """Coarse blocks up to where all is filled, fine ones after that."""
    stop = segment.first + segment.size
    if segment.part == "raw" and segment.size <= 2 * FINE:
        fine = coarse = segment.size
    else:
        numbers = grouped.shape[0] * grouped.shape[1] * grouped.shape[3]
        fine, coarse = _block_sizes(segment.size, segment.unit, numbers)

    def visit(start: Array, size: int, merged: _Merged) -> _Merged:
        # A last block that would pass the end is moved down; what it shares is not seen twice.
        origin = jnp.minimum(start, stop - size)
        units = origin + jnp.arange(size, dtype=jnp.int32)
        positions = segment.positions(units, start)
        stores = segment.part_of(origin, size)
        return _merged(merged, segment, stores, grouped, positions, sight)

    def walk(merged: _Merged, first: Array, blocks: int, size: int, end: Array) -> _Merged:
        def one(carry: tuple[Array, _Merged], _: None) -> tuple[tuple[Array, _Merged], None]:
            start, merged = carry
            wanted = (start < end) & sight.reaches(*segment.span(start, size), segment.part)
            merged = lax.cond(wanted, lambda m: visit(start, size, m), lambda m: m, merged)
            return (start + size, merged), None

        # The start is carried: a list of starts would be memory that grows with the capacity.
        step = jax.checkpoint(one, prevent_cse=False)
        return lax.scan(step, (first, merged), length=blocks)[0][1]

    begin = jnp.int32(segment.first)
    if coarse == fine:
        return walk(merged, begin, -(-segment.size // fine), fine, jnp.int32(stop))
    # Tokens behind the last of these queries need not be walked to.
    near = jnp.minimum(length, jnp.max(sight.queries, axis=1) + 1)
    filled = jnp.clip(segment.filled(near), 0, segment.size)
    # Blocks behind a tail may be on the host, from where only what is filled is fetched.
    rounded = grouped.shape[2] < FEW and segment.unit == 1
    rest = coarse // SPARE if rounded else coarse - 1
    whole = (filled + coarse - 1 - rest) // coarse
    behind = begin + whole * coarse
    merged = walk(merged, begin, -(-segment.size // coarse), coarse, behind)

    def finely(merged: _Merged) -> _Merged:
        return walk(merged, behind, -(-rest // fine), fine, jnp.int32(stop))

    # A few turns of a loop that skip all they see cost as much as a small block.
    return lax.cond(filled > whole * coarse, finely, lambda merged: merged, merged)


def _merged(
    merged: _Merged, segment: Segment, stores: tuple, grouped: Array, positions: Array,
    sight: Sight, *, whole: bool = False,
) -> _Merged:  # fmt: skip
    """One block more, or the ``whole`` segment, with the values of empty slots as they are."""
    scores, seen = _scored(segment, stores, grouped, positions, sight, long=whole)
    highest, total, mixed = merged
    scores = jnp.where(seen, scores, LOWEST)
    # Never as low as what is not seen, whose weights are 0 then: no choice has to make them so.
    new_highest = jnp.maximum(highest, jnp.maximum(scores.max(-1), LOWEST / 2))
    weights = jnp.exp(scores - new_highest[..., None])
    shrink = jnp.exp(highest - new_highest)
    total = total * shrink + weights.sum(-1)
    more = segment.mix(weights, stores[1], None if whole else positions, grouped.dtype.name)
    return new_highest, total, mixed * shrink[..., None] + more


def _scored(
    segment: Segment, stores: tuple, grouped: Array, positions: Array, sight: Sight,
    *, long: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Scores float32[batch, kv_heads, rows, tokens], and which count, in the same shape."""
    batch, kv_heads, rows, _ = grouped.shape
    new = sight.queries.shape[1]
    products = segment.scores(grouped, stores[0], positions, long=long)
    products = products.reshape(batch, kv_heads, rows // new, new, -1)
    scores, seen = sight.scores(products, positions, part=segment.part, capped=segment.capped)
    shape = (batch, kv_heads, rows, positions.shape[1])
    return scores.reshape(shape), jnp.broadcast_to(seen, products.shape).reshape(shape)


def _block_sizes(size: int, unit: int = 1, numbers: int = 1) -> tuple[int, int]:
    """Fine and coarse block sizes of ``size`` units of ``unit`` tokens, whose keys have so many
    numbers each: a coarse block is a quarter of them at most, rounded up to whole fine ones."""
    fine = min(max(FINE // unit, 1), size)
    tokens = min(COARSE, max(NUMBERS // numbers, FINE))
    most = tokens // unit // fine
    return fine, fine * max(min(-(-size // (4 * fine)), most), 1)


def _grouped(queries: Mixed, kv_heads: int) -> Array:
    """Queries [batch, heads, new, head_dim] as [batch, kv_heads, group * new, head_dim]."""
    batch, heads, new, head_dim = queries.shape
    return queries.reshape(batch, kv_heads, heads // kv_heads * new, head_dim)
