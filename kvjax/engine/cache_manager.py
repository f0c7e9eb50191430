"""Who has which pages: admission, prefix sharing, preemption by swapping to the host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.engine.handle import Handle, SwappedState, Transfer
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.rows import RunningSequence
from kvjax.prefixes.checkpoints import Checkpoint
from kvjax.prefixes.radix import Node
from kvjax.prefixes.sequences import match_prompts
from kvjax.prefixes.tiers import retry_lost_entries

EVICTION_SHARE = 16
"""Cached prefixes are evicted in batches: what is missing, plus the pool divided by this number."""


class CacheManager:
    """Gives pages to sequences, and keeps cached prefixes in the rest of the pools.

    ``host_bytes``: host memory for swapped requests and evicted prefixes; ``sharing``: whether
    requests share prefixes; ``swapped_bytes``: bytes of swapped requests; ``weight_version``:
    number of the current parameters, a part of the prefix cache's keys.
    """

    def __init__(self, runner: ModelRunner, host_bytes: int, sharing: bool) -> None:
        self._runner, self._tables, self._prefixes = runner, runner.page_tables, runner.prefixes
        self._pool_config, self._host_bytes, self._sharing = runner.pool_config, host_bytes, sharing
        self.swapped_bytes = self.weight_version = 0
        self._transfers: list[Transfer] = []

    def ensure_free(self, pages: list[int]) -> bool:
        """Whether this many pages of each pool are free, after evicting cached prefixes that no
        request uses."""
        pools = self._prefixes.pool.allocators
        if all(len(pool.free) >= count for pool, count in zip(pools, pages, strict=True)):
            return True
        target = [
            count + len(pool.refs) // EVICTION_SHARE
            for pool, count in zip(pools, pages, strict=True)
        ]
        freed: bool = self._prefixes.tiers.free_pages(pages, target)
        self._prefixes.tiers.enforce_limits()
        return freed

    def admit(self, seq: RunningSequence, running: Sequence[RunningSequence]) -> bool:
        """Give a new sequence the pages of its prompt's cached prefix. Returns whether enough pages
        are free for its prompt and for the next rounds of ``running`` sequences."""
        # The scores of a prompt need the logits of all its tokens.
        sharing = self._sharing and seq.handle.request.prompt_logprobs is None
        if self._try_admit(seq, running, sharing):
            return True
        # If nothing else runs, the cached prefix itself may occupy the pages that are missing.
        return sharing and not running and self._try_admit(seq, running, False)

    def _try_admit(
        self, seq: RunningSequence, running: Sequence[RunningSequence], sharing: bool
    ) -> bool:
        prompt, prefixes, groups = seq.prompt, self._prefixes, self._pool_config.groups
        path, hit, evicted, checkpoint = [], 0, [], None
        if sharing:
            (match,), evicted, (checkpoint,) = retry_lost_entries(
                lambda: match_prompts(prefixes, seq.namespace, [prompt])
            )
            path, hit = match.path, match.hit
            seq.checkpoints = self._pool_config.checkpoint_positions(
                hit, match.matched, len(prompt)
            )
        length, reserved = self._upcoming_length(seq, len(prompt)), self._reserved(running)
        missing = []
        for number, group in enumerate(groups):
            restored = sum(entry.group == number for entry in evicted)
            new = max(group.max_pages(length) - len(group.pages_for(hit)[0]), 0)
            missing.append(new + restored + reserved[number] + len(seq.beam_rows))
        with _locked(path):
            if not self.ensure_free(missing):
                return False
            prefixes.tiers.swap_in(evicted)
            fresh = self._tables.share(seq.row, path, hit)
        if checkpoint is not None:
            self._runner.restore_checkpoint(seq.row, checkpoint, fresh)
        seq.length, seq.fresh = hit, checkpoint is None
        if seq.handle.request.needs_history:
            self._runner.set_history(seq.row, prompt)
        return True

    def _reserved(self, running: Sequence[RunningSequence]) -> list[int]:
        """One page of each group for each sequence that will take more. Otherwise a new sequence
        would be preempted at once. Beams may take a page whenever they branch."""
        pages = [0] * len(self._pool_config.groups)
        for seq in running:
            needs = self._tables.needs_pages(seq.row, seq.handle.request.max_length)
            for number, more in enumerate(needs):
                pages[number] += more or seq.handle.beams is not None
        return pages

    def _upcoming_length(self, seq: RunningSequence, length: int) -> int:
        """Tokens that a row of ``length`` tokens will have after the next rounds."""
        return min(length + self._runner.max_rounds, seq.handle.request.max_length)

    def drop_prefixes(self) -> None:
        """Evict all cached prefixes."""
        for root in list(self._prefixes.radix.roots.values()):
            self._prefixes.tiers.remove(root)
        self._prefixes.radix.roots.clear()

    def release(self, seq: RunningSequence) -> None:
        """Take the rows and pages of a sequence back."""
        for row in seq.rows:
            self._tables.release(row)
            self._runner.sampling_state.clear(row)

    def cache_prefix(self, seq: RunningSequence) -> None:
        """Add the computed part of a sequence's prompt to the prefix cache."""
        if not self._sharing or seq.namespace.weight_version != self.weight_version:
            return
        namespace, prompt, length = seq.namespace, seq.prompt, seq.length
        if length in seq.checkpoints:
            (layers, parts), _ = self._runner.save_row(seq.row, length)
            arrays = jax.tree.leaves((layers, parts))
            _start_copy_to_host(arrays)
            state = Checkpoint(length, arrays, self._tables.window_tables(seq.row, length))
            self._prefixes.keep_checkpoint(namespace, prompt[:length], state)
            self._transfers.append(lambda: _finish_copy_to_host(arrays))
        chunk = self._pool_config.prefill_chunk
        whole = length // chunk * chunk if self._runner.exact else length
        tables = [table[seq.row] for table in self._tables.tables]
        self._prefixes.keep_pages(namespace, prompt[:whole], tables)

    def take_transfers(self) -> list[Transfer]:
        """The transfers that were started since the last call."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def complete(self, transfers: Sequence[Transfer]) -> None:
        """Complete transfers whose step has come back."""
        for transfer in transfers:
            transfer()
        if transfers:
            self._prefixes.tiers.enforce_limits()

    def swap_out(self, seq: RunningSequence) -> bool:
        """Start copying all that a sequence has to the host; False if that does not fit. Its rows
        and pages must still be released."""
        # Sequences with drafts may have pages past their end. Beam searches start over.
        if seq.handle.drafts is not None or seq.handle.beams is not None:
            return False
        pages = self._tables.pages_of(seq.row)
        sizes = zip(pages, self._pool_config.groups, strict=True)
        page_bytes = sum(len(own) * group.page_bytes for own, group in sizes)
        nbytes = self._pool_config.checkpoint_bytes + page_bytes
        if self.swapped_bytes + nbytes > self._host_bytes:
            return False
        (layers, _), progress = self._runner.save_row(seq.row, seq.length)
        _start_copy_to_host((layers, progress))
        contents = [
            self._prefixes.pool.start_read(number, [page for _, page in own])
            for number, own in enumerate(pages)
        ]
        columns = [[column for column, _ in own] for own in pages]
        swapped = SwappedState(seq.length, seq.sampled, layers, progress, columns, contents, nbytes)
        seq.handle.swapped = swapped
        self._transfers.append(swapped.finish_copy)
        self._add_swapped_bytes(nbytes)
        return True

    def swap_in(self, seq: RunningSequence, running: Sequence[RunningSequence]) -> bool:
        """Give a swapped sequence its pages and state again. Returns whether enough pages are free
        for it and for the next rounds of ``running`` sequences."""
        swapped = seq.handle.swapped
        assert swapped is not None
        length, reserved = self._upcoming_length(seq, swapped.length), self._reserved(running)
        groups = zip(self._pool_config.groups, swapped.columns, reserved, strict=True)
        missing = [max(len(own), group.max_pages(length)) + more for group, own, more in groups]
        if not self.ensure_free(missing):
            return False
        swapped.finish_copy()
        pages = self._tables.take(seq.row, swapped.columns, swapped.length)
        for number, (own, read) in enumerate(zip(pages, swapped.pages, strict=True)):
            self._prefixes.pool.write(number, own, read())
        self._runner.restore_row(seq.row, swapped.layers, swapped.progress)
        seq.length, seq.sampled, seq.fresh = swapped.length, swapped.sampled, False
        self.drop_swapped(seq.handle)
        return True

    def drop_swapped(self, handle: Handle) -> None:
        """Free the host memory of a swapped request."""
        if handle.swapped is not None:
            self._add_swapped_bytes(-handle.swapped.nbytes)
            handle.swapped = None

    def set_params(self, params: PyTree) -> None:
        """Use new parameters from now on; prefixes of the old ones are no longer shared."""
        self._runner.params = params
        self._prefixes.forget_weights(self.weight_version)
        self.weight_version += 1

    def _add_swapped_bytes(self, nbytes: int) -> None:
        self.swapped_bytes += nbytes
        self._prefixes.tiers.limits["host"] = max(self._host_bytes - self.swapped_bytes, 0)
        self._prefixes.tiers.enforce_limits()


def _start_copy_to_host(arrays: PyTree) -> None:
    for x in jax.tree.leaves(arrays):
        x.copy_to_host_async()


def _finish_copy_to_host(arrays: list[Any]) -> None:
    arrays[:] = [np.asarray(x) for x in arrays]


@contextmanager
def _locked(path: Sequence[Node]) -> Iterator[None]:
    """Keep a cached prefix from being evicted until its pages are shared."""
    for node in path:
        node.lock_count += 1
    try:
        yield
    finally:
        for node in path:
            node.lock_count -= 1
