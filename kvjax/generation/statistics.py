"""What a generation cost: seconds with and without compilation, and how much was compiled."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax

from kvjax.core.progress import HEARS_COMPILERS
from kvjax.operations.room import Move


@dataclass(frozen=True)
class Speculation:
    """How drafts fared: tokens that were ``proposed``, and ``accepted`` of them; ``passes`` of the
    model behind the prompts, and ``saved``, those that the longest row would have taken more of
    without drafts."""

    proposed: int
    accepted: int
    passes: int
    saved: int


def speculation(fared: Any, count: Any, rows: int) -> Speculation:
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


class Meter:
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
    meter: Meter | None = getattr(_thread, "meter", None)
    if meter is not None:
        meter.record(event, duration_secs)
    compiles = HEARS_COMPILERS.get()
    if compiles is not None and event in (_LOWERED, _COMPILED):
        compiles(event == _LOWERED)  # events come at an end, and the compiler is behind this one


jax.monitoring.register_event_duration_secs_listener(_listen)
