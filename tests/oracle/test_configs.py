"""``config.json`` in all the forms it has had means here what it means in Transformers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.models.config import DecoderConfig, GemmaConfig, LlamaConfig, RopeConfig
from kvjax.models.layers import ACTIVATIONS
from kvjax.models.loading import read_config, read_generation
from kvjax.models.rope import inverse_frequencies

SIZES = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
FACTORS = {
    "short_factor": [1.0 + i / 9 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
}

FORMS: dict[str, dict[str, Any]] = {
    "llama-bare": {"model_type": "llama"},
    "llama-sizes": {"model_type": "llama", **SIZES},
    "llama-null": {"model_type": "llama", **SIZES, "num_key_value_heads": None, "head_dim": None},
    "mistral-bare": {"model_type": "mistral"},
    "mistral-null-window": {"model_type": "mistral", **SIZES, "num_key_value_heads": 2,
                            "sliding_window": None},
    "mistral-layer-types": {"model_type": "mistral", **SIZES, "num_key_value_heads": 2,
                            "layer_types": ["full_attention", "attention", "sliding_attention"],
                            "sliding_window": 8},
    "qwen2-bare": {"model_type": "qwen2"},
    "qwen2-unused-window": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2,
                            "sliding_window": 8, "max_window_layers": 1},
    "qwen2-window": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2, "sliding_window": 8,
                     "use_sliding_window": True, "max_window_layers": 2},
    "qwen2-attention-bias": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2,
                             "attention_bias": False},
    "qwen3-bare": {"model_type": "qwen3"},
    "qwen3-types": {"model_type": "qwen3", **SIZES, "num_key_value_heads": 4, "sliding_window": 8,
                    "use_sliding_window": True,
                    "layer_types": ["sliding_attention", "attention", "sliding_attention"]},
    "theta-beside": {"model_type": "llama", **SIZES, "rope_theta": 5e5},
    "scaling-type": {"model_type": "llama", **SIZES, "rope_theta": 2e4,
                     "rope_scaling": {"type": "linear", "factor": 4.0}},
    "scaling-both": {"model_type": "llama", **SIZES,
                     "rope_scaling": {"rope_type": "dynamic", "type": "linear", "factor": 4.0}},
    "scaling-first": {"model_type": "llama", **SIZES,
                      "rope_scaling": {"type": "linear", "factor": 4.0},
                      "rope_parameters": {"rope_type": "linear", "factor": 8.0}},
    "scaling-null": {"model_type": "llama", **SIZES, "rope_scaling": None, "rope_theta": 7e3},
    "theta-inside": {"model_type": "llama", **SIZES, "rope_theta": 1e3,
                     "rope_parameters": {"rope_theta": 9e3, "rope_type": "default"}},
    "partial-default": {"model_type": "llama", **SIZES, "partial_rotary_factor": 0.5},
    "llama3": {"model_type": "llama", **SIZES, "rope_theta": 5e5, "max_position_embeddings": 4096,
               "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 512, "rope_type": "llama3"}},
    "llama3-equal": {"model_type": "llama", **SIZES,
                     "rope_scaling": {"factor": 8.0, "low_freq_factor": 2, "high_freq_factor": 2,
                                      "rope_type": "llama3"}},
    "yarn-null-factor": {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2,
                         "max_position_embeddings": 4096,
                         "rope_scaling": {"type": "yarn", "factor": None,
                                          "original_max_position_embeddings": 1024}},
    "yarn-outer-length": {"model_type": "qwen3", **SIZES, "num_key_value_heads": 2,
                          "max_position_embeddings": 4096, "head_dim": 24,
                          "original_max_position_embeddings": 256,
                          "rope_scaling": {"type": "yarn", "factor": 4, "beta_fast": 16,
                                           "original_max_position_embeddings": 1024}},
    "yarn-no-length": {"model_type": "llama", **SIZES,
                       "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": False}},
    "yarn-mscale": {"model_type": "llama", **SIZES,
                    "rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.5,
                                     "mscale_all_dim": 2}},
    "longrope": {"model_type": "llama", **SIZES, "max_position_embeddings": 4096,
                 "original_max_position_embeddings": 1024,
                 "rope_scaling": {"type": "longrope", **FACTORS}},
    "longrope-factor": {"model_type": "llama", **SIZES, "max_position_embeddings": 4096,
                        "rope_scaling": {"type": "longrope", "factor": 16, **FACTORS}},
    "cohere2-bare": {"model_type": "cohere2"},
    "cohere2-pattern": {"model_type": "cohere2", **SIZES, "sliding_window_pattern": 2,
                        "head_dim": 16, "rope_scaling": None, "rope_theta": 5e4,
                        "layer_norm_eps": 1e-3, "logit_scale": 0.25, "use_qk_norm": True},
    "cohere2-types": {"model_type": "cohere2", **SIZES, "sliding_window": 9,
                      "num_key_value_heads": 2, "sliding_window_pattern": 2,
                      "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
                      "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    "smollm3-bare": {"model_type": "smollm3"},
    "smollm3-interval": {"model_type": "smollm3", **SIZES, "no_rope_layer_interval": 2,
                         "rope_theta": 5e6, "sliding_window": 9, "use_sliding_window": False},
    "smollm3-window": {"model_type": "smollm3", **SIZES, "no_rope_layers": [0, 1, 0, 1],
                       "sliding_window": 9, "use_sliding_window": True},
    "smollm3-types": {"model_type": "smollm3", **SIZES, "no_rope_layers": [1, 1, 0],
                      "sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2,
                      "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
}  # fmt: skip


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest, tmp_path: Path, transformers: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(FORMS[request.param]))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert isinstance(ours, DecoderConfig)
    return ours, theirs, tmp_path


def their_windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type == "llama":
        window = None
    if config.model_type in ("llama", "mistral"):  # mistral with layer_types becomes ministral
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)


def their_rope_layers(config: Any) -> list[bool]:
    layers = config.num_hidden_layers
    if config.model_type == "cohere2":
        return [kind == "sliding_attention" for kind in config.layer_types]
    return [flag == 1 for flag in getattr(config, "no_rope_layers", [1] * layers)[:layers]]


def test_fields(form: Any) -> None:
    ours, theirs, folder = form
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "hidden_act",
        "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    epsilon = "layer_norm_eps" if hasattr(theirs, "layer_norm_eps") else "rms_norm_eps"
    assert ours.rms_norm_eps == getattr(theirs, epsilon)
    assert getattr(ours, "logit_scale", None) == getattr(theirs, "logit_scale", None)
    derived = theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or derived)
    assert ours.windows == their_windows(theirs)
    assert [rope is not None for rope in ours.ropes] == their_rope_layers(theirs)
    generation = read_generation(folder, ours.model_type)
    eos = theirs.eos_token_id
    assert generation.eos_token_ids == (() if eos is None else (eos,))
    assert generation.bos_token_id == theirs.bos_token_id


def their_frequencies(config: Any, length: int, torch: Any) -> tuple[np.ndarray, float]:
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    rotary(torch.zeros(1), torch.arange(length)[None])
    return rotary.inv_freq.numpy(), rotary.attention_scaling


def test_rotary_frequencies(form: Any, torch: Any) -> None:
    """Equal to the last bit but for the powers' rounding, at lengths on both sides."""
    ours, theirs, _ = form
    for length in (16, ours.max_position_embeddings + 100):
        expected, scale = their_frequencies(theirs, length, torch)
        frequencies, our_scale = inverse_frequencies(ours, length)
        assert frequencies.dtype == expected.dtype == np.float32
        np.testing.assert_array_max_ulp(frequencies, expected, maxulp=2)
        assert our_scale == pytest.approx(scale, rel=1e-12)


GEMMA_SIZES = {**SIZES, "head_dim": 16, "sliding_window": 8}
GEMMA_FORMS: dict[str, dict[str, Any]] = {
    "2-bare": {"model_type": "gemma2"},
    "2-sizes": {"model_type": "gemma2", **GEMMA_SIZES, "hidden_act": "gelu",
                "final_logit_softcapping": None, "query_pre_attn_scalar": 144,
                "sliding_window_pattern": 3},
    "2-types": {"model_type": "gemma2", **GEMMA_SIZES, "attention_bias": True,
                "layer_types": ["attention", "full_attention", "sliding_attention"]},
    "2-scaled": {"model_type": "gemma2", **GEMMA_SIZES, "rope_theta": 5e5,
                 "max_position_embeddings": 64,
                 "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "3-bare": {"model_type": "gemma3_text"},
    "3-sizes": {"model_type": "gemma3_text", **GEMMA_SIZES, "tie_word_embeddings": False,
                "final_logit_softcapping": 20.0, "hidden_activation": "silu"},
    "3-older": {"model_type": "gemma3_text", **GEMMA_SIZES, "sliding_window_pattern": 2,
                "rope_theta": 5e5, "rope_local_base_freq": 2e3,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "3-scaling-theta": {"model_type": "gemma3_text", **GEMMA_SIZES, "rope_theta": 5e5,
                        "rope_scaling": {"rope_type": "linear", "factor": 8.0, "rope_theta": 7e4}},
    "3-nested": {"model_type": "gemma3_text", **GEMMA_SIZES, "rope_theta": 1.0,
                 "layer_types": ["full_attention", "sliding_attention", "full_attention"],
                 "rope_parameters": {
                     "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3e5},
                     "sliding_attention": {"rope_type": "default", "rope_theta": 3e3}}},
    "3-nested-halves": {"model_type": "gemma3_text", **GEMMA_SIZES, "rope_theta": 4e5,
                        "rope_local_base_freq": 5e3, "sliding_window_pattern": 2,
                        "rope_parameters": {"full_attention": None, "sliding_attention": {
                            "rope_type": "linear", "factor": 3.0}}},
    "3-dynamic": {"model_type": "gemma3_text", **GEMMA_SIZES, "max_position_embeddings": 64,
                  "sliding_window_pattern": 2,
                  "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "3-yarn": {"model_type": "gemma3_text", **GEMMA_SIZES, "max_position_embeddings": 4096,
               "original_max_position_embeddings": 64, "sliding_window_pattern": 2,
               "rope_parameters": {"full_attention": {
                   "rope_type": "yarn", "factor": 4.0, "beta_fast": 16}}},
    "3-longrope": {"model_type": "gemma3_text", **GEMMA_SIZES, "max_position_embeddings": 512,
                   "sliding_window_pattern": 2,
                   "rope_scaling": {"rope_type": "longrope", "factor": 4.0,
                                    "original_max_position_embeddings": 128, **FACTORS}},
}  # fmt: skip


@pytest.fixture(params=list(GEMMA_FORMS))
def gemma_form(request: pytest.FixtureRequest, tmp_path: Path, transformers: Any) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_FORMS[request.param]))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    ours = read_config(tmp_path)
    assert isinstance(ours, GemmaConfig)
    return ours, theirs, tmp_path


def test_gemma_fields(gemma_form: Any) -> None:
    ours, theirs, folder = gemma_form
    for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings",
        "rms_norm_eps", "tie_word_embeddings", "query_pre_attn_scalar", "attn_logit_softcapping",
        "final_logit_softcapping",
    ):  # fmt: skip
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.hidden_act == theirs.hidden_activation
    assert ours.qkv_bias == ours.output_bias == theirs.attention_bias
    assert ours.windows == their_windows(theirs)
    generation = read_generation(folder, ours.model_type)
    assert generation.eos_token_ids == (theirs.eos_token_id,)
    assert generation.bos_token_id == theirs.bos_token_id


def test_gemma_rotary_frequencies(gemma_form: Any, torch: Any) -> None:
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RotaryEmbedding
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    ours, theirs, _ = gemma_form
    kinds = {"full_attention": ours.rope, "sliding_attention": ours.local_rope}
    for length in (16, ours.max_position_embeddings + 100):
        x, positions = torch.zeros(1), torch.arange(length)[None]
        for kind in set(theirs.layer_types):
            if ours.model_type == "gemma2":
                rotary = Gemma2RotaryEmbedding(theirs)
                rotary(x, positions)
                expected, scale = rotary.inv_freq, rotary.attention_scaling
            else:
                rotary = Gemma3RotaryEmbedding(theirs)
                rotary(x, positions, kind)
                expected = getattr(rotary, f"{kind}_inv_freq")
                scale = getattr(rotary, f"{kind}_attention_scaling")
            config = dataclasses.replace(ours, rope=kinds[kind])
            frequencies, our_scale = inverse_frequencies(config, length)
            np.testing.assert_array_max_ulp(frequencies, expected.numpy(), maxulp=2)
            assert our_scale == pytest.approx(scale, rel=1e-12)


@pytest.mark.parametrize("theta", [100.0, 1e4, 5e5, 1e6, 1e7])
def test_default_frequencies_bit_for_bit(theta: float, torch: Any) -> None:
    """At least 98 of 100 are the same bits; the others are neighbours."""
    same, total = 0, 0
    for dim in (8, 32, 48, 64, 80, 96, 128, 256):
        config = LlamaConfig(
            "llama", 1, dim, 1, 1, 1, 1, dim, 64, 1e-6, "silu", True, False, False, False, False,
            rope=RopeConfig(theta=theta), windows=(None,),
        )  # fmt: skip
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        expected = (1.0 / (theta**exponents)).numpy()
        frequencies, _ = inverse_frequencies(config, 64)
        np.testing.assert_array_max_ulp(frequencies, expected, maxulp=1)
        same += int(np.sum(frequencies == expected))
        total += len(expected)
    assert same >= 0.98 * total


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activations(name: str, torch: Any, transformers: Any) -> None:
    x = np.linspace(-9, 9, 2001, dtype=np.float32)
    expected = transformers.activations.ACT2FN[name](torch.tensor(x)).numpy()
    np.testing.assert_allclose(ACTIVATIONS[name](x), expected, atol=1e-6, rtol=1e-6)
