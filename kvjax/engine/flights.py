"""Programs under way, and what comes back of them."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import jax

from kvjax.core.device import fetch
from kvjax.engine.absorbing import taken_in
from kvjax.engine.calls import Report
from kvjax.engine.handle import Handle
from kvjax.engine.stats import Counters

Landing = Callable[[], None]
"""What takes arrays off the device that were on their way to the host."""


@dataclass
class Flight:
    """Programs that were sent together: of each its report, and, of entries of that, whose they
    are, with the new tokens that these had been sent for before, or, of a search, which beam they
    are. ``landing``: what has come too when they have."""

    sent: list[tuple[Report, list[tuple[int, Handle, int]]]] = field(default_factory=list)
    landing: list[Landing] = field(default_factory=list)

    def add(
        self, report: Report, entries: list[tuple[int, Handle, int]], landing: Iterable[Landing]
    ) -> None:
        """One more."""
        for x in jax.tree.leaves(report):
            x.copy_to_host_async()
        for _, handle, _ in entries:
            handle.flying += 1
        self.sent.append((report, entries))
        self.landing += landing


class Flights:
    """In the order in which they were sent.

    ``land``: called with what lands; ``end``: with a request, and why it ends.
    """

    def __init__(
        self, counters: Counters, land: Callable[[list[Landing]], None],
        end: Callable[[Handle, str], None],
    ) -> None:  # fmt: skip
        self._counters, self._land, self._end = counters, land, end
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def add(self, flight: Flight) -> None:
        """One more, if something was sent."""
        if flight.sent:
            self._flights.append(flight)

    def absorb(self, left: int) -> None:
        """Wait for all but so many, and take in what they have chosen."""
        while len(self._flights) > left:
            flight, start = self._flights[0], time.perf_counter()
            # Whoever is interrupted here can go on.
            reports = fetch([report for report, _ in flight.sent])
            self._counters.waiting_seconds += time.perf_counter() - start
            self._flights.popleft()
            self._land(flight.landing)
            for report, (_, entries) in zip(reports, flight.sent, strict=True):
                for at, handle, before in entries:
                    handle.flying -= 1
                    if not handle.done:
                        self._take_in(report, at, handle, before)

    def lost(self) -> list[Handle]:
        """Whose they were, where none of them comes back."""
        flights, self._flights = self._flights, deque()
        return [handle for each in flights for _, entries in each.sent for _, handle, _ in entries]

    def _take_in(self, report: Report, at: int, handle: Handle, before: int) -> None:
        count, reason = taken_in(report, at, handle, before)
        self._counters.new_tokens += count
        if reason is None and count:
            handle.tell()
        if reason is not None or handle.error is not None:
            self._end(handle, reason or "error")
