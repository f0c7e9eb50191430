"""A request while it occupies a row of the cache."""

import math
from dataclasses import dataclass, field

from kvjax.engine.drafts import AdjustCost
from kvjax.engine.handle import Handle
from kvjax.prefixes.radix import Namespace


@dataclass
class RunningSequence:
    """A request that has a row, or one row for each beam.

    ``length`` and ``sampled`` describe the row once all dispatched programs have run, assuming that
    it does not end before. While a draft is being verified they are the values before it, since the
    host does not know yet how many of its tokens will be accepted.

    Args:
      handle: the request.
      row: its row, or the first beam's row.
      namespace: which part of the prefix cache it shares.
      checkpoints: prompt lengths at which its state is stored in the prefix cache.
      length: tokens that the row has in the cache.
      sampled: new tokens.
      fresh: whether no program was dispatched for it yet.
      verifying: number of drafted tokens whose verification is in flight.
      draft_length: tokens that the draft model's row has in its cache.
      beam_rows: rows of the other beams, which are as long as the first.
    """

    handle: Handle
    row: int
    namespace: Namespace
    checkpoints: set[int] = field(default_factory=set)
    length: int = 0
    sampled: int = 0
    fresh: bool = True
    verifying: int = 0
    draft_length: int = 0
    beam_rows: tuple[int, ...] = ()

    @property
    def prompt(self) -> list[int]:
        """The tokens of its prompt."""
        return self.handle.request.tokens

    @property
    def rows(self) -> list[int]:
        """All its rows."""
        return [self.row, *self.beam_rows]

    @property
    def entries(self) -> list[tuple[int, int]]:
        """The rows that take part in the next dispatch; each with the number that ``InFlightStep``
        keeps: the count of new tokens, or the beam."""
        beams, rows = self.handle.beams, self.rows
        if beams is None:
            return [(self.row, self.sampled)]
        return [(rows[beam], beam) for beam in beams.active]

    @property
    def prefilling(self) -> bool:
        """Whether part of its prompt has not been dispatched."""
        return self.length < len(self.prompt)

    @property
    def remaining(self) -> int:
        """New tokens that may still be dispatched."""
        return self.handle.request.max_new_tokens - self.sampled

    def rounds(self, limit: int, max_draft: int, adjust: AdjustCost) -> int:
        """How many rounds of decoding to dispatch, at most ``limit``.

        A beam search waits for each of its tokens. So does a request with a guide, except for
        tokens that are known from before a preemption. A request that is about to draft waits for
        everything in flight.
        """
        handle, limit = self.handle, min(limit, self.remaining)
        if self.verifying:
            return 0
        if handle.beams is not None:
            return 0 if handle.in_flight else 1
        guided, drafts = handle.request.guide is not None, handle.drafts
        if not guided and (drafts is None or drafts.idle(max_draft, adjust)):
            return limit
        known = len(handle.generated) - self.sampled
        if known > 0 or handle.in_flight:
            return min(limit, max(known, 0))
        return min(limit, 1) if guided else limit

    def relative_cost(self, max_draft: int, adjust: AdjustCost) -> float:
        """The cost of its tokens with drafts relative to the cost without; see ``DraftState``."""
        drafts = self.handle.drafts
        if drafts is None:
            return math.inf
        limit = min(max_draft, self.remaining - 1)
        return drafts.relative_cost(limit, adjust, known=not self.handle.in_flight)

    def next_draft(self, max_draft: int, adjust: AdjustCost) -> tuple[int, list[int]]:
        """How many drafted tokens to verify next, and the tokens if they were looked up. None while
        a program is in flight, or while tokens are known from before a preemption."""
        handle = self.handle
        if handle.drafts is None or handle.in_flight or len(handle.generated) > self.sampled:
            return 0, []
        return handle.drafts.next(min(max_draft, self.remaining - 1), adjust)

    def settle_draft(self) -> int:
        """Update the lengths once a verification has come back. Returns how many drafted tokens
        were accepted."""
        if not self.verifying or self.handle.in_flight:
            return 0
        new, drafted = len(self.handle.generated) - self.sampled, self.verifying
        self.verifying, self.length, self.sampled = 0, self.length + new, self.sampled + new
        accepted = max(new - 1, 0)
        if self.handle.drafts is not None:
            self.handle.drafts.record(drafted, accepted)
            if self.handle.drafts.by_model:  # whose cache lacks the last token that it proposed
                self.draft_length += min(accepted, drafted - 1)
        return accepted

    def forced(self, rounds: int) -> list[int]:
        """The next ``rounds`` tokens: those known from before a preemption, then -1."""
        known = self.handle.generated[self.sampled : self.sampled + rounds]
        return [*known, *[-1] * (rounds - len(known))]
