"""The answer to a request: whole, or piece by piece as server-sent events."""

import secrets
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from kvjax.core.errors import KvjaxError
from kvjax.engine.beams import BeamResult
from kvjax.engine.handle import Handle, Piece
from kvjax.engine.service import Service, StoppedError
from kvjax.generation.best_of import best_rows
from kvjax.serve.choices import pieces_of
from kvjax.serve.echoes import Echo
from kvjax.serve.errors import Refused, to_json
from kvjax.serve.form import Form, Scored, with_scores
from kvjax.serve.parse_request import Asked

_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}


class Answer:
    """What a request is answered, by its handles, one a sample."""

    def __init__(
        self, service: Service, form: Form, asked: Asked, handles: Sequence[Handle], model: str
    ) -> None:
        self._service, self._form, self._asked, self._handles = service, form, asked, handles
        self._begun: set[int] = set()
        self._head = {
            "id": form.prefix + secrets.token_hex(12), "object": form.whole,
            "created": int(time.time()), "model": model,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        """At the end of all choices.

        Raises:
          Refused: if one of them could not be brought to its end.
        """
        async with aclosing(self._pieces()) as pieces:
            async for _ in pieces:
                pass
        choices = []
        for at, (handle, each, why) in enumerate(self._given()):
            text, scored = self._echoed(handle)
            if self._asked.limit:
                text += each.text
                scored += self._scored(handle, each, each.logprobs)
            choices.append(self._form.choice(at, text, scored if self._asked.told else None, why))
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _given(self) -> list[tuple[Handle, Handle | BeamResult, str]]:
        """The texts that are given back: whose they are, and why they end."""
        asked, handles, which = self._asked, self._handles, range(len(self._handles))
        if asked.beams > 1:
            for at in which:
                self._reason(at)
            every = [(handle, found) for handle in handles for found in handle.beam_results]
            return [(handle, found, self._why(found.reason)) for handle, found in every]
        if asked.samples > asked.n:
            logprobs = [handle.logprobs or [] for handle in handles]
            which = best_rows(logprobs, asked.samples, asked.n)[0].ravel().tolist()
        return [(handles[at], handles[at], self._reason(at)) for at in which]

    def _echo(self, handle: Handle) -> Echo | None:
        """The prompt, where it is given back."""
        if not self._asked.echoes:
            return None
        return self._asked.echoes[self._handles.index(handle) // self._asked.samples]

    def _echoed(self, handle: Handle) -> tuple[str, Scored]:
        """What a choice begins with: the prompt's text, and its scores."""
        echo = self._echo(handle)
        if echo is None:
            return "", []
        scores = handle.prompt_logprobs
        return echo.text, [] if scores is None else echo.scored(scores)

    def _scored(self, handle: Handle, each: Handle | BeamResult | Piece, scores: Any) -> Scored:
        """Scores of new tokens. After an echoed prompt the token that ends the text is among them,
        because clients that score prompts cut off as many entries as there are new tokens."""
        if not self._asked.told:
            return []
        echo = self._echo(handle)
        if echo is None:
            return with_scores(each.tokens, scores, each.starts, handle.request.eos)
        starts = [len(echo.text) + start for start in each.starts]
        return with_scores(each.tokens, scores, starts, ())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Piece by piece; an error is the last."""
        try:
            openings = (self._form.opening(at) for at in range(len(self._handles)))
            for each in openings:
                if each is not None:
                    yield self._event(each)
            async with aclosing(self._pieces()) as pieces:
                async for at, piece in pieces:
                    for found in self._parts(at, piece):
                        yield self._event(found)
            if self._asked.usage:
                yield self._event(None)
        except Refused as error:
            yield b"data: " + to_json(error.body()) + b"\n\n"
            return
        yield b"data: [DONE]\n\n"

    def _parts(self, at: int, piece: Piece | None) -> Iterator[dict[str, Any]]:
        form, handle, told = self._form, self._handles[at], self._asked.told
        if self._asked.echoes and at not in self._begun:
            self._begun.add(at)
            text, scored = self._echoed(handle)
            yield form.piece(at, text, scored if told else None, None)
        if piece is None:
            yield form.piece(at, "", [] if told else None, self._reason(at))
        elif self._asked.limit:
            scored = self._scored(handle, piece, piece.scores)
            if piece.text or scored:
                yield form.piece(at, piece.text, scored if told else None, None)

    async def _pieces(self) -> AsyncGenerator[tuple[int, Any], None]:
        try:
            async with aclosing(pieces_of(self._service, self._handles)) as pieces:
                async for each in pieces:
                    yield each
        except StoppedError:
            raise Refused(503, "the server has stopped") from None
        except KvjaxError as error:
            raise Refused(500, str(error)) from None

    def _reason(self, at: int) -> str:
        """Why a choice has ended.

        Raises:
          Refused: if it is no end of a text.
        """
        handle = self._handles[at]
        for guide in (handle.request.guide, *(found.guide for found in handle.beam_results)):
            problem = getattr(guide, "error", None)
            if problem is not None:
                raise Refused(500, f"the grammar could not be kept to: {problem}")
        if handle.reason not in _REASONS:
            raise Refused(503, "the server stops, and this request took too long")
        return self._why(handle.reason)

    def _why(self, reason: str) -> str:
        return _REASONS[reason] if self._asked.limit else "length"

    def _event(self, choice: dict[str, Any] | None) -> bytes:
        found = {**self._head, "object": self._form.part, "choices": [choice] if choice else []}
        if self._asked.usage:
            found["usage"] = None if choice else self._usage()
        return b"data: " + to_json(found) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        # A prompt counts once, and as what its first sample has found of it.
        firsts = self._handles[:: self._asked.samples]
        prompt = sum(len(handle.request.tokens) for handle in firsts)
        every = [each for handle in self._handles for each in handle.beam_results or [handle]]
        new = sum(len(each.tokens) for each in every) if self._asked.limit else 0
        cached = sum(handle.cached_tokens for handle in firsts)
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
