"""The codec that stores 8-bit floats."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs.codec import Raw
from kvjax.codecs.scales import ScaledCodec, finite, in_range, rounded, undifferentiable
from kvjax.core.pytree import exportable_namedtuple

KINDS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
FIELDS = {"e4m3": (3, 7), "e5m2": (2, 15)}
"""Fraction bits and exponent bias."""


@exportable_namedtuple
class Scaled(NamedTuple):
    """A store: ``bits`` uint8 in the shape of the numbers, and the 16-bit ``scale`` of each
    group."""

    bits: Array
    scale: Array


@dataclass(frozen=True)
class Float8(ScaledCodec):
    """Store numbers as 8-bit floats times a 16-bit scale per group (Micikevicius et al.,
    arXiv:2209.05433). Small numbers of a group keep their relative precision.

    A scale maps the largest magnitude of a group to the largest 8-bit float. Every block computes
    its own scales.

    ``kind``: ``"e4m3"`` (relative error up to 1/16) or ``"e5m2"`` (up to 1/8, with a wider range).
    ``per``, ``group_size``: see ``Groups``. ``scales``, ``dtype``: as in ``Integer``.
    """

    kind: str = "e4m3"
    per: str = "token"
    group_size: int | None = None
    scales: Raw | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}: choose from {', '.join(KINDS)}")
        super().__post_init__()

    def empty(self, shape: tuple[int, ...]) -> Scaled:
        scale = self.scale_codec.empty(self.groups.scale_shape(shape))
        return Scaled(jnp.zeros(shape, jnp.uint8), scale)

    def encode(self, x: Array) -> Scaled:
        """Encode blocks [..., block, head_dim]. NaN is encoded as 0."""
        x = self.groups.split(undifferentiable(finite(x)))
        kind, axes = jnp.dtype(KINDS[self.kind]), self.groups.axes(x.ndim)
        top = float(jnp.finfo(kind).max)
        largest = jnp.max(jnp.abs(x), axes, keepdims=True)
        scale = rounded(largest / top, str(self.scale_codec.dtype), up=True)
        small = jnp.clip(x / jnp.where(scale == 0, 1.0, scale), -top, top).astype(kind)
        bits = lax.bitcast_convert_type(self.groups.join(small), jnp.uint8)
        return Scaled(bits, self.scale_codec.encode(self.groups.pack(scale)))

    def to_float32(self, store: Scaled) -> Array:
        floats = lax.bitcast_convert_type(store.bits, jnp.dtype(KINDS[self.kind]))
        split = self.groups.split(floats.astype(jnp.float32))
        return in_range(self.groups.join(split * self.decode_scale(store.scale)), self.dtype)
