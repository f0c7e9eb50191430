"""Regions of a layout, and which positions their slots hold: whole numbers alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from kvjax.core.numbers import beside_slots, slots_beside
from kvjax.core.typing import Array, Cursors, PerRow
from kvjax.layouts import Layout, Part, Region, Share, Split, paged


def regions_of(
    layout: Layout, of: Callable[[Layout, Share], Part], together: bool, share: Share | None
) -> Sequence[tuple[Region, Layout | Part]]:
    """A layout's regions, and what says where their tokens stand: itself, or a part of it."""
    if together:
        return [(Region(0, layout.slots), layout)]
    if (pages := paged(layout)) and layout.sinks:
        # A page may have both: each walks it from its beginning, and counts its own.
        ends = [(each, each.first + each.size) for each in layout.regions()]
        return [
            (
                Region(0, pages.whole(end), each.capped),
                Part(layout, layout.slots, 0, each.first, end),
            )
            for each, end in ends
        ]
    if share is None:
        return [(region, layout) for region in layout.regions()]
    return of(layout, share).regions()


def placed(
    of: Callable[[Share | None], Any], share: Share | None, length: PerRow, written: PerRow
) -> dict[str, Any]:
    """``Section.position_of`` and its cursors, of what ``of`` makes of a share of the slots, which
    is a cursor as well."""

    def position_of(slots: Array, length: Cursors, written: Cursors, *index: Cursors) -> Array:
        own = None if share is None else Share(beside_slots(index[0]), share.count)
        return of(own).positions(length, written, slots)

    cursors = (length, written)
    if share is not None:
        cursors = (*cursors, jnp.broadcast_to(jnp.int32(share.index), length.shape))
    return {"position_of": position_of, "cursors": cursors}


def own_tokens(split: Split, before: PerRow, length: PerRow, count: int) -> dict[str, Any]:
    """The same, and what else a section is asked, of a long call's own tokens, ``count`` of them
    from ``before`` on."""
    share = split.share
    each = count if share is None else -(-count // share.count)
    first = jnp.int32(0) if share is None else share.index * each

    def position_of(slots: Array, before: Cursors, length: Cursors, first: Cursors) -> Array:
        slots = slots_beside(slots, before)
        positions = beside_slots(before) + slots
        there = (positions >= split.tail.sinks) & (positions < beside_slots(length))
        if share is not None:
            there &= (slots >= beside_slots(first)) & (slots < beside_slots(first) + each)
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
