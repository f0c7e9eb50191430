"""Scores of an item on a cache: the likelihood of its answers, and the answers in greedy text."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

import kvjax
from benchmarks.retrieval_tasks import Item
from kvjax.core.pytree import tree_bytes
from kvjax.generation.loaded_model import LanguageModel
from kvjax.policies.presets import PolicyChoice

CONTEXT_CHUNK, CHUNK = 512, 16
"""Tokens per call, for the context and for the question with its answer. The last call is padded,
so that all items of one length use the same programs."""
FULL = kvjax.policy("static")
FORK_BYTES = 4 << 30
"""The most bytes of the forks that candidates are scored on together."""


@dataclass(frozen=True)
class Score:
    """An item's scores with one policy.

    Attributes:
      right: for each answer, whether it is more likely than every distractor.
      logprobs: for each answer, its log-probability, in nats.
      margins: for each answer, by how many nats it is more likely than the best distractor.
      text: the greedy text.
      found: the fraction of the answers that occur in it.
    """

    right: tuple[bool, ...]
    logprobs: tuple[float, ...]
    margins: tuple[float, ...]
    text: str
    found: float


def score_item(
    lm: LanguageModel,
    item: Item,
    policies: Mapping[str, PolicyChoice],
    *,
    prefill: str = "exact",
    capacity: int | None = None,
) -> dict[str, Score]:
    """Score an item with several policies.

    Args:
      lm: the model.
      item: the item, made with the model's tokenizer.
      policies: by name.
      prefill: ``"exact"``: the context is prefilled once with a full-precision cache, which is then
        converted to each policy; what follows the context is processed with the converted cache.
        ``"policy"``: each policy also prefills the context.
      capacity: tokens that caches other than full-precision ones can hold; by default the item's
        length. With one capacity, items of all lengths share compiled programs. A full-precision
        cache always has the item's length, because forks copy it.

    Raises:
      ValueError: if ``prefill`` is neither of these, or a cache overflows.
    """
    if prefill not in ("exact", "policy"):
        raise ValueError(f"prefill={prefill!r}: use 'exact' or 'policy'")
    context, scores, exact = item.context_ids, {}, None
    for name, policy in policies.items():
        size = item.length if policy == FULL else capacity or item.length
        if prefill == "policy":
            cache = kvjax.init_cache(lm.config, policy, batch=1, max_len=size)
            cache = extend(lm, cache, context, CONTEXT_CHUNK)
        else:
            if exact is None:
                exact = kvjax.init_cache(lm.config, FULL, batch=1, max_len=item.length)
                exact = extend(lm, exact, context, CONTEXT_CHUNK)
            # Forked because calls donate it, and a converted cache shares arrays with the other.
            cache = kvjax.fork(kvjax.convert(exact, policy, max_len=size))
        scores[name] = score_after_context(lm, item, cache)
    return scores


def score_after_context(lm: LanguageModel, item: Item, cache: kvjax.KVCache) -> Score:
    """Score an item on a cache that holds its context; the cache may be donated."""
    *question, last = item.question_ids
    cache = extend(lm, cache, question, CHUNK)
    result = kvjax.generate(lm, [[last]], cache=kvjax.fork(cache), max_new_tokens=item.new_tokens)
    text = result.text[0]
    right, logprobs, margins = [], [], []
    for step in item.steps:
        if step.lead:
            cache = extend(lm, cache, [last, *step.lead[:-1]], CHUNK)
            last = step.lead[-1]
        answer, *others = candidate_logprobs(lm, cache, last, step.candidates)
        right.append(bool(answer > max(others)))
        logprobs.append(float(answer))
        margins.append(float(answer - max(others)))
    kvjax.check(cache)
    return Score(tuple(right), tuple(logprobs), tuple(margins), text, found_in(text, item.answers))


def found_in(text: str, answers: Sequence[str]) -> float:
    """The fraction of the answers that occur in a text, in any case, as in RULER."""
    return sum(answer.lower() in text.lower() for answer in answers) / len(answers)


def candidate_logprobs(
    lm: LanguageModel, cache: kvjax.KVCache, last: int, candidates: Sequence[Sequence[int]]
) -> np.ndarray:
    """float32[candidates]: the log-probability of each continuation of a cache with one row.

    Args:
      lm: the model.
      cache: the tokens before ``last``. Each candidate continues a fork of it.
      last: the token before the candidates, which the cache does not hold yet.
      candidates: token ids.
    """
    fits = FORK_BYTES // max(tree_bytes(cache), 1)
    rows = next((n for n in (9, 3) if n <= fits), 1)
    width = -(-max(map(len, candidates)) // CHUNK) * CHUNK
    totals = []
    for start in range(0, len(candidates), rows):
        part = candidates[start : start + rows]
        inputs, targets = np.zeros((2, len(part), width), np.int32)
        lengths = np.array([len(ids) for ids in part], np.int32)
        for row, ids in enumerate(part):
            inputs[row, : len(ids)] = [last, *ids[:-1]]
            targets[row, : len(ids)] = ids
        forks, total = kvjax.repeat(cache, len(part)), np.zeros(len(part), np.float32)
        for at in range(0, width, CHUNK):
            columns = np.s_[:, at : at + CHUNK]
            real = np.clip(lengths - at, 0, CHUNK).astype(np.int32)
            new, forks = _score(
                lm.architecture, lm.params, inputs[columns], targets[columns], forks, real
            )
            total += np.asarray(new)
        kvjax.check(forks)
        totals.append(total)
    return np.concatenate(totals)


def extend(
    lm: LanguageModel, cache: kvjax.KVCache, tokens: Sequence[int], chunk: int
) -> kvjax.KVCache:
    """Append tokens to a cache with one row, ``chunk`` at a time. The cache is donated."""
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        padded = np.zeros((1, chunk), np.int32)
        padded[0, : len(part)] = part
        length = np.array([len(part)], np.int32)
        cache = _extend(lm.architecture, lm.params, padded, cache, length)
    return cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _extend(
    model: Any, params: PyTree, tokens: Array, cache: kvjax.KVCache, lengths: Array
) -> kvjax.KVCache:
    return model.apply(params, tokens, cache, lengths=lengths, last_only=True)[1]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _score(
    model: Any,
    params: PyTree,
    tokens: Array,
    targets: Array,
    cache: kvjax.KVCache,
    lengths: Array,
) -> tuple[Array, kvjax.KVCache]:
    """The sum of the log-probabilities of each row's targets, and the cache."""
    logits, cache = model.apply(params, tokens, cache, lengths=lengths)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    own = jnp.take_along_axis(logprobs, targets[:, :, None], axis=-1)[:, :, 0]
    real = jnp.arange(tokens.shape[1]) < lengths[:, None]
    return jnp.sum(jnp.where(real, own, 0), axis=1), cache
