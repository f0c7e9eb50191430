"""Requests that have a row, and those that wait for one."""

import math
from dataclasses import dataclass, field

from kvjax.engine.drafts import Load
from kvjax.engine.handle import Handle
from kvjax.prefixes.radix import Namespace


@dataclass
class RunningSequence:
    """A request in a row.

    ``filled``: tokens that the row has, when all that was sent has run, unless it ends before;
    ``count``: new tokens that were sent for, so; ``fresh``: whether nothing was sent for it yet;
    ``stops``: where its state is to be kept; ``key``: among whose texts; ``checking``: tokens
    of a draft that were sent, of which nobody knows how many are taken: until that is back,
    ``filled`` and ``count`` are those before it; ``read``: tokens of its text that the engine's
    draft has in its cache; ``others``: rows of further beams, all as long as the first.
    """

    handle: Handle
    row: int
    key: Namespace
    stops: set[int] = field(default_factory=set)
    filled: int = 0
    count: int = 0
    fresh: bool = True
    checking: int = 0
    read: int = 0
    others: tuple[int, ...] = ()

    @property
    def prompt(self) -> list[int]:
        """The tokens of its prompt."""
        return self.handle.request.tokens

    @property
    def rows(self) -> list[int]:
        """All that it has."""
        return [self.row, *self.others]

    @property
    def taking(self) -> list[tuple[int, int]]:
        """The rows that take part in what is sent next, with what an ``InFlightStep`` notes."""
        beams, rows = self.handle.beams, self.rows
        if beams is None:
            return [(self.row, self.count)]
        return [(rows[beam], beam) for beam in beams.going]

    @property
    def reading(self) -> bool:
        """Whether its prompt has not been sent whole."""
        return self.filled < len(self.prompt)

    @property
    def left(self) -> int:
        """New tokens that may yet be asked for."""
        return self.handle.request.limit - self.count

    def rounds(self, most: int, drafted: int, load: Load) -> int:
        """How many rounds it takes part in: a search, and one that is guided, waits for each of its
        tokens, the latter but for those that are known from before, and one with drafts, of at most
        so many ``drafted`` tokens, for all that was sent."""
        handle, most = self.handle, min(most, self.left)
        if self.checking:
            return 0
        if handle.beams is not None:
            return 0 if handle.in_flight else 1
        guided, drafts = handle.request.guide is not None, handle.drafts
        if not guided and (drafts is None or drafts.idle(drafted, load)):
            return most
        known = len(handle.drawn) - self.count
        if known > 0 or handle.in_flight:
            return min(most, max(known, 0))
        return min(most, 1) if guided else most

    def takes(self, most: int, load: Load) -> float:
        """What its tokens take with drafts, of what they take without: see ``DraftState.takes``."""
        drafts = self.handle.drafts
        known = not self.handle.in_flight
        return math.inf if drafts is None else drafts.takes(min(most, self.left - 1), load, known)

    def draft(self, most: int, load: Load) -> tuple[int, list[int]]:
        """How many drafted tokens to check next, at most so many, and which, where that is known:
        none where the text's own are known, or under way."""
        handle = self.handle
        if handle.drafts is None or handle.in_flight or len(handle.drawn) > self.count:
            return 0, []
        return handle.drafts.next(min(most, self.left - 1), load)

    def settled(self) -> int:
        """Take in how much of a draft was taken, if that is back: of its tokens so many."""
        if not self.checking or self.handle.in_flight:
            return 0
        taken, sent = len(self.handle.drawn) - self.count, self.checking
        self.checking, self.filled, self.count = 0, self.filled + taken, self.count + taken
        accepted = max(taken - 1, 0)
        if self.handle.drafts is not None:
            self.handle.drafts.checked(sent, accepted)
            if self.handle.drafts.by_model:  # which has not read what it proposed last
                self.read += min(accepted, sent - 1)
        return accepted

    def forced(self, rounds: int) -> list[int]:
        """The next tokens, where they are known from before, else -1."""
        known = self.handle.drawn[self.count : self.count + rounds]
        return [*known, *[-1] * (rounds - len(known))]
