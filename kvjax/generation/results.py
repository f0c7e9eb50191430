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
from kvjax.operations.capacity import Move
from kvjax.sampling.scores import Scores, TokenScore


@dataclass(frozen=True)
class Speculation:
    """How drafts fared: tokens that were ``proposed``, and ``accepted`` of them; ``passes`` of the
    model behind the prompts, and ``saved``, those that the longest row would have taken more of
    without drafts."""

    proposed: int
    accepted: int
    passes: int
    saved: int


def speculation_stats(fared: Any, count: Any, rows: int) -> Speculation:
    """From an ``Acceptance`` on the host, and the new tokens of each row, of which ``rows`` were
    asked for."""
    passes = int(fared.passes)
    proposed, accepted = (int(x[:rows].sum()) for x in (fared.proposed, fared.accepted))
    return Speculation(proposed, accepted, passes, int(count.max()) - 1 - passes)


@dataclass(frozen=True)
class GenerationStats:
    """Figures of one ``generate`` or ``stream``.

    ``prompt_tokens``, ``new_tokens``: sums over the rows.
    ``compile_seconds``: tracing, lowering and compiling; in no other figure.
    ``prefill_seconds``: from the prompts to the first new token of each row.
    ``decode_seconds``: everything after that, decoding to text included, but not what the reader
    of a stream does between two pieces.
    ``decode_tokens_per_second``: tokens that the decode loop made, over ``decode_seconds``; 0.0
    where it made none. What was made and then dropped for a stop string is counted.
    ``cache_bytes``: of the cache, by place; empty without a cache.
    ``compilations``: programs compiled, or fetched from the persistent compilation cache.
    ``stop_reasons``: ``"eos"``, ``"stop"``, ``"length"`` or, of a stream, ``"stopped"``, one a row;
    None while it runs.
    ``beyond_context``: tokens of the longest row's text, those of a given cache among them, beyond
    the length that the model was trained for: what it makes of them is a guess. Of a ring, in which
    no distance is as long, none.
    ``cached_tokens``: of the prompts' tokens, those that a ``prefix_cache`` had.
    ``speculation``: how drafts fared, where there were any.
    ``moves``: layers of ``policy("auto")`` that changed their place, a ``Move`` each, in order.
    """

    prompt_tokens: int
    new_tokens: int
    compile_seconds: float
    prefill_seconds: float
    decode_seconds: float
    decode_tokens_per_second: float
    cache_bytes: dict[str, int]
    compilations: int
    stop_reasons: tuple[str | None, ...]
    beyond_context: int = 0
    moves: tuple[Move, ...] = ()
    cached_tokens: int = 0
    speculation: Speculation | None = None


class Timer:
    """Seconds spent inside ``with meter.running():``, and the part of them spent compiling."""

    def __init__(self) -> None:
        self.compilations = 0
        self._wall = 0.0
        # Events of nested functions lie inside those of the outer one: intervals, not a sum.
        self._compiling: list[tuple[float, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measure what this thread does inside; meters do not nest."""
        _thread.meter = self
        start = time.perf_counter()
        try:
            yield
        finally:
            self._wall += time.perf_counter() - start
            _thread.meter = None

    @property
    def compile_seconds(self) -> float:
        """Seconds of tracing, lowering and compiling."""
        return sum((end - start for start, end in self._compiling), 0.0)

    @property
    def seconds(self) -> float:
        """Seconds without compilation."""
        return max(0.0, self._wall - self.compile_seconds)

    def record(self, event: str, seconds: float) -> None:
        """Take in an event of JAX that ends now."""
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

# JAX compiles in the thread that calls, so a meter a thread needs no lock.
_thread = threading.local()


def _listen(event: str, duration_secs: float, **_: Any) -> None:
    meter: Timer | None = getattr(_thread, "meter", None)
    if meter is not None:
        meter.record(event, duration_secs)
    compiles = COMPILE_CALLBACK.get()
    if compiles is not None and event in (_LOWERED, _COMPILED):
        compiles(event == _LOWERED)  # events come at an end, and the compiler is behind this one


jax.monitoring.register_event_duration_secs_listener(_listen)


@dataclass(frozen=True)
class GenerationResult:
    """What ``generate`` gives.

    ``text``: the new text of each row, without special tokens and without the prompt; None where
    the model has no tokenizer.
    ``tokens``: the new tokens of each row, the end-of-text token included.
    ``stats``: what it cost, and why each row ended.
    ``cache``: the prompts and the tokens that were fed, to continue from; None without a cache, and
    with a ``prefix_cache``, which has them.
    A row with a stop string that is longer than its ring's slack may be left behind it:
    ``kvjax.check`` says so, and ``kvjax.select`` has the other rows.
    ``unfed``: tokens of each row that belong to it, but are not in the cache yet: the newest one,
    or none where a stop string took back later ones. A continuation's prompts begin with them.
    ``logprobs``: of each of ``tokens``, where they were asked for, else None.
    ``lengths``: None, but where ``padded`` arrays were asked for: then ``tokens`` is int32[rows,
    max_new_tokens], ``lengths`` int32[rows], how many of these are real, and ``logprobs`` are
    ``Scores`` of [rows, max_new_tokens], 0 behind the last one, all of them NumPy's.
    ``guides``: of each row the guide that went along it, or None, where any was given, else None;
    the ``error`` of one of ``Guides`` says why it could not go on to the end of its grammar. Of a
    beam search it has taken in all of the row's tokens.
    ``sequence_scores``: of a beam search, the sum of each row's log-probabilities, with what
    penalties made of them, over its length to the power of ``length_penalty``; of ``best_of``, the
    mean of its log-probabilities by the model's own distribution; else None.

    Of a beam search ``unfed`` may be more tokens than one: the cache has of each text what it has
    in common with a beam that went on to the end; it is None where a ring or a tail can't be taken
    back so far. A text that there is not, as filters left fewer, is empty, and its score minus
    infinity.

    A row that met a stop string has the text before it, and the longest run of tokens whose text
    does not reach into it. Where a stop string begins inside a token, ``text`` has the first
    characters of that token, and ``tokens`` and ``cache`` end before it.
    """

    # The annotations leave None out: who has a tokenizer and a cache need not assert it.
    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    cache: KVCache
    unfed: list[list[int]]
    logprobs: Any = None  # list[list[TokenScore]] | Scores | None
    lengths: Any = None
    guides: Any = None  # tuple[Guide | None, ...] | None
    sequence_scores: list[float] | None = None


def pad_result(
    result: GenerationResult, width: int, padding: int, most: int | None
) -> GenerationResult:
    """A result with arrays in place of lists; ``most``: likeliest tokens that were told with each,
    None for no log-probabilities."""
    shape = len(result.tokens), width
    tokens: Any = np.full(shape, padding, np.int32)
    for row, ids in enumerate(result.tokens):
        tokens[row, : len(ids)] = ids
    scores = None
    if most is not None:
        one, ids, likeliest = np.zeros((2, *shape)), *np.zeros((2, *shape, most))
        for row, told in enumerate(result.logprobs):
            for at, each in enumerate(told):
                one[:, row, at] = each.logprob, each.drawn
                if most:
                    ids[row, at], likeliest[row, at] = zip(*each.likeliest, strict=True)
        chosen, drawn, likeliest = (x.astype(np.float32) for x in (*one, likeliest))
        arrays: Any = chosen, drawn, ids.astype(np.int32), likeliest
        scores = Scores(*arrays)
    lengths = np.array([len(ids) for ids in result.tokens], np.int32)
    return replace(result, tokens=tokens, logprobs=scores, lengths=lengths)


@dataclass(frozen=True)
class Piece:
    """What one step of a ``stream`` adds: the new text (None without a tokenizer) and tokens of
    each row, empty where there are none, the figures so far, and the ``logprobs`` of these tokens,
    None where they were not asked for."""

    text: list[str]
    tokens: list[list[int]]
    stats: GenerationStats
    logprobs: list[list[TokenScore]] | None = None
