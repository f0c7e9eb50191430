"""What attention walks: runs of slots that are stored alike, with the positions they hold."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.layer import Strip
from kvjax.cache.state import LayerCache
from kvjax.codecs import Codec, Store, long_mix, long_scores, plain_mix, plain_scores, tokens_of
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.typing import Array, Rows
from kvjax.layouts import Layout, Part, Region, Share, divided, shared
from kvjax.placement.device import Device


@dataclass(frozen=True)
class Segment:
    """Units of a store, on axis 2: tokens, or blocks of them.

    ``keys``, ``values`` and their codecs; ``first`` and ``size``: which units; ``unit``: tokens of
    one. ``part``: ``"body"`` or ``"raw"`` of a layer with a tail, None of others. ``capped``:
    sinks, which queries look at from a capped distance. ``whole``: these are all units of arrays
    that can be multiplied as they are. ``table``: to turn keys by that are stored
    unrotated. ``placement``: where the stores are kept. ``place(units)`` -> int32[batch, tokens],
    the positions of some units' tokens, -1 for none; ``span(start, size)``: the lowest and highest
    of them, over all rows; ``filled(near)``: how many units from the first on may hold anything,
    where rows have ``near`` tokens.
    """

    keys: Store
    values: Store
    codecs: tuple[Codec, Codec]
    first: int
    size: int
    place: Callable[[Array], Array]
    span: Callable[[Array, int], tuple[Array, Array]]
    filled: Callable[[Rows], Array]
    unit: int = 1
    part: str | None = None
    capped: bool = False
    whole: bool = False
    table: RotaryTable | None = None
    placement: Device = field(default_factory=Device)

    def positions(self, units: Array, start: Array | int) -> Array:
        """int32[batch, tokens] of ``units``; those before ``start`` have been seen already."""
        new = jnp.repeat(units >= start, self.unit) if self.unit > 1 else units >= start
        return jnp.where(new, self.place(units), -1)

    def scores(self, queries: Array, keys: Store, positions: Array, *, long: bool = False) -> Array:
        """Queries [batch, kv_heads, rows, head_dim] times keys as stored: float32[batch,
        kv_heads, rows, tokens]. ``long``: of a whole segment, on a CPU."""
        codec = self.codecs[0]
        if long:
            return long_scores(queries, codec.decode(keys))
        if self.table is None:
            return codec.scores(queries, keys)
        turned = apply_rotary(tokens_of(codec.decode(keys)), positions.clip(0), self.table)
        return plain_scores(queries, turned)

    def mix(self, weights: Array, values: Store, positions: Array | None, dtype: str) -> Array:
        """Weights [batch, kv_heads, rows, tokens] times values as stored: float32[batch,
        kv_heads, rows, head_dim]. ``positions``: values of slots that have none are left out; None
        is a whole segment, on a CPU."""
        codec = self.codecs[1]
        if positions is None:
            return long_mix(weights, codec.decode(values))
        if codec.blockwise:
            return codec.mix(weights, values)
        # What an earlier text left in an empty slot may be no number, and no weight makes that 0.
        present = jnp.where(positions[:, None, :, None] >= 0, tokens_of(codec.decode(values)), 0)
        return plain_mix(weights, present.astype(dtype))

    def part_of(self, start: Array, size: int) -> tuple[Store, Store]:
        """Keys and values of so many units from ``start`` on."""
        part = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, size, axis=2), (self.keys, self.values)
        )
        return self.placement.near(part)


def segments(
    held: LayerCache,
    before: Rows,
    length: Rows,
    marks: Rows,
    table: RotaryTable | None,
    share: Share | None = None,
) -> list[Segment]:
    """A layer's segments, in the order they are walked.

    Args:
      held: the layer, with a call's tokens appended.
      before, length: int32[batch], tokens a row without and with the call's.
      marks: int32[batch], the layer's ``written`` before the call.
      table: the layer's rotary table.
      share: of its slots, where devices divide them; None for all. What every device has, the
        newest tokens, is divided as well, to be counted once.
    """
    policy, written = held.policy, jnp.maximum(marks, length)
    if held.tail is None:
        stores, codecs = (held.keys, held.values), (policy.keys, policy.values)
        return [
            _region(stores, codecs, layout, region, length, written, None, None)
            for region, layout in _walked(policy.stored, share, shared)
        ]
    split, raw = replace(policy.split, share=share), policy.raw
    assert raw is not None
    table = table if policy.keys.before_rotary else None
    stores, place = (held.keys, held.values), policy.placement
    if held.fetched is not None:
        stores, place = held.fetched, Device()
    body = Segment(
        *stores, (policy.keys, policy.values), 0, split.body.slots,
        lambda units: split.body_positions(length, written, units),
        lambda start, size: split.body_bounds(length, start, size),
        lambda near: split.body.occupied(split.flushed(near)),
        split.block, "body", table=table, placement=place,
    )  # fmt: skip
    tail = held.tail.keys, held.tail.values
    regions = [
        _region(tail, raw, layout, region, length, written, "raw", table)
        for region, layout in _walked(split.tail, share, divided)
    ]
    if held.strip is not None:
        old = held.strip.tail
        own = _own(held.strip, raw, split.tail.sinks, before, length, table, share)
        marks = jnp.maximum(marks, before)
        last, layout = _walked(split.tail, share, divided)[-1]
        kept = _region((old.keys, old.values), raw, layout, last, before, marks, "raw", table)
        regions[-1:] = [kept, own]
    return [body, *regions]


def _walked(
    layout: Layout, share: Share | None, of: Callable[[Layout, Share], Part]
) -> list[tuple[Region, Any]]:
    """A layout's regions, and what says where their tokens stand: itself, or a part of it."""
    if share is None:
        return [(region, layout) for region in layout.regions()]
    return of(layout, share).regions()


def _region(
    stores: tuple[Store, Store],
    codecs: tuple[Codec, Codec],
    layout: Layout | Part,
    region: Region,
    length: Rows,
    written: Rows,
    part: str | None,
    table: RotaryTable | None,
) -> Segment:
    """One of a layout's regions."""
    return Segment(
        *stores, codecs, region.first, region.size,
        lambda slots: layout.positions(length, written, slots),
        lambda start, size: layout.bounds(length, start, size),
        lambda near: layout.occupied(jnp.minimum(near, length)) - region.first,
        1, part, region.capped, part is None and region.size == layout.slots, table,
    )  # fmt: skip


def _own(
    strip: Strip,
    raw: tuple[Codec, Codec],
    sinks: int,
    before: Rows,
    length: Rows,
    table: RotaryTable | None,
    share: Share | None,
) -> Segment:
    """A long call's own tokens, but for sinks, which have been written to slots of their own."""
    count = strip.keys.shape[2]
    each = count if share is None else -(-count // share.count)
    first = jnp.int32(0) if share is None else share.index * each

    def place(units: Array) -> Array:
        positions = before[:, None] + units
        there = (positions >= sinks) & (positions < length[:, None])
        if share is not None:
            there &= (units >= first) & (units < first + each)
        return jnp.where(there, positions, -1)

    def span(start: Array, size: int) -> tuple[Array, Array]:
        low, high = jnp.maximum(start, first), jnp.minimum(start + size, first + each)
        last = jnp.minimum(jnp.max(before) + high, jnp.max(length)) - 1
        return jnp.min(before) + low, jnp.where(low < high, last, -1)

    return Segment(
        strip.keys, strip.values, raw, 0, count, place, span,
        lambda near: jnp.minimum(jnp.max(near - before), first + each), 1, "raw", table=table,
    )  # fmt: skip
