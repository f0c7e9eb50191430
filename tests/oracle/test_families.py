"""Families with parts of their own: logits and greedy tokens are Transformers', float32."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from tests.oracle.test_logits import LENGTHS, LONG, SHORT, SMALL, cached

TOLERANCE = 1e-5
"""Of logits, absolute."""
NEW = 8

PHI3 = {**SMALL, "pad_token_id": 0}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {**PHI3, "sliding_window": 7}),
    "phi3-longrope": (
        "phi3",
        {
            **PHI3,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": SHORT[:3],
                "long_factor": LONG[:3],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phi3-partial": (
        "phi3",
        {**PHI3, "num_key_value_heads": None, "rope_parameters": {"partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("olmo2", SMALL),
    "olmo2-biased": (
        "olmo2",
        {
            **SMALL,
            "attention_bias": True,
            "num_key_value_heads": None,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        },
    ),
}
GREEDY = ("phi3", "olmo2")
"""Of these, tokens too."""


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, make_reference: Callable) -> Any:
    model_type, fields = CASES[request.param]
    reference = make_reference(model_type, **fields)
    return request.param, reference, models.load(reference.folder, dtype="float32")


def apart(logits: np.ndarray, reference: np.ndarray) -> float:
    return float(np.max(np.abs(logits - reference)))


def test_uncached(case: Any) -> None:
    _, reference, lm = case
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert apart(np.asarray(logits), reference.logits) <= TOLERANCE


def test_ragged_batch_in_uneven_chunks(case: Any) -> None:
    _, reference, lm = case
    for row, logits in enumerate(cached(lm, reference.tokens, LENGTHS)):
        assert apart(logits, reference.logits[row, : LENGTHS[row]]) <= TOLERANCE


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_tokens(name: str, make_reference: Callable, torch: Any, transformers: Any) -> None:
    model_type, fields = CASES[name]
    reference = make_reference(model_type, **fields)
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.folder).eval()
    prompts = reference.tokens[:, :20]
    expected = model.generate(
        torch.tensor(prompts, dtype=torch.long), max_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    lm = models.load(reference.folder, dtype="float32")
    result = kvjax.generate(lm, prompts, max_new_tokens=NEW, temperature=0.0, eos_token_ids=())
    assert np.array_equal(np.asarray(result.tokens), expected.numpy()[:, 20:])
