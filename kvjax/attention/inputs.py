"""The inputs of an attention path."""

import functools
from dataclasses import dataclass, replace

import jax.numpy as jnp

from kvjax.attention.mask import Mask
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import LayerView, Section, sections
from kvjax.core.typing import Array, AttentionOutput, PerRow
from kvjax.layouts import Shard


class Unsupported(ValueError):
    """A path does not support these inputs."""


@dataclass(frozen=True)
class AttentionInputs:
    """Queries, and the layer that they attend to.

    ``queries``: [batch, heads, new, head_dim], rotated to their positions. ``capped``: the queries
    for attention sinks, rotated to capped positions; the same array if the layout has no sinks.
    ``view``: the layer. ``shard``: this device's share of the slots; None if it has all slots.
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
        """int32[batch]: tokens in each row."""
        return self.view.length

    def take_rows(self, rows: PerRow) -> "AttentionInputs":
        """The inputs of some rows, int32[n]."""
        queries = self.queries[rows]
        capped = queries if self.capped is self.queries else self.capped[rows]
        view, mask = self.view.take_rows(rows), self.mask.take_rows(rows)
        return replace(self, queries=queries, capped=capped, view=view, mask=mask)

    def rows(self, section: Section) -> Array:
        """The queries for a section as rows [batch, kv_heads, group * new, head_dim], where a group
        is the query heads that share a key-value head."""
        queries = self.capped if section.capped else self.queries
        batch, heads, new, head_dim = queries.shape
        return queries.reshape(batch, self.kv_heads, heads // self.kv_heads * new, head_dim)

    def visible_length(self) -> PerRow:
        """int32[batch]: no query sees a token from this position on."""
        return jnp.minimum(self.length, jnp.max(self.mask.queries, axis=1) + 1)

    def finish(self, *partials: Partial) -> AttentionOutput:
        """The attention output over the keys of all ``partials``."""
        return functools.reduce(Partial.merge, partials).finish(self.queries, self.mask.axis)
