"""A layer's arrays made at once, from what says which numbers stand at a position."""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from kvjax.cache.layer import Body, LayerCache, Tail
from kvjax.core.typing import Array, PerRow
from kvjax.core.validation import UNLIMITED
from kvjax.placement.order import arrange
from kvjax.placement.pages import to_pages
from kvjax.policies.cache_policy import CachePolicy

Tokens = Callable[[Array], tuple[Array, Array, Array]]
"""``tokens(wanted int32[batch, n])`` -> keys, values [batch, kv_heads, n, head_dim], and which of
them there are, bool[batch, n]."""
Blocks = Callable[[Array], tuple[Body, Array]] | None
"""``blocks(ids int32[batch, n])`` -> stores of blocks, and which of them there are; None where no
body is cut in the same blocks."""


def build_layer(
    like: LayerCache, policy: CachePolicy, length: PerRow, tokens: Tokens, blocks: Blocks,
    table: Array | None = None,
) -> tuple[LayerCache, PerRow, Array]:  # fmt: skip
    """A layer of a resolved policy that holds rows of ``length``.

    Args:
      like: a layer with the same heads, and codecs for which ``blocks`` are encoded.
      policy: the layer's.
      length: int32[batch].
      tokens: the numbers.
      blocks: what is encoded already, which stays as it is where the codec is the same.
      table: int32[batch, columns], the pages of each row, where the policy's slots are in pages.

    Returns:
      The layer, on the device; the ``written`` that tells what it lacks; and bool[batch], the rows
      that lack what the layout keeps.
    """
    if policy.raw is None:
        stored = policy.stored_layout
        wanted = stored.positions(length, length, jnp.arange(stored.slots, dtype=jnp.int32))
        keys, values, there = tokens(wanted)
        written, lost = stored.hiding(length, wanted, (wanted >= 0) & ~there)
        body = policy.keys.encode(keys), policy.values.encode(values)
        return _layer(like, policy, body, table), written, lost
    split, layout = policy.split, policy.layout
    newest = split.tail.positions(length, length, jnp.arange(split.tail.slots, dtype=jnp.int32))
    keys, values, in_tail = tokens(newest)
    tail = Tail(policy.raw[0].encode(keys), policy.raw[1].encode(values))
    body, older, in_body = _body(like, policy, length, tokens, blocks)
    wanted = jnp.concatenate([newest, older], axis=1)
    missing = (wanted >= 0) & ~jnp.concatenate([in_tail, in_body], axis=1)
    needed = wanted < layout.sinks
    needed |= wanted > (length - (layout.window or UNLIMITED))[:, None]
    low = jnp.max(jnp.where(missing, wanted + 1, 0), axis=1)
    return _layer(like, policy, body, table, tail, low), length, jnp.any(missing & needed, axis=1)


def _layer(
    like: LayerCache, policy: CachePolicy, body: Body, table: Array | None,
    tail: Tail | None = None, low: PerRow | None = None,
) -> LayerCache:  # fmt: skip
    """A layer with a body of rows, or, with a ``table``, in pages."""
    if table is not None and (page_group := policy.page_group):
        body = to_pages(body, table, page_group.layout.page_size, page_group.layout.pool or 0)
    keys, values = arrange(body, policy.orders(like.kv_heads, like.head_dim))
    return replace(
        like, keys=keys, values=values, policy=policy, tail=tail, low=low,
        strip=None, fetched=None,
    )  # fmt: skip


def _body(
    like: LayerCache, policy: CachePolicy, length: PerRow, tokens: Tokens, blocks: Blocks
) -> tuple[Body, Array, Array]:
    """The body, the positions of its tokens, and which of them there are."""
    split, batch = policy.split, length.shape[0]
    slots = jnp.arange(split.body.slots, dtype=jnp.int32)
    every = jnp.arange(split.body.slots * split.block, dtype=jnp.int32)
    wanted = split.positions(length, length, every)
    keys, values, there = tokens(wanted)
    shape = (batch, like.kv_heads, split.body.slots, split.block, like.head_dim)
    held = there.reshape(batch, 1, split.body.slots, split.block, 1)
    # What a block lacks are its first tokens: the last one in their place leaves the scales of the
    # others what they are.
    keys, values = (
        jnp.where(held, x, x[:, :, :, -1:]) for x in (keys.reshape(shape), values.reshape(shape))
    )
    body = policy.keys.encode(keys), policy.values.encode(values)
    if blocks is None:
        return body, wanted, there
    flushed = split.flushed(length)
    encoded, same = blocks(split.body.positions(flushed, flushed, slots))

    def unless_same(new: Array, old: Array) -> Array:
        return jnp.where(same.reshape(batch, 1, -1, *[1] * (new.ndim - 3)), old, new)

    codecs = (policy.keys, like.policy.keys), (policy.values, like.policy.values)
    first, second = (
        jax.tree.map(unless_same, new, old) if wants == has else new
        for new, old, (wants, has) in zip(body, encoded, codecs, strict=True)
    )
    return (first, second), wanted, there
