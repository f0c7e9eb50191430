"""A request's use of a tree: what it finds, what it is lent, and what it leaves."""

import contextlib
import gc
import threading
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
from kvjax.prefixes.checkpoints import (
    Checkpoint,
    PendingCheckpoints,
    restore_checkpoints,
    take_checkpoints,
)
from kvjax.prefixes.radix import Namespace
from kvjax.prefixes.sequences import CachedSequences, match_prompts
from kvjax.prefixes.tiers import SwappedPage, retry_lost_entries


class Lease:
    """The pages of a tree's texts, in the cache of a request, until ``settle``.

    ``key``: among whose texts prompts are looked for. ``new``: tokens that may be added to each;
    ``samples``: continuations of each. ``hits``: int[batch], tokens of its prompts that the cache
    to ``take`` has already.

    Raises:
      ValueError: if there are too few pages for the request, whatever else leaves.
    """

    def __init__(
        self,
        sequences: CachedSequences,
        key: Namespace,
        prompts: Sequence[list[int]],
        new: int,
        samples: int,
    ) -> None:
        self._sequences, self._config, self._key, self._samples = (
            sequences,
            sequences.pool_config,
            key,
            samples,
        )
        self._in_flight: list[tuple[PendingCheckpoints, int]] = []
        self._checkpoints: list[tuple[int, Checkpoint]] = []
        self.finished = False
        self._rows, away, states = retry_lost_entries(
            lambda: match_prompts(sequences, key, prompts)
        )
        self.hits = np.array([row.hit for row in self._rows], np.int32)
        for row in self._rows:
            for node in row.path:
                node.lock_count += 1
        least = self._min_pages(new, away)
        with self._clear_on_error():
            if enough := self._reserve(least):
                sequences.tiers.swap_in(away)
                sequences.tiers.enforce_limits()
                begun = restore_checkpoints(
                    self._config.cache_shapes(len(self._rows)), self._config.groups, states
                )
                self._cache: KVCache | None = self._with_tables(begun)
        if not enough:
            self._unlock()
            raise ValueError(
                f"the request may need {max(least)} pages more than it finds, and the prefix "
                f"tree's pool has {len(sequences.pool.allocators[0].refs)} in all: give it more "
                "pages, or "
                "ask for less"
            )

    def take_cache(self) -> KVCache:
        """The cache, once: it is used up by whoever goes on with it."""
        cache, self._cache = self._cache, None
        assert cache is not None
        return cache

    def after_chunk(self, cache: KVCache, tokens: np.ndarray) -> KVCache:
        """The cache after a chunk of the prompts, when rows hold so many tokens, int[batch]: where
        it is time, their state is taken."""
        which = np.array(
            [int(n) in row.checkpoint_positions for n, row in zip(tokens, self._rows, strict=True)]
        )
        self._collect()  # what was taken a chunk before has come by now
        if which.any():
            cache, found = take_checkpoints(cache, self._config.groups, which, tokens)
            self._in_flight.append((found, self._samples))
            for n, row in zip(tokens, self._rows, strict=True):
                row.checkpoint_positions.discard(int(n))  # a row that has ended stands there still
        return cache

    def finish(self, cache: KVCache | None, row_tokens: Sequence[Sequence[int]] | None) -> None:
        """Give the pages back; what is worth it stays in the tree.

        Args:
          cache: of the request, as it ended; None where it was lost.
          texts: the tokens of each of its rows, as far as they are known; None to keep nothing.
        """
        with self._sequences.lock:
            self.finished = True
            with self._clear_on_error():
                if cache is None or any(x.is_deleted() for x in jax.tree.leaves(cache)):
                    self._sequences.clear()
                else:
                    self._keep(cache, row_tokens)
            self._unlock()

    def _keep(self, cache: KVCache, row_tokens: Sequence[Sequence[int]] | None) -> None:
        pool, config = self._sequences.pool, self._config
        if row_tokens is not None and not config.exact_prefix and config.needs_checkpoints:
            cache = self._rewind_to_pages(cache, row_tokens)
        pool.adopt(cache.layers)
        length, status, pools = fetch((cache.length, cache.status, cache.pools))
        whole = status & ~REWOUND_TOO_FAR == 0
        for allocator, each in zip(pool.allocators, pools, strict=True):
            allocator.update_from(each)
        self._collect()
        for row, state in self._checkpoints:
            if row_tokens is not None and whole[row] and len(row_tokens[row]) >= state.tokens:
                self._sequences.keep_checkpoint(self._key, row_tokens[row][: state.tokens], state)
            self._release_pages(state.tables)
        for row, text in enumerate(row_tokens or ()):
            held = int(length[row]) if whole[row] else 0
            if config.exact_prefix:
                prompt = self._rows[row // self._samples].tokens
                held = min(held, len(prompt) // config.prefill_chunk * config.prefill_chunk)
            self._sequences.keep_pages(self._key, text[:held], [each.table[row] for each in pools])
        self._release_pages([each.table for each in pools])
        self._unlock()
        self._sequences.tiers.enforce_limits()

    def _min_pages(self, new: int, away: Sequence[SwappedPage]) -> list[int]:
        """Pages of each kind that the request can't do without, beside what it finds there."""
        found = []
        for number, group in enumerate(self._config.groups):
            count = sum(each.group == number for each in away)
            for row in self._rows:
                full = len(group.pages_for(row.hit)[0])
                most = group.max_pages(positions_needed(len(row.tokens), new))
                # Samples have the full pages of their prompt in common.
                whole = 0 if group.windowed else len(group.pages_for(len(row.tokens))[0])
                count += max(whole - full, 0) + self._samples * (most - whole)
            found.append(count)
        return found

    def _reserve(self, least: list[int]) -> bool:
        """Have enough free pages, and choose where states are to be taken; whether there are."""
        config, sequences = self._config, self._sequences
        for row in self._rows:
            row.checkpoint_positions = config.checkpoint_positions(
                row.hit, row.matched, len(row.tokens)
            )
        states = sum(len(row.checkpoint_positions) for row in self._rows)
        each = [group.page_group.layout.columns if group.windowed else 0 for group in config.groups]
        # A state retains what windows would give back, which is worth older texts, and no request.
        wanted = [n + states * columns for n, columns in zip(least, each, strict=True)]
        if not sequences.tiers.free_pages(least, wanted):
            return False
        for allocator, n, columns in zip(sequences.pool.allocators, least, each, strict=True):
            if columns:
                spare = (len(allocator.free) - n) // (columns * len(self._rows))
                for row in self._rows:
                    row.checkpoint_positions = {
                        *sorted(row.checkpoint_positions, reverse=True)[:spare]
                    }  # the longest save most
        return True

    def _with_tables(self, begun: tuple[KVCache, list[Any]]) -> KVCache:
        """The cache with the pool's pages, and its rows' tables."""
        (cache, parts), pool, rows = begun, self._sequences.pool, self._rows
        pools: Any = []
        for number, group in enumerate(self._config.groups):
            allocator, fresh = pool.allocators[number], []
            table = np.full((len(rows), group.page_group.layout.columns), -1, np.int32)
            for at, row in enumerate(rows):
                full, part = group.pages_for(row.hit)
                for page in full:
                    found = self._sequences.entry(row.path, number, page).page
                    allocator.retain(found)
                    table[at, group.column(page)] = found
                if part is not None:
                    found = table[at, group.column(part)] = allocator.allocate()
                    fresh.append((found, parts[number][at]))
            pool.write(number, [page for page, _ in fresh], [content for _, content in fresh])
            pools.append(allocator.to_device(table))
        layers = [
            held if body is None else replace(held, keys=body[0], values=body[1])
            for held, body in zip(cache.layers, pool.bodies, strict=True)
        ]
        put = layers[0].policy.placement.put
        length, status, pools = put((self.hits, np.zeros_like(self.hits), tuple(pools)))
        written = cache.written
        if not self._config.needs_checkpoints:
            written = put(np.repeat(self.hits[:, None], len(layers), axis=1))
        return replace(
            cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
        )

    def _release_pages(self, tables: Sequence[np.ndarray | None]) -> None:
        for allocator, table in zip(self._sequences.pool.allocators, tables, strict=True):
            for page in [] if table is None else table[table >= 0].tolist():
                allocator.release(page)

    def _rewind_to_pages(self, cache: KVCache, row_tokens: Sequence[Sequence[int]]) -> KVCache:
        """Rows taken back to where pages of known tokens are whole, as far as they can be, and
        their states."""
        node_tokens = self._config.node_tokens
        length, can = fetch((cache.length, rewindable(cache)))
        whole = np.minimum(length, list(map(len, row_tokens))) // node_tokens * node_tokens
        which = (length - whole <= can) & (whole > 0)
        if which.any():
            cache = rewind(cache, np.where(which, length - whole, 0).astype(np.int32))
            at = np.where(which, whole, length).astype(np.int32)
            cache, found = take_checkpoints(cache, self._config.groups, which, at)
            self._in_flight.append((found, 1))
        return cache

    def _collect(self) -> None:
        for found, samples in self._in_flight:
            self._checkpoints += [(row * samples, state) for row, state in found.fetched()]
        self._in_flight = []

    @contextlib.contextmanager
    def _clear_on_error(self) -> Iterator[None]:
        """What is stopped in the middle leaves an empty tree, and no page with two owners."""
        try:
            yield
        except BaseException:
            self._sequences.clear()
            self._unlock()
            raise

    def _unlock(self) -> None:
        for row in self._rows:
            for node in row.path:
                node.lock_count -= 1
            row.path = []


class LeaseLock:
    """``lease``: the newest that the pages were lent by."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def acquire(self) -> Iterator[None]:
        """Keep other threads out of the pages: they wait for the end of this.

        Raises:
          ValueError: if a stream that has not ended holds them.
        """
        with self._lock:
            if self._lent:
                gc.collect()  # a stream that was dropped is part of a reference cycle
            if self._lent:
                raise ValueError(
                    "the prefix tree's pages are with a stream that has not ended: iterate it to "
                    "its end, or close it; a kvjax.Engine streams to many at once, and shares "
                    "prefixes too"
                )
            yield

    @property
    def _lent(self) -> bool:
        return self.lease is not None and not self.lease.finished
