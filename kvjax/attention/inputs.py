"""What a path of attention is given, and the softmax over some units of a section."""

import functools
from dataclasses import dataclass, replace

import jax.numpy as jnp

from kvjax.attention.mask import Mask
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import LayerView, Section, sections
from kvjax.core.typing import Array, AttentionOutput, PerRow
from kvjax.layouts import Shard


class Unsupported(ValueError):
    """A path can't serve a call."""


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, and what they may see of a layer.

    ``queries``: [batch, heads, new, head_dim] at their positions; ``capped``: turned as the
    layout's sinks want them, or the same. ``view``: the layer, and ``share``: of its slots, None
    for all.
    """

    queries: AttentionOutput
    capped: AttentionOutput
    kv_heads: int
    view: LayerView
    mask: Mask
    share: Shard | None = None

    @functools.cached_property
    def sections(self) -> list[Section]:
        """The layer's sections."""
        return sections(self.view, self.share)

    @property
    def length(self) -> PerRow:
        """int32[batch], tokens that the rows hold."""
        return self.view.length

    def taken(self, rows: PerRow) -> "AttentionInputs":
        """That of some rows, int32[n]."""
        queries = self.queries[rows]
        capped = queries if self.capped is self.queries else self.capped[rows]
        view, mask = self.view.take_rows(rows), self.mask.taken(rows)
        return replace(self, queries=queries, capped=capped, view=view, mask=mask)

    def rows(self, section: Section) -> Array:
        """The queries of a section as rows [batch, kv_heads, group * new, head_dim]."""
        queries = self.capped if section.capped else self.queries
        batch, heads, new, head_dim = queries.shape
        return queries.reshape(batch, self.kv_heads, heads // self.kv_heads * new, head_dim)

    def near(self) -> PerRow:
        """int32[batch]: tokens behind the last of the queries need not be looked at."""
        return jnp.minimum(self.length, jnp.max(self.mask.queries, axis=1) + 1)

    def finish(self, *found: Partial) -> AttentionOutput:
        """The mixture of all that was found, as the queries are shaped."""
        return functools.reduce(Partial.merge, found).finish(self.queries, self.mask.axis)


def softmax_over(
    section: Section,
    mask: Mask,
    rows: Array,
    origin: Array,
    size: int,
    *,
    start: Array | int = 0,
    after: Partial | None = None,
    whole: bool = False,
) -> Partial:
    """The softmax over ``size`` units of a section from ``origin`` on.

    Args:
      section, mask, rows: what is looked at, and the queries, see ``AttentionInputs.rows``.
      origin, size: which units, of which those from ``start`` on count.
      after: the softmax over what was looked at before, which it is merged with.
      whole: of a whole section as it lies, on a CPU, with the values of empty slots as they are.
    """
    positions = section.positions(origin + jnp.arange(size, dtype=jnp.int32), start)
    keys, values = (section.keys, section.values) if whole else section.slice_units(origin, size)
    products = section.scores(rows, keys, positions, long=whole)
    scores, seen = mask.scores(products, positions, section)

    def weigh(weights: Array) -> Array:
        return section.weighted_values(
            weights, values, None if whole else positions, rows.dtype.name
        )

    return Partial.of(scores, seen, weigh, after)
