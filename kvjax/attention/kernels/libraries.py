"""The paths ``cudnn``, ``splash`` and ``paged``: kernels of libraries, for GPUs and for TPUs.

They take one raw array a layer, from its first slot on. No device has run them from here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

from kvjax.attention.blocks import blockwise
from kvjax.attention.call import Call
from kvjax.attention.kernels.common import compiled, refuse
from kvjax.core.typing import Array, Mixed

IMPLEMENTATION: Any = "cudnn"
"""Of ``jax.nn.dot_product_attention``; ``"xla"`` takes the same arguments, for tests."""
SPLASH_BLOCK = 128
"""Tokens of which splash attention takes whole blocks."""
PAGE = 16
"""Tokens of a page: tiles of 16-bit numbers are so high."""
PAGED_TOKENS = 512
"""Tokens that paged attention computes with together, at most."""


def cudnn(call: Call) -> Mixed:
    """The fused attention of cuDNN: one query a row over all that it holds, or a text from its
    beginning; else the walk.

    It takes keys [batch, tokens, kv_heads, head_dim], so a call copies what it reads of the cache:
    all of it for one query, its own tokens for a text from its beginning.

    Raises:
      ValueError: if the call has a bias, a soft cap, sinks or chunks, or one query a window, or the
        layer a tail or numbers of 32 bits.
    """
    queries, mask, length = call.queries, call.mask, call.length
    new, window = queries.shape[2], mask.window
    keys, values = _one_raw("cudnn", call)
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
        return _from_beginning(call, run)
    present = jnp.arange(keys.shape[2]) < length[:, None]
    values = jnp.where(present[:, None, :, None], values, 0)
    mixed = run(keys.astype(queries.dtype), values.astype(queries.dtype), present)
    return jnp.where((length > 0)[:, None, None, None], mixed, 0)


def splash(call: Call) -> Mixed:
    """JAX's splash attention: causal, of the call to itself, where every row's text begins with it;
    else the walk.

    Raises:
      ValueError: if the call has a bias, sinks or chunks, or the layer a tail.
    """
    _one_raw("splash", call)
    queries, mask = call.queries, call.mask
    batch, heads, new, head_dim = queries.shape

    def run(keys: Array, values: Array, present: Array) -> Array:
        short = -new % SPLASH_BLOCK
        padded = [jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (keys, values)]
        rows = jnp.pad(queries * mask.scale, ((0, 0), (0, 0), (0, short), (0, 0)))
        rows = rows.reshape(batch, call.kv_heads, heads // call.kv_heads, new + short, head_dim)
        strange = jnp.pad(~present, ((0, 0), (0, short)), constant_values=True).astype(jnp.int32)
        shape = (new + short, new + short)
        causal = splash_attention.CausalMask(shape)
        if mask.window is not None:
            causal = splash_attention.LocalMask(shape, (mask.window - 1, 0), 0)

        def by(*arrays: Array, interpret: bool) -> Array:
            kernel = splash_attention.make_splash_mqa_single_device(
                splash_attention.MultiHeadMask([causal] * (heads // call.kv_heads)),
                attn_logits_soft_cap=mask.soft_cap,
                interpret=interpret,
            )

            def row(rows: Array, keys: Array, values: Array, strange: Array) -> Any:
                ids = splash_attention.SegmentIds(jnp.zeros_like(strange), strange)
                return jax.vmap(lambda q, k, v: kernel(q, k, v, ids))(rows, keys, values)

            return jax.vmap(row)(*arrays)

        mixed = compiled(by, rows, *padded, strange)
        return mixed.reshape(batch, heads, new + short, head_dim)[:, :, :new]

    return _from_beginning(call, run)


def paged(call: Call) -> Mixed:
    """JAX's paged attention: one query a row over all that the row holds.

    The kernel wants pages [kv_heads, pages, page, head_dim] that all rows share. A dense cache is
    that without a copy, if every head of every row counts as a row of one head: its slots are its
    pages, one after the other.
    What stands behind a row's last token, in the pages that are computed with together, is
    multiplied by 0: it must be numbers.

    Raises:
      ValueError: if the call has more queries, a bias, sinks, chunks or a window, or the layer a
        tail, slots that are no whole pages, or numbers of another dtype than bfloat16.
    """
    queries, mask, length = call.queries, call.mask, call.length
    batch, heads, new, head_dim = queries.shape
    slots = call.sections[-1].size
    keys, values = _one_raw("paged", call)
    refuse("paged", {
        f"takes one query a row, not {new}": new > 1,
        "knows no window": mask.window is not None,
        f"computes in bfloat16, not in {keys.dtype}": {"bfloat16"} != {
            x.dtype.name for x in (queries, keys, values)
        },
        f"takes slots in pages of {PAGE}, not {slots}": slots % PAGE,
    })  # fmt: skip
    pages = slots // PAGE
    together = max(n for n in range(1, PAGED_TOKENS // PAGE + 1) if pages % n == 0)
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


def _one_raw(path: str, call: Call) -> tuple[Array, Array]:
    """Keys and values [batch, kv_heads, slots, head_dim] of a layer of one section, as numbers.

    Raises:
      ValueError: if there are more, or the call asks for what no library's kernel has.
    """
    sections, mask = call.sections, call.mask
    refuse(path, {
        "reads raw caches alone": sections[0].split is not None,
        "adds no bias to scores": mask.bias is not None,
        "sees no chunks": mask.chunk is not None,
        "reads the slots of one device alone": mask.axis is not None,
        "keeps no sinks": len(sections) > 1 or mask.sinks,
    })  # fmt: skip
    keys, values = sections[0].codecs
    return keys.decode(sections[0].keys), values.decode(sections[0].values)


def _from_beginning(call: Call, run: Callable[[Array, Array, Array], Array]) -> Mixed:
    """``run(keys, values, present)`` over the first slots, where the text of every row begins with
    this call, and they hold positions 0 to ``new - 1``; else the walk. ``present``: bool[batch,
    new], what a row has of them; values of the others are 0."""
    new, section, length = call.queries.shape[2], call.sections[0], call.length
    if new > section.size:
        return blockwise(call)

    def text() -> Mixed:
        present = jnp.arange(new) < length[:, None]
        keys, values = (
            codec.decode(store[:, :, :new]).astype(call.queries.dtype)
            for codec, store in zip(section.codecs, (section.keys, section.values), strict=True)
        )
        values = jnp.where(present[:, None, :, None], values, 0)
        return jnp.where((length > 0)[:, None, None, None], run(keys, values, present), 0)

    # Positions that all are the last one's are those of a call that is not causal.
    own = call.mask.queries == jnp.arange(new, dtype=jnp.int32)
    return lax.cond(jnp.all(own), text, lambda: blockwise(call))
