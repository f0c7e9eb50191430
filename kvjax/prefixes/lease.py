"""A request's use of a tree: what it finds, what it is lent, and what it leaves."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.device import fetch
from kvjax.operations.rewinding import rewind, rewindable
from kvjax.prefixes.checkpoints import Taken, put_back, taken
from kvjax.prefixes.nodes import Kept, Node

if TYPE_CHECKING:
    from kvjax.prefixes.tree import PrefixTree


@dataclass
class _Row:
    """A prompt: what of it was found, as far as it can be gone on from and as far as other texts
    begin so, and where its state is to be taken."""

    tokens: list[int]
    path: list[Node]
    hit: int
    known: int
    stops: set[int] = field(default_factory=set)


class Lease:
    """The pages of a tree, in the cache of a request, until ``settle``.

    ``hits``: int[batch], tokens of its prompts that the cache to ``take`` has already.

    Raises:
      ValueError: if there are too few pages for the request, whatever else leaves.
    """

    def __init__(
        self,
        tree: "PrefixTree",
        key: Hashable,
        prompts: Sequence[list[int]],
        new: int,
        samples: int,
    ) -> None:
        self._tree, self._key, self._chunk = tree, key, tree.prefill_chunk
        self._rows = [self._found(tokens) for tokens in prompts]
        self._samples = samples
        self._flying: list[Taken] = []
        self._landed: list[Taken] = []
        if tree.exact_prefix:
            self._to_common()
        for row in self._rows:
            for node in row.path:
                node.locked += 1
        try:
            self._allocate(new)
        except ValueError:
            self._unlock()
            raise
        self.hits = np.array([row.hit for row in self._rows], np.int32)

    def take(self) -> KVCache:
        """The cache, once: it is used up by whoever goes on with it."""
        cache, self._cache_lent = self._cache_lent, None
        assert cache is not None
        return cache

    def reached(self, cache: KVCache, tokens: np.ndarray) -> KVCache:
        """The cache after a chunk of the prompts, when rows hold so many tokens: where it is time,
        their state is taken."""
        which = np.array([int(n) in row.stops for n, row in zip(tokens, self._rows, strict=True)])
        # What was taken before has come by now.
        self._land()
        if which.any():
            cache, found = taken(cache, self._tree.kinds, which, tokens)
            self._flying.append(found)
        return cache

    def settle(self, cache: KVCache | None, texts: Sequence[Sequence[int]] | None) -> None:
        """Give the pages back; what is worth it stays in the tree.

        Args:
          cache: of the request, as it ended; None where it was lost.
          texts: the tokens that each of its rows holds, at least; None to keep nothing.
        """
        tree = self._tree
        try:
            if cache is None or any(x.is_deleted() for x in jax.tree.leaves(cache)):
                tree.clear()
                return
            if texts is not None and not tree.exact_prefix and tree.stateful:
                cache = self._back_to_a_page(cache)
            tree.pool.take_up(cache.layers)
            length, pools = fetch((cache.length, cache.pools))
            for counts, pool in zip(tree.pool.counts, pools, strict=True):
                counts.take_back(pool)
            self._land()
            for found in self._landed:
                for row in np.flatnonzero(found.which).tolist():
                    if texts is not None:
                        text = texts[row * (len(texts) // len(found.which))]
                        self._keep_state(text[: int(found.tokens[row])], found, row)
                    self._give_back([None if x is None else x[row] for x in found.tables])
            for row, text in enumerate(texts or ()):
                held = int(length[row])
                if tree.exact_prefix:
                    prompt = self._rows[row // self._samples].tokens
                    held = min(held, len(prompt) // self._chunk * self._chunk)
                self._keep_pages(text[:held], [pool.table[row] for pool in pools])
            self._give_back([pool.table for pool in pools])
            tree.tiers.keep_limits()
        finally:
            self._unlock()
            tree.returned()

    def _land(self) -> None:
        self._landed += [found.fetched() for found in self._flying]
        self._flying = []

    def _found(self, tokens: list[int]) -> _Row:
        """What a tree has of a prompt; a token at least is left, whose logits are asked for."""
        tree = self._tree
        path = tree.nodes.walk(self._key, tokens[: len(tokens) - 1])
        units = range(len(path), 0, -1)
        hit = next((n for n in units if tree.can_go_on(path, n)), 0) * tree.unit
        return _Row(tokens, path[: hit // tree.unit], hit, len(path) * tree.unit)

    def _to_common(self) -> None:
        """Let all rows begin at the same position: then their calls are those of the request
        without a tree, as far as they are made."""
        tree = self._tree
        common = min(row.hit for row in self._rows)
        while common and not all(
            tree.can_go_on(row.path, common // tree.unit) for row in self._rows
        ):
            common -= tree.unit
        for row in self._rows:
            row.path, row.hit = row.path[: common // tree.unit], common

    def _allocate(self, new: int) -> None:
        """Lend the pages of what was found, and let there be enough free ones for the rest.

        Raises:
          ValueError: if there are too few.
        """
        tree, samples = self._tree, self._samples
        coming: dict[int, tuple[int, Kept]] = {}
        wanted = []
        for number, kind in enumerate(tree.kinds):
            count = 0
            for row in self._rows:
                full, _ = kind.needed(row.hit)
                for page in full:
                    kept = tree.page(row.path, number, page)
                    coming[id(kept)] = number, kept
                most = kind.most(len(row.tokens) + new)
                # Samples have the full pages of their prompt in common.
                whole = 0 if kind.moves else len(kind.needed(len(row.tokens))[0])
                count += max(whole - len(full), 0) + samples * (most - whole)
            wanted.append(count)
        back = [page for page in coming.values() if page[1].number < 0]
        extra = [sum(kind == of for of, _ in back) for kind in range(len(tree.kinds))]
        least = [a + b for a, b in zip(wanted, extra, strict=True)]
        if not tree.tiers.make_room(least):
            pages = len(tree.pool.counts[0].refs)
            raise ValueError(
                f"the request may need {max(least)} pages more than it finds, and the prefix "
                f"tree's pool has {pages} in all: give it more pages, or ask for less"
            )
        self._choose_stops()
        states = sum(len(row.stops) for row in self._rows)
        each = [kind.paging.layout.columns if kind.moves else 0 for kind in tree.kinds]
        # What windows would give back is worth a few older texts, but no request.
        tree.tiers.make_room([n + states * columns for n, columns in zip(least, each, strict=True)])
        for counts, n, columns in zip(tree.pool.counts, least, each, strict=True):
            spare = (len(counts.free) - n) // (columns * len(self._rows)) if columns else states
            for row in self._rows:
                row.stops = {*sorted(row.stops, reverse=True)[:spare]}  # the longest saves most
        tree.tiers.come_back(back)
        self._cache_lent: KVCache | None = self._cache()

    def _choose_stops(self) -> None:
        """Where states are to be taken: at the ends of chunks where a prompt ends, where others
        leave it, and every so many pages."""
        tree, chunk = self._tree, self._chunk
        every = tree.checkpoint_every * tree.unit
        for row in self._rows if tree.stateful else ():
            ends = range(row.hit + chunk, len(row.tokens) + 1, chunk)
            whole = [n for n in ends if n % tree.unit == 0]
            row.stops = {n for n in whole if n // every > (n - chunk) // every}
            row.stops |= {*whole[-1:], *[n for n in whole if n <= row.known][-1:]}

    def _cache(self) -> KVCache:
        tree = self._tree
        tables, parts_of = [], []
        states = [tree.state(row.path) for row in self._rows]
        shapes = tree.shapes(len(self._rows))
        layers = []
        for held, body in zip(shapes.layers, tree.pool.bodies, strict=True):
            keys, values = (held.keys, held.values) if body is None else body
            layers.append(replace(held, keys=keys, values=values))
        cache, parts = put_back(replace(shapes, layers=tuple(layers)), tree.kinds, states)
        for number, kind in enumerate(tree.kinds):
            counts = tree.pool.counts[number]
            table = np.full((len(self._rows), kind.paging.layout.columns), -1, np.int32)
            fresh: list[tuple[int, list[np.ndarray]]] = []
            for at, row in enumerate(self._rows):
                full, part = kind.needed(row.hit)
                for page in full:
                    found = tree.page(row.path, number, page).number
                    counts.hold(found)
                    table[at, kind.column(page)] = found
                content = parts[number][at]
                if part is not None and content is not None:
                    page = counts.take()
                    table[at, kind.column(part)] = page
                    fresh.append((page, content))
            tree.pool.fill(number, [page for page, _ in fresh], [x for _, x in fresh])
            tables.append(table)
            parts_of.append(fresh)
        put = cache.layers[0].policy.placement.put
        rows: Any = np.array([row.hit for row in self._rows], np.int32)
        pools = tuple(c.lent(t) for c, t in zip(tree.pool.counts, tables, strict=True))
        length, status, pools = put((rows, np.zeros_like(rows), pools))
        layers = []
        for held, body in zip(cache.layers, tree.pool.bodies, strict=True):
            layers.append(held if body is None else replace(held, keys=body[0], values=body[1]))
        written = cache.written if tree.stateful else put(np.repeat(rows[:, None], len(layers), 1))
        return replace(
            cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
        )

    def _keep_state(self, text: Sequence[int], found: Taken, row: int) -> None:
        """Keep a state, and the pages that it needs of windows."""
        tree = self._tree
        path = tree.nodes.made(self._key, text)
        end = path[-1]
        tree.nodes.touch(path)
        if end.state is None:
            end.state = Kept(tree.state_bytes)
            tree.tiers.rest(end.state, found.of_row(row))
        for number, (kind, table) in enumerate(zip(tree.kinds, found.tables, strict=True)):
            if table is None:
                continue
            for page in kind.needed(len(text))[0]:
                self._keep(path, number, page, int(table[row, kind.column(page)]))

    def _keep_pages(self, text: Sequence[int], tables: Sequence[np.ndarray]) -> None:
        """Keep the full pages of a row that sees everything."""
        tree = self._tree
        path = tree.nodes.made(self._key, text)
        tree.nodes.touch(path)
        for number, (kind, table) in enumerate(zip(tree.kinds, tables, strict=True)):
            if kind.moves and tree.stateful:
                continue
            for page in kind.needed(len(path) * tree.unit)[0]:
                self._keep(path, number, page, int(table[kind.column(page)]))
        if path:
            tree.nodes.prune(path[-1])

    def _keep(self, path: Sequence[Node], kind: int, page: int, number: int) -> None:
        tree = self._tree
        each = tree.nodes.shape[kind]
        pages = path[page // each].pages[kind]
        if pages[page % each] is None and number >= 0:
            pages[page % each] = Kept(tree.kinds[kind].page_bytes, number)
            tree.pool.counts[kind].hold(number)

    def _give_back(self, tables: Sequence[np.ndarray | None]) -> None:
        for counts, table in zip(self._tree.pool.counts, tables, strict=True):
            for page in [] if table is None else table[table >= 0].tolist():
                counts.release(page)

    def _back_to_a_page(self, cache: KVCache) -> KVCache:
        """Rows taken back to where pages are whole, as far as they can be, and their states."""
        tree = self._tree
        length, can = fetch((cache.length, rewindable(cache)))
        whole = length // tree.unit * tree.unit
        which = (length - whole <= can) & (whole > 0)
        if which.any():
            cache = rewind(cache, np.where(which, length - whole, 0).astype(np.int32))
            at = np.where(which, whole, length).astype(np.int32)
            cache, found = taken(cache, tree.kinds, which, at)
            self._flying.append(found)
        return cache

    def _unlock(self) -> None:
        for row in self._rows:
            for node in row.path:
                node.locked -= 1
            row.path = []
