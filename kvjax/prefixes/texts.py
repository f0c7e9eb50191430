"""The texts that a tree keeps: where their numbers are, and which can be gone on from."""

import threading
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache.creation import as_memory_error, new_layer
from kvjax.prefixes.checkpoints import State
from kvjax.prefixes.nodes import DEVICE, TIERS, Kept, Key, Node, Nodes
from kvjax.prefixes.pool import Pool
from kvjax.prefixes.terms import Terms
from kvjax.prefixes.tiers import Tiers


class Texts:
    """``nodes``, by the texts' tokens; ``pool``, of their pages on the device; ``tiers``, of what
    is elsewhere.

    ``limits``: bytes of the host and of the disk, and the folder of files there, or None; ``lock``:
    held while a thread reads or changes them. The pool has no arrays until ``clear`` makes them, or
    an engine's rows bring theirs.
    """

    def __init__(self, terms: Terms, limits: tuple[int, int, str | Path | None]) -> None:
        self.terms, self.limits = terms, limits
        # A stream that is let go ends wherever garbage is found: perhaps in what has the lock.
        self.lock = threading.RLock()
        self._forget()

    def clear(self) -> None:
        """Forget them all, in a pool of its own.

        Raises:
          CacheMemoryError: if the device has no memory for the pool.
        """
        self._forget()  # first: the old pool and the new one may not fit together
        with as_memory_error(
            lambda: (
                "there is no memory for the pool's pages; give fewer (pages, memory), fewer tokens "
                "(max_seq_len, max_len), fewer rows, or a policy that takes less"
            )
        ):
            for number, held in enumerate(self.terms.shapes(1).layers):
                if held.policy.page_group is not None:
                    new = new_layer(held.policy, 1, held.kv_heads, held.head_dim, held.window)
                    self.pool.bodies[number] = new.keys, new.values

    def _forget(self) -> None:
        terms = self.terms
        self.pool = Pool(terms.kinds, terms.shapes(1).layers)
        self.nodes = Nodes(terms.unit, [terms.unit // kind.page for kind in terms.kinds])
        self.tiers = Tiers(self.nodes, self.pool, *self.limits)

    def page(self, path: Sequence[Node], kind: int, page: int) -> Kept:
        """A page of a text that is known to be there."""
        found = self._page(path, kind, page)
        assert found is not None
        return found

    def contents(self, path: Sequence[Node], kind: int, page: int) -> list[np.ndarray]:
        """What stands in a page of a text that is not on the device."""
        return self.tiers.read(path[page // self.nodes.shape[kind]], self.page(path, kind, page))

    def can_go_on(self, path: Sequence[Node], units: int) -> bool:
        """Whether a text can go on behind so many of the units along a path."""
        terms = self.terms
        tokens = units * terms.unit
        if tokens % terms.grid or (terms.stateful and path[units - 1].state is None):
            return False
        return all(
            self._page(path, number, page) is not None
            for number, kind in enumerate(terms.kinds)
            for page in kind.needed(tokens)[0]
        )

    def state(self, path: Sequence[Node]) -> Any:
        """What rows have beside pages at the end of a path, None where there is nothing."""
        kept = path[-1].state if path else None
        return None if kept is None else self.tiers.read(path[-1], kept)

    def keep_state(self, key: Key, text: Sequence[int], state: State) -> None:
        """Keep what a row had beside full pages at the end of a text, and the pages of windows."""
        path = self.nodes.made(key, text)
        self.nodes.touch(path)
        if path[-1].state is None:
            path[-1].state = Kept(self.terms.state_bytes)
            self.tiers.rest(path[-1].state, state.arrays)
        for number, (kind, table) in enumerate(zip(self.terms.kinds, state.tables, strict=True)):
            if table is not None:
                for page in kind.needed(len(text))[0]:
                    self._keep(path, number, page, int(table[kind.column(page)]))

    def keep_pages(self, key: Key, text: Sequence[int], tables: Sequence[np.ndarray]) -> None:
        """Keep the full pages of a row's text that no window leaves, by its tables."""
        path = self.nodes.made(key, text)
        self.nodes.touch(path)
        for number, (kind, table) in enumerate(zip(self.terms.kinds, tables, strict=True)):
            for page in () if kind.moves else kind.needed(len(path) * self.terms.unit)[0]:
                self._keep(path, number, page, int(table[kind.column(page)]))
        if path:
            self.nodes.prune(path[-1])

    def forget_weights(self, weights: Hashable) -> None:
        """Let the texts of such weights go."""
        for key in [key for key in self.nodes.roots if key.weights == weights]:
            self.tiers.remove(self.nodes.roots.pop(key))

    def count(self) -> tuple[int, dict[str, int], list[int]]:
        """Ends of texts, bytes by tier, and pages of each pool that are kept."""
        ends, taken, cached = 0, dict.fromkeys(map(str, TIERS), 0), [0] * len(self.terms.kinds)
        for node in self.nodes:
            ends += node.parent is not None and not node.children
            for tier in TIERS:
                taken[tier] += sum(kept.nbytes for kept in node.kept(tier))
            for kind, pages in enumerate(node.pages):
                cached[kind] += sum(page is not None and page.tier == DEVICE for page in pages)
        return ends, taken, cached

    def _keep(self, path: Sequence[Node], kind: int, page: int, number: int) -> None:
        each = self.nodes.shape[kind]
        pages = path[page // each].pages[kind]
        if pages[page % each] is None and number >= 0:
            pages[page % each] = Kept(self.terms.kinds[kind].page_bytes, number)
            self.pool.counts[kind].hold(number)

    def _page(self, path: Sequence[Node], kind: int, page: int) -> Kept | None:
        each = self.nodes.shape[kind]
        return path[page // each].pages[kind][page % each]
