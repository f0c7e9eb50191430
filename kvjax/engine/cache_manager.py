"""The pages of an engine: the size of each pool, and which request has which pages.

When a request is admitted, it gets pages, and shares the pages of its cached prefix. When it is
preempted, its pages are swapped to the host.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.core.validation import INT32_MAX, as_int
from kvjax.engine.drafts import MAX_DRAFT_TOKENS
from kvjax.engine.handle import Handle, SwappedState, Transfer
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.rows import RunningSequence
from kvjax.generation.loaded_model import LanguageModel
from kvjax.layouts import as_paged
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.sizes import device_bytes
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice, per_layer
from kvjax.prefixes.checkpoints import Checkpoint
from kvjax.prefixes.pool_config import PoolConfig, make_pool_config
from kvjax.prefixes.radix import Node
from kvjax.prefixes.sequences import match_prompts
from kvjax.prefixes.tiers import retry_lost_entries

EVICTION_SHARE = 16
"""Cached prefixes are evicted in batches. A batch frees the missing pages, plus the size of the
pool divided by this number."""


class CacheManager:
    """Gives pages to sequences, and keeps cached prefixes in the remaining pages of the pools.

    ``host_bytes`` is the host memory for swapped requests and evicted prefixes. ``sharing`` says
    whether requests share prefixes. ``swapped_bytes`` is the size of swapped requests.
    ``weight_version`` counts updates of the parameters, and is part of the prefix cache's keys.
    """

    def __init__(self, runner: ModelRunner, host_bytes: int, sharing: bool) -> None:
        self._runner, self._tables, self._prefixes = runner, runner.page_tables, runner.prefixes
        self._pool_config, self._host_bytes, self._sharing = runner.pool_config, host_bytes, sharing
        self.swapped_bytes = self.weight_version = 0
        self._transfers: list[Transfer] = []

    def ensure_free(self, pages: list[int]) -> bool:
        """Evict cached prefixes that no request uses until ``pages`` pages of each pool are free.
        Returns whether they are."""
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
        """Give a new sequence the pages of its prompt's cached prefix. Returns False, and gives it
        nothing, if too few pages are free for its prompt and for the next rounds of the ``running``
        sequences."""
        # The scores of a prompt need the logits of all its tokens.
        sharing = self._sharing and seq.handle.request.prompt_logprobs is None
        if self._try_admit(seq, running, sharing):
            return True
        # If nothing else runs, the cached prefix itself may use the missing pages.
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
        """Return the number of pages of each group to keep free: one for each sequence that will
        take more pages. Otherwise a new sequence would be preempted immediately. Beams may take a
        page whenever they branch."""
        pages = [0] * len(self._pool_config.groups)
        for seq in running:
            needs = self._tables.needs_pages(seq.row, seq.handle.request.max_length)
            for number, more in enumerate(needs):
                pages[number] += more or seq.handle.beams is not None
        return pages

    def _upcoming_length(self, seq: RunningSequence, length: int) -> int:
        """Return the number of tokens that a row with ``length`` tokens will have after the next
        rounds."""
        return min(length + self._runner.max_rounds, seq.handle.request.max_length)

    def drop_prefixes(self) -> None:
        """Evict all cached prefixes."""
        for root in list(self._prefixes.radix.roots.values()):
            self._prefixes.tiers.remove(root)
        self._prefixes.radix.roots.clear()

    def release(self, seq: RunningSequence) -> None:
        """Free the rows and pages of a sequence."""
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
        """Return the transfers that were started since the last call."""
        transfers, self._transfers = self._transfers, []
        return transfers

    def complete(self, transfers: Sequence[Transfer]) -> None:
        """Complete transfers, after the output of their step has arrived."""
        for transfer in transfers:
            transfer()
        if transfers:
            self._prefixes.tiers.enforce_limits()

    def swap_out(self, seq: RunningSequence) -> bool:
        """Start copying a sequence's pages and state to the host. Returns False, and copies
        nothing, if it does not fit or can't be swapped. The caller must still release its rows and
        pages."""
        # Sequences with drafts may have pages after their end. Preempted beam searches start over.
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
        """Give a swapped sequence its pages and state back. Returns False, and does nothing, if too
        few pages are free for it and for the next rounds of the ``running`` sequences."""
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
        """Use new parameters from now on. Prefixes computed with the old parameters are no longer
        shared."""
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


DEFAULT_ROWS = 8
"""The number of rows of an engine whose limits have no ``max_batch_size``."""
DEFAULT_MEMORY_RATIO = 0.9
"""By default, pools take at most this fraction of the device memory that is free after the
weights."""


def engine_pool_config(
    lm: LanguageModel,
    policy: PolicyChoice,
    limits: InferenceLimits,
    pages: int | None,
    memory: int | str | None,
    prefill_chunk: int,
    rounds: int,
    exact: bool,
    checkpoint_every: int,
    draft_bytes: int,
    rotary_len: int | None = None,
) -> PoolConfig:
    """Compute the pools for these arguments of ``Engine``.

    If neither ``pages`` nor ``memory`` is given, pools have pages for all rows at full length. If
    these do not fit, they take the memory that is left by the weights and a draft model's
    ``draft_bytes``.

    Raises:
      ValueError: for the same reasons as ``Engine``.
    """
    chunk = as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX)
    longest_write = max(chunk, rounds, 1 + MAX_DRAFT_TOKENS)
    policies = with_window_slack(per_layer(policy, lm.config), longest_write - 1)

    def config(pages: int | None, memory: int | str | None) -> PoolConfig:
        return make_pool_config(
            lm,
            policies,
            pages,
            memory,
            limits.max_seq_len,
            chunk,
            exact,
            checkpoint_every,
            rotary_len,
        )

    rows = limits.max_batch_size or DEFAULT_ROWS
    layouts = [as_paged(policy.layout) for policy in policies]
    sized = any(layout is not None and layout.pages for layout in layouts)
    if pages is not None or memory is not None or sized:
        return config(pages, memory)
    smallest = config(1, None)
    if limits.cache_memory_ratio is None:
        full = config(rows * max_pages_per_row(smallest), None)
        limits = replace(limits, cache_memory_ratio=DEFAULT_MEMORY_RATIO)
        try:
            available = _available(lm, limits, rows, smallest.max_len, draft_bytes)
        except ValueError:  # the device does not report its memory
            return full
        needed = device_bytes(lm.config, list(full.policies), rows, full.max_len, lm.mesh)
        if available is None or needed <= available:
            return full
    available = _available(lm, limits, rows, smallest.max_len, draft_bytes)
    row_bytes = rows * smallest.checkpoint_bytes
    if available is None or available <= row_bytes:
        raise ValueError(
            f"cache_memory_ratio={limits.cache_memory_ratio} leaves {available} bytes for the "
            f"cache, but {rows} rows take {row_bytes} bytes without pages: raise it, or lower "
            "max_batch_size"
        )
    return config(None, available - row_bytes)


def max_pages_per_row(config: PoolConfig) -> int:
    """Return the maximum number of pages of one pool that a row uses."""
    return max(group.page_group.layout.columns for group in config.groups)


def max_sequence_length(lm: LanguageModel, limits: InferenceLimits) -> int:
    """Return the maximum number of tokens of a request, prompt and new tokens together.

    Raises:
      ValueError: if neither ``limits`` nor the model has a limit.
    """
    length = limits.max_seq_len or position_limit(lm.config)
    if length is None:
        raise ValueError(
            "this model has no maximum length: give limits=InferenceLimits(max_seq_len=...)"
        )
    return length


def with_window_slack(policies: Sequence[CachePolicy], slack: int) -> list[CachePolicy]:
    """Give paged windows a slack of at least ``slack`` tokens, so that a program can write a whole
    chunk in one call. Returns all policies."""
    widened = []
    for policy in policies:
        layout = as_paged(policy.layout)
        if layout is not None:
            policy = replace(policy, layout=layout.with_slack(slack))
        widened.append(policy)
    return widened


def _available(
    lm: LanguageModel, limits: InferenceLimits, rows: int, max_len: int, draft_bytes: int
) -> int | None:
    allowed = limits.allowed(lm, batch=rows, capacity=max_len)
    return None if allowed is None else max(allowed - draft_bytes, 0)
