"""Figures of a lossy cache: from those of single tokens, and its bytes."""

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
"""Positions of the first range that figures are given for; each further one ends twice as far."""


@dataclass(frozen=True)
class PredictionMetrics:
    """What a policy does to the predictions of some tokens.

    ``tokens``: how many. ``perplexity``: of the text. ``mean_kl``, ``median_kl``, ``high_kl``: the
    Kullback-Leibler divergence of the predictions from those with the full-precision cache, in
    nats: mean, median and 99.9th percentile. ``top1``: the share of tokens at which both predict
    the same one first. ``perplexity_ratio``: to the full-precision cache's.
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
    """What a cache takes. ``body``: bytes a token of all layers, ``scales`` of them scales, zero
    points and means; ``tail``: bytes a row, however long its text; ``of_bfloat16``: the body's
    bytes to those of the same numbers in bfloat16. Of a text of ``tokens``: ``encoded``, how many
    of them its last query sees as a codec gives them back, in the layer that has the most;
    ``row``: bytes of its tail and of what it fills of the body; ``row_of_bfloat16``: to those of
    all its tokens in bfloat16."""

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
    """A policy's figures: over all tokens, by range of positions (the keys are where ranges end),
    its bytes, the median milliseconds of a decode step at the end of a window, if asked, and the
    bytes of the full-precision cache of the same text, where that is one of kvjax."""

    overall: PredictionMetrics
    by_position: dict[int, PredictionMetrics]
    bytes: CacheBytes
    step_ms: float | None = None
    full: CacheBytes | None = None


def compute_quality(
    each: np.ndarray,
    size: CacheBytes,
    step_ms: float | None = None,
    full: CacheBytes | None = None,
) -> Quality:
    """Figures from those of single tokens.

    ``each``: float[4, windows, tokens]: nats of the token that came, with full precision and with
    the policy, the divergence, and whether both predict the same first.
    """
    by_position, start, context = {}, 0, each.shape[2] + 1
    while start < context:
        end = min(max(FIRST_RANGE, 2 * start), context)
        by_position[end] = _figures(each[:, :, start:end].reshape(4, -1))
        start = end
    return Quality(_figures(each.reshape(4, -1)), by_position, size, step_ms, full)


def cache_bytes(cache: KVCache, tokens: int) -> CacheBytes:
    """Bytes of a cache, a token and a row, and of a row's text of so many tokens."""
    body = scales = tail = raw = row = 0.0
    encoded = 0
    for layer in cache.layers:
        policy, stored = layer.policy, token_bytes(layer, (layer.keys, layer.values))
        own, filled = tree_bytes(layer.tail) / cache.batch, _in_body(policy, tokens)
        body, tail, row = body + stored, tail + own, row + own + filled * stored
        if policy.keys.blockwise or policy.values.blockwise:
            encoded = max(encoded, seen_encoded(layer, tokens - 1, tokens))
        raw += 2 * 2 * layer.kv_heads * layer.head_dim
        for store, codec in ((layer.keys, policy.keys), (layer.values, policy.values)):
            if codec.blockwise:
                wide = [leaf for leaf in jax.tree.leaves(store) if leaf.dtype.itemsize > 1]
                scales += token_bytes(layer, wide)
    share = row / (raw * tokens)
    return CacheBytes(body, scales, tail, body / raw, tokens, encoded, row, share)


def seen_encoded(held: LayerCache, at: int, call: int) -> int:
    """Tokens that the query at a position sees through a layer's codecs; all from ``call`` on,
    where its call begins, are raw."""
    policy, layout = held.policy, held.policy.layout
    raw = min(max(at // policy.block - policy.recent, 0) * policy.block, call)
    window = min(layout.window or at + 1, held.window or at + 1)
    return max(raw - max(at - window + 1, layout.sinks), 0)


def _in_body(policy: CachePolicy, tokens: int) -> int:
    """Tokens of a text that stand in a layer's body."""
    if not policy.has_tail:
        return min(tokens, policy.stored_layout.slots)
    split = policy.split
    blocks = int(split.flushed(jnp.full(1, tokens, jnp.int32))[0])
    return policy.block * min(blocks, split.body.slots)


def pareto_front(qualities: Mapping[str, Quality]) -> list[str]:
    """The policies that no other beats in both bytes and mean divergence, fewest bytes first."""
    at = {name: (each.bytes.body, each.overall.mean_kl) for name, each in qualities.items()}
    front: list[str] = []
    for name in sorted(at, key=at.__getitem__):
        if not front or at[name][1] < at[front[-1]][1]:
            front.append(name)
    return front


def _figures(each: np.ndarray) -> PredictionMetrics:
    plain, nats, divergence, same = each.astype(np.float64)
    return PredictionMetrics(
        tokens=len(nats),
        perplexity=math.exp(nats.mean()),
        perplexity_ratio=math.exp(nats.mean() - plain.mean()),
        mean_kl=float(divergence.mean()),
        median_kl=float(np.median(divergence)),
        high_kl=float(np.quantile(divergence, 0.999)),
        top1=float(same.mean()),
    )
