"""A request as it goes: what it has so far, and where it stands."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kvjax.core.transfer import fetch
from kvjax.engine.beams import BeamResult, BeamSearchState
from kvjax.engine.drafts import DraftState
from kvjax.engine.request import Request
from kvjax.generation.detokenizer import RowText, Tokenizer
from kvjax.generation.guides.masks import draft_masks, guide_mask
from kvjax.sampling.scores import Scores, TokenScore, token_scores


@dataclass
class Times:
    """When what happened to a request, by ``time.monotonic``; None for what has not."""

    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    newest_token: float | None = None
    finished: float | None = None


class Piece(NamedTuple):
    """What a request has come to since it was last asked: text, tokens, and what is known of these,
    where that was asked for; ``starts``: of each token, the characters of the text before it."""

    text: str
    tokens: list[int]
    scores: list[TokenScore]
    starts: list[int]


class Handle:
    """A request that an engine has: its text so far, and why it ended.

    ``request``: what was asked for. ``error``: why it could not go on, else None.
    ``cached_tokens``: of its prompt, those that were not computed for it. ``preemptions``: how
    often it gave its memory to others. ``times``: when what happened. ``beam_results``: the best
    texts of a beam search, when it has come to its end; the best one is the request's own.
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
        self._text, self._callback = _row_text(request, tokenizer), callback
        self._scores: list[TokenScore] = []
        self._prompt_scores: list[TokenScore] = []
        self._told = 0
        self.beam_results: list[BeamResult] = []
        # The engine's own: all tokens that were chosen, those behind a stop string among them;
        # programs under way that it is in; what it has on the host while it waits; its drafts.
        self.drawn: list[int] = []
        self.in_flight = 0
        self.swapped: Any = None
        drafting = request.drafting
        self.drafts = None if drafting is None else DraftState(drafting, request.tokens)
        self.beams = None if request.search is None else BeamSearchState(request, tokenizer)

    def __repr__(self) -> str:
        state = self.reason or "not done"
        return f"Handle({self.number}, {len(self.tokens)} of {self.request.limit} tokens, {state})"

    @property
    def rows(self) -> int:
        """Of the engine, that it takes."""
        return 1 if self.beams is None else self.beams.width

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._text.reason is not None

    @property
    def reason(self) -> str | None:
        """Why it ended: ``"eos"``, ``"stop"``, ``"length"``, ``"cancelled"``, ``"deadline"`` or
        ``"error"``; None while it has not."""
        return self._text.reason

    @property
    def tokens(self) -> list[int]:
        """Its new tokens."""
        return self._text.tokens

    @property
    def text(self) -> str:
        """Its new text; empty where the model has no tokenizer."""
        return self._text.text

    @property
    def starts(self) -> list[int]:
        """Of each of its ``tokens``, the characters of ``text`` before it."""
        return self._text.starts()

    @property
    def logprobs(self) -> list[TokenScore] | None:
        """Of each of its ``tokens``, where they were asked for."""
        return None if self.request.scores is None else self._scores[: len(self.tokens)]

    @property
    def prompt_logprobs(self) -> list[TokenScore | None] | None:
        """Of each token of its prompt that was read, where they were asked for; None of the first,
        which follows nothing."""
        return None if self.request.prompt_scores is None else [None, *self._prompt_scores]

    def read(self, start: int, scores: Scores) -> None:
        """Store the scores of the prompt's tokens that follow token ``start``."""
        most, following = self.request.prompt_scores, len(self.request.tokens) - 1 - start
        assert most is not None
        found = token_scores(fetch(scores), 0, 0, max(following, 0), most)
        # A request that is computed again has later scores already, which callers may have read.
        self._prompt_scores[start : start + len(found)] = found

    def take(self) -> Piece:
        """What nothing can take back any more, since the last call."""
        text, tokens = self._text.take()
        told, self._told = self._told, self._told + len(tokens)
        starts = self._text.starts(told)[: len(tokens)]
        return Piece(text, tokens, self._scores[told : self._told], starts)

    def pieces(
        self, step: Callable[[], Any], stepping: AbstractContextManager[Any]
    ) -> Iterator[Piece]:
        """Its text as it comes by steps, which hold ``stepping``; see ``Engine.stream``."""
        while True:
            with stepping:  # another thread's step may be giving it its last piece
                piece, done = self.take(), self.done
            if piece.text or piece.tokens:
                yield piece
            elif not done:
                step()
            elif self.error is not None:
                raise self.error
            else:
                return

    def pushed(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> None:
        """Take in what was chosen, while its guide says what may be."""
        if self.error is not None:
            return
        self._scores += scores
        for token in tokens:
            self.drawn.append(token)
            self._text.push(token)
            if self.request.guide is not None and self.error is None:
                self._tried(self.request.guide.accept, token)
        if self.drafts is not None:
            self.drafts.push(tokens)
        if tokens:
            now = time.monotonic()
            self.times.first_token = self.times.first_token or now
            self.times.newest_token = now

    def searched(self) -> None:
        """Take in what its search has found."""
        assert self.beams is not None
        self.beam_results = self._tried(self.beams.results) or []
        for best in self.beam_results[:1]:
            tokens, told = best.tokens, best.logprobs or []
            self.pushed(tokens[:-1], told[:-1])
            if self.request.guide is not None:
                # That it can't go on it knows where it is asked.
                self._tried(self.request.guide.allowed)
            self.pushed(tokens[-1:], told[-1:])

    def finish(self, reason: str) -> None:
        """End it, unless it has ended."""
        self._text.finish(reason)
        if self.times.finished is None:
            self.times.finished = time.monotonic()

    def tell(self) -> None:
        """Tell whoever listens that there is something new."""
        if self._callback is not None:
            self._tried(self._callback, self)

    def allowed(self, words: int, beam: int = 0) -> Any:
        """uint32[words]: bits of the tokens that may come next, of a search behind a beam, where it
        is guided; or None."""
        guide = self.request.guide

        def found() -> np.ndarray:
            assert guide is not None
            if self.beams is not None:
                return self.beams.allowed(beam, words)
            return guide_mask(guide, words)

        return None if guide is None or self.error is not None else self._tried(found)

    def allow_along(self, draft: Sequence[int], found: np.ndarray) -> None:
        """Into uint32[1 + n, words]: what ``allowed`` gives, and what it would behind each token of
        a draft."""
        bits = self.allowed(found.shape[1])
        if bits is not None:
            found[0] = bits
            self._tried(draft_masks, self.request.guide, draft, found, self.request.eos)

    def _tried(self, call: Callable[..., Any], *args: Any) -> Any:
        """What a user's function gives; one that raises ends its own request, and no other."""
        try:
            return call(*args)
        except Exception as error:
            self.error = self.error or error
            return None


def _row_text(request: Request, tokenizer: Tokenizer | None) -> RowText:
    """The text of a request, before its first token."""
    guided = request.guide is not None
    return RowText(tokenizer, request.tokens, request.stops, least=request.least, guided=guided)
