"""``best_of``: draw several samples, and return those with the highest mean log-probability."""

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
    """A generation of all samples, whose result contains the best ones."""

    def __init__(
        self,
        lm: LanguageModel,
        request: GenerationRequest,
        *,
        chunks: list[PromptChunk] | None = None,
    ) -> None:
        logprobs = 0 if request.logprobs is None else request.logprobs
        all_samples = replace(request, logprobs=logprobs, padded=False, search=None)
        self._running = Stream(lm, all_samples, streamed=False, chunks=chunks)
        self._request, self._padding = request, getattr(lm, "padding", 0)
        self._result: GenerationResult | None = None

    def __next__(self) -> Piece:
        return next(self._running)

    def close(self) -> None:
        """End the generation."""
        self._running.close()

    @property
    def result(self) -> GenerationResult:
        """The best samples.

        Raises:
          RuntimeError: before the last piece.
        """
        if self._result is None:
            self._result = _best(self._running.result, self._request, self._padding)
        return self._result


def best_rows(
    logprobs: Sequence[Sequence[TokenScore]], samples: int, kept: int
) -> tuple[np.ndarray, list[float]]:
    """Rank the samples of each prompt by their mean log-probability.

    Args:
      logprobs: the scores of each row's tokens.
      samples, kept: rows per prompt, and how many of them to return.

    Returns:
      int[prompts, kept], the best rows, best first; for equal ones the first. And the mean
      log-probability of every row, minus infinity for a row without tokens.
    """
    means = [float(np.mean([x.logprob for x in row])) if row else -np.inf for row in logprobs]
    ranked = np.argsort(-np.reshape(means, (-1, samples)), axis=1, kind="stable")
    return np.arange(len(ranked))[:, None] * samples + ranked[:, :kept], means


def _best(result: GenerationResult, request: GenerationRequest, padding: int) -> GenerationResult:
    """Select the best rows of each prompt."""
    search, samples = request.search, request.samples
    assert search is not None
    rows, means = best_rows(result.logprobs, samples, search.num_return)
    selected = rows.ravel().tolist()
    cache: Any = result.cache
    if cache is not None:
        cache = keep_rows(cache, *rows_to_keep(rows, np.zeros_like(rows), request))

    def select(values: Any) -> Any:
        return None if values is None else [values[row] for row in selected]

    result = replace(
        result,
        text=select(result.text),
        tokens=select(result.tokens),
        pending_tokens=select(result.pending_tokens),
        cache=cache,
        logprobs=None if request.logprobs is None else select(result.logprobs),
        sequence_scores=select(means),
        guides=result.guides and tuple(select(result.guides)),
        stats=replace(result.stats, stop_reasons=tuple(select(result.stats.stop_reasons))),
    )
    if request.padded:
        return pad_result(result, request.max_new_tokens, padding, request.logprobs)
    return result
