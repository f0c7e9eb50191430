"""Programs under way, and what comes back of them."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import jax

from kvjax.core.errors import NonFiniteError
from kvjax.core.transfer import fetch
from kvjax.engine.beams import BeamSearchState
from kvjax.engine.handle import Handle
from kvjax.engine.programs import ProgramOutput
from kvjax.engine.stats import Counters
from kvjax.sampling.scores import token_scores

Landing = Callable[[], None]
"""What takes arrays off the device that were on their way to the host."""


@dataclass
class InFlightStep:
    """Programs that were sent together: of each its report, and, of entries of that, whose they
    are, with the new tokens that these had been sent for before, or, of a search, which beam they
    are. ``landing``: what has come too when they have."""

    sent: list[tuple[ProgramOutput, list[tuple[int, Handle, int]]]] = field(default_factory=list)
    landing: list[Landing] = field(default_factory=list)

    def add(
        self,
        report: ProgramOutput,
        entries: list[tuple[int, Handle, int]],
        landing: Iterable[Landing],
    ) -> None:
        """One more."""
        for x in jax.tree.leaves(report):
            x.copy_to_host_async()
        for _, handle, _ in entries:
            handle.in_flight += 1
        self.sent.append((report, entries))
        self.landing += landing


class InFlightSteps:
    """In the order in which they were sent.

    ``land``: called with what lands; ``end``: with a request, and why it ends.
    """

    def __init__(
        self,
        counters: Counters,
        land: Callable[[list[Landing]], None],
        end: Callable[[Handle, str], None],
    ) -> None:
        self._counters, self._land, self._end = counters, land, end
        self._in_flight: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    def add(self, flight: InFlightStep) -> None:
        """One more, if something was sent."""
        if flight.sent:
            self._in_flight.append(flight)

    def absorb(self, left: int) -> None:
        """Wait for all but so many, and take in what they have chosen."""
        while len(self._in_flight) > left:
            flight, start = self._in_flight[0], time.perf_counter()
            # Whoever is interrupted here can go on.
            reports = fetch([report for report, _ in flight.sent])
            self._counters.waiting_seconds += time.perf_counter() - start
            self._in_flight.popleft()
            self._land(flight.landing)
            for report, (_, entries) in zip(reports, flight.sent, strict=True):
                for at, handle, before in entries:
                    handle.in_flight -= 1
                    if not handle.done:
                        self._take_in(report, at, handle, before)

    def lost(self) -> list[Handle]:
        """Whose they were, where none of them comes back."""
        flights, self._in_flight = self._in_flight, deque()
        return [handle for each in flights for _, entries in each.sent for _, handle, _ in entries]

    def _take_in(self, report: ProgramOutput, at: int, handle: Handle, before: int) -> None:
        count, reason = taken_in(report, at, handle, before)
        self._counters.new_tokens += count
        if reason is None and count:
            handle.tell()
        if reason is not None or handle.error is not None:
            self._end(handle, reason or "error")


def taken_in(report: Any, at: int, handle: Handle, before: int) -> tuple[int, str | None]:
    """Give a request the tokens that an entry of a report has for it, behind those that it had been
    sent for ``before``: of one that is computed again some are known. How many were new, and why it
    has ended, None where it has not.

    ``report``: ``programs.ProgramOutput``, on the host.
    """
    if handle.beams is not None:
        return _searched(report, at, handle, handle.beams, before)
    count, known = int(report.count[at]) - before, max(len(handle.drawn) - before, 0)
    tokens, most = report.tokens[at, known:count].tolist(), handle.request.scores
    told = [] if most is None else token_scores(report.scores, at, known, count, most)
    handle.pushed(tokens, told)
    if report.broken[at]:
        return len(tokens), _broken(handle, len(handle.drawn))
    if handle.done:
        return len(tokens), "stop"
    if report.done[at] and len(handle.drawn) == int(report.count[at]):
        return len(tokens), "eos" if handle.drawn[-1] in handle.request.eos else "length"
    return len(tokens), None


def _searched(
    report: Any, at: int, handle: Handle, beams: BeamSearchState, beam: int
) -> tuple[int, str | None]:
    """``taken_in`` of one of a search's beams: its texts are known at its end alone."""
    if not beams.running:
        return 0, None
    if report.broken[at]:
        return 0, _broken(handle, int(report.count[at]))
    if not beams.take_in(report.scores, at, beam):
        return 1, None
    handle.searched()
    return 1, handle.beam_results[0].reason if handle.beam_results else "error"


def _broken(handle: Handle, count: int) -> str:
    handle.error = NonFiniteError(
        f"the logits are not finite numbers after {count} new tokens; nothing was drawn from them"
    )
    return "error"
