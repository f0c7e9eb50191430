"""What a query sees, by positions alone, and how its scores are made."""

from collections.abc import Callable

import jax.numpy as jnp

from kvjax.core.checks import whole_number
from kvjax.core.trees import state, static_field
from kvjax.core.typing import Array, Positions, Rows, Visible
from kvjax.layouts import UNLIMITED, Split

Bias = Callable[[Array, Array], Array]
"""``bias(query_positions[batch, new], key_positions[batch, n])`` -> what is added to the scores,
float32, broadcast to [batch, heads, new, n]."""


@state
class Sight:
    """What a query sees and how scores are made: settings, and the queries' own positions.

    ``cap``: the position from which queries look at a layout's sinks at most. ``split``: of a layer
    with a tail, what of it they see raw; ``call``: int32[batch], where the call begins, if its own
    tokens are raw in any case. ``axis``: of a mesh, along which devices have a share of the keys
    each.
    """

    queries: Positions
    scale: float = static_field()
    window: int | None = static_field(default=None)
    sinks: int = static_field(default=0)
    chunk: int | None = static_field(default=None)
    cap: int = static_field(default=UNLIMITED)
    soft_cap: float | None = static_field(default=None)
    bias: Bias | None = static_field(default=None)
    split: Split | None = static_field(default=None)
    call: Rows | None = None
    axis: str | None = static_field(default=None)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("window", self.window, 1), ("chunk", self.chunk, 1), ("sinks", self.sinks, 0),
        ):  # fmt: skip
            if value is not None:
                whole_number(name, value, least)
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}")

    def visible(self, positions: Array, part: str | None = None) -> Visible:
        """Which keys, at ``positions`` int32[batch, n] (-1: none), each query sees. ``part``: of a
        layer with a tail, ``"body"`` or ``"raw"``."""
        keys, queries = positions[:, None, :], self.queries[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        if self.window is not None:
            seen &= (keys > queries - self.window) | (keys < self.sinks)
        if self.chunk is not None:
            seen &= keys >= queries // self.chunk * self.chunk
        if part is not None:
            raw = (keys >= self._raw_from()[:, :, None]) | (keys < self._raw_sinks)
            seen &= raw if part == "raw" else ~raw
        return seen

    def reaches(self, low: Array, high: Array, part: str | None = None) -> Array:
        """bool[]: whether any query may see any position from ``low`` to ``high``."""
        reached = (low <= high) & (low <= jnp.max(self.queries))
        if self.chunk is not None:
            reached &= high >= jnp.min(self.queries) // self.chunk * self.chunk
        if self.window is not None:
            reached &= (high > jnp.min(self.queries) - self.window) | (low < self.sinks)
        if part == "body":
            reached &= low < jnp.max(self._raw_from())
        if part == "raw":
            reached &= (high >= jnp.min(self._raw_from())) | (low < self._raw_sinks)
        return reached

    def scores(
        self, products: Array, positions: Array, *, part: str | None = None, capped: bool = False
    ) -> tuple[Array, Array]:
        """Scores from products of queries and keys, float32[batch, kv_heads, group, new, n], and
        which of them count, bool[batch, 1, 1, new, n]. ``capped``: a bias is asked with queries at
        ``cap`` at most."""
        batch, kv_heads, group, new, count = products.shape
        scores = self.scale * products
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            at = jnp.minimum(self.queries, self.cap) if capped else self.queries
            bias = jnp.broadcast_to(self.bias(at, positions), (batch, kv_heads * group, new, count))
            scores = scores + bias.reshape(scores.shape).astype(scores.dtype)
        return scores, self.visible(positions, part)[:, None, None]

    def _raw_from(self) -> Array:
        """int32[batch, new]: the first position behind the sinks that each query sees raw."""
        assert self.split is not None
        first = self.split.raw_from(self.queries)
        return first if self.call is None else jnp.minimum(first, self.call[:, None])

    @property
    def _raw_sinks(self) -> int:
        return 0 if self.split is None else self.split.tail.sinks
