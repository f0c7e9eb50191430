"""The path ``cudnn``: the fused attention of cuDNN, by ``jax.nn.dot_product_attention``.

It takes keys [batch, tokens, kv_heads, head_dim], so a call copies what it reads of the cache: all
of it for one query, its own tokens for a text from its beginning. No device has run it from here.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.blocks import Turned
from kvjax.attention.kernels._whole import from_beginning, one_raw, refuse
from kvjax.attention.mask import Sight
from kvjax.attention.segments import Segment
from kvjax.core.typing import Array, Mixed, Rows

IMPLEMENTATION: Any = "cudnn"
"""Of ``jax.nn.dot_product_attention``; ``"xla"`` takes the same arguments, for tests."""


def attend(both: Turned, kv_heads: int, parts: list[Segment], length: Rows, sight: Sight) -> Mixed:
    """One query a row over all that it holds, or a text from its beginning; else the walk.

    Raises:
      ValueError: if the call has a bias, a soft cap, sinks or chunks, or one query a window, or the
        layer a tail or numbers of 32 bits.
    """
    queries = both[0]
    new, window = queries.shape[2], sight.window
    keys, values = one_raw("cudnn", parts, sight)
    refuse("cudnn", {
        "has no soft cap": sight.soft_cap is not None,
        "knows no window for one query": new == 1 and window is not None,
        f"takes numbers of 16 bits, not {keys.dtype}": {2} != {
            x.dtype.itemsize for x in (queries, keys, values)
        },
    })  # fmt: skip

    def run(keys: Array, values: Array, present: Array) -> Array:
        turned = (jnp.swapaxes(x, 1, 2) for x in (queries, keys, values))
        mixed = jax.nn.dot_product_attention(
            *turned,
            scale=sight.scale,
            is_causal=new > 1,
            query_seq_lengths=jnp.full_like(length, new),
            key_value_seq_lengths=jnp.maximum(length, 1),
            local_window_size=None if window is None else (window - 1, 0),
            implementation=IMPLEMENTATION,
        )
        return jnp.swapaxes(mixed, 1, 2)

    if new > 1:
        return from_beginning(both, kv_heads, parts, length, sight, run)
    present = jnp.arange(keys.shape[2]) < length[:, None]
    values = jnp.where(present[:, None, :, None], values, 0)
    mixed = run(keys.astype(queries.dtype), values.astype(queries.dtype), present)
    return jnp.where((length > 0)[:, None, None, None], mixed, 0)
