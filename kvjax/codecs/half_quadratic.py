"""Zero points optimized by half-quadratic splitting (HQQ)."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs.codec import Store
from kvjax.codecs.scales import finite, mean, rounded, undifferentiable
from kvjax.codecs.wrapper import CodecWrapper
from kvjax.core import control_flow

NORM = 0.7
"""The exponent of the error norm. Below 1 it gives little weight to outliers."""
FIRST_WEIGHT, GROWTH = 10.0, 1.01
"""The initial weight of the penalty on the split error (beta in HQQ), and its growth per step."""


@dataclass(frozen=True)
class HalfQuadratic(CodecWrapper):
    """Optimize the zero points of an ``Integer`` for the smallest error in a norm that tolerates
    outliers, by half-quadratic splitting (HQQ, Badri and Shaji, 2023,
    https://mobiusml.github.io/hqq_blog/).

    Each step shrinks the current error (a proximal step), and sets the zero point of a group to the
    mean of the remainder. The scales do not change. A group keeps its original zero point if the
    search does not reduce its error.

    ``steps``: the number of steps.
    """

    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not getattr(self.codec, "zero_point", False):
            raise ValueError(
                f"HalfQuadratic optimizes zero points, and {self.codec!r} has none: give it an "
                "integer codec with zero_point=True"
            )

    def encode(self, x: Array) -> Store:
        codec, dtype = self.codec, self.codec.scales.dtype
        x = codec.groups.split(undifferentiable(finite(x)))
        axes = codec.groups.axes(x.ndim)
        scale, start = codec.fit(x)

        def step(n: Array, zero: Array) -> Array:
            coded = scale * codec.codes(x, scale, zero)
            error = _shrink((x - coded) - zero, FIRST_WEIGHT * GROWTH ** n.astype(jnp.float32))
            return mean((x - coded) - error, axes)

        def loss(zero: Array) -> Array:
            error = (x - scale * codec.codes(x, scale, zero)) - zero
            return jnp.mean(jnp.abs(error) ** NORM, axes, keepdims=True)

        zero = rounded(control_flow.fori_loop(0, self.steps, step, start), dtype, up=False)
        return codec.store(x, scale, jnp.where(loss(zero) < loss(start), zero, start))


def _shrink(x: Array, weight: Array) -> Array:
    """The proximal operator of the norm: moves ``x`` toward 0, and small numbers to 0."""
    size = jnp.abs(x)
    pull = jnp.where(size > 0, size, 1.0) ** (NORM - 1) / weight
    return jnp.sign(x) * jnp.maximum(size - pull, 0.0)
