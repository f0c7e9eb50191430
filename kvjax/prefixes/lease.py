"""A request's use of a tree: what it finds, what it is lent, and what it leaves."""

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.device import fetch
from kvjax.operations.rewinding import rewind, rewindable
from kvjax.prefixes.checkpoints import Taken, put_back, taken
from kvjax.prefixes.nodes import Kept, Node
from kvjax.prefixes.texts import Texts


@dataclass
class _Row:
    """A prompt: the nodes of what was found, which can be gone on from, its tokens, those that
    other texts begin with too, and where its state is to be taken."""

    tokens: list[int]
    path: list[Node]
    hit: int
    known: int
    stops: set[int] = field(default_factory=set)


class Lease:
    """The pages of a tree's texts, in the cache of a request, until ``settle``.

    ``key``: among whose texts prompts are looked for. ``new``: tokens that may be added to each;
    ``samples``: continuations of each. ``hits``: int[batch], tokens of its prompts that the cache
    to ``take`` has already.

    Raises:
      ValueError: if there are too few pages for the request, whatever else leaves.
    """

    def __init__(
        self, texts: Texts, key: Hashable, prompts: Sequence[list[int]], new: int, samples: int
    ) -> None:
        self._texts, self._terms, self._key, self._samples = texts, texts.terms, key, samples
        self._flying: list[Taken] = []
        self._landed: list[Taken] = []
        self.settled = False
        self._rows = [self._found(tokens) for tokens in prompts]
        if self._terms.exact_prefix:
            self._begin_together()
        self.hits = np.array([row.hit for row in self._rows], np.int32)
        for row in self._rows:
            for node in row.path:
                node.locked += 1
        try:
            self._make_room(new)
        except ValueError:
            self._unlock()
            raise
        with self._all_or_nothing():
            self._cache: KVCache | None = self._with_pages(self._with_states())

    def take(self) -> KVCache:
        """The cache, once: it is used up by whoever goes on with it."""
        cache, self._cache = self._cache, None
        assert cache is not None
        return cache

    def reached(self, cache: KVCache, tokens: np.ndarray) -> KVCache:
        """The cache after a chunk of the prompts, when rows hold so many tokens, int[batch]: where
        it is time, their state is taken."""
        which = np.array([int(n) in row.stops for n, row in zip(tokens, self._rows, strict=True)])
        self._land()  # what was taken a chunk before has come by now
        if which.any():
            cache, found = taken(cache, self._terms.kinds, which, tokens)
            self._flying.append(found)
        return cache

    def settle(self, cache: KVCache | None, texts: Sequence[Sequence[int]] | None) -> None:
        """Give the pages back; what is worth it stays in the tree.

        Args:
          cache: of the request, as it ended; None where it was lost.
          texts: the tokens that each of its rows holds, at least; None to keep nothing.
        """
        self.settled = True
        with self._all_or_nothing():
            if cache is None or any(x.is_deleted() for x in jax.tree.leaves(cache)):
                self._texts.clear()
            else:
                self._settle(cache, texts)
        self._unlock()

    def _settle(self, cache: KVCache, texts: Sequence[Sequence[int]] | None) -> None:
        pool, terms = self._texts.pool, self._terms
        if texts is not None and not terms.exact_prefix and terms.stateful:
            cache = self._back_to_a_page(cache)
        pool.take_up(cache.layers)
        length, pools = fetch((cache.length, cache.pools))
        for counts, each in zip(pool.counts, pools, strict=True):
            counts.take_back(each)
        self._land()
        for found in self._landed:
            for row in np.flatnonzero(found.which).tolist():
                tables = [None if x is None else x[row] for x in found.tables]
                if texts is not None:
                    text = texts[row * (len(texts) // len(found.which))]
                    text = text[: int(found.tokens[row])]
                    self._texts.keep_state(self._key, text, found.of_row(row), tables)
                self._give_back(tables)
        for row, text in enumerate(texts or ()):
            held = int(length[row])
            if terms.exact_prefix:
                prompt = self._rows[row // self._samples].tokens
                held = min(held, len(prompt) // terms.prefill_chunk * terms.prefill_chunk)
            self._texts.keep_pages(self._key, text[:held], [each.table[row] for each in pools])
        self._give_back([each.table for each in pools])
        self._texts.tiers.keep_limits()

    def _found(self, tokens: list[int]) -> _Row:
        """What there is of a prompt; a token at least is left, whose logits are asked for."""
        texts, unit = self._texts, self._terms.unit
        path = texts.nodes.walk(self._key, tokens[: len(tokens) - 1])
        texts.nodes.touch(path)
        hit = next((n for n in range(len(path), 0, -1) if texts.can_go_on(path, n)), 0)
        return _Row(tokens, path[:hit], hit * unit, len(path) * unit)

    def _begin_together(self) -> None:
        """Let all rows begin at the same position: then their calls are those of the request
        without a tree, as far as they are made."""
        texts, unit, rows = self._texts, self._terms.unit, self._rows
        common = min(row.hit for row in rows) // unit
        while common and not all(texts.can_go_on(row.path, common) for row in rows):
            common -= 1
        for row in rows:
            row.path, row.hit = row.path[:common], common * unit

    def _make_room(self, new: int) -> None:
        """Have what was found on the device, and enough free pages for the rest.

        Raises:
          ValueError: if there are too few.
        """
        texts, terms, samples = self._texts, self._terms, self._samples
        away: dict[int, tuple[int, Kept]] = {}
        least = []
        for number, kind in enumerate(terms.kinds):
            count = 0
            for row in self._rows:
                full, _ = kind.needed(row.hit)
                pages = [texts.page(row.path, number, page) for page in full]
                away |= {id(page): (number, page) for page in pages if page.number < 0}
                most = kind.most(len(row.tokens) + new)
                # Samples have the full pages of their prompt in common.
                whole = 0 if kind.moves else len(kind.needed(len(row.tokens))[0])
                count += max(whole - len(full), 0) + samples * (most - whole)
            least.append(count + sum(of == number for of, _ in away.values()))
        if not texts.tiers.make_room(least):
            pages = len(texts.pool.counts[0].refs)
            raise ValueError(
                f"the request may need {max(least)} pages more than it finds, and the prefix "
                f"tree's pool has {pages} in all: give it more pages, or ask for less"
            )
        for row in self._rows:
            row.stops = terms.stops(row.hit, row.known, len(row.tokens))
        states = sum(len(row.stops) for row in self._rows)
        each = [kind.paging.layout.columns if kind.moves else 0 for kind in terms.kinds]
        # What windows would give back is worth older texts, and no request.
        texts.tiers.make_room([n + states * more for n, more in zip(least, each, strict=True)])
        for counts, n, columns in zip(texts.pool.counts, least, each, strict=True):
            spare = (len(counts.free) - n) // (columns * len(self._rows)) if columns else states
            for row in self._rows:
                row.stops = {*sorted(row.stops, reverse=True)[:spare]}  # the longest saves most
        texts.tiers.come_back(list(away.values()))

    def _with_states(self) -> tuple[KVCache, list[Any]]:
        """A cache of the request's rows, with what they have beside full pages."""
        states = [self._texts.state(row.path) for row in self._rows]
        shapes = self._terms.shapes(len(self._rows))
        return put_back(shapes, self._terms.kinds, states)

    def _with_pages(self, begun: tuple[KVCache, list[Any]]) -> KVCache:
        """The cache with the pool's pages, and its rows' tables."""
        (cache, parts), pool, rows = begun, self._texts.pool, self._rows
        pools: Any = []
        for number, kind in enumerate(self._terms.kinds):
            counts, fresh = pool.counts[number], []
            table = np.full((len(rows), kind.paging.layout.columns), -1, np.int32)
            for at, row in enumerate(rows):
                full, part = kind.needed(row.hit)
                for page in full:
                    found = self._texts.page(row.path, number, page).number
                    counts.hold(found)
                    table[at, kind.column(page)] = found
                if part is not None:
                    found = table[at, kind.column(part)] = counts.take()
                    fresh.append((found, parts[number][at]))
            pool.fill(number, [page for page, _ in fresh], [content for _, content in fresh])
            pools.append(counts.lent(table))
        layers = [
            held if body is None else replace(held, keys=body[0], values=body[1])
            for held, body in zip(cache.layers, pool.bodies, strict=True)
        ]
        put = layers[0].policy.placement.put
        length, status, pools = put((self.hits, np.zeros_like(self.hits), tuple(pools)))
        written = cache.written
        if not self._terms.stateful:
            written = put(np.repeat(self.hits[:, None], len(layers), axis=1))
        return replace(
            cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
        )

    def _give_back(self, tables: Sequence[np.ndarray | None]) -> None:
        for counts, table in zip(self._texts.pool.counts, tables, strict=True):
            for page in [] if table is None else table[table >= 0].tolist():
                counts.release(page)

    def _back_to_a_page(self, cache: KVCache) -> KVCache:
        """Rows taken back to where pages are whole, as far as they can be, and their states."""
        unit = self._terms.unit
        length, can = fetch((cache.length, rewindable(cache)))
        whole = length // unit * unit
        which = (length - whole <= can) & (whole > 0)
        if which.any():
            cache = rewind(cache, np.where(which, length - whole, 0).astype(np.int32))
            at = np.where(which, whole, length).astype(np.int32)
            cache, found = taken(cache, self._terms.kinds, which, at)
            self._flying.append(found)
        return cache

    def _land(self) -> None:
        self._landed += [found.fetched() for found in self._flying]
        self._flying = []

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What is stopped in the middle leaves an empty tree, and no page with two owners."""
        try:
            yield
        except BaseException:
            self._texts.clear()
            self._unlock()
            raise

    def _unlock(self) -> None:
        for row in self._rows:
            for node in row.path:
                node.locked -= 1
            row.path = []
