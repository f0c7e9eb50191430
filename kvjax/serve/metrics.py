"""What a server has done and has, for Prometheus, and for its page."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle

_FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_COUNTERS = {
    "prefix_cache_queries": ("prompt_tokens", "Tokens of prompts that were looked for."),
    "prefix_cache_hits": ("cached_tokens", "Tokens of prompts that others had computed."),
    "prefill_tokens": ("prefill_tokens", "Tokens of prompts that were computed."),
    "generation_tokens": ("new_tokens", "Tokens that were chosen."),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens that were drafted."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens that were accepted."),
    "num_preemptions": ("preemptions", "Requests that gave their memory to others."),
}
"""By the name of a metric: of ``EngineStats``, and what it is."""


class Figures(Collector):
    """Metrics by the names that vLLM has for them, and ``stats`` for the page."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._moments: deque[tuple[float, int]] = deque(maxlen=6)
        self._registry = CollectorRegistry()
        self._registry.register(self)

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, buckets=buckets, registry=self._registry)

        self._first = histogram(
            "time_to_first_token_seconds", "From a request to its first token.", _FIRST
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Between a request's tokens, its mean for each.",
            _BETWEEN,
        )  # fmt: skip
        self._whole = histogram("e2e_request_latency_seconds", "From a request to its end.", _WHOLE)
        self._ended = Counter(
            "request_success",
            "Choices by how they ended.",
            ["finished_reason"],
            registry=self._registry,
        )

    def ended(self, handle: Handle) -> None:
        """Count a choice that has ended, or was given up."""
        times, count = handle.times, len(handle.drawn)
        self._ended.labels(handle.reason or "cancelled").inc()
        if times.first_token is None or times.newest_token is None:
            return
        self._first.observe(times.first_token - times.submitted)
        for _ in range(count - 1):
            self._between.observe((times.newest_token - times.first_token) / (count - 1))
        if times.finished is not None:
            self._whole.observe(times.finished - times.submitted)

    def sample(self) -> None:
        """Remember how far it is; once a second."""
        self._moments.append((time.monotonic(), self._engine.stats().new_tokens))

    def stats(self) -> dict[str, Any]:
        """What the page draws."""
        stats = self._engine.stats()
        more = {"cached": stats.cached, "usage": stats.usage, "tokens_per_second": self._speed()}
        return asdict(stats) | more

    def text(self) -> bytes:
        """What Prometheus reads."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Of Prometheus' client: what is read off the engine."""
        stats = self._engine.stats()
        for name, value, what in (
            ("num_requests_running", stats.running, "Choices that have a row."),
            ("num_requests_waiting", stats.waiting, "Choices without a row."),
            ("kv_cache_usage_perc", stats.usage, "The part of its pages that rows have, 0 to 1."),
        ):
            yield GaugeMetricFamily(name, what, value=value)
        for name, (field, what) in _COUNTERS.items():
            yield CounterMetricFamily(name, what, value=getattr(stats, field))

    def _speed(self) -> float:
        """New tokens a second, of the last few seconds."""
        if len(self._moments) < 2:
            return 0.0
        (start, before), (end, after) = self._moments[0], self._moments[-1]
        return max(after - before, 0) / max(end - start, 1e-6)
