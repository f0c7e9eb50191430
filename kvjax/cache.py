"""The cache: an immutable pytree of arrays, and the pure functions on it.

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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax._checks import whole_number
from kvjax._errors import CacheOverflowError, NonFiniteError
from kvjax._tree import state, static_field, tree_bytes
from kvjax._typing import (
    Array,
    CachedKeysValues,
    Counts,
    KeysValues,
    Positions,
    Rows,
    SlotPositions,
)
from kvjax.policy import CachePolicy, per_layer
from kvjax.rotary import RotaryTable, apply_rotary

OVERFLOW = 1
"""Status bit: tokens past the capacity were dropped."""
NON_FINITE = 2
"""Status bit: the model gave logits that are not finite."""
REWOUND_TOO_FAR = 4
"""Status bit: a rewind asked for more tokens than the row holds."""
BAD_LENGTHS = 8
"""Status bit: ``lengths`` was negative or more than the tokens of its call."""


class CacheShape(Protocol):
    """What ``init_cache`` asks of a model's config; any object with these attributes serves."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...


@state
class LayerCache:
    """Keys and values of one layer, as their codecs store them, and the policy they follow.

    With ``Raw`` codecs both are arrays [batch, kv_heads, slots, head_dim].
    """

    keys: Any
    values: Any
    policy: CachePolicy = static_field()
    kv_heads: int = static_field()
    head_dim: int = static_field()


@state
class KVCache:
    """A model's cache.

    ``layers``: one ``LayerCache`` a layer, each with its own arrays.
    ``length``: int32[batch], tokens that each row holds.
    ``written``: int32[batch], the most that each row has ever held: after a rewind it tells which
    slots hold tokens that are no longer part of the text.
    ``status``: int32[batch], what traced steps could not raise, as bits; see ``check``.
    """

    layers: tuple[LayerCache, ...]
    length: Rows
    written: Rows
    status: Rows

    @property
    def batch(self) -> int:
        """Rows."""
        return self.length.shape[0]

    @property
    def max_len(self) -> int:
        """Tokens that a row can hold."""
        return min(layer.policy.layout.slots for layer in self.layers)

    def __repr__(self) -> str:
        """What it is and how full, not the arrays."""
        policies = ", ".join(dict.fromkeys(repr(layer.policy) for layer in self.layers))
        return f"KVCache({len(self.layers)} layers of {policies}, length={self.length})"


def init_cache(
    config: CacheShape,
    policy: str | CachePolicy | Sequence[CachePolicy] | None = None,
    *,
    batch: int = 1,
    max_len: int,
) -> KVCache:
    """Allocate an empty cache.

    Args:
      config: the model's config; its ``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``
        and ``dtype`` are read, and ``position_limit`` where it has one. ``dtype`` may be missing
        where the policy names one.
      policy: one for all layers, or a list with one a layer; by default ``policy("static")``.
      batch: rows.
      max_len: tokens a row can hold.

    Raises:
      ValueError: if ``batch`` or ``max_len`` is not a positive whole number, ``max_len`` is more
        than the model has positions, or a list of policies has the wrong length.
    """
    batch, max_len = whole_number("batch", batch, 1), whole_number("max_len", max_len, 1)
    limit = getattr(config, "position_limit", None)
    if limit is not None and max_len > limit:
        raise ValueError(f"max_len is {max_len}, but the model has only {limit} positions")
    policies = per_layer(CachePolicy() if policy is None else policy, config.num_hidden_layers)
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    layers = []
    for layer_policy in policies:
        resolved = layer_policy.resolve(max_len, getattr(config, "dtype", None))
        shape = (batch, kv_heads, resolved.layout.slots, head_dim)
        stores = resolved.keys.empty(shape), resolved.values.empty(shape)
        layers.append(LayerCache(*resolved.placement.put(stores), resolved, kv_heads, head_dim))
    rows = [policies[0].placement.put(jnp.zeros(batch, jnp.int32)) for _ in range(3)]
    return KVCache(tuple(layers), *rows)


def append(
    cache: KVCache,
    layer: int,
    keys: KeysValues,
    values: KeysValues,
    *,
    rotary: RotaryTable | None = None,
    lengths: Counts | None = None,
) -> KVCache:
    """Write a layer's new keys and values behind what each row holds; ``advance`` makes it count.

    Args:
      cache: the cache; donate it to write in place.
      layer: which layer.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary: the layer's table, to rotate keys by, or None.
      lengths: int32[batch], how many of ``new`` are real tokens; by default all. What stands
        after them is not written.

    Returns:
      The cache. A row that can't hold its tokens is left as it was.

    Raises:
      ValueError: if the shapes do not fit the cache, the numbers are not floating-point, or there
        is no such layer.
    """
    if not 0 <= layer < len(cache.layers):
        raise ValueError(f"layer {layer}: the cache has {len(cache.layers)}, 0 the first")
    old = cache.layers[layer]
    _check_new(cache, old, keys, "keys")
    _check_new(cache, old, values, "values")
    if keys.shape != values.shape:
        raise ValueError(f"keys {keys.shape} and values {values.shape} do not fit each other")
    layout = old.policy.layout
    count = accepted(cache, layer, keys.shape[2], lengths)
    start = layout.first_slot(cache.length)
    turned = apply_rotary(keys, query_positions(cache, keys.shape[2]), rotary)

    def write(store: Any, encoded: Any) -> Any:
        return jax.tree.map(lambda into, x: _write_rows(into, x, start, count), store, encoded)

    new = replace(
        old,
        keys=write(old.keys, old.policy.keys.encode(turned)),
        values=write(old.values, old.policy.values.encode(jnp.asarray(values))),
    )
    return replace(cache, layers=(*cache.layers[:layer], new, *cache.layers[layer + 1 :]))


def advance(cache: KVCache, new: int, lengths: Counts | None = None) -> KVCache:
    """Count the tokens that all layers have appended as held.

    Args:
      cache: the cache after ``append`` on every layer.
      new: tokens a row in this call.
      lengths: int32[batch], the real ones among them; by default all.

    Returns:
      The cache with its cursors moved. Rows that could not hold their tokens stay where they
      were and get the status ``OVERFLOW``.

    Raises:
      ValueError: if ``lengths`` has not one number a row, or one is negative or above ``new``
        (where traced: the status ``BAD_LENGTHS``).
    """
    asked = _real(cache, new, lengths)
    if lengths is not None and not isinstance(lengths, jax.core.Tracer):
        wrong = np.flatnonzero((np.asarray(lengths) < 0) | (np.asarray(lengths) > new))
        if wrong.size:
            raise ValueError(
                f"lengths of row {wrong[0]} is {int(lengths[wrong[0]])}: the call has {new} tokens"
            )
    count = accepted(cache, 0, new, lengths)
    length = cache.length + count
    status = cache.status | jnp.where(count < asked, OVERFLOW, 0)
    if lengths is not None:
        status |= jnp.where(asked != jnp.asarray(lengths), BAD_LENGTHS, 0)
    written = jnp.maximum(cache.written, length)
    return replace(cache, length=length, written=written, status=status)


def note_non_finite(cache: KVCache, rows: Array) -> KVCache:
    """Record that the logits of ``rows``, bool[batch], are not finite numbers; see ``check``."""
    return replace(cache, status=cache.status | jnp.where(rows, NON_FINITE, 0))


def read(cache: KVCache, layer: int) -> tuple[CachedKeysValues, CachedKeysValues, SlotPositions]:
    """A layer's decoded content, for attention of one's own.

    Returns:
      Keys (rotated) and values [batch, kv_heads, slots, head_dim], and the position that each
      slot holds, int32[batch, slots], -1 where it is empty or stale.
    """
    held = cache.layers[layer]
    layout = held.policy.layout
    positions = layout.positions(cache.length, cache.written, jnp.arange(layout.slots))
    return held.policy.keys.decode(held.keys), held.policy.values.decode(held.values), positions


def rewind(cache: KVCache, tokens: int | Counts) -> KVCache:
    """Forget the newest tokens.

    Args:
      cache: the cache.
      tokens: how many, for all rows, or int32[batch], one number a row.

    Returns:
      The cache. A row that holds fewer is emptied and gets the status ``REWOUND_TOO_FAR``.

    Raises:
      ValueError: if ``tokens`` is negative or no whole number, or has not one number a row.
    """
    if isinstance(tokens, (int, np.integer)) and tokens < 0:
        raise ValueError(f"rewind takes tokens away: {tokens} is negative")
    tokens = jnp.asarray(tokens)
    if not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape not in ((), (cache.batch,)):
        raise ValueError(
            f"rewind takes a whole number, or int32[batch={cache.batch}], got {tokens.dtype}"
            f"{list(tokens.shape)}"
        )
    tokens = jnp.broadcast_to(tokens.astype(jnp.int32), cache.length.shape)
    wrong = (tokens > cache.length) | (tokens < 0)
    length = jnp.clip(cache.length - tokens, 0, cache.length)
    status = cache.status | jnp.where(wrong, REWOUND_TOO_FAR, 0)
    return replace(cache, length=length, status=status)


def fork(cache: KVCache) -> KVCache:
    """A second cache with the same content, which survives the donation of the first."""
    return jax.tree.map(jnp.copy, cache)


def check(cache: KVCache) -> None:
    """Raise what traced steps could only record.

    Raises:
      CacheOverflowError: if a row was given more tokens than it can hold, or was rewound past
        its beginning.
      NonFiniteError: if the model gave logits that are not finite.
      ValueError: if ``lengths`` was negative or more than the tokens of its call.
    """
    status = np.asarray(cache.status)

    def rows(bit: int) -> str:
        return ", ".join(str(row) for row in np.flatnonzero(status & bit))

    if np.any(status & OVERFLOW):
        raise CacheOverflowError(
            f"the cache holds {cache.max_len} tokens a row, and row(s) {rows(OVERFLOW)} were given "
            "more: what did not fit was dropped; start with a larger max_len"
        )
    if np.any(status & REWOUND_TOO_FAR):
        raise CacheOverflowError(
            f"row(s) {rows(REWOUND_TOO_FAR)} were rewound by more tokens than they held"
        )
    if np.any(status & BAD_LENGTHS):
        raise ValueError(
            f"lengths of row(s) {rows(BAD_LENGTHS)} was negative or above the tokens of its call"
        )
    if np.any(status & NON_FINITE):
        raise NonFiniteError(f"the logits of row(s) {rows(NON_FINITE)} are not finite numbers")


def nbytes(cache: KVCache) -> dict[str, int]:
    """Bytes of all layers' keys and values, by the place where they are."""
    totals: dict[str, int] = {}
    for layer in cache.layers:
        place = layer.policy.placement.place
        totals[place] = totals.get(place, 0) + tree_bytes((layer.keys, layer.values))
    return totals


def accepted(cache: KVCache, layer: int, new: int, lengths: Counts | None) -> Rows:
    """int32[batch]: how many of a call's tokens each row of a layer takes."""
    layout = cache.layers[layer].policy.layout
    return layout.accepts(cache.length, _real(cache, new, lengths))


def query_positions(cache: KVCache, new: int) -> Positions:
    """int32[batch, new]: the positions of a call's tokens."""
    return cache.length[:, None] + jnp.arange(new, dtype=jnp.int32)


def _real(cache: KVCache, new: int, lengths: Counts | None) -> Rows:
    if lengths is None:
        return jnp.full_like(cache.length, new)
    if jnp.shape(lengths) != (cache.batch,):
        raise ValueError(f"lengths must be [batch={cache.batch}], got {list(jnp.shape(lengths))}")
    return jnp.clip(jnp.asarray(lengths, jnp.int32), 0, new)


def _check_new(cache: KVCache, held: LayerCache, x: KeysValues, name: str) -> None:
    expected = (cache.batch, held.kv_heads, held.head_dim)
    if x.ndim != 4 or (*x.shape[:2], x.shape[3]) != expected:
        raise ValueError(
            f"{name} must be [batch={cache.batch}, kv_heads={held.kv_heads}, new, "
            f"head_dim={held.head_dim}], got {list(x.shape)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating-point numbers, got {x.dtype}")


def _write_rows(into: Array, x: Array, start: Rows, count: Rows) -> Array:
    """Write ``x[:, :, :count]`` into each row at ``start``, in place, and nothing else.

    A chunk that is padded past the capacity must not push its real tokens to lower slots, as
    ``dynamic_update_slice`` would: the window is moved down, and the old content put back.
    """
    x = x[:, :, : into.shape[2]]
    new = x.shape[2]
    index = jnp.arange(new, dtype=jnp.int32)

    def write(into: Array, x: Array, start: Array, count: Array) -> Array:
        origin = jnp.clip(start, 0, into.shape[1] - new)
        shift = start - origin
        real = (index >= shift) & (index < shift + count)
        if new > 1:
            x = jnp.roll(x, shift, axis=1)
        old = lax.dynamic_slice_in_dim(into, origin, new, axis=1)
        return lax.dynamic_update_slice_in_dim(
            into, jnp.where(real[:, None], x, old), origin, axis=1
        )

    return jax.vmap(write)(into, x, start, count)
