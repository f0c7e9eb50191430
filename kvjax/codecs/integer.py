"""Codecs that store integers of 1 to 8 bits with 16-bit scales.

Codes are packed along the tokens of a block, without unused bits. A block is divided into n
subblocks of consecutive tokens, where n is the number of codes per byte. The k-th code of every
byte belongs to the k-th subblock. So unpacking shifts whole rows of channels by a constant.
"""

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs.codec import Raw
from kvjax.codecs.scales import ScaledCodec, finite, in_range, mean, rounded, undifferentiable
from kvjax.core.pytree import exportable_namedtuple
from kvjax.core.validation import ArgumentError, as_python

BITS = (1, 2, 3, 4, 8)
"""The numbers of bits per code that presets support."""
WIDTHS = (1, 2, 3, 4, 5, 8)
"""The numbers of bits per code that ``Integer`` supports. A code of 3 bits is packed as a code of 2
bits and a code of 1 bit, and a code of 5 bits as a code of 4 bits and a code of 1 bit."""
MULTIPLE = 8
"""The number of tokens of a block must be a multiple of this, so that codes of any width fill whole
bytes."""


@exportable_namedtuple
class Packed(NamedTuple):
    """The store of an ``Integer``.

    ``codes`` has the packed codes, uint8[batch, kv_heads, blocks, block * bits / 8, head_dim].
    ``scale`` has the 16-bit scale of each group, and ``zero`` its 16-bit zero point, or None.
    """

    codes: Array
    scale: Array
    zero: Array | None


@dataclass(frozen=True)
class Integer(ScaledCodec):
    """Store numbers as integer codes of ``bits`` bits, with a 16-bit scale per group.

    With a zero point, a number is ``zero + scale * code``. This is asymmetric quantization from the
    minimum of the group to its maximum, as in KIVI (Liu et al., arXiv:2402.02750). Without a zero
    point, a number is ``scale * (code - middle)``. This is symmetric quantization up to the largest
    magnitude of the group. In symmetric quantization with 8 bits, one code means 0 and one code is
    unused. With fewer bits, 0 is halfway between two codes, so that all codes are used.

    Scales are rounded up and zero points down, so with more than one bit the error is at most half
    a scale. With one bit, a number becomes the group's mean plus or minus the group's mean absolute
    deviation. Without a zero point, the mean is taken as 0.

    Attributes:
      bits: 1, 2, 3, 4, 5 or 8.
      per: which numbers share a scale: a group of one token's channels (``"token"``), a group of
        one channel's tokens in a block (``"channel"``), a head's numbers in a block (``"head"``),
        or a row's numbers in a block (``"tensor"``).
      group_size: the number of channels or tokens in a group, for ``"token"`` and ``"channel"``.
        None means as many as possible, up to 64.
      zero_point: whether groups have a zero point.
      scales: the codec of scales and zero points, a 16-bit ``Raw``. None means float16 if the model
        computes in float16, otherwise bfloat16, which has the range of float32.
      dtype: the dtype that ``decode`` returns; None means the model's.

    Example:
      ```python
      codec = kvjax.codecs.Integer(4, per="token", group_size=32, zero_point=True)
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
      ```
    """

    bits: int
    per: str = "token"
    group_size: int | None = None
    zero_point: bool = False
    scales: Raw | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", as_python(self.bits))
        if self.bits not in WIDTHS:
            raise ArgumentError(
                f"bits={self.bits!r}: choose from {', '.join(map(str, WIDTHS))}", param="bits"
            )
        super().__post_init__()

    def empty(self, shape: tuple[int, ...]) -> Packed:
        if shape[-2] % MULTIPLE:
            raise ValueError(
                f"a block of {shape[-2]} tokens must be a multiple of 8, for packed codes"
            )
        packed = (*shape[:-2], shape[-2] * self.bits // 8, shape[-1])
        scale = self.scale_codec.empty(self.groups.scale_shape(shape))
        zero = self.scale_codec.empty(self.groups.scale_shape(shape)) if self.zero_point else None
        return Packed(jnp.zeros(packed, jnp.uint8), scale, zero)

    def encode(self, x: Array) -> Packed:
        """Encode blocks [..., block, head_dim]. NaN is encoded as 0."""
        x = self.groups.split(undifferentiable(finite(x)))
        return self.store(x, *self.fit(x))

    def fit(self, x: Array) -> tuple[Array, Array]:
        """Compute scales and zero points for numbers that are divided into groups. Their dtype is
        float32, and their values are rounded to 16-bit numbers."""
        axes, kind = self.groups.axes(x.ndim), str(self.scale_codec.dtype)
        if self.bits == 1:
            return self._fit_one_bit(x, axes, kind)
        if self.zero_point:
            zero = rounded(jnp.min(x, axes, keepdims=True), kind, up=False)
            reach = jnp.max(x, axes, keepdims=True) - zero
            return rounded(reach / self._levels, kind, up=True), zero
        largest = jnp.max(jnp.abs(x), axes, keepdims=True)
        scale = rounded(largest / (self._levels / 2), kind, up=True)
        return scale, -scale * self.middle

    def _fit_one_bit(self, x: Array, axes: tuple[int, ...], kind: str) -> tuple[Array, Array]:
        middle = mean(x, axes) if self.zero_point else jnp.zeros((), x.dtype)
        spread = mean(jnp.abs(x - middle), axes)
        scale = rounded(2 * spread, kind, up=True)
        return scale, rounded(middle - scale / 2, kind, up=False) if self.zero_point else -scale / 2

    def store(self, x: Array, scale: Array, zero: Array) -> Packed:
        """Encode numbers that are divided into groups, with the scales and zero points from
        ``fit``."""
        codes = pack(self.groups.join(self.codes(x, scale, zero)).astype(jnp.uint8), self.bits)
        scales, groups = self.scale_codec, self.groups
        packed_zero = scales.encode(groups.pack(zero)) if self.zero_point else None
        return Packed(codes, scales.encode(groups.pack(scale)), packed_zero)

    def codes(self, x: Array, scale: Array, zero: Array) -> Array:
        """Compute the nearest codes, as float32."""
        step = jnp.where(scale == 0, 1.0, scale)
        # Never add to a product here. XLA may fuse both into a multiply-add in one program but not
        # in another. Then a code would depend on how the sequence was divided into calls.
        if self.zero_point:
            whole = jnp.round((x - zero) / step)
        elif self.bits == 8:  # ``middle`` is a code, and the sum must not be rounded twice
            whole = jnp.round(x / step) + self.middle
        else:
            whole = jnp.round(x / step + self.middle)
        return jnp.clip(whole, self._lowest, 2**self.bits - 1)

    def to_float32(self, store: Packed) -> Array:
        split = self.groups.split(self.unscaled(unpack(store.codes, self.bits)))
        scaled = split * self.decode_scale(store.scale)
        if store.zero is not None:
            scaled = scaled + self.decode_scale(store.zero)
        return in_range(self.groups.join(scaled), self.dtype)

    def unscaled(self, codes: Array) -> Array:
        """Return codes in float32, before the scales multiply them. Without a zero point,
        ``middle`` is subtracted."""
        codes = codes.astype(jnp.float32)
        return codes if self.zero_point else codes - self.middle

    @property
    def _levels(self) -> int:
        """The number of steps between the lowest and the highest code."""
        return 2**self.bits - 1 - self._lowest

    @property
    def _lowest(self) -> int:
        """The lowest code. With 8 bits and no zero point it is 1, so that codes are symmetric about
        ``middle``."""
        return 1 if self.bits == 8 and not self.zero_point else 0

    @property
    def middle(self) -> float:
        """The code of the number 0 in symmetric quantization. It may be halfway between two
        codes."""
        return self._lowest + self._levels / 2


def _with_bits(bits: int) -> Callable[..., Integer]:
    def codec(
        per: str = "token",
        group_size: int | None = None,
        *,
        zero_point: bool = False,
        scales: Raw | None = None,
    ) -> Integer:
        return Integer(bits, per, group_size, zero_point, scales)

    codec.__name__ = codec.__qualname__ = f"Int{bits}"
    codec.__doc__ = f"``Integer`` with {bits} bits per number."
    return codec


Int8 = _with_bits(8)
"""``Int8(per="token", group_size=None, ...)``: `Integer` with 8 bits.

Example:
  ```python
  codec = kvjax.codecs.Int8(per="channel")
  cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
  ```
"""
Int4 = _with_bits(4)
"""``Int4(per="token", group_size=None, ...)``: `Integer` with 4 bits.

Example:
  ```python
  codec = kvjax.codecs.Int4(group_size=32)
  cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
  ```
"""
Int3 = _with_bits(3)
"""``Int3(per="token", group_size=None, ...)``: `Integer` with 3 bits.

Example:
  ```python
  codec = kvjax.codecs.Int3(group_size=32)
  cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
  ```
"""
Int2 = _with_bits(2)
"""``Int2(per="token", group_size=None, ...)``: `Integer` with 2 bits.

Example:
  ```python
  codec = kvjax.codecs.Int2(group_size=32, zero_point=True)
  cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
  ```
"""
Int1 = _with_bits(1)
"""``Int1(per="token", group_size=None, ...)``: `Integer` with 1 bit.

Example:
  ```python
  codec = kvjax.codecs.Int1(group_size=32, zero_point=True)
  cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
  ```
"""


def pack(codes: Array, bits: int) -> Array:
    """Pack codes below ``2 ** bits``, uint8[..., block, n], into uint8[..., block * bits / 8,
    n]."""
    if bits == 8:
        return codes
    if bits in (3, 5):
        low = bits - 1
        ones = jnp.uint8(2**low - 1)
        return jnp.concatenate([pack(codes & ones, low), pack(codes >> low, 1)], axis=-2)
    parts = jnp.split(codes, 8 // bits, axis=-2)
    return functools.reduce(operator.or_, (part << (bits * i) for i, part in enumerate(parts)))


def unpack(packed: Array, bits: int) -> Array:
    """Undo ``pack``."""
    if bits == 8:
        return packed
    if bits in (3, 5):
        first = packed.shape[-2] * (bits - 1) // bits
        low, high = packed[..., :first, :], packed[..., first:, :]
        return unpack(low, bits - 1) | unpack(high, 1) << (bits - 1)
    apart = packed[..., None, :, :]
    shape = (*[1] * (apart.ndim - 3), 8 // bits, 1, 1)
    shifts = bits * lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 3)
    codes = (apart >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-2], -1, packed.shape[-1])
