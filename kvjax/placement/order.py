"""Storage orders: how a device arranges the arrays of a store.

A codec defines its store as arrays [batch, kv_heads, units, ...], where a unit is a token or a
block. An ``Order`` converts such an array to the shape that is stored in memory, and back. On all
platforms except TPUs, the two are the same (``AS_IS``).

TPU memory is tiled: 128 lanes along the last axis, and 8 to 32 rows along the axis before it. XLA
pads both axes to whole tiles. The small trailing axes of a quantized store, such as the scales of a
block, would waste most of the memory. The orders for TPUs avoid the padding. Blocks are
concatenated, without a separate axis of blocks. Rows that are narrower than the lanes are stored
side by side (folded). Scales per token are stored along the lanes.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from kvjax.codecs import MULTIPLE, Codebook, Codec, CodecWrapper, Integer
from kvjax.core.target import current_platform
from kvjax.core.typing import Array

_T = TypeVar("_T")
HasShape = Array | jax.ShapeDtypeStruct
Orders = Any
"""A pytree of orders with the structure of a store."""
Row = Array | tuple[Array, Array]
"""The index of a row. For arrays [layers, ...], it is the index of a layer and the index of a
row."""
Move = Callable[[Array], Array]
"""A function that moves an array to the device's memory."""

SUBLANES = 8
"""The number of rows of a TPU tile of 32-bit numbers."""
LANES = 128
"""The number of numbers in a row of a TPU tile."""


@dataclass(frozen=True)
class Order:
    """The storage order of one array of a store. This class stores the array unchanged.

    ``axis`` is the axis of the stored array along which units are concatenated. ``stride`` is the
    number of elements of this axis per unit.
    """

    axis: int = 2
    stride: int = 1

    separate_heads: ClassVar[bool] = False
    """Whether the axis of units comes before the heads, and each head has separate tiles."""
    transposed: ClassVar[bool] = False
    """Whether tokens run along the last axis."""
    tileable: ClassVar[bool] = False
    """Whether a kernel can read a slice of the units."""

    @property
    def fold(self) -> int:
        """The number of rows of channels that are stored side by side in one row of lanes."""
        return 1

    @property
    def groups(self) -> int:
        """The number of numbers per token, if they are stored along the lanes; otherwise 1."""
        return 1

    @property
    def min_units(self) -> int:
        """The minimum number of units to write together. To write fewer rows than a tile has, the
        compiler would transpose the whole array."""
        return 1

    @property
    def alignment(self) -> int:
        """The alignment of a kernel's tile. The size of the tile along ``axis`` must be a multiple
        of it."""
        return LANES if self.axis == 3 else SUBLANES

    def arrange(self, x: Array) -> Array:
        """Convert any number of units from the codec's order to the stored order."""
        return x

    def restore(self, stored: Array) -> Array:
        """Undo ``arrange``."""
        return stored

    def slice_units(self, stored: Array, start: Array | int, size: int) -> Array:
        """Return ``size`` units of a stored array from the unit ``start`` on, in the stored
        order."""
        return lax.dynamic_slice_in_dim(
            stored, start * self.stride, size * self.stride, axis=self.axis
        )

    def slice_layer(
        self, stack: Array, layer: Array, start: Array | int, size: int, near: Move
    ) -> Array:
        """Do the work of ``slice_units`` for one layer of a stack [layers, ...]. ``near`` moves the
        result."""
        place, shape = [jnp.int32(0)] * stack.ndim, [1, *stack.shape[1:]]
        place[0], place[1 + self.axis] = layer, jnp.asarray(start * self.stride, jnp.int32)
        shape[1 + self.axis] = size * self.stride
        return near(lax.dynamic_slice(stack, place, shape))[0]

    def slice_row(self, stored: Array, row: Row, start: Array, like: HasShape) -> Array:
        """Return units of one row from the unit ``start`` on, in the stored order. The result has
        the shape of ``like``."""
        stored, place = self._locate(stored, row, start)
        shape = (*[1] * (stored.ndim - like.ndim), *like.shape)
        return lax.dynamic_slice(stored, place, shape).reshape(like.shape)

    def update_row(self, stored: Array, row: Row, start: Array, units: Array) -> Array:
        """Write ``units`` to one row from the unit ``start`` on, in place."""
        into, place = self._locate(stored, row, start)
        units = units.reshape(*[1] * (into.ndim - units.ndim), *units.shape)
        return lax.dynamic_update_slice(into, units, place).reshape(stored.shape)

    def subblock(self, stored: Array, index: int, count: int) -> tuple[Array, int]:
        """Select one of ``count`` subblocks of every block from a tile [kv_heads, ...].

        Returns:
          The rows of the subblock, and which of the ``fold`` groups of lanes contains them.
        """
        return stored, 0

    def _locate(self, stored: Array, row: Row, start: Array) -> tuple[Array, tuple[Array, ...]]:
        """Return the array to index, with layers and rows on one axis if necessary, and the index
        of a row's units in it."""
        if isinstance(row, tuple) and current_platform() == "tpu" and not self.tileable:
            # With a separate axis of layers, the TPU compiler would choose a different memory
            # layout. For a tileable order, the layout is fixed.
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


TILE = SUBLANES * LANES
"""The number of numbers in a tile."""


@functools.singledispatch
def subblocks_of(codec: Codec) -> int:
    """Return how many subblocks of a block have their codes in the same bytes.

    A byte may contain the codes of several tokens. A kernel then reads a block one subblock after
    another, where the n-th subblock has the n-th code of each byte.
    """
    return 1


@subblocks_of.register(Integer)
@subblocks_of.register(Codebook)
def _(codec: Integer | Codebook) -> int:
    # Codes of 3 and 5 bits are packed as codes of 2 or 4 bits, and of 1 bit.
    return 8 if codec.bits in (3, 5) else 8 // codec.bits


@subblocks_of.register
def _(codec: CodecWrapper) -> int:
    return subblocks_of(codec.codec)


@dataclass(frozen=True)
class RowTiled(Order):
    """An order that folds rows of channels: [batch, kv_heads, units, rows, width] is stored as
    [batch, kv_heads, units * rows / fold, fold * width].

    The rows of a unit are split into ``fold`` runs, which are stored side by side.
    """

    tileable: ClassVar[bool] = True
    rows: int = 1
    width: int = 1
    side_by_side: int = 1

    @property
    def fold(self) -> int:
        return self.side_by_side

    @property
    def min_units(self) -> int:
        return -(-SUBLANES // self.stride)

    def arrange(self, x: Array) -> Array:
        batch, heads, units = x.shape[:3]
        x = x.reshape(batch, heads, units, self.fold, self.rows // self.fold, self.width)
        return x.swapaxes(3, 4).reshape(batch, heads, -1, self.fold * self.width)

    def restore(self, stored: Array) -> Array:
        batch, heads = stored.shape[:2]
        x = stored.reshape(batch, heads, -1, self.rows // self.fold, self.fold, self.width)
        return x.swapaxes(3, 4).reshape(batch, heads, -1, self.rows, self.width)

    def subblock(self, stored: Array, index: int, count: int) -> tuple[Array, int]:
        heads, _, lanes = stored.shape
        per_group = count // self.fold
        x = stored.reshape(heads, -1, per_group, self.rows // count, lanes)[:, :, index % per_group]
        return x.reshape(heads, -1, lanes), index // per_group

    def shared_rows(self, stored: Array, index: int, count: int) -> Array:
        """Select the row that belongs to the ``index``-th of ``count`` subblocks. ``stored`` has
        rows that several tokens of a unit share, such as scales per channel. Returns [kv_heads,
        units, width]."""
        heads, _, lanes = stored.shape
        row, per_group = index * self.rows // count, self.rows // self.fold
        rows = stored.reshape(heads, -1, per_group, lanes)[:, :, row % per_group]
        return rows[..., row // per_group * self.width : (row // per_group + 1) * self.width]


@dataclass(frozen=True)
class LaneTiled(Order):
    """An order that stores numbers of tokens along the lanes: [batch, kv_heads, units, rows, width]
    is stored as [batch, kv_heads, subblocks * width, units * rows / subblocks]."""

    tileable: ClassVar[bool] = True
    rows: int = 1
    width: int = 1
    subblocks: int = 1

    @property
    def groups(self) -> int:
        return self.width

    def arrange(self, x: Array) -> Array:
        batch, heads, units = x.shape[:3]
        x = x.reshape(batch, heads, units, self.subblocks, self.rows // self.subblocks, self.width)
        return x.transpose(0, 1, 3, 5, 2, 4).reshape(batch, heads, self.subblocks * self.width, -1)

    def restore(self, stored: Array) -> Array:
        batch, heads = stored.shape[:2]
        rows = self.rows // self.subblocks
        x = stored.reshape(batch, heads, self.subblocks, self.width, -1, rows)
        return x.transpose(0, 1, 4, 2, 5, 3).reshape(batch, heads, -1, self.rows, self.width)

    def of_subblock(self, stored: Array, index: int) -> Array:
        """Select the numbers of one subblock's tokens, [kv_heads, width, n], from ``stored``
        [kv_heads, subblocks * width, n]."""
        return stored[:, index * self.width : (index + 1) * self.width]


@dataclass(frozen=True)
class Transposed(Order):
    """An order with tokens along the lanes: [batch, kv_heads, units, width] is stored as [batch,
    kv_heads, width, units]. A TPU compiler chooses this order in any case for rows that are
    narrower than the lanes."""

    transposed: ClassVar[bool] = True

    def arrange(self, x: Array) -> Array:
        return x.swapaxes(2, 3)

    def restore(self, stored: Array) -> Array:
        return stored.swapaxes(2, 3)


@dataclass(frozen=True)
class PaddedTiles(Order):
    """An order with whole tiles per unit, for fetching units from host memory: [batch, kv_heads,
    units, rows, width] is stored as [batch, units, tiles, 8, 128], with zeros after a unit's
    numbers.

    ``shape`` is [kv_heads, rows, width]. With ``separate_heads``, each head has separate tiles, so
    that the devices of a mesh can divide the heads.
    """

    shape: tuple[int, ...] = ()
    separate_heads: bool = False

    def arrange(self, x: Array) -> Array:
        batch, heads, units = x.shape[:3]
        # Tiles have 8 rows even for 8-bit numbers. To copy taller tiles, XLA would transpose them,
        # and the whole array with them.
        x = x.swapaxes(1, 2).reshape(batch, units, heads if self.separate_heads else 1, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % TILE)))
        return x.reshape(batch, units, -1, SUBLANES, LANES)

    def restore(self, stored: Array) -> Array:
        # Fix the layout, because a copy between memories can't also transpose.
        stored = with_layout_constraint(stored, Layout(major_to_minor=tuple(range(stored.ndim))))
        batch, units, tiles = stored.shape[:3]
        heads, *unit = self.shape
        numbers = math.prod(unit if self.separate_heads else self.shape)
        pieces = tiles // -(-numbers // TILE)
        heads = pieces if self.separate_heads else heads  # on a mesh, the device's own heads
        x = stored.reshape(batch, units, pieces, -1)[..., :numbers]
        return x.reshape(batch, units, heads, *unit).swapaxes(1, 2)

    # A TPU slices host memory along a single axis, so the axes of rows and units are merged first.

    def slice_row(self, stored: Array, row: Row, start: Array, like: HasShape) -> Array:
        flat, begin = self._flatten(stored, row, start)
        return lax.dynamic_slice_in_dim(flat, begin, like.shape[1])[None]

    def update_row(self, stored: Array, row: Row, start: Array, units: Array) -> Array:
        flat, begin = self._flatten(stored, row, start)
        return lax.dynamic_update_slice_in_dim(flat, units[0], begin, 0).reshape(stored.shape)

    def slice_layer(
        self, stack: Array, layer: Array, start: Array | int, size: int, near: Move
    ) -> Array:
        rows = []
        for row in range(stack.shape[1]):
            flat, begin = self._flatten(stack, (layer, jnp.int32(row)), start)
            rows.append(near(lax.dynamic_slice_in_dim(flat, begin, size)))
        return jnp.stack(rows)

    def _flatten(self, stored: Array, row: Row, start: Array | int) -> tuple[Array, Array]:
        """Merge the axes of rows and units. Returns the array, and the index of a row's units in
        it."""
        *_, rows, units = stored.shape[:-3]
        number = row[0] * rows + row[1] if isinstance(row, tuple) else row
        return stored.reshape(-1, *stored.shape[-3:]), number * units + start


def fold_of(head_dim: int) -> int:
    """Return how many rows of ``head_dim`` channels fit side by side in the lanes."""
    return LANES // head_dim if head_dim < LANES and LANES % head_dim == 0 else 1


def slot_alignment(platform: str) -> int:
    """Return the alignment of slots. The number of slots of a layer must be a multiple of it.

    A TPU compiler transposes an array whose rows do not fill whole tiles, and copies it wherever
    the other order is needed. GPU kernels fetch whole tiles into shared memory.
    """
    return 1 if platform == "cpu" else SUBLANES


def block_alignment(platform: str, slots: int, block: int) -> int:
    """Return the alignment of blocks. The number of blocks of a layer must be a multiple of it. On
    TPUs, the scales of several blocks then fill whole tiles. The codes of a block always do."""
    if platform != "tpu":
        return 1
    return SUBLANES if slots >= SUBLANES * SUBLANES * block else SUBLANES // 2


@functools.lru_cache(maxsize=256)
def orders_of(
    platform: str,
    codec: Codec,
    block: int | None,
    head_dim: int,
    subblocks: int,
    heads: int | None = None,
    separate_heads: bool = False,
) -> Orders:
    """Return the storage orders of a codec's arrays, as a pytree with the structure of its store.

    Args:
      platform: the platform that computes with the arrays.
      codec: the resolved codec.
      block: tokens per unit; None if each unit is one token.
      head_dim: channels per head.
      subblocks: the number of subblocks that a kernel reads one after another.
      heads: the number of key-value heads, for a store in host memory, from which whole units are
        fetched; otherwise None.
      separate_heads: whether devices divide the heads.
    """
    shape = (1, heads or 1, 1, block or MULTIPLE, head_dim)
    store = jax.eval_shape(functools.partial(codec.empty, shape))

    def order(x: jax.ShapeDtypeStruct) -> Order:
        if platform != "tpu" or block is None or x.ndim != 5:
            return AS_IS
        rows, width = x.shape[3:]
        if heads is not None:
            shape = x.shape[1], rows, width
            separate = separate_heads and x.shape[1] > 1
            return PaddedTiles(1, 1, shape=shape, separate_heads=separate)
        if width == head_dim:
            fold = fold_of(head_dim) if rows % fold_of(head_dim) == 0 else 1
            return RowTiled(2, rows // fold, rows, width, fold)
        runs = subblocks if rows % subblocks == 0 else 1
        return LaneTiled(3, rows // runs, rows, width, runs)

    return jax.tree.map(order, store)
