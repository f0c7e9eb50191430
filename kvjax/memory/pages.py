"""Who has which pages of a cache's pools: as figures, as text, as a plot."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import check_arrays
from kvjax.cache.state import KVCache
from kvjax.core.array_folder import expand_user
from kvjax.core.pytree import tree_bytes
from kvjax.core.reporting import pyplot, readable_bytes
from kvjax.core.transfer import fetch
from kvjax.core.validation import check_not_traced
from kvjax.paging.allocator import PageGroup

FREE, HELD, SHARED = -1, -2, -3
"""Owners that are no row: nobody, whoever called ``retain``, and several rows."""
_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NONE = -4
_COLORS = {FREE: 0.92, HELD: 0.6, SHARED: 0.1, _NONE: 1.0}
WIDTH = 64
"""Pages of a line."""


@dataclass(frozen=True)
class PoolMap:
    """A pool of some layers, which go by the same tables.

    ``layers``: numbers of ``KVCache.layers``, or, of a stacked cache, of the model's.
    ``page_size``: tokens. ``page_bytes``: of a page, in all of these layers together. ``owners``:
    int[pages], the row that has each page, or ``FREE``, ``HELD`` or ``SHARED``. ``wasted``: of the
    slots in pages that rows have, the share that holds
    nothing.
    """

    layers: tuple[int, ...]
    page_size: int
    page_bytes: int
    owners: np.ndarray
    wasted: float

    @property
    def pages(self) -> int:
        """Of the pool."""
        return len(self.owners)

    @property
    def used(self) -> int:
        """Pages that anybody has."""
        return int(np.sum(self.owners != FREE))

    @property
    def shared(self) -> int:
        """Pages that several rows have."""
        return int(np.sum(self.owners == SHARED))

    def __str__(self) -> str:
        signs = [_sign(int(owner)) for owner in self.owners]
        lines = ["".join(signs[n : n + WIDTH]) for n in range(0, len(signs), WIDTH)]
        return "\n".join(
            [
                f"layers {_ranges(self.layers)}: {self.pages} pages of {self.page_size} tokens, "
                f"{readable_bytes(self.page_bytes)} each; {self.used} used, {self.shared} shared, "
                f"{self.pages - self.used} free; {self.wasted:.1%} of used slots empty",
                *lines,
            ]
        )


@dataclass(frozen=True)
class PageMap:
    """A cache's pools, one for each kind of its layers."""

    pools: tuple[PoolMap, ...]

    def __str__(self) -> str:
        signs = "a row's number or letter; + several rows; = kept without a row; . free"
        return "\n\n".join([*map(str, self.pools), signs])

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw the pools below one another, a square a page, into a file.

        Raises:
          ValueError: if matplotlib (the extra ``plots``) is not there.
        """
        plt = pyplot()
        grids = [_grid(pool.owners) for pool in self.pools]
        heights = [len(grid) for grid in grids]
        figure, all_axes = plt.subplots(
            len(grids), squeeze=False, layout="constrained",
            figsize=(8, 0.9 * len(grids) + 0.16 * sum(heights)), height_ratios=heights,
        )  # fmt: skip
        colors = plt.get_cmap("tab20")
        for axes, grid, pool in zip(all_axes[:, 0], grids, self.pools, strict=True):
            image = np.ones((*grid.shape, 3))
            for owner, color in _COLORS.items():
                image[grid == owner] = color
            rows = grid >= 0
            image[rows] = colors(grid[rows] % 20)[:, :3]
            axes.imshow(image)
            axes.set_xticks(np.arange(-0.5, grid.shape[1]), minor=True)
            axes.set_yticks(np.arange(-0.5, grid.shape[0]), minor=True)
            axes.grid(which="minor", color="white", linewidth=1)
            axes.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
            axes.set_title(str(pool).splitlines()[0], fontsize=8, loc="left")
            for y, x in np.argwhere(grid >= 0):
                axes.text(x, y, _sign(int(grid[y, x])), ha="center", va="center", fontsize=6)
        words = "a color a row; black: several rows; grey: kept without a row; light: free"
        figure.suptitle(f"{title}\n{words}" if title else words, fontsize=9)
        figure.savefig(expand_user(path), dpi=150)
        plt.close(figure)


def _grid(owners: np.ndarray) -> np.ndarray:
    """Owners in lines, the last one filled up."""
    more = -len(owners) % WIDTH
    return np.pad(owners, (0, more), constant_values=_NONE).reshape(-1, WIDTH)


def page_map(cache: KVCache) -> PageMap:
    """Who has which pages of a cache, and what pages cost.

    Raises:
      ValueError: if it is no cache, none of its layers is in pages, or it is traced.
    """
    check_arrays("kvjax.memory.page_map", cache)
    check_not_traced("kvjax.memory.page_map", cache.length)
    if not cache.pools:
        raise ValueError(
            "kvjax.memory.page_map: the cache has no pages: give it a policy of Paged layers"
        )
    length, pools = fetch((cache.length, cache.pools))
    return PageMap(
        tuple(
            _pool_map(cache, page_group, pool, length)
            for page_group, pool in zip(cache.page_groups, pools, strict=True)
        )
    )


def _pool_map(cache: KVCache, page_group: PageGroup, pool: Any, length: np.ndarray) -> PoolMap:
    layers = [held for held in cache.layers if held.policy.page_group == page_group]
    entries = range(len(cache.layers)) if cache.stacks is None else [n for n, _ in cache.stacks]
    numbers = tuple(
        number
        for number, n in enumerate(entries)
        if cache.layers[n].policy.page_group == page_group
    )
    each = pool.pages // len(pool.left)
    rows, columns = np.nonzero(pool.table >= 0)
    page = pool.table[rows, columns] + rows // (cache.batch // len(pool.left)) * each
    owners = np.where(pool.refs > 0, HELD, FREE)
    held = np.bincount(page, minlength=pool.pages)
    owners[page] = rows
    owners[held > 1] = SHARED
    # What stands in a page: up to where the longest of its rows ends.
    layout, units = page_group.layout, np.asarray(page_group.units(length))
    number = np.asarray(layout.pages_in(jnp.asarray(units)))[rows, columns]
    filled = np.zeros(pool.pages, np.int64)
    end = np.clip(units[rows] - number * layout.page_size, 0, layout.page_size)
    np.maximum.at(filled, page, end)
    used = np.sum(held > 0) * layout.page_size
    size = layout.page_size * (1 if page_group.split is None else page_group.split.block)
    return PoolMap(
        numbers, size, tree_bytes([(x.keys, x.values) for x in layers]) // pool.pages, owners,
        float(1 - filled.sum() / used) if used else 0.0,
    )  # fmt: skip


def _sign(owner: int) -> str:
    if owner < 0:
        return {FREE: ".", HELD: "=", SHARED: "+"}[owner]
    return _SIGNS[owner] if owner < len(_SIGNS) else "#"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Numbers in words: ``0-3, 5``."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in found)
