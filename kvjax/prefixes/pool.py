"""The pages of a tree between requests: which are free, and what stands in them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.cache.layer import Body, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.paging.allocator import PageAllocator
from kvjax.placement.pages import pages_at, with_pages_at
from kvjax.prefixes.kinds import Kind


class Counts:
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

    def lent(self, table: np.ndarray) -> PageAllocator:
        """The allocator of rows that begin with a table's pages, which they are counted for
        already."""
        stack = np.zeros(len(self.refs), np.int32)
        stack[: len(self.free)] = self.free
        left = np.array([len(self.free)], np.int32)
        return PageAllocator(table, self.refs.copy(), stack, left)  # type: ignore[arg-type]

    def take_back(self, pool: Any) -> None:
        """What such rows left, as NumPy's arrays."""
        self.refs = np.array(pool.refs)
        self.free = np.asarray(pool.stack)[: int(pool.left[0])].tolist()


class Pool:
    """Arrays of pages, a kind of layers after the other, and their counts.

    ``layers``: of the cache, with its first arrays or their shapes; those of its rows are let go.
    """

    def __init__(self, kinds: Sequence[Kind], layers: Sequence[LayerCache]) -> None:
        self.kinds = kinds
        self._forms = [(held.orders, held.policy.placement) for held in layers]
        self.bodies: list[Body | None] = [None] * len(layers)
        self.counts = [Counts(kind.page_group.layout.pool or 0) for kind in kinds]
        self.take_up(layers)

    def take_up(self, layers: Sequence[LayerCache]) -> None:
        """Have the pages of some layers."""
        for kind in self.kinds:
            for entry in kind.entries:
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

    def contents(self, kind: int, pages: Sequence[int]) -> list[list[np.ndarray]]:
        """What stands in some pages: of each, arrays [...] of all layers, on the host."""
        return self.reading(kind, pages)()

    def reading(self, kind: int, pages: Sequence[int]) -> Callable[[], list[list[np.ndarray]]]:
        """``contents``, when they are asked for: on their way from now on, whatever happens to the
        pages."""
        forms, bodies = self._of(kind)
        coming = []
        for some in _pieces(pages):
            leaves = jax.tree.leaves(_read(bodies, _padded(some), forms=forms))
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

    def warm(self, kind: int) -> None:
        """Compile what reads and fills pages of a kind, whatever their number."""
        size = 1
        while size <= _PIECE:
            contents = self.contents(kind, [0] * size)
            self.fill(kind, [-1] * size, contents)
            size *= 2

    def fill(
        self, kind: int, pages: Sequence[int], contents: Sequence[Sequence[np.ndarray]]
    ) -> None:
        """Write into pages what ``contents`` gave."""
        for some, new in zip(_pieces(pages), _pieces(contents), strict=True):
            forms, bodies = self._of(kind)
            into = _padded(some)
            empty = [np.zeros_like(x) for x in new[0]]
            every = [*new, *[empty] * (len(into) - len(some))]
            leaves = [np.stack(x) for x in zip(*every, strict=True)]
            tree = jax.tree.unflatten(jax.tree.structure(bodies), leaves)
            found = _write(bodies, into, tree, forms)
            for entry, body in zip(self.kinds[kind].entries, found, strict=True):
                self.bodies[entry] = body

    def _of(self, kind: int) -> tuple[Any, Any]:
        entries = self.kinds[kind].entries
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


@functools.partial(jax.jit, static_argnames="forms")
def _read(bodies: Any, pages: Array, *, forms: Any) -> Any:
    return [
        pages_at(body, orders, placement, pages)
        for body, (orders, placement) in zip(bodies, forms, strict=True)
    ]


@functools.partial(jax.jit, static_argnames="forms", donate_argnames="bodies")
def _write(bodies: Any, pages: Array, contents: Any, forms: Any) -> Any:
    return [
        with_pages_at(body, orders, placement, pages, new)
        for body, new, (orders, placement) in zip(bodies, contents, forms, strict=True)
    ]
