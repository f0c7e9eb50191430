"""The results of a generation: text, tokens, statistics, and the pieces of a stream."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.reporting import COMPILE_CALLBACK
from kvjax.generation.drafts.acceptance import Acceptance
from kvjax.operations.capacity import Move
from kvjax.sampling.scores import Scores, TokenScore


@dataclass(frozen=True)
class Speculation:
    """Statistics of speculative decoding.

    Attributes:
      drafted_tokens: the number of drafted tokens.
      accepted_tokens: the number of drafted tokens that the model accepted.
      passes: the number of passes of the model after the prompts.
      saved_passes: how many more passes the longest row would have needed without drafts.
    """

    drafted_tokens: int
    accepted_tokens: int
    passes: int
    saved_passes: int


def speculation_stats(acceptance: Acceptance, count: np.ndarray, rows: int) -> Speculation:
    """Compute the statistics of the first ``rows`` rows, from an ``Acceptance`` on the host and
    ``count``, the number of new tokens of each row."""
    passes = int(acceptance.passes)
    proposed, accepted = (int(x[:rows].sum()) for x in (acceptance.proposed, acceptance.accepted))
    return Speculation(proposed, accepted, passes, int(count.max()) - 1 - passes)


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of one call of ``generate`` or ``stream``.

    Attributes:
      prompt_tokens, new_tokens: numbers of prompt and of new tokens, summed over all rows.
      compile_seconds: seconds of tracing, lowering and compiling. No other time includes them.
      prefill_seconds: seconds until the first new token of each row.
      decode_seconds: seconds after that, including detokenization. The time that the reader of a
        stream takes between two pieces is not included.
      decode_tokens_per_second: tokens of the decode loop per second of ``decode_seconds``,
        including tokens that a stop string removed; 0.0 if there were none.
      cache_bytes: bytes of the cache, by placement; empty without a cache.
      compilations: how many programs were compiled or read from the persistent compilation cache.
      finish_reasons: for each row ``"eos"``, ``"stop"``, ``"length"``, or ``"stopped"`` for a
        stopped stream; None while the row runs.
      beyond_context: by how many tokens the longest row, including tokens in a given cache, exceeds
        the length for which the model was trained. It is 0 for a ring whose window is shorter than
        this length.
      moves: layers that ``policy("auto")`` moved, in order.
      cached_tokens: the number of prompt tokens that the ``prefix_cache`` had cached.
      speculation: statistics of drafts; None without a draft.
    """

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_second: float
    cache_bytes: dict[str, int]
    compilations: int
    finish_reasons: tuple[str | None, ...]
    beyond_context: int = 0
    moves: tuple[Move, ...] = ()
    cached_tokens: int = 0
    speculation: Speculation | None = None


@dataclass(frozen=True)
class GenerationResult:
    """The result of ``generate``.

    If a stop string ends a row, ``text`` ends before it. If the stop string begins inside a token,
    ``text`` includes the first characters of that token, but ``tokens`` and ``cache`` do not
    include it.

    Attributes:
      text: the new text of each row, without special tokens; None if the model has no tokenizer.
      tokens: the new tokens of each row, including the end-of-text token.
      stats: times, sizes, and why each row ended.
      cache: the cache to continue from. It contains the prompts and the new tokens, except those in
        ``pending_tokens``. None with ``use_cache=False`` or a ``prefix_cache``. If a stop string
        has more tokens than the slack of a ring (its slots in addition to the window), the row
        can't be rewound to before the stop string. ``kvjax.check`` then raises an error; use
        ``kvjax.select`` to keep the other rows.
      pending_tokens: the tokens of each row that the cache does not contain. These are the newest
        token, or none after a stop string. To continue, put them at the beginning of the next
        prompt. After a beam search there can be several, because the cache of a finished sequence
        contains only its common prefix with a beam that ran to the end. The list is None if a ring
        or a tail could not be rewound to this prefix.
      logprobs: the scores of each row's ``tokens``; None without ``logprobs=``.
      lengths: int32[rows], the number of real tokens, with ``padded=True``; otherwise None. With
        ``padded=True``, ``tokens`` is int32[rows, max_new_tokens], and ``logprobs`` is a ``Scores``
        of the same shape, padded with 0. All are NumPy arrays.
      guides: the guide of each row, advanced by the row's tokens; None without ``guide=``. If a
        guide could not reach the end of its grammar, its ``error`` says why.
      sequence_scores: a score per row. For a beam search, it is the row's log-probability after
        penalties, divided by its length to the power of ``length_penalty``. With ``best_of``, it is
        the mean log-probability under the model's distribution. Otherwise None. If filters leave
        fewer sequences than requested, the missing ones are empty, and their scores are minus
        infinity.

    Example:
      ```python
      result = kvjax.generate(lm, "The json module", max_new_tokens=8)
      print(result.text[0], result.stats.finish_reasons, result.stats.cache_bytes)
      ```
    """

    # The annotations omit None, so that callers with a tokenizer and a cache need no assertions.
    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    cache: KVCache
    pending_tokens: list[list[int]]
    logprobs: Any = None  # list[list[TokenScore]] | Scores | None
    lengths: np.ndarray | None = None
    guides: Any = None  # tuple[Guide | None, ...] | None
    sequence_scores: list[float] | None = None


def pad_result(
    result: GenerationResult, width: int, padding: int, most: int | None
) -> GenerationResult:
    """Convert a result to one with arrays instead of lists.

    Args:
      result: the result with lists.
      width: the number of tokens per row.
      padding: the token that pads rows.
      most: how many of the most likely tokens have scores; None for no scores.
    """
    shape = len(result.tokens), width
    tokens = np.full(shape, padding, np.int32)
    for row, ids in enumerate(result.tokens):
        tokens[row, : len(ids)] = ids
    scores = None
    if most is not None:
        own, ids, likeliest = np.zeros((2, *shape)), *np.zeros((2, *shape, most))
        for row, row_scores in enumerate(result.logprobs):
            for at, score in enumerate(row_scores):
                own[:, row, at] = score.logprob, score.sampling_logprob
                if most:
                    ids[row, at], likeliest[row, at] = zip(*score.top_logprobs, strict=True)
        chosen, drawn, likeliest = (x.astype(np.float32) for x in (*own, likeliest))
        arrays: Any = chosen, drawn, ids.astype(np.int32), likeliest
        scores = Scores(*arrays)
    lengths = np.array([len(ids) for ids in result.tokens], np.int32)
    return replace(result, tokens=tokens, logprobs=scores, lengths=lengths)


@dataclass(frozen=True)
class Piece:
    """The text and tokens that one step of a ``stream`` adds.

    Attributes:
      text: new text of each row, which may be empty; None if the model has no tokenizer.
      tokens: new tokens of each row. The list may be empty.
      stats: statistics up to this step.
      logprobs: the scores of these tokens; None without ``logprobs=``.
    """

    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    logprobs: list[list[TokenScore]] | None = None


class Timer:
    """Measures the seconds inside ``with timer.running():``, and how many of them JAX spends on
    compilation."""

    def __init__(self) -> None:
        self.compilations = 0
        self._wall = 0.0
        # The events of a nested function overlap the outer function's, so intervals are merged.
        self._compiling: list[tuple[float, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure the work of this thread within the context. Timers can't be nested."""
        _thread.timer = self
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wall += time.perf_counter() - start
            _thread.timer = None

    @property
    def compile_seconds(self) -> float:
        """Seconds of tracing, lowering and compiling."""
        return sum((end - start for start, end in self._compiling), 0.0)

    @property
    def seconds(self) -> float:
        """Seconds without compilation."""
        return max(0.0, self._wall - self.compile_seconds)

    def record(self, event: str, seconds: float) -> None:
        """Record a JAX event that ends now."""
        if event not in _EVENTS:
            return
        end = time.perf_counter()
        start = end - seconds
        while self._compiling and self._compiling[-1][0] >= start:
            self._compiling.pop()
        if self._compiling:
            start = max(start, self._compiling[-1][1])
        self._compiling.append((start, end))
        self.compilations += event == _COMPILED


_COMPILED = "/jax/core/compile/backend_compile_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_EVENTS = ("/jax/core/compile/jaxpr_trace_duration", _LOWERED, _COMPILED)

# JAX compiles in the calling thread, so a timer per thread needs no lock.
_thread = threading.local()


def _listen(event: str, duration_secs: float, **_: object) -> None:
    timer: Timer | None = getattr(_thread, "timer", None)
    if timer is not None:
        timer.record(event, duration_secs)
    callback = COMPILE_CALLBACK.get()
    if callback is not None and event in (_LOWERED, _COMPILED):
        # Events arrive at the end of a phase. After lowering, the compiler starts.
        callback(event == _LOWERED)


jax.monitoring.register_event_duration_secs_listener(_listen)
