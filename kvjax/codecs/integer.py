"""Codecs that store whole numbers of 1 to 8 bits, with scales in 16.

Codes are packed along a block's tokens, in exactly as many bytes as they need: the first of a
byte's codes belong to the first part of the tokens, and so on, so that unpacking is a shift by a
constant over whole rows of channels.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs._scales import WithScales, finite, in_range, mean, rounded, undifferentiable
from kvjax.codecs._tiles import Tile
from kvjax.codecs.raw import Raw
from kvjax.core.pytree import exportable_namedtuple
from kvjax.core.validation import as_python

BITS = (1, 2, 3, 4, 8)
MULTIPLE = 8
"""A block's tokens are a multiple of this: then they fill bytes at every number of bits."""


@exportable_namedtuple
class Packed(NamedTuple):
    """A store: packed ``codes`` uint8[batch, kv_heads, blocks, block * bits / 8, head_dim], and of
    each group its ``scale`` and, if it has one, its ``zero``, in 16 bits."""

    codes: Array
    scale: Array
    zero: Array | None


@dataclass(frozen=True)
class Integer(WithScales):
    """Store numbers as codes of ``bits`` bits, with a 16-bit scale a group.

    With a zero point a number is ``zero + scale * code``, from the smallest of its group to the
    largest, as in KIVI (Liu et al., arXiv:2402.02750). Without one it is
    ``scale * (code - middle)``, up to the largest magnitude of its group; at 8 bits the middle is
    itself a code, at fewer it lies between two, so that none is wasted. Scales are rounded up and
    zero points down, so no number is further than half a scale from what it was. With one bit, the
    two values are the group's mean plus and minus its mean deviation.

    ``bits``: 1, 2, 3, 4 or 8. ``per``: ``"token"``, ``"channel"``, ``"head"`` or ``"tensor"``, and
    ``group``, the numbers that share a scale along a token's channels or a channel's tokens (None:
    all, up to 64); see ``Groups``. ``zero_point``: whether groups have one. ``scales``: ``Raw`` of
    the 16-bit dtype of scales and zero points; None is float16 where the model is, and else
    bfloat16, which has float32's range. ``dtype``: what ``decode`` gives; None is the model's.
    """

    bits: int
    per: str = "token"
    group: int | None = None
    zero_point: bool = False
    scales: Raw | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", as_python(self.bits))
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits!r}: there are codes of {', '.join(map(str, BITS))}")
        super().__post_init__()

    @property
    def parts(self) -> int:
        return 8 if self.bits == 3 else 8 // self.bits

    def empty(self, shape: tuple[int, ...]) -> Packed:
        if shape[-2] % MULTIPLE:
            raise ValueError(f"a block of {shape[-2]} tokens: packed codes need a multiple of 8")
        packed = (*shape[:-2], shape[-2] * self.bits // 8, shape[-1])
        scale = self._scales.empty(self.groups.scale_shape(shape))
        zero = self._scales.empty(self.groups.scale_shape(shape)) if self.zero_point else None
        return Packed(jnp.zeros(packed, jnp.uint8), scale, zero)

    def encode(self, x: Array) -> Packed:
        """Blocks [..., block, head_dim] to codes. What is no number counts as 0."""
        x = self.groups.split(undifferentiable(finite(x)))
        return self.store(x, *self.fit(x))

    def fit(self, x: Array) -> tuple[Array, Array]:
        """Scales and zero points of split numbers, as numbers that 16 bits hold."""
        axes, kind = self.groups.axes(x.ndim), str(self._scales.dtype)
        if self.bits == 1:
            return self._fit_one_bit(x, axes, kind)
        if self.zero_point:
            zero = rounded(jnp.min(x, axes, keepdims=True), kind, up=False)
            reach = jnp.max(x, axes, keepdims=True) - zero
            return rounded(reach / self._levels, kind, up=True), zero
        largest = jnp.max(jnp.abs(x), axes, keepdims=True)
        scale = rounded(largest / (self._levels / 2), kind, up=True)
        return scale, -scale * self.middle

    def _fit_one_bit(self, x: Array, axes: tuple[int, ...], kind: Any) -> tuple[Array, Array]:
        middle = mean(x, axes) if self.zero_point else jnp.zeros((), x.dtype)
        spread = mean(jnp.abs(x - middle), axes)
        scale = rounded(2 * spread, kind, up=True)
        return scale, rounded(middle - scale / 2, kind, up=False) if self.zero_point else -scale / 2

    def store(self, x: Array, scale: Array, zero: Array) -> Packed:
        """The store of split numbers under scales and zero points of ``fit``."""
        codes = pack(self.groups.join(self.codes(x, scale, zero)).astype(jnp.uint8), self.bits)
        scales, groups = self._scales, self.groups
        kept = scales.encode(groups.pack(zero)) if self.zero_point else None
        return Packed(codes, scales.encode(groups.pack(scale)), kept)

    def codes(self, x: Array, scale: Array, zero: Array) -> Array:
        """The nearest codes, as float32."""
        step = jnp.where(scale == 0, 1.0, scale)
        # No product stands beside a sum here: a compiler may join them, in one program and not in
        # another, and a code would depend on how the text was cut.
        if self.zero_point:
            whole = jnp.round((x - zero) / step)
        elif self.bits == 8:  # a code stands in the middle: the sum must not round a second time
            whole = jnp.round(x / step) + self.middle
        else:
            whole = jnp.round(x / step + self.middle)
        return jnp.clip(whole, self._lowest, 2**self.bits - 1)

    def wide(self, store: Packed) -> Array:
        split = self.groups.split(unpack(store.codes, self.bits).astype(jnp.float32))
        scale = self.each(store.scale)
        if store.zero is None:
            return in_range(self.groups.join((split - self.middle) * scale), self.dtype)
        return in_range(self.groups.join(split * scale + self.each(store.zero)), self.dtype)

    def tiled(self, block: int, parts: int, head_dim: int) -> bool:
        return self.bits != 3 and super().tiled(block, parts, head_dim)

    def tiles(self, store: Packed, orders: Any, part: int, parts: int) -> list[Tile]:
        each = parts // self.parts
        codes = store.codes.astype(jnp.int32)
        if self.bits < 8:
            codes = (codes >> (part // each * self.bits)) & (2**self.bits - 1)
        codes, side = orders.codes.run(codes, part % each, each)
        numbers = codes.astype(jnp.float32)
        if store.zero is None:
            numbers = numbers - self.middle
        return [self.scaled(numbers, side, store, orders, part, parts)]

    @property
    def _levels(self) -> int:
        """Steps between the lowest and the highest code."""
        return 2**self.bits - 1 - self._lowest

    @property
    def _lowest(self) -> int:
        """The lowest code: without a zero point, 8 bits are symmetric about one of theirs."""
        return 1 if self.bits == 8 and not self.zero_point else 0

    @property
    def middle(self) -> float:
        """The code of 0 without a zero point."""
        return self._lowest + self._levels / 2


def _of_bits(bits: int) -> Any:
    def codec(
        per: str = "token", group: int | None = None, *, zero_point: bool = False,
        scales: Raw | None = None,
    ) -> Integer:  # fmt: skip
        return Integer(bits, per, group, zero_point, scales)

    codec.__name__ = codec.__qualname__ = f"Int{bits}"
    codec.__doc__ = f"``Integer`` with {bits} bits a number: see there."
    return codec


Int8 = _of_bits(8)
"""``Int8(per="token", group=None, ...)``: `Integer` with 8 bits."""
Int4 = _of_bits(4)
"""``Int4(per="token", group=None, ...)``: `Integer` with 4 bits."""
Int3 = _of_bits(3)
"""``Int3(per="token", group=None, ...)``: `Integer` with 3 bits."""
Int2 = _of_bits(2)
"""``Int2(per="token", group=None, ...)``: `Integer` with 2 bits."""
Int1 = _of_bits(1)
"""``Int1(per="token", group=None, ...)``: `Integer` with 1 bit."""


def pack(codes: Array, bits: int) -> Array:
    """uint8[..., block, n] of codes below ``2 ** bits`` to uint8[..., block * bits / 8, n]."""
    if bits == 8:
        return codes
    if bits == 3:
        return jnp.concatenate([pack(codes & 3, 2), pack(codes >> 2, 1)], axis=-2)
    parts = jnp.split(codes, 8 // bits, axis=-2)
    return functools.reduce(operator.or_, (part << (bits * i) for i, part in enumerate(parts)))


def unpack(packed: Array, bits: int) -> Array:
    """Undo ``pack``."""
    if bits == 8:
        return packed
    if bits == 3:
        whole = packed.shape[-2]
        low, high = packed[..., : whole * 2 // 3, :], packed[..., whole * 2 // 3 :, :]
        return unpack(low, 2) | unpack(high, 1) << 2
    apart = packed[..., None, :, :]
    shape = (*[1] * (apart.ndim - 3), 8 // bits, 1, 1)
    shifts = bits * lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 3)
    codes = (apart >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-2], -1, packed.shape[-1])
