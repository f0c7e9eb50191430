"""The same text in a cache of another policy."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import LOST, validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.filling import build_layer
from kvjax.cache.layer import LayerCache
from kvjax.cache.paging import pool_for
from kvjax.cache.reading import blocks_at, tokens_at
from kvjax.cache.sizes import place_within
from kvjax.cache.state import KVCache, with_rows
from kvjax.core.array_ops import flag_where
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow
from kvjax.core.validation import as_optional_int, is_traced
from kvjax.layouts import UNLIMITED, Layout, unpaged_layout
from kvjax.operations.stacks import layer_by_layer
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer


@layer_by_layer
@automatic_axes
def convert(cache: KVCache, policy: PolicyChoice, *, max_len: int | None = None) -> KVCache:
    """The same text in a cache of another policy: dense to ring, float32 to bfloat16.

    What queries will see under the new layout must be there: a ring that has forgotten the
    beginning of a row can't become dense.

    Args:
      cache: the cache; it stays as it is.
      policy: as for ``init_cache``.
      max_len: as for ``init_cache``; a dense layout takes the old cache's where it has one. A
        growing layout begins with what the text needs, or, inside ``jit``, with what there was.

    Raises:
      ValueError: if a row holds more tokens than the new cache can, or lacks some that the new
        layout keeps (where traced: the status ``LOST``).
    """
    cache = validated("kvjax.convert", cache)
    max_len = as_optional_int("max_len", max_len, 1)
    limit = cache.positions
    if limit is not None and (max_len or 0) > limit:
        raise ValueError(f"max_len is {max_len}, but {cache.last_position}")
    # Which layer of the model each entry was made for: the first that reads it.
    sources = cache.sources or tuple(range(len(cache.layers)))
    windows = tuple(cache.layers[entry].window for entry in sources)
    config = SimpleNamespace(num_hidden_layers=len(sources), windows=windows)
    policies = per_layer(policy, config)
    resolved = []
    for entry, old in enumerate(cache.layers):
        wanted = policies[sources.index(entry)]
        wanted = replace(wanted, placement=wanted.placement.like(old.policy.placement))
        asked = max_len
        if asked is None and not wanted.layout.open_ended and cache.max_len < UNLIMITED:
            asked = cache.max_len
        new = wanted.resolve(
            limit if asked is None else asked, old.window, old.policy.keys.dtype,
            values_dtype=old.policy.values.dtype, rows=cache.batch,
        )  # fmt: skip
        if new.keys.before_rotary != old.policy.keys.before_rotary:
            raise ValueError(
                f"layer {entry}: keys that are stored with their positions and such as are without "
                "(Unrotated) can't be converted into one another"
            )
        if new.layout.grows_to is not None:
            new = replace(new, layout=_with_room(new.layout, cache)).with_pool(cache.batch)
        resolved.append(new)
    budget = budget_of(policy)
    if budget is not None:
        some = [(cache.batch, layer.kv_heads, layer.head_dim) for layer in cache.layers]
        resolved = place_within(budget, resolved, some)
    return replace(with_policies(cache, resolved), budget=budget)


def with_policies(cache: KVCache, policies: Sequence[CachePolicy]) -> KVCache:
    """A cache under other resolved policies, all laid out anew.

    Raises:
      ValueError: if a row can be seen to have more tokens than a policy holds, to lack some that it
        keeps, or not to find pages for them.
    """
    kinds = dict.fromkeys(each.page_group for each in policies if each.page_group is not None)
    pools, status = {}, cache.status
    for kind in kinds:
        pools[kind], lacking = pool_for(kind, cache)
        if not is_traced(lacking) and np.any(fetch(lacking)):
            raise ValueError(
                f"row {int(np.argmax(fetch(lacking)))} finds no pages for its tokens in a pool of "
                f"{kind.layout.pool} pages of {kind.layout.page_size}"
            )
        status |= flag_where(lacking, LOST)
    tables = [each.page_group and pools[each.page_group].whole for each in policies]
    anew = [
        convert_entry(cache, entry, each, table)
        for entry, (each, table) in enumerate(zip(policies, tables, strict=True))
    ]
    layers, written, lost = zip(*anew, strict=True)
    return with_rows(
        cache, layers=layers, written=jnp.stack(written, 1), pools=tuple(pools.values()),
        status=functools.reduce(jnp.bitwise_or, lost, status),
    )  # fmt: skip


def without_pages(cache: KVCache) -> KVCache:
    """A cache in which each row has slots of its own."""
    policies = [layer.policy for layer in cache.layers]
    return with_policies(cache, [replace(x, layout=unpaged_layout(x.layout)) for x in policies])


def convert_entry(
    cache: KVCache, entry: int, policy: CachePolicy, table: Array | None = None
) -> tuple[LayerCache, PerRow, PerRow]:
    """One of ``KVCache.layers`` under another policy, in its place, with its rows' ``table`` where
    it is in pages; the ``written`` that tells what it lacks, and the status of rows that it can't
    be had for.

    Raises:
      ValueError: if a row can be seen to have more tokens than the policy holds, or to lack some
        that it keeps.
    """
    old, tables = cache.layers[entry], (cache.table(entry, whole=True), table)
    rows = cache.length, cache.written[:, entry]
    layer, written, long, lost = convert_layer(old, *rows, policy, tables)
    if not is_traced(long) and np.any(fetch(long)):
        row = int(np.argmax(fetch(long)))
        raise ValueError(
            f"row {row} has {int(fetch(cache.length)[row])} tokens, {policy.layout} of layer "
            f"{entry} holds {policy.layout.limit}"
        )
    if not is_traced(lost) and np.any(fetch(lost)):
        raise ValueError(
            f"layer {entry} does not hold all tokens of row {int(np.argmax(fetch(lost)))} that "
            f"{policy.layout} is to keep"
        )
    return layer.map_arrays(lambda x: x), written, flag_where(long | lost, LOST)


def _with_room(layout: Layout, cache: KVCache) -> Layout:
    """A growing layout, doubled until it holds what the rows hold."""
    if is_traced(cache.length):
        tokens = min(cache.max_len, layout.grows_to or cache.max_len)
    else:
        tokens = int(np.max(fetch(cache.length)))
    to = layout.slots
    while to < tokens:
        to *= 2
    return layout.grown(min(to, max(layout.grows_to or to, layout.slots)))


def convert_layer(
    old: LayerCache, length: PerRow, marks: PerRow, policy: CachePolicy,
    tables: tuple[Array | None, Array | None] = (None, None),
) -> tuple[LayerCache, PerRow, Array, Array]:  # fmt: skip
    """A layer under another policy, on the device; the ``written`` that tells what it lacks, and
    which rows it can't be had for, bool[batch]: those that are too long, and those that lack
    tokens. ``length`` and ``marks``: the cache's, and its ``written`` for this layer; ``tables``:
    the rows' pages in the old layer and in the new one, where they are in pages."""
    old = old.near()
    if old.tail is not None:
        old = replace(old, fetched=(old.keys, old.values))  # so it is not fetched again
    limit = UNLIMITED if policy.layout.limit is None else policy.layout.limit
    alike = old.tail is not None and old.policy.block == policy.block
    before, after = tables
    tokens = functools.partial(tokens_at, old, length, marks, before)
    blocks = functools.partial(blocks_at, old, length, marks, before) if alike else None
    layer, written, lost = build_layer(old, policy, length, tokens, blocks, after)
    return layer, written, length > limit, lost
