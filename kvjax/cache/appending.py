"""Append the keys and values of a call to a cache, layer by layer, and advance its rows.

A step appends the new keys and values of each layer, lets its queries attend, and finally advances
all rows::

    cache = append(cache, layer, keys, values, rotary=table)
    outputs = attend(queries, cache, layer, rotary=table)
    ...                                                    # the other layers
    cache = advance(cache, new)

Rows are independent. Each row has its own ``length``, the position of its next token, so rows of
different lengths need no left padding. Keys and queries are passed unrotated: the cache knows their
positions and rotates them.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kvjax.cache.checks import (
    BAD_LENGTHS,
    BAD_NUMBERS,
    BAD_PAGE,
    MISSED_LAYER,
    OUT_OF_PAGES,
    OUT_OF_STEP,
    OVERFLOW,
    validated,
)
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import Body, LayerCache
from kvjax.cache.paging import take_pages
from kvjax.cache.state import KVCache, PendingAppend, with_rows
from kvjax.cache.storing import store_tokens
from kvjax.core.array_ops import arange_row, flag_where
from kvjax.core.rotary import RotaryTable
from kvjax.core.target import Target, tracing_for
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, Counts, KeysValues, LayerNumber, PerRow
from kvjax.core.validation import ArgumentError, as_int, check_not_symbolic, is_traced


@automatic_axes
def append(
    cache: KVCache,
    layer: LayerNumber,
    keys: KeysValues,
    values: KeysValues,
    *,
    rotary: RotaryTable | None = None,
    lengths: Counts | None = None,
) -> KVCache:
    """Write the new keys and values of a layer after the tokens that each row already has.

    The lengths of the rows do not change. ``advance``, called after all layers, adds the tokens to
    them.

    Args:
      cache: the cache. Donate it to write in place.
      layer: the index of the layer. For a stacked cache it may be traced. With several stacks, a
        traced index is a pair: the index of the stack, and the index of the layer in it.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary: the layer's rotary table, or None for keys without rotary positions.
      lengths: int32[batch], how many of the ``new`` tokens of each row are real. The others are
        padding and are not written. By default they are the previous layer's lengths, and ``new``
        for the first layer.

    Returns:
      The updated cache. A row in which the tokens do not fit is unchanged and gets the status
      ``OVERFLOW``. A row whose ``lengths`` differ from its ``lengths`` in previous layers gets the
      status ``OUT_OF_STEP``.

    Raises:
      ValueError: if shapes do not fit the cache, keys or values are not floating-point, the layer
        does not exist or was already appended to in this call, or ``lengths`` is not one integer
        per row from 0 to ``new``. Traced ``lengths`` that are out of range give the status
        ``BAD_LENGTHS`` instead.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      keys = values = jnp.ones((1, 2, 3, 64))
      for layer in range(lm.config.num_hidden_layers):
          cache = kvjax.append(cache, layer, keys, values)
      cache = kvjax.advance(cache, 3)
      ```
    """
    cache = validated("kvjax.append", cache, layer=layer, between=False)
    entry, index = cache.at(layer)
    old = cache.layers[entry]
    number = cast(int, layer)  # caches with sources have no traced layers and no stacks
    if cache.sources is not None and entry in cache.sources[:number]:
        raise ValueError(f"layer {layer} reads the keys and values of an earlier one")
    if cache.pending is not None and entry in cache.pending.entries:
        raise ValueError(
            f"layer {layer} has been appended to in this call: end the call with "
            f"kvjax.advance(cache, {cache.pending.new}) first"
        )
    if cache.mesh_sharding is not None:
        cache.mesh_sharding.check_context()
    check_new(cache, old, keys, "keys")
    check_new(cache, old, values, "values")
    if keys.shape != values.shape:
        raise ValueError(f"keys {keys.shape} and values {values.shape} have different shapes")
    cache = begin_append(cache, keys.shape[2], lengths)
    pending = cache.pending
    assert pending is not None
    after = keys, cache.length
    layers = prefetch_bodies(cache.layers, entry, cache.sources, number, after)
    old = layers[entry]
    keys, values = jnp.asarray(keys), jnp.asarray(values)
    target = old.policy.placement.target()
    rows = cache.length, pending.count
    new = write_layer(target, old, keys, values, *rows, rotary, cache.table(entry), index)
    if old.tail is not None:
        cache = note_numbers(cache, (keys, values), pending.count)
    new = replace(new, strip_of=None if new.strip is None else index)
    layers = (*layers[:entry], new, *layers[entry + 1 :])
    return replace(cache, layers=layers, pending=_with_entry(pending, entry, index))


@automatic_axes
def advance(cache: KVCache, new: int, lengths: Counts | None = None) -> KVCache:
    """End a call (one forward pass): add the appended tokens to the length of each row.

    Args:
      cache: the cache, after ``append`` for every layer.
      new: the number of tokens per row in this call, including padding.
      lengths: int32[batch], how many of the ``new`` tokens of each row are real; by default the
        lengths that ``append`` received.

    Returns:
      The cache with increased lengths. Rows in which the tokens did not fit keep their length. Rows
      whose ``lengths`` differ from their ``lengths`` in ``append`` get the status ``OUT_OF_STEP``.

    Raises:
      ValueError: if ``new`` is not the number of tokens that were appended, nothing was appended to
        a layer, or ``lengths`` is invalid; see ``append``.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      keys = values = jnp.ones((1, 2, 3, 64))
      for layer in range(lm.config.num_hidden_layers):
          cache = kvjax.append(cache, layer, keys, values)
      cache = kvjax.advance(cache, 3)
      print(cache.length)  # [3]
      ```
    """
    cache = validated("kvjax.advance", cache, between=False)
    new, pending = as_int("new", new, 0), cache.pending
    if pending is None:
        raise ValueError("nothing to advance: no tokens were appended since the last advance")
    if new != pending.new:
        raise ValueError(f"advance by {new}, but {pending.new} token(s) a row were appended")
    unstacked = [n for n, layer in enumerate(cache.layers) if layer.stack is None]
    missing = [n for n in unstacked if n not in pending.entries]
    if missing:
        raise ValueError(
            f"advance, but {len(missing)} of {len(cache.layers)} layers with keys and values of "
            f"their own were not appended to, the first is number {missing[0]}"
        )
    cache = _check_stacks(check_lengths(cache, lengths), pending)
    length = cache.length + pending.count
    layers = tuple(
        replace(layer, strip=None, strip_of=None, fetched=None) for layer in cache.layers
    )
    written = jnp.maximum(cache.written, length[:, None])
    return with_rows(cache, layers=layers, length=length, written=written, pending=None)


def begin_append(cache: KVCache, new: int, lengths: Counts | None) -> KVCache:
    """Begin a call of ``new`` tokens per row, or check that the call in progress has the same
    tokens.

    Raises:
      ValueError: if the call in progress has a different number of tokens, or ``lengths`` is wrong;
        see ``admit`` and ``check_lengths``.
    """
    pending = cache.pending
    if pending is None:
        cache, requested = admit(cache, new, lengths)
        count = requested
        if cache.pools:
            pools, granted, invalid = take_pages(cache, new, requested)
            wrong = flag_where(~granted, OUT_OF_PAGES) | flag_where(invalid, BAD_PAGE)
            cache = replace(cache, pools=pools, status=cache.status | wrong)
            count = jnp.where(granted, requested, 0)
        sizes = (layer.stack for layer in cache.layers if layer.stack is not None)
        append_counts = tuple(jnp.zeros(size, jnp.int32) for size in sizes)
        return replace(cache, pending=PendingAppend(count, requested, new, (), append_counts))
    if new != pending.new:
        raise ValueError(
            f"{new} token(s), but the call began with {pending.new}: give all layers of a call "
            "the same tokens"
        )
    return check_lengths(cache, lengths)


def admit(cache: KVCache, new: int, lengths: Counts | None) -> tuple[KVCache, PerRow]:
    """Decide how many of the ``new`` tokens of a call each row takes: all of its real ones, or
    none.

    Returns:
      The cache, with status bits for rows in which the tokens do not fit or whose ``lengths`` are
      wrong; and the number of tokens that each row takes, int32[batch].

    Raises:
      ValueError: if ``lengths`` is wrong and not traced.
    """
    requested = _real_tokens(cache, new, lengths)
    count = _fitting_tokens(cache, requested)
    status = cache.status | flag_where(count < requested, OVERFLOW)
    if lengths is not None:
        status |= flag_where(requested != jnp.asarray(lengths), BAD_LENGTHS)
    return replace(cache, status=status), count


def check_lengths(cache: KVCache, lengths: Counts | None) -> KVCache:
    """Check that ``lengths`` are the lengths with which the call in progress began.

    Rows whose traced lengths differ get the status ``OUT_OF_STEP``, and keep the first lengths.

    Raises:
      ValueError: if they differ and are not traced.
    """
    pending = cache.pending
    if lengths is None or pending is None:
        return cache
    other = _fitting_tokens(cache, _real_tokens(cache, pending.new, lengths)) != pending.requested
    if not is_traced(other) and np.any(rows := fetch(other)):
        raise ValueError(
            f"lengths of row {int(np.argmax(rows))} differ from the lengths of the call's first "
            "append, which are used; kvjax.rewind removes tokens"
        )
    return replace(cache, status=cache.status | flag_where(other, OUT_OF_STEP))


def _fitting_tokens(cache: KVCache, requested: PerRow) -> PerRow:
    """Return the number of requested tokens of each row, int32[batch], or 0 if they do not all
    fit."""
    return jnp.where(cache.length + requested <= cache.max_len, requested, 0)


def _real_tokens(cache: KVCache, new: int, lengths: Counts | None) -> PerRow:
    """Return the number of real tokens of each row in a call of ``new`` tokens, int32[batch]."""
    if lengths is None:
        return jnp.full_like(cache.length, new)
    if jnp.shape(lengths) != (cache.batch,):
        raise ArgumentError(
            f"lengths must be [batch={cache.batch}], got {list(jnp.shape(lengths))}",
            param="lengths",
        )
    if not is_traced(lengths):
        lengths = np.asarray(fetch(lengths))
        for row in np.flatnonzero((lengths < 0) | (lengths > new)):
            raise ValueError(f"lengths[{row}] is {lengths[row]}, but the call has {new} token(s)")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ArgumentError(f"lengths must be integers, got {lengths.dtype}", param="lengths")
    return jnp.clip(jnp.asarray(lengths, jnp.int32), 0, new)


def check_new(cache: KVCache, layer_cache: LayerCache, x: KeysValues, name: str) -> None:
    """Raise ``ValueError`` if new keys or values do not fit a layer."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ArgumentError(f"{name} must be an array, got a {type(x).__name__}", param=name)
    check_not_symbolic(name, x.shape)
    expected = (cache.batch, layer_cache.kv_heads, layer_cache.head_dim)
    if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != expected:
        raise ArgumentError(
            f"{name} must be [batch={expected[0]}, kv_heads={expected[1]}, new, "
            f"head_dim={expected[2]}], got {list(x.shape)}",
            param=name,
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ArgumentError(f"{name} must be floating-point numbers, got {x.dtype}", param=name)
    chunk = layer_cache.policy.layout.chunk
    if chunk is not None and x.shape[2] > chunk:
        raise ValueError(
            f"{x.shape[2]} tokens in a call, but the ring has slack for {chunk}: append them in "
            f"chunks of at most {chunk}, or give the ring more slack (slack={x.shape[2] - 1})"
        )


def note_numbers(cache: KVCache, arrays: Sequence[Array], count: PerRow) -> KVCache:
    """Record in the status which rows have keys or values that are not finite. A blockwise codec
    would hide them."""
    real = arange_row(arrays[0].shape[2]) < count[:, None]
    bad = [jnp.any(~jnp.isfinite(x), axis=(1, 3)) for x in arrays]
    wrong = jnp.any((bad[0] | bad[1]) & real, axis=1)
    return replace(cache, status=cache.status | flag_where(wrong, BAD_NUMBERS))


def _with_entry(pending: PendingAppend, entry: int, index: Array | None) -> PendingAppend:
    """Record in ``pending`` that an entry of ``KVCache.layers``, or layer ``index`` of it if it is
    a stack, was appended to."""
    if index is None:
        return replace(pending, entries=(*pending.entries, entry))
    # An out-of-range index is dropped. ``advance`` then reports that a layer is missing.
    counts = list(pending.append_counts)
    counts[entry] = counts[entry].at[index].add(1, mode="drop")
    return replace(pending, append_counts=tuple(counts))


def _check_stacks(cache: KVCache, pending: PendingAppend) -> KVCache:
    """Check that a call appended exactly once to each layer of the cache's stacks. If the counts
    are traced, it sets the status ``MISSED_LAYER`` in all rows instead of raising an error."""
    if not pending.append_counts:
        return cache
    other = jnp.any(jnp.concatenate(pending.append_counts) != 1)
    if not is_traced(other) and bool(fetch(other)):
        counts = [fetch(x).tolist() for x in pending.append_counts]
        raise ValueError(
            f"advance, but layers of the cache's stacks were appended to {counts} times, not once"
        )
    return replace(cache, status=cache.status | flag_where(other, MISSED_LAYER))


@functools.partial(jax.jit, static_argnames="target")
def write_layer(
    target: Target,
    old: LayerCache,
    keys: Array,
    values: Array,
    length: PerRow,
    count: PerRow,
    rotary: RotaryTable | None,
    table: Array | None = None,
    index: Array | None = None,
) -> LayerCache:
    """Write the first ``count`` tokens of a call after the ``length`` tokens of each row, to a
    layer or to layer ``index`` of a stack. Returns the updated layer or stack. Equal layers share
    one trace."""
    mesh_sharding = old.policy.placement.mesh_sharding
    args = old, keys, values, length, count, rotary, table, index
    with tracing_for(target):
        if mesh_sharding is None:
            parts = store_tokens(*args)
        else:
            specs = old.partition_specs()
            tokens = mesh_sharding.token_spec()
            rows = mesh_sharding.row_spec()
            replicated = PartitionSpec()
            in_specs = specs, tokens, tokens, rows, rows, replicated, rows, replicated
            out_specs = specs.keys, specs.values, specs.tail, tokens, specs.fetched
            parts = mesh_sharding.run(store_tokens, in_specs, out_specs, *args)
    keys, values, tail, strip, fetched = parts
    return replace(old, keys=keys, values=values, tail=tail, strip=strip, fetched=fetched)


def prefetch_bodies(
    layers: tuple[LayerCache, ...],
    entry: int,
    sources: tuple[int, ...] | None,
    number: int,
    after: tuple[KeysValues, PerRow],
) -> tuple[LayerCache, ...]:
    """Fetch the bodies of the next layers from the host, and drop fetched bodies that are no longer
    needed.

    Args:
      layers: the layers of a cache.
      entry: the index of the current layer in ``layers``.
      number: the index of the current layer in the model.
      sources: see ``KVCache.sources``.
      after: the keys and lengths of the call. A fetch starts only after they are computed, except
        in the first layer.
    """
    later = set(() if sources is None else sources[number:])
    result = list(layers)
    for n, layer in enumerate(layers):
        placement = layer.policy.placement
        ahead = placement.ahead if layer.stack is None and placement.memory_kind else 0
        if n < entry and n not in later:
            result[n] = replace(layer, fetched=None)
        elif ahead and entry <= n <= entry + ahead and layer.fetched is None:
            result[n] = replace(layer, fetched=_fetch_body(layer, after if entry else None))
    return tuple(result)


def _fetch_body(layer: LayerCache, after: tuple[KeysValues, PerRow] | None) -> Body:
    """Copy the body of a layer to device memory. On a mesh, each device copies its shard."""
    placement, stores = layer.policy.placement, (layer.keys, layer.values)
    mesh_sharding = placement.mesh_sharding
    if mesh_sharding is None or after is None:
        return placement.near(stores, after)
    specs = layer.partition_specs()
    body_specs = specs.keys, specs.values
    rest = mesh_sharding.token_spec(), mesh_sharding.row_spec()
    return mesh_sharding.run(placement.near, (body_specs, rest), body_specs, stores, after)
