"""A beam search as it is iterated over: what its texts have in common, and the whole result."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np

from kvjax.core.errors import NonFiniteError
from kvjax.core.reporting import report_progress
from kvjax.core.transfer import fetch
from kvjax.generation.beams.programs import rows_to_keep
from kvjax.generation.beams.results import (
    BestSequences,
    History,
    best_sequences,
    common_prefixes,
    live_sequences,
    source_beams,
)
from kvjax.generation.beams.session import Report, final_guides, search_of
from kvjax.generation.detokenizer import RowText
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.programs import MAX_STEPS
from kvjax.generation.request import GenerationRequest, PromptChunk, prompt_chunks
from kvjax.generation.results import GenerationResult, GenerationStats, Piece, Timer, pad_result
from kvjax.generation.session import Session
from kvjax.generation.streaming import PieceIterator
from kvjax.policies.model_config import beyond_context
from kvjax.sampling.scores import TokenScore

_WATCHED_STEPS = 8
"""Steps of a dispatch where somebody waits for its text."""


class BeamStream(PieceIterator):
    """A beam search that runs as it is iterated over; of a prompt comes, before the end, what all
    of its texts begin with: nothing can take that back."""

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        watched: bool,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._chunks, self._watched = request, chunks, watched
        self._session = Session(lm, request)
        self._search = search_of(request, self._session)
        self._has_text, self._config = lm.tokenizer is not None, lm.config
        self._padding = getattr(lm, "padding", 0)
        self._kept, self._beams = search.num_return, search.beams
        self._prompts = request.rows // request.samples
        asked = request.prompts[: self._prompts]
        guides = (request.guides or [None] * request.rows)[:: request.samples]
        self._rows = [
            RowText(lm.tokenizer, ids, guided=guide is not None)
            for ids, guide in zip(asked, guides, strict=False)
            for _ in range(self._kept)
        ]
        self._scores: list[list[TokenScore]] = [[] for _ in self._rows]
        self._history = History(request.samples)
        self._state: Any = None
        self._prefill_meter, self._decode_meter = Timer(), Timer()
        super().__init__(self._session, cache_given=request.cache is not None)

    def _generate_pieces(self) -> Iterator[Piece]:
        request = self._request
        with self._prefill_meter.running():
            self._session.start()
            chunks = self._chunks
            chunks = prompt_chunks(request, self._session.prefix_hits) if chunks is None else chunks
            for number, chunk in enumerate(chunks, 1):
                self._session.make_room(chunk.cache_len)
                self._session.prefill(chunk)
                report_progress("reading the prompt", number, len(chunks), self._session.logits)
            self._absorb(self._search.begin())
        dispatched, longest = 1, request.positions - request.max_new_tokens
        flying: deque[Report] = deque()
        most, ahead = _WATCHED_STEPS if self._watched else MAX_STEPS, 2
        if request.guides is not None:  # each token waits for the one before
            most, ahead = 1, 1
        while not self._state.done.all():
            yield self._piece()
            with self._decode_meter.running():
                # One dispatch ahead: its loop ends at once if all is done by then.
                while len(flying) < ahead and dispatched < request.max_new_tokens:
                    steps = min(most, request.max_new_tokens - dispatched)
                    self._session.make_room(longest + dispatched + steps)
                    dispatched += steps
                    flying.append(self._search.search(np.int32(steps)))
                self._absorb(flying.popleft())
            report_progress("generating", len(self._history), request.max_new_tokens)
        with self._decode_meter.running():
            self._session.check()
            self._result = self._found()
        yield self._piece()

    def _absorb(self, report: Report) -> None:
        """Wait for a dispatch, and take it in.

        Raises:
          NonFiniteError: if a prompt's logits were not finite numbers.
        """
        columns, state = fetch(report)
        if state.broken.any():
            rows = ", ".join(map(str, np.flatnonzero(state.broken)))
            raise NonFiniteError(
                f"the logits of the beams of prompt(s) {rows} are not finite numbers, after "
                f"{int(state.count[state.broken].max())} new tokens; nothing was chosen from them"
            )
        self._history.add(columns, int(state.count.max()) - len(self._history))
        self._state = state
        if self._watched and not state.done.all():
            self._push_common()

    def _push_common(self) -> None:
        """What all texts of a prompt that can yet be given back begin with."""
        live, _ = live_sequences(self._history, self._state.count, self._beams)
        ended = self._state.ended
        past, _ = self._history.paths(ended.length - 1, ended.beam)
        rows, beams = np.nonzero(ended.length > 0)
        past[rows, beams, ended.length[rows, beams] - 1] = ended.token[rows, beams]
        tokens = np.concatenate([live, past], axis=1)
        there = np.concatenate([self._state.score, ended.score], axis=1) > -np.inf
        for number, common in enumerate(common_prefixes(tokens, there)[: self._prompts]):
            for row in self._rows[number * self._kept : (number + 1) * self._kept]:
                for token in common[len(row.tokens) :]:
                    row.push(token)

    def _found(self) -> GenerationResult:
        """The best texts, and what goes with them."""
        request, prompts = self._request, self._prompts
        found = best_sequences(self._history, self._state.ended, self._kept, request.logprobs)
        for row, tokens in zip(
            self._rows, chain.from_iterable(found.tokens[:prompts]), strict=True
        ):
            for token in tokens[len(row.tokens) :]:
                row.push(token)
            row.finish("eos" if tokens and tokens[-1] in request.eos_token_ids else "length")
        self._scores = [*chain.from_iterable(found.token_scores[:prompts])]
        cache, unfed = self._cache(found)
        words: Any = [row.text for row in self._rows] if self._has_text else None
        result = GenerationResult(
            words,
            [row.tokens for row in self._rows],
            self._stats(),
            cache,
            unfed,
            None if request.logprobs is None else self._scores,
            guides=final_guides(self._session.lm, request, [row.tokens for row in self._rows]),
            sequence_scores=[*chain.from_iterable(found.scores[:prompts])],
        )
        if request.padded:
            result = pad_result(result, request.max_new_tokens, self._padding, request.logprobs)
        return result

    def _cache(self, found: BestSequences) -> tuple[Any, list[list[int]]]:
        """The cache with a row for each text, and what each lacks in it. Rows are those of beams
        that went on to the end, taken back to what a text has in common with one."""
        request, session = self._request, self._session
        live, count = live_sequences(self._history, self._state.count, self._beams)
        beam, held, back = source_beams(live, count, found.known, found.before)
        lacking = zip(self._rows, held.ravel(), strict=False)
        unfed = [row.tokens[n:] for row, n in lacking]
        if request.prefix_cache is not None:
            each = zip(request.row_prompts, live.reshape(-1, live.shape[2]), strict=True)
            session.close([prompt + ids[ids >= 0].tolist() for prompt, ids in each])
            return None, unfed
        cache: Any = session.cache
        rows = np.arange(len(beam))[:, None] * live.shape[1] + beam
        if cache is None or not self._search.keep(*rows_to_keep(rows, back, request)):
            return None, unfed
        return session.cache, unfed

    def _piece(self) -> Piece:
        before, taken = [row.num_taken for row in self._rows], [row.take() for row in self._rows]
        text: Any = [text for text, _ in taken] if self._has_text else None
        scores = None
        if self._request.logprobs is not None:
            each = zip(self._scores, before, self._rows, strict=True)
            scores = [told[start : row.num_taken] for told, start, row in each]
        return Piece(text, [tokens for _, tokens in taken], self._stats(), scores)

    def _stats(self) -> GenerationStats:
        prefill, decode, request = self._prefill_meter, self._decode_meter, self._request
        steps = max(len(self._history) - 1, 0) * self._prompts
        start = request.cache_lengths.tolist()
        asked = zip(start, map(len, request.prompts), strict=True)
        longest = max(held + new for held, new in asked) + len(self._history)
        return GenerationStats(
            prompt_tokens=sum(map(len, request.encoder_tokens or request.prompts)),
            new_tokens=sum(len(row.tokens) for row in self._rows),
            compile_seconds=prefill.compile_seconds + decode.compile_seconds,
            prefill_seconds=prefill.seconds,
            decode_seconds=decode.seconds,
            decode_tokens_per_second=steps / decode.seconds if steps and decode.seconds else 0.0,
            cache_bytes=dict(self._session.cache_bytes),
            compilations=prefill.compilations + decode.compilations,
            stop_reasons=tuple(row.reason for row in self._rows),
            beyond_context=beyond_context(self._config, self._session.reach(longest)),
            moves=tuple(self._session.moves),
            cached_tokens=int(self._session.prefix_hits.sum()),
        )
