"""A piece of a store as kernels multiply it: without undoing scales that tokens have."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array


class Tile(NamedTuple):
    """Numbers of some tokens of a head of keys: ``numbers`` times ``factor`` plus ``offset``.

    ``numbers``: [kv_heads, tokens, lanes], of which the ``side``-th ``head_dim`` lanes are theirs;
    ``turned``: [kv_heads, head_dim, tokens].
    ``factor``, ``offset``: float32[kv_heads, groups, tokens], a number for each group of channels;
    None is 1, and 0.
    """

    numbers: Array
    side: int = 0
    factor: Array | None = None
    offset: Array | None = None
    turned: bool = False


def each_token(rows: Array, tokens: int, lanes: int) -> Array:
    """A row [kv_heads, blocks, head_dim] of every block for all of so many tokens, side by side as
    often as there are lanes for it."""
    heads, blocks, width = rows.shape
    if width < lanes:
        rows = jnp.concatenate([rows] * (lanes // width), axis=-1)
    wide = jnp.broadcast_to(rows[:, :, None], (heads, blocks, tokens // blocks, lanes))
    return wide.reshape(heads, tokens, lanes)
