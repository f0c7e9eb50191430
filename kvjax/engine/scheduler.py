"""The scheduler: it decides which requests run and what each step dispatches."""

import time
from bisect import insort
from collections.abc import Callable, Iterator, Sequence

from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.handle import Handle, InFlightStep
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.rows import RunningSequence
from kvjax.engine.speculative import PendingDraft, SpeculativeDecoder
from kvjax.engine.stats import Counters
from kvjax.prefixes.radix import Namespace


def rank(handle: Handle) -> tuple[int, int]:
    """Return the sort key of requests: priority, then order of submission."""
    return handle.request.priority, handle.number


def preemption_victim(seqs: Sequence[RunningSequence]) -> RunningSequence:
    """Return the sequence that is preempted first, which is the last one in the order of
    ``rank``."""
    return max(seqs, key=lambda seq: rank(seq.handle))


class WaitingQueue:
    """Requests without a row, in the order of ``rank``."""

    def __init__(self) -> None:
        self._queue: list[tuple[tuple[int, int], Handle]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Handle]:
        return (handle for _, handle in list(self._queue))

    def add(self, handle: Handle) -> None:
        insort(self._queue, (rank(handle), handle), key=lambda item: item[0])

    def remove(self, handle: Handle) -> None:
        self._queue = [item for item in self._queue if item[1] is not handle]

    def first(self) -> Handle | None:
        """Return the next request that can be admitted. A preempted request must first wait for its
        programs in flight."""
        return next((handle for _, handle in self._queue if not handle.in_flight), None)


class Scheduler:
    """Admits requests to rows, and dispatches the programs of each step.

    A step has chunks of prompts, one request after another, and then rounds of decoding for all
    other rows. Together they have at most ``step_tokens`` tokens, but there is at least one round.
    The scheduler does not see sampled tokens. It assumes that a sequence continues until ``end`` is
    called, and frees the row of a sequence once all its tokens are dispatched.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache_manager: CacheManager,
        speculative: SpeculativeDecoder,
        step_tokens: int,
        counters: Counters,
    ) -> None:
        self._runner, self._cache_manager, self._speculative = runner, cache_manager, speculative
        self._step_tokens, self._counters = step_tokens, counters
        self._by_row: list[RunningSequence | None] = [None] * runner.count
        self.waiting = WaitingQueue()

    @property
    def running(self) -> list[RunningSequence]:
        """The requests that have a row."""
        rows = enumerate(self._by_row)
        return [seq for row, seq in rows if seq is not None and seq.row == row]

    @property
    def handles(self) -> list[Handle]:
        """All requests, waiting and running."""
        return [*self.waiting, *(seq.handle for seq in self.running)]

    def overdue(self, now: float) -> list[Handle]:
        """Return the requests whose deadline has passed at the time ``now``, as given by
        ``time.monotonic``."""
        deadlines = [(handle, handle.request.deadline) for handle in self.handles]
        return [
            handle
            for handle, deadline in deadlines
            if deadline is not None and now - handle.times.submitted > deadline
        ]

    def end(self, handle: Handle) -> None:
        """Free everything that a request uses."""
        self.waiting.remove(handle)
        self._cache_manager.drop_swapped(handle)
        for seq in self.running:
            if seq.handle is handle:
                self._settle(seq)
                self._release(seq)

    def dispatch(self, step: InFlightStep) -> None:
        """Dispatch the programs of a step. If there is nothing to do, no program is dispatched."""
        decoding = sum(not seq.prefilling for seq in self.running)
        budget = self._step_tokens - decoding
        while (seq := self._next_prefill()) is not None:
            length = min(len(seq.prompt) - seq.length, self._runner.pool_config.prefill_chunk)
            width = self._runner.chunk_width(length)
            if width > budget or not self._reserve(seq, length):
                break
            self._prefill(step, seq, length)
            budget -= width
        self._decode(step, budget + decoding)

    def _next_prefill(self) -> RunningSequence | None:
        """Return the first sequence with an unfinished prompt. If no running sequence has one,
        admit waiting requests."""
        prefilling = [seq for seq in self.running if seq.prefilling]
        while not prefilling:
            seq = self._admit()
            if seq is None:
                return None
            prefilling = [seq] if seq.prefilling else []
        return min(prefilling, key=lambda seq: rank(seq.handle))

    def _admit(self) -> RunningSequence | None:
        """Give the next waiting request a row. Returns None if no request waits, or too few rows or
        pages are free."""
        handle = self.waiting.first()
        free = [row for row, seq in enumerate(self._by_row) if seq is None]
        if handle is None or len(free) < handle.rows:
            return None
        row, *beam_rows = free[: handle.rows]
        rows = 1 if self._runner.exact else None
        namespace = Namespace(handle.request.tenant, self._cache_manager.weight_version, rows)
        seq = RunningSequence(handle, row, namespace, beam_rows=tuple(beam_rows))
        admit = self._cache_manager.admit if handle.swapped is None else self._cache_manager.swap_in
        if not admit(seq, self.running):
            return None
        self.waiting.remove(handle)
        for row in seq.rows:
            self._by_row[row] = seq
            self._runner.sampling_state.set(row, handle.request)
        if handle.beams is not None:
            handle.beams.begin()
        if handle.times.admitted is None:
            handle.times.admitted = time.monotonic()
            handle.cached_tokens = seq.length
            self._counters.requests += 1
            self._counters.prompt_tokens += len(seq.prompt)
            self._counters.cached_tokens += seq.length
        return seq

    def _reserve(self, seq: RunningSequence, tokens: int) -> bool:
        """Take the pages for ``tokens`` more tokens. Returns False if the sequence was preempted
        instead."""
        tables, length = self._runner.page_tables, seq.length + tokens
        rows = [row for row, _ in seq.entries]
        if not self._ensure_free(seq, lambda: tables.missing(rows, length)):
            return False
        for row in rows:
            tables.extend(row, length)
        return True

    def _ensure_free(self, seq: RunningSequence, missing: Callable[[], list[int]]) -> bool:
        """Free the ``missing`` pages of each pool for a sequence.

        Cached prefixes are evicted first. Then later sequences are preempted, the last one first.
        Without later sequences, the sequence itself is preempted, and the result is False. A
        sequence that runs alone gets the whole pool.
        """
        while not self._cache_manager.ensure_free(missing()):
            later = [x for x in self.running if rank(x.handle) > rank(seq.handle)]
            if later:
                self._preempt(preemption_victim(later))
            elif len(self.running) > 1:
                self._preempt(seq)
                return False
            else:
                self._cache_manager.drop_prefixes()
        return True

    def _branch(self, seq: RunningSequence) -> bool:
        """Let rows of a beam search continue from the parents that its last step chose. Returns
        False if the search was preempted instead."""
        beams, rows, tables = seq.handle.beams, seq.rows, self._runner.page_tables
        if beams is None or beams.chosen is None:
            return True
        (tokens, parents), beams.chosen = beams.chosen, None
        pairs = [(rows[parents[n]], rows[n]) for n in beams.active if parents[n] != n]
        for _, row in pairs:
            tables.release(row)
        groups = self._runner.pool_config.groups
        partial = [group.pages_for(seq.length)[1] is not None for group in groups]
        if not self._ensure_free(seq, lambda: [len(pairs) * part for part in partial]):
            return False
        copies = [tables.branch(source, row, seq.length) for source, row in pairs]
        newest = [(rows[n], int(tokens[n])) for n in beams.active]
        self._runner.branch(pairs, copies, newest)
        return True

    def _preempt(self, seq: RunningSequence) -> None:
        """Take a sequence's row and pages away. The sequence then waits until it is restored from
        the host or recomputed."""
        seq.handle.preemptions += 1
        self._counters.preemptions += 1
        # Recomputing a part of a prompt is as fast as swapping it.
        self._counters.swapped += not seq.prefilling and self._cache_manager.swap_out(seq)
        if seq.handle.beams is not None:
            seq.handle.beams.reset()
        self._release(seq)
        self.waiting.add(seq.handle)

    def _release(self, seq: RunningSequence) -> None:
        self._cache_manager.release(seq)
        for row in seq.rows:
            self._by_row[row] = None

    def _settle(self, seq: RunningSequence) -> None:
        self._counters.accepted_tokens += seq.settle_draft()

    def _prefill(self, step: InFlightStep, seq: RunningSequence, length: int) -> None:
        """Dispatch a chunk of a prompt. The row already has its pages."""
        output, start = self._runner.prefill(seq, length), seq.length
        seq.length, seq.fresh = start + length, False
        self._counters.prefill_tokens += length
        self._counters.padding_tokens += self._runner.chunk_width(length) - length
        scores = output.prompt_scores
        if scores is None:
            self._cache_manager.cache_prefix(seq)
        else:  # not shared: another program computed it, whose last bits may differ
            step.transfers.append(lambda: seq.handle.add_prompt_scores(start, scores))
        entries = [] if seq.prefilling else [(0, seq.handle, 0)]
        step.add(output, entries, self._cache_manager.take_transfers())
        if not seq.prefilling:
            seq.sampled = 1
            if not seq.remaining:
                self._release(seq)

    def _decode(self, step: InFlightStep, budget: int) -> None:
        """Dispatch drafts and rounds of decoding for all sequences whose prompts are done."""
        decoding = [seq for seq in self.running if not seq.prefilling]
        limit = min(self._runner.max_rounds, max(budget // max(len(decoding), 1), 1))
        for seq in decoding:
            self._settle(seq)
        adjust, max_draft = self._speculative.adjust_cost(decoding), self._speculative.max_tokens
        scheduled: list[tuple[RunningSequence, int]] = []
        drafts: list[PendingDraft] = []
        for seq in sorted(decoding, key=lambda seq: rank(seq.handle)):
            count, tokens = seq.next_draft(max_draft, adjust)
            if count and self._by_row[seq.row] is seq and self._reserve(seq, 1 + count):
                drafts.append((seq, count, tokens))
                continue
            rounds = seq.rounds(limit, max_draft, adjust)
            # Sequences earlier in the loop may have preempted this one.
            runs = rounds and self._by_row[seq.row] is seq and self._branch(seq)
            if runs and self._reserve(seq, rounds):
                scheduled.append((seq, rounds))
        batch = self._speculative.batch_size
        for first in range(0, len(drafts), batch):
            self._verify(step, drafts[first : first + batch])
        scheduled = [(seq, rounds) for seq, rounds in scheduled if self._by_row[seq.row] is seq]
        if not scheduled:
            return
        output, places = self._runner.decode(scheduled)
        numbers = [(seq.handle, number) for seq, _ in scheduled for _, number in seq.entries]
        entries = [(place, *number) for place, number in zip(places, numbers, strict=True)]
        step.add(output, entries, self._cache_manager.take_transfers())
        for seq, rounds in scheduled:
            seq.length += rounds
            seq.sampled += rounds
            if not seq.remaining:
                self._release(seq)

    def _verify(self, step: InFlightStep, drafts: list[PendingDraft]) -> None:
        """Dispatch the verification of drafts. The lengths of their sequences are updated when the
        output arrives."""
        output, places = self._speculative.verify(drafts)
        placed = zip(places, drafts, strict=True)
        step.add(output, [(place, seq.handle, seq.sampled) for place, (seq, _, _) in placed], [])
        for seq, count, _ in drafts:
            seq.verifying = count
            self._counters.drafted_tokens += count
