"""What a call may append: how many of its tokens each row takes, and what it is refused for."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.layer import LayerCache
from kvjax.cache.paging import pages_taken
from kvjax.cache.state import KVCache, Pending
from kvjax.cache.status import (
    BAD_LENGTHS,
    BAD_NUMBERS,
    BAD_PAGE,
    OUT_OF_PAGES,
    OUT_OF_STEP,
    OVERFLOW,
)
from kvjax.core.checks import is_traced, refuse_symbolic
from kvjax.core.device import fetch
from kvjax.core.numbers import bit_where, each_place
from kvjax.core.typing import Array, Counts, KeysValues, PerRow, Positions


def begun(cache: KVCache, new: int, lengths: Counts | None) -> KVCache:
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
            pools, had, astray = pages_taken(cache, new, asked)
            wrong = bit_where(~had, OUT_OF_PAGES) | bit_where(astray, BAD_PAGE)
            cache = replace(cache, pools=pools, status=cache.status | wrong)
            count = jnp.where(had, asked, 0)
        stacks = (layer.stack for layer in cache.layers if layer.stack is not None)
        turns = tuple(jnp.zeros(each, jnp.int32) for each in stacks)
        return replace(cache, pending=Pending(count, asked, new, (), turns))
    if new != pending.new:
        raise ValueError(
            f"{new} token(s), and the call began with {pending.new}: all layers of a call are "
            "given the same tokens"
        )
    return in_step(cache, lengths)


def in_step(cache: KVCache, lengths: Counts | None) -> KVCache:
    """A cache whose call has begun; rows whose ``lengths`` are not those that it began with get the
    status ``OUT_OF_STEP``. None goes by those.

    Raises:
      ValueError: if that can be seen.
    """
    pending = cache.pending
    if lengths is None or pending is None:
        return cache
    other = _taken(cache, _real(cache, pending.new, lengths)) != pending.asked
    if not is_traced(other) and np.any(rows := fetch(other)):
        raise ValueError(
            f"lengths of row {int(np.argmax(rows))} are not those that the first append of its "
            "call was given, by which it goes; kvjax.rewind takes tokens back"
        )
    return replace(cache, status=cache.status | bit_where(other, OUT_OF_STEP))


def positions_from(length: PerRow, new: int) -> Positions:
    """int32[batch, new]: the positions of a call's tokens, in rows of ``length``."""
    return length[:, None] + each_place(new)


def admit(cache: KVCache, new: int, lengths: Counts | None) -> tuple[KVCache, PerRow]:
    """How many of a call's tokens each row takes, and the cache with the status of those that take
    none because they can't hold them, or because ``lengths`` is wrong.

    Raises:
      ValueError: if ``lengths`` is wrong and not traced, naming the row.
    """
    asked = _real(cache, new, lengths)
    count = _taken(cache, asked)
    status = cache.status | bit_where(count < asked, OVERFLOW)
    if lengths is not None:
        status |= bit_where(asked != jnp.asarray(lengths), BAD_LENGTHS)
    return replace(cache, status=status), count


def note_numbers(cache: KVCache, numbers: tuple[Array, Array], count: PerRow) -> KVCache:
    """Record the rows that are given what is no number: a codec of blocks would hide it."""
    real = each_place(numbers[0].shape[2]) < count[:, None]
    bad = [jnp.any(~jnp.isfinite(x), axis=(1, 3)) for x in numbers]
    wrong = jnp.any((bad[0] | bad[1]) & real, axis=1)
    return replace(cache, status=cache.status | bit_where(wrong, BAD_NUMBERS))


def check_new(cache: KVCache, held: LayerCache, x: KeysValues, name: str) -> None:
    """Raise ``ValueError`` for new keys or values that do not fit a layer."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise ValueError(f"{name} must be an array, got a {type(x).__name__}")
    refuse_symbolic(name, x.shape)
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
