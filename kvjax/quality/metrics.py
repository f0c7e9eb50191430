"""Metrics of a lossy cache: perplexity, divergence and bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.state import KVCache, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.memory.sizes import token_bytes
from kvjax.policies.cache_policy import CachePolicy

FIRST_RANGE = 512
"""Positions in the first range of ``Quality.by_position``; each further range doubles the end."""


@dataclass(frozen=True)
class PredictionMetrics:
    """How a policy changes the predictions of some tokens.

    Attributes:
      tokens: number of tokens.
      perplexity: of the text.
      perplexity_ratio: relative to the full-precision cache.
      mean_kl, median_kl, high_kl: mean, median and 99.9th percentile of the Kullback-Leibler
        divergence from the full-precision predictions, in nats.
      top1: fraction of tokens where both predict the same token first.
    """

    tokens: int
    perplexity: float
    perplexity_ratio: float
    mean_kl: float
    median_kl: float
    high_kl: float
    top1: float


@dataclass(frozen=True)
class CacheBytes:
    """Bytes of a cache.

    Attributes:
      body: bytes per token, in all layers.
      scales: the part of ``body`` that is scales, zero points and means.
      tail: bytes per row, at any length.
      of_bfloat16: ``body`` relative to bfloat16.
      tokens: tokens of the row that the next three count.
      encoded: tokens that the last query sees in encoded form, in the layer with the most.
      row: bytes of the row's tail and of the filled part of its body.
      row_of_bfloat16: ``row`` relative to all its tokens in bfloat16.
    """

    body: float
    scales: float
    tail: float
    of_bfloat16: float
    tokens: int
    encoded: int
    row: float
    row_of_bfloat16: float


@dataclass(frozen=True)
class Quality:
    """The metrics of a policy.

    Attributes:
      overall: metrics of all tokens.
      by_position: metrics of ranges of positions, by the end of the range.
      bytes: bytes of the cache.
      step_ms: median milliseconds of a decode step at the end of a window, if timed.
      full: bytes of the full-precision cache, if it is one of kvjax.
    """

    overall: PredictionMetrics
    by_position: dict[int, PredictionMetrics]
    bytes: CacheBytes
    step_ms: float | None = None
    full: CacheBytes | None = None


def compute_quality(
    comparisons: np.ndarray,
    size: CacheBytes,
    step_ms: float | None = None,
    full: CacheBytes | None = None,
) -> Quality:
    """Metrics from per-token comparisons.

    ``comparisons``: float[4, windows, tokens]: the target's nats with full precision and with the
    policy, the divergence, and whether both predict the same token first.
    """
    by_position, start, context = {}, 0, comparisons.shape[2] + 1
    while start < context:
        end = min(max(FIRST_RANGE, 2 * start), context)
        by_position[end] = _metrics(comparisons[:, :, start:end].reshape(4, -1))
        start = end
    return Quality(_metrics(comparisons.reshape(4, -1)), by_position, size, step_ms, full)


def cache_bytes(cache: KVCache, tokens: int) -> CacheBytes:
    """Bytes of a cache per token, per row, and of a row with ``tokens``."""
    body = scales = tail = raw = row = 0.0
    encoded = 0
    for layer in cache.layers:
        policy, stored = layer.policy, token_bytes(layer, (layer.keys, layer.values))
        own_tail, filled = tree_bytes(layer.tail) / cache.batch, _in_body(policy, tokens)
        body, tail, row = body + stored, tail + own_tail, row + own_tail + filled * stored
        if policy.keys.blockwise or policy.values.blockwise:
            encoded = max(encoded, seen_encoded(layer, tokens - 1, tokens))
        raw += 2 * 2 * layer.kv_heads * layer.head_dim
        for store, codec in ((layer.keys, policy.keys), (layer.values, policy.values)):
            if codec.blockwise:
                not_codes = [leaf for leaf in jax.tree.leaves(store) if leaf.dtype.itemsize > 1]
                scales += token_bytes(layer, not_codes)
    share = row / (raw * tokens)
    return CacheBytes(body, scales, tail, body / raw, tokens, encoded, row, share)


def seen_encoded(layer: LayerCache, at: int, call: int) -> int:
    """The number of tokens that the query at position ``at`` sees in encoded form.

    ``call``: the first position that is raw because it is in the same call.
    """
    policy, layout = layer.policy, layer.policy.layout
    raw = min(max(at // policy.block - policy.recent, 0) * policy.block, call)
    window = min(layout.window or at + 1, layer.window or at + 1)
    return max(raw - max(at - window + 1, layout.sinks), 0)


def _in_body(policy: CachePolicy, tokens: int) -> int:
    """The number of a row's tokens that are in the body of a layer."""
    if not policy.has_tail:
        return min(tokens, policy.stored_layout.slots)
    split = policy.split
    blocks = int(split.flushed(jnp.full(1, tokens, jnp.int32))[0])
    return policy.block * min(blocks, split.body.slots)


def pareto_front(qualities: Mapping[str, Quality]) -> list[str]:
    """The policies that no other beats in both bytes and mean divergence, smallest first."""
    at = {
        name: (quality.bytes.body, quality.overall.mean_kl) for name, quality in qualities.items()
    }
    front: list[str] = []
    for name in sorted(at, key=at.__getitem__):
        if not front or at[name][1] < at[front[-1]][1]:
            front.append(name)
    return front


def _metrics(comparisons: np.ndarray) -> PredictionMetrics:
    exact_nats, nats, divergence, same = comparisons.astype(np.float64)
    return PredictionMetrics(
        tokens=len(nats),
        perplexity=math.exp(nats.mean()),
        perplexity_ratio=math.exp(nats.mean() - exact_nats.mean()),
        mean_kl=float(divergence.mean()),
        median_kl=float(np.median(divergence)),
        high_kl=float(np.quantile(divergence, 0.999)),
        top1=float(same.mean()),
    )
