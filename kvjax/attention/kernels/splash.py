"""The path ``splash``: JAX's splash attention for a text from its beginning, on TPUs.

No device has run it from here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from kvjax.attention.call import Call
from kvjax.attention.kernels._whole import compiled, from_beginning, one_raw
from kvjax.core.typing import Array, Mixed

BLOCK = 128
"""The kernel takes whole blocks of so many tokens."""


def attend(call: Call) -> Mixed:
    """Causal attention of the call to itself, where every row's text begins with it; else the walk.

    Raises:
      ValueError: if the call has a bias, sinks or chunks, or the layer a tail.
    """
    one_raw("splash", call)
    queries, mask = call.queries, call.mask
    batch, heads, new, head_dim = queries.shape

    def run(keys: Array, values: Array, present: Array) -> Array:
        short = -new % BLOCK
        padded = [jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (keys, values)]
        rows = jnp.pad(queries * mask.scale, ((0, 0), (0, 0), (0, short), (0, 0)))
        rows = rows.reshape(batch, call.kv_heads, heads // call.kv_heads, new + short, head_dim)
        strange = jnp.pad(~present, ((0, 0), (0, short)), constant_values=True).astype(jnp.int32)
        shape = (new + short, new + short)
        causal = splash.CausalMask(shape)
        if mask.window is not None:
            causal = splash.LocalMask(shape, (mask.window - 1, 0), 0)

        def by(*arrays: Array, interpret: bool) -> Array:
            kernel = splash.make_splash_mqa_single_device(
                splash.MultiHeadMask([causal] * (heads // call.kv_heads)),
                attn_logits_soft_cap=mask.soft_cap,
                interpret=interpret,
            )

            def row(rows: Array, keys: Array, values: Array, strange: Array) -> Any:
                ids = splash.SegmentIds(jnp.zeros_like(strange), strange)
                return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(rows, keys, values)

            return jax.vmap(row)(*arrays)

        mixed = compiled(by, rows, *padded, strange)
        return mixed.reshape(batch, heads, new + short, head_dim)[:, :, :new]

    return from_beginning(call, run)
