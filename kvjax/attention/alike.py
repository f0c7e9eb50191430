"""The path ``even``: rows of like length together, so that few walk as far as the longest."""

import jax.numpy as jnp

from kvjax.attention.blocks import blockwise
from kvjax.attention.call import Call
from kvjax.core.typing import Mixed

TOGETHER = 4
"""Rows of a group."""


def evenly(call: Call) -> Mixed:
    """Softmax by blocks of one size, over a few rows at a time, the shortest first.

    What rows have of their own is copied for it, but for pages: other layers are left together, as
    are few rows, and such as a bias is added to, which may have rows of its own."""
    batch = call.length.shape[0]
    together = batch % TOGETHER or batch == TOGETHER or call.mask.bias
    if together or call.view.held.policy.paging is None:
        return blockwise(call, even=True)
    order = jnp.argsort(call.length)
    groups = order.reshape(-1, TOGETHER)
    mixed = [blockwise(call.taken(rows), even=True) for rows in groups]
    return jnp.zeros_like(call.queries).at[order].set(jnp.concatenate(mixed))
