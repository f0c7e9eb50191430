"""The orders of a TPU.

Its memory is tiled: the last axis in 128 lanes, the one before it in 8 to 32 rows. An array whose
last axes are small, such as the scales of a block, would be padded to that, and blocks of few rows
would be as well. So there blocks stand one behind the other without an axis of their own, rows that
are narrower than the lanes side by side, and what has a number or two a token along the lanes.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from kvjax.codecs import MULTIPLE, Codec
from kvjax.core.typing import Array
from kvjax.placement.order import AS_IS, LANES, SUBLANES, Order, Row

TILE = SUBLANES * LANES
"""Numbers of a tile."""


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
    """[batch, units, tiles, 8, 128] of [batch, kv_heads, units, rows, width]: all that a unit has
    of all heads, or of one head after the other, in whole tiles, with zeros behind it: so it is
    fetched from another memory. ``shape``: [kv_heads, rows, width]; ``apart``: each head has tiles
    of its own, so that devices of a mesh may have some each."""

    shape: tuple[int, ...] = ()
    apart: bool = False

    def keep(self, x: Array) -> Array:
        batch, heads, units = x.shape[:3]
        # No tiles of more rows, which 8 bits would else have: they are turned to be copied, all of
        # an array before and behind.
        x = x.swapaxes(1, 2).reshape(batch, units, heads if self.apart else 1, -1)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % TILE)))
        return x.reshape(batch, units, -1, SUBLANES, LANES)

    def give(self, kept: Array) -> Array:
        # As it was fetched: a copy between memories can't turn it as well.
        kept = with_layout_constraint(kept, Layout(major_to_minor=tuple(range(kept.ndim))))
        batch, units, tiles = kept.shape[:3]
        heads, *unit = self.shape
        numbers = math.prod(unit if self.apart else self.shape)
        pieces = tiles // -(-numbers // TILE)
        heads = pieces if self.apart else heads  # of a device, on a mesh
        x = kept.reshape(batch, units, pieces, -1)[..., :numbers]
        return x.reshape(batch, units, heads, *unit).swapaxes(1, 2)

    # Rows and units as one axis: from another memory a TPU takes slices along one alone.

    def of_row(self, kept: Array, row: Row, start: Array, like: Array) -> Array:
        flat, begin = self._flat(kept, row, start)
        return lax.dynamic_slice_in_dim(flat, begin, like.shape[1])[None]

    def with_row(self, kept: Array, row: Row, start: Array, units: Array) -> Array:
        flat, begin = self._flat(kept, row, start)
        return lax.dynamic_update_slice_in_dim(flat, units[0], begin, 0).reshape(kept.shape)

    def of_layer(self, stack: Array, layer: Array, start: Any, size: int, near: Any) -> Array:
        rows = []
        for row in range(stack.shape[1]):
            flat, begin = self._flat(stack, (layer, jnp.int32(row)), start)
            rows.append(near(lax.dynamic_slice_in_dim(flat, begin, size)))
        return jnp.stack(rows)

    def _flat(self, kept: Array, row: Row, start: Any) -> tuple[Array, Any]:
        """All units behind one another, and where those of a row begin."""
        *_, rows, units = kept.shape[:-3]
        number = row[0] * rows + row[1] if isinstance(row, tuple) else row
        return kept.reshape(-1, *kept.shape[-3:]), number * units + start


def folded(head_dim: int) -> int:
    """How many rows of so many channels stand side by side on a TPU."""
    return LANES // head_dim if head_dim < LANES and LANES % head_dim == 0 else 1


def grain(platform: str) -> int:
    """Of what the slots of a layer are a multiple: a TPU's compiler turns an array round whose rows
    fill no whole tiles, and copies it wherever the other order is wanted; and a GPU's kernels fetch
    whole tiles into shared memory."""
    return 1 if platform == "cpu" else SUBLANES


def grain_of_blocks(platform: str, slots: int, block: int) -> int:
    """The same of blocks, each of which has rows of its own, but for its scales: these are whole
    tiles on a TPU where many are."""
    if platform != "tpu":
        return 1
    return SUBLANES if slots >= SUBLANES * SUBLANES * block else SUBLANES // 2


@functools.lru_cache(maxsize=256)
def orders_of(
    platform: str,
    codec: Codec,
    block: int | None,
    head_dim: int,
    parts: int,
    heads: int | None = None,
    apart: bool = False,
) -> Any:
    """The orders of a codec's arrays, as a pytree like its store.

    Args:
      platform: that computes with them.
      codec: resolved.
      block: tokens of a unit, None where each is one.
      head_dim: channels.
      parts: runs of a block's tokens that a kernel reads one after the other.
      heads: of keys, where they are in another memory, from which whole units are fetched.
      apart: whether devices have some of those heads each.
    """
    shape = (1, heads or 1, 1, block or MULTIPLE, head_dim)
    store = jax.eval_shape(functools.partial(codec.empty, shape))

    def order(x: Any) -> Order:
        if platform != "tpu" or block is None or x.ndim != 5:
            return AS_IS
        rows, width = x.shape[3:]
        if heads is not None:
            shape = x.shape[1], rows, width
            return Whole(1, 1, shape=shape, apart=apart and x.shape[1] > 1)
        if width == head_dim:
            fold = folded(head_dim) if rows % folded(head_dim) == 0 else 1
            return Rows(2, rows // fold, rows, width, fold)
        runs = parts if rows % parts == 0 else 1
        return Along(3, rows // runs, rows, width, runs)

    return jax.tree.map(order, store)
