"""The codec that stores floats of 8 bits."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs._scales import WithScales, finite, in_range, rounded, undifferentiable
from kvjax.codecs._tiles import Tile
from kvjax.codecs.raw import Raw
from kvjax.core.pytree import exportable_namedtuple

KINDS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
FIELDS = {"e4m3": (3, 7), "e5m2": (2, 15)}
"""Bits of the fraction, and what is taken off the exponent."""


@exportable_namedtuple
class Scaled(NamedTuple):
    """A store: ``bits`` uint8 in the shape of the numbers, and each group's 16-bit ``scale``."""

    bits: Array
    scale: Array


@dataclass(frozen=True)
class Float8(WithScales):
    """Store numbers as floats of 8 bits times a 16-bit scale a group (Micikevicius et al.,
    arXiv:2209.05433): small numbers of a group keep their own precision.

    The largest magnitude of a group becomes the largest float; scales are each block's own, and
    never those of the first tokens. ``kind``: ``"e4m3"`` (relative error 1 / 16) or ``"e5m2"``
    (1 / 8, of a wider range). ``per`` and ``group``: see ``Groups``. ``scales``, ``dtype``: as in
    ``Integer``.
    """

    kind: str = "e4m3"
    per: str = "token"
    group: int | None = None
    scales: Raw | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: there are {', '.join(KINDS)}")
        super().__post_init__()

    def empty(self, shape: tuple[int, ...]) -> Scaled:
        scale = self._scales.empty(self.groups.scale_shape(shape))
        return Scaled(jnp.zeros(shape, jnp.uint8), scale)

    def encode(self, x: Array) -> Scaled:
        """Blocks [..., block, head_dim] to 8 bits. What is no number counts as 0."""
        x = self.groups.split(undifferentiable(finite(x)))
        kind, axes = jnp.dtype(KINDS[self.kind]), self.groups.axes(x.ndim)
        top = float(jnp.finfo(kind).max)
        largest = jnp.max(jnp.abs(x), axes, keepdims=True)
        scale = rounded(largest / top, str(self._scales.dtype), up=True)
        small = jnp.clip(x / jnp.where(scale == 0, 1.0, scale), -top, top).astype(kind)
        bits = lax.bitcast_convert_type(self.groups.join(small), jnp.uint8)
        return Scaled(bits, self._scales.encode(self.groups.pack(scale)))

    def tiles(self, store: Scaled, orders: Any, part: int, parts: int) -> list[Tile]:
        bits, side = orders.bits.run(store.bits.astype(jnp.int32), part, parts)
        numbers = _floats(bits, *FIELDS[self.kind])
        return [self.scaled(numbers, side, store, orders, part, parts)]

    def wide(self, store: Scaled) -> Array:
        floats = lax.bitcast_convert_type(store.bits, jnp.dtype(KINDS[self.kind]))
        split = self.groups.split(floats.astype(jnp.float32))
        return in_range(self.groups.join(split * self.each(store.scale)), self.dtype)


def _floats(bits: Array, fraction: int, bias: int) -> Array:
    """float32 of 8 bits as whole numbers, by whole numbers alone: not every device can read the
    bits as floats."""
    exponent, rest = (bits & 127) >> fraction, bits & (2**fraction - 1)
    # Where the exponent is 0 there is no leading 1, and it counts as 1.
    whole = jnp.where(exponent > 0, rest + 2**fraction, rest)
    power = jnp.maximum(exponent, 1) - bias - fraction + 127
    size = whole.astype(jnp.float32) * lax.bitcast_convert_type(power << 23, jnp.float32)
    return jnp.where(bits > 127, -size, size)
