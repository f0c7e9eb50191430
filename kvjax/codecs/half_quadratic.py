"""Zero points searched for, as HQQ does."""

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs._scales import finite, mean, rounded, undifferentiable
from kvjax.codecs._wrapping import Wrapping
from kvjax.codecs.codec import Store
from kvjax.core import control_flow

NORM = 0.7
"""The exponent of the error that is made small: below 1, large single errors count little."""
FIRST_WEIGHT, GROWTH = 10.0, 1.01
"""How strongly the split-off error is held to the real one, at first, and its growth a step."""


@dataclass(frozen=True)
class HalfQuadratic(Wrapping):
    """Search the zero point of each group of an ``Integer`` for the smallest error in a norm that
    forgives outliers, by half-quadratic splitting (Badri and Shaji, HQQ, 2023,
    https://mobiusml.github.io/hqq_blog/): the error is split off and shrunk, and the zero point
    becomes the mean of what is left, so many times.

    Scales are the wrapped codec's. A group whose error the search does not lower keeps its zero
    point. ``steps``: of the search.
    """

    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not getattr(self.codec, "zero_point", False):
            raise ValueError(
                f"HalfQuadratic searches zero points, and {self.codec!r} has none: give it an "
                "integer codec with zero_point=True"
            )

    def encode(self, x: Array) -> Store:
        codec, kind = self.codec, self.codec.scales.dtype
        x = codec.groups.split(undifferentiable(finite(x)))
        axes = codec.groups.axes(x.ndim)
        scale, start = codec.fit(x)

        def step(n: Array, zero: Array) -> Array:
            coded = scale * codec.codes(x, scale, zero)
            error = _shrunk((x - coded) - zero, FIRST_WEIGHT * GROWTH ** n.astype(jnp.float32))
            return mean((x - coded) - error, axes)

        def loss(zero: Array) -> Array:
            error = (x - scale * codec.codes(x, scale, zero)) - zero
            return jnp.mean(jnp.abs(error) ** NORM, axes, keepdims=True)

        found = rounded(control_flow.fori_loop(0, self.steps, step, start), kind, up=False)
        return codec.store(x, scale, jnp.where(loss(found) < loss(start), found, start))


def _shrunk(x: Array, weight: Array) -> Array:
    """The error split off: ``x`` nearer to 0, small ones 0 (the proximal step of the norm)."""
    size = jnp.abs(x)
    pull = jnp.where(size > 0, size, 1.0) ** (NORM - 1) / weight
    return jnp.sign(x) * jnp.maximum(size - pull, 0.0)
