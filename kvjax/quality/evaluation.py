"""Measure how a cache policy changes a model's predictions on a text.

A pass over a text in chunks gives the same logits as decoding it token by token, because what a
query sees depends on positions alone. So one pass measures a policy. Every policy reads the same
windows of the text, and its predictions are compared with the predictions with a full-precision
cache.
"""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.checks import check
from kvjax.cache.creation import init_cache
from kvjax.cache.state import KVCache, LayerCache
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import tree_bytes
from kvjax.core.reporting import report_progress
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, as_int
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model, check_device
from kvjax.memory.sizes import token_bytes
from kvjax.operations.capacity import grow
from kvjax.operations.rows import rewind, rewindable
from kvjax.operations.stacks import unstack
from kvjax.placement.mesh import DATA
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice

FIRST_RANGE = 512
"""The number of positions in the first range of ``Quality.by_position``. Each further range ends at
twice the end of the previous range."""


@dataclass(frozen=True)
class PredictionMetrics:
    """How a policy changes the predictions of some tokens.

    Attributes:
      tokens: number of tokens.
      perplexity: the perplexity of the text.
      perplexity_ratio: ``perplexity`` divided by the perplexity with a full-precision cache.
      mean_kl, median_kl, high_kl: mean, median and 99.9th percentile of the Kullback-Leibler
        divergence from the full-precision predictions, in nats.
      top1: fraction of tokens for which the policy and the full-precision cache have the same most
        likely token.
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
    """Sizes of a cache, in bytes.

    Attributes:
      body: bytes per token, in all layers.
      scales: the part of ``body`` that is scales, zero points and means.
      tail: bytes per row, at any length.
      of_bfloat16: ``body`` divided by the bytes per token in bfloat16.
      tokens: the length of the row to which the next three attributes refer.
      encoded: number of tokens that the last query sees encoded, in the layer where this number is
        largest.
      row: bytes of the row's tail and of the filled part of its body.
      row_of_bfloat16: ``row`` divided by the bytes of all its tokens in bfloat16.
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
      by_position: metrics of ranges of positions. The keys are the ends of the ranges.
      bytes: bytes of the cache.
      step_ms: median milliseconds of a decode step at the end of a window, if timed.
      full: bytes of the full-precision cache, if it is a kvjax cache.
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
    """Compute metrics from per-token comparisons.

    ``comparisons`` is float[4, windows, tokens]. For each token it has the target's negative
    log-probability in nats with full precision, the same with the policy, the divergence, and
    whether both have the same most likely token.
    """
    by_position, start, context = {}, 0, comparisons.shape[2] + 1
    while start < context:
        end = min(max(FIRST_RANGE, 2 * start), context)
        by_position[end] = _metrics(comparisons[:, :, start:end].reshape(4, -1))
        start = end
    return Quality(_metrics(comparisons.reshape(4, -1)), by_position, size, step_ms, full)


def cache_bytes(cache: KVCache, tokens: int) -> CacheBytes:
    """Compute the bytes of a cache per token, per row, and for a row with ``tokens`` tokens."""
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
    """Return the number of tokens that the query at position ``at`` sees in encoded form.

    ``call`` is the first position of the call. Tokens from this position on are seen raw.
    """
    policy, layout = layer.policy, layer.policy.layout
    raw = min(max(at // policy.block - policy.recent, 0) * policy.block, call)
    window = min(layout.window or at + 1, layer.window or at + 1)
    return max(raw - max(at - window + 1, policy.split.tail.sinks), 0)


def _in_body(policy: CachePolicy, tokens: int) -> int:
    """Return the number of a row's tokens that are in the body of a layer."""
    if not policy.has_tail:
        return min(tokens, policy.stored_layout.slots)
    split = policy.split
    blocks = int(split.flushed(jnp.full(1, tokens, jnp.int32))[0])
    return policy.block * min(blocks, split.body.slots)


def pareto_front(qualities: Mapping[str, Quality]) -> list[str]:
    """Return the names of the policies on the Pareto front of bytes and mean divergence, smallest
    first."""
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


CHUNK = 256
"""Tokens per call."""


@without_mesh_context
def evaluate(
    lm: LanguageModel,
    text: str | Sequence[int],
    policies: Mapping[str, PolicyChoice],
    *,
    context: int | None = None,
    windows: int | None = None,
    chunk: int = CHUNK,
    time_steps: int = 0,
) -> dict[str, Quality]:
    """Compare cache policies on a text. Returns the metrics of each policy by name.

    The text is cut into windows of ``context`` tokens, each with a new cache. An incomplete window
    at the end is dropped, unless it is the only one. The first token of a window is not predicted.

    Args:
      lm: the model, on one device or on a mesh that does not divide rows.
      text: a string, or token ids.
      policies: the policies to compare, by name. Full precision is always measured, as the
        reference.
      context: tokens per window; by default the model's limit, or 2,048 without a limit.
      windows: maximum number of windows; by default all are used.
      chunk: tokens per call (forward pass) over the cache.
      time_steps: number of decode steps to time at the end of a window; 0 for none.

    Raises:
      ValueError: if the text has fewer than two tokens, a number is out of range, or windows are so
        short that a lossy policy's predictions see no quantized tokens.

    Example:
      ```python
      text = "An iterator is an object that returns its elements one at a time. " * 16
      metrics = kvjax.evaluate(lm, text, {"2 bits": kvjax.policy(bits=2)}, context=192, windows=1)
      print(metrics["2 bits"].overall.perplexity)
      ```
    """
    refuse_encoder("an evaluation", lm)
    check_device(lm)
    tokens = _tokens(lm, text)
    limit = position_limit(lm.config)
    own = getattr(lm.config, "max_position_embeddings", None) or limit or 2048
    context = as_int("context", own if context is None else context, 2)
    if limit is not None and context > limit:
        raise ArgumentError(
            f"context is {context}, but the model has only {limit} positions", param="context"
        )
    chunk = as_int("chunk", chunk, 1)
    context = min(context, len(tokens))
    count = len(tokens) // context
    count = count if windows is None else min(count, as_int("windows", windows, 1))
    cut = np.asarray(tokens[: count * context], np.int32).reshape(count, context)
    if lm.mesh is not None and lm.mesh.shape.get(DATA, 1) > 1:
        raise ValueError("a mesh can't divide a single text along data: use a mesh along tensor")
    empty = functools.partial(init_cache, lm.config, max_len=context, mesh=lm.mesh)
    comparisons: dict[str, list[Array]] = {name: [] for name in policies}
    done, total = 0, count * context * len(policies)
    last: Array | None = None
    caches = {name: empty(policy) for name, policy in policies.items()}
    for name, cache in caches.items():
        _check_encodes(name, cache, context, chunk)
    full = empty(CachePolicy())
    full_bytes = cache_bytes(unstacked_shapes(full), context)
    for number, window in enumerate(cut):
        if number:
            full = empty(CachePolicy())
            caches = {name: empty(policy) for name, policy in policies.items()}
        targets = np.roll(window, -1)  # the target of the last token is not used
        # Compare chunk by chunk, because logits take more memory than caches.
        for start in range(0, context, chunk):
            part = window[None, start : start + chunk]
            target = targets[start : start + chunk]
            place = f"window {number + 1} of {count}"
            report_progress(f"evaluating full precision, {place}", done, total, last)
            exact, full = _logits(lm.architecture, lm.params, part, full)
            for name in policies:
                report_progress(f"evaluating {name}, {place}", done, total, last)
                caches[name] = grow_to_hold(caches[name], start + part.shape[1], context)
                logits, caches[name] = _logits(lm.architecture, lm.params, part, caches[name])
                comparisons[name].append(last := _compare(exact, logits, target))
                done += len(target)
        for name, cache in {"full precision": full, **caches}.items():
            check_named(name, cache)
    report_progress("evaluating", done, total, last)
    return {
        name: compute_quality(
            np.concatenate(comparisons[name], axis=1).reshape(4, count, context)[:, :, :-1],
            cache_bytes(unstacked_shapes(caches[name]), context),
            _step_ms(lm, name, caches[name], cut[-1, -1:], time_steps) if time_steps else None,
            full_bytes,
        )
        for name in policies
    }


def unstacked_shapes(cache: KVCache) -> KVCache:
    """Return the shapes of a cache in which each layer is separate, to compute sizes per layer."""
    return cache if cache.stacks is None else jax.eval_shape(unstack, cache)


def _check_encodes(name: str, cache: KVCache, context: int, chunk: int) -> None:
    """Check that at least one prediction of a lossy policy sees encoded tokens. Otherwise the
    policy would look exact.

    Raises:
      ValueError: if no prediction does.
    """
    lossy = [x for x in cache.layers if x.policy.keys.blockwise or x.policy.values.blockwise]
    narrow = any((layer.policy.layout.window or context) < context for layer in cache.layers)
    distinct = {(layer.policy, layer.window): layer for layer in lossy}
    seen = (
        seen_encoded(layer, at, at // chunk * chunk if layer.policy.prefill == "exact" else at)
        for layer in distinct.values()
        for at in reversed(range(context - 1))  # the prediction of the last token is not used
    )
    if lossy and not narrow and not any(seen):
        policy = lossy[0].policy
        sinks = f", among the first {policy.split.tail.sinks}" if policy.split.tail.sinks else ""
        raise ValueError(
            f"{name}: in {context} tokens no prediction sees an encoded token: all are in the "
            f"query's block of {policy.block}, in the {policy.recent} before it{sinks}, or in the "
            "same call. Use a longer context or smaller blocks"
        )


def grow_to_hold(cache: KVCache, tokens: int, context: int) -> KVCache:
    """Double the capacity of a cache until ``tokens`` tokens fit, but not beyond ``context``."""
    to = cache.max_len
    while to < tokens:
        to *= 2
    return cache if to == cache.max_len else grow(cache, min(to, context))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _logits(model: Model, params: PyTree, tokens: Array, cache: KVCache) -> tuple[Array, KVCache]:
    return model.apply(params, tokens, cache)


@jax.jit
def _compare(exact: Array, logits: Array, target: Array) -> Array:
    """Compare two logits. Returns float32[4, new]: the target's nats under each, the divergence,
    and whether their most likely tokens are equal."""
    p, q = (jax.nn.log_softmax(x[0].astype(jnp.float32)) for x in (exact, logits))
    nats = [-jnp.take_along_axis(x, target[:, None], axis=1)[:, 0] for x in (p, q)]
    divergence = jnp.sum(jnp.exp(p) * (p - q), axis=-1)
    same = jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)
    return jnp.stack([*nats, divergence, same.astype(jnp.float32)])


def _step_ms(lm: LanguageModel, name: str, cache: KVCache, token: np.ndarray, steps: int) -> float:
    """Measure the median milliseconds of decode steps at the end of a text, except for the first
    step."""
    steps = min(steps, int(rewindable(cache)[0]))
    cache, times = rewind(cache, steps), []
    for number in range(steps):
        report_progress(f"timing steps of {name}", number, steps)
        start = time.perf_counter()
        logits, cache = _logits(lm.architecture, lm.params, token[None], cache)
        jax.block_until_ready(logits)
        times.append(1000 * (time.perf_counter() - start))
    return float(np.median(times[1:] or times))


def _tokens(lm: LanguageModel, text: str | Sequence[int]) -> list[int]:
    if isinstance(text, str):
        if lm.tokenizer is None:
            raise ValueError("the model has no tokenizer: give the text as token ids")
        text = lm.tokenizer.encode(text)
    tokens = [int(token) for token in text]
    if len(tokens) < 2:
        raise ValueError(f"the text needs at least 2 tokens, got {len(tokens)}")
    wrong = [token for token in tokens if not 0 <= token < lm.config.vocab_size]
    if wrong:
        raise ValueError(
            f"token id {wrong[0]} is out of range: the vocabulary has {lm.config.vocab_size} tokens"
        )
    return tokens


def check_named(name: str, cache: KVCache) -> None:
    """Call ``kvjax.check``, and add the policy's name to its error."""
    try:
        check(cache)
    except ValueError as error:
        raise type(error)(f"{name}: {error}") from None
