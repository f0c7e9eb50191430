"""A layer as a call sees it."""

from dataclasses import replace

import jax

from kvjax.cache.layer import LayerCache
from kvjax.cache.stacking import opened
from kvjax.core.rotary import RotaryTable
from kvjax.core.trees import state
from kvjax.core.typing import Array, PerRow


@state
class View:
    """A layer, with the tokens of a call appended.

    ``before``, ``length``: int32[batch], tokens a row without and with the call's. ``marks``:
    int32[batch], the layer's ``written`` before the call. ``rotary``: the layer's table. ``pages``:
    int32[batch, columns], where the layer is in pages, those of each row. ``index``: int32[], which
    layer of a stack it is, and ``layer`` the same of one that is ``opened``.
    """

    held: LayerCache
    before: PerRow
    length: PerRow
    marks: PerRow
    rotary: RotaryTable | None = None
    pages: Array | None = None
    index: Array | None = None
    layer: Array | None = None

    def opened(self) -> "View":
        """That of a layer alone, on a device."""
        if self.index is None:
            return self
        held = opened(self.held, self.index)
        return replace(self, held=held, layer=self.index, index=None)

    def taken(self, rows: PerRow) -> "View":
        """That of some rows, int32[n], of a layer in pages, which stay as they are."""
        held = self.held
        own = held.tail, held.strip, held.low
        mine = own, (self.before, self.length, self.marks, self.pages)
        (tail, strip, low), cursors = jax.tree.map(lambda x: x[rows], mine)
        before, length, marks, pages = cursors
        held = replace(held, tail=tail, strip=strip, low=low)
        return replace(self, held=held, before=before, length=length, marks=marks, pages=pages)
