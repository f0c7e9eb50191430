"""GGUF files: logits are those of Transformers, which reads the same file."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import models
from tests.gguf_files import write_random

NAMES: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 4, "tie_word_embeddings": True},
    "qwen2": {},
    # What Transformers does not read from a file has its default: widths of heads, and soft caps.
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 16},
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 16},
    "phi3": {"sliding_window": None},  # Transformers does not read the window
}
SIZES = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96}
TOLERANCE = 1e-5


def theirs(file: Path, tokens: np.ndarray) -> np.ndarray:
    """Transformers' logits in float64."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float64, attn_implementation="eager"
    )
    with torch.no_grad():
        return model.eval()(torch.tensor(tokens)).logits.numpy()


def types(name: str, x: np.ndarray) -> Any:
    """Quantized matrices where rows are whole blocks."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    return kinds.Q8_0 if x.ndim > 1 and x.shape[-1] % 32 == 0 else kinds.F32


@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "Q8_0"])
@pytest.mark.parametrize("name", NAMES)
def test_logits(name: str, quantized: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    # Transformers' Phi-3 has a padding token outside of a small vocabulary.
    metadata = {"tokenizer.ggml.model": "none", "tokenizer.ggml.padding_token_id": 0}
    options = {"types": types} if quantized else {}
    write_random(file, name, {**SIZES, **NAMES[name]}, metadata=metadata, **options)
    lm = models.load(file)
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))
    logits = lm.apply(lm.params, jnp.asarray(tokens))
    wanted = theirs(file, tokens)
    scale = max(1.0, float(np.abs(wanted).max()))
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=TOLERANCE * scale)
    assert jax.tree.leaves(lm.params)[0].dtype == np.float32
