"""The page pool on the device, and its free lists on the host."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.layer import Body, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.paging.allocator import PageAllocator, PageGroup
from kvjax.placement.device import Device
from kvjax.placement.order import Orders
from kvjax.placement.pages import gather_pages, scatter_pages

PageArrays = list[np.ndarray]
"""The content of one page on the host. It has the page's part of every array, for all layers of a
group."""
Formats = tuple[tuple[tuple[Orders, Orders], Device], ...]
"""For each layer, the storage orders of its arrays and its placement."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share page tables.

    ``layers`` has their indices in ``KVCache.layers``. ``page_bytes`` is the size of a page in all
    these layers together. In the methods, the number of a page is its position in a sequence, not
    in the pool.
    """

    page_group: PageGroup
    layers: tuple[int, ...] = ()
    page_bytes: int = 0

    @property
    def page_tokens(self) -> int:
        """The number of tokens per page."""
        split = self.page_group.split
        return self.page_group.layout.page_size * (1 if split is None else split.block)

    @property
    def windowed(self) -> bool:
        """Whether the layers have a window, so that pages out of it become unused."""
        return not self.page_group.layout.straight

    def pages_for(self, tokens: int) -> tuple[tuple[int, ...], int | None]:
        """Return the full pages of a sequence of ``tokens`` tokens, and its partly full page or
        None."""
        return _pages_for(self.page_group, tokens)

    def column(self, page: int) -> int:
        """Return the column of a row's page table in which a page is."""
        return _column(self.page_group, page)

    def max_pages(self, tokens: int) -> int:
        """Return the maximum number of pages that a row has at the same time while it grows to
        ``tokens`` tokens."""
        layout = self.page_group.layout
        return min(-(-tokens // self.page_tokens), layout.columns)


@functools.lru_cache(maxsize=65536)
def _pages_for(page_group: PageGroup, tokens: int) -> tuple[tuple[int, ...], int | None]:
    layout, units = page_group.layout, int(page_group.units(tokens))
    first, full = int(layout.first_visible_page(units)), units // layout.page_size
    pages = (page for page in range(full) if page >= first or page < layout.sink_pages)
    return tuple(pages), full if units % layout.page_size else None


@functools.lru_cache(maxsize=65536)
def _column(page_group: PageGroup, page: int) -> int:
    return int(page_group.layout.column_of(page))


class HostAllocator:
    """The reference counts and the free list of a pool, on the host. Inside programs,
    ``PageAllocator`` has them."""

    def __init__(self, pages: int) -> None:
        self.refs = np.zeros(pages, np.int32)
        self.free = list(range(pages - 1, -1, -1))

    def allocate(self) -> int:
        """Take a free page, with one reference."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def retain(self, page: int) -> None:
        """Add a reference to a page."""
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """Remove a reference to a page. Without references, the page is free."""
        assert self.refs[page] > 0
        self.refs[page] -= 1
        if not self.refs[page]:
            self.free.append(page)

    def to_device(self, table: np.ndarray) -> PageAllocator:
        """Return the allocator for a cache whose rows start with the pages of a table. The
        references of the table must already be counted."""
        stack = np.zeros(len(self.refs), np.int32)
        stack[: len(self.free)] = self.free
        left = np.array([len(self.free)], np.int32)
        return PageAllocator(table, self.refs.copy(), stack, left)  # type: ignore[arg-type]

    def update_from(self, allocator: PageAllocator) -> None:
        """Copy the reference counts and the free pages of an allocator, whose arrays are NumPy
        arrays."""
        self.refs = np.array(allocator.refs)
        self.free = np.asarray(allocator.stack)[: int(allocator.left[0])].tolist()


class PagePool:
    """The arrays of all pages, and a ``HostAllocator`` for each cache group.

    ``layers`` are the layers of a cache, with arrays or shapes. Only their pages are kept.
    """

    def __init__(self, groups: Sequence[CacheGroup], layers: Sequence[LayerCache]) -> None:
        self.groups = groups
        self._formats = [(layer.orders, layer.policy.placement) for layer in layers]
        self.bodies: list[Body | None] = [None] * len(layers)
        self.allocators = [HostAllocator(group.page_group.layout.pool or 0) for group in groups]
        self.adopt(layers)

    def adopt(self, layers: Sequence[LayerCache]) -> None:
        """Replace the pool's arrays by the page arrays of a cache's layers."""
        for group in self.groups:
            for layer in group.layers:
                self.bodies[layer] = layers[layer].keys, layers[layer].values

    @property
    def lost(self) -> bool:
        """Whether the pool has no arrays, because none were created, or because they were leased to
        a cache and were lost with it."""
        leaves = jax.tree.leaves(self.bodies)
        return any(not isinstance(x, jax.Array) or x.is_deleted() for x in leaves)

    @property
    def nbytes(self) -> int:
        """The bytes of all pages, used or free."""
        return tree_bytes(self.bodies)

    def read(self, group: int, pages: Sequence[int]) -> list[PageArrays]:
        """Copy pages to the host."""
        return self.start_read(group, pages)()

    def start_read(self, group: int, pages: Sequence[int]) -> Callable[[], list[PageArrays]]:
        """Start copying pages to the host. The returned function waits for the copies. Pages may be
        overwritten before it is called."""
        formats, bodies = self._bodies_of(group)
        in_flight = []
        for batch in _batches(pages):
            leaves = jax.tree.leaves(_read(bodies, _padded(batch), formats=formats))
            for x in leaves:
                x.copy_to_host_async()
            in_flight.append((len(batch), leaves))

        def collect() -> list[PageArrays]:
            contents = []
            for count, leaves in in_flight:
                arrays = fetch(leaves)
                contents += [[np.array(x[n]) for x in arrays] for n in range(count)]
            return contents

        return collect

    def warm_up(self, group: int) -> None:
        """Compile the programs that read and write a group's pages, for any number of pages."""
        size = 1
        while size <= _BATCH:
            contents = self.read(group, [0] * size)
            self.write(group, [-1] * size, contents)
            size *= 2

    def write(self, group: int, pages: Sequence[int], contents: Sequence[PageArrays]) -> None:
        """Copy contents from the host into pages."""
        for batch, new in zip(_batches(pages), _batches(contents), strict=True):
            formats, bodies = self._bodies_of(group)
            targets = _padded(batch)
            zeros = [np.zeros_like(x) for x in new[0]]
            rows = [*new, *[zeros] * (len(targets) - len(batch))]
            leaves = [np.stack(x) for x in zip(*rows, strict=True)]
            tree = jax.tree.unflatten(jax.tree.structure(bodies), leaves)
            written = _write(bodies, targets, tree, formats)
            for layer, body in zip(self.groups[group].layers, written, strict=True):
                self.bodies[layer] = body

    def _bodies_of(self, group: int) -> tuple[Formats, list[Body | None]]:
        layers = self.groups[group].layers
        return tuple(self._formats[n] for n in layers), [self.bodies[n] for n in layers]


_BATCH = 16
"""The number of pages that are copied together. The device needs a temporary buffer of this
size."""


def _batches(items: Sequence[_T]) -> list[Sequence[_T]]:
    return [items[n : n + _BATCH] for n in range(0, len(items), _BATCH)]


def _padded(pages: Sequence[int]) -> np.ndarray:
    """Pad with -1 to a power of two, so that few programs are compiled."""
    padded = np.full(1 << max(len(pages) - 1, 0).bit_length(), -1, np.int32)
    padded[: len(pages)] = pages
    return padded


@functools.partial(jax.jit, static_argnames="formats")
def _read(bodies: PyTree, pages: Array, *, formats: Formats) -> list[PyTree]:
    return [
        gather_pages(body, orders, placement, pages)
        for body, (orders, placement) in zip(bodies, formats, strict=True)
    ]


@functools.partial(jax.jit, static_argnames="formats", donate_argnames="bodies")
def _write(bodies: PyTree, pages: Array, contents: PyTree, formats: Formats) -> list[PyTree]:
    return [
        scatter_pages(body, orders, placement, pages, new)
        for body, new, (orders, placement) in zip(bodies, contents, formats, strict=True)
    ]
