"""A submitted request: its handle, and its sequence while it occupies rows of the cache."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

import numpy as np
from jaxtyping import PyTree

from kvjax.core.transfer import fetch
from kvjax.engine.beams import BeamResult, BeamSearchState
from kvjax.engine.drafts import AdjustCost, DraftState
from kvjax.engine.request import Request
from kvjax.generation.detokenizer import RowText, Tokenizer
from kvjax.generation.guides.masks import draft_masks, guide_mask
from kvjax.prefixes.radix import Namespace
from kvjax.sampling.scores import Scores, TokenScore, token_scores

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


@dataclass
class Times:
    """When the stages of a request were reached, by ``time.monotonic``; None before that."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    newest_token: float | None = None
    finished: float | None = None


class Piece(NamedTuple):
    """New output of a request since the last piece.

    Args:
      text: new text.
      tokens: new tokens.
      scores: their log-probabilities, if requested.
      starts: for each token, the number of characters of the request's text before it.
    """

    text: str
    tokens: list[int]
    scores: list[TokenScore]
    starts: list[int]


@dataclass
class SwappedState:
    """What a preempted request's row had, copied to the host.

    ``length``, ``sampled``: as in ``RunningSequence``; ``layers``, ``progress``: as from
    ``programs.save_row``; ``columns``: for each cache group, the columns of its page table;
    ``pages``: for each cache group, returns the contents of these pages, one by one; ``nbytes``:
    bytes of all this.
    """

    length: int
    sampled: int
    layers: PyTree
    progress: PyTree
    columns: list[list[int]]
    pages: list[Callable[[], list[list[np.ndarray]]]]
    nbytes: int
    on_host: bool = False

    def finish_copy(self) -> None:
        """Wait for the copy, so that the device can free its arrays."""
        if self.on_host:
            return
        self.on_host = True
        self.layers, self.progress = fetch((self.layers, self.progress))
        for number, read in enumerate(self.pages):
            contents = read()
            self.pages[number] = lambda contents=contents: contents


class Handle:
    """A request that was submitted to an engine.

    Args:
      request: its parameters.
      number: 1 for the engine's first request, and so on.

    Attributes:
      error: the exception that ended the request, else None.
      cached_tokens: prompt tokens that were found in the prefix cache.
      preemptions: how often the request lost its row and pages to others.
      times: when it was submitted, admitted, and so on.
      beam_results: the best sequences of a finished beam search, best first; the
        handle's ``tokens`` and ``text`` come from the best.
    """

    def __init__(
        self,
        request: Request,
        number: int,
        tokenizer: Tokenizer | None,
        callback: "Callable[[Handle], None] | None" = None,
    ) -> None:
        self.request, self.number = request, number
        self.error: Exception | None = None
        self.cached_tokens = self.preemptions = 0
        self.times = Times()
        self.beam_results: list[BeamResult] = []
        self._callback = callback
        self._text = RowText(
            tokenizer,
            request.tokens,
            request.stops,
            least=request.min_new_tokens,
            guided=request.guide is not None,
        )
        self._scores: list[TokenScore] = []
        self._prompt_scores: list[TokenScore] = []
        self._taken = 0
        # State of the engine. All sampled tokens, including any after a stop string:
        self.generated: list[int] = []
        # Dispatched programs whose output the request still waits for:
        self.in_flight = 0
        # What it has on the host while it is preempted:
        self.swapped: SwappedState | None = None
        plan = request.draft_plan
        self.drafts = None if plan is None else DraftState(plan, request.tokens)
        self.beams = None if request.search is None else BeamSearchState(request, tokenizer)

    def __repr__(self) -> str:
        state, limit = self.finish_reason or "not done", self.request.max_new_tokens
        return f"Handle({self.number}, {len(self.tokens)} of {limit} tokens, {state})"

    @property
    def rows(self) -> int:
        """Number of rows that it occupies while it runs."""
        return 1 if self.beams is None else self.beams.width

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._text.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: ``"eos"``, ``"stop"``, ``"length"``, ``"cancelled"``, ``"deadline"`` or
        ``"error"``; None before that."""
        return self._text.finish_reason

    @property
    def tokens(self) -> list[int]:
        """Its new tokens."""
        return self._text.tokens

    @property
    def text(self) -> str:
        """Its new text; empty if the model has no tokenizer."""
        return self._text.text

    @property
    def starts(self) -> list[int]:
        """For each of its ``tokens``, the number of characters of ``text`` before it."""
        return self._text.starts()

    @property
    def logprobs(self) -> list[TokenScore] | None:
        """Log-probabilities of its ``tokens``, if requested."""
        return None if self.request.logprobs is None else self._scores[: len(self.tokens)]

    @property
    def prompt_logprobs(self) -> list[TokenScore | None] | None:
        """Log-probabilities of the prompt tokens that were computed, if requested; None for the
        first token, which follows nothing."""
        return None if self.request.prompt_logprobs is None else [None, *self._prompt_scores]

    def take(self) -> Piece:
        """The output since the last call, without text that a stop string may still remove."""
        text, tokens = self._text.take()
        start, self._taken = self._taken, self._taken + len(tokens)
        starts = self._text.starts(start)[: len(tokens)]
        return Piece(text, tokens, self._scores[start : self._taken], starts)

    def pieces(
        self, step: Callable[[], object], stepping: AbstractContextManager[object]
    ) -> Iterator[Piece]:
        """Yield its output, and call ``step`` when there is none; see ``Engine.stream``.

        ``stepping`` is the lock that steps hold.
        """
        while True:
            with stepping:  # a step in another thread may be adding the last piece
                piece, done = self.take(), self.done
            if piece.text or piece.tokens:
                yield piece
            elif not done:
                step()
            elif self.error is not None:
                raise self.error
            else:
                return

    def add_prompt_scores(self, start: int, scores: Scores) -> None:
        """Store the scores of the prompt tokens that follow the chunk's tokens, from token
        ``start`` on."""
        most, following = self.request.prompt_logprobs, len(self.request.tokens) - 1 - start
        assert most is not None
        new = token_scores(fetch(scores), 0, 0, max(following, 0), most)
        # After preemption the prompt is computed again: keep the scores that callers may have read.
        self._prompt_scores[start : start + len(new)] = new

    def add_tokens(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> None:
        """Append sampled tokens, and advance the guide and the drafts."""
        if self.error is not None:
            return
        self._scores += scores
        for token in tokens:
            self.generated.append(token)
            self._text.push(token)
            if self.request.guide is not None and self.error is None:
                self._call_user(self.request.guide.accept, token)
        if self.drafts is not None:
            self.drafts.push(tokens)
        if tokens:
            now = time.monotonic()
            self.times.first_token = self.times.first_token or now
            self.times.newest_token = now

    def add_beam_results(self) -> None:
        """Store the results of the finished beam search; the best beam gives the tokens."""
        assert self.beams is not None
        self.beam_results = self._call_user(self.beams.results) or []
        for best in self.beam_results[:1]:
            tokens, scores = best.tokens, best.logprobs or []
            self.add_tokens(tokens[:-1], scores[:-1])
            if self.request.guide is not None:
                # Grammar guides notice in ``allowed`` that nothing can follow.
                self._call_user(self.request.guide.allowed)
            self.add_tokens(tokens[-1:], scores[-1:])

    def finish(self, reason: str) -> None:
        """End the request, unless it has ended."""
        self._text.finish(reason)
        if self.times.finished is None:
            self.times.finished = time.monotonic()

    def notify(self) -> None:
        """Call the user's callback."""
        if self._callback is not None:
            self._call_user(self._callback, self)

    def token_mask(self, words: int, beam: int = 0) -> np.ndarray | None:
        """uint32[words]: bits of the tokens that the guide allows next, after a ``beam`` of a
        search; None without a guide."""
        guide = self.request.guide
        if guide is None or self.error is not None:
            return None
        if self.beams is not None:
            return self._call_user(self.beams.token_mask, beam, words)
        return self._call_user(guide_mask, guide, words)

    def set_draft_masks(self, draft: Sequence[int], masks: np.ndarray) -> None:
        """Write the token mask, and those after each token of ``draft``, into uint32[1 + n,
        words]."""
        mask = self.token_mask(masks.shape[1])
        if mask is not None:
            masks[0] = mask
            self._call_user(draft_masks, self.request.guide, draft, masks, self.request.eos)

    def _call_user(self, function: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T | None:
        """Call a guide or callback of the user. If it raises, only this request ends."""
        try:
            return function(*args)
        except Exception as error:
            self.error = self.error or error
            return None


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
