"""A model that was trained here, saved, is read by Transformers as it is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import models
from kvjax.models import weights
from tests.oracle.conftest import run_reference
from tests.oracle.test_logits import GPT2, SMALL, TOLERANCE, worst

CASES = {
    "llama": ("llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 8}),
    "gpt2": ("gpt2", GPT2),  # weights are stored the other way round
}


@pytest.mark.parametrize("name", CASES)
def test_a_trained_model_that_is_saved(
    name: str, make_reference: Callable, torch: Any, transformers: Any, tmp_path: Any,
    monkeypatch: Any,
) -> None:  # fmt: skip
    model_type, fields = CASES[name]
    lm = models.load(make_reference(model_type, **fields).folder)
    keys = iter(jax.random.split(jax.random.key(0), len(jax.tree.leaves(lm.params))))
    trained = jax.tree.map(
        lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape, x.dtype), lm.params
    )
    monkeypatch.setattr(weights, "SHARD", 20_000)
    lm.with_params(trained).save(tmp_path / "trained")
    assert len(list((tmp_path / "trained").glob("*.safetensors"))) > 1
    found = run_reference(tmp_path / "trained", torch, transformers)
    logits = np.asarray(lm.apply(trained, jnp.asarray(found.tokens)))
    assert worst(logits, found.logits) <= TOLERANCE
    again = models.load(tmp_path / "trained")
    jax.tree.map(np.testing.assert_array_equal, again.params, trained)
