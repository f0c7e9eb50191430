"""The handle of a submitted request, and how the outputs of programs in flight reach it."""

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
    """The times at which a request reached its stages, from ``time.monotonic``. A time is None
    until the stage is reached."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    newest_token: float | None = None
    finished: float | None = None


class Piece(NamedTuple):
    """New output of a request since the last piece.

    Args:
      text: the new text.
      tokens: the new tokens.
      scores: the log-probabilities of ``tokens``, if requested.
      starts: for each token, the number of characters of the request's text before it.
    """

    text: str
    tokens: list[int]
    scores: list[TokenScore]
    starts: list[int]


@dataclass
class SwappedState:
    """The pages and state of a preempted request's row, copied to the host.

    Attributes:
      length, sampled: as in ``RunningSequence``.
      layers, progress: as returned by ``programs.save_row``.
      columns: for each cache group, the columns of the page table that have pages.
      pages: for each cache group, a function that returns the contents of these pages, one by one.
      nbytes: the size of all this in bytes.
      on_host: whether the copy is complete.
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
      request: the parameters of the request.
      number: 1 for the engine's first request, and so on.

    Attributes:
      error: the exception that ended the request, or None.
      cached_tokens: number of prompt tokens that were found in the prefix cache.
      preemptions: how often the request lost its row and pages to others.
      times: when the request was submitted, admitted, and so on.
      beam_results: the best sequences of a finished beam search, best first. The handle's
        ``tokens`` and ``text`` are taken from the best one.

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
        # The fields below are used by the engine. All sampled tokens, including any after a stop
        # string:
        self.generated: list[int] = []
        # Dispatched programs whose output the request still waits for:
        self.in_flight = 0
        # The state on the host while the request is preempted:
        self.swapped: SwappedState | None = None
        plan = request.draft_plan
        self.drafts = None if plan is None else DraftState(plan, request.tokens)
        self.beams = None if request.search is None else BeamSearchState(request, tokenizer)

    def __repr__(self) -> str:
        state, limit = self.finish_reason or "not done", self.request.max_new_tokens
        return f"Handle({self.number}, {len(self.tokens)} of {limit} tokens, {state})"

    @property
    def rows(self) -> int:
        """The number of rows that the request occupies while it runs."""
        return 1 if self.beams is None else self.beams.width

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._text.finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended: ``"eos"``, ``"stop"``, ``"length"``, ``"cancelled"``,
        ``"deadline"`` or ``"error"``. None until it ends."""
        return self._text.finish_reason

    @property
    def tokens(self) -> list[int]:
        """The request's new tokens."""
        return self._text.tokens

    @property
    def text(self) -> str:
        """The request's new text; empty if the model has no tokenizer."""
        return self._text.text

    @property
    def starts(self) -> list[int]:
        """For each of ``tokens``, the number of characters of ``text`` before it."""
        return self._text.starts()

    @property
    def logprobs(self) -> list[TokenScore] | None:
        """The log-probabilities of ``tokens``, if requested."""
        return None if self.request.logprobs is None else self._scores[: len(self.tokens)]

    @property
    def prompt_logprobs(self) -> list[TokenScore | None] | None:
        """The log-probabilities of the prompt tokens computed so far, if requested. The first entry
        is None, because nothing precedes the first token."""
        return None if self.request.prompt_logprobs is None else [None, *self._prompt_scores]

    def take(self) -> Piece:
        """Return the output since the last ``take``, without text that a stop string may still
        remove."""
        text, tokens = self._text.take()
        start, self._taken = self._taken, self._taken + len(tokens)
        starts = self._text.starts(start)[: len(tokens)]
        return Piece(text, tokens, self._scores[start : self._taken], starts)

    def pieces(
        self, step: Callable[[], object], stepping: AbstractContextManager[object]
    ) -> Iterator[Piece]:
        """Yield the request's output. The iterator calls ``step`` while no output is available. See
        ``Engine.stream``.

        ``stepping`` is the lock that is held during steps.
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
        """Store the scores of prompt tokens. The chunk that begins at token ``start`` gives the
        scores of the token after each of its tokens."""
        most, following = self.request.prompt_logprobs, len(self.request.tokens) - 1 - start
        assert most is not None
        new = token_scores(fetch(scores), 0, 0, max(following, 0), most)
        # After a preemption the prompt is computed again. Keep scores that callers may have read.
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
        """Store the results of the finished beam search, and take the tokens from the best beam."""
        assert self.beams is not None
        self.beam_results = self._call_user(self.beams.results) or []
        for best in self.beam_results[:1]:
            tokens, scores = best.tokens, best.logprobs or []
            self.add_tokens(tokens[:-1], scores[:-1])
            if self.request.guide is not None:
                # In ``allowed``, grammar guides notice that no token can follow.
                self._call_user(self.request.guide.allowed)
            self.add_tokens(tokens[-1:], scores[-1:])

    def finish(self, reason: str) -> None:
        """End the request, unless it has already ended."""
        self._text.finish(reason)
        if self.times.finished is None:
            self.times.finished = time.monotonic()

    def notify(self) -> None:
        """Call the user's callback."""
        if self._callback is not None:
            self._call_user(self._callback, self)

    def token_mask(self, words: int, beam: int = 0) -> np.ndarray | None:
        """Return the mask of the next token, uint32[words]. The bit of a token is set if the guide
        allows it. In a beam search, it is the mask after the beam ``beam``. Returns None without a
        guide."""
        guide = self.request.guide
        if guide is None or self.error is not None:
            return None
        if self.beams is not None:
            return self._call_user(self.beams.token_mask, beam, words)
        return self._call_user(guide_mask, guide, words)

    def set_draft_masks(self, draft: Sequence[int], masks: np.ndarray) -> None:
        """Write the token mask, and the masks after each token of ``draft``, into ``masks``
        (uint32[1 + n, words])."""
        mask = self.token_mask(masks.shape[1])
        if mask is not None:
            masks[0] = mask
            self._call_user(draft_masks, self.request.guide, draft, masks, self.request.eos)

    def _call_user(self, function: Callable[[Unpack[_Args]], _T], *args: *_Args) -> _T | None:
        """Call a user's guide or callback. If it raises, only this request ends."""
        try:
            return function(*args)
        except Exception as error:
            self.error = self.error or error
            return None


Transfer = Callable[[], None]
"""A function that completes a copy to the host, after which the device can free the arrays."""
Entry = tuple[int, Handle, int]
"""A row index in a program's output, the request to which the row belongs, and a number: how many
new tokens the request had before the program or, in a beam search, the index of the beam."""


@dataclass
class InFlightStep:
    """The programs that a step has dispatched, and the transfers that can be completed after
    them."""

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

    ``complete`` is called with the transfers of a step whose outputs have arrived. ``end`` is
    called with a request that has ended, and the reason.
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
        """Add a step, if it has dispatched programs."""
        if step.programs:
            self._steps.append(step)

    def collect(self, remaining: int) -> None:
        """Wait until at most ``remaining`` steps are in flight, and give the outputs of the others
        to their requests."""
        while len(self._steps) > remaining:
            step, start = self._steps[0], time.perf_counter()
            # An interrupt while waiting leaves the step in the queue, so that it is collected
            # later.
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
        """Remove all steps, after a failure. Returns the requests that waited for them."""
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

    Args:
      output: the output of a program, on the host.
      place, handle, before: the parts of an ``Entry``.

    Returns:
      The number of new tokens, and why the request ends; None if it continues. A request that is
      recomputed after a preemption already has some of the tokens, which are not counted.
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
    """Do the work of ``apply_output`` for one row of a beam search, whose tokens are known only at
    the end."""
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
