"""Tiles of a store for the TPU kernel, and products with them.

Each codec that the kernel can read registers its versions of ``can_tile`` and ``tiles_of`` here.
Tiles contain codes as plain numbers. Scales per token are not applied to tiles but to scores and
weights, which are much smaller arrays.

If a token has several scales, one per group of channels, queries are repeated once per group, with
zeros in the channels of the other groups. One matrix product then gives the products of all groups.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.attention.kernels.common import DType, KernelInputs
from kvjax.codecs import Centered, Codebook, Codec, Float8, Integer, Raw, Store
from kvjax.codecs.integer import Packed
from kvjax.codecs.scales import FIELDS, Scaled, ScaledCodec
from kvjax.codecs.wrappers import CenteredStore
from kvjax.core.typing import Array
from kvjax.placement.order import LaneTiled, Orders, RowTiled


class Tile(NamedTuple):
    """A tile of keys or values: ``numbers * scale + offset``.

    ``numbers`` is [kv_heads, tokens, lanes]. The lanes consist of groups of ``head_dim`` lanes.
    Only the group with the index ``lane_group`` belongs to the tile's tokens. If ``transposed``,
    ``numbers`` is [kv_heads, head_dim, tokens].
    ``scale`` and ``offset`` are float32[kv_heads, groups, tokens], with one number per token and
    group of channels. None means 1 for ``scale`` and 0 for ``offset``.
    """

    numbers: Array
    lane_group: int = 0
    scale: Array | None = None
    offset: Array | None = None
    transposed: bool = False


@functools.singledispatch
def can_tile(codec: Codec, block: int, subblocks: int, head_dim: int) -> bool:
    """Return whether the kernel can read blocks of ``block`` tokens. Each block has ``subblocks``
    subblocks, which are read one after another."""
    return False


@functools.singledispatch
def tiles_of(codec: Codec, store: Store, orders: Orders, index: int, subblocks: int) -> list[Tile]:
    """Return the tokens of one subblock of each block of a store, as one or several tiles. The
    decoded numbers are the sum of the tiles.

    Args:
      codec: a codec that ``can_tile`` accepts.
      store: the stored blocks of a tile, without the axis of rows, in their storage orders.
      orders: the storage orders of the store.
      index: the index of the subblock in each block.
      subblocks: the number of subblocks of a block.
    """
    raise ValueError(f"{codec!r} can't be read tile by tile")


@can_tile.register
def _(codec: Raw, block: int, subblocks: int, head_dim: int) -> bool:
    return not codec.as_bits


@tiles_of.register
def _(codec: Raw, store: Array, orders: Orders, index: int, subblocks: int) -> list[Tile]:
    return [Tile(*orders.subblock(store, index, subblocks), transposed=orders.transposed)]


@can_tile.register
def _(codec: ScaledCodec, block: int, subblocks: int, head_dim: int) -> bool:
    if codec.per not in ("token", "channel"):
        return False
    tokens, channels = codec.groups.sizes(block, head_dim)
    return channels > 1 if codec.per == "token" else tokens * subblocks >= block


@can_tile.register(Integer)
@can_tile.register(Codebook)
def _(codec: Integer | Codebook, block: int, subblocks: int, head_dim: int) -> bool:
    return codec.bits not in (3, 5) and can_tile.dispatch(ScaledCodec)(
        codec, block, subblocks, head_dim
    )


@tiles_of.register(Integer)
@tiles_of.register(Codebook)
def _(
    codec: Integer | Codebook, store: Packed, orders: Orders, index: int, subblocks: int
) -> list[Tile]:
    per_code = subblocks // (8 // codec.bits)  # subblocks per code of a byte
    codes = store.codes.astype(jnp.int32)
    if codec.bits < 8:
        codes = (codes >> (index // per_code * codec.bits)) & (2**codec.bits - 1)
    codes, lane_group = orders.codes.subblock(codes, index % per_code, per_code)
    numbers = codec.unscaled(codes)
    return [_scaled_tile(codec, numbers, lane_group, store, orders, index, subblocks)]


@tiles_of.register
def _(codec: Float8, store: Scaled, orders: Orders, index: int, subblocks: int) -> list[Tile]:
    bits, lane_group = orders.bits.subblock(store.bits.astype(jnp.int32), index, subblocks)
    numbers = _float8_to_float32(bits, *FIELDS[codec.kind])
    return [_scaled_tile(codec, numbers, lane_group, store, orders, index, subblocks)]


@can_tile.register
def _(codec: Centered, block: int, subblocks: int, head_dim: int) -> bool:
    return can_tile(codec.codec, block, subblocks, head_dim)


@tiles_of.register
def _(
    codec: Centered, store: CenteredStore, orders: Orders, index: int, subblocks: int
) -> list[Tile]:
    rest = tiles_of(codec.codec, store.rest, orders.rest, index, subblocks)
    _, tokens, lanes = rest[0].numbers.shape
    mean = _repeat_rows(codec.decode_mean(store), tokens, lanes)
    return [*rest, Tile(mean, rest[0].lane_group)]


def _scaled_tile(
    codec: ScaledCodec,
    numbers: Array,
    lane_group: int,
    store: Packed | Scaled,
    orders: Orders,
    index: int,
    subblocks: int,
) -> Tile:
    """Make a tile of ``numbers`` with the scales and zero points of a store. Scales per channel are
    applied here. Scales per token are applied later, to the products."""
    zero = getattr(store, "zero", None)
    if codec.per == "token":

        def of_tokens(x: Array, order: LaneTiled) -> Array:
            return codec.scale_codec.decode(order.of_subblock(x, index)).astype(jnp.float32)

        offset = None if zero is None else of_tokens(zero, orders.zero)
        return Tile(numbers, lane_group, of_tokens(store.scale, orders.scale), offset)
    _, tokens, lanes = numbers.shape

    def of_channels(x: Array, order: RowTiled) -> Array:
        rows = codec.scale_codec.decode(order.shared_rows(x, index, subblocks))
        return _repeat_rows(rows.astype(jnp.float32), tokens, lanes)

    numbers = numbers * of_channels(store.scale, orders.scale)
    return Tile(numbers if zero is None else numbers + of_channels(zero, orders.zero), lane_group)


def _repeat_rows(rows: Array, tokens: int, lanes: int) -> Array:
    """Repeat rows [kv_heads, blocks, head_dim], which have one row per block. Each is repeated for
    all tokens of its block, and side by side until it fills ``lanes`` lanes. Returns [kv_heads,
    tokens, lanes]."""
    heads, blocks, width = rows.shape
    if width < lanes:
        rows = jnp.concatenate([rows] * (lanes // width), axis=-1)
    wide = jnp.broadcast_to(rows[:, :, None], (heads, blocks, tokens // blocks, lanes))
    return wide.reshape(heads, tokens, lanes)


def _float8_to_float32(bits: Array, fraction: int, bias: int) -> Array:
    """Decode 8-bit floats, given as integers, with integer operations only. Not every device can
    reinterpret the bits as floats."""
    exponent, rest = (bits & 127) >> fraction, bits & (2**fraction - 1)
    # Subnormal numbers have no leading 1, and the exponent of the smallest normal ones.
    significand = jnp.where(exponent > 0, rest + 2**fraction, rest)
    power = jnp.maximum(exponent, 1) - bias - fraction + 127
    size = significand.astype(jnp.float32) * lax.bitcast_convert_type(power << 23, jnp.float32)
    return jnp.where(bits > 127, -size, size)


def repeat_queries(queries: Array, fold: int, groups: int) -> Array:
    """Repeat queries [kv_heads, rows, head_dim] for each of ``fold`` lane groups and each group of
    channels, with zeros in all other lanes. Returns [kv_heads, fold * groups * rows, lanes]."""
    if fold == groups == 1:
        return queries
    head_dim = queries.shape[2]
    wide = jnp.concatenate([queries.astype(jnp.float32)] * fold, axis=2)
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, wide.shape[2]), 2)
    owner = lane // head_dim * groups + lane % head_dim // (head_dim // groups)
    copies = [jnp.where(owner == number, wide, 0.0) for number in range(fold * groups)]
    return jnp.concatenate(copies, axis=1).astype(queries.dtype)


def tile_scores(tile: Tile, queries: Array, inputs: KernelInputs) -> Array:
    """Multiply queries and keys. Returns float32[kv_heads, rows, tokens].

    ``queries`` is the result of ``repeat_queries``, [kv_heads, fold * groups * rows, lanes].
    """
    groups = inputs.groups[0]
    rows = queries.shape[1] // (inputs.fold * groups)
    own = queries[:, tile.lane_group * groups * rows : (tile.lane_group + 1) * groups * rows]
    products = _dot(own, tile.numbers.astype(queries.dtype), 1 if tile.transposed else 2)
    total = jnp.float32(0)
    for group in range(groups):
        of_group = slice(group * rows, (group + 1) * rows)
        product = products[:, of_group]
        if tile.scale is not None:
            product *= tile.scale[:, group : group + 1]
        if tile.offset is not None:
            sums = own[:, of_group].astype(jnp.float32).sum(-1, keepdims=True)
            product += sums * tile.offset[:, group : group + 1]
        total += product
    return total


def tile_weighted_values(
    tile: Tile,
    weights: Array,
    present: Array,
    present_rows: Callable[[], Array],
    inputs: KernelInputs,
    dtype: DType,
) -> Array:
    """Multiply weights [kv_heads, rows, tokens] and values. Returns float32[kv_heads, rows, lanes].

    Args:
      tile: the values.
      weights: the softmax weights.
      present: a mask of the tokens that exist, along the last axis. Slots without tokens and reads
        past the end of an array may hold NaN, and 0 * NaN is NaN.
      present_rows: returns the same mask along the second-to-last axis.
      inputs: the kernel's inputs.
      dtype: the dtype to multiply in.
    """
    groups, numbers = inputs.groups[1], tile.numbers
    if tile.scale is not None and dtype == jnp.float16:
        dtype = jnp.float32  # a weight times a scale may underflow in float16
    if tile.scale is None:
        mask = present if tile.transposed else present_rows()
        numbers = jnp.where(mask, numbers, jnp.zeros_like(numbers))
        groups = 1
    rows, lanes = weights.shape[1], numbers.shape[1 if tile.transposed else 2]
    scales = [None] * groups
    if tile.scale is not None:
        scales = [jnp.where(present, tile.scale[:, n : n + 1], 0.0) for n in range(groups)]
    scaled = [weights if scale is None else weights * scale for scale in scales]
    own = scaled[0] if groups == 1 else jnp.concatenate(scaled, axis=1)
    values = _dot(own.astype(dtype), numbers.astype(dtype), 2 if tile.transposed else 1)
    if groups == inputs.fold == 1 and tile.offset is None:
        return values
    lane = lax.broadcasted_iota(jnp.int32, (1, 1, lanes), 2)
    width = lanes // inputs.fold
    total = jnp.zeros((weights.shape[0], rows, lanes), jnp.float32)
    for group in range(groups):
        part = values[:, group * rows : (group + 1) * rows]
        if tile.offset is not None:
            offset = jnp.where(present, tile.offset[:, group : group + 1], 0.0)
            part += (weights * offset).sum(-1, keepdims=True)
        in_group = lane % width // (width // groups) == group
        total += jnp.where(in_group & (lane // width == tile.lane_group), part, 0.0)
    return total


def times_matrix(x: Array, matrix: Array) -> Array:
    """Multiply rows [kv_heads, rows, head_dim] by a matrix [head_dim, head_dim], in float32."""
    return _dot(x, jnp.broadcast_to(matrix, (x.shape[0], *matrix.shape)), 1)


def _dot(a: Array, b: Array, axis: int) -> Array:
    """Compute batched products that contract the last axis of ``a`` with the axis ``axis`` of
    ``b``."""
    precision = lax.Precision.HIGHEST if b.dtype == jnp.float32 else None
    return lax.dot_general(
        a,
        b,
        (((2,), (axis,)), ((0,), (0,))),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
