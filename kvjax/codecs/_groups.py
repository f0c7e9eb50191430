"""Groups of numbers that share a scale, and scales in 16 bits."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.core.checks import whole_number

PER = ("token", "channel", "head", "tensor")
DEFAULT_GROUP = 64
"""Numbers that share a scale, at most, where the user does not say."""


@dataclass(frozen=True)
class Groups:
    """Which numbers of a block [block, head_dim] share a scale.

    ``per``: ``"token"``: ``size`` channels of one token. ``"channel"``: ``size`` tokens of one
    channel. ``"head"``: all of a head's. ``"tensor"``: those of all heads together, a row.
    ``size``: None is all, up to 64.
    """

    per: str
    size: int | None = None

    def __post_init__(self) -> None:
        if self.per not in PER:
            raise ValueError(f"per={self.per!r}: scales are per {', '.join(PER)}")
        if self.size is not None:
            whole_number("group", self.size, 1)
            if self.per in ("head", "tensor"):
                raise ValueError(f"group={self.size}: a scale per {self.per} has no groups")

    def sizes(self, block: int, head_dim: int) -> tuple[int, int]:
        """Tokens and channels of a group.

        Raises:
          ValueError: if the size is larger than what it divides, or does not divide it.
        """
        if self.per in ("head", "tensor"):
            return block, head_dim
        tokens = self.per == "channel"
        whole, name = (block, "the block's tokens") if tokens else (head_dim, "head_dim")
        fitting = (n for n in range(1, min(DEFAULT_GROUP, whole) + 1) if whole % n == 0)
        size = max(fitting) if self.size is None else self.size
        if whole % size:
            raise ValueError(f"a group of {size} does not divide {name}, {whole}")
        return (size, 1) if tokens else (1, size)

    def split(self, x: Array) -> Array:
        """[..., block, head_dim] as [..., groups of tokens, tokens, groups of channels, channels];
        a scale stands at index 0 of axes -3 and -1."""
        block, head_dim = x.shape[-2:]
        tokens, channels = self.sizes(block, head_dim)
        return x.reshape(*x.shape[:-2], block // tokens, tokens, head_dim // channels, channels)

    def join(self, x: Array) -> Array:
        """Undo ``split``."""
        a, b, c, d = x.shape[-4:]
        return x.reshape(*x.shape[:-4], a * b, c * d)

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Axes of what ``split`` gives that share a scale."""
        heads = (1,) if self.per == "tensor" else ()
        return (*heads, ndim - 3, ndim - 1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of blocks of ``shape``."""
        tokens, channels = self.sizes(*shape[-2:])
        heads = 1 if self.per == "tensor" else shape[1]
        return (shape[0], heads, *shape[2:-2], shape[-2] // tokens, shape[-1] // channels)

    def pack(self, scale: Array) -> Array:
        """A scale of ``split`` numbers without the axes of length 1."""
        return scale.reshape(*scale.shape[:-4], scale.shape[-4], scale.shape[-2])

    def unpack(self, scale: Array) -> Array:
        """Undo ``pack``."""
        return scale[..., :, None, :, None]


def rounded(x: Array, dtype: str, *, up: bool) -> Array:
    """float32 numbers that ``dtype``, of 16 bits, has: the nearest one that is not below ``x``
    (``up``), or not above. Beyond its range, its largest number."""
    kind: Any = jnp.dtype(dtype)
    largest = float(jnp.finfo(kind).max)
    x = jnp.clip(x, -largest, largest)
    near = x.astype(kind)
    wide = near.astype(jnp.float32)
    bits = lax.bitcast_convert_type(near, jnp.uint16)
    # Away from zero is one more as a whole number, whatever the sign.
    wrong = (wide < x) if up else (wide > x)
    away = (x > 0) if up else (x < 0)
    beyond = lax.bitcast_convert_type(bits + jnp.uint16(1), kind).astype(jnp.float32)
    within = lax.bitcast_convert_type(bits - jnp.uint16(1), kind).astype(jnp.float32)
    # Of the nearest number and its neighbour towards zero, one lies on the wanted side.
    return jnp.where(wrong, jnp.where(away, beyond, within), wide)


def mean(x: Array, axes: tuple[int, ...]) -> Array:
    """The mean over ``axes``, kept, by a sum that can't overflow: of what a power of two, and so
    exactly, made smaller."""
    count = math.prod(x.shape[axis] for axis in axes)
    shrink = 2.0 ** -(count - 1).bit_length()
    return jnp.sum(x * shrink, axes, keepdims=True) / (count * shrink)


def finite(x: Array) -> Array:
    """float32 within a quarter of its range, so that differences are numbers too; 0 for what is
    none."""
    x, largest = x.astype(jnp.float32), float(jnp.finfo(jnp.float32).max) / 4
    return jnp.where(jnp.isnan(x), 0.0, jnp.clip(x, -largest, largest))
