"""The path ``cudnn``: the fused attention of cuDNN, by ``jax.nn.dot_product_attention``.

It takes keys [batch, tokens, kv_heads, head_dim], so a call copies what it reads of the cache: all
of it for one query, its own tokens for a text from its beginning. No device has run it from here.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.call import Call
from kvjax.attention.kernels._whole import from_beginning, one_raw, refuse
from kvjax.core.typing import Array, Mixed

IMPLEMENTATION: Any = "cudnn"
"""Of ``jax.nn.dot_product_attention``; ``"xla"`` takes the same arguments, for tests."""


def attend(call: Call) -> Mixed:
    """One query a row over all that it holds, or a text from its beginning; else the walk.

    Raises:
      ValueError: if the call has a bias, a soft cap, sinks or chunks, or one query a window, or the
        layer a tail or numbers of 32 bits.
    """
    queries, mask, length = call.queries, call.mask, call.length
    new, window = queries.shape[2], mask.window
    keys, values = one_raw("cudnn", call)
    refuse("cudnn", {
        "has no soft cap": mask.soft_cap is not None,
        "knows no window for one query": new == 1 and window is not None,
        f"takes numbers of 16 bits, not {keys.dtype}": {2} != {
            x.dtype.itemsize for x in (queries, keys, values)
        },
    })  # fmt: skip

    def run(keys: Array, values: Array, present: Array) -> Array:
        turned = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, values))
        mixed = jax.nn.dot_product_attention(
            *turned,
            scale=mask.scale,
            is_causal=new > 1,
            query_seq_lengths=jnp.full_like(length, new),
            key_value_seq_lengths=jnp.maximum(length, 1),
            local_window_size=None if window is None else (window - 1, 0),
            implementation=IMPLEMENTATION,
        )
        return jnp.swapaxes(mixed, 1, 2)

    if new > 1:
        return from_beginning(call, run)
    present = jnp.arange(keys.shape[2]) < length[:, None]
    values = jnp.where(present[:, None, :, None], values, 0)
    mixed = run(keys.astype(queries.dtype), values.astype(queries.dtype), present)
    return jnp.where((length > 0)[:, None, None, None], mixed, 0)
