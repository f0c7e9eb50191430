"""A kernel for a few queries a row over a long text: flash decoding, in Pallas.

The filled part of a row is divided among programs, each of which walks its share with the online
softmax, and their results are merged by log-sum-exp (Dao, Haziza, Massa and Sizov, "Flash-Decoding
for long-context inference", 2023). Stores are read as they lie: a codec's own ``decode`` runs in
the kernel, on a tile, and no decoded tile leaves it.

It is plain ``pallas_call``, for GPUs, where Pallas lowers it by Triton. No device has run it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kvjax.attention.kernels.common import compiled
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.codecs import Codec, Store
from kvjax.core.typing import Array

TILE = 64
"""Tokens that a program reads together, at least a block."""
SPLITS = 16
"""Programs that share a row's text."""
ROWS = 16
"""Rows of queries that a matrix unit takes together, at least."""


def decode(
    queries: Array,
    stores: tuple[Store, Store],
    seen: Array,
    codecs: tuple[Codec, Codec],
    *,
    unit: int = 1,
    first: int = 0,
    scale: float = 1.0,
    soft_cap: float | None = None,
    table: Array | None = None,
) -> Partial:
    """The softmax of rows of queries over a store, not yet divided by its total.

    Args:
      queries: [batch, kv_heads, rows, head_dim].
      stores: keys and values as ``codecs`` keep them, units of ``unit`` tokens on axis 2.
      seen: bool[batch, rows or 1, tokens], which tokens of its text a row of queries sees. Tiles
        before the first and behind the last that any of them sees are not read.
      first: the unit of the store where the text begins.
      scale, soft_cap: as of ``attend``.
      table: int32[batch, tiles], where each tile of a row's text stands, counted in tiles; None is
        one after the other. With a table the stores' batch may be 1: a pool of all rows' tiles.
    """
    batch, kv_heads, rows, head_dim = queries.shape
    leaves, tree = jax.tree.flatten(stores)
    size = seen.shape[2] // unit
    tile = min(max(TILE // unit, 1), size)
    tile = 1 << tile.bit_length() - 1  # a power of two
    kernel = functools.partial(
        _kernel, tree, codecs, unit, first, tile, size, scale, soft_cap, table is not None
    )
    padded = max(ROWS, pl.next_power_of_2(rows))
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    if seen.shape[1] > 1:
        seen = jnp.pad(seen, ((0, 0), (0, padded - rows), (0, 0)))
    arrays = [queries, _bounds(seen, unit), seen.astype(jnp.int8)]
    arrays += [] if table is None else [table]
    specs = [_spec(x.shape, kv_heads, heads=n == 0) for n, x in enumerate(arrays)]
    specs += [_spec(x.shape, kv_heads, heads=True) for x in leaves]
    found = [(padded,), (padded,), (padded, head_dim)]

    def run(*arrays: Array, interpret: bool) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(batch, kv_heads, SPLITS),
            in_specs=specs,
            out_specs=[_share_of(each) for each in found],
            out_shape=[
                jax.ShapeDtypeStruct((batch, kv_heads, SPLITS, *each), jnp.float32)
                for each in found
            ],
            interpret=interpret,
            compiler_params=triton.CompilerParams(),
        )(*arrays)

    parts = compiled(run, *arrays, *leaves)
    return Partial(*(x[:, :, :, :rows] for x in parts)).joined(2)


def _kernel(
    tree: Any,
    codecs: tuple[Codec, Codec],
    unit: int,
    first: int,
    tile: int,
    size: int,
    scale: float,
    soft_cap: float | None,
    paged: bool,
    *refs: Any,
) -> None:
    """One program: a share of a row's tiles, of ``tile`` of its ``size`` units each, for the
    queries of one head of keys. ``paged``: whether the tiles stand in a table."""
    queries_ref, bounds_ref, seen_ref, *rest = refs
    highest_ref, total_ref, mixed_ref = rest[-3:]
    table_ref, stores = (rest[0], rest[1:-3]) if paged else (None, rest[:-3])
    queries = queries_ref[...]
    low, high = bounds_ref[0] // tile, (bounds_ref[1] + tile - 1) // tile
    share = (high - low + SPLITS - 1) // SPLITS
    begin = low + pl.program_id(2) * share
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = carry
        # A last tile that would pass the end is moved down; what it shares is not seen twice.
        start = jnp.minimum(number * tile, size - tile)
        origin = first + (start if table_ref is None else table_ref[number] * tile)
        block = jax.tree.unflatten(tree, [ref[pl.ds(origin, tile)] for ref in stores])
        keys, values = (
            codec.decode(store).reshape(tile * unit, -1).astype(queries.dtype)
            for codec, store in zip(codecs, block, strict=True)
        )
        at = start * unit + jnp.arange(tile * unit, dtype=jnp.int32)
        seen = seen_ref[:, pl.ds(start * unit, tile * unit)].astype(jnp.int32)
        seen = jnp.where(at[None, :] >= number * tile * unit, seen, 0)
        scores = dot(queries, keys.T) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        scores = jnp.where(jnp.broadcast_to(seen, scores.shape) > 0, scores, LOWEST)
        above = jnp.maximum(highest, jnp.maximum(scores.max(1), LOWEST / 2))  # see Partial.of
        weights = jnp.exp(scores - above[:, None])
        shrink = jnp.exp(highest - above)
        # No weight makes 0 of what is no number, in slots that hold nothing.
        values = jnp.where(seen.max(0)[:, None] > 0, values, jnp.zeros_like(values))
        mixed = mixed * shrink[:, None] + dot(weights.astype(values.dtype), values)
        return above, total * shrink + weights.sum(1), mixed

    nothing = jnp.zeros(queries.shape[0], jnp.float32)
    found = lax.fori_loop(
        begin, jnp.minimum(begin + share, high), visit,
        (nothing + LOWEST, nothing, jnp.zeros(queries.shape, jnp.float32)),
    )  # fmt: skip
    highest_ref[...], total_ref[...], mixed_ref[...] = found


def _bounds(seen: Array, unit: int) -> Array:
    """int32[batch, 2]: the first unit of which anything is seen, and the one behind the last."""
    units = seen.any(1).reshape(seen.shape[0], -1, unit).any(2)
    numbers = jnp.arange(units.shape[1], dtype=jnp.int32)
    last = jnp.max(jnp.where(units, numbers + 1, 0), axis=1)
    first = jnp.min(jnp.where(units, numbers, units.shape[1]), axis=1)
    return jnp.stack([jnp.minimum(first, last), last], axis=1)


def _spec(shape: tuple[int, ...], kv_heads: int, heads: bool) -> pl.BlockSpec:
    """A row of an array, of one head where it has heads; what all share stands at index 0."""
    rest = (0,) * (len(shape) - (2 if heads else 1))
    rows = int(shape[0] > 1)
    if not heads:
        return pl.BlockSpec((None, *shape[1:]), lambda b, h, s: (b * rows, *rest))
    own = int(shape[1] > 1 or kv_heads == 1)
    return pl.BlockSpec((None, None, *shape[2:]), lambda b, h, s: (b * rows, h * own, *rest))


def _share_of(shape: tuple[int, ...]) -> pl.BlockSpec:
    """What one program finds of a row and a head."""
    rest = (0,) * len(shape)
    return pl.BlockSpec((None, None, None, *shape), lambda b, h, s: (b, h, s, *rest))
