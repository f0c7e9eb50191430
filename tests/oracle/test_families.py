"""Families with parts of their own: logits are those that Transformers has in float64, from which
its own in float32 are as far as these, by the CPU; greedy tokens are Transformers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.models.config import DecoderConfig
from kvjax.models.files import find_tensors
from kvjax.models.loading import read_generation
from tests.oracle.conftest import run_reference
from tests.oracle.test_logits import LENGTHS, LONG, SHORT, SMALL, cached

TOLERANCE = 1e-5
"""Of logits, absolute."""
BOUNDS = {"gemma3n_text-other": 3e-5}
"""Where more is allowed: there Transformers' own logits are 1e-5 from those that it has in float64,
as these are: gates are cut off at many deviations, and what is left is normed."""
NEW = 8

MIXTRAL = {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    **SMALL,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
LLAMA4 = {
    **SMALL,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "attention_chunk_size": 8,
    "floor_scale": 6,
}
GEMMA3N = {
    **SMALL,
    "head_dim": 8,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "vocab_size_per_layer_input": 60,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 6,
}
GEMMA4 = {
    **SMALL,
    "head_dim": 4,
    "global_head_dim": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 7,
    "vocab_size_per_layer_input": SMALL["vocab_size"],
    "hidden_size_per_layer_input": 16,  # few, normed, may be off by more in Transformers itself
}
NEOX = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
PHI3 = {**SMALL, "pad_token_id": 0}

COHERE2 = {**SMALL, "num_hidden_layers": 4, "sliding_window": 7, "pad_token_id": None}
SMOLLM3 = {**SMALL, "num_hidden_layers": 4, "pad_token_id": None}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", {**COHERE2, "logit_scale": 1.5}),
    "cohere2-other": (
        "cohere2",
        {
            **COHERE2,
            "vocab_size": 53,
            "hidden_size": 42,
            "intermediate_size": 29,
            "num_attention_heads": 3,
            "num_key_value_heads": None,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-3,
            "logit_scale": 0.7,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
        },
    ),
    "cohere2-pattern": (
        "cohere2",
        {**COHERE2, "num_hidden_layers": 3, "sliding_window_pattern": 2},
    ),
    "smollm3": ("smollm3", SMOLLM3),
    "smollm3-window": (
        "smollm3",
        {
            **SMOLLM3,
            "hidden_size": 30,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "no_rope_layers": [1, 0, 0],
            "use_sliding_window": True,
            "sliding_window": 6,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
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
    "gpt_neox": ("gpt_neox", NEOX),
    "gpt_neox-in-turn": (
        "gpt_neox",
        {
            **NEOX,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_fast",
            "rotary_pct": 0.5,
            "rotary_emb_base": 5000,
            "layer_norm_eps": 1e-3,
        },
    ),
    "gpt_neox-scaled": (
        "gpt_neox",
        {**NEOX, "rope_parameters": {"rope_type": "linear", "factor": 3.0}, "rotary_pct": 1.0},
    ),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral-window": (
        "mixtral",
        {
            **MIXTRAL,
            "num_local_experts": 7,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "head_dim": 12,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral-many": ("mixtral", {**MIXTRAL, "num_local_experts": 16}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe-normed": (
        "qwen3_moe",
        {
            **QWEN3_MOE,
            "num_hidden_layers": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "qwen3_moe-sparse-step": (
        "qwen3_moe",
        {**QWEN3_MOE, "num_experts": 5, "num_experts_per_tok": 1, "decoder_sparse_step": 2},
    ),
    "llama4_text": ("llama4_text", LLAMA4),
    "llama4_text-other": (
        "llama4_text",
        {
            **LLAMA4,
            "num_hidden_layers": 3,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "use_qk_norm": False,
            "attention_bias": True,
            "attn_temperature_tuning": False,
            "tie_word_embeddings": True,
            "attention_chunk_size": 13,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "llama4_text-types": (
        "llama4_text",
        {
            **LLAMA4,
            "num_hidden_layers": 2,
            "num_local_experts": 12,
            "moe_layers": [1],
            "layer_types": ["full_attention", "chunked_attention"],
            "no_rope_layers": [1, 0],
            "attn_scale": 0.5,
        },
    ),
    "gemma3n_text": ("gemma3n_text", GEMMA3N),
    "gemma3n_text-other": (
        "gemma3n_text",
        {
            **GEMMA3N,
            "num_hidden_layers": 3,
            "num_kv_shared_layers": 0,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "intermediate_size": [48, 200, 56],
            "activation_sparsity_pattern": [0.0, 0.8, 0.3],
            "attention_bias": True,
            "altup_num_inputs": 3,
            "altup_active_idx": 1,
            "altup_correct_scale": False,
            "final_logit_softcapping": 9.0,
        },
    ),
    "gemma4_text": (
        "gemma4_text",
        {**GEMMA4, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "gemma4_text-experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 9.0,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gemma4_text-other": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "hidden_size_per_layer_input": 12,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e4},
                "sliding_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e4,
                    "factor": 3.0,
                },
            },
        },
    ),
}
GREEDY = (
    "cohere2",
    "smollm3",
    "phi3",
    "olmo2",
    "gpt_neox",
    "mixtral",
    "qwen3_moe-normed",
    "llama4_text",
    "gemma3n_text",
    "gemma4_text",
    "gemma4_text-experts",
)
"""Of these, tokens too."""


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, make_reference: Callable) -> Any:
    model_type, fields = CASES[request.param]
    reference = make_reference(model_type, precision="float64", **fields)
    return request.param, reference, models.load(reference.folder, dtype="float32")


def apart(logits: np.ndarray, reference: np.ndarray) -> float:
    return float(np.max(np.abs(logits - reference)))


def test_uncached(case: Any) -> None:
    name, reference, lm = case
    logits = jax.jit(lm.apply)(lm.params, jnp.asarray(reference.tokens))
    assert apart(np.asarray(logits), reference.logits) <= BOUNDS.get(name, TOLERANCE)


def test_ragged_batch_in_uneven_chunks(case: Any) -> None:
    name, reference, lm = case
    for row, logits in enumerate(cached(lm, reference.tokens, LENGTHS)):
        found = apart(logits, reference.logits[row, : LENGTHS[row]])
        assert found <= BOUNDS.get(name, TOLERANCE)


@pytest.mark.parametrize("name", GREEDY)
def test_saved_again(
    name: str, make_reference: Callable, torch: Any, transformers: Any, tmp_path: Path
) -> None:
    """What is written here, Transformers reads, under the names that its own files have."""
    model_type, fields = CASES[name]
    reference = make_reference(model_type, **fields)
    models.load(reference.folder, dtype="float32").save(tmp_path / "again")
    names = [set(find_tensors(folder)) for folder in (reference.folder, tmp_path / "again")]
    assert names[0] == names[1]
    again = run_reference(tmp_path / "again", torch, transformers)
    assert np.array_equal(again.logits, reference.logits)


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


@pytest.mark.parametrize("model_type", sorted({model_type for model_type, _ in CASES.values()}))
def test_what_a_file_leaves_out(model_type: str, transformers: Any, tmp_path: Path) -> None:
    """Has the value that Transformers gives it."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = models.read_config(tmp_path)
    assert isinstance(ours, DecoderConfig)
    hidden, heads = theirs.hidden_size, theirs.num_attention_heads
    layers = getattr(theirs, "per_layer_config", None) or [theirs] * theirs.num_hidden_layers
    for own, other in zip(ours.per_layer_config, layers, strict=True):
        assert own.head_dim == (getattr(other, "head_dim", None) or hidden // heads)
        assert own.num_key_value_heads == getattr(other, "num_key_value_heads", heads)
    for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    for name, others in {
        "rms_norm_eps": ("rms_norm_eps", "layer_norm_eps"),
        "hidden_act": ("hidden_act", "hidden_activation"),
        "num_experts": ("num_local_experts", "num_experts"),
        "num_experts_per_tok": ("num_experts_per_tok",),
        "logit_scale": ("logit_scale",),
    }.items():
        told = [getattr(theirs, other) for other in others if hasattr(theirs, other)]
        assert (getattr(ours, name, None) or None) == (told[0] if told else None), name
    ropes = theirs.rope_parameters
    for rope, kind in ((ours.rope, "full_attention"), (ours.local_rope, "sliding_attention")):
        told = ropes.get(kind, ropes)
        if rope is not None:
            assert (rope.rope_type, rope.theta) == (told["rope_type"], told["rope_theta"])
            assert rope.partial_rotary_factor == told.get("partial_rotary_factor", 1.0)
    generation = read_generation(tmp_path, model_type)
    eos, bos = theirs.eos_token_id, theirs.bos_token_id
    assert generation.eos_token_ids == (() if eos is None else (eos,))
    assert generation.bos_token_id == bos
