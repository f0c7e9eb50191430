"""A generation as an iterator over pieces of text, up to stop strings, and its result."""

import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvjax.core.mesh_context import to_explicit_mesh, without_mesh_context
from kvjax.core.reporting import report_progress
from kvjax.core.transfer import fetch
from kvjax.core.validation import NonFiniteError, donation_errors
from kvjax.generation.detokenizer import RowText
from kvjax.generation.guides.session import session_of
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

_MAX_STREAMED_STEPS = 32
"""The maximum number of steps of a dispatch if a reader waits for its text, or if stop strings may
end it."""
_DISTRIBUTED_STEPS = 8
"""The number of steps of a streamed dispatch if several processes run together."""
_FAST_SECONDS, _SLOW_SECONDS = 0.05, 0.2
"""After a streamed dispatch that took less than ``_FAST_SECONDS``, the next one has more steps.
After one that took more than ``_SLOW_SECONDS``, it has fewer."""


class _DispatchSize:
    """Chooses ``steps``, the number of decode steps of the next dispatch.

    Args:
      streamed: whether a reader waits for the text. Dispatches then begin short, and their length
        adapts.
      stops: whether stop strings may end a row. Steps after a stop string are wasted.
      fixed: the number of steps of every dispatch; None if it may change.
    """

    def __init__(self, *, streamed: bool, stops: bool, fixed: int | None = None) -> None:
        # Processes that run together must run the same steps, so the number can't depend on time.
        single = jax.process_count() == 1
        first = 1 if single else _DISTRIBUTED_STEPS
        self.steps = first if streamed else _MAX_STREAMED_STEPS if stops else MAX_STEPS
        self._adaptive = streamed and single and fixed is None
        self.steps = fixed or self.steps

    def update(self, seconds: float) -> None:
        """Adapt the number of steps to the seconds that a dispatch took."""
        if self._adaptive and seconds < _FAST_SECONDS:
            self.steps = min(2 * self.steps, _MAX_STREAMED_STEPS)
        elif self._adaptive and seconds > _SLOW_SECONDS:
            self.steps = max(self.steps // 2, 1)


class PieceIterator(Iterator[Piece]):
    """The base class of running generations: an iterator over pieces. After the last piece it has a
    ``result``; see ``stream``. Threads that share an iterator take turns."""

    def __init__(self, session: Session, cache_given: bool) -> None:
        self._running, self._cache_given = session, cache_given
        self._result: GenerationResult | None = None
        self._pieces: Generator[Piece, None, None] = self._run()
        self._turn = threading.RLock()

    @abstractmethod
    def _generate_pieces(self) -> Iterator[Piece]:
        """Yield all pieces. ``_result`` is set before the last one."""

    @without_mesh_context
    def __next__(self) -> Piece:
        with self._turn:
            return next(self._pieces)

    def close(self) -> None:
        """End the iteration, and return leased pages to the prefix tree."""
        with self._turn:
            self._pieces.close()

    @property
    def result(self) -> GenerationResult:
        """The result of the generation.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            raise RuntimeError("the result is available after the last piece: iterate to the end")
        return self._result

    def _run(self) -> Generator[Piece, None, None]:
        try:
            with donation_errors(self._cache_given):
                yield from self._generate_pieces()
        finally:
            self._running.close(None)  # this has an effect only if the iteration was not completed


class Stream(PieceIterator):
    """A generation without a beam search. See ``stream``.

    Args:
      lm, request: the model and a checked request.
      streamed: whether a reader waits for the text.
      chunks: the prompts in chunks, if they are already on the device.
    """

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        streamed: bool,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        self._request, self._chunks = request, chunks
        self._session = session_of(lm, request)
        self._has_text, self._config = lm.tokenizer is not None, lm.config
        self._padding = getattr(lm, "pad_token_id", 0)
        sequences = request.row_sequences
        guides = request.guides or [None] * len(sequences)
        self._rows = [
            RowText(
                lm.tokenizer,
                ids,
                request.stop,
                least=request.min_new_tokens,
                guided=guide is not None,
            )
            for ids, guide in zip(sequences, guides, strict=True)
        ]
        for row in self._rows[request.rows :]:
            row.finish("padding")
        self._scores: list[list[TokenScore]] = [[] for _ in self._rows]
        self._counts = np.zeros(len(self._rows), np.int32)
        fixed = self._session.max_steps
        self._size = _DispatchSize(streamed=streamed, stops=bool(request.stop), fixed=fixed)
        self._speculation: Speculation | None = None
        self._prefill_timer, self._decode_timer = Timer(), Timer()
        self._stopping = False
        super().__init__(self._session, cache_given=request.cache is not None)

    def stop(self) -> None:
        """End the generation as soon as the running dispatches have finished. The text ends where
        the last piece ended. The finish reason is ``"stopped"``.

        Continue to iterate, because the result is available after the last piece. The last piece
        has text only if the cache could not be rewound past the running dispatches. This can happen
        if they have many steps and the cache has a ring or a tail. If prompts are still being
        prefilled, their remaining chunks are skipped, and ``result.pending_tokens`` has the skipped
        tokens. Other threads and signal handlers may call this. If several processes run together,
        all must call it after the same piece.
        """
        self._stopping = True

    def _generate_pieces(self) -> Iterator[Piece]:
        request, session = self._request, self._session
        with self._prefill_timer.running():
            session.start()
            chunks = self._chunks
            chunks = prompt_chunks(request, session.prefix_hits) if chunks is None else chunks
            for number, chunk in enumerate(chunks, 1):
                if self._stopping and request.can_stop_early:
                    self._finish("stopped")
                    break
                session.make_room(chunk.cache_len)
                session.prefill(chunk)
                report_progress("reading the prompt", number, len(chunks), session.logits)
            else:
                self._collect(session.begin())
        dispatched, limit = 1, request.max_new_tokens
        prompt_positions = request.positions - limit
        in_flight: deque[DecodeOutput] = deque()
        # With a second dispatch in flight, the device works while the host detokenizes. Only the
        # host sees stop strings, so with stop strings only one dispatch is in flight.
        one_by_one = session.max_steps is not None
        depth = 1 if request.stop or one_by_one else 2
        while any(row.finish_reason is None for row in self._rows):
            yield self._piece()
            if self._stopping:
                self._cut(in_flight)
                break
            before = self._decode_timer.seconds
            with self._decode_timer.running():
                while len(in_flight) < depth and dispatched < limit:
                    steps = min(self._size.steps, limit - dispatched, self._rewindable_steps())
                    reached = max(dispatched, int(self._counts.max())) + steps
                    session.make_room(prompt_positions + min(reached, limit))
                    # A layer that has moved to the host has a tail, which limits rewinding.
                    steps = min(steps, self._rewindable_steps())
                    dispatched += steps
                    halt = np.array([row.finish_reason is not None for row in self._rows])
                    in_flight.append(session.decode(np.int32(steps), halt))
                self._collect(in_flight.popleft())
            if one_by_one:
                dispatched = self._min_count()
            report_progress("generating", int(self._counts.max()), limit)
            self._size.update(self._decode_timer.seconds - before)
        with self._decode_timer.running():
            pending_tokens = self._rewind_to_text()
        self._result = self._make_result(pending_tokens)
        yield self._piece()

    def _make_result(self, pending_tokens: list[list[int]]) -> GenerationResult:
        """Close the session, and return the result."""
        request = self._request
        rows = self._rows[: request.rows]
        cache: Any = self._session.cache if request.prefix_cache is None else None
        cache = to_explicit_mesh(cache, request.home)
        prompts = zip(request.row_prompts, self._rows, strict=True)
        self._session.close([prompt + row.tokens for prompt, row in prompts])
        result = GenerationResult(
            self._texts([row.text for row in rows]),
            [row.tokens for row in rows],
            self._stats(),
            cache,
            pending_tokens[: len(rows)],
            self._logprobs([slice(len(row.tokens)) for row in rows]),
            guides=None if request.guides is None else request.guides[: len(rows)],
        )
        if request.padded:
            return pad_result(result, request.max_new_tokens, self._padding, request.logprobs)
        return result

    def _rewindable_steps(self) -> int:
        """Return the maximum number of steps that can be undone if a stop string ends a row."""
        cache = self._session.cache
        if not self._request.stop or cache is None or cache.max_rewind is None:
            return MAX_STEPS
        proposer = self._session.proposer
        left = cache.max_rewind - (0 if proposer is None else proposer.length)
        return max(1, left + 1 - max(row.pending for row in self._rows))

    def _cut(self, in_flight: Sequence[DecodeOutput]) -> None:
        """End the rows where their last pieces ended. If the cache can't be rewound that far, end
        them after the dispatches in flight."""
        with self._decode_timer.running():
            count = in_flight[-1].progress.count if in_flight else self._counts
            if self._session.can_rewind(fetch(count) - 1 - [row.num_taken for row in self._rows]):
                for row in self._rows:
                    row.cut()
            for output in in_flight:
                self._collect(output)
            self._finish("stopped")

    def _min_count(self) -> int:
        """Return the minimum number of new tokens over the unfinished rows."""
        unfinished = [row.finish_reason is None for row in self._rows]
        return int(self._counts[unfinished].min(initial=self._request.max_new_tokens))

    def _finish(self, reason: str) -> None:
        for row in self._rows:
            row.finish(reason)

    def _collect(self, output: DecodeOutput) -> None:
        """Wait for a dispatch, and append its tokens to the rows.

        Raises:
          NonFiniteError: if a row's logits were not finite.
        """
        tokens, progress, scores, acceptance = fetch(output)
        if acceptance is not None:
            self._speculation = speculation_stats(acceptance, progress.count, self._request.rows)
        if progress.broken.any():
            rows = ", ".join(str(row) for row in np.flatnonzero(progress.broken))
            raise NonFiniteError(
                f"the logits of row(s) {rows} are not finite numbers, after "
                f"{int(progress.count[progress.broken][0])} new tokens; nothing was drawn from them"
            )
        for i, row in enumerate(self._rows):
            new = int(progress.count[i] - self._counts[i])
            for token in tokens[i, :new].tolist():
                row.push(token)
            if self._request.logprobs is not None:
                self._scores[i] += token_scores(scores, i, 0, new, self._request.logprobs)
            if progress.done[i] and row.finish_reason is None:
                row.finish("eos" if row.tokens[-1] in self._request.eos_token_ids else "length")
        self._counts = progress.count

    def _rewind_to_text(self) -> list[list[int]]:
        """Remove tokens after stop strings from the cache. Returns the tokens of each row that the
        cache does not contain."""
        kept = np.array([len(row.tokens) for row in self._rows], np.int32)
        pending_tokens = [
            row.tokens[-1:] if complete else []
            for row, complete in zip(self._rows, kept == self._counts, strict=True)
        ]
        if not self._counts.any():  # stopped before the prompts were prefilled
            prompts = zip(self._request.prompts, self._session.prefilled, strict=True)
            pending_tokens = [prompt[length:] for prompt, length in prompts]
        self._session.check()
        surplus = np.maximum(self._counts - 1 - kept, 0)
        if surplus.any():
            self._session.rewind(surplus)
        return pending_tokens

    def _piece(self) -> Piece:
        rows = self._rows[: self._request.rows]
        starts, taken = [row.num_taken for row in rows], [row.take() for row in rows]
        text, tokens = self._texts([text for text, _ in taken]), [tokens for _, tokens in taken]
        spans = [slice(start, row.num_taken) for start, row in zip(starts, rows, strict=True)]
        return Piece(text, tokens, self._stats(), self._logprobs(spans))

    def _logprobs(self, spans: list[slice]) -> list[list[TokenScore]] | None:
        """Return the scores of each row's tokens in the row's span."""
        if self._request.logprobs is None:
            return None
        return [scores[span] for scores, span in zip(self._scores, spans, strict=False)]

    def _texts(self, texts: list[str]) -> Any:
        return texts if self._has_text else None

    def _stats(self) -> GenerationStats:
        request, session = self._request, self._session
        prefill, decode = self._prefill_timer, self._decode_timer
        decoded = int(self._counts[: request.rows].sum()) - request.rows
        cached = np.repeat(request.cache_lengths, request.samples).tolist()
        rows = zip(cached, request.row_prompts, self._rows, strict=True)
        longest = max(length + len(prompt) + len(row.tokens) for length, prompt, row in rows)
        return GenerationStats(
            prompt_tokens=sum(map(len, request.encoder_tokens or request.prompts)),
            new_tokens=sum(len(row.tokens) for row in self._rows),
            compile_seconds=prefill.compile_seconds + decode.compile_seconds,
            prefill_seconds=prefill.seconds,
            decode_seconds=decode.seconds,
            decode_tokens_per_second=decoded / decode.seconds if decoded > 0 else 0.0,
            cache_bytes=dict(session.cache_bytes),
            compilations=prefill.compilations + decode.compilations,
            finish_reasons=tuple(row.finish_reason for row in self._rows[: request.rows]),
            beyond_context=beyond_context(self._config, session.reach(longest)),
            moves=tuple(session.moves),
            cached_tokens=int(session.prefix_hits.sum()),
            speculation=self._speculation,
        )
