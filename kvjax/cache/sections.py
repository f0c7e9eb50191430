"""The sections of a layer: ranges of slots that are stored in the same way, such as body and tail.

Attention, `read` and conversions read a layer section by section. Only this module and the module
that writes a layer know where tokens are and in which form.
"""

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
from kvjax.layouts import Layout, LayoutSlice, Region, Shard, Split, mask_slots, split_slots
from kvjax.placement.device import Device
from kvjax.placement.order import AS_IS, Orders, restore
from kvjax.placement.pages import fit_units, read_pages


@pytree_dataclass
class LayerView:
    """A layer to which the tokens of a call were appended.

    ``before`` and ``length`` (int32[batch]) are the numbers of tokens of each row before and after
    the call. ``marks`` (int32[batch]) is the layer's ``written`` before the call. ``rotary`` is the
    layer's rotary table. ``pages`` (int32[batch, columns]) is the page table, if the layer is in
    pages. ``index`` (int32[]) is the index of the layer, if ``layer_cache`` is a stack. In the
    result of ``unstacked``, this index is in ``layer`` instead.
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
        """Return a view of a single layer. A view of a stack becomes a view of the stack's layer
        ``index``."""
        if self.index is None:
            return self
        layer_cache = unstacked(self.layer_cache, self.index)
        return replace(self, layer_cache=layer_cache, layer=self.index, index=None)

    def take_rows(self, rows: PerRow) -> "LayerView":
        """Return a view of the rows ``rows`` (int32[n]) of a layer in pages. Pages are
        unchanged."""
        layer = self.layer_cache
        arrays = dict(tail=layer.tail, strip=layer.strip, low=layer.low)
        cursors = dict(before=self.before, length=self.length, marks=self.marks, pages=self.pages)
        arrays, cursors = jax.tree.map(lambda x: x[rows], (arrays, cursors))
        return replace(self, layer_cache=replace(layer, **arrays), **cursors)


@dataclass(frozen=True)
class Section:
    """Consecutive units of a store. A unit is a token, or a block of tokens.

    ``keys`` and ``values`` are stores in the form of ``codecs``. The section has ``size`` units
    from the unit ``first`` on, with ``unit`` tokens each.

    ``position_of(slots, *cursors)`` returns the position in each slot, int32[batch, slots], -1 if
    it is empty. Here, a slot has one token even if a unit is a block. The function is elementwise,
    so that kernels can call it with the cursors of one row. Each of ``cursors`` is int32[batch].

    ``span(start, size)`` returns the lowest and the highest position in a range of units, over all
    rows. ``filled(near)`` returns how many units, from the first on, may contain tokens if rows
    have ``near`` tokens. ``slot_of(positions)`` returns the slot of each position that is in the
    section.

    ``split`` says which tokens queries see raw, in a layer with a tail. ``raw`` says whether
    queries see the tokens of this section raw. ``capped`` marks sinks, whose distance to queries is
    capped. ``whole`` says that the section covers its arrays completely, so that they can be
    multiplied without slicing. ``rotary`` is the table for keys that are stored unrotated.
    ``placement`` and ``orders`` say where and in which order the arrays are stored. ``pages``
    (int32[batch, columns]) is the page table, if the arrays are pages of ``page`` units. ``layer``
    (int32[]) is the index of the layer, if the arrays belong to a stack.
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
    rotary: RotaryTable | None = None
    placement: Device = field(default_factory=Device)
    orders: tuple[Orders, Orders] = (AS_IS, AS_IS)
    pages: Array | None = None
    page: int = 1
    layer: Array | None = None

    def positions(self, units: Array, start: Array | int) -> Array:
        """Return the positions of the tokens in ``units``, int32[batch, tokens]. Tokens in units
        before ``start`` get -1."""
        slots = units
        if self.unit > 1:
            slots = (units[:, None] * self.unit + arange_row(self.unit)).ravel()
        is_included = slots[None] >= start * self.unit
        return jnp.where(is_included, self.position_of(slots, *self.cursors), -1)

    def scores(self, queries: Array, keys: Store, positions: Array, *, long: bool = False) -> Array:
        """Multiply queries [batch, kv_heads, rows, head_dim] and stored keys. Returns
        float32[batch, kv_heads, rows, tokens]. ``long`` says whether the keys are a whole section,
        on a CPU."""
        codec = self.codecs[0]
        if long:
            return long_scores(queries, codec.decode(keys))
        if self.rotary is None:
            return codec.scores(queries, keys)
        rotated = apply_rotary(merge_blocks(codec.decode(keys)), positions.clip(0), self.rotary)
        return plain_scores(queries, rotated)

    def weighted_values(
        self, weights: Array, values: Store, positions: Array | None, dtype: str
    ) -> Array:
        """Sum stored values with weights [batch, kv_heads, rows, tokens]. Returns float32[batch,
        kv_heads, rows, head_dim]. Slots whose entry in ``positions`` is -1 are left out.
        ``positions`` is None for a whole section on a CPU."""
        codec = self.codecs[1]
        if positions is None:
            return long_weighted_values(weights, codec.decode(values))
        if codec.blockwise:
            return codec.weighted_values(weights, values)
        # A slot that is empty now may still hold NaN.
        numbers = merge_blocks(codec.decode(values)).astype(dtype)
        return plain_weighted_values(weights, numbers, present=positions[:, None, :, None] >= 0)

    def slice_units(self, start: Array, size: int) -> tuple[Store, Store]:
        """Return the keys and values of units ``start`` to ``start + size - 1``, in the order that
        codecs expect. ``size`` must be a result of ``fit_units``."""
        stores, layer = (self.keys, self.values), self.layer
        if self.pages is not None:
            where = self.orders, self.placement, self.pages, self.page
            return self._in_codec_order(read_pages(stores, *where, start, size, layer))
        if layer is None:
            part = jax.tree.map(
                lambda x, order: order.slice_units(x, start, size), stores, self.orders
            )
            return self._in_codec_order(self.placement.near(part))
        near = self.placement.near
        return self._in_codec_order(
            jax.tree.map(
                lambda x, o: o.slice_layer(x, layer, start, size, near), stores, self.orders
            )
        )

    def as_pages(self) -> "Section":
        """Convert a section of a stack to pages of one pool that has the pages of all layers. If
        rows are not in pages, each row becomes a page."""
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
        """The number of units of the arrays, which may contain several sections."""
        store, order = jax.tree.leaves(self.keys)[0], jax.tree.leaves(self.orders[0])[0]
        units: int = store.shape[order.axis + (self.layer is not None)] // order.stride
        return units

    def fit_units(self, units: int, of: int = 1) -> int:
        """Return a size for ``slice_units`` that is close to ``units`` and a multiple of ``of``."""
        whole = self.pages is None or self.size <= self.page
        return units if whole else fit_units(self.page, min(units, self.size), of)

    def _in_codec_order(self, stores: tuple[Store, Store]) -> tuple[Store, Store]:
        """Return stores in the order that codecs expect. On most devices they are stored in this
        order."""
        as_is = {*jax.tree.leaves(self.orders)} == {AS_IS}
        return stores if as_is else restore(stores, self.orders)

    def stores(self) -> tuple[Store, Store]:
        """Return the keys and values of all units, in the order that codecs expect."""
        if self.pages is not None:
            return self.slice_units(jnp.int32(0), self.pages.shape[1] * self.page)
        if self.layer is not None:
            return self.slice_units(jnp.int32(0), self._units)
        return self._in_codec_order(self.placement.near((self.keys, self.values)))

    def numbers(self) -> tuple[Array, Array, Array]:
        """Return decoded keys and values, both [batch, kv_heads, tokens, head_dim], and the
        positions in their slots, int32[batch, tokens]. Keys are rotated only if they are stored
        rotated."""
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
    """Return the sections of a layer, in the order in which attention reads them.

    Args:
      view: the layer.
      shard: the shard of the slots to read; None for all slots.
      together: return sinks and the other slots of their array as one section. Attention needs them
        as separate sections.
    """
    layer, length = view.layer_cache, view.length
    policy, written = layer.policy, jnp.maximum(view.marks, length)
    stores, placement = (layer.keys, layer.values), policy.placement
    if layer.tail is None:
        codecs = policy.keys, policy.values
        regions = functools.partial(_regions, policy.stored_layout, split_slots, together)
        return [
            _in_body(_region_section(stores, codecs, regions, n, shard, length, written), view)
            for n in range(len(regions(shard)))
        ]
    split, raw = replace(policy.split, shard=shard), policy.raw
    assert raw is not None
    rotary = view.rotary if policy.keys.before_rotary else None
    if layer.fetched is not None:
        stores, placement = layer.fetched, Device()
    body = Section(
        *stores,
        (policy.keys, policy.values),
        0,
        split.body.slots,
        span=lambda start, size: split.body_bounds(length, start, size),
        filled=lambda near: split.body.occupied(split.flushed(near)),
        slot_of=split.slot_of,
        unit=split.block,
        split=split,
        rotary=rotary,
        placement=placement,
        orders=layer.orders,
        **_positions(lambda shard: replace(split, shard=shard), shard, length, written),
    )
    if not policy.layout.sinks and shard is None:
        # Only sinks of a ring need a section of their own, because distances to them are capped.
        together = True
    regions = functools.partial(_regions, split.tail, mask_slots, together)

    def in_tail(
        tail: Tail, number: int, length: PerRow, written: PerRow, layer: Array | None = None
    ) -> Section:
        stores = tail.keys, tail.values
        section = _region_section(stores, raw, regions, number, shard, length, written)
        return replace(section, split=split, raw=True, whole=False, rotary=rotary, layer=layer)

    count = len(regions(shard))
    newest = [in_tail(layer.tail, n, length, written, view.layer) for n in range(count)]
    if layer.strip is not None:
        marks = jnp.maximum(view.marks, view.before)
        newest[-1] = in_tail(layer.strip.tail, count - 1, view.before, marks)
        first = 0 if together else split.tail.sinks
        newest.append(_call_section(layer.strip, view, split, raw, rotary, first))
    return [_in_body(body, view), *newest]


def _regions(
    layout: Layout,
    divide: Callable[[Layout, Shard], LayoutSlice],
    together: bool,
    shard: Shard | None,
) -> Sequence[tuple[Region, Layout | LayoutSlice]]:
    """Return the regions of a layout or of its shard, each with the layout (or slice of one) that
    computes its positions."""
    if together:
        return [(Region(0, layout.slots), layout)]
    return layout.region_layouts() if shard is None else divide(layout, shard).region_layouts()


def _region_section(
    stores: tuple[Store, Store],
    codecs: tuple[Codec, Codec],
    regions: Callable[[Shard | None], Sequence[tuple[Region, Layout | LayoutSlice]]],
    number: int,
    shard: Shard | None,
    length: PerRow,
    written: PerRow,
) -> Section:
    """Return the section of one region of a layout."""
    region, layout = regions(shard)[number]
    return Section(
        *stores,
        codecs,
        region.first,
        region.size,
        span=lambda start, size: layout.bounds(length, start, size),
        filled=lambda near: layout.occupied(jnp.minimum(near, length)) - region.first,
        slot_of=layout.slot_of,
        capped=region.capped,
        whole=region.size == layout.slots,
        **_positions(lambda shard: regions(shard)[number][1], shard, length, written),
    )


def _in_body(section: Section, view: LayerView) -> Section:
    """Add the page table, and the index of the layer, to a section of a body that is in pages or in
    a stack."""
    group = view.layer_cache.policy.page_group
    page = 1 if group is None else group.layout.page_size
    whole = section.whole and group is None and view.layer is None
    return replace(section, pages=view.pages, page=page, layer=view.layer, whole=whole)


def _positions(
    layout: Callable[[Shard | None], Any], shard: Shard | None, length: PerRow, written: PerRow
) -> dict[str, Any]:
    """Return the ``position_of`` and ``cursors`` of a section whose layout depends on the shard.
    The index of the shard is one of the cursors."""

    def position_of(slots: Array, length: Cursors, written: Cursors, *index: Cursors) -> Array:
        own = None if shard is None else Shard(expand_over_slots(index[0]), shard.count)
        return layout(own).positions(length, written, slots)

    cursors = (length, written)
    if shard is not None:
        cursors = (*cursors, jnp.broadcast_to(jnp.int32(shard.index), length.shape))
    return {"position_of": position_of, "cursors": cursors}


def _call_section(
    strip: Strip,
    view: LayerView,
    split: Split,
    raw: tuple[Codec, Codec],
    rotary: RotaryTable | None,
    first_position: int,
) -> Section:
    """Return the section with the tokens of a call that has a strip, from ``first_position`` on.
    Earlier ones are sinks that have a section of their own."""
    before, length, shard = view.before, view.length, split.shard
    count = strip.keys.shape[2]
    own = count if shard is None else -(-count // shard.count)
    first = jnp.int32(0) if shard is None else shard.index * own

    def position_of(slots: Array, before: Cursors, length: Cursors, first: Cursors) -> Array:
        slots = expand_over_rows(slots, before)
        positions = expand_over_slots(before) + slots
        is_included = (positions >= first_position) & (positions < expand_over_slots(length))
        if shard is not None:
            is_included &= (slots >= expand_over_slots(first)) & (
                slots < expand_over_slots(first) + own
            )
        return jnp.where(is_included, positions, -1)

    def span(start: Array, size: int) -> tuple[Array, Array]:
        low, high = jnp.maximum(start, first), jnp.minimum(start + size, first + own)
        last = jnp.minimum(jnp.max(before) + high, jnp.max(length)) - 1
        return jnp.min(before) + low, jnp.where(low < high, last, -1)

    return Section(
        strip.keys,
        strip.values,
        raw,
        0,
        count,
        position_of=position_of,
        cursors=(before, length, jnp.broadcast_to(first, length.shape)),
        span=span,
        filled=lambda near: jnp.minimum(jnp.max(near - before), first + own),
        slot_of=lambda positions: positions - before[:, None],
        split=split,
        raw=True,
        rotary=rotary,
    )
