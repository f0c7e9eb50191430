"""Softmax over a prefix of every segment, of one of few sizes that the step itself chooses.

Where a conditional is cheap, the walk of ``blocks.py`` follows the filled length block by block. An
accelerator is given its work ahead, and may have to wait for its host at every conditional: here
there is one a layer, over at most ``BUCKETS`` programs that are all compiled with the step.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.attention.blocks import LOWEST, Turned, blockwise
from kvjax.attention.mask import Sight
from kvjax.attention.segments import Segment
from kvjax.attention.softmax import across
from kvjax.core.typing import Array, Mixed, Rows

BUCKETS = 8
"""Sizes of prefix, at most: each is a program of its own in every layer."""
LEAST = 256
"""Tokens of the smallest, at least."""
TILE = 128
"""Sizes are multiples of it."""
PIECE = 2048
"""Tokens of a prefix that are sliced, decoded or fetched together, at most."""
SHORT = 32
"""Queries of a call, at most: more of them would make scores of queries times capacity."""


class Partial(NamedTuple):
    """A softmax over some of the keys, float32: the ``highest`` score and the ``total`` of weights
    [batch, kv_heads, rows], and the weighted sum of values, ``mixed`` [batch, kv_heads, rows,
    head_dim]."""

    highest: Array
    total: Array
    mixed: Array


def bucketed(
    both: Turned, kv_heads: int, parts: list[Segment], length: Rows, sight: Sight
) -> Mixed:
    """Softmax over the smallest prefixes that hold all that is filled; long calls are walked."""
    if both[0].shape[2] > SHORT:
        return blockwise(both, kv_heads, parts, length, sight)
    rows = grouped(both, kv_heads)

    def over(tokens: int) -> Callable[[], Partial]:
        def prefixes() -> Partial:
            found = (
                prefix(part, _units(part, tokens), rows[1 if part.capped else 0], sight)
                for part in parts
            )
            return functools.reduce(merged, found)

        return prefixes

    sizes = bucket_sizes([part.size * part.unit for part in parts])
    near = jnp.minimum(length, jnp.max(sight.queries, axis=1) + 1)
    filled = [part.filled(near) for part in parts]
    beyond = [
        jnp.stack([n > _units(part, size) for n, part in zip(filled, parts, strict=True)]).any()
        for size in sizes[:-1]
    ]
    if not beyond:
        return finished([over(sizes[0])()], both[0], sight)
    index = jnp.stack(beyond).sum(dtype=jnp.int32)
    # Devices that divide the keys may each take another size: they meet behind it.
    return finished([lax.switch(index, [over(size) for size in sizes])], both[0], sight)


def bucket_sizes(tokens: list[int]) -> list[int]:
    """Tokens of the prefixes of segments of so many: the largest whole, and halves of it."""
    found = [max(tokens)]
    while len(found) < BUCKETS and found[-1] > LEAST:
        found.append(-(-found[-1] // (2 * TILE)) * TILE)
    return found[::-1]


def grouped(both: Turned, kv_heads: int) -> tuple[Array, Array]:
    """Queries [batch, heads, new, head_dim] as rows [batch, kv_heads, group * new, head_dim]."""
    batch, heads, new, head_dim = both[0].shape
    shape = (batch, kv_heads, heads // kv_heads * new, head_dim)
    return both[0].reshape(shape), both[1].reshape(shape)


def prefix(segment: Segment, units: int, rows: Array, sight: Sight) -> Partial:
    """The softmax over a segment's first ``units``. A long prefix is taken in pieces, a number that
    the compiler knows: what is made of the stores is never larger than one of them."""
    piece = min(units, max(PIECE // segment.unit, 1))
    stop = segment.first + units

    def over(start: Array) -> Partial:
        # A last piece that would pass the end is moved down; what it shares is not seen twice.
        return _softmax(segment, jnp.minimum(start, stop - piece), start, piece, rows, sight)

    def one(carry: tuple[Array, Partial], _: None) -> tuple[tuple[Array, Partial], None]:
        start, found = carry
        return (start + piece, merged(found, over(start))), None

    begin = jnp.int32(segment.first)
    if piece == units:
        return over(begin)
    nothing = jnp.zeros(rows.shape[:3], jnp.float32)
    empty = Partial(nothing + LOWEST, nothing, jnp.zeros(rows.shape, jnp.float32))
    return lax.scan(one, (begin, empty), length=-(-units // piece))[0][1]


def merged(a: Partial, b: Partial) -> Partial:
    """The softmax over the keys of both, by their log-sum-exp (Milakov and Gimelshein,
    arXiv:1805.02867)."""
    highest = jnp.maximum(a.highest, b.highest)
    shrunk = [jnp.exp(part.highest - highest) for part in (a, b)]
    total = a.total * shrunk[0] + b.total * shrunk[1]
    mixed = a.mixed * shrunk[0][..., None] + b.mixed * shrunk[1][..., None]
    return Partial(highest, total, mixed)


def finished(parts: list[Partial], queries: Mixed, sight: Sight) -> Mixed:
    """The mixture over the keys of all parts, as ``queries`` are shaped; zeros where none is
    seen."""
    found = parts[0]
    for part in parts[1:]:
        found = merged(found, part)
    total, mixed = across(sight.axis, *found)
    mixed = mixed / jnp.where(total == 0, 1.0, total)[..., None]
    return mixed.reshape(queries.shape).astype(queries.dtype)


def _units(segment: Segment, tokens: int) -> int:
    """Units of a segment's prefix of so many tokens."""
    return min(segment.size, -(-tokens // segment.unit))


def _softmax(
    segment: Segment, origin: Array, start: Array, size: int, rows: Array, sight: Sight
) -> Partial:
    """Over ``size`` units from ``origin`` on, of which those from ``start`` on count."""
    batch, kv_heads, count, _ = rows.shape
    new = sight.queries.shape[1]
    positions = segment.positions(origin + jnp.arange(size, dtype=jnp.int32), start)
    stores = segment.part_of(origin, size)
    products = segment.scores(rows, stores[0], positions)
    products = products.reshape(batch, kv_heads, count // new, new, -1)
    scores, seen = sight.scores(products, positions, part=segment.part, capped=segment.capped)
    shape = (batch, kv_heads, count, positions.shape[1])
    seen = jnp.broadcast_to(seen, products.shape).reshape(shape)
    scores = jnp.where(seen, scores.reshape(shape), LOWEST)
    highest = lax.stop_gradient(scores.max(-1))
    weights = jnp.where(seen, jnp.exp(scores - highest[..., None]), 0.0)
    mixed = segment.mix(weights, stores[1], positions, rows.dtype.name)
    return Partial(highest, weights.sum(-1), mixed)
