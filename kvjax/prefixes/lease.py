"""A lease: the use of a prefix tree by one request, from matching its prompts to adding new
pages."""

import contextlib
import gc
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import numpy as np

from kvjax.cache.checks import REWOUND_TOO_FAR
from kvjax.cache.state import KVCache
from kvjax.core.transfer import fetch
from kvjax.operations.rows import rewind, rewindable
from kvjax.paging.allocator import PageAllocator
from kvjax.policies.model_config import positions_needed
from kvjax.prefixes.checkpoints import (
    Checkpoint,
    PendingCheckpoints,
    restore_checkpoints,
    take_checkpoints,
)
from kvjax.prefixes.pool import PageArrays
from kvjax.prefixes.radix import Namespace
from kvjax.prefixes.sequences import CachedSequences, match_prompts
from kvjax.prefixes.tiers import SwappedPage, retry_lost_entries


class Lease:
    """A cache for one request on the pages of a prefix tree. The lease has the pages until
    ``finish`` is called.

    ``hits`` (int[batch]) is the number of tokens of each prompt that the cache already has.

    Args:
      sequences: the tree's cached sequences.
      namespace: the namespace whose sequences are matched.
      prompts: the token ids of each row.
      new: the maximum number of tokens that will be added to each row.
      samples: the number of continuations of each prompt.

    Raises:
      ValueError: if the request needs more pages than can be freed.
    """

    def __init__(
        self,
        sequences: CachedSequences,
        namespace: Namespace,
        prompts: Sequence[list[int]],
        new: int,
        samples: int,
    ) -> None:
        self._sequences, self._config = sequences, sequences.pool_config
        self._namespace, self._samples = namespace, samples
        self._in_flight: list[tuple[PendingCheckpoints, int]] = []
        self._checkpoints: list[tuple[int, Checkpoint]] = []
        self.finished = False
        self._rows, swapped, states = retry_lost_entries(
            lambda: match_prompts(sequences, namespace, prompts)
        )
        self.hits = np.array([row.hit for row in self._rows], np.int32)
        for row in self._rows:
            for node in row.path:
                node.lock_count += 1
        least = self._pages_needed(new, swapped)
        with self._clear_on_error():
            if enough := self._reserve(least):
                sequences.tiers.swap_in(swapped)
                sequences.tiers.enforce_limits()
                shapes = self._config.cache_shapes(len(self._rows))
                cache, parts = restore_checkpoints(shapes, self._config.groups, states)
                self._cache: KVCache | None = self._with_pages(cache, parts)
        if not enough:
            self._unlock()
            raise ValueError(
                f"the request may need {max(least)} more pages, but the prefix tree's pool has "
                f"{len(sequences.pool.allocators[0].refs)} in all; use a larger pool or a smaller "
                "request"
            )

    def take_cache(self) -> KVCache:
        """Return the cache. This works only once, because the caller donates the cache."""
        cache, self._cache = self._cache, None
        assert cache is not None
        return cache

    def after_chunk(self, cache: KVCache, tokens: np.ndarray) -> KVCache:
        """Take the checkpoints that are due after a prefill chunk. Call this after each chunk.

        Args:
          cache: the cache. Use the returned cache from now on.
          tokens: int[batch], the number of tokens of each row.
        """
        which = np.array(
            [int(n) in row.checkpoint_positions for n, row in zip(tokens, self._rows, strict=True)]
        )
        self._collect()  # the checkpoints of earlier chunks have arrived by now
        if which.any():
            cache, pending = take_checkpoints(cache, self._config.groups, which, tokens)
            self._in_flight.append((pending, self._samples))
            for n, row in zip(tokens, self._rows, strict=True):
                # A row whose prompt is complete is still at this position after later chunks.
                row.checkpoint_positions.discard(int(n))
        return cache

    def finish(self, cache: KVCache | None, row_tokens: Sequence[Sequence[int]] | None) -> None:
        """Return the pages, and add the request's sequences to the tree.

        Args:
          cache: the cache at the end of the request; None if it was lost.
          row_tokens: the known tokens of each row; None to add nothing.
        """
        with self._sequences.lock:
            self.finished = True
            with self._clear_on_error():
                if cache is None or any(x.is_deleted() for x in jax.tree.leaves(cache)):
                    self._sequences.clear()
                else:
                    self._return_pages(cache, row_tokens)
            self._unlock()

    def _return_pages(self, cache: KVCache, row_tokens: Sequence[Sequence[int]] | None) -> None:
        pool, config = self._sequences.pool, self._config
        if row_tokens is not None and not config.exact_prefix and config.needs_checkpoints:
            cache = self._rewind_to_pages(cache, row_tokens)
        pool.adopt(cache.layers)
        lengths, status, pools = fetch((cache.length, cache.status, cache.pools))
        valid = status & ~REWOUND_TOO_FAR == 0
        for host, device in zip(pool.allocators, pools, strict=True):
            host.update_from(device)
        self._collect()
        for row, checkpoint in self._checkpoints:
            length = checkpoint.tokens
            if row_tokens is not None and valid[row] and len(row_tokens[row]) >= length:
                tokens = row_tokens[row][:length]
                self._sequences.keep_checkpoint(self._namespace, tokens, checkpoint)
            self._release_pages(checkpoint.tables)
        for row, tokens in enumerate(row_tokens or ()):
            length = int(lengths[row]) if valid[row] else 0
            if config.exact_prefix:
                prompt = self._rows[row // self._samples].tokens
                length = min(length, len(prompt) // config.prefill_chunk * config.prefill_chunk)
            tables = [allocator.table[row] for allocator in pools]
            self._sequences.keep_pages(self._namespace, tokens[:length], tables)
        self._release_pages([allocator.table for allocator in pools])
        self._unlock()
        self._sequences.tiers.enforce_limits()

    def _pages_needed(self, new: int, swapped: Sequence[SwappedPage]) -> list[int]:
        """Return how many free pages of each group the request may need, in addition to matched
        pages on the device."""
        needed = []
        for number, group in enumerate(self._config.groups):
            count = sum(page.group == number for page in swapped)
            for row in self._rows:
                matched = len(group.pages_for(row.hit)[0])
                most = group.max_pages(positions_needed(len(row.tokens), new))
                # Samples share the full pages of their prompt.
                shared = 0 if group.windowed else len(group.pages_for(len(row.tokens))[0])
                count += max(shared - matched, 0) + self._samples * (most - shared)
            needed.append(count)
        return needed

    def _reserve(self, least: list[int]) -> bool:
        """Free the pages that the request needs, and choose where to take checkpoints.

        Returns whether there are enough pages.
        """
        config, sequences = self._config, self._sequences
        for row in self._rows:
            row.checkpoint_positions = config.checkpoint_positions(
                row.hit, row.matched, len(row.tokens)
            )
        # A checkpoint retains pages of windows that would otherwise become free. It may evict older
        # sequences for them, but must not make the request fail.
        count = sum(len(row.checkpoint_positions) for row in self._rows)
        retained = [
            group.page_group.layout.columns if group.windowed else 0 for group in config.groups
        ]
        target = [n + count * columns for n, columns in zip(least, retained, strict=True)]
        if not sequences.tiers.free_pages(least, target):
            return False
        for allocator, n, columns in zip(sequences.pool.allocators, least, retained, strict=True):
            if columns:
                spare = (len(allocator.free) - n) // (columns * len(self._rows))
                for row in self._rows:  # the longest prefixes save most
                    longest = sorted(row.checkpoint_positions, reverse=True)[:spare]
                    row.checkpoint_positions = set(longest)
        return True

    def _with_pages(self, cache: KVCache, parts: list[list[PageArrays | None]]) -> KVCache:
        """Put the pool's pages and the rows' page tables into a cache.

        ``parts`` has the content of the partly full page for each group and row, or None.
        """
        pool = self._sequences.pool
        allocators: list[PageAllocator] = []
        for number, group in enumerate(self._config.groups):
            allocator = pool.allocators[number]
            partial_pages, contents = [], []
            table = np.full((len(self._rows), group.page_group.layout.columns), -1, np.int32)
            for index, row in enumerate(self._rows):
                full, partial = group.pages_for(row.hit)
                for page in full:
                    shared = self._sequences.entry(row.path, number, page).page
                    allocator.retain(shared)
                    table[index, group.column(page)] = shared
                if partial is not None:
                    page = table[index, group.column(partial)] = allocator.allocate()
                    partial_pages.append(page)
                    contents.append(parts[number][index] or [])
            pool.write(number, partial_pages, contents)
            allocators.append(allocator.to_device(table))
        layers = [
            layer if body is None else replace(layer, keys=body[0], values=body[1])
            for layer, body in zip(cache.layers, pool.bodies, strict=True)
        ]
        put = layers[0].policy.placement.put
        length, status, pools = put((self.hits, np.zeros_like(self.hits), tuple(allocators)))
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
        """Rewind rows to the end of their last full page of known tokens, if they can be rewound
        that far, and take checkpoints there."""
        node_tokens = self._config.node_tokens
        lengths, limits = fetch((cache.length, rewindable(cache)))
        known = np.minimum(lengths, list(map(len, row_tokens)))
        ends = known // node_tokens * node_tokens
        which = (lengths - ends <= limits) & (ends > 0)
        if which.any():
            cache = rewind(cache, np.where(which, lengths - ends, 0).astype(np.int32))
            tokens = np.where(which, ends, lengths).astype(np.int32)
            cache, pending = take_checkpoints(cache, self._config.groups, which, tokens)
            self._in_flight.append((pending, 1))
        return cache

    def _collect(self) -> None:
        """Wait for the checkpoints in flight."""
        for pending, samples in self._in_flight:
            self._checkpoints += [(row * samples, each) for row, each in pending.fetched()]
        self._in_flight = []

    @contextlib.contextmanager
    def _clear_on_error(self) -> Iterator[None]:
        """Empty the tree if the work within the context is interrupted, so that no page has two
        owners."""
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
    """A lock that lets one thread at a time use a tree's pages. ``lease`` is the newest lease."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def acquire(self) -> Iterator[None]:
        """Hold the lock within this context. Other threads wait for it.

        Raises:
          ValueError: if an unfinished stream uses the pages.
        """
        with self._lock:
            if self._leased:
                gc.collect()  # an abandoned stream is part of a reference cycle
            if self._leased:
                raise ValueError(
                    "the prefix tree's pages are leased to an unfinished stream; iterate it to its "
                    "end or close it, or use a kvjax.Engine, which serves many streams "
                    "at once"
                )
            yield

    @property
    def _leased(self) -> bool:
        return self.lease is not None and not self.lease.finished
