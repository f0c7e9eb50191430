"""In which order a device keeps what codecs store: as it is, but on a TPU (``tpu.py``)."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
from jax import lax

from kvjax.core.typing import Array

_T = TypeVar("_T")

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

    def of_row(self, kept: Array, row: Array, start: Array, like: Array) -> Array:
        """A row's units from ``start`` on, so many as ``like`` has, as they are kept."""
        return lax.dynamic_slice(kept, self._at(row, start, kept.ndim), like.shape)

    def with_row(self, kept: Array, row: Array, start: Array, units: Array) -> Array:
        """With a row's ``units`` from ``start`` on, in place."""
        return lax.dynamic_update_slice(kept, units, self._at(row, start, kept.ndim))

    def _at(self, row: Array, start: Array, ndim: int) -> tuple[Any, ...]:
        place: list[Any] = [0] * ndim
        place[0], place[self.axis] = row, start * self.step
        return tuple(place)


AS_IS = Order()


def kept(stores: _T, orders: Any) -> _T:
    """Stores as their device keeps them."""
    return jax.tree.map(lambda x, order: order.keep(x), stores, orders)


def given(stores: _T, orders: Any) -> _T:
    """Undo ``kept``: as codecs know them."""
    return jax.tree.map(lambda x, order: order.give(x), stores, orders)
