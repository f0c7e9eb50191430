"""In which order a device keeps what codecs store, whatever shape their arrays have.

A TPU's memory is tiled: the last axis in 128 lanes, the one before it in 8 to 32 rows. An array
whose last axes are small, such as the scales of a block, would be padded to that, and blocks of few
rows would be as well. So there blocks stand one behind the other without an axis of their own,
rows that are narrower than the lanes side by side, and what has a number or two a token along the
lanes.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
from jax import lax

from kvjax.codecs import MULTIPLE, Codec
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

    def block(self, size: int) -> tuple[int, int]:
        """Of what a tile of a kernel has a multiple along ``axis``, and so many units there."""
        return (LANES if self.axis == 3 else SUBLANES), size * self.step

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


@dataclass(frozen=True)
class Rows(Order):
    """[batch, kv_heads, units * rows / fold, fold * width] of [batch, kv_heads, units, rows,
    width]: the ``fold`` runs of a unit's rows stand side by side."""

    read_by_tiles: ClassVar[bool] = True
    rows: int = 1
    width: int = 1
    side_by_side: int = 1

    @property
    def fold(self) -> int:
        return self.side_by_side

    @property
    def least(self) -> int:
        return -(-SUBLANES // self.step)

    def keep(self, x: Array) -> Array:
        batch, heads, units = x.shape[:3]
        x = x.reshape(batch, heads, units, self.fold, self.rows // self.fold, self.width)
        return x.swapaxes(3, 4).reshape(batch, heads, -1, self.fold * self.width)

    def give(self, kept: Array) -> Array:
        batch, heads = kept.shape[:2]
        x = kept.reshape(batch, heads, -1, self.rows // self.fold, self.fold, self.width)
        return x.swapaxes(3, 4).reshape(batch, heads, -1, self.rows, self.width)

    def run(self, kept: Array, index: int, count: int) -> tuple[Array, int]:
        heads, _, lanes = kept.shape
        each = count // self.fold
        x = kept.reshape(heads, -1, each, self.rows // count, lanes)[:, :, index % each]
        return x.reshape(heads, -1, lanes), index // each

    def of_each(self, kept: Array, index: int, count: int) -> Array:
        """Of kept rows that several tokens of a unit have in common, those that the ``index``-th of
        ``count`` runs of its tokens has: [kv_heads, units, width]."""
        heads, _, lanes = kept.shape
        row, each = index * self.rows // count, self.rows // self.fold
        found = kept.reshape(heads, -1, each, lanes)[:, :, row % each]
        return found[..., row // each * self.width : (row // each + 1) * self.width]


@dataclass(frozen=True)
class Along(Order):
    """[batch, kv_heads, parts * width, units * rows / parts] of [batch, kv_heads, units, rows,
    width]: along the last axis stand the rows of a run of every unit's, one of ``parts``."""

    read_by_tiles: ClassVar[bool] = True
    rows: int = 1
    width: int = 1
    parts: int = 1

    def keep(self, x: Array) -> Array:
        batch, heads, units = x.shape[:3]
        x = x.reshape(batch, heads, units, self.parts, self.rows // self.parts, self.width)
        return x.transpose(0, 1, 3, 5, 2, 4).reshape(batch, heads, self.parts * self.width, -1)

    def give(self, kept: Array) -> Array:
        batch, heads = kept.shape[:2]
        x = kept.reshape(batch, heads, self.parts, self.width, -1, self.rows // self.parts)
        return x.transpose(0, 1, 4, 2, 5, 3).reshape(batch, heads, -1, self.rows, self.width)

    @property
    def groups(self) -> int:
        return self.width

    def part(self, kept: Array, index: int) -> Array:
        """Of kept numbers [kv_heads, parts * width, n] those of a run, [kv_heads, width, n]."""
        return kept[:, index * self.width : (index + 1) * self.width]


@dataclass(frozen=True)
class Turned(Order):
    """[batch, kv_heads, width, units] of [batch, kv_heads, units, width], as a kernel sees an array
    whose rows are narrower than the lanes: so a TPU's compiler keeps it in any case."""

    turned: ClassVar[bool] = True

    def keep(self, x: Array) -> Array:
        return x.swapaxes(2, 3)

    def give(self, kept: Array) -> Array:
        return kept.swapaxes(2, 3)


@dataclass(frozen=True)
class Whole(Order):
    """[batch, units, n, 128] of [batch, kv_heads, units, rows, width]: all that a unit has, of all
    heads, in one piece, as it is fetched from another memory. ``shape``: of that."""

    shape: tuple[int, ...] = ()

    def keep(self, x: Array) -> Array:
        x = x.swapaxes(1, 2)
        numbers = math.prod(self.shape)
        return x.reshape(*x.shape[:2], -1, numbers if numbers % LANES else LANES)

    def give(self, kept: Array) -> Array:
        return kept.reshape(*kept.shape[:2], *self.shape).swapaxes(1, 2)

    # Rows and units as one axis: from another memory a TPU takes slices along one alone.

    def of_row(self, kept: Array, row: Array, start: Array, like: Array) -> Array:
        flat = kept.reshape(-1, *kept.shape[2:])
        begin = row * kept.shape[1] + start
        return lax.dynamic_slice_in_dim(flat, begin, like.shape[1])[None]

    def with_row(self, kept: Array, row: Array, start: Array, units: Array) -> Array:
        flat = kept.reshape(-1, *kept.shape[2:])
        begin = row * kept.shape[1] + start
        return lax.dynamic_update_slice_in_dim(flat, units[0], begin, 0).reshape(kept.shape)


AS_IS = Order()


def kept(stores: _T, orders: Any) -> _T:
    """Stores as their device keeps them."""
    return jax.tree.map(lambda x, order: order.keep(x), stores, orders)


def given(stores: _T, orders: Any) -> _T:
    """Undo ``kept``: as codecs know them."""
    return jax.tree.map(lambda x, order: order.give(x), stores, orders)


def folded(head_dim: int) -> int:
    """How many rows of so many channels stand side by side on a TPU."""
    return LANES // head_dim if head_dim < LANES and LANES % head_dim == 0 else 1


def grain(platform: str) -> int:
    """Of what the slots of a layer are a multiple: a TPU's compiler turns an array round whose rows
    fill no whole tiles, and copies it wherever the other order is wanted."""
    return SUBLANES if platform == "tpu" else 1


@functools.lru_cache(maxsize=256)
def orders_of(
    platform: str,
    codec: Codec,
    block: int | None,
    head_dim: int,
    parts: int,
    heads: int | None = None,
) -> Any:
    """The orders of a codec's arrays, as a pytree like its store.

    Args:
      platform: that computes with them.
      codec: resolved.
      block: tokens of a unit, None where each is one.
      head_dim: channels.
      parts: runs of a block's tokens that a kernel reads one after the other.
      heads: of keys, where they are in another memory, from which whole units are fetched.
    """
    shape = (1, heads or 1, 1, block or MULTIPLE, head_dim)
    store = jax.eval_shape(functools.partial(codec.empty, shape))

    def order(x: Any) -> Order:
        if platform != "tpu" or block is None:
            return AS_IS
        rows, width = x.shape[3:]
        if heads is not None:
            return Whole(1, 1, (x.shape[1], rows, width))
        if width == head_dim:
            fold = folded(head_dim) if rows % folded(head_dim) == 0 else 1
            return Rows(2, rows // fold, rows, width, fold)
        runs = parts if rows % parts == 0 else 1
        return Along(3, rows // runs, rows, width, runs)

    return jax.tree.map(order, store)
