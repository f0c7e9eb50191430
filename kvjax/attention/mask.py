"""Which keys a query sees, computed from positions alone, and how scores are computed."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from kvjax.cache.sections import Section
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, Positions, Visible
from kvjax.core.validation import ArgumentError, normalize_int_field
from kvjax.layouts import UNLIMITED, Split
from kvjax.placement.mesh import COPIES, TENSOR, MeshSharding

Bias = Callable[[Array, Array], Array]
"""A function ``bias(query_positions[batch, new], key_positions[batch, n])``. Its result is added to
the scores. The result is float32 and broadcastable to [batch, heads, new, n]. Keys whose score is
below −1e38 are masked. On a mesh, arrays that the function uses must be leaves of a pytree, as in
``jax.tree_util.Partial(function, array)``, so that devices receive them."""


@pytree_dataclass
class Mask:
    """Which keys queries see, and how scores are computed.

    ``queries`` (int32[batch, new]) has the positions of the queries. ``cap`` is the highest
    position that is used for queries when they attend to a layout's sinks. ``call_start``
    (int32[batch]) is where the call begins, if queries see all tokens of their own call raw;
    otherwise it is None. ``axis`` is the mesh axis along which devices have different keys. The
    other fields are arguments of ``attend``.
    """

    queries: Positions
    scale: float = static_field()
    window: int | None = static_field(default=None)
    sinks: int = static_field(default=0)
    chunk: int | None = static_field(default=None)
    cap: int = static_field(default=UNLIMITED)
    soft_cap: float | None = static_field(default=None)
    bias: Bias | None = static_field(default=None)
    call_start: PerRow | None = None
    axis: str | None = static_field(default=None)

    def __post_init__(self) -> None:
        normalize_int_field(self, "window", 1, optional=True)
        normalize_int_field(self, "chunk", 1, optional=True)
        normalize_int_field(self, "sinks", 0, optional=True)
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ArgumentError(f"soft_cap must be positive, got {self.soft_cap}", param="soft_cap")

    def take_rows(self, rows: PerRow) -> "Mask":
        """Return the mask of the rows ``rows`` (int32[n]). The bias does not change."""
        call_start = None if self.call_start is None else self.call_start[rows]
        return replace(self, queries=self.queries[rows], call_start=call_start)

    def visible(self, positions: Array, section: Section) -> Visible:
        """Return which keys of a section each query sees, bool[batch, new, n]. ``positions``
        (int32[batch, n]) has the positions of the keys, and -1 for empty slots."""
        call_start = None if self.call_start is None else self.call_start[:, None, None]
        return self.sees(self.queries[:, :, None], positions[:, None, :], call_start, section)

    def sees(
        self, queries: Array, keys: Array, call_start: Array | None, section: Section
    ) -> Array:
        """Return whether queries see keys of a section. The arguments are positions that broadcast
        against each other. Kernels call this too, so it is elementwise."""
        seen = (keys >= 0) & (keys <= queries)
        if self.window is not None:
            seen &= (keys > queries - self.window) | (keys < self.sinks)
        if self.chunk is not None:
            seen &= keys >= queries // self.chunk * self.chunk
        if section.split is not None:
            raw_from = _raw_from(section.split, queries, call_start)
            raw = section.split.is_raw(keys, raw_from)
            seen &= raw if section.raw else raw ^ True  # Pallas can't lower "not" in any other form
        return seen

    def reaches(self, low: Array, high: Array, section: Section) -> Array:
        """Return whether (bool[]) any query may see a key of ``section`` at a position from ``low``
        to ``high``."""
        reached = (low <= high) & (low <= jnp.max(self.queries))
        if self.chunk is not None:
            reached &= high >= jnp.min(self.queries) // self.chunk * self.chunk
        if self.window is not None:
            reached &= (high > jnp.min(self.queries) - self.window) | (low < self.sinks)
        if section.split is not None:
            call_start = None if self.call_start is None else self.call_start[:, None]
            first = _raw_from(section.split, self.queries, call_start)
            raw = (high >= jnp.min(first)) | (low < section.split.tail.sinks)
            reached &= raw if section.raw else low < jnp.max(first)
        return reached

    def scores(self, products: Array, positions: Array, section: Section) -> tuple[Array, Array]:
        """Compute scores from products of queries and a section's keys, float32[batch, kv_heads,
        rows, n]. Returns the scores and which of them count. For sinks, the bias receives query
        positions that are limited to ``cap``."""
        batch, kv_heads, rows, count = products.shape
        shape = batch, kv_heads, rows // self.queries.shape[1], self.queries.shape[1], count
        scores = self.scale * products.reshape(shape)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            at = jnp.minimum(self.queries, self.cap) if section.capped else self.queries
            all_heads = (batch, kv_heads * shape[2], *shape[3:])
            bias = jnp.broadcast_to(self.bias(at, positions), all_heads)
            scores = scores + bias.reshape(shape).astype(scores.dtype)
        seen = jnp.broadcast_to(self.visible(positions, section)[:, None, None], shape)
        return scores.reshape(products.shape), seen.reshape(products.shape)


def _raw_from(split: Split, queries: Array, call_start: Array | None) -> Array:
    """Return the first position after the sinks whose token queries see raw."""
    first = split.raw_from(queries)
    return first if call_start is None else jnp.minimum(first, call_start)


def device_bias(bias: Bias, mesh_sharding: MeshSharding, heads: int, device_heads: int) -> Bias:
    """Return the bias of a device's ``device_heads`` query heads, from the bias of all ``heads``
    query heads."""

    def own(queries: Array, keys: Array) -> Array:
        scores = jnp.asarray(bias(queries, keys))
        if scores.ndim > 3 and scores.shape[0] not in (1, queries.shape[0]):
            raise ValueError(
                f"the bias returns {scores.shape[0]} rows, but a device of the mesh has "
                f"{queries.shape[0]}: compute it from the positions that it receives"
            )
        if scores.ndim < 3 or scores.shape[-3] == 1 or device_heads == heads:
            return scores
        first = device_heads * mesh_sharding.index(TENSOR)
        if (
            device_heads * mesh_sharding.heads < heads
        ):  # devices with the same keys divide the queries
            first = device_heads * (
                mesh_sharding.index(TENSOR) * mesh_sharding.copies + mesh_sharding.index(COPIES)
            )
        return lax.dynamic_slice_in_dim(scores, first, device_heads, axis=-3)

    return own
