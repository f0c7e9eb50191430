"""In which order a device keeps what codecs store: as it is, but on a TPU (``tpu.py``)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.core.target import current_platform
from kvjax.core.typing import Array

_T = TypeVar("_T")
Row = Array | tuple[Array, Array]
"""The number of a row; or of a layer, and of its row, in arrays [layers, ...]."""
_Move = Callable[[Array], Array]

SUBLANES = 8
"""Rows of a TPU's tile of 32-bit numbers."""
LANES = 128
"""Numbers of a TPU's tile along the last axis."""


@dataclass(frozen=True)
class Order:
    """How an array [batch, kv_heads, units, ...] of a store is kept: as it is.

    ``axis``: of the kept array, along which units follow one another, ``step`` elements each.
    """

    axis: int = 2
    step: int = 1

    apart: ClassVar[bool] = False
    """Whether heads stand one after the other behind the units."""
    turned: ClassVar[bool] = False
    """Whether rows stand along the last axis."""
    read_by_tiles: ClassVar[bool] = False
    """Whether kernels can read some units of it."""

    @property
    def fold(self) -> int:
        """Rows that stand side by side."""
        return 1

    def keep(self, x: Array) -> Array:
        """Any number of units as they are kept."""
        return x

    def give(self, kept: Array) -> Array:
        """Undo ``keep``."""
        return kept

    def piece(self, kept: Array, start: Array | int, size: int) -> Array:
        """So many units of a kept array from ``start`` on, as they are kept."""
        return lax.dynamic_slice_in_dim(kept, start * self.step, size * self.step, axis=self.axis)

    def of_layer(
        self, stack: Array, layer: Array, start: Array | int, size: int, near: _Move
    ) -> Array:
        """``piece`` of one of kept arrays [layers, ...], near."""
        place, shape = [jnp.int32(0)] * stack.ndim, [1, *stack.shape[1:]]
        place[0], place[1 + self.axis] = layer, jnp.asarray(start * self.step, jnp.int32)
        shape[1 + self.axis] = size * self.step
        return near(lax.dynamic_slice(stack, place, shape))[0]

    def run(self, kept: Array, index: int, count: int) -> tuple[Array, int]:
        """Of the kept rows [kv_heads, ...] of some units the ``index``-th of ``count`` runs of each
        one's, and which of the widths side by side has them."""
        return kept, 0

    @property
    def least(self) -> int:
        """Units that are written together at least: for fewer rows than a tile has the compiler
        would turn the whole array round."""
        return 1

    @property
    def groups(self) -> int:
        """Numbers that every token has, where they stand along the lanes; else 1."""
        return 1

    @property
    def multiple(self) -> int:
        """Of what a kernel's tile has a multiple along ``axis``."""
        return LANES if self.axis == 3 else SUBLANES

    def of_row(self, kept: Array, row: Row, start: Array, like: Array) -> Array:
        """A row's units from ``start`` on, so many as ``like`` has, as they are kept."""
        kept, place = self._at(kept, row, start)
        found = lax.dynamic_slice(kept, place, (*[1] * (kept.ndim - like.ndim), *like.shape))
        return found.reshape(like.shape)

    def with_row(self, kept: Array, row: Row, start: Array, units: Array) -> Array:
        """With a row's ``units`` from ``start`` on, in place."""
        into, place = self._at(kept, row, start)
        units = units.reshape(*[1] * (into.ndim - units.ndim), *units.shape)
        return lax.dynamic_update_slice(into, units, place).reshape(kept.shape)

    def _at(self, kept: Array, row: Row, start: Array) -> tuple[Array, tuple[Any, ...]]:
        """The array, or that of all rows one behind the other, and where those units are."""
        if isinstance(row, tuple) and current_platform() == "tpu" and not self.read_by_tiles:
            # Whose compiler would keep one with an axis of layers in another order; what is read by
            # tiles has its order given.
            row, kept = row[0] * kept.shape[1] + row[1], kept.reshape(-1, *kept.shape[2:])
        place: list[Any] = [jnp.int32(0)] * kept.ndim
        first = row if isinstance(row, tuple) else (row,)
        place[: len(first)] = first
        place[self.axis + len(first) - 1] = start * self.step
        return kept, tuple(jnp.asarray(x, jnp.int32) for x in place)


AS_IS = Order()


def kept(stores: _T, orders: Any) -> _T:
    """Stores as their device keeps them."""
    return jax.tree.map(lambda x, order: order.keep(x), stores, orders)


def given(stores: _T, orders: Any) -> _T:
    """Undo ``kept``: as codecs know them."""
    return jax.tree.map(lambda x, order: order.give(x), stores, orders)
