"""Build the arrays of a layer at once, from a function that returns the tokens at positions."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from kvjax.cache.layer import Body, LayerCache, Tail
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import UNLIMITED
from kvjax.placement.order import arrange
from kvjax.placement.pages import to_pages
from kvjax.policies.cache_policy import CachePolicy

Tokens = Callable[[Array], tuple[Array, Array, Array]]
"""``tokens(positions)``, int32[batch, n], returns keys and values [batch, kv_heads, n, head_dim],
and bool[batch, n], which of them are available."""
Blocks = Callable[[Array], tuple[Body, Array]] | None
"""``blocks(ids)``, int32[batch, n], returns encoded blocks, and bool[batch, n], which of them are
available. None if the tokens are not encoded in the same blocks."""


def build_layer(
    like: LayerCache,
    policy: CachePolicy,
    length: PerRow,
    tokens: Tokens,
    blocks: Blocks,
    table: Array | None = None,
) -> tuple[LayerCache, PerRow, RowMask]:
    """A layer that holds the tokens of rows.

    Args:
      like: a layer with the same heads, and with the codecs of ``blocks``.
      policy: the resolved policy of the layer.
      length: int32[batch], tokens of each row.
      tokens: the keys and values.
      blocks: the encoded blocks, which are used unchanged if the codec is the same.
      table: int32[batch, columns], the pages of each row, if the policy's slots are in pages.

    Returns:
      The layer, on the device; its ``written``, which marks tokens that were not available; and the
      rows that lack tokens which the layout needs.
    """
    if policy.raw is None:
        stored = policy.stored_layout
        positions = stored.positions(length, length, jnp.arange(stored.slots, dtype=jnp.int32))
        keys, values, available = tokens(positions)
        written, lost = stored.hiding(length, positions, (positions >= 0) & ~available)
        body = policy.keys.encode(keys), policy.values.encode(values)
        return _layer(like, policy, body, table), written, lost
    split, layout = policy.split, policy.layout
    in_tail = split.tail.positions(length, length, jnp.arange(split.tail.slots, dtype=jnp.int32))
    keys, values, tail_available = tokens(in_tail)
    tail = Tail(policy.raw[0].encode(keys), policy.raw[1].encode(values))
    body, in_body, body_available = _body(like, policy, length, tokens, blocks)
    positions = jnp.concatenate([in_tail, in_body], axis=1)
    available = jnp.concatenate([tail_available, body_available], axis=1)
    missing = (positions >= 0) & ~available
    needed = positions < layout.sinks
    needed |= positions > (length - (layout.window or UNLIMITED))[:, None]
    low = jnp.max(jnp.where(missing, positions + 1, 0), axis=1)
    return _layer(like, policy, body, table, tail, low), length, jnp.any(missing & needed, axis=1)


def _layer(
    like: LayerCache,
    policy: CachePolicy,
    body: Body,
    table: Array | None,
    tail: Tail | None = None,
    low: PerRow | None = None,
) -> LayerCache:
    """A layer with a body of rows, which a ``table`` divides into pages."""
    if table is not None and (group := policy.page_group):
        body = to_pages(body, table, group.layout.page_size, group.layout.pool or 0)
    keys, values = arrange(body, policy.orders(like.kv_heads, like.head_dim))
    layer = replace(like, keys=keys, values=values, policy=policy, tail=tail, low=low)
    return replace(layer, strip=None, fetched=None)


def _body(
    like: LayerCache, policy: CachePolicy, length: PerRow, tokens: Tokens, blocks: Blocks
) -> tuple[Body, Array, Array]:
    """The body, the positions of its tokens, and which of them are available."""
    split, batch = policy.split, length.shape[0]
    slots = jnp.arange(split.body.slots, dtype=jnp.int32)
    token_slots = jnp.arange(split.body.slots * split.block, dtype=jnp.int32)
    positions = split.positions(length, length, token_slots)
    keys, values, available = tokens(positions)
    shape = (batch, like.kv_heads, split.body.slots, split.block, like.head_dim)
    in_blocks = available.reshape(batch, 1, split.body.slots, split.block, 1)
    # Only the first tokens of a block can be missing. The last token in their place does not change
    # the scales of the others.
    keys, values = (
        jnp.where(in_blocks, x, x[:, :, :, -1:])
        for x in (keys.reshape(shape), values.reshape(shape))
    )
    body = policy.keys.encode(keys), policy.values.encode(values)
    if blocks is None:
        return body, positions, available
    flushed = split.flushed(length)
    encoded, same = blocks(split.body.positions(flushed, flushed, slots))

    def unless_same(new: Array, old: Array) -> Array:
        return jnp.where(same.reshape(batch, 1, -1, *[1] * (new.ndim - 3)), old, new)

    codecs = (policy.keys, like.policy.keys), (policy.values, like.policy.values)
    first, second = (
        jax.tree.map(unless_same, new, old) if codec == old_codec else new
        for new, old, (codec, old_codec) in zip(body, encoded, codecs, strict=True)
    )
    return (first, second), positions, available
