"""A submitted request: its handle, and programs in flight whose outputs reach it."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, TypeVarTuple, Unpack

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.core.transfer import fetch
from kvjax.core.validation import NonFiniteError
from kvjax.engine.beams import BeamResult, BeamSearchState
from kvjax.engine.drafts import DraftState
from kvjax.engine.programs import ProgramOutput
from kvjax.engine.request import Request
from kvjax.engine.stats import Counters
from kvjax.generation.detokenizer import RowText, Tokenizer
from kvjax.generation.guides.masks import draft_masks, guide_mask
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

    Example:
      ```python
      limits = kvjax.memory.InferenceLimits(max_batch_size=4, max_seq_len=256)
      engine = kvjax.Engine(lm, limits=limits)
      handle = engine.submit("The json module", max_new_tokens=8)
      for piece in engine.stream(handle):
          print(piece.text, end="")
      ```
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
        """Store the scores of the prompt tokens that follow the tokens of a chunk, which begins at
        token ``start``."""
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


Transfer = Callable[[], None]
"""Completes a copy to the host that was started before, so that the device can free the arrays."""
Entry = tuple[int, Handle, int]
"""A place in a program's output, the request it is for, and the request's number of new tokens
before the program, or the beam."""


@dataclass
class InFlightStep:
    """The programs that a step has dispatched, and transfers that complete with them."""

    programs: list[tuple[ProgramOutput, list[Entry]]] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)

    def add(
        self, output: ProgramOutput, entries: list[Entry], transfers: Iterable[Transfer]
    ) -> None:
        """Add a program, and start the copy of its output to the host."""
        for x in jax.tree.leaves(output):
            x.copy_to_host_async()
        for _, handle, _ in entries:
            handle.in_flight += 1
        self.programs.append((output, entries))
        self.transfers += transfers


class InFlightSteps:
    """Steps in flight, oldest first.

    ``complete``: called with the transfers of a step that has come back; ``end``: called with a
    request that has ended, and its reason.
    """

    def __init__(
        self,
        counters: Counters,
        complete: Callable[[list[Transfer]], None],
        end: Callable[[Handle, str], None],
    ) -> None:
        self._counters, self._complete, self._end = counters, complete, end
        self._steps: deque[InFlightStep] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: InFlightStep) -> None:
        """Add a step, unless it has dispatched nothing."""
        if step.programs:
            self._steps.append(step)

    def collect(self, remaining: int) -> None:
        """Wait until at most ``remaining`` steps are in flight, and pass on their outputs."""
        while len(self._steps) > remaining:
            step, start = self._steps[0], time.perf_counter()
            # An interrupt while waiting leaves the step in place, to be collected later.
            outputs = fetch([output for output, _ in step.programs])
            self._counters.waiting_seconds += time.perf_counter() - start
            self._steps.popleft()
            self._complete(step.transfers)
            for output, (_, entries) in zip(outputs, step.programs, strict=True):
                for place, handle, before in entries:
                    handle.in_flight -= 1
                    if not handle.done:
                        self._apply(output, place, handle, before)

    def abandon(self) -> list[Handle]:
        """Forget all steps after a failure. Returns the requests that waited for them."""
        steps, self._steps = self._steps, deque()
        return [
            handle for step in steps for _, entries in step.programs for _, handle, _ in entries
        ]

    def _apply(self, output: ProgramOutput, place: int, handle: Handle, before: int) -> None:
        count, reason = apply_output(output, place, handle, before)
        self._counters.new_tokens += count
        if reason is None and count:
            handle.notify()
        if reason is not None or handle.error is not None:
            self._end(handle, reason or "error")


def apply_output(
    output: ProgramOutput, place: int, handle: Handle, before: int
) -> tuple[int, str | None]:
    """Give a request its new tokens.

    ``output``: ``ProgramOutput`` on the host; ``before``: the third item of ``Entry``. A request
    that is computed again after a preemption has some of the tokens already. Returns the number of
    new tokens, and why the request ends, None if it continues.
    """
    if handle.beams is not None:
        return _apply_beam(output, place, handle, handle.beams, before)
    count, known = int(output.count[place]) - before, max(len(handle.generated) - before, 0)
    tokens, most = output.tokens[place, known:count].tolist(), handle.request.logprobs
    scores = [] if most is None else token_scores(output.scores, place, known, count, most)
    handle.add_tokens(tokens, scores)
    if output.broken[place]:
        return len(tokens), _set_non_finite(handle, len(handle.generated))
    if handle.done:
        return len(tokens), "stop"
    if output.done[place] and len(handle.generated) == int(output.count[place]):
        ended = handle.generated[-1] in handle.request.eos
        return len(tokens), "eos" if ended else "length"
    return len(tokens), None


def _apply_beam(
    output: ProgramOutput, place: int, handle: Handle, beams: BeamSearchState, beam: int
) -> tuple[int, str | None]:
    """``apply_output`` for one row of a beam search, whose tokens are known only at the end."""
    if not beams.running:
        return 0, None
    if output.broken[place]:
        return 0, _set_non_finite(handle, int(output.count[place]))
    if not beams.add_candidates(output.scores, place, beam):
        return 1, None
    handle.add_beam_results()
    return 1, handle.beam_results[0].finish_reason if handle.beam_results else "error"


def _set_non_finite(handle: Handle, count: int) -> str:
    handle.error = NonFiniteError(
        f"the logits are not finite after {count} new tokens; no token was sampled from them"
    )
    return "error"
