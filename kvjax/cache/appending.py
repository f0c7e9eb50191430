"""Write a call's tokens, a layer at a time, and count them as held.

A step appends each layer's new keys and values, lets its queries attend, and at the end advances
all rows at once::

    cache = append(cache, layer, keys, values, rotary=table)
    mixed = attend(queries, cache, layer, rotary=table)
    ...                                                    # the other layers
    cache = advance(cache, new)

Rows are independent. Each has its own cursor, ``length``, where its next token goes, so rows of
different lengths need no padding on the left. Keys and queries come unrotated: the cache knows
the positions and turns them.
"""

import functools
from dataclasses import replace
from typing import cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kvjax.cache.admission import begun, check_new, in_step, note_numbers
from kvjax.cache.explicit import automatic
from kvjax.cache.fetching import fetched_ahead
from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache, Pending, with_rows
from kvjax.cache.status import MISSED_LAYER
from kvjax.cache.storing import store_tokens
from kvjax.cache.usable import usable
from kvjax.core.checks import is_traced, whole_number
from kvjax.core.device import fetch
from kvjax.core.numbers import bit_where
from kvjax.core.rotary import RotaryTable
from kvjax.core.target import Target, computing_on
from kvjax.core.typing import Array, Counts, KeysValues, LayerNumber, PerRow


@automatic
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
    cache = usable("kvjax.append", cache, layer=layer, between=False)
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
    cache = begun(cache, keys.shape[2], lengths)
    pending = cache.pending
    assert pending is not None
    count = pending.count
    layers = fetched_ahead(cache.layers, entry, cache.sources, number, (keys, cache.length))
    old = layers[entry]
    keys, values = jnp.asarray(keys), jnp.asarray(values)
    target = old.policy.placement.target()
    rows = cache.length, count
    new = with_tokens(target, old, keys, values, *rows, rotary, cache.table(entry), index)
    if old.tail is not None:
        cache = note_numbers(cache, (keys, values), count)
    new = replace(new, strip_of=None if new.strip is None else index)
    layers = (*layers[:entry], new, *layers[entry + 1 :])
    return replace(cache, layers=layers, pending=_noted(pending, entry, index))


def _noted(pending: Pending, entry: int, index: Array | None) -> Pending:
    """A call in which one more layer has its tokens."""
    if index is None:
        return replace(pending, entries=(*pending.entries, entry))
    # A number that no layer has is missed at the end.
    turns = list(pending.turns)
    turns[entry] = turns[entry].at[index].add(1, mode="drop")
    return replace(pending, turns=tuple(turns))


@automatic
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
    cache = usable("kvjax.advance", cache, between=False)
    new, pending = whole_number("new", new, 0), cache.pending
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
    cache = _all_turns(in_step(cache, lengths), pending)
    length = cache.length + pending.count
    layers = tuple(
        replace(layer, strip=None, strip_of=None, fetched=None) for layer in cache.layers
    )
    written = jnp.maximum(cache.written, length[:, None])
    return with_rows(cache, layers=layers, length=length, written=written, pending=None)


def _all_turns(cache: KVCache, pending: Pending) -> KVCache:
    """A cache after a call, with the status of one that did not go over each layer of its stacks
    once, which is raised where it can be seen."""
    if not pending.turns:
        return cache
    other = jnp.any(jnp.concatenate(pending.turns) != 1)
    if not is_traced(other) and bool(fetch(other)):
        every = [fetch(turns).tolist() for turns in pending.turns]
        raise ValueError(
            f"advance, but layers of the cache's stacks were appended to {every} times, not once"
        )
    return replace(cache, status=cache.status | bit_where(other, MISSED_LAYER))


@functools.partial(jax.jit, static_argnames="target")
def with_tokens(
    target: Target, old: LayerCache, keys: Array, values: Array, length: PerRow, count: PerRow,
    rotary: RotaryTable | None, table: Array | None = None, index: Array | None = None,
) -> LayerCache:  # fmt: skip
    """A layer, or one of a stack, with the first ``count`` tokens of a call behind the ``length``
    of each row. Layers that are alike share a trace, which is made for a target."""
    spread = old.policy.placement.spread
    call = old, keys, values, length, count, rotary, table, index
    with computing_on(target):
        if spread is None:
            parts = store_tokens(*call)
        else:
            specs, tokens, rows = old.specs(), spread.of_tokens(), spread.of_rows()
            everywhere = PartitionSpec()
            given = specs, tokens, tokens, rows, rows, everywhere, rows, everywhere
            made = specs.keys, specs.values, specs.tail, tokens, specs.fetched
            parts = spread.run(store_tokens, given, made, *call)
    keys, values, tail, strip, fetched = parts
    return replace(old, keys=keys, values=values, tail=tail, strip=strip, fetched=fetched)
