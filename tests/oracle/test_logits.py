"""The same weights in Transformers give the same logits: float32, within 1e-5 of the largest."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models

TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 0.04
"""Of the largest |logit|, where both sides compute in bfloat16: each is within 0.02 of float32,
about ten roundings of 2**-9 on the way through two layers."""
CHUNKS = (11, 5, 1, 1, 5)
LENGTHS = (40, 19, 33)
"""Real tokens of the rows of a ragged batch; the rest of the reference's tokens is not seen."""

SMALL = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
GPT2 = {"vocab_size": 67, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SHORT, LONG = [1.0, 1.1, 1.3, 1.7], [1.0, 2.0, 3.5, 6.0]


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {**SMALL, "rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **parameters}}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SMALL),
    "llama-biased": (
        "llama",
        {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-head-dim": ("llama", {**SMALL, "head_dim": 12, "num_key_value_heads": 1}),
    "llama-multi-head": ("llama", {**SMALL, "num_key_value_heads": None, "hidden_act": "gelu"}),
    "mistral-window": ("mistral", {**SMALL, "sliding_window": 7}),
    "mistral-layer-types": (
        "mistral",
        {**SMALL, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "mistral-full": ("mistral", {**SMALL, "sliding_window": None}),
    "qwen2": ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen2-window": (
        "qwen2",
        {**SMALL, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {**SMALL, "head_dim": 16}),
    "qwen3-layer-types": (
        "qwen3",
        {
            **SMALL,
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gemma2": ("gemma2", {**SMALL, "head_dim": 12, "sliding_window": 7}),
    "gemma2-untied": (
        "gemma2",
        {
            **SMALL,
            "head_dim": 8,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e3, "factor": 2.5},
            "max_position_embeddings": 24,
        },
    ),
    "gemma3_text": (
        "gemma3_text",
        {**SMALL, "head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2},
    ),
    "gemma3_text-full": (
        "gemma3_text",
        {**SMALL, "head_dim": 8, "layer_types": ["full_attention"] * 2, "rope_theta": 2e4},
    ),
    "gpt2": ("gpt2", GPT2),
    "gpt2-other": (
        "gpt2",
        {
            **GPT2,
            "n_inner": 40,
            "tie_word_embeddings": False,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "gelu",
        },
    ),
    "gpt2-unscaled": ("gpt2", {**GPT2, "scale_attn_weights": False, "layer_norm_epsilon": 1e-3}),
    "rope-linear": ("llama", rope("linear", factor=4.0)),
    "rope-theta": ("llama", rope("default", rope_theta=5e5)),
    "rope-dynamic-within": ("llama", rope("dynamic", factor=2.0)),
    "rope-dynamic-beyond": (
        "llama",
        {**rope("dynamic", factor=2.5), "max_position_embeddings": 24},
    ),
    "rope-llama3": (
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "rope-yarn": ("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    "rope-yarn-all": (
        "qwen3",
        {
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=0.7,
                mscale_all_dim=1.3,
                beta_fast=20,
                beta_slow=2,
                truncate=False,
            ),
            "head_dim": 16,
        },
    ),
    "rope-yarn-attention": ("mistral", {**rope("yarn", factor=2.0, attention_factor=1.7)}),
    "rope-longrope-short": (
        "llama",
        rope("longrope", short_factor=SHORT, long_factor=LONG, factor=2.0),
    ),
    "rope-longrope-long": (
        "llama",
        rope(
            "longrope",
            short_factor=SHORT,
            long_factor=LONG,
            original_max_position_embeddings=32,
        ),
    ),
    "rope-longrope-attention": (
        "qwen2",
        rope("longrope", short_factor=SHORT, long_factor=LONG, attention_factor=1.3),
    ),
}


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, make_reference: Callable) -> Any:
    model_type, fields = CASES[request.param]
    reference = make_reference(model_type, **fields)
    return reference, models.load(reference.folder, dtype="float32")


def worst(logits: np.ndarray, reference: np.ndarray) -> float:
    """The largest difference, as a part of the largest |logit|."""
    return float(np.max(np.abs(logits - reference)) / np.max(np.abs(reference)))


def cached(lm: models.LanguageModel, tokens: np.ndarray, lengths: tuple[int, ...]) -> list:
    """Logits of each row's real tokens, through a cache in uneven chunks and then ones."""
    rows, total = tokens.shape
    cache = kvjax.init_cache(lm.config, batch=rows, max_len=total)
    step = jax.jit(lm.apply)
    parts: list[list[np.ndarray]] = [[] for _ in range(rows)]
    start = 0
    for size in (*CHUNKS, *[1] * total):
        if start >= max(lengths):
            break
        real = np.clip(np.array(lengths) - start, 0, size).astype(np.int32)
        chunk = jnp.asarray(tokens[:, start : start + size])
        logits, cache = step(lm.params, chunk, cache, lengths=jnp.asarray(real))
        for row in range(rows):
            parts[row].append(np.asarray(logits)[row, : real[row]])
        start += size
    kvjax.check(cache)
    assert np.array_equal(np.asarray(cache.length), lengths)
    return [np.concatenate(part) for part in parts]


def test_uncached(case: Any) -> None:
    reference, lm = case
    tokens = jnp.asarray(reference.tokens)
    logits = jax.jit(lm.apply)(lm.params, tokens)
    assert worst(np.asarray(logits), reference.logits) <= TOLERANCE


def test_ragged_batch_in_uneven_chunks(case: Any) -> None:
    reference, lm = case
    for row, logits in enumerate(cached(lm, reference.tokens, LENGTHS)):
        assert worst(logits, reference.logits[row, : LENGTHS[row]]) <= TOLERANCE


@pytest.fixture(scope="module")
def sharded(make_reference: Callable) -> Any:
    return make_reference("llama", save={"dtype": "bfloat16", "max_shard_size": "20KB"}, **SMALL)


def test_sharded_bfloat16_in_float32(sharded: Any) -> None:
    assert len(list(sharded.folder.glob("*.safetensors"))) > 1
    lm = models.load(sharded.folder, dtype="float32")
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(sharded.tokens))
    assert worst(np.asarray(logits), sharded.logits) <= TOLERANCE


def test_sharded_bfloat16(sharded: Any, torch: Any, transformers: Any) -> None:
    lm = models.load(sharded.folder, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype("bfloat16")}
    model = transformers.AutoModelForCausalLM.from_pretrained(sharded.folder, dtype="bfloat16")
    with torch.no_grad():
        tokens = torch.tensor(sharded.tokens, dtype=torch.long)
        reference = model.eval()(tokens).logits.float().numpy()
    logits = np.asarray(jax.jit(lm.apply)(lm.params, jnp.asarray(sharded.tokens)))
    assert worst(logits, reference) <= BFLOAT16_TOLERANCE
    assert worst(logits, sharded.logits) <= BFLOAT16_TOLERANCE
    for row, through_cache in enumerate(cached(lm, sharded.tokens, LENGTHS)):
        assert worst(through_cache, reference[row, : LENGTHS[row]]) <= BFLOAT16_TOLERANCE


def test_float16_file(make_reference: Callable) -> None:
    reference = make_reference("qwen2", save={"dtype": "float16"}, **SMALL)
    lm = models.load(reference.folder, dtype="float32")
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert worst(np.asarray(logits), reference.logits) <= TOLERANCE


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_saved_without_its_head(
    model_type: str, make_reference: Callable, transformers: Any, tmp_path: Any
) -> None:
    """The tensors of a base model lack the prefix; its tied head is its embedding."""
    fields = {**(GPT2 if model_type == "gpt2" else SMALL), "tie_word_embeddings": True}
    reference = make_reference(model_type, **fields)
    whole = transformers.AutoModelForCausalLM.from_pretrained(reference.folder)
    whole.base_model.save_pretrained(tmp_path)
    names = [name for name, _ in whole.base_model.named_parameters()]
    assert not any(name.startswith(("model.", "transformer.")) for name in names)
    lm = models.load(tmp_path, dtype="float32")
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert worst(np.asarray(logits), reference.logits) <= TOLERANCE


def test_tied_in_name_only(make_reference: Callable, torch: Any, transformers: Any) -> None:
    """Where a head is stored beside the embedding that it is said to be, and differs, it counts."""
    from safetensors.torch import load_file, save_file

    reference = make_reference("llama", **{**SMALL, "tie_word_embeddings": True})
    file = reference.folder / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, file, {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(reference.folder).eval()
    with torch.no_grad():
        logits = model(torch.tensor(reference.tokens, dtype=torch.long)).logits.numpy()
    assert worst(logits, reference.logits) > 0.1
    lm = models.load(reference.folder, dtype="float32")
    ours = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert worst(np.asarray(ours), logits) <= TOLERANCE
