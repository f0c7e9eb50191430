"""The sections of a layer: ranges of slots that attention and `read` walk one after another."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.layer import LayerCache, Strip, Tail, unstacked
from kvjax.codecs import (
    Codec,
    Store,
    long_scores,
    long_weighted_values,
    merge_blocks,
    plain_scores,
    plain_weighted_values,
)
from kvjax.core.array_ops import arange_row, expand_over_rows, expand_over_slots
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.typing import Array, Cursors, PerRow
from kvjax.layouts import Layout, LayoutSlice, Region, Shard, Split, mask_slots, paged, split_slots
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS, restore
from kvjax.placement.pages import fit_units, read_pages


@pytree_dataclass
class LayerView:
    """A layer, with the tokens of a call appended.

    ``before``, ``length``: int32[batch], tokens a row without and with the call's. ``marks``:
    int32[batch], the layer's ``written`` before the call. ``rotary``: the layer's table. ``pages``:
    int32[batch, columns], where the layer is in pages, those of each row. ``index``: int32[], which
    layer of a stack it is, and ``layer`` the same of one that is ``unstacked``.
    """

    layer_cache: LayerCache
    before: PerRow
    length: PerRow
    marks: PerRow
    rotary: RotaryTable | None = None
    pages: Array | None = None
    index: Array | None = None
    layer: Array | None = None

    def unstacked(self) -> "LayerView":
        """That of a layer alone, on a device."""
        if self.index is None:
            return self
        layer_cache = unstacked(self.layer_cache, self.index)
        return replace(self, layer_cache=layer_cache, layer=self.index, index=None)

    def take_rows(self, rows: PerRow) -> "LayerView":
        """That of some rows, int32[n], of a layer in pages, which stay as they are."""
        held = self.layer_cache
        own = held.tail, held.strip, held.low
        mine = own, (self.before, self.length, self.marks, self.pages)
        (tail, strip, low), cursors = jax.tree.map(lambda x: x[rows], mine)
        before, length, marks, pages = cursors
        held = replace(held, tail=tail, strip=strip, low=low)
        return replace(
            self, layer_cache=held, before=before, length=length, marks=marks, pages=pages
        )


def regions_of(
    layout: Layout, of: Callable[[Layout, Shard], LayoutSlice], together: bool, shard: Shard | None
) -> Sequence[tuple[Region, Layout | LayoutSlice]]:
    """A layout's regions, and what says where their tokens stand: itself, or a part of it."""
    if together:
        return [(Region(0, layout.slots), layout)]
    if (pages := paged(layout)) and layout.sinks:
        # A page may have both: each walks it from its beginning, and counts its own.
        ends = [(each, each.first + each.size) for each in layout.regions()]
        return [
            (
                Region(0, pages.whole(end), each.capped),
                LayoutSlice(layout, layout.slots, 0, each.first, end),
            )
            for each, end in ends
        ]
    if shard is None:
        return [(region, layout) for region in layout.regions()]
    return of(layout, shard).regions()


def placed(
    of: Callable[[Shard | None], Any], shard: Shard | None, length: PerRow, written: PerRow
) -> dict[str, Any]:
    """``Section.position_of`` and its cursors, of what ``of`` makes of a share of the slots, which
    is a cursor as well."""

    def position_of(slots: Array, length: Cursors, written: Cursors, *index: Cursors) -> Array:
        own = None if shard is None else Shard(expand_over_slots(index[0]), shard.count)
        return of(own).positions(length, written, slots)

    cursors = (length, written)
    if shard is not None:
        cursors = (*cursors, jnp.broadcast_to(jnp.int32(shard.index), length.shape))
    return {"position_of": position_of, "cursors": cursors}


def own_tokens(split: Split, before: PerRow, length: PerRow, count: int) -> dict[str, Any]:
    """The same, and what else a section is asked, of a long call's own tokens, ``count`` of them
    from ``before`` on."""
    shard = split.shard
    each = count if shard is None else -(-count // shard.count)
    first = jnp.int32(0) if shard is None else shard.index * each

    def position_of(slots: Array, before: Cursors, length: Cursors, first: Cursors) -> Array:
        slots = expand_over_rows(slots, before)
        positions = expand_over_slots(before) + slots
        there = (positions >= split.tail.sinks) & (positions < expand_over_slots(length))
        if shard is not None:
            there &= (slots >= expand_over_slots(first)) & (slots < expand_over_slots(first) + each)
        return jnp.where(there, positions, -1)

    def span(start: Array, size: int) -> tuple[Array, Array]:
        low, high = jnp.maximum(start, first), jnp.minimum(start + size, first + each)
        last = jnp.minimum(jnp.max(before) + high, jnp.max(length)) - 1
        return jnp.min(before) + low, jnp.where(low < high, last, -1)

    return {
        "position_of": position_of,
        "cursors": (before, length, jnp.broadcast_to(first, length.shape)),
        "span": span,
        "filled": lambda near: jnp.minimum(jnp.max(near - before), first + each),
        "slot_of": lambda positions: positions - before[:, None],
    }


@dataclass(frozen=True)
class Section:
    """Units of a store: tokens, or blocks of them.

    ``keys``, ``values`` and their codecs; ``first`` and ``size``: which units; ``unit``: tokens of
    one. ``split``: of a layer with a tail, which tokens queries see raw, and ``raw``: whether these
    are such. ``capped``: sinks, which queries look at from a capped distance. ``whole``: these are
    all units of arrays that can be multiplied as they are. ``table``: to turn keys by that are
    stored unrotated. ``placement``: where the stores are kept, and ``orders``: how. ``pages``:
    int32[batch, columns], where they are of pages of ``page`` units, those of each row. ``layer``:
    int32[], where they are [layers, batch, ...], whose they are.
    ``position_of(slots, *cursors)`` -> int32[batch, slots]: positions of the store's slots of
    tokens, -1 for none, made of each element alone, for kernels make it of one row's ``cursors``;
    ``span(start, size)``: the lowest and highest of them in some units, over all rows;
    ``filled(near)``: how many units from the first on may hold anything, where rows have ``near``
    tokens; ``slot_of(positions)``: where the store has them, if it does, counted in tokens.
    """

    keys: Store
    values: Store
    codecs: tuple[Codec, Codec]
    first: int
    size: int
    position_of: Callable[..., Array]
    cursors: tuple[PerRow, ...]
    span: Callable[[Array, int], tuple[Array, Array]]
    filled: Callable[[PerRow], Array]
    slot_of: Callable[[Array], Array]
    unit: int = 1
    split: Split | None = None
    raw: bool = False
    capped: bool = False
    whole: bool = False
    table: RotaryTable | None = None
    placement: Device = field(default_factory=Device)
    orders: tuple[Any, Any] = (AS_IS, AS_IS)
    pages: Array | None = None
    page: int = 1
    layer: Array | None = None

    def positions(self, units: Array, start: Array | int) -> Array:
        """int32[batch, tokens] of ``units``; those before ``start`` have been seen already."""
        slots = units
        if self.unit > 1:
            slots = (units[:, None] * self.unit + arange_row(self.unit)).ravel()
        there = slots[None] >= start * self.unit
        return jnp.where(there, self.position_of(slots, *self.cursors), -1)

    def scores(self, queries: Array, keys: Store, positions: Array, *, long: bool = False) -> Array:
        """Queries [batch, kv_heads, rows, head_dim] times keys as stored: float32[batch,
        kv_heads, rows, tokens]. ``long``: of a whole section, on a CPU."""
        codec = self.codecs[0]
        if long:
            return long_scores(queries, codec.decode(keys))
        if self.table is None:
            return codec.scores(queries, keys)
        turned = apply_rotary(merge_blocks(codec.decode(keys)), positions.clip(0), self.table)
        return plain_scores(queries, turned)

    def weighted_values(
        self, weights: Array, values: Store, positions: Array | None, dtype: str
    ) -> Array:
        """Weights [batch, kv_heads, rows, tokens] times values as stored: float32[batch,
        kv_heads, rows, head_dim]. ``positions``: values of slots that have none are left out; None
        is a whole section, on a CPU."""
        codec = self.codecs[1]
        if positions is None:
            return long_weighted_values(weights, codec.decode(values))
        if codec.blockwise:
            return codec.weighted_values(weights, values)
        # An earlier text may have left NaN in a slot that is empty now.
        numbers = merge_blocks(codec.decode(values)).astype(dtype)
        return plain_weighted_values(weights, numbers, present=positions[:, None, :, None] >= 0)

    def slice_units(self, start: Array, size: int) -> tuple[Store, Store]:
        """Keys and values of units ``start`` to ``start + size - 1``, in the order of codecs.
        ``size``: see ``fit_units``."""
        stores, layer = (self.keys, self.values), self.layer
        if self.pages is not None:
            where = self.orders, self.placement, self.pages, self.page
            return self._known(read_pages(stores, *where, start, size, layer))
        if layer is None:
            part = jax.tree.map(
                lambda x, order: order.slice_units(x, start, size), stores, self.orders
            )
            return self._known(self.placement.near(part))
        near = self.placement.near
        return self._known(
            jax.tree.map(
                lambda x, o: o.slice_layer(x, layer, start, size, near), stores, self.orders
            )
        )

    def as_pages(self) -> "Section":
        """The same of a stack as pages of one pool, of all layers; where it has none each row is
        one."""
        if self.layer is None:
            return self
        rows = jax.tree.leaves(self.keys)[0].shape[1]
        pages, page = self.pages, self.page
        if pages is None:
            pages, page = jnp.arange(rows, dtype=jnp.int32)[:, None], self._units
        pages = jnp.where(pages >= 0, pages + self.layer * rows, pages)
        keys, values = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (self.keys, self.values))
        return replace(self, keys=keys, values=values, pages=pages, page=page, layer=None)

    @property
    def _units(self) -> int:
        """Of the arrays, which may have more sections."""
        store, order = jax.tree.leaves(self.keys)[0], jax.tree.leaves(self.orders[0])[0]
        units: int = store.shape[order.axis + (self.layer is not None)] // order.stride
        return units

    def fit_units(self, units: int, of: int = 1) -> int:
        """About so many units, a multiple ``of`` so many, as ``part_of`` can give them."""
        whole = self.pages is None or self.size <= self.page
        return units if whole else fit_units(self.page, min(units, self.size), of)

    def _known(self, stores: tuple[Store, Store]) -> tuple[Store, Store]:
        """Stores in the order of codecs, in which most devices keep them."""
        return (
            stores if {*jax.tree.leaves(self.orders)} == {AS_IS} else restore(stores, self.orders)
        )

    def stores(self) -> tuple[Store, Store]:
        """Keys and values of all units of every row, as codecs know them."""
        if self.pages is not None:
            return self.slice_units(jnp.int32(0), self.pages.shape[1] * self.page)
        if self.layer is not None:
            return self.slice_units(jnp.int32(0), self._units)
        return self._known(self.placement.near((self.keys, self.values)))

    def numbers(self) -> tuple[Array, Array, Array]:
        """Keys, rotated or not as they are stored, and values of all units, [batch, kv_heads,
        tokens, head_dim], and the positions of their slots, int32[batch, tokens]."""
        stores, end = self.stores(), self.first + self.size
        stores = jax.tree.map(lambda x: lax.slice_in_dim(x, self.first, end, axis=2), stores)
        keys, values = (
            merge_blocks(codec.decode(store))
            for codec, store in zip(self.codecs, stores, strict=True)
        )
        units = jnp.arange(self.first, end, dtype=jnp.int32)
        return keys, values, self.positions(units, self.first)


def sections(
    view: LayerView, shard: Shard | None = None, *, together: bool = False
) -> list[Section]:
    """A layer's sections, in the order they are walked.

    Args:
      view: the layer.
      shard: of its slots, and of the newest tokens, which all devices have; None for all.
      together: sinks with what is stored in one array with them; queries look at them apart.
    """
    held, length = view.layer_cache, view.length
    policy, written = held.policy, jnp.maximum(view.marks, length)
    if held.tail is None:
        stores, codecs = (held.keys, held.values), (policy.keys, policy.values)
        of = functools.partial(regions_of, policy.stored_layout, split_slots, together)
        return [
            _in_pages(_region(stores, codecs, of, n, shard, length, written), view)
            for n in range(len(of(shard)))
        ]
    split, raw = replace(policy.split, shard=shard), policy.raw
    assert raw is not None
    table = view.rotary if policy.keys.before_rotary else None
    stores, placement = (held.keys, held.values), policy.placement
    if held.fetched is not None:
        stores, placement = held.fetched, Device()
    body = Section(
        *stores, (policy.keys, policy.values), 0, split.body.slots,
        span=lambda start, size: split.body_bounds(length, start, size),
        filled=lambda near: split.body.occupied(split.flushed(near)),
        slot_of=split.slot_of, unit=split.block, split=split, table=table, placement=placement,
        orders=held.orders,
        **placed(lambda shard: replace(split, shard=shard), shard, length, written),
    )  # fmt: skip
    of = functools.partial(regions_of, split.tail, mask_slots, together)

    def in_tail(
        tail: Tail, number: int, length: PerRow, written: PerRow, layer: Array | None = None
    ) -> Section:
        found = _region((tail.keys, tail.values), raw, of, number, shard, length, written)
        return replace(found, split=split, raw=True, whole=False, table=table, layer=layer)

    newest = [in_tail(held.tail, n, length, written, view.layer) for n in range(len(of(shard)))]
    if held.strip is not None:
        marks = jnp.maximum(view.marks, view.before)
        newest[-1] = in_tail(held.strip.tail, len(newest) - 1, view.before, marks)
        newest.append(_own(held.strip, view, split, raw, table))
    return [_in_pages(body, view), *newest]


def _in_pages(section: Section, view: LayerView) -> Section:
    """A section of a layer's body, which may be in pages, or in a stack."""
    page_group = view.layer_cache.policy.page_group
    page = {} if page_group is None else {"page": page_group.layout.page_size}
    alone = page_group is None and view.layer is None
    return replace(
        section, pages=view.pages, layer=view.layer, whole=section.whole and alone, **page
    )


def _region(
    stores: tuple[Store, Store],
    codecs: tuple[Codec, Codec],
    of: Callable[[Shard | None], Sequence[tuple[Region, Any]]],
    number: int,
    shard: Shard | None,
    length: PerRow,
    written: PerRow,
) -> Section:
    """One of a layout's regions."""
    region, layout = of(shard)[number]
    return Section(
        *stores, codecs, region.first, region.size,
        span=lambda start, size: layout.bounds(length, start, size),
        filled=lambda near: layout.occupied(jnp.minimum(near, length)) - region.first,
        slot_of=layout.slot_of, capped=region.capped, whole=region.size == layout.slots,
        **placed(lambda shard: of(shard)[number][1], shard, length, written),
    )  # fmt: skip


def _own(
    strip: Strip, view: LayerView, split: Split, raw: tuple[Codec, Codec], table: RotaryTable | None
) -> Section:
    """A long call's own tokens, but for sinks, which have been written to slots of their own."""
    count = strip.keys.shape[2]
    return Section(
        strip.keys, strip.values, raw, 0, count, split=split, raw=True, table=table,
        **own_tokens(split, view.before, view.length, count),
    )  # fmt: skip
