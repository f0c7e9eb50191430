"""Recall: of how many facts a cache still has what is needed to answer for them.

Perplexity hides lost tokens: most of a text is predicted from what stands near. Here a text states
facts and then asks for each (``.task``), and the model that was trained for that answers.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.creation import init_cache
from kvjax.cache.state import KVCache
from kvjax.core.reporting import report_progress
from kvjax.core.typing import Array
from kvjax.core.validation import as_int
from kvjax.generation.loaded_model import LanguageModel
from kvjax.policies.presets import PolicyChoice
from kvjax.quality.evaluation import CHUNK, check_named, grow_to_hold
from kvjax.quality.metrics import CacheBytes, cache_bytes

from .. import load
from . import FOLDER
from .task import KEYS, VOCABULARY, quiz

RANGE = 256
"""Tokens of the ranges of distances that figures are given for."""


@dataclass(frozen=True)
class Recall:
    """How many questions were answered with the right value.

    ``questions``: how many there were; ``share``: of them, answered rightly; ``by_distance``: the
    same by tokens between a question and its fact (the keys are where ranges end); ``bytes``: the
    cache's.
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
      policies: by name.
      lm: the model; by default the one that comes with kvjax, trained for this task.
      facts: of a text, each asked for once, two tokens a fact and two a question; by default as
        many as the task has keys (256) and the model positions.
      texts: how many; they are the rows of one batch.
      seed: of the texts.
      chunk: tokens of a call.

    Returns:
      The figures of each policy, by its name.

    Raises:
      ValueError: if the model's vocabulary is not that of the task, or a number is out of range.
    """
    lm = load(FOLDER, dtype="float32") if lm is None else lm
    if lm.config.vocab_size < VOCABULARY:
        raise ValueError(
            f"the task has {VOCABULARY} tokens, the model's vocabulary {lm.config.vocab_size}"
        )
    limit = lm.config.position_limit
    if facts is None:
        facts = KEYS if limit is None else min(KEYS, limit // 4)
    facts, texts = as_int("facts", facts, 1), as_int("texts", texts, 1)
    chunk = as_int("chunk", chunk, 1)
    if limit is not None and 4 * facts > limit:
        raise ValueError(f"{facts} facts and questions take {4 * facts} of {limit} positions")
    tokens = quiz(np.random.default_rng(seed), texts, facts, facts)
    asked, first = tokens[:, 2 * facts :: 2], tokens[:, : 2 * facts : 2]
    distance = 2 * (facts + np.arange(facts)) - 2 * np.argmax(
        first[:, None, :] == asked[:, :, None], axis=-1
    )
    found = {}
    for number, (name, policy) in enumerate(policies.items()):
        cache = init_cache(lm.config, policy, batch=texts, max_len=4 * facts)
        said = []
        for start in range(0, 4 * facts, chunk):
            part = tokens[:, start : start + chunk]
            done = number * 4 * facts + start
            report_progress(f"asking for facts, {name}", done, len(policies) * 4 * facts)
            cache = grow_to_hold(cache, start + part.shape[1], 4 * facts)
            best, cache = _first(lm.architecture, lm.params, part, cache)
            said.append(np.asarray(best))
        check_named(name, cache)
        answers = np.concatenate(said, axis=1)[:, 2 * facts :: 2]
        right = answers == tokens[:, 2 * facts + 1 :: 2]
        found[name] = Recall(
            right.size, float(right.mean()), _by_distance(right, distance),
            cache_bytes(cache, 4 * facts),
        )  # fmt: skip
    return found


def rows(found: Mapping[str, Recall]) -> list[list[str]]:
    """The share of questions answered, by distance: a heading, and a row a policy."""
    ends = sorted({end for each in found.values() for end in each.by_distance})
    head = ["policy", "of bfloat16", "right", *(f"{end - RANGE + 1}-{end} back" for end in ends)]
    body = [
        [
            name, f"{100 * each.bytes.of_bfloat16:.1f} %", f"{100 * each.share:.2f} %",
            *(f"{100 * each.by_distance[end]:.1f} %" for end in ends),
        ]
        for name, each in found.items()
    ]  # fmt: skip
    return [head, *body]


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _first(model: Any, params: Any, tokens: Array, cache: KVCache) -> tuple[Array, KVCache]:
    """The likeliest token after each, int32[batch, new]."""
    logits, cache = model.apply(params, tokens, cache)
    return jnp.argmax(logits, axis=-1), cache


def _by_distance(right: np.ndarray, distance: np.ndarray) -> dict[int, float]:
    shares = {}
    for end in range(RANGE, int(distance.max()) + RANGE, RANGE):
        within = (distance > end - RANGE) & (distance <= end)
        if within.any():
            shares[end] = float(right[within].mean())
    return shares
