"""Codecs that store the nearest level of a codebook for normally distributed numbers."""

import functools
import itertools
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from kvjax.codecs.codec import Raw
from kvjax.codecs.integer import MULTIPLE, Packed, pack, unpack
from kvjax.codecs.scales import ScaledCodec, finite, in_range, mean, rounded, undifferentiable
from kvjax.codecs.wrappers import Rotated
from kvjax.core.validation import ArgumentError, as_python

CODEBOOK_BITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Codebook(ScaledCodec):
    """Store the nearest of ``2 ** bits`` levels, times a 16-bit scale per group. The levels have
    the smallest mean squared error for a normal distribution (Lloyd, 1982; Max, 1960); the scale is
    the group's root mean square.

    Groups have no zero points, so a scale per 32 numbers takes as many bytes as the scale and zero
    point per 64 numbers of an ``Integer``. Numbers far beyond the largest level have large errors.
    Wrap the codec in ``Rotated``, which makes the channels of a token nearly normally distributed.

    Attributes:
      bits: 1, 2, 3 or 4.
      per, group_size, scales, dtype: as in ``Integer``.

    Example:
      ```python
      keys = kvjax.codecs.Rotated(kvjax.codecs.Centered(kvjax.codecs.Codebook(2, group_size=32)))
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=keys), max_len=64)
      ```
    """

    bits: int
    per: str = "token"
    group_size: int | None = None
    scales: Raw | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", as_python(self.bits))
        if self.bits not in CODEBOOK_BITS:
            choices = ", ".join(map(str, CODEBOOK_BITS))
            raise ArgumentError(f"bits={self.bits!r}: choose from {choices}", param="bits")
        super().__post_init__()

    def empty(self, shape: tuple[int, ...]) -> Packed:
        if shape[-2] % MULTIPLE:
            raise ValueError(
                f"a block of {shape[-2]} tokens must be a multiple of 8, for packed codes"
            )
        codes = jnp.zeros((*shape[:-2], shape[-2] * self.bits // 8, shape[-1]), jnp.uint8)
        return Packed(codes, self.scale_codec.empty(self.groups.scale_shape(shape)), None)

    def encode(self, x: Array) -> Packed:
        """Encode blocks [..., block, head_dim]. NaN is encoded as 0."""
        x = self.groups.split(undifferentiable(finite(x)))
        axes, kind = self.groups.axes(x.ndim), str(self.scale_codec.dtype)
        most = jnp.max(jnp.abs(x), axes, keepdims=True)
        most = jnp.where(most == 0, 1.0, most)
        ratio = x / most
        # XLA must not fuse these products into the sum: it would do so in some programs only, and
        # then a scale would depend on how the sequence was divided.
        squares = lax.optimization_barrier(ratio * ratio)
        scale = rounded(jnp.sqrt(mean(squares, axes)) * most, kind, up=True)
        steps = x / jnp.where(scale == 0, 1.0, scale)
        levels = normal_levels(self.bits)
        codes = jnp.zeros(x.shape, jnp.uint8)
        for below, above in itertools.pairwise(levels):
            codes += (steps > (below + above) / 2).astype(jnp.uint8)
        packed = pack(self.groups.join(codes), self.bits)
        return Packed(packed, self.scale_codec.encode(self.groups.pack(scale)), None)

    def to_float32(self, store: Packed) -> Array:
        levels = self.groups.split(self.unscaled(unpack(store.codes, self.bits)))
        return in_range(self.groups.join(levels * self.decode_scale(store.scale)), self.dtype)

    def unscaled(self, codes: Array) -> Array:
        """Return the levels of codes in float32, before the scales multiply them. The levels are
        selected by comparisons, which compilers vectorize, unlike reads from a table."""
        levels = normal_levels(self.bits)
        chosen = jnp.full(codes.shape, levels[0], jnp.float32)
        for code, level in enumerate(levels[1:], 1):
            chosen = jnp.where(codes >= code, jnp.float32(level), chosen)
        return chosen


def TurboQuant(
    bits: int,
    group_size: int | None = None,
    *,
    seed: int = 0,
    scales: Raw | None = None,
) -> Rotated:
    """The variant of TurboQuant that minimizes the mean squared error (Zandieh et al.,
    arXiv:2504.19874): a random rotation, and ``Codebook`` for the rotated channels, which are
    nearly normally distributed.

    The rotation is a randomized Hadamard transform. A token has a norm for each group of up to 64
    channels; in the paper, a token has a single one.

    Args:
      bits: 1, 2, 3 or 4.
      group_size: channels of a token that share a norm.
      seed: the seed of the rotation.
      scales: as in ``Integer``.

    Example:
      ```python
      codec = kvjax.codecs.TurboQuant(4)
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
      ```
    """
    return Rotated(Codebook(bits, "token", group_size, scales), seed)


@functools.cache
def normal_levels(bits: int) -> tuple[float, ...]:
    """The levels of the Lloyd-Max quantizer of a standard normal distribution: each level is the
    mean of the numbers that are nearest to it. They are rounded to bfloat16, so that 16-bit
    products use exactly these levels."""
    half = np.linspace(0.2, 2.5, 2 ** (bits - 1))
    for _ in range(2000):
        edges = [0.0, *((half[1:] + half[:-1]) / 2), math.inf]
        density = [math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in edges]
        mass = [math.erf(x / math.sqrt(2)) / 2 for x in edges]
        half = -np.diff(density) / np.diff(mass)
    half = half.astype(jnp.bfloat16)
    return (*(-float(x) for x in half[::-1]), *(float(x) for x in half))
