"""Products with tiles of a store, in a kernel: scales of tokens are undone in scores and weights.

Groups of channels that have a scale each are multiplied one beside the other: queries once for each
group, with zeros in the channels of the others.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from kvjax.attention.kernels.common import Reading
from kvjax.codecs._tiles import Tile
from kvjax.core.typing import Array


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Products of rows with tokens' lanes (``axis`` 2), or with tokens (1)."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((2,), (axis,)), ((0,), (0,))), precision=precision,
        preferred_element_type=jnp.float32,
    )  # fmt: skip


def scores_of(tile: Tile, queries: Array, reading: Reading) -> Array:
    """Queries [kv_heads, sides * groups * rows, lanes] times a tile's keys: float32[kv_heads,
    rows, tokens]."""
    groups = reading.groups[0]
    each = queries.shape[1] // (reading.sides * groups)
    own = queries[:, tile.side * groups * each : (tile.side + 1) * groups * each]
    products = _dot(own, tile.numbers.astype(queries.dtype), 1 if tile.turned else 2)
    total = jnp.float32(0)
    for group in range(groups):
        some = slice(group * each, (group + 1) * each)
        product = products[:, some]
        if tile.factor is not None:
            product *= tile.factor[:, group : group + 1]
        if tile.offset is not None:
            whole = own[:, some].astype(jnp.float32).sum(-1, keepdims=True)
            product += whole * tile.offset[:, group : group + 1]
        total += product
    return total


def mixture_of(
    tile: Tile, weights: Array, along: Array, down: Callable[[], Array], reading: Reading,
    dtype: Any,
) -> Array:  # fmt: skip
    """Weights [kv_heads, rows, tokens] times a tile's values: float32[kv_heads, rows, lanes].
    ``along``, ``down``: which tokens there are, in the last axis or the one before: no weight makes
    0 of what is no number, and behind the end of an array there may be anything."""
    groups, numbers = reading.groups[1], tile.numbers
    if tile.factor is not None and dtype == jnp.float16:
        dtype = jnp.float32  # a weight times a scale may be too small for 16 bits
    if tile.factor is None:
        there = along if tile.turned else down()
        numbers = jnp.where(there, numbers, jnp.zeros_like(numbers))
        groups = 1
    rows, lanes = weights.shape[1], numbers.shape[1 if tile.turned else 2]
    factors = [None] * groups
    if tile.factor is not None:
        factors = [jnp.where(along, tile.factor[:, n : n + 1], 0.0) for n in range(groups)]
    scaled = [weights if factor is None else weights * factor for factor in factors]
    own = scaled[0] if groups == 1 else jnp.concatenate(scaled, axis=1)
    mixed = _dot(own.astype(dtype), numbers.astype(dtype), 2 if tile.turned else 1)
    if groups == reading.sides == 1 and tile.offset is None:
        return mixed
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, lanes), 2)
    width = lanes // reading.sides
    total = jnp.zeros((weights.shape[0], rows, lanes), jnp.float32)
    for group in range(groups):
        part = mixed[:, group * rows : (group + 1) * rows]
        if tile.offset is not None:
            offset = jnp.where(along, tile.offset[:, group : group + 1], 0.0)
            part += (weights * offset).sum(-1, keepdims=True)
        mine = lane % width // (width // groups) == group
        total += jnp.where(mine & (lane // width == tile.side), part, 0.0)
    return total


def times(mixed: Array, matrix: Array) -> Array:
    """Rows [kv_heads, rows, head_dim] times a matrix [head_dim, head_dim], float32."""
    return _dot(mixed, jnp.broadcast_to(matrix, (mixed.shape[0], *matrix.shape)), 1)


def spread_out(queries: Array, sides: int, groups: int) -> Array:
    """Queries [kv_heads, rows, head_dim] once for every side and group, with zeros in the lanes of
    the others: [kv_heads, sides * groups * rows, lanes]."""
    if sides == groups == 1:
        return queries
    head_dim = queries.shape[2]
    wide = jnp.concatenate([queries.astype(jnp.float32)] * sides, axis=2)
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, wide.shape[2]), 2)
    which = lane // head_dim * groups + lane % head_dim // (head_dim // groups)
    each = [jnp.where(which == number, wide, 0.0) for number in range(sides * groups)]
    return jnp.concatenate(each, axis=1).astype(queries.dtype)
