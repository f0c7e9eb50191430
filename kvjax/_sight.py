"""What a query sees, by positions alone, and how its scores are made."""

from collections.abc import Callable

import jax.numpy as jnp

from kvjax._checks import whole_number
from kvjax._tree import state, static_field
from kvjax._typing import Array, Positions, Visible
from kvjax.layouts import UNLIMITED

Bias = Callable[[Array, Array], Array]
"""``bias(query_positions[batch, new], key_positions[batch, n])`` -> what is added to the scores,
float32, broadcast to [batch, heads, new, n]."""


@state
class Sight:
    """What a query sees and how scores are made: settings, and the queries' own positions.

    ``cap``: the position from which queries look at a layout's sinks at most.
    """

    queries: Positions
    scale: float = static_field()
    window: int | None = static_field(default=None)
    sinks: int = static_field(default=0)
    chunk: int | None = static_field(default=None)
    cap: int = static_field(default=UNLIMITED)
    soft_cap: float | None = static_field(default=None)
    bias: Bias | None = static_field(default=None)

    def __post_init__(self) -> None:
        for name, value, least in (
            ("window", self.window, 1), ("chunk", self.chunk, 1), ("sinks", self.sinks, 0),
        ):  # fmt: skip
            if value is not None:
                whole_number(name, value, least)
        if self.soft_cap is not None and self.soft_cap <= 0:
            raise ValueError(f"soft_cap must be positive, got {self.soft_cap}")

    def visible(self, positions: Array) -> Visible:
        """Which keys, at ``positions`` int32[batch, n] (-1: none), each query sees."""
        keys, queries = positions[:, None, :], self.queries[:, :, None]
        seen = (keys >= 0) & (keys <= queries)
        if self.window is not None:
            seen &= (keys > queries - self.window) | (keys < self.sinks)
        if self.chunk is not None:
            seen &= keys >= queries // self.chunk * self.chunk
        return seen

    def reaches(self, low: Array, high: Array) -> Array:
        """bool[]: whether any query may see any position from ``low`` to ``high``."""
        reached = (low <= high) & (low <= jnp.max(self.queries))
        if self.chunk is not None:
            reached &= high >= jnp.min(self.queries) // self.chunk * self.chunk
        if self.window is not None:
            reached &= (high > jnp.min(self.queries) - self.window) | (low < self.sinks)
        return reached

    def scores(
        self, queries: Array, keys: Array, positions: Array, *, capped: bool = False
    ) -> tuple[Array, Array]:
        """Scores of grouped queries [batch, kv_heads, group, new, head_dim] with keys
        [batch, kv_heads, n, head_dim], float32[batch, kv_heads, group, new, n], and which of them
        count, bool[batch, 1, 1, new, n]. ``capped``: a bias is asked with queries at ``cap`` at
        most."""
        batch, kv_heads, group, new, head_dim = queries.shape
        flat = queries.reshape(batch, kv_heads, group * new, head_dim)
        scores = self.scale * product("bhqd,bhkd->bhqk", flat, keys.astype(queries.dtype))
        scores = scores.reshape(batch, kv_heads, group, new, -1)
        if self.soft_cap is not None:
            scores = self.soft_cap * jnp.tanh(scores / self.soft_cap)
        if self.bias is not None:
            at = jnp.minimum(self.queries, self.cap) if capped else self.queries
            bias = jnp.broadcast_to(
                self.bias(at, positions), (batch, kv_heads * group, new, keys.shape[2])
            )
            scores = scores + bias.reshape(scores.shape)
        return scores, self.visible(positions)[:, None, None]


def product(form: str, a: Array, b: Array) -> Array:
    """``einsum``, summed in float32."""
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)
