"""Convert a cache to another policy."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import LOST, validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import Body, LayerCache, Tail
from kvjax.cache.paging import pool_for
from kvjax.cache.reading import blocks_at, tokens_at
from kvjax.cache.sizes import place_within
from kvjax.cache.state import KVCache, with_rows
from kvjax.core.array_ops import flag_where
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.core.validation import ArgumentError, as_optional_int, is_traced
from kvjax.layouts import UNLIMITED, Layout, unpaged_layout
from kvjax.operations.stacks import layer_by_layer
from kvjax.placement.order import arrange
from kvjax.placement.pages import to_pages
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer


@layer_by_layer
@automatic_axes
def convert(cache: KVCache, policy: PolicyChoice, *, max_len: int | None = None) -> KVCache:
    """Convert a cache to another policy, with the same tokens: for example from dense to ring, or
    from float32 to bfloat16.

    The old cache must have all tokens that queries see under the new policy. A ring that has
    overwritten the beginning of a row can't become dense.

    Args:
      cache: the cache. It is not changed.
      policy: the new policy, as for ``init_cache``.
      max_len: as for ``init_cache``. By default it is the ``max_len`` of the old cache, if the
        layout needs one. A growing layout starts with the capacity that the rows need or, inside
        ``jit``, with the old capacity.

    Raises:
      ValueError: if the tokens of a row do not fit in the new cache, or a row lacks tokens that the
        new layout keeps. If lengths are traced, such rows get the status ``LOST`` instead.

    Example:
      ```python
      cache, _ = kvjax.prefill(lm, ["The json module"], max_len=256)
      small = kvjax.convert(cache, kvjax.policy(bits=4))
      ```
    """
    cache = validated("kvjax.convert", cache)
    max_len = as_optional_int("max_len", max_len, 1)
    limit = cache.positions
    if limit is not None and (max_len or 0) > limit:
        raise ArgumentError(f"max_len is {max_len}, but {cache.last_position}", param="max_len")
    # Each entry was created for the first layer of the model that reads it.
    sources = cache.sources or tuple(range(len(cache.layers)))
    windows = tuple(cache.layers[entry].window for entry in sources)
    config = SimpleNamespace(num_hidden_layers=len(sources), windows=windows)
    policies = per_layer(policy, config)
    resolved = []
    for entry, old in enumerate(cache.layers):
        new = policies[sources.index(entry)]
        new = replace(new, placement=new.placement.like(old.policy.placement))
        length = max_len
        if length is None and not new.layout.open_ended and cache.max_len < UNLIMITED:
            length = cache.max_len
        new = new.resolve(
            limit if length is None else length,
            old.window,
            old.policy.keys.dtype,
            values_dtype=old.policy.values.dtype,
            rows=cache.batch,
        )
        if new.keys.before_rotary != old.policy.keys.before_rotary:
            raise ValueError(
                f"layer {entry}: can't convert between rotated keys and keys that are stored "
                "unrotated (Unrotated)"
            )
        if new.layout.grows_to is not None:
            new = replace(new, layout=_grow_to_fit(new.layout, cache)).with_pool(cache.batch)
        resolved.append(new)
    budget = budget_of(policy)
    if budget is not None:
        shapes = [(cache.batch, layer.kv_heads, layer.head_dim) for layer in cache.layers]
        resolved = place_within(budget, resolved, shapes)
    return replace(with_policies(cache, resolved), budget=budget)


def with_policies(cache: KVCache, policies: Sequence[CachePolicy]) -> KVCache:
    """Convert every layer to another resolved policy.

    Raises:
      ValueError: if the tokens of a row do not fit, a row lacks tokens that the policy keeps, or
        the pool has too few pages. Traced values are not checked.
    """
    groups = dict.fromkeys(
        policy.page_group for policy in policies if policy.page_group is not None
    )
    pools, status = {}, cache.status
    for group in groups:
        pools[group], lacking = pool_for(group, cache)
        if not is_traced(lacking) and np.any(fetch(lacking)):
            raise ValueError(
                f"row {int(np.argmax(fetch(lacking)))} needs more pages than are left in a pool of "
                f"{group.layout.pool} pages of {group.layout.page_size} tokens"
            )
        status |= flag_where(lacking, LOST)
    tables = [policy.page_group and pools[policy.page_group].whole for policy in policies]
    converted = [
        convert_entry(cache, entry, policy, table)
        for entry, (policy, table) in enumerate(zip(policies, tables, strict=True))
    ]
    layers, written, lost = zip(*converted, strict=True)
    return with_rows(
        cache,
        layers=layers,
        written=jnp.stack(written, 1),
        pools=tuple(pools.values()),
        status=functools.reduce(jnp.bitwise_or, lost, status),
    )


def without_pages(cache: KVCache) -> KVCache:
    """Convert paged layers to layers without pages, in which every row has its own slots."""
    policies = [layer.policy for layer in cache.layers]
    return with_policies(cache, [replace(x, layout=unpaged_layout(x.layout)) for x in policies])


def convert_entry(
    cache: KVCache, entry: int, policy: CachePolicy, table: Array | None = None
) -> tuple[LayerCache, PerRow, PerRow]:
    """Convert an entry of ``KVCache.layers`` to another policy, and move it to the policy's
    placement.

    ``table`` is the page table of the new layer's pool, if it is paged.

    Returns:
      The layer, its column of ``KVCache.written``, and the status of each row.

    Raises:
      ValueError: if the tokens of a row do not fit, or a row lacks tokens that the policy keeps.
        Traced values are not checked.
    """
    old, tables = cache.layers[entry], (cache.table(entry, whole=True), table)
    rows = cache.length, cache.written[:, entry]
    layer, written, too_long, lost = convert_layer(old, *rows, policy, tables)
    if not is_traced(too_long) and np.any(fetch(too_long)):
        row = int(np.argmax(fetch(too_long)))
        raise ValueError(
            f"row {row} has {int(fetch(cache.length)[row])} tokens, but {policy.layout} of layer "
            f"{entry} holds {policy.layout.limit}"
        )
    if not is_traced(lost) and np.any(fetch(lost)):
        raise ValueError(
            f"layer {entry} has lost tokens of row {int(np.argmax(fetch(lost)))} that "
            f"{policy.layout} keeps"
        )
    return layer.map_arrays(lambda x: x), written, flag_where(too_long | lost, LOST)


def _grow_to_fit(layout: Layout, cache: KVCache) -> Layout:
    """Double a growing layout until all tokens of the rows fit."""
    if is_traced(cache.length):
        tokens = min(cache.max_len, layout.grows_to or cache.max_len)
    else:
        tokens = int(np.max(fetch(cache.length)))
    to = layout.slots
    while to < tokens:
        to *= 2
    return layout.grown(min(to, max(layout.grows_to or to, layout.slots)))


def convert_layer(
    old: LayerCache,
    length: PerRow,
    written: PerRow,
    policy: CachePolicy,
    tables: tuple[Array | None, Array | None] = (None, None),
) -> tuple[LayerCache, PerRow, Array, Array]:
    """Convert a layer to another policy, in device memory.

    Args:
      old: the layer.
      length: ``KVCache.length``.
      written: the layer's column of ``KVCache.written``.
      policy: the new resolved policy.
      tables: the page tables of the old and of the new layer; None for a layer that is not paged.

    Returns:
      The layer, its new column of ``written``, and two masks bool[batch]: the rows that are too
      long for the policy, and the rows that lack tokens.
    """
    old = old.near()
    if old.tail is not None:
        old = replace(old, fetched=(old.keys, old.values))  # don't fetch it again
    limit = UNLIMITED if policy.layout.limit is None else policy.layout.limit
    same_blocks = old.tail is not None and old.policy.block == policy.block
    before, after = tables
    tokens = functools.partial(tokens_at, old, length, written, before)
    blocks = functools.partial(blocks_at, old, length, written, before) if same_blocks else None
    layer, written, lost = build_layer(old, policy, length, tokens, blocks, after)
    return layer, written, length > limit, lost


Tokens = Callable[[Array], tuple[Array, Array, Array]]
"""A function ``tokens(positions)`` of int32[batch, n]. It returns keys and values, both [batch,
kv_heads, n, head_dim], and bool[batch, n], which of them are available."""
Blocks = Callable[[Array], tuple[Body, Array]] | None
"""A function ``blocks(ids)`` of int32[batch, n]. It returns encoded blocks, and bool[batch, n],
which of them are available. It is None if the tokens are not encoded in the same blocks."""


def build_layer(
    like: LayerCache,
    policy: CachePolicy,
    length: PerRow,
    tokens: Tokens,
    blocks: Blocks,
    table: Array | None = None,
) -> tuple[LayerCache, PerRow, RowMask]:
    """Build a layer with the tokens of rows.

    Args:
      like: a layer with the same heads, and with the codecs of ``blocks``.
      policy: the resolved policy of the layer.
      length: int32[batch], the number of tokens of each row.
      tokens: returns the keys and values.
      blocks: returns the encoded blocks, which are used unchanged if the codec is the same.
      table: int32[batch, columns], the pages of each row, if the policy's slots are in pages.

    Returns:
      The layer, on the device; its ``written``, which marks tokens that were not available; and the
      rows that lack tokens that the layout needs.
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
    """Make a layer with a body. If there is a ``table``, the rows of the body are moved into
    pages."""
    if table is not None and (group := policy.page_group):
        body = to_pages(body, table, group.layout.page_size, group.layout.pool or 0)
    keys, values = arrange(body, policy.orders(like.kv_heads, like.head_dim))
    layer = replace(like, keys=keys, values=values, policy=policy, tail=tail, low=low)
    return replace(layer, strip=None, fetched=None)


def _body(
    like: LayerCache, policy: CachePolicy, length: PerRow, tokens: Tokens, blocks: Blocks
) -> tuple[Body, Array, Array]:
    """Build the body. Returns it, the positions of its tokens, and which of them are available."""
    split, batch = policy.split, length.shape[0]
    slots = jnp.arange(split.body.slots, dtype=jnp.int32)
    token_slots = jnp.arange(split.body.slots * split.block, dtype=jnp.int32)
    positions = split.positions(length, length, token_slots)
    keys, values, available = tokens(positions)
    shape = (batch, like.kv_heads, split.body.slots, split.block, like.head_dim)
    in_blocks = available.reshape(batch, 1, split.body.slots, split.block, 1)
    # Only the first tokens of a block can be missing. They are replaced by the last token, which
    # does not change the scales of the others.
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
