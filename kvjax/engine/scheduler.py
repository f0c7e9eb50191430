"""Who is sent next: chunks of prompts between rounds of decoding, within a number of tokens."""

import time
from collections.abc import Callable, Sequence

from kvjax.engine.checks import Checks, Draft
from kvjax.engine.flights import Flight
from kvjax.engine.handle import Handle
from kvjax.engine.memory import Memory
from kvjax.engine.rows import Rows
from kvjax.engine.slots import Slot, Waiting, rank, youngest
from kvjax.engine.stats import Counters
from kvjax.prefixes.nodes import Key


class Scheduler:
    """Requests with a row and without. A step sends, of the requests in their order, chunks of
    prompts, each the whole or up to the end, and as many rounds of decoding of all the others as
    ``step_tokens`` leave, one at least.

    Nothing is known here of what the device has chosen: a row counts as if it went on, until
    ``end`` is told. Whoever has asked for all that its request may have gives its row back at once.
    """

    def __init__(
        self, rows: Rows, memory: Memory, checks: Checks, step_tokens: int, counters: Counters
    ) -> None:
        self._rows, self._memory, self._tokens = rows, memory, step_tokens
        self._checks, self._counters = checks, counters
        self._slots: list[Slot | None] = [None] * rows.count
        self.waiting = Waiting()

    @property
    def running(self) -> list[Slot]:
        """Requests that have a row."""
        own = enumerate(self._slots)
        return [slot for row, slot in own if slot is not None and slot.row == row]

    @property
    def handles(self) -> list[Handle]:
        """All requests."""
        return [*self.waiting, *(slot.handle for slot in self.running)]

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
        self._memory.forget(handle)
        for slot in self.running:
            if slot.handle is handle:
                self._settle(slot)
                self._leave(slot)

    def send(self, flight: Flight) -> None:
        """Send a step's programs; none where there is nothing to do."""
        decoding = sum(not slot.reading for slot in self.running)
        left = self._tokens - decoding
        while (slot := self._next_to_read()) is not None:
            length = min(len(slot.prompt) - slot.filled, self._rows.terms.prefill_chunk)
            width = self._rows.width(length)
            if width > left:
                break
            if not self._room_for(slot, length):
                break
            self._feed(flight, slot, length)
            left -= width
        self._decode(flight, left + decoding)

    def _next_to_read(self) -> Slot | None:
        """The next whose prompt is to be read, with a row."""
        reading = [slot for slot in self.running if slot.reading]
        while not reading:
            slot = self._admit()
            if slot is None:
                return None
            reading = [slot] if slot.reading else []
        return min(reading, key=lambda slot: rank(slot.handle))

    def _admit(self) -> Slot | None:
        """Give the next request that waits a row, and the pages that it goes on from; None if there
        is no such row, or too few pages for it."""
        handle = self.waiting.first()
        free = [row for row, slot in enumerate(self._slots) if slot is None]
        if handle is None or len(free) < handle.rows:
            return None
        (row, *others), rows = free[: handle.rows], 1 if self._rows.exact else None
        key = Key(handle.request.tenant, self._memory.weights, rows)
        slot = Slot(handle, row, key, others=tuple(others))
        begin: Callable[[Slot, Sequence[Slot]], bool] = (
            self._memory.begin if handle.parked is None else self._memory.resume
        )
        if not begin(slot, self.running):
            return None
        self.waiting.remove(handle)
        for row in slot.rows:
            self._slots[row] = slot
            self._rows.board.set(row, handle.request)
        if handle.beams is not None:
            handle.beams.begin()
        if handle.times.admitted is None:
            handle.times.admitted = time.monotonic()
            handle.cached_tokens = slot.filled
            self._counters.requests += 1
            self._counters.prompt_tokens += len(slot.prompt)
            self._counters.cached_tokens += slot.filled
        return slot

    def _room_for(self, slot: Slot, tokens: int) -> bool:
        """Let rows have the pages of so many tokens more: of texts that nobody has, or else of
        requests that come after them; where there are none, they give their own to others. A
        request that is alone has all that there is."""
        pages, end, rows = self._rows.pages, slot.filled + tokens, [row for row, _ in slot.taking]

        if not self._made_room(slot, lambda: pages.wanted(rows, end)):
            return False
        for row in rows:
            pages.extend(row, end)
        return True

    def _made_room(self, slot: Slot, wanted: Callable[[], list[int]]) -> bool:
        """Make so many pages of each kind free for a row, where it keeps its own."""
        while not self._memory.has_room(wanted()):
            others = [x for x in self.running if rank(x.handle) > rank(slot.handle)]
            if others:
                self._preempt(youngest(others))
            elif len(self.running) > 1:
                self._preempt(slot)
                return False
            else:
                self._memory.forget_texts()
        return True

    def _branched(self, slot: Slot) -> bool:
        """Let a search's rows go on from those that it has chosen, whose pages they share; whether
        it kept its rows."""
        beams, rows, pages = slot.handle.beams, slot.rows, self._rows.pages
        if beams is None or beams.chosen is None:
            return True
        (tokens, parents), beams.chosen = beams.chosen, None
        pairs = [(rows[parents[n]], rows[n]) for n in beams.going if parents[n] != n]
        for _, row in pairs:
            pages.release(row)
        parts = [kind.needed(slot.filled)[1] is not None for kind in self._rows.terms.kinds]
        if not self._made_room(slot, lambda: [len(pairs) * part for part in parts]):
            return False
        copied = [pages.branch(*pair, slot.filled) for pair in pairs]
        newest = [(rows[n], int(tokens[n])) for n in beams.going]
        self._rows.branch(pairs, copied, newest)
        return True

    def _preempt(self, slot: Slot) -> None:
        """Let a request wait, with what it has on the host, or to be computed again."""
        slot.handle.preemptions += 1
        self._counters.preemptions += 1
        # A prompt is read again as fast.
        self._counters.parked += not slot.reading and self._memory.park(slot)
        if slot.handle.beams is not None:
            slot.handle.beams.rest()
        self._leave(slot)
        self.waiting.add(slot.handle)

    def _leave(self, slot: Slot) -> None:
        self._memory.release(slot)
        for row in slot.rows:
            self._slots[row] = None

    def _feed(self, flight: Flight, slot: Slot, length: int) -> None:
        """Send a chunk of a prompt, whose pages the row has."""
        report, start = self._rows.feed(slot, length), slot.filled
        slot.filled, slot.fresh = start + length, False
        self._counters.prefill_tokens += length
        self._counters.padding_tokens += self._rows.width(length) - length
        scores = report.prompt
        if scores is None:
            self._memory.keep(slot)
        else:  # by another program, whose last bits may be others
            flight.landing.append(lambda: slot.handle.read(start, scores))
        if slot.reading:
            flight.add(report, [], self._memory.coming())
            return
        flight.add(report, [(0, slot.handle, 0)], self._memory.coming())
        slot.count = 1
        if not slot.left:
            self._leave(slot)

    def _settle(self, slot: Slot) -> None:
        self._counters.accepted_tokens += slot.settled()

    def _check(self, flight: Flight, drafts: list[Draft]) -> None:
        """Send drafts; what comes of them the rows are told when it is back."""
        report, places = self._checks.send(drafts)
        entries = [
            (at, slot.handle, slot.count) for at, (slot, _, _) in zip(places, drafts, strict=True)
        ]
        flight.add(report, entries, [])
        for slot, count, _ in drafts:
            slot.checking = count
            self._counters.drafted_tokens += count

    def _decode(self, flight: Flight, tokens: int) -> None:
        """Send rounds of decoding of all rows that have read their prompts."""
        some = [slot for slot in self.running if not slot.reading]
        rounds = min(self._rows.rounds, max(tokens // max(len(some), 1), 1))
        for slot in some:
            self._settle(slot)
        load = self._checks.load(some)
        taking: list[tuple[Slot, int]] = []
        drafts: list[Draft] = []
        for slot in sorted(some, key=lambda slot: rank(slot.handle)):
            count, known = slot.draft(self._checks.most, load)
            if count and self._slots[slot.row] is slot and self._room_for(slot, 1 + count):
                drafts.append((slot, count, known))
                continue
            mine = slot.rounds(rounds, self._checks.most, load)
            # One that comes later may have lost its row to another of these.
            there = mine and self._slots[slot.row] is slot and self._branched(slot)
            if there and self._room_for(slot, mine):
                taking.append((slot, mine))
        together = self._checks.together
        for first in range(0, len(drafts), together):
            self._check(flight, drafts[first : first + together])
        taking = [each for each in taking if self._slots[each[0].row] is each[0]]
        if not taking:
            return
        report, places = self._rows.decode(taking)
        every = [(slot.handle, number) for slot, _ in taking for _, number in slot.taking]
        entries = [(at, *each) for at, each in zip(places, every, strict=True)]
        flight.add(report, entries, self._memory.coming())
        for slot, rounds in taking:
            slot.filled += rounds
            slot.count += rounds
            if not slot.left:
                self._leave(slot)
