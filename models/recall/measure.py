"""The key-value retrieval task, and how many facts a model retrieves with a compressed cache.

Perplexity does not show lost tokens well, as most of a text is predicted from nearby tokens. Here a
sequence states facts and then asks for each of them, and a model trained for this task answers.

A sequence consists of (key, value) pairs. The first pairs are facts, with distinct keys. The others
are questions: they repeat a key, and its value can only be predicted from the fact. Keys and values
are drawn at random for each sequence, so they can't be memorized.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.creation import init_cache
from kvjax.cache.state import KVCache
from kvjax.core.reporting import report_progress
from kvjax.core.typing import Array
from kvjax.core.validation import as_int
from kvjax.generation.loaded_model import LanguageModel
from kvjax.policies.presets import PolicyChoice
from kvjax.quality.evaluation import CHUNK, CacheBytes, cache_bytes, check_named, grow_to_hold

from .. import load
from ..architecture import Architecture
from . import FOLDER

KEYS = 256
VALUES = 64
VOCABULARY = 1 + KEYS + VALUES
"""Token 0 is unused. It is followed by the keys, then the values."""


def quiz(rng: np.random.Generator, rows: int, facts: int, questions: int) -> np.ndarray:
    """Generate test sequences: facts, then questions about some of them, each at most once.

    Returns:
      int32[rows, 2 * (facts + questions)].

    Raises:
      ValueError: if there are more questions than facts, or more facts than keys.
    """
    if not 0 < questions <= facts <= KEYS:
        raise ValueError(
            f"{questions} questions about {facts} facts: expected at most {KEYS} facts, and at "
            "most one question per fact"
        )
    return np.stack([_text(rng, facts, rng.permutation(facts)[:questions]) for _ in range(rows)])


def lesson(rng: np.random.Generator, rows: int, length: int, keys: int = KEYS) -> np.ndarray:
    """Generate training sequences with varying numbers of facts, and repeated questions.

    Args:
      rng: the random number generator.
      rows: the number of sequences.
      length: the length of a sequence in tokens.
      keys: the facts use only the first ``keys`` keys.

    Returns:
      int32[rows, length].
    """
    texts = []
    for _ in range(rows):
        pairs = -(-length // 2)
        most = min(keys, pairs // 2)
        facts = int(np.exp(rng.uniform(np.log(most / 4), np.log(most + 1))))
        questions = rng.integers(facts, size=pairs - facts)
        texts.append(_text(rng, facts, questions, keys)[:length])
    return np.stack(texts)


def _text(
    rng: np.random.Generator, facts: int, questions: np.ndarray, keys: int = KEYS
) -> np.ndarray:
    about = 1 + rng.permutation(keys)[:facts]
    values = 1 + KEYS + rng.integers(VALUES, size=facts)
    pairs = np.concatenate([np.arange(facts), questions])
    return np.stack([about[pairs], values[pairs]], axis=1).reshape(-1).astype(np.int32)


RANGE = 256
"""The size of the distance ranges in the results, in tokens."""


@dataclass(frozen=True)
class Recall:
    """The accuracy of key-value retrieval with one cache policy.

    Attributes:
      questions: the number of questions.
      share: the fraction that was answered correctly.
      by_distance: the fraction by the distance in tokens between a question and its fact. The keys
        are the ends of the ranges.
      bytes: the size of the cache.
    """

    questions: int
    share: float
    by_distance: dict[int, float]
    bytes: CacheBytes


def recall(
    policies: Mapping[str, PolicyChoice],
    *,
    lm: LanguageModel | None = None,
    facts: int | None = None,
    texts: int = 4,
    seed: int = 0,
    chunk: int = CHUNK,
) -> dict[str, Recall]:
    """Compare cache policies by key-value retrieval.

    Args:
      policies: the policies by name.
      lm: the model. The default is the model in ``kvjax.models.recall``.
      facts: the number of facts in each sequence. A fact takes two tokens, and so does the question
        about it. The default is the number of keys (256), or fewer if the model has too few
        positions.
      texts: the number of sequences, which are the rows of one batch.
      seed: the seed with which the sequences are generated.
      chunk: the number of tokens per call of the model.

    Returns:
      The results of each policy, by name.

    Raises:
      ValueError: if the model's vocabulary is too small for the task, or an argument is out of
        range.
    """
    lm = load(FOLDER, dtype="float32") if lm is None else lm
    if lm.config.vocab_size < VOCABULARY:
        raise ValueError(
            f"the task needs a vocabulary of {VOCABULARY} tokens, the model's has "
            f"{lm.config.vocab_size}"
        )
    limit = lm.config.position_limit
    if facts is None:
        facts = KEYS if limit is None else min(KEYS, limit // 4)
    facts, texts = as_int("facts", facts, 1), as_int("texts", texts, 1)
    chunk = as_int("chunk", chunk, 1)
    if limit is not None and 4 * facts > limit:
        raise ValueError(
            f"{facts} facts and questions need {4 * facts} positions, the model has only {limit}"
        )
    tokens = quiz(np.random.default_rng(seed), texts, facts, facts)
    question_keys, fact_keys = tokens[:, 2 * facts :: 2], tokens[:, : 2 * facts : 2]
    distance = 2 * (facts + np.arange(facts)) - 2 * np.argmax(
        fact_keys[:, None, :] == question_keys[:, :, None], axis=-1
    )
    results = {}
    for number, (name, policy) in enumerate(policies.items()):
        cache = init_cache(lm.config, policy, batch=texts, max_len=4 * facts)
        predictions = []
        for start in range(0, 4 * facts, chunk):
            part = tokens[:, start : start + chunk]
            done = number * 4 * facts + start
            report_progress(f"asking for facts, {name}", done, len(policies) * 4 * facts)
            cache = grow_to_hold(cache, start + part.shape[1], 4 * facts)
            best, cache = _first(lm.architecture, lm.params, part, cache)
            predictions.append(np.asarray(best))
        check_named(name, cache)
        answers = np.concatenate(predictions, axis=1)[:, 2 * facts :: 2]
        right = answers == tokens[:, 2 * facts + 1 :: 2]
        results[name] = Recall(
            right.size, float(right.mean()), _by_distance(right, distance),
            cache_bytes(cache, 4 * facts),
        )  # fmt: skip
    return results


def rows(results: Mapping[str, Recall]) -> list[list[str]]:
    """Make a table of the accuracy by distance: a header row, and one row per policy."""
    ends = sorted({end for each in results.values() for end in each.by_distance})
    head = ["policy", "of bfloat16", "right", *(f"{end - RANGE + 1}-{end} back" for end in ends)]
    body = [
        [
            name, f"{100 * each.bytes.of_bfloat16:.1f} %", f"{100 * each.share:.2f} %",
            *(f"{100 * each.by_distance[end]:.1f} %" for end in ends),
        ]
        for name, each in results.items()
    ]  # fmt: skip
    return [head, *body]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _first(
    model: Architecture, params: PyTree, tokens: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    """Return the most likely next token after each token, int32[batch, new], and the cache."""
    logits, cache = model.apply(params, tokens, cache)
    return jnp.argmax(logits, axis=-1), cache


def _by_distance(right: np.ndarray, distance: np.ndarray) -> dict[int, float]:
    shares = {}
    for end in range(RANGE, int(distance.max()) + RANGE, RANGE):
        within = (distance > end - RANGE) & (distance <= end)
        if within.any():
            shares[end] = float(right[within].mean())
    return shares
