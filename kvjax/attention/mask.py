"""What a query sees, by positions alone, and how its scores are made."""

from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
from jax import lax

from kvjax.cache.sections import Section
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, Positions, Visible
from kvjax.core.validation import normalize_int_field
from kvjax.layouts import UNLIMITED, Split
from kvjax.placement.mesh import COPIES, TENSOR, MeshSharding

Bias = Callable[[Array, Array], Array]
"""``bias(query_positions[batch, new], key_positions[batch, n])`` -> what is added to the scores,
float32, broadcast to [batch, heads, new, n]. Scores below −1e38 count as not seen. On a mesh
arrays that it goes by are given to the devices if they are a pytree's:
``jax.tree_util.Partial(function, array)``."""


@pytree_dataclass
class Mask:
    """What a query sees and how scores are made: settings, and the queries' own positions.

    ``cap``: the position from which queries look at a layout's sinks at most. ``call``:
    int32[batch], where the call begins, if its own tokens are raw in any case. ``axis``: of a mesh,
    along which devices have a share of the keys each.
    """

    queries: Positions
    scale: float = static_field()
    window: int | None = static_field(default=None)
    sinks: int = static_field(default=0)
    chunk: int | None = static_field(default=None)
    cap: int = static_field(default=UNLIMITED)
    soft_cap: float | None = static_field(default=None)
    bias: Bias | None = static_field(default=None)
    call: PerRow | None = None
    axis: str | None = static_field(default=None)

    def __post_init__(self) -> None:
        normalize_int_field(self, "window", 1, optional=True)
        normalize_int_field(self, "chunk", 1, optional=True)
        normalize_int_field(self, "sinks", 0, optional=True)
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}")

    def taken(self, rows: PerRow) -> "Mask":
        """That of some rows, int32[n]; a bias is of all."""
        call = None if self.call is None else self.call[rows]
        return replace(self, queries=self.queries[rows], call=call)

    def visible(self, positions: Array, section: Section) -> Visible:
        """Which keys of a section, at ``positions`` int32[batch, n] (-1: none), each query sees."""
        call = None if self.call is None else self.call[:, None, None]
        return self.sees(self.queries[:, :, None], positions[:, None, :], call, section)

    def sees(self, queries: Array, keys: Array, call: Array | None, section: Section) -> Array:
        """Whether queries see keys of a section, by their positions, which are broadcast, and by
        ``call``: made of each element alone, in kernels too."""
        seen = (keys >= 0) & (keys <= queries)
        if self.window is not None:
            seen &= (keys > queries - self.window) | (keys < self.sinks)
        if self.chunk is not None:
            seen &= keys >= queries // self.chunk * self.chunk
        if section.split is not None:
            raw_from = _raw_from(section.split, queries, call)
            raw = section.split.is_raw(keys, raw_from)
            seen &= raw if section.raw else raw ^ True  # kernels know no other "not"
        return seen

    def reaches(self, low: Array, high: Array, section: Section) -> Array:
        """bool[]: whether any query may see any position of a section from ``low`` to ``high``."""
        reached = (low <= high) & (low <= jnp.max(self.queries))
        if self.chunk is not None:
            reached &= high >= jnp.min(self.queries) // self.chunk * self.chunk
        if self.window is not None:
            reached &= (high > jnp.min(self.queries) - self.window) | (low < self.sinks)
        if section.split is not None:
            call = None if self.call is None else self.call[:, None]
            first = _raw_from(section.split, self.queries, call)
            raw = (high >= jnp.min(first)) | (low < section.split.tail.sinks)
            reached &= raw if section.raw else low < jnp.max(first)
        return reached

    def scores(self, products: Array, positions: Array, section: Section) -> tuple[Array, Array]:
        """Scores from products of queries and a section's keys, float32[batch, kv_heads, rows, n],
        and which of them count. Sinks are asked for a bias with queries at ``cap`` at most."""
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


def _raw_from(split: Split, queries: Array, call: Array | None) -> Array:
    """The first position behind the sinks that queries see raw."""
    first = split.raw_from(queries)
    return first if call is None else jnp.minimum(first, call)


def bias_of_heads(bias: Bias, spread: MeshSharding, heads: int, count: int) -> Bias:
    """A bias of a device's heads alone, from one of all."""

    def own(queries: Array, keys: Array) -> Array:
        every = jnp.asarray(bias(queries, keys))
        if every.ndim > 3 and every.shape[0] not in (1, queries.shape[0]):
            raise ValueError(
                f"the bias is of {every.shape[0]} rows, and a device of the mesh has "
                f"{queries.shape[0]}: go by the positions that it is given"
            )
        if every.ndim < 3 or every.shape[-3] == 1 or count == heads:
            return every
        first = count * spread.index(TENSOR)
        if count * spread.heads < heads:  # devices with the same keys divide their queries
            first = count * (spread.index(TENSOR) * spread.copies + spread.index(COPIES))
        return lax.dynamic_slice_in_dim(every, first, count, axis=-3)

    return own
