"""Metrics for Prometheus, and the numbers for the web page."""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvjax.engine.engine import Engine
from kvjax.engine.handle import Handle
from kvjax.serve.json_body import JsonObject

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
_REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_COUNTERS = {
    "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
    "prefill_tokens": ("prefill_tokens", "Prompt tokens computed."),
    "generation_tokens": ("new_tokens", "Tokens generated."),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens drafted."),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Drafted tokens accepted."),
    "num_preemptions": ("preemptions", "Preemptions of running requests."),
}
"""For each counter, the field of ``EngineStats`` from which it is read, and its description."""


class Metrics(Collector):
    """Metrics with vLLM's names, and ``stats`` for the web page."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._samples: deque[tuple[float, int]] = deque(maxlen=6)
        self._registry = registry = CollectorRegistry()
        registry.register(self)
        self._first_token = Histogram(
            "time_to_first_token_seconds",
            "Time from a request to its first token.",
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self._token = Histogram(
            "inter_token_latency_seconds",
            "Time between tokens; each token counts with the mean of its sequence.",
            buckets=_TOKEN_BUCKETS,
            registry=registry,
        )
        self._request = Histogram(
            "e2e_request_latency_seconds",
            "Time from a request to its end.",
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self._finished = Counter(
            "request_success",
            "Finished sequences, by the reason for the end.",
            ["finished_reason"],
            registry=registry,
        )

    def record(self, handle: Handle) -> None:
        """Count a sequence that has finished or was cancelled."""
        times, count = handle.times, len(handle.generated)
        self._finished.labels(handle.finish_reason or "cancelled").inc()
        if times.first_token is None or times.newest_token is None:
            return
        self._first_token.observe(times.first_token - times.submitted)
        for _ in range(count - 1):
            self._token.observe((times.newest_token - times.first_token) / (count - 1))
        if times.finished is not None:
            self._request.observe(times.finished - times.submitted)

    def sample(self) -> None:
        """Sample the token count. The server calls this once a second."""
        self._samples.append((time.monotonic(), self._engine.stats().new_tokens))

    def stats(self) -> JsonObject:
        """Return the numbers that the web page draws."""
        stats = self._engine.stats()
        return asdict(stats) | {
            "cached_pages": stats.cached_pages,
            "usage": stats.usage,
            "tokens_per_second": self._tokens_per_second(),
        }

    def exposition(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are read from the engine. The Prometheus client calls this."""
        stats = self._engine.stats()
        for name, value, description in (
            ("num_requests_running", stats.running, "Sequences that have a row of the batch."),
            ("num_requests_waiting", stats.waiting, "Sequences that wait for a row."),
            ("kv_cache_usage_perc", stats.usage, "Fraction of the cache's pages in use, 0 to 1."),
        ):
            yield GaugeMetricFamily(name, description, value=value)
        for name, (field, description) in _COUNTERS.items():
            yield CounterMetricFamily(name, description, value=getattr(stats, field))

    def _tokens_per_second(self) -> float:
        """Return the new tokens per second over the last few samples."""
        if len(self._samples) < 2:
            return 0.0
        (start, before), (end, after) = self._samples[0], self._samples[-1]
        return max(after - before, 0) / max(end - start, 1e-6)
