"""Attention of a text to itself, without a cache."""

from dataclasses import replace

import jax.numpy as jnp

from kvjax.attention.attending import check_queries, mixture, scale_of
from kvjax.attention.blocks import blockwise
from kvjax.attention.mask import Bias, Mask
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.sections import LayerView
from kvjax.cache.state import LayerCache
from kvjax.codecs import Raw
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.typing import AttentionOutput, KeysValues, Queries
from kvjax.layouts import Dense
from kvjax.policies.cache_policy import CachePolicy


@automatic_axes
def self_attend(
    queries: Queries,
    keys: KeysValues,
    values: KeysValues,
    *,
    rotary: RotaryTable | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> AttentionOutput:
    """Causal attention of a text to itself, without a cache: the training pass.

    Args:
      queries: [batch, heads, new, head_dim], unrotated, at positions 0 to ``new - 1``.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary, scale, window, sinks, chunk, soft_cap, bias: as in ``attend``.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype; differentiable.

    Raises:
      ValueError: if shapes do not fit, or ``window`` or ``soft_cap`` is not positive.
    """
    policy = CachePolicy(Dense(keys.shape[2]), Raw(keys.dtype.name), Raw(values.dtype.name))
    held = LayerCache(keys, values, policy, keys.shape[1], keys.shape[3])
    check_queries(queries, held, keys.shape[0])
    batch, _, new, _ = queries.shape
    positions = jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), (batch, new))
    queries = apply_rotary(queries, positions, rotary)
    keys = apply_rotary(keys, positions, rotary)
    held = replace(held, keys=keys)
    mask = Mask(
        positions, scale_of(queries, scale), window, sinks, chunk, soft_cap=soft_cap, bias=bias
    )
    length = jnp.full((batch,), new, jnp.int32)
    return mixture(blockwise, (queries,), LayerView(held, length, length, length), mask)
