"""The best of several samples, as OpenAI's ``best_of``: those with the highest mean
log-probability of their tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvjax.generation.beams.programs import keep_rows, rows_to_keep
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.request import GenerationRequest, PromptChunk
from kvjax.generation.results import GenerationResult, Piece, pad_result
from kvjax.generation.streaming import Stream
from kvjax.sampling.scores import TokenScore


class BestOf(Iterator[Piece]):
    """A generation of all samples, whose result has the best of them."""

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        told = 0 if request.logprobs is None else request.logprobs
        every = replace(request, logprobs=told, padded=False, search=None)
        self._running = Stream(lm, every, watched=False, chunks=chunks)
        self._request, self._padding = request, getattr(lm, "padding", 0)
        self._result: GenerationResult | None = None

    def __next__(self) -> Piece:
        return next(self._running)

    def close(self) -> None:
        """End it here."""
        self._running.close()

    @property
    def result(self) -> GenerationResult:
        """The whole result.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            self._result = _best(self._running.result, self._request, self._padding)
        return self._result


def best_rows(
    logprobs: Sequence[Sequence[TokenScore]], samples: int, kept: int
) -> tuple[np.ndarray, list[float]]:
    """Of so many samples of each prompt the best: int[prompts, kept], rows, the best one first, of
    equal ones the first; and each row's mean log-probability, minus infinity without a token.

    ``logprobs``: of each row its tokens'.
    """
    means = [float(np.mean([each.logprob for each in row])) if row else -np.inf for row in logprobs]
    ranked = np.argsort(-np.reshape(means, (-1, samples)), axis=1, kind="stable")
    return np.arange(len(ranked))[:, None] * samples + ranked[:, :kept], means


def _best(every: GenerationResult, request: GenerationRequest, padding: int) -> GenerationResult:
    """The best rows of each prompt, the best one first; of equal ones the first."""
    search, samples = request.search, request.samples
    assert search is not None
    rows, means = best_rows(every.logprobs, samples, search.num_return)
    which = rows.ravel().tolist()
    cache: Any = every.cache
    if cache is not None:
        cache = keep_rows(cache, *rows_to_keep(rows, np.zeros_like(rows), request))

    def of(values: Any) -> Any:
        return None if values is None else [values[row] for row in which]

    reasons = tuple(every.stats.stop_reasons[row] for row in which)
    result = replace(
        every,
        text=of(every.text),
        tokens=of(every.tokens),
        unfed=of(every.unfed),
        cache=cache,
        logprobs=None if request.logprobs is None else of(every.logprobs),
        sequence_scores=of(means),
        guides=every.guides and tuple(of(every.guides)),
        stats=replace(every.stats, stop_reasons=reasons),
    )
    return (
        pad_result(result, request.max_new_tokens, padding, request.logprobs)
        if request.padded
        else result
    )
