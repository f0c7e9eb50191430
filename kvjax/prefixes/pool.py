"""The pages of a tree between requests: which are free, and what stands in them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from kvjax.cache.layer import Body, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.paging.allocator import PageAllocator, PageGroup
from kvjax.placement.pages import pages_at, with_pages_at


@dataclass(frozen=True)
class CacheGroup:
    """Layers that go by the same tables: ``entries`` of ``KVCache.layers``, and what ``page_bytes``
    a page of all of them takes. Positions and pages are counted through a text, by whole numbers.
    """

    page_group: PageGroup
    layers: tuple[int, ...] = ()
    page_bytes: int = 0

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        split = self.page_group.split
        return self.page_group.layout.page_size * (1 if split is None else split.block)

    @property
    def windowed(self) -> bool:
        """Whether a window leaves pages behind."""
        return not self.page_group.layout.straight

    def pages_for(self, tokens: int) -> tuple[tuple[int, ...], int | None]:
        """The full pages that a text of so many tokens has, and that which is not full, or None."""
        return _needed(self.page_group, tokens)

    def column(self, page: int) -> int:
        """Where a row's table has a page."""
        return _column(self.page_group, page)

    def max_pages(self, tokens: int) -> int:
        """Pages that a row has at once, at most, on its way to so many tokens."""
        layout = self.page_group.layout
        return min(-(-tokens // self.page_tokens), layout.columns)


@functools.lru_cache(maxsize=65536)
def _needed(page_group: PageGroup, tokens: int) -> tuple[tuple[int, ...], int | None]:
    layout, units = page_group.layout, int(page_group.units(tokens))
    first, full = int(layout.gone_before(units)), units // layout.page_size
    pages = (q for q in range(full) if q >= first or q < layout.sink_pages)
    return tuple(pages), full if units % layout.page_size else None


@functools.lru_cache(maxsize=65536)
def _column(page_group: PageGroup, page: int) -> int:
    return int(page_group.layout.column_of(page))


class HostAllocator:
    """Who has which pages of a pool, as ``PageAllocator`` counts them, on the host."""

    def __init__(self, pages: int) -> None:
        self.refs = np.zeros(pages, np.int32)
        self.free = list(range(pages - 1, -1, -1))

    def take(self) -> int:
        """A free page, which the caller has."""
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def hold(self, page: int) -> None:
        """One more has a page."""
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """One fewer has it; free, if nobody else does."""
        assert self.refs[page] > 0
        self.refs[page] -= 1
        if not self.refs[page]:
            self.free.append(page)

    def to_device(self, table: np.ndarray) -> PageAllocator:
        """The allocator of rows that begin with a table's pages, which they are counted for
        already."""
        stack = np.zeros(len(self.refs), np.int32)
        stack[: len(self.free)] = self.free
        left = np.array([len(self.free)], np.int32)
        return PageAllocator(table, self.refs.copy(), stack, left)  # type: ignore[arg-type]

    def update_from(self, pool: Any) -> None:
        """What such rows left, as NumPy's arrays."""
        self.refs = np.array(pool.refs)
        self.free = np.asarray(pool.stack)[: int(pool.left[0])].tolist()


class PagePool:
    """Arrays of pages, a kind of layers after the other, and their counts.

    ``layers``: of the cache, with its first arrays or their shapes; those of its rows are let go.
    """

    def __init__(self, groups: Sequence[CacheGroup], layers: Sequence[LayerCache]) -> None:
        self.groups = groups
        self._forms = [(held.orders, held.policy.placement) for held in layers]
        self.bodies: list[Body | None] = [None] * len(layers)
        self.allocators = [HostAllocator(group.page_group.layout.pool or 0) for group in groups]
        self.adopt(layers)

    def adopt(self, layers: Sequence[LayerCache]) -> None:
        """Have the pages of some layers."""
        for group in self.groups:
            for entry in group.layers:
                self.bodies[entry] = layers[entry].keys, layers[entry].values

    @property
    def lost(self) -> bool:
        """Whether there are no arrays, or they were given away and did not come back."""
        leaves = jax.tree.leaves(self.bodies)
        return any(not isinstance(x, jax.Array) or x.is_deleted() for x in leaves)

    @property
    def nbytes(self) -> int:
        """Of all pages, used or not."""
        return tree_bytes(self.bodies)

    def read(self, group: int, pages: Sequence[int]) -> list[list[np.ndarray]]:
        """What stands in some pages: of each, arrays [...] of all layers, on the host."""
        return self.start_read(group, pages)()

    def start_read(self, group: int, pages: Sequence[int]) -> Callable[[], list[list[np.ndarray]]]:
        """``contents``, when they are asked for: on their way from now on, whatever happens to the
        pages."""
        specs, bodies = self._of(group)
        coming = []
        for some in _pieces(pages):
            leaves = jax.tree.leaves(_read(bodies, _padded(some), specs=specs))
            for x in leaves:
                x.copy_to_host_async()
            coming.append((len(some), leaves))

        def landed() -> list[list[np.ndarray]]:
            found = []
            for count, leaves in coming:
                arrays = fetch(leaves)
                found += [[np.array(x[n]) for x in arrays] for n in range(count)]
            return found

        return landed

    def warm_up(self, group: int) -> None:
        """Compile what reads and fills pages of a kind, whatever their number."""
        size = 1
        while size <= _PIECE:
            contents = self.read(group, [0] * size)
            self.write(group, [-1] * size, contents)
            size *= 2

    def fill(
        self, group: int, pages: Sequence[int], contents: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Write into pages what ``contents`` gave."""
        for some, new in zip(_pieces(pages), _pieces(contents), strict=True):
            specs, bodies = self._of(group)
            into = _padded(some)
            empty = [np.zeros_like(x) for x in new[0]]
            every = [*new, *[empty] * (len(into) - len(some))]
            leaves = [np.stack(x) for x in zip(*every, strict=True)]
            tree = jax.tree.unflatten(jax.tree.structure(bodies), leaves)
            found = _write(bodies, into, tree, specs)
            for entry, body in zip(self.groups[group].layers, found, strict=True):
                self.bodies[entry] = body

    def _of(self, group: int) -> tuple[Any, Any]:
        entries = self.groups[group].layers
        return tuple(self._forms[n] for n in entries), [self.bodies[n] for n in entries]


_PIECE = 16
"""Pages that are moved at once: so much more memory than the pool's the device needs for it."""


def _pieces(some: Sequence[Any]) -> list[Sequence[Any]]:
    return [some[n : n + _PIECE] for n in range(0, len(some), _PIECE)]


def _padded(pages: Sequence[int]) -> np.ndarray:
    """Pages, and -1 up to a power of two, so that few programs are ever compiled."""
    found = np.full(1 << max(len(pages) - 1, 0).bit_length(), -1, np.int32)
    found[: len(pages)] = pages
    return found


@functools.partial(jax.jit, static_argnames="specs")
def _read(bodies: Any, pages: Array, *, specs: Any) -> Any:
    return [
        pages_at(body, orders, placement, pages)
        for body, (orders, placement) in zip(bodies, specs, strict=True)
    ]


@functools.partial(jax.jit, static_argnames="specs", donate_argnames="bodies")
def _write(bodies: Any, pages: Array, contents: Any, specs: Any) -> Any:
    return [
        with_pages_at(body, orders, placement, pages, new)
        for body, new, (orders, placement) in zip(bodies, contents, specs, strict=True)
    ]
