"""What all kernels use: their inputs, the codec that they read, and interpret mode."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.attention.mask import Mask
from kvjax.attention.softmax import AttentionInputs, Partial, Unsupported
from kvjax.cache.sections import Section
from kvjax.codecs import Centered, Codec, CodecWrapper, Rotated
from kvjax.core.typing import Array
from kvjax.placement.order import Orders, subblocks_of

_T = TypeVar("_T")
Ref = Any
"""A reference to memory in a kernel. Pallas exports no type for it."""
DType = np.dtype[Any]

INTERPRETED: Any = True
"""The ``interpret`` argument of kernels on a CPU. Tests set it to detect races."""
PROGRAMS = 256
"""A GPU kernel splits rows until it has about this number of programs, a few per multiprocessor."""
MIN_TILES = 4
"""The minimum number of tiles per program if several programs share a row."""


def refuse(path: str, reasons: dict[str, object]) -> None:
    """Raise ``Unsupported`` with the first reason that is true."""
    for reason, applies in reasons.items():
        if applies:
            raise Unsupported(f"the attention path {path!r} {reason}")


def compiled(run: Callable[..., _T], *arrays: Array) -> _T:
    """Call ``run(*arrays, interpret=...)``. The kernel is interpreted on CPUs, and compiled on
    other platforms."""
    on_cpu, on_device = (functools.partial(run, interpret=x) for x in (INTERPRETED, False))
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=on_device)


class Core(NamedTuple):
    """The parts of a codec that a kernel uses.

    ``codec`` is the inner codec, whose store the kernel reads. ``transforms`` are the transforms of
    channels around it, outermost first. They are applied to queries and outputs, outside of the
    kernel's products.
    """

    codec: Codec
    transforms: tuple[Rotated, ...] = ()

    def transform(self, queries: Array) -> Array:
        """Transform queries [..., head_dim] in the same way as the stored keys."""
        for each in self.transforms:
            queries = each.transform(queries)
        return queries

    def inverse_transform(self, output: Array) -> Array:
        """Undo the transforms of weighted values [..., head_dim]."""
        for each in reversed(self.transforms):
            output = each.inverse_transform(output)
        return output


@functools.singledispatch
def core_of(codec: Codec) -> Core:
    """Return the core of a codec. By default, a wrapper is assumed to change only how numbers are
    encoded, so its core is the core of its inner codec. A wrapper that changes how a store is read
    registers its own rule."""
    return Core(codec)


@core_of.register
def _(codec: CodecWrapper) -> Core:
    return core_of(codec.codec)


@core_of.register
def _(codec: Centered) -> Core:
    return Core(codec)


@core_of.register
def _(codec: Rotated) -> Core:
    inner = core_of(codec.codec)
    return inner._replace(transforms=(codec, *inner.transforms))


@dataclass(frozen=True)
class KernelInputs:
    """A section, and the queries that attend to it.

    Values that depend only on the row are passed to the kernel as integers (``scalars``). The
    kernel computes values per slot from them, elementwise, by calling ``slots``, ``positions``,
    ``sees`` and ``scores`` with arrays of any number of axes.

    ``queries`` is [batch, kv_heads, rows, head_dim], transformed like the stored keys.
    ``subblocks`` is the number of parts (subblocks) of each block, which the kernel reads one after
    another.
    """

    section: Section
    mask: Mask
    queries: Array
    subblocks: int

    @classmethod
    def of(cls, inputs: AttentionInputs, section: Section) -> "KernelInputs":
        """Return the inputs for one section of a layer."""
        queries = core_of(section.codecs[0]).transform(inputs.rows(section))
        return cls(section, inputs.mask, queries, section_subblocks(section))

    def without_arrays(self) -> "KernelInputs":
        """Return only the static settings, without arrays. A kernel can close over them."""
        none = {"keys": None, "values": None, "cursors": (), "pages": None}
        mask = replace(
            self.mask, queries=None, call_start=None if self.mask.call_start is None else True
        )
        return replace(self, section=replace(self.section, **none), mask=mask, queries=None)

    @property
    def fold(self) -> int:
        """The number of rows of channels that are stored side by side in one row of lanes."""
        return fold_of_orders(self.section.orders)

    @property
    def groups(self) -> tuple[int, int]:
        """The number of groups of channels with separate scales per token, for keys and for
        values."""
        keys, values = (
            max(order.groups for order in jax.tree.leaves(orders)) for orders in self.section.orders
        )
        return keys, values

    def at(self, blocks: int, rows: int) -> Array:
        """Return the positions of query rows, int32[batch, blocks, rows]. The padding repeats the
        last position."""
        queries = self.mask.queries
        positions = jnp.tile(queries, (1, self.queries.shape[2] // queries.shape[1]))
        padding = (0, blocks * rows - positions.shape[1])
        return jnp.pad(positions, ((0, 0), padding), mode="edge").reshape(-1, blocks, rows)

    def scalars(self, tile: int, at: Array) -> tuple[Array, Array]:
        """Compute the integers that a kernel needs for each block of query rows.

        Args:
          tile: the number of tokens per tile.
          at: int32[batch, blocks, rows], the positions of the rows.

        Returns:
          Two arrays. The first, int32[batch, blocks, n], has the first tile that the rows may see,
          the number of tiles from this tile on, and the cursors from which positions are computed.
          The second, int32[], is the maximum number of tiles.
        """
        section, mask = self.section, self.mask

        def filled(near: Array) -> Array:
            return jnp.asarray(section.filled(near[None]))

        units = jax.vmap(jax.vmap(filled))(jnp.max(at, axis=2) + 1)
        end = (section.first + jnp.clip(units, 0, section.size)) * section.unit
        tiles = -(-end // tile)
        first = jnp.minimum(self._first_tile(tile), tiles)
        cursors = [] if mask.call_start is None else [mask.call_start]
        cursors = [x[:, None] for x in (*cursors, *section.cursors)]
        scalars = jnp.broadcast_arrays(first, tiles - first, *cursors)
        stacked = jnp.stack(scalars, axis=2).astype(jnp.int32)
        return stacked, jnp.maximum(jnp.max(tiles - first), 1)

    def _first_tile(self, tile: int) -> Array:
        """Return the index (int32[]) of the first tile that any query may see."""
        section, mask, unit = self.section, self.mask, self.section.unit
        if mask.window is None and mask.chunk is None:
            return jnp.int32(section.first * unit // tile)
        end = (section.first + section.size) * unit
        starts = jnp.arange(0, end, tile, dtype=jnp.int32) // unit

        def reached(start: Array) -> Array:
            return mask.reaches(*section.span(start, -(-tile // unit)), section)

        return jnp.argmax(jax.vmap(reached)(starts)).astype(jnp.int32)

    def slots(self, index: int, tile: int, iota: Callable[[int], Array]) -> Array:
        """Return the slots of the subblock ``index`` of every block of a tile, counted from the
        tile's first slot. ``iota(n)`` returns 0 to n - 1 in the shape that the kernel needs."""
        unit, number = self.section.unit, iota(tile // self.subblocks)
        if self.subblocks == 1:
            return number
        tokens = unit // self.subblocks
        return number // tokens * unit + index * tokens + number % tokens

    def positions(self, slots: Array, scalars: list[Array]) -> Array:
        """Return the positions of slots; -1 for an empty slot. ``scalars`` are the entries of the
        result of ``scalars()`` from the third on."""
        section = self.section
        cursors = scalars if self.mask.call_start is None else scalars[1:]
        first = section.first * section.unit
        inside = (slots >= first) & (slots < first + section.size * section.unit)
        return jnp.where(inside, section.position_of(slots, *cursors), -1)

    def sees(self, queries: Array, positions: Array, scalars: list[Array]) -> Array:
        """Return whether queries see keys at ``positions``."""
        call_start = None if self.mask.call_start is None else scalars[0]
        return self.mask.sees(queries, positions, call_start, self.section)

    def scores(self, products: Array) -> Array:
        """Compute scores from products of queries and keys."""
        scores, cap = products * self.mask.scale, self.mask.soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def fold_of_orders(orders: Orders) -> int:
    """Return the number of rows of channels that a store has side by side in one row of lanes."""
    return max(order.fold for order in jax.tree.leaves(orders))


def section_subblocks(section: Section) -> int:
    """Return the number of subblocks of a block that a kernel reads one after another."""
    if section.unit == 1:
        return 1
    return max(map(subblocks_of, section.codecs)) * fold_of_orders(section.orders)


def splits_of(programs: int, tiles: int) -> int:
    """Return the number of programs among which the keys of a row are divided. It is chosen so that
    the programs of all rows together occupy a GPU, but each has several tiles."""
    splits = max(PROGRAMS // programs, 1)
    return min(1 << splits.bit_length() - 1, 1 << max(tiles // MIN_TILES, 1).bit_length() - 1)


def merge_splits(
    outputs: Partial, inputs: KernelInputs, blocks: int, splits: int, before: Partial | None
) -> Partial:
    """Merge the results of a GPU kernel's programs with ``before``, the softmax over other keys.

    ``outputs`` is [batch, kv_heads * blocks, splits, rows of a block, ...].
    """
    batch, kv_heads, rows, _ = inputs.queries.shape
    partial = outputs.merge_axis(2) if splits > 1 else Partial(*(x[:, :, 0] for x in outputs))
    padded = blocks * partial.total.shape[2]
    partial = Partial(*(x.reshape(batch, kv_heads, padded, *x.shape[3:]) for x in partial))
    partial = Partial(*(x[:, :, :rows] for x in partial))
    values = core_of(inputs.section.codecs[1])
    partial = partial._replace(weighted=values.inverse_transform(partial.weighted))
    return partial if before is None else before.merge(partial)
