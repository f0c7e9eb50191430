"""The inputs of an attention path, and the online softmax over parts of the keys.

Source: Milakov and Gimelshein, arXiv:1805.02867; FlashAttention, Dao et al., arXiv:2205.14135.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from kvjax.attention.mask import Mask
from kvjax.cache.sections import LayerView, Section, sections
from kvjax.core.typing import Array, AttentionOutput, PerRow
from kvjax.layouts import Shard

LOWEST = -2e38
"""The score of a key that a query does not see. Keys with scores below ``LOWEST / 2`` also count as
not seen."""


class Partial(NamedTuple):
    """A softmax over some of the keys, in float32, not yet divided by its total.

    ``highest`` ([batch, kv_heads, rows]) is the highest score. ``total``, of the same shape, is the
    sum of the weights ``exp(score - highest)``. ``weighted`` ([batch, kv_heads, rows, head_dim]) is
    the weighted sum of the values.
    """

    highest: Array
    total: Array
    weighted: Array

    @classmethod
    def empty(cls, rows: Array) -> "Partial":
        """Return the softmax over no keys, for query rows [batch, kv_heads, rows, head_dim]."""
        zeros = jnp.zeros(rows.shape[:-1], jnp.float32)
        return cls(zeros + LOWEST, zeros, jnp.zeros(rows.shape, jnp.float32))

    @classmethod
    def of(
        cls,
        scores: Array,
        seen: Array,
        weigh: Callable[[Array], Array],
        before: "Partial | None" = None,
    ) -> "Partial":
        """Compute the softmax over the keys of ``scores``, and merge it with ``before``.

        Args:
          scores: float32[batch, kv_heads, rows, keys].
          seen: a mask of the same shape, of the keys that count.
          weigh: a function that returns the weighted sum of the values for weights of the same
            shape.
          before: the softmax over other keys. Merging it here is cheaper than calling ``merge``.
        """
        scores = jnp.where(seen, scores, LOWEST)
        # ``highest`` is above LOWEST, so the weights of keys that are not seen are exactly 0.
        highest = jnp.maximum(lax.stop_gradient(scores).max(-1), LOWEST / 2)
        if before is None:
            weights = jnp.exp(scores - highest[..., None])
            return cls(highest, weights.sum(-1), weigh(weights))
        highest = jnp.maximum(before.highest, highest)
        weights = jnp.exp(scores - highest[..., None])
        shrink = jnp.exp(before.highest - highest)
        total = before.total * shrink + weights.sum(-1)
        return cls(highest, total, before.weighted * shrink[..., None] + weigh(weights))

    def merge(self, other: "Partial") -> "Partial":
        """Return the softmax over the keys of this object and of ``other``."""
        highest = jnp.maximum(self.highest, other.highest)
        a, b = jnp.exp(self.highest - highest), jnp.exp(other.highest - highest)
        weighted = self.weighted * a[..., None] + other.weighted * b[..., None]
        return Partial(highest, self.total * a + other.total * b, weighted)

    def merge_axis(self, axis: int) -> "Partial":
        """Merge the softmaxes along an axis. Each is over different keys."""
        shrink = jnp.exp(self.highest - self.highest.max(axis, keepdims=True))
        weighted = (self.weighted * shrink[..., None]).sum(axis)
        return Partial(self.highest.max(axis), (self.total * shrink).sum(axis), weighted)

    def finish(self, queries: AttentionOutput, axis: str | None = None) -> AttentionOutput:
        """Return the attention output in the shape and dtype of ``queries``. Queries that see no
        key get zeros.

        ``axis`` is the mesh axis along which devices have different keys; None if every device has
        all keys.
        """
        total, weighted = self.total, self.weighted
        if axis is not None:
            highest = lax.pmax(lax.stop_gradient(self.highest), axis)
            shrink = jnp.exp(self.highest - highest)
            # Use one psum, so that a compiler can combine both sums into one collective.
            total, weighted = lax.psum((total * shrink, weighted * shrink[..., None]), axis)
        weighted = weighted / jnp.where(total == 0, 1.0, total)[..., None]
        return weighted.reshape(queries.shape).astype(queries.dtype)


def softmax_over(
    section: Section,
    mask: Mask,
    rows: Array,
    origin: Array,
    size: int,
    *,
    start: Array | int = 0,
    before: Partial | None = None,
    whole: bool = False,
) -> Partial:
    """Compute the softmax over ``size`` units (tokens, or blocks of tokens) of a section, from the
    unit ``origin`` on.

    Args:
      section: the keys and values.
      mask: which keys each query sees.
      rows: query rows, see ``AttentionInputs.rows``.
      origin, size: the first unit to read, and the number of units. Units before ``start`` do not
        count.
      before: the softmax over other keys, to merge with.
      whole: multiply the whole section in place, on a CPU. Values of empty slots are not masked.
    """
    positions = section.positions(origin + jnp.arange(size, dtype=jnp.int32), start)
    keys, values = (section.keys, section.values) if whole else section.slice_units(origin, size)
    products = section.scores(rows, keys, positions, long=whole)
    scores, seen = mask.scores(products, positions, section)

    def weigh(weights: Array) -> Array:
        return section.weighted_values(
            weights, values, None if whole else positions, rows.dtype.name
        )

    return Partial.of(scores, seen, weigh, before)


class Unsupported(ValueError):
    """Raised by an attention path that does not support its inputs."""


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, and the layer that they attend to.

    ``queries`` is [batch, heads, new, head_dim], rotated to their positions. ``capped`` has the
    queries for attention sinks, rotated to positions of at most ``Mask.cap``. It is the same array
    if the layout has no sinks. ``view`` is the layer. ``shard`` is this device's share of the
    slots; None if it has all slots.
    """

    queries: AttentionOutput
    capped: AttentionOutput
    kv_heads: int
    view: LayerView
    mask: Mask
    shard: Shard | None = None

    @functools.cached_property
    def sections(self) -> list[Section]:
        """The sections of the layer."""
        return sections(self.view, self.shard)

    @property
    def length(self) -> PerRow:
        """The number of tokens in each row, int32[batch]."""
        return self.view.length

    def take_rows(self, rows: PerRow) -> "AttentionInputs":
        """Return the inputs of the rows ``rows`` (int32[n])."""
        queries = self.queries[rows]
        capped = queries if self.capped is self.queries else self.capped[rows]
        view, mask = self.view.take_rows(rows), self.mask.take_rows(rows)
        return replace(self, queries=queries, capped=capped, view=view, mask=mask)

    def rows(self, section: Section) -> Array:
        """Return the queries for a section as rows [batch, kv_heads, group * new, head_dim]. A
        group is the query heads that share a key-value head."""
        queries = self.capped if section.capped else self.queries
        batch, heads, new, head_dim = queries.shape
        return queries.reshape(batch, self.kv_heads, heads // self.kv_heads * new, head_dim)

    def visible_length(self) -> PerRow:
        """Return for each row the end of the tokens that its queries see, int32[batch]. No query
        sees a token at this position or at a later one."""
        return jnp.minimum(self.length, jnp.max(self.mask.queries, axis=1) + 1)

    def finish(self, *partials: Partial) -> AttentionOutput:
        """Return the attention output over the keys of all ``partials``."""
        return functools.reduce(Partial.merge, partials).finish(self.queries, self.mask.axis)
