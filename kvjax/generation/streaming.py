"""Text as it comes: a session's tokens as pieces, up to stop strings, and the whole result."""

from collections import deque
from collections.abc import Generator, Iterator
from typing import Any

import jax
import numpy as np

from kvjax.core.context import outside
from kvjax.core.device import fetch
from kvjax.core.errors import NonFiniteError
from kvjax.core.progress import tell
from kvjax.generation.guided import GuidedSession
from kvjax.generation.loaded import LanguageModel
from kvjax.generation.programs import CHUNK
from kvjax.generation.prompts import Chunk, prompt_chunks
from kvjax.generation.request import Request
from kvjax.generation.results import GenerationResult, Piece, padded
from kvjax.generation.scores import TokenScore, token_scores
from kvjax.generation.session import Report, Session
from kvjax.generation.statistics import GenerationStats, Meter
from kvjax.generation.text import RowText
from kvjax.policies.positions import beyond_context

_WATCHED_STEPS = 32
"""The most steps of a dispatch where somebody waits for its text."""
_TOGETHER_STEPS = 8
"""The same, where many processes run together."""
_PROMPT_SECONDS, _SLOW_SECONDS = 0.05, 0.2
"""A streamed dispatch that takes less grows, one that takes more shrinks."""


class Stream(Iterator[Piece]):
    """A generation that runs as it is iterated over: see ``stream``."""

    def __init__(
        self,
        lm: LanguageModel,
        request: Request,
        *,
        watched: bool,
        chunks: list[Chunk] | None = None,
    ) -> None:
        self._request, self._chunks = request, chunks
        guided = request.guides is not None  # then each token waits for the one before
        self._session = GuidedSession(lm, request) if guided else Session(lm, request)
        self._has_text, self._config = lm.tokenizer is not None, lm.config
        self._padding = getattr(lm, "padding", 0)
        self._rows = [RowText(lm.tokenizer, ids, request.stops) for ids in request.texts]
        for row in self._rows[request.rows :]:
            row.finish("padding")
        self._scores: list[list[TokenScore]] = [[] for _ in self._rows]
        self._counts = np.zeros(len(self._rows), np.int32)
        # Processes that run together do the same steps, whatever time each takes.
        alone = jax.process_count() == 1
        first = 1 if alone else _TOGETHER_STEPS
        self._steps = first if watched else _WATCHED_STEPS if request.stops else CHUNK
        self._paced = watched and alone and not guided
        self._steps = 1 if guided else self._steps
        self._prefill_meter, self._decode_meter = Meter(), Meter()
        self._result: GenerationResult | None = None
        self._pieces: Generator[Piece, None, None] = self._run()

    @outside
    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End it here: nothing more comes, and what a ``prefix_cache`` lent goes back."""
        self._pieces.close()

    @property
    def result(self) -> GenerationResult:
        """The whole result.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            raise RuntimeError("the result is there after the last piece: iterate to the end")
        return self._result

    def _run(self) -> Generator[Piece, None, None]:
        try:
            yield from self._pieces_of_all()
        finally:
            self._session.end(None)  # where it did not come to its end

    def _pieces_of_all(self) -> Iterator[Piece]:
        with self._prefill_meter.running():
            self._session.start()
            chunks, hits = self._chunks, self._session.hits
            chunks = prompt_chunks(self._request, hits) if chunks is None else chunks
            for number, chunk in enumerate(chunks, 1):
                self._session.make_room(chunk.held)
                self._session.fill(chunk)
                tell("reading the prompt", number, len(chunks), self._session.logits)
            self._absorb(self._session.begin())
        dispatched = 1
        longest = self._request.need - self._request.limit
        flying: deque[Report] = deque()
        # One dispatch ahead, the device works while the host decodes text. Its loop ends at once
        # if all rows are done by then; but only the host sees stop strings.
        ahead = 1 if self._request.stops or self._request.guides else 2
        while any(row.reason is None for row in self._rows):
            yield self._piece()
            before = self._decode_meter.seconds
            with self._decode_meter.running():
                while len(flying) < ahead and dispatched < self._request.limit:
                    steps = min(self._steps, self._request.limit - dispatched, self._revocable())
                    self._session.make_room(longest + dispatched + steps)
                    steps = min(steps, self._revocable())  # a layer with a tail forgets less
                    dispatched += steps
                    halt = np.array([row.reason is not None for row in self._rows])
                    flying.append(self._session.decode(np.int32(steps), halt))
                self._absorb(flying.popleft())
            tell("generating", int(self._counts.max()), self._request.limit)
            if self._paced:
                self._pace(self._decode_meter.seconds - before)
        with self._decode_meter.running():
            unfed = self._settle()
        asked = self._rows[: self._request.rows]
        texts = self._texts([row.text for row in asked])
        tokens = [row.tokens for row in asked]
        cache: Any = self._session.cache if self._request.prefixes is None else None
        both = zip(self._request.texts, self._rows, strict=True)
        self._session.end([prompt + row.tokens for prompt, row in both])
        result = GenerationResult(
            texts, tokens, self._stats(), cache, unfed[: len(asked)],
            self._logprobs([slice(len(row.tokens)) for row in asked]),
            guides=None if (guides := self._request.guides) is None else guides[: len(asked)],
        )  # fmt: skip
        if self._request.padded:
            limit, scores = self._request.limit, self._request.scores
            result = padded(result, limit, self._padding, scores)
        self._result = result
        yield self._piece()

    def _revocable(self) -> int:
        """Steps after which a stop string can still be taken back from a ring or a tail."""
        cache = self._session.cache
        if not self._request.stops or cache is None or cache.revocable is None:
            return CHUNK
        return max(1, cache.revocable + 1 - max(row.pending for row in self._rows))

    def _absorb(self, report: Report) -> None:
        """Wait for a dispatch, and take its tokens in.

        Raises:
          NonFiniteError: if a row's logits were not finite numbers.
        """
        out, progress, scores = fetch(report)
        if progress.broken.any():
            rows = ", ".join(str(row) for row in np.flatnonzero(progress.broken))
            raise NonFiniteError(
                f"the logits of row(s) {rows} are not finite numbers, after "
                f"{int(progress.count[progress.broken][0])} new tokens; nothing was drawn from them"
            )
        for i, row in enumerate(self._rows):
            new = int(progress.count[i] - self._counts[i])
            for token in out[i, :new].tolist():
                row.push(token)
            if self._request.scores is not None:
                self._scores[i] += token_scores(scores, i, 0, new, self._request.scores)
            if progress.done[i] and row.reason is None:
                row.finish("eos" if row.tokens[-1] in self._request.eos else "length")
        self._counts = progress.count

    def _settle(self) -> list[list[int]]:
        """Take back what a stop string took from the texts; each row's tokens that the cache
        lacks."""
        kept = np.array([len(row.tokens) for row in self._rows], np.int32)
        unfed = [
            row.tokens[-1:] if whole else []
            for row, whole in zip(self._rows, kept == self._counts, strict=True)
        ]
        self._session.check()
        surplus = np.maximum(self._counts - 1 - kept, 0)
        if surplus.any():
            self._session.take_back(surplus)
        return unfed

    def _piece(self) -> Piece:
        asked = self._rows[: self._request.rows]
        before, taken = [row.given for row in asked], [row.take() for row in asked]
        text, tokens = self._texts([text for text, _ in taken]), [tokens for _, tokens in taken]
        spans = [slice(start, row.given) for start, row in zip(before, asked, strict=True)]
        return Piece(text, tokens, self._stats(), self._logprobs(spans))

    def _logprobs(self, spans: list[slice]) -> list[list[TokenScore]] | None:
        """Of the rows' tokens from one to another."""
        if self._request.scores is None:
            return None
        return [scores[span] for scores, span in zip(self._scores, spans, strict=False)]

    def _texts(self, texts: list[str]) -> Any:
        return texts if self._has_text else None

    def _stats(self) -> GenerationStats:
        prefill, decode = self._prefill_meter, self._decode_meter
        rows = self._request.rows
        decoded = int(self._counts[:rows].sum()) - rows
        fed = map(len, self._request.texts)
        start = np.repeat(self._request.start, self._request.samples).tolist()
        texts = zip(start, fed, self._rows, strict=True)
        longest = max(held + new + len(row.tokens) for held, new, row in texts)
        return GenerationStats(
            prompt_tokens=sum(map(len, self._request.to_read or self._request.prompts)),
            new_tokens=sum(len(row.tokens) for row in self._rows),
            compile_seconds=prefill.compile_seconds + decode.compile_seconds,
            prefill_seconds=prefill.seconds,
            decode_seconds=decode.seconds,
            decode_tokens_per_second=decoded / decode.seconds if decoded > 0 else 0.0,
            cache_bytes=dict(self._session.cache_bytes),
            compilations=prefill.compilations + decode.compilations,
            stop_reasons=tuple(row.reason for row in self._rows[:rows]),
            beyond_context=beyond_context(self._config, self._session.reach(longest)),
            moves=tuple(self._session.moves),
            cached_tokens=int(self._session.hits.sum()),
        )

    def _pace(self, seconds: float) -> None:
        """Choose how many steps the next dispatch of a stream has, by how long this one took."""
        if seconds < _PROMPT_SECONDS:
            self._steps = min(2 * self._steps, _WATCHED_STEPS)
        elif seconds > _SLOW_SECONDS:
            self._steps = max(self._steps // 2, 1)
