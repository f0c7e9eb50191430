"""Who is sent next: chunks of prompts between rounds of decoding, within a number of tokens."""

import time
from bisect import insort
from collections.abc import Callable, Sequence
from typing import Any

from kvjax.engine.cache_manager import CacheManager
from kvjax.engine.handle import Handle
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.results import InFlightStep
from kvjax.engine.sequence import RunningSequence
from kvjax.engine.speculative import Draft, SpeculativeDecoder
from kvjax.engine.stats import Counters
from kvjax.prefixes.radix import Namespace


def rank(handle: Handle) -> tuple[int, int]:
    """Whose turn comes first: the smallest."""
    return handle.request.priority, handle.number


class WaitingQueue:
    """Requests without a row, the next one first."""

    def __init__(self) -> None:
        self._order: list[tuple[tuple[int, int], Handle]] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Any:
        return (handle for _, handle in list(self._order))

    def add(self, handle: Handle) -> None:
        insort(self._order, (rank(handle), handle), key=lambda each: each[0])

    def remove(self, handle: Handle) -> None:
        self._order = [each for each in self._order if each[1] is not handle]

    def first(self) -> Handle | None:
        """The next that may run: of one that gave its row away all that was sent must be back."""
        return next((handle for _, handle in self._order if not handle.in_flight), None)


class Scheduler:
    """Requests with a row and without. A step sends, of the requests in their order, chunks of
    prompts, each the whole or up to the end, and as many rounds of decoding of all the others as
    ``step_tokens`` leave, one at least.

    Nothing is known here of what the device has chosen: a row counts as if it went on, until
    ``end`` is told. Whoever has asked for all that its request may have gives its row back at once.
    """

    def __init__(
        self,
        rows: ModelRunner,
        memory: CacheManager,
        checks: SpeculativeDecoder,
        step_tokens: int,
        counters: Counters,
    ) -> None:
        self._runner, self._cache_manager, self._tokens = rows, memory, step_tokens
        self._speculative, self._counters = checks, counters
        self._by_row: list[RunningSequence | None] = [None] * rows.count
        self.waiting = WaitingQueue()

    @property
    def running(self) -> list[RunningSequence]:
        """Requests that have a row."""
        own = enumerate(self._by_row)
        return [seq for row, seq in own if seq is not None and seq.row == row]

    @property
    def handles(self) -> list[Handle]:
        """All requests."""
        return [*self.waiting, *(seq.handle for seq in self.running)]

    def overdue(self, now: float) -> list[Handle]:
        """Those whose deadline is over, by ``time.monotonic``."""
        times = [(handle, handle.request.deadline) for handle in self.handles]
        return [
            handle
            for handle, deadline in times
            if deadline is not None and now - handle.times.submitted > deadline
        ]

    def end(self, handle: Handle) -> None:
        """Take all that a request has from it."""
        self.waiting.remove(handle)
        self._cache_manager.forget(handle)
        for seq in self.running:
            if seq.handle is handle:
                self._settle(seq)
                self._leave(seq)

    def send(self, flight: InFlightStep) -> None:
        """Send a step's programs; none where there is nothing to do."""
        decoding = sum(not seq.reading for seq in self.running)
        left = self._tokens - decoding
        while (seq := self._next_to_read()) is not None:
            length = min(len(seq.prompt) - seq.filled, self._runner.pool_config.prefill_chunk)
            width = self._runner.width(length)
            if width > left:
                break
            if not self._room_for(seq, length):
                break
            self._feed(flight, seq, length)
            left -= width
        self._decode(flight, left + decoding)

    def _next_to_read(self) -> RunningSequence | None:
        """The next whose prompt is to be read, with a row."""
        reading = [seq for seq in self.running if seq.reading]
        while not reading:
            seq = self._admit()
            if seq is None:
                return None
            reading = [seq] if seq.reading else []
        return min(reading, key=lambda seq: rank(seq.handle))

    def _admit(self) -> RunningSequence | None:
        """Give the next request that waits a row, and the pages that it goes on from; None if there
        is no such row, or too few pages for it."""
        handle = self.waiting.first()
        free = [row for row, seq in enumerate(self._by_row) if seq is None]
        if handle is None or len(free) < handle.rows:
            return None
        (row, *others), rows = free[: handle.rows], 1 if self._runner.exact else None
        key = Namespace(handle.request.tenant, self._cache_manager.weights, rows)
        seq = RunningSequence(handle, row, key, others=tuple(others))
        begin: Callable[[RunningSequence, Sequence[RunningSequence]], bool] = (
            self._cache_manager.begin if handle.swapped is None else self._cache_manager.swap_in
        )
        if not begin(seq, self.running):
            return None
        self.waiting.remove(handle)
        for row in seq.rows:
            self._by_row[row] = seq
            self._runner.sampling_state.set(row, handle.request)
        if handle.beams is not None:
            handle.beams.begin()
        if handle.times.admitted is None:
            handle.times.admitted = time.monotonic()
            handle.cached_tokens = seq.filled
            self._counters.requests += 1
            self._counters.prompt_tokens += len(seq.prompt)
            self._counters.cached_tokens += seq.filled
        return seq

    def _room_for(self, seq: RunningSequence, tokens: int) -> bool:
        """Let rows have the pages of so many tokens more: of texts that nobody has, or else of
        requests that come after them; where there are none, they give their own to others. A
        request that is alone has all that there is."""
        pages, end, rows = (
            self._runner.page_tables,
            seq.filled + tokens,
            [row for row, _ in seq.taking],
        )

        if not self._made_room(seq, lambda: pages.wanted(rows, end)):
            return False
        for row in rows:
            pages.extend(row, end)
        return True

    def _made_room(self, seq: RunningSequence, wanted: Callable[[], list[int]]) -> bool:
        """Make so many pages of each kind free for a row, where it keeps its own."""
        while not self._cache_manager.has_room(wanted()):
            others = [x for x in self.running if rank(x.handle) > rank(seq.handle)]
            if others:
                self._preempt(preemption_victim(others))
            elif len(self.running) > 1:
                self._preempt(seq)
                return False
            else:
                self._cache_manager.forget_texts()
        return True

    def _branched(self, seq: RunningSequence) -> bool:
        """Let a search's rows go on from those that it has chosen, whose pages they share; whether
        it kept its rows."""
        beams, rows, pages = seq.handle.beams, seq.rows, self._runner.page_tables
        if beams is None or beams.chosen is None:
            return True
        (tokens, parents), beams.chosen = beams.chosen, None
        pairs = [(rows[parents[n]], rows[n]) for n in beams.going if parents[n] != n]
        for _, row in pairs:
            pages.release(row)
        parts = [
            kind.pages_for(seq.filled)[1] is not None for kind in self._runner.pool_config.groups
        ]
        if not self._made_room(seq, lambda: [len(pairs) * part for part in parts]):
            return False
        copied = [pages.branch(*pair, seq.filled) for pair in pairs]
        newest = [(rows[n], int(tokens[n])) for n in beams.going]
        self._runner.branch(pairs, copied, newest)
        return True

    def _preempt(self, seq: RunningSequence) -> None:
        """Let a request wait, with what it has on the host, or to be computed again."""
        seq.handle.preemptions += 1
        self._counters.preemptions += 1
        # A prompt is read again as fast.
        self._counters.swapped += not seq.reading and self._cache_manager.swap_out(seq)
        if seq.handle.beams is not None:
            seq.handle.beams.rest()
        self._leave(seq)
        self.waiting.add(seq.handle)

    def _leave(self, seq: RunningSequence) -> None:
        self._cache_manager.release(seq)
        for row in seq.rows:
            self._by_row[row] = None

    def _feed(self, flight: InFlightStep, seq: RunningSequence, length: int) -> None:
        """Send a chunk of a prompt, whose pages the row has."""
        report, start = self._runner.feed(seq, length), seq.filled
        seq.filled, seq.fresh = start + length, False
        self._counters.prefill_tokens += length
        self._counters.padding_tokens += self._runner.width(length) - length
        scores = report.prompt
        if scores is None:
            self._cache_manager.keep(seq)
        else:  # by another program, whose last bits may be others
            flight.landing.append(lambda: seq.handle.read(start, scores))
        if seq.reading:
            flight.add(report, [], self._cache_manager.coming())
            return
        flight.add(report, [(0, seq.handle, 0)], self._cache_manager.coming())
        seq.count = 1
        if not seq.left:
            self._leave(seq)

    def _settle(self, seq: RunningSequence) -> None:
        self._counters.accepted_tokens += seq.settled()

    def _check(self, flight: InFlightStep, drafts: list[Draft]) -> None:
        """Send drafts; what comes of them the rows are told when it is back."""
        report, places = self._speculative.send(drafts)
        entries = [
            (at, seq.handle, seq.count) for at, (seq, _, _) in zip(places, drafts, strict=True)
        ]
        flight.add(report, entries, [])
        for seq, count, _ in drafts:
            seq.checking = count
            self._counters.drafted_tokens += count

    def _decode(self, flight: InFlightStep, tokens: int) -> None:
        """Send rounds of decoding of all rows that have read their prompts."""
        some = [seq for seq in self.running if not seq.reading]
        rounds = min(self._runner.rounds, max(tokens // max(len(some), 1), 1))
        for seq in some:
            self._settle(seq)
        load = self._speculative.load(some)
        taking: list[tuple[RunningSequence, int]] = []
        drafts: list[Draft] = []
        for seq in sorted(some, key=lambda seq: rank(seq.handle)):
            count, known = seq.draft(self._speculative.most, load)
            if count and self._by_row[seq.row] is seq and self._room_for(seq, 1 + count):
                drafts.append((seq, count, known))
                continue
            mine = seq.rounds(rounds, self._speculative.most, load)
            # One that comes later may have lost its row to another of these.
            there = mine and self._by_row[seq.row] is seq and self._branched(seq)
            if there and self._room_for(seq, mine):
                taking.append((seq, mine))
        together = self._speculative.together
        for first in range(0, len(drafts), together):
            self._check(flight, drafts[first : first + together])
        taking = [each for each in taking if self._by_row[each[0].row] is each[0]]
        if not taking:
            return
        report, places = self._runner.decode(taking)
        every = [(seq.handle, number) for seq, _ in taking for _, number in seq.taking]
        entries = [(at, *each) for at, each in zip(places, every, strict=True)]
        flight.add(report, entries, self._cache_manager.coming())
        for seq, rounds in taking:
            seq.filled += rounds
            seq.count += rounds
            if not seq.left:
                self._leave(seq)


def preemption_victim(seqs: Sequence[RunningSequence]) -> RunningSequence:
    """The one that the others would rather do without."""
    return max(seqs, key=lambda seq: rank(seq.handle))
