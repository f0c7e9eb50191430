"""Append the keys and values of a call to a cache, layer by layer, and advance its rows."""

import functools
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
from kvjax.core.validation import as_int, check_not_symbolic, is_traced


def prefetch_bodies(
    layers: tuple[LayerCache, ...],
    entry: int,
    sources: tuple[int, ...] | None,
    number: int,
    after: tuple[KeysValues, PerRow],
) -> tuple[LayerCache, ...]:
    """The layers, with those bodies on the device, or on their way, that are to be by the turn of
    layer ``number`` of the model at ``entry``, and no others: but for the first layer, fetching
    begins when ``after`` is there, its keys and the rows' lengths."""
    later = set(() if sources is None else sources[number:])
    found = list(layers)
    for n, held in enumerate(layers):
        placement = held.policy.placement
        ahead = placement.ahead if held.stack is None and placement.memory_kind else 0
        if n < entry and n not in later:
            found[n] = replace(held, fetched=None)
        elif ahead and entry <= n <= entry + ahead and held.fetched is None:
            found[n] = replace(held, fetched=_near(held, after if entry else None))
    return tuple(found)


def _near(held: LayerCache, after: tuple[KeysValues, PerRow] | None) -> Body:
    """A layer's body on the device; on a mesh, each device's own."""
    placement, stores = held.policy.placement, (held.keys, held.values)
    spread = placement.spread
    if spread is None or after is None:
        return placement.near(stores, after)
    specs = held.partition_specs()
    bodies, rest = (specs.keys, specs.values), (spread.token_spec(), spread.row_spec())
    return spread.run(placement.near, (bodies, rest), bodies, stores, after)


def begin_append(cache: KVCache, new: int, lengths: Counts | None) -> KVCache:
    """The cache in a call of ``new`` tokens a row: that of an earlier layer's ``append``, or one
    that begins. Rows that are given other ``lengths`` than before get the status ``OUT_OF_STEP``.

    Raises:
      ValueError: if the call has begun with another number of tokens; as ``admit``.
    """
    pending = cache.pending
    if pending is None:
        cache, asked = admit(cache, new, lengths)
        count = asked
        if cache.pools:
            pools, had, astray = take_pages(cache, new, asked)
            wrong = flag_where(~had, OUT_OF_PAGES) | flag_where(astray, BAD_PAGE)
            cache = replace(cache, pools=pools, status=cache.status | wrong)
            count = jnp.where(had, asked, 0)
        stacks = (layer.stack for layer in cache.layers if layer.stack is not None)
        turns = tuple(jnp.zeros(each, jnp.int32) for each in stacks)
        return replace(cache, pending=PendingAppend(count, asked, new, (), turns))
    if new != pending.new:
        raise ValueError(
            f"{new} token(s), and the call began with {pending.new}: all layers of a call are "
            "given the same tokens"
        )
    return check_lengths(cache, lengths)


def check_lengths(cache: KVCache, lengths: Counts | None) -> KVCache:
    """A cache whose call has begun; rows whose ``lengths`` are not those that it began with get the
    status ``OUT_OF_STEP``. None goes by those.

    Raises:
      ValueError: if that can be seen.
    """
    pending = cache.pending
    if lengths is None or pending is None:
        return cache
    other = _taken(cache, _real(cache, pending.new, lengths)) != pending.requested
    if not is_traced(other) and np.any(rows := fetch(other)):
        raise ValueError(
            f"lengths of row {int(np.argmax(rows))} are not those that the first append of its "
            "call was given, by which it goes; kvjax.rewind takes tokens back"
        )
    return replace(cache, status=cache.status | flag_where(other, OUT_OF_STEP))


def admit(cache: KVCache, new: int, lengths: Counts | None) -> tuple[KVCache, PerRow]:
    """How many of a call's tokens each row takes, and the cache with the status of those that take
    none because they can't hold them, or because ``lengths`` is wrong.

    Raises:
      ValueError: if ``lengths`` is wrong and not traced, naming the row.
    """
    asked = _real(cache, new, lengths)
    count = _taken(cache, asked)
    status = cache.status | flag_where(count < asked, OVERFLOW)
    if lengths is not None:
        status |= flag_where(asked != jnp.asarray(lengths), BAD_LENGTHS)
    return replace(cache, status=status), count


def note_numbers(cache: KVCache, numbers: tuple[Array, Array], count: PerRow) -> KVCache:
    """Record the rows that are given what is no number: a codec of blocks would hide it."""
    real = arange_row(numbers[0].shape[2]) < count[:, None]
    bad = [jnp.any(~jnp.isfinite(x), axis=(1, 3)) for x in numbers]
    wrong = jnp.any((bad[0] | bad[1]) & real, axis=1)
    return replace(cache, status=cache.status | flag_where(wrong, BAD_NUMBERS))


def check_new(cache: KVCache, held: LayerCache, x: KeysValues, name: str) -> None:
    """Raise ``ValueError`` for new keys or values that do not fit a layer."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ValueError(f"{name} must be an array, got a {type(x).__name__}")
    check_not_symbolic(name, x.shape)
    expected = (cache.batch, held.kv_heads, held.head_dim)
    if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != expected:
        raise ValueError(
            f"{name} must be [batch={cache.batch}, kv_heads={held.kv_heads}, new, "
            f"head_dim={held.head_dim}], got {list(x.shape)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating-point numbers, got {x.dtype}")
    chunk = held.policy.layout.chunk
    if chunk is not None and x.shape[2] > chunk:
        raise ValueError(
            f"{x.shape[2]} tokens in a call, but the ring has slack for {chunk}: feed the text in "
            f"chunks of at most {chunk}, or give the ring more slack (slack={x.shape[2] - 1})"
        )


def _taken(cache: KVCache, asked: PerRow) -> PerRow:
    """int32[batch]: all of the tokens that a row is to take, or none when they would not fit."""
    return jnp.where(cache.length + asked <= cache.max_len, asked, 0)


def _real(cache: KVCache, new: int, lengths: Counts | None) -> PerRow:
    """int32[batch]: real tokens of a call, a row."""
    if lengths is None:
        return jnp.full_like(cache.length, new)
    if jnp.shape(lengths) != (cache.batch,):
        raise ValueError(f"lengths must be [batch={cache.batch}], got {list(jnp.shape(lengths))}")
    if not is_traced(lengths):
        lengths = np.asarray(fetch(lengths))
        for row in np.flatnonzero((lengths < 0) | (lengths > new)):
            raise ValueError(f"lengths of row {row} is {lengths[row]}: the call has {new} tokens")
    if not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"lengths must be whole numbers, got {lengths.dtype}")
    return jnp.clip(jnp.asarray(lengths, jnp.int32), 0, new)


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
    """Write a layer's new keys and values behind what each row holds; ``advance`` makes it count.

    Args:
      cache: the cache; donate it to write in place.
      layer: which layer; of a stacked cache it may be traced, and where not all layers are alike
        it is the number of a stack and that of a layer in it.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary: the layer's table, to rotate keys by, or None.
      lengths: int32[batch], how many of ``new`` are real tokens; by default those of the layer
        before, and of the first layer all. What stands after them is not written.

    Returns:
      The cache. A row that can't hold its tokens is left as it was, and gets the status
      ``OVERFLOW``; one whose layers are given other ``lengths``, ``OUT_OF_STEP``.

    Raises:
      ValueError: if the shapes do not fit the cache, the numbers are not floating-point, there is
        no such layer, or it has been appended to since the last ``advance``; if ``lengths`` has not
        one whole number a row, or one is negative or above ``new`` (where traced: the status
        ``BAD_LENGTHS``).
    """
    cache = validated("kvjax.append", cache, layer=layer, between=False)
    entry, index = cache.at(layer)
    old = cache.layers[entry]
    number = cast(int, layer)  # where it is another it goes by no sources
    if cache.sources is not None and entry in cache.sources[:number]:
        raise ValueError(f"layer {layer} reads the keys and values of an earlier one")
    if cache.pending is not None and entry in cache.pending.entries:
        raise ValueError(
            f"layer {layer} has been appended to in this call: kvjax.advance(cache, "
            f"{cache.pending.new}) ends it, before the next one"
        )
    if cache.spread is not None:
        cache.spread.check_context()
    check_new(cache, old, keys, "keys")
    check_new(cache, old, values, "values")
    if keys.shape != values.shape:
        raise ValueError(f"keys {keys.shape} and values {values.shape} do not fit each other")
    cache = begin_append(cache, keys.shape[2], lengths)
    pending = cache.pending
    assert pending is not None
    count = pending.count
    layers = prefetch_bodies(cache.layers, entry, cache.sources, number, (keys, cache.length))
    old = layers[entry]
    keys, values = jnp.asarray(keys), jnp.asarray(values)
    target = old.policy.placement.target()
    rows = cache.length, count
    new = write_layer(target, old, keys, values, *rows, rotary, cache.table(entry), index)
    if old.tail is not None:
        cache = note_numbers(cache, (keys, values), count)
    new = replace(new, strip_of=None if new.strip is None else index)
    layers = (*layers[:entry], new, *layers[entry + 1 :])
    return replace(cache, layers=layers, pending=_noted(pending, entry, index))


def _noted(pending: PendingAppend, entry: int, index: Array | None) -> PendingAppend:
    """A call in which one more layer has its tokens."""
    if index is None:
        return replace(pending, entries=(*pending.entries, entry))
    # A number that no layer has is missed at the end.
    turns = list(pending.append_counts)
    turns[entry] = turns[entry].at[index].add(1, mode="drop")
    return replace(pending, append_counts=tuple(turns))


@automatic_axes
def advance(cache: KVCache, new: int, lengths: Counts | None = None) -> KVCache:
    """Count the tokens that all layers have appended as held.

    Args:
      cache: the cache after ``append`` on every layer.
      new: tokens a row in this call.
      lengths: int32[batch], the real ones among them; by default those that ``append`` was given.

    Returns:
      The cache with its cursors moved. Rows that could not hold their tokens stay where they were;
      those whose ``lengths`` are not those of ``append`` get the status ``OUT_OF_STEP``.

    Raises:
      ValueError: if ``new`` is no whole number or not that of ``append``, a layer has not been
        appended to, or ``lengths`` is wrong, as of ``append``.
    """
    cache = validated("kvjax.advance", cache, between=False)
    new, pending = as_int("new", new, 0), cache.pending
    if pending is None:
        raise ValueError("advance counts what was appended, and nothing was since the last advance")
    if new != pending.new:
        raise ValueError(f"advance by {new}, but {pending.new} token(s) a row were appended")
    alone = [n for n, layer in enumerate(cache.layers) if layer.stack is None]
    missing = [n for n in alone if n not in pending.entries]
    if missing:
        raise ValueError(
            f"advance, but {len(missing)} of {len(cache.layers)} layers that have keys and values "
            f"of their own were not appended to, number {missing[0]} the first of them"
        )
    cache = _all_turns(check_lengths(cache, lengths), pending)
    length = cache.length + pending.count
    layers = tuple(
        replace(layer, strip=None, strip_of=None, fetched=None) for layer in cache.layers
    )
    written = jnp.maximum(cache.written, length[:, None])
    return with_rows(cache, layers=layers, length=length, written=written, pending=None)


def _all_turns(cache: KVCache, pending: PendingAppend) -> KVCache:
    """A cache after a call, with the status of one that did not go over each layer of its stacks
    once, which is raised where it can be seen."""
    if not pending.append_counts:
        return cache
    other = jnp.any(jnp.concatenate(pending.append_counts) != 1)
    if not is_traced(other) and bool(fetch(other)):
        every = [fetch(turns).tolist() for turns in pending.append_counts]
        raise ValueError(
            f"advance, but layers of the cache's stacks were appended to {every} times, not once"
        )
    return replace(cache, status=cache.status | flag_where(other, MISSED_LAYER))


@functools.partial(jax.jit, static_argnames="target")
def write_layer(
    target: Target, old: LayerCache, keys: Array, values: Array, length: PerRow, count: PerRow,
    rotary: RotaryTable | None, table: Array | None = None, index: Array | None = None,
) -> LayerCache:  # fmt: skip
    """A layer, or one of a stack, with the first ``count`` tokens of a call behind the ``length``
    of each row. Layers that are alike share a trace, which is made for a target."""
    spread = old.policy.placement.spread
    call = old, keys, values, length, count, rotary, table, index
    with tracing_for(target):
        if spread is None:
            parts = store_tokens(*call)
        else:
            specs, tokens, rows = old.partition_specs(), spread.token_spec(), spread.row_spec()
            everywhere = PartitionSpec()
            given = specs, tokens, tokens, rows, rows, everywhere, rows, everywhere
            made = specs.keys, specs.values, specs.tail, tokens, specs.fetched
            parts = spread.run(store_tokens, given, made, *call)
    keys, values, tail, strip, fetched = parts
    return replace(old, keys=keys, values=values, tail=tail, strip=strip, fetched=fetched)
