"""A beam search as an iterator over pieces, and the reconstruction of its sequences on the host."""

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from kvjax.core.reporting import report_progress
from kvjax.core.transfer import fetch
from kvjax.core.validation import NonFiniteError
from kvjax.generation.beams.programs import rows_to_keep
from kvjax.generation.beams.session import SearchOutput, final_guides, search_of
from kvjax.generation.beams.step import BeamConfig
from kvjax.generation.detokenizer import RowText
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.programs import MAX_STEPS
from kvjax.generation.request import GenerationRequest, PromptChunk, prompt_chunks
from kvjax.generation.results import GenerationResult, GenerationStats, Piece, Timer, pad_result
from kvjax.generation.session import Session
from kvjax.generation.streaming import PieceIterator
from kvjax.policies.model_config import beyond_context
from kvjax.sampling.scores import Scores, TokenScore, token_scores


class History:
    """The tokens, parent beams and scores of every step, as NumPy arrays [batch, beams]."""

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self._steps: list[tuple[np.ndarray, np.ndarray, Scores | None]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, columns: PyTree, steps: int) -> None:
        """Add the first ``steps`` steps of a ``programs.Columns`` on the host."""
        for step in range(steps):
            self._steps.append(jax.tree.map(lambda x, at=step: self._by_beam(x[:, at]), columns))

    def _by_beam(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x) // self._beams, self._beams, *x.shape[1:])

    def paths(self, length: np.ndarray, beam: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Trace sequences back from their last token.

        Args:
          length: int[batch, n], the number of tokens of each sequence.
          beam: int[batch, n], the beam of each sequence's last token.

        Returns:
          Tokens and beams, both int[batch, n, steps], with -1 after the end of a sequence.
        """
        rows = np.arange(len(length))[:, None]
        tokens = np.full((*length.shape, len(self)), -1, np.int32)
        beams, at = np.full_like(tokens, -1), np.array(beam)
        for step in range(len(self) - 1, -1, -1):
            token, parent, _ = self._steps[step]
            inside = length > step
            tokens[..., step] = np.where(inside, token[rows, at], -1)
            beams[..., step] = np.where(inside, at, -1)
            at = np.where(inside, parent[rows, at], at)
        return tokens, beams

    def scores(self, row: int, beams: np.ndarray) -> list[Scores]:
        """Return the ``Scores`` of a prompt's tokens, given the beam of each step."""
        return [
            jax.tree.map(lambda x, at=beam: x[row, at], self._steps[step][2])
            for step, beam in enumerate(beams)
        ]


def common_prefixes(tokens: np.ndarray, real: np.ndarray) -> list[list[int]]:
    """Return the longest common prefix of each prompt's sequences.

    Args:
      tokens: int[batch, n, steps], with -1 after the end of a sequence.
      real: bool[batch, n], whether a sequence counts.
    """
    prefixes = []
    for sequences, counts in zip(tokens, real, strict=True):
        sequences = sequences[counts]
        if not len(sequences):
            prefixes.append([])
            continue
        same = np.all(sequences == sequences[:1], axis=0) & (sequences[0] >= 0)
        end = len(same) if np.all(same) else int(np.argmin(same))
        prefixes.append(sequences[0, :end].tolist())
    return prefixes


class BestSequences(NamedTuple):
    """The best sequences of each prompt, best first.

    Attributes:
      tokens: the tokens of each sequence. If a search found fewer than ``n`` sequences, the list of
        each missing one is empty.
      scores: the score of each sequence, -inf for a missing one.
      token_scores: the scores of ``tokens``; empty if not requested.
      known: int[batch, n, steps], each sequence without its last token, followed by -1.
      before: int[batch, n], the number of tokens in ``known``.
    """

    tokens: list[list[list[int]]]
    scores: list[list[float]]
    token_scores: list[list[list[TokenScore]]]
    known: np.ndarray
    before: np.ndarray


def best_sequences(history: History, finished: PyTree, n: int, scores: int | None) -> BestSequences:
    """Return the ``n`` best finished sequences of all groups.

    Args:
      history: the history of the search.
      finished: ``Hypotheses`` on the host.
      n: the number of sequences per prompt.
      scores: how many of the most likely tokens to report with each token; None for no
        log-probabilities.
    """
    order = np.argsort(-finished.score, axis=1, kind="stable")[:, :n]
    rows = np.arange(len(order))[:, None]
    finished = jax.tree.map(lambda x: x[rows, order], finished)
    missing = finished.score == -np.inf
    before = np.where(missing, 0, finished.length - 1)
    known, beams = history.paths(before, finished.beam)
    tokens: list[list[list[int]]] = [[[] for _ in row] for row in order]
    reported: list[list[list[TokenScore]]] = [[[] for _ in row] for row in order]
    for row, at in np.argwhere(~missing).tolist():
        count = int(before[row, at])
        tokens[row][at] = [*known[row, at, :count].tolist(), int(finished.token[row, at])]
        if scores is not None:
            steps = history.scores(row, beams[row, at, :count])
            steps.append(jax.tree.map(lambda x, at=(row, at): x[at], finished.token_scores))
            stacked = jax.tree.map(lambda *x: np.stack(x)[None], *steps)
            reported[row][at] = token_scores(stacked, 0, 0, count + 1, scores)
    return BestSequences(tokens, finished.score.tolist(), reported, known, before)


def live_sequences(
    history: History, count: np.ndarray, beams: BeamConfig
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all beams, int[batch, beams, steps], with -1 after the end, and the
    number of tokens of each beam. ``count`` (int[batch, groups]) is the number of tokens of each
    group's beams."""
    counts = np.repeat(count, beams.group_size, axis=1)
    own = np.broadcast_to(np.arange(counts.shape[1]), counts.shape)
    return history.paths(counts, own)[0], counts


def source_beams(
    live: np.ndarray, count: np.ndarray, known: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each best sequence, find the beam whose cache row contains most of it. A row contains all
    tokens of its beam except the newest.

    Args:
      live: int[batch, beams, steps], the tokens of the beams.
      count: int[batch, beams], the number of tokens of each beam.
      known: int[batch, n, steps], the tokens of the best sequences except the last.
      before: int[batch, n], the number of tokens in ``known``.

    Returns:
      Three arrays int[batch, n]: the beam, how many tokens its row has in common with the sequence,
      and how many tokens the row has after them.
    """
    fed, steps = np.maximum(count - 1, 0), np.arange(live.shape[2])
    same = (live[:, None] == known[:, :, None]) & (steps < fed[:, None, :, None])
    same &= steps < before[:, :, None, None]
    shared = np.cumprod(same, axis=3).sum(axis=3)  # [batch, n, beams]
    beam = np.argmax(shared, axis=2)
    prefix_len = np.take_along_axis(shared, beam[:, :, None], axis=2)[..., 0]
    return beam, prefix_len, np.take_along_axis(fed, beam, axis=1) - prefix_len


_WATCHED_STEPS = 8
"""The maximum number of steps of a dispatch whose text is streamed to a reader."""


class BeamStream(PieceIterator):
    """A beam search that runs while you iterate over it. Until the search ends, pieces contain only
    the common prefix of all candidates of a prompt, because this prefix can no longer change."""

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        streamed: bool,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        search = request.search
        assert search is not None and search.beams is not None
        self._request, self._chunks, self._streamed = request, chunks, streamed
        self._session = Session(lm, request)
        self._search = search_of(request, self._session)
        self._has_text, self._config = lm.tokenizer is not None, lm.config
        self._padding = getattr(lm, "pad_token_id", 0)
        self._num_return, self._beams = search.num_return, search.beams
        self._num_prompts = request.rows // request.samples
        prompts = request.prompts[: self._num_prompts]
        guides = (request.guides or [None] * request.rows)[:: request.samples]
        self._rows = [
            RowText(lm.tokenizer, ids, guided=guide is not None)
            for ids, guide in zip(prompts, guides, strict=False)
            for _ in range(self._num_return)
        ]
        self._scores: list[list[TokenScore]] = [[] for _ in self._rows]
        self._history = History(request.samples)
        self._prefill_timer, self._decode_timer = Timer(), Timer()
        super().__init__(self._session, cache_given=request.cache is not None)

    def _generate_pieces(self) -> Iterator[Piece]:
        request = self._request
        with self._prefill_timer.running():
            self._session.start()
            chunks = self._chunks
            chunks = prompt_chunks(request, self._session.prefix_hits) if chunks is None else chunks
            for number, chunk in enumerate(chunks, 1):
                self._session.make_room(chunk.cache_len)
                self._session.prefill(chunk)
                report_progress("reading the prompt", number, len(chunks), self._session.logits)
            self._collect(self._search.begin())
        dispatched, longest = 1, request.positions - request.max_new_tokens
        in_flight: deque[SearchOutput] = deque()
        max_steps, ahead = _WATCHED_STEPS if self._streamed else MAX_STEPS, 2
        if request.guides is not None:  # each step needs the tokens of the previous one
            max_steps, ahead = 1, 1
        while not self._state.done.all():
            yield self._piece()
            with self._decode_timer.running():
                # Keep two dispatches in flight. If the search ends in the first one, the second
                # does nothing.
                while len(in_flight) < ahead and dispatched < request.max_new_tokens:
                    steps = min(max_steps, request.max_new_tokens - dispatched)
                    self._session.make_room(longest + dispatched + steps)
                    dispatched += steps
                    in_flight.append(self._search.search(np.int32(steps)))
                self._collect(in_flight.popleft())
            report_progress("generating", len(self._history), request.max_new_tokens)
        with self._decode_timer.running():
            self._session.check()
            self._result = self._make_result()
        yield self._piece()

    def _collect(self, output: SearchOutput) -> None:
        """Wait for a dispatch, and record its choices.

        Raises:
          NonFiniteError: if the logits of a prompt are not finite.
        """
        columns, state = fetch(output)
        if state.broken.any():
            prompts = ", ".join(map(str, np.flatnonzero(state.broken)))
            raise NonFiniteError(
                f"the beams of prompt(s) {prompts} have logits that are not finite, after "
                f"{int(state.count[state.broken].max())} new tokens"
            )
        self._history.add(columns, int(state.count.max()) - len(self._history))
        self._state: Any = state
        if self._streamed and not state.done.all():
            self._push_common()

    def _push_common(self) -> None:
        """Add the common prefix of all sequences that may still be returned to the output."""
        live, _ = live_sequences(self._history, self._state.count, self._beams)
        finished = self._state.finished
        past, _ = self._history.paths(finished.length - 1, finished.beam)
        rows, beams = np.nonzero(finished.length > 0)
        past[rows, beams, finished.length[rows, beams] - 1] = finished.token[rows, beams]
        tokens = np.concatenate([live, past], axis=1)
        real = np.concatenate([self._state.score, finished.score], axis=1) > -np.inf
        for number, common in enumerate(common_prefixes(tokens, real)[: self._num_prompts]):
            for row in self._rows[number * self._num_return : (number + 1) * self._num_return]:
                for token in common[len(row.tokens) :]:
                    row.push(token)

    def _make_result(self) -> GenerationResult:
        request, prompts = self._request, self._num_prompts
        best = best_sequences(
            self._history, self._state.finished, self._num_return, request.logprobs
        )
        sequences = chain.from_iterable(best.tokens[:prompts])
        for row, tokens in zip(self._rows, sequences, strict=True):
            for token in tokens[len(row.tokens) :]:
                row.push(token)
            row.finish("eos" if tokens and tokens[-1] in request.eos_token_ids else "length")
        self._scores = [*chain.from_iterable(best.token_scores[:prompts])]
        cache, pending_tokens = self._result_cache(best)
        text: Any = [row.text for row in self._rows] if self._has_text else None
        result = GenerationResult(
            text,
            [row.tokens for row in self._rows],
            self._stats(),
            cache,
            pending_tokens,
            None if request.logprobs is None else self._scores,
            guides=final_guides(self._session.lm, request, [row.tokens for row in self._rows]),
            sequence_scores=[*chain.from_iterable(best.scores[:prompts])],
        )
        if request.padded:
            result = pad_result(result, request.max_new_tokens, self._padding, request.logprobs)
        return result

    def _result_cache(self, best: BestSequences) -> tuple[Any, list[list[int]]]:
        """Return a cache with one row per returned sequence, and the tokens that each row lacks. A
        row comes from the running beam that has the longest common prefix with the sequence,
        rewound to this prefix."""
        request, session = self._request, self._session
        live, count = live_sequences(self._history, self._state.count, self._beams)
        beam, prefix_lens, rewound = source_beams(live, count, best.known, best.before)
        pending_tokens = [
            row.tokens[length:]
            for row, length in zip(self._rows, prefix_lens.ravel(), strict=False)
        ]
        if request.prefix_cache is not None:
            rows = zip(request.row_prompts, live.reshape(-1, live.shape[2]), strict=True)
            session.close([prompt + ids[ids >= 0].tolist() for prompt, ids in rows])
            return None, pending_tokens
        rows = np.arange(len(beam))[:, None] * live.shape[1] + beam
        if session.cache is None or not self._search.keep(*rows_to_keep(rows, rewound, request)):
            return None, pending_tokens
        return session.cache, pending_tokens

    def _piece(self) -> Piece:
        starts = [row.num_taken for row in self._rows]
        new = [row.take() for row in self._rows]
        text: Any = [text for text, _ in new] if self._has_text else None
        scores = None
        if self._request.logprobs is not None:
            rows = zip(self._scores, starts, self._rows, strict=True)
            scores = [row_scores[start : row.num_taken] for row_scores, start, row in rows]
        return Piece(text, [tokens for _, tokens in new], self._stats(), scores)

    def _stats(self) -> GenerationStats:
        prefill, decode, request = self._prefill_timer, self._decode_timer, self._request
        steps = max(len(self._history) - 1, 0) * self._num_prompts
        lengths = zip(request.cache_lengths.tolist(), map(len, request.prompts), strict=True)
        longest = max(cached + new for cached, new in lengths) + len(self._history)
        return GenerationStats(
            prompt_tokens=sum(map(len, request.encoder_tokens or request.prompts)),
            new_tokens=sum(len(row.tokens) for row in self._rows),
            compile_seconds=prefill.compile_seconds + decode.compile_seconds,
            prefill_seconds=prefill.seconds,
            decode_seconds=decode.seconds,
            decode_tokens_per_second=steps / decode.seconds if steps and decode.seconds else 0.0,
            cache_bytes=dict(self._session.cache_bytes),
            compilations=prefill.compilations + decode.compilations,
            finish_reasons=tuple(row.finish_reason for row in self._rows),
            beyond_context=beyond_context(self._config, self._session.reach(longest)),
            moves=tuple(self._session.moves),
            cached_tokens=int(self._session.prefix_hits.sum()),
        )
