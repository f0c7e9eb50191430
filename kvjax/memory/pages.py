"""Which row owns which page of a cache's pools, as numbers, text and a plot."""

from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import check_arrays
from kvjax.cache.state import KVCache
from kvjax.core.array_folder import expand_user
from kvjax.core.pytree import tree_bytes
from kvjax.core.reporting import pyplot, readable_bytes
from kvjax.core.transfer import fetch
from kvjax.core.validation import check_not_traced
from kvjax.paging.allocator import PageAllocator, PageGroup

FREE, HELD, SHARED = -1, -2, -3
"""Owners other than a single row: no owner, a caller of ``retain``, and several rows."""
_SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_PADDING = -4
_COLORS = {FREE: 0.92, HELD: 0.6, SHARED: 0.1, _PADDING: 1.0}
WIDTH = 64
"""The number of pages per line."""


@dataclass(frozen=True)
class PoolMap:
    """The pages of a pool, which the layers of a page group share.

    Attributes:
      layers: indices in ``KVCache.layers``; in a stacked cache, indices of the model's layers.
      page_size: tokens per page.
      page_bytes: bytes of a page in all of these layers.
      owners: int[pages], the row that owns each page, or ``FREE``, ``HELD`` or ``SHARED``.
      wasted: the fraction of slots that are empty, among all slots of pages that rows own.
    """

    layers: tuple[int, ...]
    page_size: int
    page_bytes: int
    owners: np.ndarray
    wasted: float

    @property
    def pages(self) -> int:
        """Number of pages in the pool."""
        return len(self.owners)

    @property
    def used(self) -> int:
        """Number of pages that are not free."""
        return int(np.sum(self.owners != FREE))

    @property
    def shared(self) -> int:
        """Number of pages that several rows share."""
        return int(np.sum(self.owners == SHARED))

    def __str__(self) -> str:
        symbols = [_symbol(int(owner)) for owner in self.owners]
        lines = ["".join(symbols[n : n + WIDTH]) for n in range(0, len(symbols), WIDTH)]
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
    """A cache's pools, one per page group.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy("paged", page_size=16), batch=2, max_len=64)
      print(kvjax.memory.page_map(cache))
      ```
    """

    pools: tuple[PoolMap, ...]

    def __str__(self) -> str:
        symbols = "digit or letter: a row; +: several rows; =: retained without a row; .: free"
        return "\n\n".join([*map(str, self.pools), symbols])

    def plot(self, path: str | Path, title: str = "") -> None:
        """Draw the pools into a file, one below another, with a square per page.

        Raises:
          ValueError: if matplotlib (the extra ``plots``) is not installed.
        """
        plt = pyplot()
        grids = [_grid(pool.owners) for pool in self.pools]
        heights = [len(grid) for grid in grids]
        figure, all_axes = plt.subplots(
            len(grids),
            squeeze=False,
            layout="constrained",
            figsize=(8, 0.9 * len(grids) + 0.16 * sum(heights)),
            height_ratios=heights,
        )
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
                axes.text(x, y, _symbol(int(grid[y, x])), ha="center", va="center", fontsize=6)
        legend = "color: a row; black: several rows; gray: retained without a row; light: free"
        figure.suptitle(f"{title}\n{legend}" if title else legend, fontsize=9)
        figure.savefig(expand_user(path), dpi=150)
        plt.close(figure)


def _grid(owners: np.ndarray) -> np.ndarray:
    """Arrange owners in lines. The last line is padded."""
    padding = -len(owners) % WIDTH
    return np.pad(owners, (0, padding), constant_values=_PADDING).reshape(-1, WIDTH)


def page_map(cache: KVCache) -> PageMap:
    """Return which row owns which page of a cache, and the size of pages.

    Raises:
      ValueError: if ``cache`` is not a cache, has no paged layers, or is traced.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy("paged", page_size=16), batch=2, max_len=64)
      print(kvjax.memory.page_map(cache).pools[0].used)
      ```
    """
    check_arrays("kvjax.memory.page_map", cache)
    check_not_traced("kvjax.memory.page_map", cache.length)
    if not cache.pools:
        raise ValueError(
            "kvjax.memory.page_map: the cache has no pages: create it with a policy of Paged layers"
        )
    length, pools = fetch((cache.length, cache.pools))
    return PageMap(
        tuple(
            _pool_map(cache, page_group, pool, length)
            for page_group, pool in zip(cache.page_groups, pools, strict=True)
        )
    )


def _pool_map(
    cache: KVCache, page_group: PageGroup, pool: PageAllocator, length: np.ndarray
) -> PoolMap:
    layers = [layer for layer in cache.layers if layer.policy.page_group == page_group]
    entries = range(len(cache.layers)) if cache.stacks is None else [n for n, _ in cache.stacks]
    numbers = tuple(
        number
        for number, entry in enumerate(entries)
        if cache.layers[entry].policy.page_group == page_group
    )
    per_device = pool.pages // len(pool.left)
    rows, columns = np.nonzero(pool.table >= 0)
    device = rows // (cache.batch // len(pool.left))
    page = pool.table[rows, columns] + device * per_device
    owners = np.where(pool.refs > 0, HELD, FREE)
    counts = np.bincount(page, minlength=pool.pages)
    owners[page] = rows
    owners[counts > 1] = SHARED
    # A page is filled as far as in the longest row that owns it.
    layout, units = page_group.layout, np.asarray(page_group.units(length))
    number = np.asarray(layout.pages_in(jnp.asarray(units)))[rows, columns]
    filled = np.zeros(pool.pages, np.int64)
    end = np.clip(units[rows] - number * layout.page_size, 0, layout.page_size)
    np.maximum.at(filled, page, end)
    used = np.sum(counts > 0) * layout.page_size
    block = 1 if page_group.split is None else page_group.split.block
    return PoolMap(
        numbers,
        layout.page_size * block,
        tree_bytes([(x.keys, x.values) for x in layers]) // pool.pages,
        owners,
        float(1 - filled.sum() / used) if used else 0.0,
    )


def _symbol(owner: int) -> str:
    if owner < 0:
        return {FREE: ".", HELD: "=", SHARED: "+"}[owner]
    return _SYMBOLS[owner] if owner < len(_SYMBOLS) else "#"


def _ranges(numbers: tuple[int, ...]) -> str:
    """Format numbers as text, such as ``0-3, 5``."""
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in ranges)
