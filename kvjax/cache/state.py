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

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.admission import accepted, admit, check_new, note_numbers
from kvjax.cache.appending import with_tokens
from kvjax.cache.layer import LayerCache, fetched_ahead, new_layer, share_of, within
from kvjax.cache.tail import decoded
from kvjax.core.checks import whole_number
from kvjax.core.device import default_device
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.trees import state, static_field, tree_bytes
from kvjax.core.typing import CachedKeysValues, Counts, KeysValues, LayerRows, Rows, SlotPositions
from kvjax.layouts import UNLIMITED
from kvjax.placement.budget import Budget
from kvjax.placement.spread import Spread, spread_over
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import (
    CacheShape,
    layer_sources,
    layer_windows,
    model_dtype,
    rotary_length,
)
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer


@state
class KVCache:
    """A model's cache.

    ``layers``: one ``LayerCache`` a layer, each with its own arrays.
    ``length``: int32[batch], tokens that each row holds.
    ``written``: int32[batch, layers], the most that each row has ever held, for each of ``layers``:
    after a rewind it tells which slots hold tokens that are no longer part of the text.
    ``status``: int32[batch], what traced steps could not raise, as bits; see ``check``.
    ``sources``: for each layer of the model, which of ``layers`` it reads; None where every layer
    has its own.
    ``positions``: how many the model has, None where they do not end.
    ``turned_for``: the length of text that its keys were turned for, where the model's rotary
    frequencies depend on it (dynamic, longrope); it stays when the cache grows.
    ``budget``: the memory that it keeps to when it grows (``make_room``), of ``policy("auto")``.
    """

    layers: tuple[LayerCache, ...]
    length: Rows
    written: LayerRows
    status: Rows
    sources: tuple[int, ...] | None = static_field(default=None)
    positions: int | None = static_field(default=None)
    turned_for: int | None = static_field(default=None)
    budget: Budget | None = static_field(default=None)

    @property
    def batch(self) -> int:
        """Rows."""
        return self.length.shape[0]

    @property
    def max_len(self) -> int:
        """Tokens that a row's text can have, before it must grow where it can."""
        limits = [self.positions, *(layer.policy.layout.limit for layer in self.layers)]
        return min((limit for limit in limits if limit is not None), default=UNLIMITED)

    @property
    def spread(self) -> Spread | None:
        """How it is spread over a mesh; None where it is on one device."""
        return self.layers[0].policy.placement.spread

    @property
    def chunk(self) -> int | None:
        """The most tokens that ``append`` takes in one call; None for any number."""
        chunks = (layer.policy.layout.chunk for layer in self.layers)
        return min((chunk for chunk in chunks if chunk is not None), default=None)

    @property
    def revocable(self) -> int | None:
        """How many of its newest tokens a row can forget at any time; None for all."""
        spans = (layer.policy.revocable for layer in self.layers)
        return min((span for span in spans if span is not None), default=None)

    @property
    def reach(self) -> int:
        """Positions that distances between queries and keys stay below: what rotary kinds that
        depend on the length go by."""
        if self.turned_for is not None:
            return self.turned_for
        return max(layer.policy.layout.reach for layer in self.layers)

    @property
    def grows_to(self) -> int | None:
        """Tokens that it may be grown to; None where no layer grows."""
        layouts = [layer.policy.layout for layer in self.layers]
        if all(layout.grows_to is None for layout in layouts):
            return None
        last = [layout.grows_to or layout.limit for layout in layouts]
        return min(limit for limit in (self.positions, *last) if limit is not None)

    def place(self, number: int) -> int:
        """Which of ``layers`` layer ``number`` of the model reads.

        Raises:
          ValueError: if there is no such layer.
        """
        number = whole_number("layer", number, 0)
        count = len(self.layers if self.sources is None else self.sources)
        if number >= count:
            raise ValueError(f"layer {number}: the cache has {count}, 0 the first")
        return number if self.sources is None else self.sources[number]

    def layer(self, number: int) -> LayerCache:
        """What layer ``number`` of the model reads."""
        return self.layers[self.place(number)]

    def __repr__(self) -> str:
        """What it is and how full, not the arrays."""
        policies = ", ".join(dict.fromkeys(repr(layer.policy) for layer in self.layers))
        return f"KVCache({len(self.layers)} layers of {policies}, length={self.length})"


def init_cache(
    config: CacheShape,
    policy: PolicyChoice | None = None,
    *,
    batch: int = 1,
    max_len: int | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """Allocate an empty cache.

    Args:
      config: the model's config; its ``num_hidden_layers``, ``num_key_value_heads``, ``head_dim``
        and ``dtype`` are read; ``position_limit`` (how many positions the model has), and what
        ``layer_windows`` and ``layer_sources`` go by, where it has them. ``dtype`` may be missing
        where the policy names one.
      policy: one for all layers, a preset's name, or a list with one a layer; by default
        ``policy("static")``.
      batch: rows.
      max_len: tokens a row can hold. A dense layout needs it; a growing one takes it as its limit;
        a ring is made smaller by it where the text is shorter than its window.
      mesh: devices to spread it over, see ``make_mesh``; by default it is on one.

    Raises:
      ValueError: if ``batch`` or ``max_len`` is not a positive whole number, ``max_len`` is more
        than the model has positions, a list of policies has the wrong length, or the mesh does not
        divide the rows.
    """
    return allocate(config, policy, batch=batch, max_len=max_len, mesh=mesh)


def allocate(
    config: CacheShape,
    policy: PolicyChoice | None,
    *,
    batch: int,
    max_len: int | None,
    room: int | None = None,
    mesh: Mesh | None = None,
) -> KVCache:
    """``init_cache`` for a text of ``room`` tokens: what can be enlarged later begins with that,
    and what is fixed takes it where ``max_len`` does not say."""
    batch = whole_number("batch", batch, 1)
    limit = getattr(config, "position_limit", None)
    if max_len is not None:
        max_len = whole_number("max_len", max_len, 1)
    if limit is not None and (max_len or 0) > limit:
        raise ValueError(f"max_len is {max_len}, but the model has only {limit} positions")
    max_len = limit if max_len is None and room is None else max_len
    policies = per_layer(CachePolicy() if policy is None else policy, config)
    windows, sources = layer_windows(config), layer_sources(config)
    kv_heads, head_dim = config.num_key_value_heads, config.head_dim
    if mesh is not None:
        spread = spread_over(mesh, kv_heads)
        spread.check_rows(batch)
        policies = [replace(each, placement=each.placement.over(spread)) for each in policies]
    # A layer that reads another's has none of its own.
    own = [n for n in range(len(policies)) if sources is None or sources[n] == n]
    resolved = [
        policies[n].resolve(max_len, windows[n], model_dtype(config), room=room) for n in own
    ]
    budget = budget_of(policy)
    if budget is not None:
        resolved = within(budget, resolved, [(batch, kv_heads, head_dim)] * len(own))
    layers = [
        new_layer(each, batch, kv_heads, head_dim, windows[n])
        for n, each in zip(own, resolved, strict=True)
    ]
    shapes = (batch,), (batch, len(layers)), (batch,)
    rows: Any = policies[0].placement.put([np.zeros(shape, np.int32) for shape in shapes])
    if sources is not None:
        sources = tuple(own.index(source) for source in sources)
    reach = max(layer.policy.layout.reach for layer in layers)
    return KVCache(
        tuple(layers), *rows, sources=sources, positions=limit,
        turned_for=rotary_length(config, reach), budget=budget,
    )  # fmt: skip


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
    place = cache.place(layer)
    old = cache.layers[place]
    if cache.sources is not None and place in cache.sources[:layer]:
        raise ValueError(f"layer {layer} reads the keys and values of an earlier one")
    if cache.spread is not None:
        cache.spread.check_context()
    check_new(cache, old, keys, "keys")
    check_new(cache, old, values, "values")
    if keys.shape != values.shape:
        raise ValueError(f"keys {keys.shape} and values {values.shape} do not fit each other")
    count = accepted(cache, keys.shape[2], lengths)
    layers = fetched_ahead(cache.layers, place, cache.sources, layer, (keys, cache.length))
    old = layers[place]
    keys, values = jnp.asarray(keys), jnp.asarray(values)
    new = with_tokens(default_device(), old, keys, values, cache.length, count, rotary)
    if old.tail is not None:
        cache = note_numbers(cache, (keys, values), count)
    return replace(cache, layers=(*layers[:place], new, *layers[place + 1 :]))


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
      ValueError: if ``new`` is negative, no whole number or more than ``append`` takes;
        ``lengths`` has not one whole number a row, or one is negative or above ``new`` (where
        traced: the status ``BAD_LENGTHS``).
    """
    new = whole_number("new", new, 0)
    if cache.chunk is not None and new > cache.chunk:
        raise ValueError(f"{new} tokens in a call, but the ring has slack for {cache.chunk}")
    cache, count = admit(cache, new, lengths)
    length = cache.length + count
    layers = tuple(replace(layer, strip=None, fetched=None) for layer in cache.layers)
    written = jnp.maximum(cache.written, length[:, None])
    return with_rows(cache, layers=layers, length=length, written=written)


def with_rows(cache: KVCache, **changes: Any) -> KVCache:
    """A cache with other cursors or status; on a mesh every device has those of its rows, whatever
    they were computed from."""
    changed = replace(cache, **changes)
    if changed.spread is None:
        return changed
    put = changed.layers[0].policy.placement.put
    length, written, status = put((changed.length, changed.written, changed.status))
    return replace(changed, length=length, written=written, status=status)


def read(
    cache: KVCache, layer: int, *, rotary: RotaryTable | None = None
) -> tuple[CachedKeysValues, CachedKeysValues, SlotPositions]:
    """A layer's decoded content, for attention of one's own.

    Behind a tail, the slots of the body come first, then those of the tail, and every position
    stands in one of them, as the query at the row's newest token sees it.

    Args:
      cache: the cache.
      layer: which layer.
      rotary: the layer's table, where its codec stores keys unrotated (``Unrotated``).

    Returns:
      Keys (rotated) and values [batch, kv_heads, slots, head_dim], and the position that each
      slot holds, int32[batch, slots], -1 where it is empty or stale.
    """
    place = cache.place(layer)
    held = cache.layers[place]
    policy, written = held.policy, cache.written[:, place]
    if held.tail is None:
        slots = jnp.arange(policy.stored.slots, dtype=jnp.int32)
        positions = policy.stored.positions(cache.length, written, slots)
        return policy.keys.decode(held.keys), policy.values.decode(held.values), positions
    keys, values, positions = decoded(held.near(), policy, cache.length, written)
    if policy.keys.before_rotary:
        keys = apply_rotary(keys, positions.clip(0), rotary)
    return keys, values, positions


def nbytes(cache: KVCache, spread: Spread | None = None) -> dict[str, int]:
    """Bytes of all layers' keys and values, by the place where they are.

    Args:
      cache: the cache, on one device or on a mesh.
      spread: counts what one device would have of it, were it spread so; ``cache.spread`` is what
        one has of a cache on a mesh.
    """
    totals: dict[str, int] = {}
    for layer in cache.layers:
        if spread is not None:
            layer = share_of(layer, spread)
        body, rest = (layer.keys, layer.values), (layer.tail, layer.strip, layer.fetched)
        for place, held in ((layer.policy.placement.place, body), ("device", rest)):
            if jax.tree.leaves(held):
                totals[place] = totals.get(place, 0) + tree_bytes(held)
    return totals
