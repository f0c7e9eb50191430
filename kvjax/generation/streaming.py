"""Text as it comes: a session's tokens as pieces, up to stop strings, and the whole result."""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.core.errors import NonFiniteError
from kvjax.core.mesh_context import to_explicit_mesh, without_mesh_context
from kvjax.core.reporting import report_progress
from kvjax.core.transfer import fetch
from kvjax.core.validation import donation_errors
from kvjax.generation.detokenizer import RowText
from kvjax.generation.drafts.guided import session_of
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.programs import MAX_STEPS
from kvjax.generation.request import GenerationRequest, PromptChunk, prompt_chunks
from kvjax.generation.results import (
    GenerationResult,
    GenerationStats,
    Piece,
    Speculation,
    Timer,
    pad_result,
    speculation_stats,
)
from kvjax.generation.session import DecodeOutput, Session
from kvjax.policies.model_config import beyond_context
from kvjax.sampling.scores import TokenScore, token_scores

_WATCHED_STEPS = 32
"""The most steps of a dispatch where somebody waits for its text."""
_TOGETHER_STEPS = 8
"""The same, where many processes run together."""
_PROMPT_SECONDS, _SLOW_SECONDS = 0.05, 0.2
"""A streamed dispatch that takes less grows, one that takes more shrinks."""


class _DispatchSize:
    """``steps``: of the next dispatch; ``watched``: somebody waits for text; ``stops``: there are
    strings that end one, behind which steps are in vain; ``most``: steps of each, where it waits
    for the one before, else None."""

    def __init__(self, *, watched: bool, stops: bool, most: int | None = None) -> None:
        # Processes that run together do the same steps, whatever time each takes.
        alone = jax.process_count() == 1
        first = 1 if alone else _TOGETHER_STEPS
        self.steps = first if watched else _WATCHED_STEPS if stops else MAX_STEPS
        self._changes = watched and alone and most is None
        self.steps = most or self.steps

    def took(self, seconds: float) -> None:
        """Go by how long a dispatch took."""
        if self._changes and seconds < _PROMPT_SECONDS:
            self.steps = min(2 * self.steps, _WATCHED_STEPS)
        elif self._changes and seconds > _SLOW_SECONDS:
            self.steps = max(self.steps // 2, 1)


class PieceIterator(Iterator[Piece]):
    """Pieces of a session's text, and after the last one the ``result``; see ``stream``. Threads
    that take a piece, or close it, wait for each other."""

    def __init__(self, session: Session, given: bool) -> None:
        self._running, self._given = session, given
        self._result: GenerationResult | None = None
        self._pieces: Generator[Piece, None, None] = self._run()
        self._turn = threading.RLock()

    @abstractmethod
    def _pieces_of_all(self) -> Iterator[Piece]:
        """All of them; the last one behind ``_result``."""

    @without_mesh_context
    def __next__(self) -> Piece:
        with self._turn:
            return next(self._pieces)

    def close(self) -> None:
        """End it here: nothing more comes, and what a ``prefix_cache`` lent goes back."""
        with self._turn:
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
            with donation_errors(self._given):
                yield from self._pieces_of_all()
        finally:
            self._running.close(None)  # where it did not come to its end


class Stream(PieceIterator):
    """A generation that runs as it is iterated over: see ``stream``."""

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        watched: bool,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        self._request, self._chunks = request, chunks
        self._session = session_of(lm, request)
        self._has_text, self._config = lm.tokenizer is not None, lm.config
        self._padding = getattr(lm, "padding", 0)
        texts = request.row_sequences
        guides = request.guides or [None] * len(texts)
        self._rows = [
            RowText(
                lm.tokenizer,
                ids,
                request.stop,
                least=request.min_new_tokens,
                guided=guide is not None,
            )
            for ids, guide in zip(texts, guides, strict=True)
        ]
        for row in self._rows[request.rows :]:
            row.finish("padding")
        self._scores: list[list[TokenScore]] = [[] for _ in self._rows]
        self._counts = np.zeros(len(self._rows), np.int32)
        most = self._session.max_steps
        self._pace = _DispatchSize(watched=watched, stops=bool(request.stop), most=most)
        self._speculation: Speculation | None = None
        self._prefill_meter, self._decode_meter = Timer(), Timer()
        self._stopping = False
        super().__init__(self._session, given=request.cache is not None)

    def stop(self) -> None:
        """Let it end, as soon as what runs on the device has come back: at what was given so far,
        as if a stop string stood behind it, with the reason ``"stopped"``.

        Iterate on: ``result`` is there after the last piece, which has no text but where the cache
        could not forget what was under way (a ring or a tail, of many steps). A prompt that is
        still being read stays unread from the next chunk on (``result.unfed``). It may be called
        from another thread, or from a signal's handler; of processes that run together by all of
        them, after the same piece.
        """
        self._stopping = True

    def _pieces_of_all(self) -> Iterator[Piece]:
        with self._prefill_meter.running():
            self._session.start()
            chunks, hits = self._chunks, self._session.prefix_hits
            chunks = prompt_chunks(self._request, hits) if chunks is None else chunks
            for number, chunk in enumerate(chunks, 1):
                if self._stopping and self._request.can_stop_early:
                    self._finish("stopped")
                    break
                self._session.make_room(chunk.cache_len)
                self._session.prefill(chunk)
                report_progress("reading the prompt", number, len(chunks), self._session.logits)
            else:
                self._absorb(self._session.begin())
        dispatched = 1
        longest = self._request.positions - self._request.max_new_tokens
        flying: deque[DecodeOutput] = deque()
        # One dispatch ahead, the device works while the host decodes text. Its loop ends at once
        # if all rows are done by then; but only the host sees stop strings.
        singly = self._session.max_steps is not None
        ahead = 1 if self._request.stop or singly else 2
        while any(row.reason is None for row in self._rows):
            yield self._piece()
            if self._stopping:
                self._cut(flying)
                break
            before = self._decode_meter.seconds
            with self._decode_meter.running():
                while len(flying) < ahead and dispatched < self._request.max_new_tokens:
                    left = self._request.max_new_tokens - dispatched
                    steps = min(self._pace.steps, left, self._revocable())
                    reached = max(dispatched, int(self._counts.max())) + steps
                    self._session.make_room(longest + min(reached, self._request.max_new_tokens))
                    steps = min(steps, self._revocable())  # a layer with a tail forgets less
                    dispatched += steps
                    halt = np.array([row.reason is not None for row in self._rows])
                    flying.append(self._session.decode(np.int32(steps), halt))
                self._absorb(flying.popleft())
            if singly:
                dispatched = self._least()
            report_progress("generating", int(self._counts.max()), self._request.max_new_tokens)
            self._pace.took(self._decode_meter.seconds - before)
        with self._decode_meter.running():
            unfed = self._settle()
        asked = self._rows[: self._request.rows]
        texts = self._texts([row.text for row in asked])
        tokens = [row.tokens for row in asked]
        cache: Any = self._session.cache if self._request.prefix_cache is None else None
        cache = to_explicit_mesh(cache, self._request.home)
        both = zip(self._request.row_prompts, self._rows, strict=True)
        self._session.close([prompt + row.tokens for prompt, row in both])
        result = GenerationResult(
            texts,
            tokens,
            self._stats(),
            cache,
            unfed[: len(asked)],
            self._logprobs([slice(len(row.tokens)) for row in asked]),
            guides=None if (guides := self._request.guides) is None else guides[: len(asked)],
        )
        if self._request.padded:
            limit, scores = self._request.max_new_tokens, self._request.logprobs
            result = pad_result(result, limit, self._padding, scores)
        self._result = result
        yield self._piece()

    def _revocable(self) -> int:
        """Steps after which a stop string can still be taken back from a ring or a tail."""
        cache = self._session.cache
        if not self._request.stop or cache is None or cache.max_rewind is None:
            return MAX_STEPS
        proposer = self._session.proposer
        left = cache.max_rewind - (0 if proposer is None else proposer.length)
        return max(1, left + 1 - max(row.pending for row in self._rows))

    def _cut(self, flying: Sequence[DecodeOutput]) -> None:
        """End the rows where their pieces end; or, where the cache can't forget what it has been
        fed since, behind that."""
        with self._decode_meter.running():
            count = flying[-1][1].count if flying else self._counts
            if self._session.can_rewind(fetch(count) - 1 - [row.num_taken for row in self._rows]):
                for row in self._rows:
                    row.cut()
            for report in flying:
                self._absorb(report)
            self._finish("stopped")

    def _least(self) -> int:
        """New tokens of a row that goes on, at least."""
        live = [row.reason is None for row in self._rows]
        return int(self._counts[live].min(initial=self._request.max_new_tokens))

    def _finish(self, reason: str) -> None:
        for row in self._rows:
            row.finish(reason)

    def _absorb(self, report: DecodeOutput) -> None:
        """Wait for a dispatch, and take its tokens in.

        Raises:
          NonFiniteError: if a row's logits were not finite numbers.
        """
        out, progress, scores, drafted = fetch(report)
        if drafted is not None:
            self._speculation = speculation_stats(drafted, progress.count, self._request.rows)
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
            if self._request.logprobs is not None:
                self._scores[i] += token_scores(scores, i, 0, new, self._request.logprobs)
            if progress.done[i] and row.reason is None:
                row.finish("eos" if row.tokens[-1] in self._request.eos_token_ids else "length")
        self._counts = progress.count

    def _settle(self) -> list[list[int]]:
        """Take back what a stop string took from the texts; each row's tokens that the cache
        lacks."""
        kept = np.array([len(row.tokens) for row in self._rows], np.int32)
        unfed = [
            row.tokens[-1:] if whole else []
            for row, whole in zip(self._rows, kept == self._counts, strict=True)
        ]
        if not self._counts.any():  # stopped before the prompts had been read
            both = zip(self._request.prompts, self._session.prefilled, strict=True)
            unfed = [prompt[held:] for prompt, held in both]
        self._session.check()
        surplus = np.maximum(self._counts - 1 - kept, 0)
        if surplus.any():
            self._session.rewind(surplus)
        return unfed

    def _piece(self) -> Piece:
        asked = self._rows[: self._request.rows]
        before, taken = [row.num_taken for row in asked], [row.take() for row in asked]
        text, tokens = self._texts([text for text, _ in taken]), [tokens for _, tokens in taken]
        spans = [slice(start, row.num_taken) for start, row in zip(before, asked, strict=True)]
        return Piece(text, tokens, self._stats(), self._logprobs(spans))

    def _logprobs(self, spans: list[slice]) -> list[list[TokenScore]] | None:
        """Of the rows' tokens from one to another."""
        if self._request.logprobs is None:
            return None
        return [scores[span] for scores, span in zip(self._scores, spans, strict=False)]

    def _texts(self, texts: list[str]) -> Any:
        return texts if self._has_text else None

    def _stats(self) -> GenerationStats:
        prefill, decode = self._prefill_meter, self._decode_meter
        rows = self._request.rows
        decoded = int(self._counts[:rows].sum()) - rows
        fed = map(len, self._request.row_prompts)
        start = np.repeat(self._request.cache_lengths, self._request.samples).tolist()
        texts = zip(start, fed, self._rows, strict=True)
        longest = max(held + new + len(row.tokens) for held, new, row in texts)
        return GenerationStats(
            prompt_tokens=sum(map(len, self._request.encoder_tokens or self._request.prompts)),
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
            cached_tokens=int(self._session.prefix_hits.sum()),
            speculation=self._speculation,
        )
