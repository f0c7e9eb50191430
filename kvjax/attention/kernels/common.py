"""What paths by kernels share: what they are given, and how they run where no device has them."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention.inputs import AttentionInputs, Unserved
from kvjax.attention.mask import Mask
from kvjax.cache.sections import Section
from kvjax.codecs import in_tiles
from kvjax.codecs._tiles import Tile
from kvjax.core.typing import Array

INTERPRETED: Any = True
"""How kernels are interpreted where no device has them; tests look for races too."""


def refuse(path: str, reasons: dict[str, object]) -> None:
    """Raise ``ValueError`` for the first reason that is true."""
    for reason, true in reasons.items():
        if true:
            raise Unserved(f"the attention path {path!r} {reason}")


def compiled(run: Callable[..., Any], *arrays: Array) -> Any:
    """``run(*arrays, interpret=)``, without a device's compiler on CPUs."""
    on_cpu, elsewhere = (functools.partial(run, interpret=each) for each in (INTERPRETED, False))
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=elsewhere)


@dataclass(frozen=True)
class Reading:
    """A section, and the rows of queries that look at it, as kernels read them.

    What depends on a row alone are whole numbers, ``scalars``; what depends on a slot is made of
    them in the kernel, of each element alone. Its methods are called there, with shapes of as many
    axes as a kernel likes.

    ``queries``: [batch, kv_heads, rows, head_dim], turned as the codec of the keys wants it.
    ``parts``: runs of a block's tokens that are read one after the other.
    """

    section: Section
    mask: Mask
    queries: Any
    parts: int

    @classmethod
    def of(cls, inputs: AttentionInputs, section: Section) -> "Reading":
        """Of a layer's inputs."""
        rows = in_tiles(section.codecs[0]).turn(inputs.rows(section))
        sides = folded_sides(section.orders)
        parts = max(in_tiles(codec).parts for codec in section.codecs) * sides
        return cls(section, inputs.mask, rows, parts if section.unit > 1 else 1)

    def bare(self) -> "Reading":
        """Without arrays: settings alone."""
        none = {"keys": None, "values": None, "cursors": (), "pages": None}
        mask = replace(self.mask, queries=None, call=None if self.mask.call is None else True)
        return replace(self, section=replace(self.section, **none), mask=mask, queries=None)

    @property
    def sides(self) -> int:
        """Rows of channels that stand side by side."""
        return folded_sides(self.section.orders)

    @property
    def groups(self) -> tuple[int, int]:
        """Groups of channels of a token that have a scale each: of keys and of values."""
        first, second = (
            max(order.groups for order in jax.tree.leaves(orders)) for orders in self.section.orders
        )
        return first, second

    def scalars(self, tile: int, at: Array) -> tuple[Array, Array]:
        """What kernels go by, and the most tiles of any of them.

        Args:
          tile: tokens of a tile.
          at: int32[batch, blocks, rows], the positions of rows of queries that are looked at
            together.

        Returns:
          int32[batch, blocks, n]: the first of the tiles that they may see, how many there are, and
          what positions are made of; and int32[].
        """
        section, mask = self.section, self.mask

        def filled(near: Array) -> Array:
            return jnp.asarray(section.filled(near[None]))

        units = jax.vmap(jax.vmap(filled))(jnp.max(at, axis=2) + 1)
        end = (section.first + jnp.clip(units, 0, section.size)) * section.unit
        tiles = -(-end // tile)
        first = jnp.minimum(self._first(tile), tiles)
        cursors = [] if mask.call is None else [mask.call]
        cursors = [x[:, None] for x in (*cursors, *section.cursors)]
        each = jnp.broadcast_arrays(first, tiles - first, *cursors)
        return jnp.stack(each, axis=2).astype(jnp.int32), jnp.maximum(jnp.max(tiles - first), 1)

    def _first(self, tile: int) -> Array:
        """int32[]: the first tile of which any query may see anything."""
        section, mask, unit = self.section, self.mask, self.section.unit
        if mask.window is None and mask.chunk is None:
            return jnp.int32(section.first * unit // tile)
        end = (section.first + section.size) * unit
        starts = jnp.arange(0, end, tile, dtype=jnp.int32) // unit

        def reached(start: Array) -> Array:
            return mask.reaches(*section.span(start, -(-tile // unit)), section)

        return jnp.argmax(jax.vmap(reached)(starts)).astype(jnp.int32)

    def at(self, blocks: int, rows: int) -> Array:
        """int32[batch, blocks, rows]: the positions of rows of queries, the last ones again where
        there are none."""
        queries = self.mask.queries
        some = jnp.tile(queries, (1, self.queries.shape[2] // queries.shape[1]))
        some = jnp.pad(some, ((0, 0), (0, blocks * rows - some.shape[1])), mode="edge")
        return some.reshape(-1, blocks, rows)

    def slots(self, part: int, tile: int, along: Callable[[int], Array]) -> Array:
        """The slots of a run of a tile's blocks, counted from the tile's beginning."""
        unit, number = self.section.unit, along(tile // self.parts)
        if self.parts == 1:
            return number
        each = unit // self.parts
        return number // each * unit + part * each + number % each

    def tiles(self, which: int, store: Any, part: int) -> list[Tile]:
        """Of a tile's keys (0) or values (1) the numbers of a run."""
        core = in_tiles(self.section.codecs[which]).core
        found: list[Tile] = core.tiles(store, self.section.orders[which], part, self.parts)
        return found

    def positions(self, slots: Array, numbers: list[Array]) -> Array:
        """The positions of slots, -1 for none."""
        section = self.section
        cursors = numbers if self.mask.call is None else numbers[1:]
        first = section.first * section.unit
        mine = (slots >= first) & (slots < first + section.size * section.unit)
        return jnp.where(mine, section.position_of(slots, *cursors), -1)

    def sees(self, queries: Array, positions: Array, numbers: list[Array]) -> Array:
        """Whether queries see positions."""
        call = None if self.mask.call is None else numbers[0]
        return self.mask.sees(queries, positions, call, self.section)

    def scores(self, products: Array) -> Array:
        """Scores of products."""
        scores, cap = products * self.mask.scale, self.mask.soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


def folded_sides(orders: Any) -> int:
    """Rows of channels that stand side by side in a store."""
    return max(order.fold for order in jax.tree.leaves(orders))
