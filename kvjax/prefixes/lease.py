"""A request's use of a tree: what it finds, what it is lent, and what it leaves."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from kvjax.cache.checks import REWOUND_TOO_FAR
from kvjax.cache.state import KVCache
from kvjax.core.transfer import fetch
from kvjax.operations.rows import rewind, rewindable
from kvjax.policies.model_config import positions_needed
from kvjax.prefixes.checkpoints import State, Taken, put_back, taken
from kvjax.prefixes.found import found_of
from kvjax.prefixes.nodes import Key
from kvjax.prefixes.texts import Texts
from kvjax.prefixes.tiers import Away, without_the_gone


class Lease:
    """The pages of a tree's texts, in the cache of a request, until ``settle``.

    ``key``: among whose texts prompts are looked for. ``new``: tokens that may be added to each;
    ``samples``: continuations of each. ``hits``: int[batch], tokens of its prompts that the cache
    to ``take`` has already.

    Raises:
      ValueError: if there are too few pages for the request, whatever else leaves.
    """

    def __init__(
        self, texts: Texts, key: Key, prompts: Sequence[list[int]], new: int, samples: int
    ) -> None:
        self._texts, self._terms, self._key, self._samples = texts, texts.terms, key, samples
        self._flying: list[tuple[Taken, int]] = []
        self._landed: list[tuple[int, State]] = []
        self.settled = False
        self._rows, away, states = without_the_gone(lambda: found_of(texts, key, prompts))
        self.hits = np.array([row.hit for row in self._rows], np.int32)
        for row in self._rows:
            for node in row.path:
                node.locked += 1
        least = self._least(new, away)
        with self._all_or_nothing():
            if enough := self._make_room(least):
                texts.tiers.come_back(away)
                texts.tiers.keep_limits()
                begun = put_back(self._terms.shapes(len(self._rows)), self._terms.kinds, states)
                self._cache: KVCache | None = self._with_pages(begun)
        if not enough:
            self._unlock()
            raise ValueError(
                f"the request may need {max(least)} pages more than it finds, and the prefix "
                f"tree's pool has {len(texts.pool.counts[0].refs)} in all: give it more pages, or "
                "ask for less"
            )

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
            self._flying.append((found, self._samples))
            for n, row in zip(tokens, self._rows, strict=True):
                row.stops.discard(int(n))  # a row that has ended stands there still
        return cache

    def settle(self, cache: KVCache | None, texts: Sequence[Sequence[int]] | None) -> None:
        """Give the pages back; what is worth it stays in the tree.

        Args:
          cache: of the request, as it ended; None where it was lost.
          texts: the tokens of each of its rows, as far as they are known; None to keep nothing.
        """
        with self._texts.lock:
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
            cache = self._back_to_a_page(cache, texts)
        pool.take_up(cache.layers)
        length, status, pools = fetch((cache.length, cache.status, cache.pools))
        whole = status & ~REWOUND_TOO_FAR == 0
        for counts, each in zip(pool.counts, pools, strict=True):
            counts.take_back(each)
        self._land()
        for row, state in self._landed:
            if texts is not None and whole[row] and len(texts[row]) >= state.tokens:
                self._texts.keep_state(self._key, texts[row][: state.tokens], state)
            self._give_back(state.tables)
        for row, text in enumerate(texts or ()):
            held = int(length[row]) if whole[row] else 0
            if terms.exact_prefix:
                prompt = self._rows[row // self._samples].tokens
                held = min(held, len(prompt) // terms.prefill_chunk * terms.prefill_chunk)
            self._texts.keep_pages(self._key, text[:held], [each.table[row] for each in pools])
        self._give_back([each.table for each in pools])
        self._unlock()
        self._texts.tiers.keep_limits()

    def _least(self, new: int, away: Sequence[Away]) -> list[int]:
        """Pages of each kind that the request can't do without, beside what it finds there."""
        found = []
        for number, kind in enumerate(self._terms.kinds):
            count = sum(each.kind == number for each in away)
            for row in self._rows:
                full = len(kind.needed(row.hit)[0])
                most = kind.most(positions_needed(len(row.tokens), new))
                # Samples have the full pages of their prompt in common.
                whole = 0 if kind.moves else len(kind.needed(len(row.tokens))[0])
                count += max(whole - full, 0) + self._samples * (most - whole)
            found.append(count)
        return found

    def _make_room(self, least: list[int]) -> bool:
        """Have enough free pages, and choose where states are to be taken; whether there are."""
        terms, texts = self._terms, self._texts
        for row in self._rows:
            row.stops = terms.stops(row.hit, row.known, len(row.tokens))
        states = sum(len(row.stops) for row in self._rows)
        each = [kind.page_group.layout.columns if kind.moves else 0 for kind in terms.kinds]
        # A state retains what windows would give back, which is worth older texts, and no request.
        wanted = [n + states * columns for n, columns in zip(least, each, strict=True)]
        if not texts.tiers.make_room(least, wanted):
            return False
        for counts, n, columns in zip(texts.pool.counts, least, each, strict=True):
            if columns:
                spare = (len(counts.free) - n) // (columns * len(self._rows))
                for row in self._rows:
                    row.stops = {*sorted(row.stops, reverse=True)[:spare]}  # the longest save most
        return True

    def _with_pages(self, begun: tuple[KVCache, list[Any]]) -> KVCache:
        """The cache with the pool's pages, and its rows' tables."""
        (cache, parts), pool, rows = begun, self._texts.pool, self._rows
        pools: Any = []
        for number, kind in enumerate(self._terms.kinds):
            counts, fresh = pool.counts[number], []
            table = np.full((len(rows), kind.page_group.layout.columns), -1, np.int32)
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

    def _back_to_a_page(self, cache: KVCache, texts: Sequence[Sequence[int]]) -> KVCache:
        """Rows taken back to where pages of known tokens are whole, as far as they can be, and
        their states."""
        unit = self._terms.unit
        length, can = fetch((cache.length, rewindable(cache)))
        whole = np.minimum(length, list(map(len, texts))) // unit * unit
        which = (length - whole <= can) & (whole > 0)
        if which.any():
            cache = rewind(cache, np.where(which, length - whole, 0).astype(np.int32))
            at = np.where(which, whole, length).astype(np.int32)
            cache, found = taken(cache, self._terms.kinds, which, at)
            self._flying.append((found, 1))
        return cache

    def _land(self) -> None:
        for found, samples in self._flying:
            self._landed += [(row * samples, state) for row, state in found.fetched()]
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
