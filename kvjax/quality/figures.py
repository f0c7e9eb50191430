"""Figures of a lossy cache: from those of single tokens, and its bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np

from kvjax.cache.state import KVCache
from kvjax.core.trees import tree_bytes
from kvjax.memory.sizes import token_bytes

FIRST_RANGE = 512
"""Positions of the first range that figures are given for; each further one ends twice as far."""


@dataclass(frozen=True)
class Figures:
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
    bytes to those of the same numbers in bfloat16."""

    body: float
    scales: float
    tail: float
    of_bfloat16: float


@dataclass(frozen=True)
class Quality:
    """A policy's figures: over all tokens, by range of positions (the keys are where ranges end),
    its bytes, and the median milliseconds of a decode step at the end of a window, if asked."""

    overall: Figures
    by_position: dict[int, Figures]
    bytes: CacheBytes
    step_ms: float | None = None


def quality_of(each: np.ndarray, size: CacheBytes, step_ms: float | None = None) -> Quality:
    """Figures from those of single tokens.

    ``each``: float[4, windows, tokens]: nats of the token that came, with full precision and with
    the policy, the divergence, and whether both predict the same first.
    """
    by_position, start, context = {}, 0, each.shape[2] + 1
    while start < context:
        end = min(max(FIRST_RANGE, 2 * start), context)
        by_position[end] = _figures(each[:, :, start:end].reshape(4, -1))
        start = end
    return Quality(_figures(each.reshape(4, -1)), by_position, size, step_ms)


def cache_bytes(cache: KVCache) -> CacheBytes:
    """Bytes of a cache, a token and a row."""
    body = scales = tail = raw = 0.0
    for layer in cache.layers:
        policy = layer.policy
        body += token_bytes(layer, (layer.keys, layer.values))
        tail += tree_bytes(layer.tail) / cache.batch
        raw += 2 * 2 * layer.kv_heads * layer.head_dim
        for store, codec in ((layer.keys, policy.keys), (layer.values, policy.values)):
            if codec.blockwise:
                wide = [leaf for leaf in jax.tree.leaves(store) if leaf.dtype.itemsize > 1]
                scales += token_bytes(layer, wide)
    return CacheBytes(body, scales, tail, body / raw)


def pareto_front(qualities: Mapping[str, Quality]) -> list[str]:
    """The policies that no other beats in both bytes and mean divergence, fewest bytes first."""
    at = {name: (each.bytes.body, each.overall.mean_kl) for name, each in qualities.items()}
    front: list[str] = []
    for name in sorted(at, key=at.__getitem__):
        if not front or at[name][1] < at[front[-1]][1]:
            front.append(name)
    return front


def _figures(each: np.ndarray) -> Figures:
    plain, nats, divergence, same = each.astype(np.float64)
    return Figures(
        tokens=len(nats),
        perplexity=math.exp(nats.mean()),
        perplexity_ratio=math.exp(nats.mean() - plain.mean()),
        mean_kl=float(divergence.mean()),
        median_kl=float(np.median(divergence)),
        high_kl=float(np.quantile(divergence, 0.999)),
        top1=float(same.mean()),
    )
