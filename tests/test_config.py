"""``config.json``: what is read, and the message of every refusal."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvjax
from kvjax.models import (
    Cohere2Config,
    Gemma3nConfig,
    Gemma4Config,
    GemmaConfig,
    GPT2Config,
    Llama4Config,
    LlamaConfig,
    MixtralConfig,
    MoeConfig,
    NeoXConfig,
    Phi3Config,
    RopeConfig,
    read_config,
    supported,
)
from kvjax.models.config import Config
from kvjax.models.config_json import READERS
from kvjax.models.loading import GenerationDefaults, read_generation
from kvjax.policies.model_config import layer_heads, same_rotary

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
QWEN = {**LLAMA, "model_type": "qwen2", "num_key_value_heads": 2}
SCALED = {"rope_type": "linear", "factor": 2.0}
GEMMA: dict[str, Any] = {
    "model_type": "gemma2",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "head_dim": 8,
    "sliding_window": 8,
}
GEMMA3 = {**GEMMA, "model_type": "gemma3_text"}
GEMMA3N = {**GEMMA, "model_type": "gemma3n_text", "num_kv_shared_layers": 2}
GEMMA4 = {**GEMMA, "model_type": "gemma4_text"}
PHI3, OLMO2, NEOX, COHERE2, SMOLLM3 = (
    {**LLAMA, "model_type": name} for name in ("phi3", "olmo2", "gpt_neox", "cohere2", "smollm3")
)
MIXTRAL, QWEN3_MOE, LLAMA4 = (
    {**QWEN, "model_type": name} for name in ("mixtral", "qwen3_moe", "llama4_text")
)
BASES = (RopeConfig(theta=1e6), RopeConfig(theta=1e4))
"""Of Gemma 3's full and sliding layers, where a file says nothing."""


def read(folder: Path, fields: dict[str, Any]) -> Config:
    (folder / "config.json").write_text(json.dumps(fields))
    return read_config(folder)


def llama(folder: Path, **fields: Any) -> LlamaConfig:
    config = read(folder, {**LLAMA, **fields})
    assert isinstance(config, LlamaConfig)
    return config


def test_explicit_fields(tmp_path: Path) -> None:
    config = llama(
        tmp_path,
        num_key_value_heads=2,
        head_dim=12,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        torch_dtype="bfloat16",
    )
    assert (config.num_key_value_heads, config.head_dim) == (2, 12)
    assert config.qkv_bias and config.output_bias and config.mlp_bias and not config.qk_norm
    assert config.tie_word_embeddings
    assert config.dtype == "bfloat16"
    assert config.windows == (None, None, None)
    assert config.position_limit is None
    assert hash(config) == hash(
        llama(tmp_path, **json.loads((tmp_path / "config.json").read_text()))
    )


def test_float64_is_read_as_float32(tmp_path: Path) -> None:
    assert llama(tmp_path, torch_dtype="float64").dtype == "float32"
    assert llama(tmp_path, dtype="torch.float64").dtype == "float32"


def test_derived_fields(tmp_path: Path) -> None:
    config = llama(tmp_path)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert config.dtype == ""
    assert config.rope == RopeConfig()


def test_families_differ(tmp_path: Path) -> None:
    qwen2, qwen3 = (read(tmp_path, {**QWEN, "model_type": name}) for name in ("qwen2", "qwen3"))
    assert isinstance(qwen2, LlamaConfig) and isinstance(qwen3, LlamaConfig)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, True)
    assert (qwen2.head_dim, qwen3.head_dim) == (8, 128)


def test_gpt2(tmp_path: Path) -> None:
    config = read(tmp_path, {"model_type": "gpt2", "n_embd": 32, "n_head": 4, "n_layer": 2})
    assert isinstance(config, GPT2Config)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (8, 4, 128)
    assert (config.position_limit, config.tie_word_embeddings) == (1024, True)
    assert config.activation == "gelu_new"
    both = read(tmp_path, {"model_type": "gpt2", "n_embd": 32, "hidden_size": 48})
    assert both.hidden_size == 48


def gemma(folder: Path, fields: dict[str, Any]) -> GemmaConfig:
    config = read(folder, fields)
    assert isinstance(config, GemmaConfig)
    return config


def test_gemma2(tmp_path: Path) -> None:
    bare = gemma(tmp_path, {"model_type": "gemma2"})
    assert (bare.vocab_size, bare.hidden_size, bare.intermediate_size) == (256000, 2304, 9216)
    assert (bare.num_attention_heads, bare.num_key_value_heads, bare.head_dim) == (8, 4, 256)
    assert (bare.num_hidden_layers, bare.max_position_embeddings) == (26, 8192)
    assert (bare.query_pre_attn_scalar, bare.hidden_act) == (256, "gelu_pytorch_tanh")
    assert (bare.attn_logit_softcapping, bare.final_logit_softcapping) == (50.0, 30.0)
    assert bare.windows == (4096, None) * 13
    assert bare.rope == bare.local_rope == RopeConfig()
    assert bare.tie_word_embeddings and not bare.qkv_bias and not bare.qk_norm
    assert bare.position_limit is None and bare.dtype == ""
    assert hash(bare) == hash(gemma(tmp_path, {"model_type": "gemma2", "sliding_window": 4096}))


def test_gemma3(tmp_path: Path) -> None:
    bare = gemma(tmp_path, {"model_type": "gemma3_text"})
    assert (bare.vocab_size, bare.max_position_embeddings) == (262208, 131072)
    assert (bare.attn_logit_softcapping, bare.final_logit_softcapping) == (None, None)
    assert bare.windows == ((4096,) * 5 + (None,)) * 4 + (4096,) * 2
    assert (bare.rope, bare.local_rope) == BASES
    assert bare.tie_word_embeddings and bare.qk_norm


@pytest.mark.parametrize(
    ("fields", "caps"),
    [
        (GEMMA, (50.0, 30.0)),
        ({**GEMMA, "attn_logit_softcapping": None}, (None, 30.0)),
        ({**GEMMA, "attn_logit_softcapping": 20, "final_logit_softcapping": None}, (20, None)),
        (GEMMA3, (None, None)),
        ({**GEMMA3, "attn_logit_softcapping": None, "final_logit_softcapping": 9.5}, (None, 9.5)),
    ],
)
def test_soft_caps(tmp_path: Path, fields: dict[str, Any], caps: tuple) -> None:
    config = gemma(tmp_path, fields)
    assert (config.attn_logit_softcapping, config.final_logit_softcapping) == caps


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        (GEMMA, (8, None, 8, None, 8, None, 8)),
        ({**GEMMA, "sliding_window_pattern": 3}, (8, None, 8, None, 8, None, 8)),
        ({**GEMMA, "layer_types": ["full_attention"] * 7, "sliding_window": None}, (None,) * 7),
        (GEMMA3, (8, 8, 8, 8, 8, None, 8)),
        ({**GEMMA3, "sliding_window_pattern": 3}, (8, 8, None, 8, 8, None, 8)),
        ({**GEMMA3, "sliding_window_pattern": 1}, (None,) * 7),
        (
            {
                **GEMMA3,
                "sliding_window_pattern": 6,
                "layer_types": ["full_attention", *["sliding_attention"] * 5, "attention"],
            },
            (None, 8, 8, 8, 8, 8, None),
        ),
    ],
)
def test_gemma_windows(tmp_path: Path, fields: dict[str, Any], windows: tuple) -> None:
    assert gemma(tmp_path, fields).windows == windows


LINEAR = RopeConfig("linear", 1e6, parameters=(("factor", 8.0),))
LINEAR_FIELDS = {"rope_type": "linear", "factor": 8.0}


@pytest.mark.parametrize(
    ("fields", "ropes"),
    [
        ({}, BASES),
        ({"rope_theta": 5e5, "rope_local_base_freq": 2e3},
         (RopeConfig(theta=5e5), RopeConfig(theta=2e3))),
        ({"rope_scaling": LINEAR_FIELDS}, (LINEAR, BASES[1])),
        ({"rope_scaling": {**LINEAR_FIELDS, "rope_theta": 7.0}, "rope_theta": 9.0},
         (RopeConfig("linear", 7.0, parameters=(("factor", 8.0),)), BASES[1])),
        ({"rope_parameters": {"full_attention": LINEAR_FIELDS, "sliding_attention": None}},
         (LINEAR, BASES[1])),
        ({"rope_parameters": {"sliding_attention": {**LINEAR_FIELDS, "rope_theta": 3.0}},
          "rope_local_base_freq": 9.0},
         (BASES[0], RopeConfig("linear", 3.0, parameters=(("factor", 8.0),)))),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}, "rope_theta": 9.0},
         (RopeConfig(theta=5e5), BASES[1])),
        # A length beside them is of no account where they are nested, as in Transformers.
        ({"original_max_position_embeddings": 32, "max_position_embeddings": 64,
          "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
         (RopeConfig("yarn", 1e6, parameters=(
             ("factor", 4.0), ("original_max_position_embeddings", 64), ("truncate", True))),
          BASES[1])),
    ],
)  # fmt: skip
def test_gemma3_ropes(tmp_path: Path, fields: dict[str, Any], ropes: tuple) -> None:
    config = gemma(tmp_path, {**GEMMA3, **fields})
    assert (config.rope, config.local_rope) == ropes


def test_gemma2_rope_is_one_for_all_layers(tmp_path: Path) -> None:
    config = gemma(tmp_path, {**GEMMA, "rope_theta": 5e5, "rope_scaling": SCALED})
    assert config.rope == RopeConfig("linear", 5e5, parameters=(("factor", 2.0),))
    assert config.local_rope == config.rope


@pytest.mark.parametrize(
    ("kind", "parameters", "context"),
    [
        ("default", (), 40960),
        ("llama3", (("factor", 32.0), ("original_max_position_embeddings", 8192)), 40960),
        ("linear", (("factor", 8.0),), 40960),
        ("yarn", (("factor", 4.0), ("original_max_position_embeddings", 32768)), 131072),
        ("dynamic", (("factor", 2.0),), 81920),
    ],
)  # fmt: skip
def test_how_long_texts_may_be(kind: str, parameters: tuple, context: int) -> None:
    """As the cards of Llama 3.2, Gemma 3 and Qwen 3 have it."""
    assert RopeConfig(kind, parameters=parameters).context(40960) == context


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_gemma3_lengths_of_one_rotary_kind(tmp_path: Path, kind: str) -> None:
    """Either kind of layer can go by the length of the text."""
    dynamic = {"rope_parameters": {kind: {"rope_type": "dynamic", "factor": 2.0}}}
    config = gemma(tmp_path, {**GEMMA3, "max_position_embeddings": 64, **dynamic})
    assert config.same_rotary(40, 64) and config.same_rotary(96, 96)
    assert not config.same_rotary(65, 96)
    assert gemma(tmp_path, GEMMA3).same_rotary(65, 96)


def test_a_config_that_does_not_tell_of_lengths_has_one_rotary_embedding() -> None:
    for config in (SimpleNamespace(), SimpleNamespace(same_rotary=None)):
        assert same_rotary(config, 1, 1 << 30)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 8}, (None, None, None)),
        ({"model_type": "mistral"}, (4096, 4096, 4096)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        (
            {
                "model_type": "mistral",
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention", "attention"],
            },
            (None, 8, None),
        ),
        ({"sliding_window": 8, "max_window_layers": 0}, (None, None, None)),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8, 8),
        ),
        ({"use_sliding_window": True, "sliding_window": 8}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": None}, (None, None, None)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows(tmp_path: Path, fields: dict[str, Any], windows: tuple) -> None:
    config = read(tmp_path, {**QWEN, **fields})
    assert isinstance(config, LlamaConfig)
    assert config.windows == windows


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, RopeConfig(theta=5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            RopeConfig("linear", 5e5, parameters=(("factor", 2),)),
        ),
        (
            {"rope_theta": 1.0, "rope_parameters": {**SCALED, "rope_theta": 3e4}},
            RopeConfig("linear", 3e4, parameters=(("factor", 2.0),)),
        ),
        (
            {"rope_parameters": {**SCALED, "partial_rotary_factor": 0.5}},
            RopeConfig("linear", 1e4, 0.5, (("factor", 2.0),)),
        ),
        ({"partial_rotary_factor": 0.5}, RopeConfig()),
        (
            {
                "original_max_position_embeddings": 32,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": None,
                    "beta_fast": 8,
                    "original_max_position_embeddings": 16,
                    "unknown": 1,
                },
            },
            RopeConfig(
                "yarn",
                parameters=(
                    ("beta_fast", 8),
                    ("original_max_position_embeddings", 32),
                    ("truncate", True),
                ),
            ),
        ),
        (
            {"rope_scaling": {"type": "longrope", "long_factor": [2] * 4, "short_factor": [1] * 4}},
            RopeConfig(
                "longrope",
                parameters=(
                    ("long_factor", (2.0,) * 4),
                    ("original_max_position_embeddings", 64),
                    ("short_factor", (1.0,) * 4),
                ),
            ),
        ),
    ],
)
def test_rope(tmp_path: Path, fields: dict[str, Any], rope: RopeConfig) -> None:
    assert llama(tmp_path, **fields).rope == rope


def test_phi3(tmp_path: Path) -> None:
    bare = read(tmp_path, {"model_type": "phi3"})
    assert isinstance(bare, Phi3Config)
    assert (bare.vocab_size, bare.hidden_size, bare.intermediate_size) == (32064, 3072, 8192)
    assert (bare.num_key_value_heads, bare.head_dim, bare.rms_norm_eps) == (32, 96, 1e-5)
    assert (bare.windows, bare.rope) == ((None,) * 32, RopeConfig())
    assert read(tmp_path, {**PHI3, "sliding_window": 7}).windows == (7,) * 3
    factors = {"long_factor": [2] * 3, "short_factor": [1] * 3}
    # The length before scaling stands beside the parameters, where anything says it.
    for kind, length in (("longrope", {}), ("su", {"original_max_position_embeddings": 16})):
        scaling = {"type": kind, "original_max_position_embeddings": 8, **factors}
        config = read(
            tmp_path, {**PHI3, **length, "rope_scaling": scaling, "partial_rotary_factor": 0.75}
        )
        assert isinstance(config, Phi3Config)
        assert (config.rope.rope_type, config.rope.rotary_dim(8)) == ("longrope", 6)
        parameters = dict(config.rope.parameters)
        assert parameters["original_max_position_embeddings"] == (16 if length else 4096)


def test_olmo2(tmp_path: Path) -> None:
    config = read(tmp_path, OLMO2)
    assert isinstance(config, LlamaConfig)
    assert (config.pre_norms, config.post_norms, config.qk_norm_joint) == (False, True, True)
    assert config.qk_norm and config.wide_norms and config.rms_norm_eps == 1e-5


def test_neox(tmp_path: Path) -> None:
    config = read(tmp_path, {**NEOX, "rotary_emb_base": 5e3, "rope_theta": 7.0})
    assert isinstance(config, NeoXConfig)
    assert (config.num_key_value_heads, config.head_dim) == (4, 8)
    assert config.rope == RopeConfig("default", 5e3, 0.25)
    assert config.parallel_residual and config.qkv_bias and config.mlp_bias
    inside = {"rope_theta": 3e4, "partial_rotary_factor": 0.5, "rope_type": "default"}
    config = read(tmp_path, {**NEOX, "rope_parameters": inside, "attention_bias": False})
    assert isinstance(config, NeoXConfig)
    assert config.rope == RopeConfig("default", 3e4, 0.5)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, True)


def test_cohere2(tmp_path: Path) -> None:
    bare = read(tmp_path, {"model_type": "cohere2"})
    assert isinstance(bare, Cohere2Config)
    assert bare.windows == (4096, 4096, 4096, None) * 10
    assert bare.rope_layers == (True, True, True, False) * 10
    assert bare.ropes == (*[RopeConfig()] * 3, None) * 10
    assert (bare.logit_scale, bare.rms_norm_eps, bare.head_dim) == (0.0625, 1e-5, 128)
    assert bare.rope_interleaved and bare.centered_norms and bare.tie_word_embeddings
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    fields = {"layer_types": kinds, "sliding_window": 9, "attention_bias": True}
    config = read(tmp_path, {**COHERE2, **fields, "logit_scale": 2, "rope_theta": 5e4})
    assert isinstance(config, Cohere2Config)
    assert (config.windows, config.logit_scale) == ((None, 9, None), 2)
    assert config.ropes == (None, RopeConfig(theta=5e4), None)
    assert config.qkv_bias and config.output_bias and not config.mlp_bias
    without = read(tmp_path, {**COHERE2, "sliding_window_pattern": 1})
    assert isinstance(without, Cohere2Config)
    assert (without.ropes, without.context) == ((None,) * 3, 64)
    assert without.same_rotary(1, 1 << 30)


def test_smollm3(tmp_path: Path) -> None:
    bare = read(tmp_path, {"model_type": "smollm3"})
    assert isinstance(bare, LlamaConfig)
    assert bare.rope_layers == (True, True, True, False) * 9
    assert (bare.windows, bare.rope) == ((None,) * 36, RopeConfig(theta=2e6))
    fields = {"no_rope_layers": [1, 0, 0, 1], "sliding_window": 9}
    config = read(tmp_path, {**SMOLLM3, **fields, "num_key_value_heads": None})
    assert isinstance(config, LlamaConfig)
    assert (config.rope_layers, config.windows) == ((True, False, False), (None,) * 3)
    config = read(tmp_path, {**SMOLLM3, **fields, "use_sliding_window": True})
    assert isinstance(config, LlamaConfig)
    assert config.windows == (None, 9, 9)


def test_experts(tmp_path: Path) -> None:
    mixtral = read(tmp_path, {**MIXTRAL, "sliding_window": 7})
    assert isinstance(mixtral, MixtralConfig)
    assert (mixtral.num_experts, mixtral.num_experts_per_tok) == (8, 2)
    assert (mixtral.moe_intermediate_size, mixtral.norm_topk_prob) == (14336, True)
    assert (mixtral.rope.theta, mixtral.windows) == (1e6, (7,) * 3)
    qwen = read(tmp_path, {**QWEN3_MOE, "sliding_window": 7, "layer_types": ["full_attention"]})
    assert isinstance(qwen, MoeConfig)
    assert (qwen.num_experts, qwen.num_experts_per_tok, qwen.head_dim) == (128, 8, 8)
    assert (qwen.norm_topk_prob, qwen.qk_norm, qwen.windows) == (False, True, (None,) * 3)
    assert qwen.dense_layers == ()
    fields = {"num_local_experts": 16, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    qwen = read(tmp_path, {**QWEN3_MOE, **fields, "use_sliding_window": True})
    assert isinstance(qwen, MoeConfig)
    assert (qwen.num_experts, qwen.dense_layers, qwen.windows) == (16, (0, 1, 2), (4096,) * 3)


def test_llama4(tmp_path: Path) -> None:
    bare = read(tmp_path, {"model_type": "llama4_text"})
    assert isinstance(bare, Llama4Config)
    assert (bare.num_experts, bare.num_experts_per_tok, bare.head_dim) == (16, 1, 128)
    assert (bare.intermediate_size, bare.moe_intermediate_size) == (16384, 8192)
    assert bare.windows == (8192, 8192, 8192, None) * 12
    assert bare.rope_layers == (True, True, True, False) * 12
    assert (bare.use_qk_norm, bare.attn_temperature, bare.dense_layers) == (True, (0.1, 8192), ())
    assert bare.rope == RopeConfig(theta=5e5)
    fields = {
        "no_rope_layers": [0, 1, 1, 1], "interleave_moe_layer_step": 2, "head_dim": None,
        "attention_chunk_size": 9, "attn_temperature_tuning": False,
        "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    }  # fmt: skip
    config = read(tmp_path, {**LLAMA4, **fields})
    assert isinstance(config, Llama4Config)
    assert (config.windows, config.rope_layers) == ((9, None, 9), (False, True, True))
    assert (config.dense_layers, config.attn_temperature, config.head_dim) == ((0, 2), None, 8)


def test_gemma3n(tmp_path: Path) -> None:
    bare = read(tmp_path, {"model_type": "gemma3n_text"})
    assert isinstance(bare, Gemma3nConfig)
    assert (bare.num_hidden_layers, bare.num_kv_shared_layers, bare.altup_num_inputs) == (35, 15, 4)
    assert bare.windows == (512, 512, 512, 512, None) * 7
    assert bare.cache_sources == (*range(20), *(18, 18, 18, 18, 19) * 3)
    assert bare.activation_sparsity_pattern == (0.95,) * 10 + (0.0,) * 25
    assert (bare.intermediate_sizes, bare.final_logit_softcapping) == ((16384,) * 35, 30.0)
    assert (bare.rope, bare.local_rope) == BASES
    config = read(tmp_path, {**GEMMA3N, "intermediate_size": [1, 2, 3, 4, 5, 6, 7]})
    assert isinstance(config, Gemma3nConfig)
    assert (config.intermediate_sizes, config.windows) == (
        (1, 2, 3, 4, 5, 6, 7),
        (8,) * 4 + (None, 8, 8),
    )
    assert config.cache_sources == (0, 1, 2, 3, 4, 3, 3)


def test_gemma4(tmp_path: Path) -> None:
    bare = read(tmp_path, {"model_type": "gemma4_text"})
    assert isinstance(bare, Gemma4Config)
    assert bare.windows == (512, 512, 512, 512, 512, None) * 5
    assert (bare.rope, bare.local_rope) == (
        RopeConfig("proportional", 1e6, 0.25), RopeConfig(theta=1e4),
    )  # fmt: skip
    heads = [(each.num_key_value_heads, each.head_dim) for each in bare.per_layer_config]
    assert heads == ([(4, 256)] * 5 + [(4, 512)]) * 5
    assert (bare.num_kv_shared_layers, bare.num_experts, bare.final_logit_softcapping) == (
        0,
        0,
        None,
    )
    # What stands outside of `rope_parameters` Transformers does not read here.
    outside = {"rope_theta": 777.0, "rope_local_base_freq": 7.0, "partial_rotary_factor": 0.5}
    found: Any = read(tmp_path, {"model_type": "gemma4_text", **outside})
    assert (found.rope, found.local_rope) == (bare.rope, bare.local_rope)
    published = {
        **GEMMA4, "num_kv_shared_layers": 3, "attention_k_eq_v": True, "use_double_wide_mlp": True,
        "num_global_key_value_heads": 1, "num_key_value_heads": 2, "global_head_dim": 16,
        "intermediate_size": 40, "layer_types": [*["full_attention", "sliding_attention"] * 3, "x"],
    }  # fmt: skip
    config = read(tmp_path, published)
    assert isinstance(config, Gemma4Config)
    assert config.intermediate_sizes == (40, 40, 40, 40, 80, 80, 80)
    assert config.cache_sources == (0, 1, 2, 3, 2, 3, 2)
    assert layer_heads(config) == ((1, 16), (2, 8)) * 3 + ((1, 16),)
    # As Transformers writes the same.
    full = {"head_dim": 16, "num_key_value_heads": 1}
    of_layers = {str(n): full for n in range(0, 7, 2)}
    written = {k: v for k, v in published.items() if "global" not in k}
    assert read(tmp_path, {**written, "per_layer_config": of_layers}) == config
    # Without `attention_k_eq_v` all layers have as many heads.
    told = read(tmp_path, {**published, "attention_k_eq_v": False})
    assert layer_heads(told) == ((2, 16), (2, 8)) * 3 + ((2, 16),)


WHOLES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"model_type": "gemma3", "text_config": {}}, {"model_type": "gemma3_text"}),
    (
        {
            "model_type": "gemma3", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
            "text_config": {**GEMMA3, "torch_dtype": "float32"}, "vision_config": {"depth": 9},
        },
        {**GEMMA3, "torch_dtype": "bfloat16", "tie_word_embeddings": False},
    ),
    ({"model_type": "gemma3n", "text_config": GEMMA3N}, GEMMA3N),
    ({"model_type": "gemma4", "text_config": GEMMA4, "audio_config": None}, GEMMA4),
    (
        {
            "model_type": "llama4",
            "text_config": {**LLAMA4, "attn_temperature_tuning": 4, "no_rope_layers": []},
        },
        LLAMA4,
    ),
    (
        {"model_type": "mistral3", "text_config": {**QWEN, "model_type": "mistral"}},
        {**QWEN, "model_type": "mistral", "tie_word_embeddings": True},
    ),
    (
        {"model_type": "mistral3", "text_config": {**QWEN, "model_type": "mistral3"}},
        {**QWEN, "model_type": "mistral", "tie_word_embeddings": True},
    ),
    # Of a model that is not known the text part says all itself.
    ({"model_type": "new", "text_config": QWEN}, QWEN),
    (
        {"model_type": "llava", "text_config": {**LLAMA, "tie_word_embeddings": True}},
        {**LLAMA, "tie_word_embeddings": True},
    ),
    (
        {
            "model_type": "llava", "tie_word_embeddings": False,
            "text_config": {**LLAMA, "tie_word_embeddings": True},
        },
        {**LLAMA, "tie_word_embeddings": True},
    ),
    (
        {"model_type": "llava", "tie_word_embeddings": False, "text_config": GEMMA},
        {**GEMMA, "tie_word_embeddings": True},
    ),
    (  # as it was published: flat
        {
            **QWEN, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 7},
            "rope_theta": 5e5, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        },
        {**QWEN, "rope_theta": 5e5, "rms_norm_eps": 1e-5, "intermediate_size": 29568},
    ),
    (  # as Transformers writes it
        {
            "model_type": "qwen2_5_vl",
            "text_config": {
                **QWEN, "model_type": "qwen2_5_vl_text", "rope_scaling": {},
                "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mrope_section": [1, 1, 2]},
            },
        },
        {
            **QWEN, "rms_norm_eps": 1e-5, "intermediate_size": 29568, "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0},
        },
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("whole", "text"), WHOLES, ids=[f"{n}-{x['model_type']}" for n, (x, _) in enumerate(WHOLES)]
)
def test_the_text_part_of_a_multimodal_config(tmp_path, whole, text) -> None:
    assert read(tmp_path, whole) == read(tmp_path, text)


def test_generation_ids_of_a_multimodal_config(tmp_path: Path) -> None:
    """Those outside of ``text_config`` go first; what both leave out is the text family's."""
    whole = {"model_type": "gemma3", "text_config": {"eos_token_id": 5, "pad_token_id": 7}}
    for outside, ids in (
        ({}, GenerationDefaults((5,), 2, 7)),
        ({"eos_token_id": [1, 106], "pad_token_id": 0}, GenerationDefaults((1, 106), 2, 0)),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**whole, **outside}))
        assert read_generation(tmp_path, "gemma3_text") == ids
    (tmp_path / "config.json").write_text(json.dumps({**QWEN, "model_type": "qwen2_5_vl"}))
    assert read_generation(tmp_path, "qwen2") == GenerationDefaults((151645,), 151643)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "mamba"},
        f'model_type is "mamba"; expected one of {", ".join(sorted(READERS))}, see ',
    ),
    (
        {"model_type": None},
        r"model_type is null; expected one of .*, see kvjax.models.supported\(\)",
    ),
    ({"model_type": "mamba"}, r"expected one of .*, see kvjax.models.supported\(\)"),
    ({"quantization_config": {"bits": 4}}, 'quantization_config is {"bits": 4}; expected none'),
    ({"per_layer_config": {"1": {"head_dim": 4}}}, "per_layer_config is .*; expected none"),
    ({"is_causal": False}, "is_causal is false; expected true"),
    ({"hidden_act": "maxout"}, 'hidden_act is "maxout"; expected one of .*silu'),
    ({"hidden_size": "32"}, 'hidden_size is "32"; expected an integer of at least 1'),
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer of at least 1"),
    ({"vocab_size": True}, "vocab_size is true; expected an integer"),
    ({"num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of .* = 4"),
    ({"model_type": "mistral"}, "num_key_value_heads is null; expected a divisor of .* = 4, not 8"),
    ({"rms_norm_eps": "tiny"}, 'rms_norm_eps is "tiny"; expected a number'),
    ({"attention_bias": "yes"}, 'attention_bias is "yes"; expected true or false'),
    ({"dtype": "float8"}, 'dtype is "float8"; expected one of bfloat16, float16, float32'),
    ({"head_dim": 7}, "head_dim is 7; expected an even number of rotated channels"),
    ({"rope_theta": -1}, "rope_theta is -1; expected a number above 0"),
    ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; expected an object"),
    ({"rope_scaling": {"type": "mrope"}}, 'rope_scaling.type is "mrope"; expected one of default'),
    ({"rope_parameters": {"rope_type": "su"}}, 'rope_parameters.rope_type is "su"; expected one'),
    (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention is .*; expected one set of rotary parameters",
    ),
    ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is null; expected a number"),
    ({"rope_scaling": {"type": "dynamic", "factor": 0}}, "rope_scaling.factor is 0; expected"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is null; expected a number above 0"),
    (
        {"rope_scaling": {"type": "yarn", "factor": 2, "truncate": 1}},
        "rope_scaling.truncate is 1; expected true or false",
    ),
    (
        {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 1}},
        "rope_scaling.high_freq_factor is null; expected a number",
    ),
    (
        {"rope_scaling": {"type": "longrope", "long_factor": [1, 2], "short_factor": [1] * 4}},
        r"rope_scaling.long_factor is \[1, 2\]; expected a list of 4 numbers above 0, found 2",
    ),
    (
        {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
        "expected another type: dynamic needs 4 rotated channels, not 2",
    ),
    ({**QWEN, "layer_types": ["full_attention"]}, "layer_types is .*; expected 3 names"),
    ({**QWEN, "layer_types": ["moe"] * 3}, "layer_types is .*; expected 3 names"),
    (
        {**QWEN, "layer_types": ["sliding_attention"] * 3},
        "layer_types is .*; expected only full_attention: sliding_window is not in use",
    ),
    (
        {**QWEN, "model_type": "mistral", "sliding_window": 0},
        "sliding_window is 0; expected an integer",
    ),
    ({"model_type": "gemma3", "text_config": 3}, "text_config is 3; expected an object"),
    (
        {"model_type": "gemma3", "text_config": {"use_bidirectional_attention": True}},
        "text_config.use_bidirectional_attention is true; expected false: attention is causal",
    ),
    (
        {"model_type": "gemma3", "quantization_config": {"bits": 4}},
        "json: quantization_config is .*; expected none: quantized weights are not supp",
    ),
    ({"model_type": "gemma3", "is_causal": False}, "json: is_causal is false; expected true"),
    ({"model_type": "gemma3", "dtype": "int8"}, 'json: dtype is "int8"; expected one of bfloat16'),
    ({"model_type": "llava", "tie_word_embeddings": 1}, "json: tie_word_embeddings is 1; expected"),
    (
        {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
        'text_config.model_type is "ministral3"; expected one of .*supported',
    ),
    (
        {"model_type": "new", "text_config": {"model_type": ["llama"]}},
        r'text_config.model_type is \["llama"\]; expected one of',
    ),
    ({"model_type": "new", "text_config": {}}, "text_config.model_type is null; expected one of"),
    (
        {"model_type": "new", "text_config": {"model_type": "t5"}},
        "text_config.model_type is .*; expected a decoder-only model: a text model with",
    ),
    (
        {"model_type": "paligemma", "text_config": {"model_type": "gemma2"}},
        'model_type is "paligemma"; expected another family: PaliGemma attends to its',
    ),
    ({**GEMMA, "use_bidirectional_attention": True}, "attention is true; expected false"),
    ({**GEMMA3, "use_bidirectional_attention": "all"}, 'attention is "all"; expected false'),
    ({**GEMMA3, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0; expected null"),
    ({**GEMMA, "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0; expected a number abo"),
    ({**GEMMA3, "final_logit_softcapping": "x"}, 'logit_softcapping is "x"; expected a number'),
    ({**GEMMA, "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; expected a number above"),
    ({**GEMMA, "hidden_activation": "maxout"}, 'hidden_activation is "maxout"; expected one of'),
    ({**GEMMA, "num_key_value_heads": 3}, "num_key_value_heads is 3; expected a divisor of .* = 4"),
    ({**GEMMA, "num_attention_heads": 6}, "num_key_value_heads is null; .* = 6, not 4"),
    ({**GEMMA, "attention_bias": 1}, "attention_bias is 1; expected true or false"),
    ({**GEMMA, "sliding_window": None}, "sliding_window is null; expected an integer of at least"),
    ({**GEMMA3, "sliding_window": 0}, "sliding_window is 0; expected an integer of at least 1"),
    ({**GEMMA3, "sliding_window_pattern": 0}, "sliding_window_pattern is 0; expected an integer"),
    ({**GEMMA3, "layer_types": ["chunked_attention"] * 7}, "layer_types is .*; expected 7 names"),
    ({**GEMMA3, "layer_types": [["full_attention"]] * 7}, "layer_types is .*; expected 7 names"),
    (
        {**GEMMA3, "sliding_window": None, "layer_types": ["sliding_attention"] * 7},
        "layer_types is .*; expected only full_attention: sliding_window is not in use",
    ),
    (
        {**GEMMA, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters.full_attention is .*; expected one set of rotary parameters",
    ),
    (
        {**GEMMA3, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        'rope_parameters.rope_type is "default"; expected only full_attention and slid',
    ),
    (
        {**GEMMA3, "rope_scaling": {"type": "linear", "factor": 8.0}},
        "rope_scaling.rope_type is null; expected one of default",
    ),
    (
        {
            **GEMMA3,
            "rope_scaling": LINEAR_FIELDS,
            "rope_parameters": {"full_attention": {"rope_type": "default"}},
        },
        "rope_scaling is .*; expected null, because rope_parameters.full_attention",
    ),
    (
        {**GEMMA3, "rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
        "rope_parameters.sliding_attention.factor is null; expected a number",
    ),
    ({**GEMMA3, "rope_parameters": {"full_attention": 1}}, "full_attention is 1; expected an o"),
    ({**GEMMA3, "rope_local_base_freq": -1}, "rope_local_base_freq is -1; expected a number above"),
    ({**GEMMA3, "rope_theta": "x"}, 'rope_theta is "x"; expected a number'),
    ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention is true; expected"),
    ({"model_type": "gpt2", "n_embd": 30, "n_head": 4}, "n_head is 4; expected a divisor of"),
    ({"model_type": "gpt2", "activation_function": "x"}, 'activation_function is "x"; expected'),
    (
        {**PHI3, "rope_scaling": {"type": "linear", "factor": 2}},
        'rope_scaling.type is "linear"; expected one of default, longrope, su, yarn',
    ),
    (
        {**PHI3, "rope_scaling": {"type": "yarn", "factor": 2}},
        "rope_scaling.long_factor is null; expected a list of 4 numbers above 0",
    ),
    ({**PHI3, "partial_rotary_factor": 0.4}, "partial_rotary_factor is .*; expected an even numb"),
    ({**PHI3, "sliding_window": 0}, "sliding_window is 0; expected an integer of at least 1"),
    ({**OLMO2, "attention_bias": 1}, "attention_bias is 1; expected true or false"),
    ({**NEOX, "use_parallel_residual": 1}, "use_parallel_residual is 1; expected true or false"),
    ({**NEOX, "num_attention_heads": 5}, "num_attention_heads is 5; expected a divisor of .* = 32"),
    ({**NEOX, "head_dim": 16}, "head_dim is 16; expected hidden_size / num_attention_heads"),
    ({**NEOX, "rotary_pct": 2.0}, "rotated channels, at most head_dim = 8, not 16"),
    ({**NEOX, "hidden_act": "x"}, 'hidden_act is "x"; expected one of'),
    ({**MIXTRAL, "num_local_experts": 1}, "num_experts_per_tok is null; expected at most .* = 1"),
    ({**MIXTRAL, "num_experts_per_tok": 9}, "num_experts_per_tok is 9; expected at most .* = 8"),
    ({**QWEN3_MOE, "num_experts": 0}, "num_experts is 0; expected an integer of at least 1"),
    (
        {**QWEN3_MOE, "num_experts": 8, "num_local_experts": 4},
        "num_local_experts is 4; expected the same value as num_experts = 8",
    ),
    ({**QWEN3_MOE, "mlp_only_layers": [0.5]}, r"mlp_only_layers is \[0.5\]; expected a list of"),
    ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step is 0; expected an integer of"),
    (
        {**GEMMA3N, "intermediate_size": [1]},
        r"intermediate_size is \[1\]; expected a number above 0",
    ),
    (
        {**GEMMA3N, "activation_sparsity_pattern": 0.5},
        "sparsity_pattern is 0.5; expected 7 numbers",
    ),
    ({**GEMMA3N, "activation_sparsity_pattern": [1] * 7}, "expected 7 numbers from 0 to below 1"),
    ({**GEMMA3N, "altup_active_idx": 4}, "altup_active_idx is 4; expected below .* = 4"),
    ({**GEMMA3N, "num_kv_shared_layers": 7}, "num_kv_shared_layers is 7; expected fewer"),
    ({**GEMMA3N, "num_kv_shared_layers": 3}, "num_kv_shared_layers is 3; expected fewer"),
    ({**GEMMA3N, "use_bidirectional_attention": True}, "attention is true; expected false"),
    (
        {"model_type": "gemma4", "text_config": {"use_bidirectional_attention": "all"}},
        'text_config.use_bidirectional_attention is "all"; expected false or vision',
    ),
    ({**GEMMA4, "use_bidirectional_attention": "all"}, 'is "all"; expected false or vision'),
    ({**GEMMA4, "per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config is .*; expected"),
    (
        {**GEMMA4, "per_layer_config": {"5": {"window": 4}}},
        "per_layer_config is .*; expected only he",
    ),
    (
        {
            **GEMMA4,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}
            },
        },
        "full_attention.partial_rotary_factor is 2.0; expected a number above 0, and at most 1",
    ),
    ({**GEMMA4, "num_kv_shared_layers": 6}, "num_kv_shared_layers is 6; expected fewer"),
    ({**GEMMA4, "enable_moe_block": True}, "num_experts is null; expected an integer"),
    (
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 2,
            "top_k_experts": 3,
            "moe_intermediate_size": 4,
        },
        "top_k_experts is 3; expected at most the number of experts",
    ),
    (
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 3},
        "num_global_key_value_heads is 3; expected a divisor of num_attention_heads = 4",
    ),
    (
        {**GEMMA4, "rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
        'full_attention.rope_type is "yarn"; expected one of default, linear, proportional',
    ),
    (
        {"model_type": "llama4", "text_config": {"attn_temperature_tuning": "x"}},
        'text_config.attn_temperature_tuning is "x"; expected true or false',
    ),
    ({**LLAMA4, "no_rope_layers": [1, 2, 0]}, r"no_rope_layers is \[1, 2, 0\]; expected a list of"),
    ({**LLAMA4, "no_rope_layers": [1]}, "no_rope_layers is .*; expected a list of 3 numbers"),
    ({**LLAMA4, "moe_layers": 1}, "moe_layers is 1; expected a list of layer indices"),
    ({**LLAMA4, "layer_types": [["x"]] * 3}, "layer_types is .*; expected a list of 3 names"),
    ({**LLAMA4, "attention_chunk_size": None}, "attention_chunk_size is null; expected an integer"),
    (
        {**LLAMA4, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        'rope_scaling.rope_type is "yarn"; expected one of default, dynamic, linear, llama3',
    ),
    ({**QWEN3_MOE, "norm_topk_prob": 1}, "norm_topk_prob is 1; expected true or false"),
    ({**COHERE2, "logit_scale": 0}, "logit_scale is 0; expected a number above 0"),
    ({**COHERE2, "sliding_window": None}, "sliding_window is null; expected an integer of at"),
    ({**SMOLLM3, "no_rope_layers": [1, 0]}, "no_rope_layers is .*; expected a list of 3 numbers"),
    (
        {**SMOLLM3, "layer_types": ["sliding_attention"] * 3, "sliding_window": 9},
        "layer_types is .*; expected only full_attention: sliding_window is not in use",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED, ids=[m[:40] for _, m in REFUSED])
def test_refused_by_name(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    base = {} if fields.get("model_type") == "gpt2" else LLAMA
    with pytest.raises(kvjax.CheckpointError, match=message) as error:
        read(tmp_path, {**base, **fields})
    assert str(error.value).startswith(str(tmp_path / "config.json") + ": ")


def test_supported() -> None:
    """One table has the families, what is refused of each, and the words of the refusals."""
    table = supported()
    assert list(table) == sorted(READERS)
    root = Path(__file__).parents[1]
    for page in ("README.md", "docs/checkpoints.md"):
        text = (root / page).read_text(encoding="utf-8")
        assert [name for name in table if f"`{name}`" not in text] == [], page
    assert {"llama", "phi3", "olmo2", "gpt_neox", "mixtral", "llama4_text"} <= set(table)
    assert all(
        "quantization_config" in fields and "is_causal" in fields for fields in table.values()
    )
    assert table["gpt2"]["add_cross_attention"] == "false: there is no encoder to attend to"
    assert "longrope" in table["phi3"]["rope_parameters"]
    assert all(text.count(".") == 0 for fields in table.values() for text in fields.values())


def test_what_the_table_says_is_what_is_refused(tmp_path: Path) -> None:
    wrong = {"quantization_config": {"bits": 4}, "per_layer_config": {"1": {}}, "is_causal": False}
    for model_type, fields in supported().items():
        for name, value in wrong.items():
            with pytest.raises(kvjax.CheckpointError) as error:
                read(tmp_path, {"model_type": model_type, name: value})
            assert str(error.value).endswith(f"; expected {fields[name]}")


@pytest.mark.parametrize(
    "fields",
    [
        {"pretraining_tp": 2, "attention_dropout": 0.5, "use_cache": False, "initializer_range": 9},
        {"quantization_config": None, "rope_scaling": None, "auto_map": {"AutoModel": "x.Y"}},
        {"sliding_window": 3, "layer_types": ["moe"], "architectures": ["Other"]},
        {"rope_scaling": {}, "is_encoder_decoder": False, "whatever": {"a": 1}},
        {"rope_parameters": {"rope_type": "default", "factor": 8.0, "mrope_section": [1, 2]}},
    ],
)
def test_what_changes_nothing_is_not_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert llama(tmp_path, **fields) == llama(tmp_path)


@pytest.mark.parametrize("base", [GEMMA, GEMMA3])
@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "maxout", "cache_implementation": "hybrid", "attention_dropout": 0.5},
        {"use_bidirectional_attention": None, "rope_scaling": None, "rope_parameters": {}},
        {"_sliding_window_pattern": 2, "use_sliding_window": False, "max_window_layers": 1},
        {"max_position_embeddings": None, "partial_rotary_factor": 0.5},
    ],
)
def test_what_changes_nothing_in_gemma(
    tmp_path: Path, base: dict[str, Any], fields: dict[str, Any]
) -> None:
    assert gemma(tmp_path, {**base, **fields}) == gemma(tmp_path, base)


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    with pytest.raises(kvjax.CheckpointError) as error:
        read(tmp_path, {**LLAMA, "hidden_act": "x" * 999})
    assert len(str(error.value)) < 600 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not valid JSON: .*line 1"),
        (b"[1]", "expected a JSON object, found list"),
        (b"\xff\xfe{}", "can't be read as text"),
        (None, "file not found"),
    ],
)
def test_unreadable(tmp_path: Path, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(kvjax.CheckpointError, match=message):
        read_config(tmp_path)


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(kvjax.CheckpointError, match=r"config\.json: can't be read"):
        read_config(tmp_path)


def generation(folder: Path, config: dict, fields: dict | None) -> GenerationDefaults:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **config}))
    if fields is not None:
        (folder / "generation_config.json").write_text(json.dumps(fields))
    return read_generation(folder, "llama")


def test_generation_defaults(tmp_path: Path) -> None:
    found = generation(
        tmp_path,
        {"eos_token_id": 7},
        {"eos_token_id": [3, 4], "bos_token_id": 1, "pad_token_id": 0, "do_sample": True,
         "temperature": 0.6, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1},
    )  # fmt: skip
    assert found == GenerationDefaults((3, 4), 1, 0, True, 0.6, 20, 0.9, None, 1.1)


def test_generation_ids_of_the_config(tmp_path: Path) -> None:
    assert generation(tmp_path, {}, None) == GenerationDefaults((2,), 1)
    assert generation(tmp_path, {"eos_token_id": [5], "bos_token_id": 4}, None).eos_token_ids == (
        5,
    )
    assert generation(tmp_path, {"eos_token_id": None, "pad_token_id": -1}, None) == (
        GenerationDefaults((), 1)
    )
    assert generation(tmp_path, {"eos_token_id": 6}, {"top_k": 5}).eos_token_ids == (6,)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_generation_ids_of_gemma(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert read_generation(tmp_path, model_type) == GenerationDefaults((1,), 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"eos_token_id": "x"}, 'eos_token_id is "x"; expected a token id or a list of them'),
        ({"temperature": "hot"}, 'temperature is "hot"; expected a number'),
        ({"top_k": 0.5}, "top_k is 0.5; expected an integer of at least 0"),
        ({"do_sample": 1}, "do_sample is 1; expected true or false"),
    ],
)
def test_generation_refused(tmp_path: Path, fields: dict, message: str) -> None:
    with pytest.raises(kvjax.CheckpointError, match=rf"generation_config.json: {message}"):
        generation(tmp_path, {}, fields)
