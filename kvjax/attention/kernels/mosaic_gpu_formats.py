"""Storage formats that the Mosaic GPU kernel reads.

Each codec that the kernel can read registers its version of ``format_of`` here. Numbers are fetched
as rows of channels, as they are stored. Tensor cores multiply 16-bit floats, so other numbers are
converted in shared memory into ``planes`` of 16-bit numbers. A code is converted without applying
its scale: to the code's own value, or to its level in a codebook. A byte with several codes gives
one plane for each code. A float32 number becomes the sum of three 16-bit terms. Scales and zero
points per token are applied to scores and weights. Scales and zero points per channel are applied
to queries and outputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention.kernels.common import DType, core_of
from kvjax.codecs import Centered, Codebook, Codec, Float8, Integer, Raw, Store
from kvjax.codecs.codebook import normal_levels
from kvjax.codecs.scales import FIELDS, ScaledCodec
from kvjax.core.typing import Array

TERMS = 3
"""The number of 16-bit terms whose sum is a 32-bit number, except for about its last bit."""


def terms_of(x: Array, dtype: DType, count: int) -> list[Array]:
    """Split float32 numbers into ``count`` 16-bit terms, whose sum is approximately the number."""
    terms = []
    for n in range(count):
        terms.append(x.astype(dtype))
        if n + 1 < count:
            x = x - terms[-1].astype(jnp.float32)
    return terms


@dataclass(frozen=True)
class StoreFormat:
    """How the kernel reads a codec's store.

    Attributes:
      rows: rows of numbers per unit.
      dtype: the dtype of the stored numbers.
      bits: bits per code; 0 if the numbers are floats.
      fraction: fraction bits of an 8-bit float; 0 for other numbers.
      groups: groups of channels with separate scales per token.
      tokens_per_scale: how many tokens share the scale of a channel; 0 if scales belong to tokens.
      middle: the code of the number 0, for codes without a zero point.
      levels: the value of each code, in ascending order, if it differs from the code itself.
      arrays: the names of the kernel's input arrays, in order.
    """

    rows: int
    dtype: DType
    bits: int = 0
    fraction: int = 0
    groups: int = 1
    tokens_per_scale: int = 0
    middle: float = 0.0
    levels: tuple[float, ...] = ()
    arrays: tuple[str, ...] = ("numbers",)

    @property
    def subblocks(self) -> int:
        """How many subblocks a unit has. Each byte contains one code of each subblock."""
        return 8 // self.bits if self.bits else 1

    @property
    def token_arrays(self) -> tuple[str, ...]:
        """The names of the arrays with numbers per token."""
        return () if self.tokens_per_scale else tuple(x for x in self.arrays if x in SCALES)

    @property
    def offsets_tokens(self) -> bool:
        """Whether the numbers of a token have an offset in addition to a scale."""
        return bool(self.token_arrays) and (self.middle != 0 or "zero" in self.arrays)

    @property
    def offsets_channels(self) -> bool:
        """Whether the numbers of a channel have an offset."""
        shifted = self.tokens_per_scale and (self.middle != 0 or "zero" in self.arrays)
        return bool(shifted) or "mean" in self.arrays

    def terms(self, queries: DType) -> int:
        """Return the number of 16-bit terms of a stored number, if queries have the dtype
        ``queries``."""
        return TERMS if self.dtype == queries == jnp.float32 else 1

    def planes(self, queries: DType, product: DType) -> int:
        """Return the number of planes that are converted in shared memory; 0 if the stored numbers
        are multiplied directly. ``queries`` and ``product`` are the dtypes of queries and of
        products' operands."""
        if self.bits or self.fraction:
            return self.subblocks
        return 0 if self.dtype == product else self.terms(queries)

    def plane_scale(self, plane: int) -> float:
        """Return the factor by which the numbers of a plane are larger than the stored numbers."""
        if self.fraction:  # 16-bit floats have a different exponent bias
            bias = next(bias for fraction, bias in FIELDS.values() if fraction == self.fraction)
            return 2.0 ** (bias - 15)
        if self.levels:
            return 1.0
        return 2.0 ** (self.bits * plane)  # codes are masked, but not shifted

    def convert(self, stored: Array, queries: DType, product: DType) -> list[Array]:
        """Convert fetched rows to planes. ``queries`` and ``product`` are dtypes as in
        ``planes``."""
        if self.fraction:
            wide = stored.astype(jnp.uint16)
            wide = ((wide & 128) << 8) | ((wide & 127) << (10 - self.fraction))
            floats = lax.bitcast_convert_type(wide, jnp.float16)
            if product != jnp.float16:
                floats = floats.astype(jnp.float32).astype(product)
            return [floats]
        if self.bits:
            ones = 2**self.bits - 1
            codes = [stored & jnp.uint8(ones << self.bits * n) for n in range(self.subblocks)]
            planes = [x.astype(product) for x in codes]
            return [self._levels_of(x, n) for n, x in enumerate(planes)] if self.levels else planes
        return terms_of(stored.astype(jnp.float32), product, self.terms(queries))

    def _levels_of(self, codes: Array, plane: int) -> Array:
        """Return the levels of a plane's codes. The codes are multiplied by a power of two, because
        they were masked but not shifted."""
        chosen = jnp.full_like(codes, self.levels[0])
        for code, level in enumerate(self.levels[1:], 1):
            reached = codes >= 2.0 ** (self.bits * plane) * code
            chosen = jnp.where(reached, jnp.full_like(codes, level), chosen)
        return chosen


SCALES = "scale", "zero"
"""The names of the arrays with scales and zero points."""


@functools.singledispatch
def format_of(codec: Codec, block: int, head_dim: int) -> StoreFormat | None:
    """Return how the kernel reads the store of a codec's core in units of ``block`` tokens, or None
    if it can't read it."""
    return None


@format_of.register
def _(codec: Raw, block: int, head_dim: int) -> StoreFormat | None:
    return None if codec.as_bits else StoreFormat(block, jnp.dtype(codec.dtype))


@format_of.register
def _(codec: Integer, block: int, head_dim: int) -> StoreFormat | None:
    if codec.bits in (3, 5) or codec.per not in ("token", "channel"):
        return None
    return StoreFormat(
        block * codec.bits // 8,
        jnp.dtype(jnp.uint8),
        codec.bits,
        middle=0.0 if codec.zero_point else codec.middle,
        arrays=("numbers", *SCALES) if codec.zero_point else ("numbers", "scale"),
        **_scale_groups(codec, block, head_dim),
    )


@format_of.register
def _(codec: Codebook, block: int, head_dim: int) -> StoreFormat | None:
    if codec.bits == 3 or codec.per not in ("token", "channel"):
        return None
    return StoreFormat(
        block * codec.bits // 8,
        jnp.dtype(jnp.uint8),
        codec.bits,
        levels=normal_levels(codec.bits),
        arrays=("numbers", "scale"),
        **_scale_groups(codec, block, head_dim),
    )


@format_of.register
def _(codec: Float8, block: int, head_dim: int) -> StoreFormat | None:
    if codec.per not in ("token", "channel"):
        return None
    return StoreFormat(
        block,
        jnp.dtype(jnp.uint8),
        fraction=FIELDS[codec.kind][0],
        arrays=("numbers", "scale"),
        **_scale_groups(codec, block, head_dim),
    )


@format_of.register
def _(codec: Centered, block: int, head_dim: int) -> StoreFormat | None:
    core = core_of(codec.codec)
    if core.transforms or isinstance(core.codec, Centered):
        return None  # the kernel adds a single mean, and does not transform it
    inner = format_of(core.codec, block, head_dim)
    return inner and replace(inner, arrays=(*inner.arrays, "mean"))


def _scale_groups(codec: ScaledCodec, block: int, head_dim: int) -> dict[str, Any]:
    """Return the fields of ``StoreFormat`` that say which numbers share a scale."""
    tokens, channels = codec.groups.sizes(block, head_dim)
    if codec.per == "channel":
        return {"tokens_per_scale": tokens}
    return {"groups": head_dim // channels}


def arrays_of(codec: Codec, store: Store) -> list[Array]:
    """Return the arrays of a store, [batch, kv_heads, units, ...], in the order of
    ``StoreFormat.arrays``. The stored numbers are reshaped to rows, [batch, kv_heads, rows,
    head_dim]. ``codec`` is the inner codec (``Core.codec``), and ``store`` is its store."""
    mean = []
    if isinstance(codec, Centered):
        store, mean = store.rest, [store.mean]
    numbers, *rest = jax.tree.leaves(store)
    return [numbers.reshape(*numbers.shape[:2], -1, numbers.shape[-1]), *rest, *mean]


class ScaleOffset(NamedTuple):
    """How to dequantize the numbers of a plane: ``number * scale + offset``.

    There is one scale and offset per token or per channel. A scale of None means 1, an offset of
    None means 0.
    """

    scale: Array | None
    offset: Array | None


def scale_offset(form: StoreFormat, load: Callable[[str], Array], plane: int) -> ScaleOffset:
    """Compute the scale and offset of a plane. ``load(name)`` returns the scale or the zero point
    in float32."""
    if "scale" not in form.arrays:
        return ScaleOffset(None, None)
    scale, offset = load("scale"), None
    if "zero" in form.arrays:
        offset = load("zero")
    elif form.middle:
        offset = scale * -form.middle
    factor = form.plane_scale(plane)
    return ScaleOffset(scale if factor == 1 else scale * (1 / factor), offset)
