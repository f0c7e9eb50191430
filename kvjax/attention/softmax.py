"""The one softmax: over some of the keys, merged with that over others, and divided at the end.

Source: Milakov and Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.core.typing import Array, AttentionOutput

LOWEST = -2e38
"""The score of what is not seen. Scores below half of it are taken for it."""


class Partial(NamedTuple):
    """A softmax over some of the keys, float32: the ``highest`` score and the ``total`` of weights
    [batch, kv_heads, rows], and the weighted sum of values, ``weighted`` [batch, kv_heads, rows,
    head_dim]."""

    highest: Array
    total: Array
    weighted: Array

    @classmethod
    def of_none(cls, rows: Array) -> "Partial":
        """Over no key, of rows of queries [batch, kv_heads, rows, head_dim]."""
        nothing = jnp.zeros(rows.shape[:-1], jnp.float32)
        return cls(nothing + LOWEST, nothing, jnp.zeros(rows.shape, jnp.float32))

    @classmethod
    def of(
        cls,
        scores: Array,
        seen: Array,
        weigh: Callable[[Array], Array],
        after: "Partial | None" = None,
    ) -> "Partial":
        """Over the keys of ``scores``, and those of ``after``.

        Args:
          scores: float32[batch, kv_heads, rows, keys].
          seen: bool, the same shape: which of them count.
          weigh: weights, in that shape, to the weighted sum of values.
          after: the softmax over other keys, with which it is merged at no cost of its own.
        """
        scores = jnp.where(seen, scores, LOWEST)
        # Never as low as what is not seen, whose weights are 0 then: no choice has to make them so.
        highest = jnp.maximum(lax.stop_gradient(scores).max(-1), LOWEST / 2)
        if after is None:
            weights = jnp.exp(scores - highest[..., None])
            return cls(highest, weights.sum(-1), weigh(weights))
        highest = jnp.maximum(after.highest, highest)
        weights = jnp.exp(scores - highest[..., None])
        shrink = jnp.exp(after.highest - highest)
        total = after.total * shrink + weights.sum(-1)
        return cls(highest, total, after.weighted * shrink[..., None] + weigh(weights))

    def merge(self, other: "Partial") -> "Partial":
        """Over the keys of both."""
        highest = jnp.maximum(self.highest, other.highest)
        a, b = jnp.exp(self.highest - highest), jnp.exp(other.highest - highest)
        weighted = self.weighted * a[..., None] + other.weighted * b[..., None]
        return Partial(highest, self.total * a + other.total * b, weighted)

    def joined(self, axis: int) -> "Partial":
        """Of shares along an axis, over the keys of all."""
        shrink = jnp.exp(self.highest - self.highest.max(axis, keepdims=True))
        weighted = (self.weighted * shrink[..., None]).sum(axis)
        return Partial(self.highest.max(axis), (self.total * shrink).sum(axis), weighted)

    def finish(self, queries: AttentionOutput, axis: str | None = None) -> AttentionOutput:
        """The mixture, in the shape and dtype of the queries; zeros where none is seen.

        ``axis``: of a mesh, along which devices have a share of the keys each.
        """
        total, weighted = self.total, self.weighted
        if axis is not None:
            highest = lax.pmax(lax.stop_gradient(self.highest), axis)
            shrink = jnp.exp(self.highest - highest)
            # Of few rows compilers make one collective of both.
            total, weighted = lax.psum((total * shrink, weighted * shrink[..., None]), axis)
        weighted = weighted / jnp.where(total == 0, 1.0, total)[..., None]
        return weighted.reshape(queries.shape).astype(queries.dtype)
