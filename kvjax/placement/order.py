"""Storage orders: how a device arranges the arrays of a store. See ``tpu.py`` for TPUs.

A codec defines its store as arrays [batch, kv_heads, units, ...], where a unit is a token or a
block. An ``Order`` maps such an array to the shape that is kept in memory, and back. Everywhere but
on TPUs the two are the same (``AS_IS``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.target import current_platform
from kvjax.core.typing import Array

_T = TypeVar("_T")
Orders = Any
"""A pytree of orders with the structure of a store."""
Row = Array | tuple[Array, Array]
"""The index of a row; for arrays [layers, ...], the indices of a layer and of its row."""
Move = Callable[[Array], Array]
"""Moves an array to the device's memory."""

SUBLANES = 8
"""Rows of a TPU tile of 32-bit numbers."""
LANES = 128
"""Numbers in a row of a TPU tile."""


@dataclass(frozen=True)
class Order:
    """The storage order of one array of a store. This one stores the array unchanged.

    ``axis``: the axis of the stored array along which units follow one another.
    ``stride``: elements of that axis per unit.
    """

    axis: int = 2
    stride: int = 1

    separate_heads: ClassVar[bool] = False
    """Whether the units come first and each head has its own tiles after them."""
    transposed: ClassVar[bool] = False
    """Whether tokens run along the last axis."""
    tileable: ClassVar[bool] = False
    """Whether a kernel can read a slice of the units."""

    @property
    def fold(self) -> int:
        """Rows of channels that share a row of lanes."""
        return 1

    @property
    def groups(self) -> int:
        """Numbers per token, if they are stored along the lanes; otherwise 1."""
        return 1

    @property
    def min_units(self) -> int:
        """The fewest units to write at once. The compiler would transpose the whole array to write
        fewer rows than a tile has."""
        return 1

    @property
    def alignment(self) -> int:
        """A kernel's tile must be a multiple of this along ``axis``."""
        return LANES if self.axis == 3 else SUBLANES

    def arrange(self, x: Array) -> Array:
        """Convert any number of units from the codec's order to the stored order."""
        return x

    def restore(self, stored: Array) -> Array:
        """Undo ``arrange``."""
        return stored

    def slice_units(self, stored: Array, start: Array | int, size: int) -> Array:
        """``size`` units of a stored array from ``start`` on, in the stored order."""
        return lax.dynamic_slice_in_dim(
            stored, start * self.stride, size * self.stride, axis=self.axis
        )

    def slice_layer(
        self, stack: Array, layer: Array, start: Array | int, size: int, near: Move
    ) -> Array:
        """``slice_units`` of one layer of a stack [layers, ...], moved by ``near``."""
        place, shape = [jnp.int32(0)] * stack.ndim, [1, *stack.shape[1:]]
        place[0], place[1 + self.axis] = layer, jnp.asarray(start * self.stride, jnp.int32)
        shape[1 + self.axis] = size * self.stride
        return near(lax.dynamic_slice(stack, place, shape))[0]

    def slice_row(self, stored: Array, row: Row, start: Array, like: Array) -> Array:
        """Units of one row from ``start`` on, in the stored order and in the shape of ``like``."""
        stored, place = self._locate(stored, row, start)
        shape = (*[1] * (stored.ndim - like.ndim), *like.shape)
        return lax.dynamic_slice(stored, place, shape).reshape(like.shape)

    def update_row(self, stored: Array, row: Row, start: Array, units: Array) -> Array:
        """Write ``units`` into one row from ``start`` on, in place."""
        into, place = self._locate(stored, row, start)
        units = units.reshape(*[1] * (into.ndim - units.ndim), *units.shape)
        return lax.dynamic_update_slice(into, units, place).reshape(stored.shape)

    def subblock(self, stored: Array, index: int, count: int) -> tuple[Array, int]:
        """Select one of ``count`` subblocks of every block from a tile [kv_heads, ...].

        Returns:
          Its rows, and which of the ``fold`` groups of lanes holds them.
        """
        return stored, 0

    def _locate(self, stored: Array, row: Row, start: Array) -> tuple[Array, tuple[Array, ...]]:
        """The array to index, with layers and rows on one axis if necessary, and the index of a
        row's units."""
        if isinstance(row, tuple) and current_platform() == "tpu" and not self.tileable:
            # With a separate axis of layers the TPU compiler would choose another memory layout.
            # For a tileable order the layout is pinned.
            row = row[0] * stored.shape[1] + row[1]
            stored = stored.reshape(-1, *stored.shape[2:])
        place: list[Array] = [jnp.int32(0)] * stored.ndim
        first = row if isinstance(row, tuple) else (row,)
        place[: len(first)] = first
        place[self.axis + len(first) - 1] = start * self.stride
        return stored, tuple(jnp.asarray(x, jnp.int32) for x in place)


AS_IS = Order()


def arrange(stores: _T, orders: Orders) -> _T:
    """Convert stores from the codecs' order to the stored order."""
    return jax.tree.map(lambda x, order: order.arrange(x), stores, orders)


def restore(stores: _T, orders: Orders) -> _T:
    """Undo ``arrange``."""
    return jax.tree.map(lambda x, order: order.restore(x), stores, orders)
