"""The path ``paged``: JAX's paged attention for one query a row, on TPUs.

The kernel wants pages [kv_heads, pages, page, head_dim] that all rows share. A dense cache is that
without a copy, if every head of every row counts as a row of one head: its slots are its pages,
one after the other. No device has run it from here.
"""

import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from kvjax.attention.call import Call
from kvjax.attention.kernels._whole import one_raw, refuse
from kvjax.core.typing import Mixed

PAGE = 16
"""Tokens of a page: tiles of 16-bit numbers are so high."""
TOKENS = 512
"""Tokens that are computed with together, at most."""


def attend(call: Call) -> Mixed:
    """One query a row over all that the row holds.

    What stands behind a row's last token, in the pages that are computed with together, is
    multiplied by 0: it must be numbers.

    Raises:
      ValueError: if the call has more queries, a bias, sinks, chunks or a window, or the layer a
        tail, slots that are no whole pages, or numbers of another dtype than bfloat16.
    """
    queries, mask, length = call.queries, call.mask, call.length
    batch, heads, new, head_dim = queries.shape
    slots = call.sections[-1].size
    keys, values = one_raw("paged", call)
    refuse("paged", {
        f"takes one query a row, not {new}": new > 1,
        "knows no window": mask.window is not None,
        f"computes in bfloat16, not in {keys.dtype}": {"bfloat16"} != {
            x.dtype.name for x in (queries, keys, values)
        },
        f"takes slots in pages of {PAGE}, not {slots}": slots % PAGE,
    })  # fmt: skip
    pages = slots // PAGE
    together = max(n for n in range(1, TOKENS // PAGE + 1) if pages % n == 0)
    keys, values = (x.reshape(1, -1, PAGE, head_dim) for x in (keys, values))
    rows = (queries * mask.scale).reshape(batch * call.kv_heads, heads // call.kv_heads, head_dim)
    # A row that holds nothing would leave what it is given as it finds it.
    held = jnp.repeat(jnp.maximum(length, 1), call.kv_heads)
    numbers = jnp.arange(batch * call.kv_heads * pages, dtype=jnp.int32).reshape(-1, pages)
    mixed = paged_attention(
        rows, keys, values, held, numbers,
        pages_per_compute_block=together, attn_logits_soft_cap=mask.soft_cap,
    )  # fmt: skip
    mixed = mixed.reshape(queries.shape).astype(queries.dtype)
    return jnp.where((length > 0)[:, None, None, None], mixed, 0)
