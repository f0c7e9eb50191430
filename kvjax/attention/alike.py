"""The path ``even``: rows of like length together, so that few walk as far as the longest."""

import jax.numpy as jnp
from jax import lax

from kvjax.attention.blocks import blockwise
from kvjax.attention.inputs import AttentionInputs
from kvjax.core.target import on_cpu
from kvjax.core.typing import Array, AttentionOutput

TOGETHER = 4
"""Rows of a group."""


def evenly(inputs: AttentionInputs) -> AttentionOutput:
    """Softmax by blocks of one size, on CPUs over a few rows at a time, the shortest first.

    What rows have of their own is copied for it, but for pages: other layers are left in one, so
    are stacks, and such as a bias is added to, which may have rows of its own."""
    batch, view = len(inputs.length), inputs.view
    paged = view.layer_cache.policy.page_group is not None and view.layer is None
    if batch <= TOGETHER or not on_cpu() or not paged or inputs.mask.bias:
        return blockwise(inputs, even=True)

    def some(rows: Array) -> AttentionOutput:
        return blockwise(inputs.taken(rows), even=True)

    order = jnp.argsort(inputs.length)
    # The longest is in the last group as often as it takes to fill it.
    order = jnp.pad(order, (0, -batch % TOGETHER), mode="edge")
    mixed = lax.map(some, order.reshape(-1, TOGETHER))
    mixed = mixed.reshape(-1, *inputs.queries.shape[1:])
    return jnp.zeros_like(inputs.queries).at[order].set(mixed)
