"""Conversion of the fields of a ``config.json`` to a configuration. ``config_gemma.py`` does this
for the Gemma families.

Defaults match Transformers' configuration classes (5.23). Fields that Transformers ignores for a
model are ignored here too.
"""

from collections.abc import Callable
from dataclasses import replace

from .config import Cohere2Config, Config, GPT2Config, LlamaConfig, NeoXConfig, Phi3Config, T5Config
from .config_fields import (
    FAMILIES,
    Family,
    check_model_type,
    read_dtype,
    read_rope_layers,
    read_shared,
    refused,
)
from .config_gemma import GEMMAS, read_gemma, read_gemma3n, read_gemma4
from .config_moe import Llama4Config, MixtralConfig, MoeConfig
from .files import Fields
from .layers import ACTIVATIONS
from .rope import RopeForm, read_rope

_LLAMAS = {
    "llama": Family(32000, 11008, None, None, 2048, attention_bias=True, mlp_bias=True),
    "mistral": Family(32000, 14336, 8, None, 131072, sliding_window="all"),
    "qwen2": Family(qkv_bias=True, sliding_window="some"),
    "qwen3": Family(head_dim=128, attention_bias=True, qk_norm=True, sliding_window="some"),
    "olmo2": Family(
        50304, 11008, None, None, 2048, attention_bias=True, qk_norm=True,
        norm=("rms_norm_eps", 1e-5),
        settings={
            "pre_norms": False, "post_norms": True, "qk_norm_joint": True, "wide_norms": True,
        },
    ),
    "smollm3": Family(
        128256, 11008, 4, None, 32768, attention_bias=True, mlp_bias=True, sliding_window="some",
        hidden_size=2048, num_hidden_layers=36, num_attention_heads=16, tie_word_embeddings=True,
        rope=RopeForm(theta=2e6),
    ),
}  # fmt: skip
_COHERE2 = Family(
    256000, 22528, None, None, 8192, attention_bias=True, sliding_window="pattern",
    sliding_window_pattern=4, hidden_size=8192, num_hidden_layers=40, num_attention_heads=64,
    tie_word_embeddings=True, norm=("layer_norm_eps", 1e-5),
    settings={"rope_interleaved": True, "wide_norms": True, "centered_norms": True},
)  # fmt: skip
_NEOX = Family(
    50432, 24576, None, None, 2048, hidden_size=6144, num_hidden_layers=44, num_attention_heads=64,
    activation=("hidden_act", "gelu"), norm=("layer_norm_eps", 1e-5),
    rope=RopeForm("rotary_emb_base", part="rotary_pct", partial=0.25, partial_default=True),
)  # fmt: skip
_PHI3 = Family(
    32064, 8192, None, None, 4096, sliding_window="named", hidden_size=3072,
    norm=("rms_norm_eps", 1e-5),
    rope=RopeForm(
        kinds=("default", "longrope"), older=(("su", "longrope"), ("yarn", "longrope")),
        partial_default=True, trained=4096,
    ),
)  # fmt: skip


def config_from_fields(config: Fields) -> Config:
    """Convert the fields of a ``config.json`` to a configuration.

    Returns:
      The configuration. Its ``dtype`` is "" if the fields do not specify one.

    Raises:
      CheckpointError: if the model family is not supported, or a field has an unsupported value
        that would change the model's output.
    """
    model_type = check_model_type(config)
    for name in ("quantization_config", "per_layer_config"):
        if config.raw(name) and name not in FAMILIES[model_type].rejects:
            raise refused(config, name)
    if not config.values.get("is_causal", True):
        raise refused(config, "is_causal")
    return READERS[model_type](config)


def _llama(config: Fields) -> LlamaConfig:
    family = _LLAMAS[config.raw("model_type")]
    shared, sizes = read_shared(config, family)
    return LlamaConfig(**shared, rope=read_rope(config, family.rope, **sizes))


def _smollm3(config: Fields) -> LlamaConfig:
    layers = config.integer("num_hidden_layers", _LLAMAS["smollm3"].num_hidden_layers)
    rotated, window = read_rope_layers(config, layers), config.raw("sliding_window")
    has_window = window is not None and config.flag("use_sliding_window", False)
    kinds = [
        "sliding_attention" if has_window and not each else "full_attention" for each in rotated
    ]
    completed = {"sliding_window": window, "layer_types": config.raw("layer_types", kinds)}
    result = _llama(replace(config, values={**config.values, **completed}))
    return replace(result, rope_layers=rotated)


def _cohere2(config: Fields) -> Cohere2Config:
    shared, sizes = read_shared(config, _COHERE2)
    return Cohere2Config(
        **shared,
        rope=read_rope(config, _COHERE2.rope, **sizes),
        rope_layers=tuple(window is not None for window in shared["windows"]),
        logit_scale=config.number("logit_scale", 0.0625),
    )


def _phi3(config: Fields) -> Phi3Config:
    shared, sizes = read_shared(config, _PHI3)
    return Phi3Config(**shared, rope=read_rope(config, _PHI3.rope, **sizes))


def _neox(config: Fields) -> NeoXConfig:
    bias = config.flag("attention_bias", True)
    shared, sizes = read_shared(config, _NEOX)
    hidden, heads = shared["hidden_size"], shared["num_attention_heads"]
    if hidden % heads:
        raise config.wrong("num_attention_heads", f"a divisor of hidden_size = {hidden}")
    if shared["head_dim"] != hidden // heads:
        raise refused(config, "head_dim")
    shared |= {"num_key_value_heads": heads}
    shared |= {"qkv_bias": bias, "output_bias": bias, "mlp_bias": True}
    return NeoXConfig(
        **shared,
        rope=read_rope(config, _NEOX.rope, **sizes),
        parallel_residual=config.flag("use_parallel_residual", True),
    )


def _gpt2(config: Fields) -> GPT2Config:
    if config.flag("add_cross_attention", False):
        raise refused(config, "add_cross_attention")
    heads = _either(config, "num_attention_heads", "n_head", 12)
    hidden = _either(config, "hidden_size", "n_embd", 768)
    if hidden % heads:
        raise config.wrong("n_head", f"a divisor of n_embd = {hidden}")
    return GPT2Config(
        model_type="gpt2",
        vocab_size=config.integer("vocab_size", 50257),
        hidden_size=hidden,
        intermediate_size=config.integer("n_inner", 4 * hidden),
        num_hidden_layers=_either(config, "num_hidden_layers", "n_layer", 12),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=_either(config, "max_position_embeddings", "n_positions", 1024),
        layer_norm_epsilon=config.number("layer_norm_epsilon", 1e-5, positive=False),
        activation=config.choice("activation_function", "gelu_new", ACTIVATIONS),
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
        scale_attn_weights=config.flag("scale_attn_weights", True),
        scale_attn_by_inverse_layer_idx=config.flag("scale_attn_by_inverse_layer_idx", False),
        dtype=read_dtype(config),
    )


def _either(config: Fields, name: str, own: str, default: int) -> int:
    """Read a field by its general name, or by GPT-2's name if the general name is missing."""
    return config.integer(name if config.raw(name) is not None else own, default)


def read_t5(config: Fields) -> T5Config:
    if not config.flag("is_encoder_decoder", True):
        raise refused(config, "is_encoder_decoder")
    layers, heads = config.integer("num_layers", 6), config.integer("num_heads", 8)
    first, _, last = str(config.raw("feed_forward_proj", "relu")).rpartition("-")
    if first not in ("", "gated") or last not in ACTIVATIONS:
        raise config.wrong("feed_forward_proj", f"one of {_kinds()}")
    # T5 1.1's "gated-gelu" is the tanh approximation, unlike Transformers' "gelu".
    activation = "gelu_new" if (first, last) == ("gated", "gelu") else last
    buckets = config.integer("relative_attention_num_buckets", 32, least=4)
    farthest = config.integer("relative_attention_max_distance", 128)
    if farthest <= buckets // 2:
        raise config.wrong(
            "relative_attention_max_distance",
            f"above {buckets // 2}, half of relative_attention_num_buckets",
        )
    return T5Config(
        model_type="t5",
        vocab_size=config.integer("vocab_size", 32128),
        hidden_size=config.integer("d_model", 512),
        intermediate_size=config.integer("d_ff", 2048),
        num_hidden_layers=config.integer("num_decoder_layers", layers),
        num_encoder_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=config.integer("d_kv", 64),
        layer_norm_epsilon=config.number("layer_norm_epsilon", 1e-6, positive=False),
        activation=config.choice("dense_act_fn", activation, ACTIVATIONS),
        is_gated_act=config.flag("is_gated_act", first == "gated"),
        # Embeddings are tied unless the files have a different head. The field tie_word_embeddings
        # does not say so: in files of T5 1.1, false means that outputs are not scaled.
        tie_word_embeddings=True,
        scale_decoder_outputs=config.flag(
            "scale_decoder_outputs", config.flag("tie_word_embeddings", True)
        ),
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=farthest,
        dtype=read_dtype(config),
    )


_MOES = {
    "mixtral": Family(
        32000, 14336, 8, None, 131072, sliding_window="named", norm=("rms_norm_eps", 1e-5),
        rope=RopeForm(theta=1e6),
    ),
    "qwen3_moe": Family(
        intermediate_size=6144, num_key_value_heads=4, hidden_size=2048, num_hidden_layers=24,
        attention_bias=True, qk_norm=True, sliding_window="used",
    ),
}  # fmt: skip
_LLAMA4 = Family(
    202048, 16384, 8, 128, 131072, attention_bias=True, hidden_size=5120, num_hidden_layers=48,
    num_attention_heads=40, norm=("rms_norm_eps", 1e-5), settings={"rope_interleaved": True},
    # The other rope types also scale queries and keys, which the norm that follows would cancel.
    rope=RopeForm(theta=5e5, kinds=("default", "dynamic", "linear", "llama3")),
)  # fmt: skip


def read_mixtral(config: Fields) -> MixtralConfig:
    family = _MOES["mixtral"]
    shared, sizes = read_shared(config, family)
    experts, choices = _experts(config, 8, 2)
    return MixtralConfig(
        **shared,
        rope=read_rope(config, family.rope, **sizes),
        num_experts=experts,
        num_experts_per_tok=choices,
        moe_intermediate_size=shared["intermediate_size"],
        norm_topk_prob=True,
    )


def read_qwen3_moe(config: Fields) -> MoeConfig:
    family = _MOES["qwen3_moe"]
    shared, sizes = read_shared(config, family)
    experts, choices = _experts(config, 128, 8)
    every, dense = config.integer("decoder_sparse_step", 1), config.raw("mlp_only_layers", [])
    layers = range(shared["num_hidden_layers"])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.wrong("mlp_only_layers", "a list of layer indices")
    return MoeConfig(
        **shared,
        rope=read_rope(config, family.rope, **sizes),
        num_experts=experts,
        num_experts_per_tok=choices,
        moe_intermediate_size=config.integer("moe_intermediate_size", 768),
        norm_topk_prob=config.flag("norm_topk_prob", False),
        dense_layers=tuple(n for n in layers if n in dense or (n + 1) % every),
    )


def read_llama4(config: Fields) -> Llama4Config:
    family = _LLAMA4
    if "head_dim" in config.values:
        family = replace(family, head_dim=None)  # null means hidden_size / num_attention_heads
    shared, sizes = read_shared(config, family)
    layers = shared["num_hidden_layers"]
    experts, choices = _experts(config, 16, 1)
    rotated = read_rope_layers(config, layers)
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.raw("moe_layers", [*range(step - 1, layers, step)])
    if not isinstance(sparse, list) or not all(type(layer) is int for layer in sparse):
        raise config.wrong("moe_layers", "a list of layer indices")
    names = {0: "full_attention", 1: "chunked_attention"}
    kinds = config.raw("layer_types", [names[flag] for flag in rotated])
    wrong = not isinstance(kinds, list) or len(kinds) != layers
    if wrong or not all(kind in names.values() for kind in kinds):
        raise config.wrong(
            "layer_types", f"a list of {layers} names, each {' or '.join(names.values())}"
        )
    specified = "attention_chunk_size" in config.values
    if specified and config.raw("attention_chunk_size") is None and names[1] in kinds:
        raise refused(config, "attention_chunk_size")
    chunk = config.integer("attention_chunk_size", 8192)
    tuned = config.raw("attn_temperature_tuning", True)
    if type(tuned) is not int:  # the first published files have 4, which means true
        tuned = config.flag("attn_temperature_tuning", True)
    shared |= {
        "windows": tuple(chunk if kind == names[1] else None for kind in kinds),
        "intermediate_size": config.integer("intermediate_size_mlp", 16384),
    }
    return Llama4Config(
        **shared,
        rope=read_rope(config, _LLAMA4.rope, **sizes),
        num_experts=experts,
        num_experts_per_tok=choices,
        moe_intermediate_size=config.integer("intermediate_size", 8192),
        norm_topk_prob=False,
        dense_layers=tuple(n for n in range(layers) if n not in sparse),
        rope_layers=rotated,
        use_qk_norm=config.flag("use_qk_norm", True),
        attn_temperature=(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192))
        if tuned
        else None,
    )


def _experts(config: Fields, count: int, choices: int) -> tuple[int, int]:
    """Read the number of experts, which has two possible field names, and the number of experts
    that are selected per token."""
    name = "num_experts" if config.raw("num_local_experts") is None else "num_local_experts"
    count = config.integer(name, count)
    other = config.integer("num_experts", count)
    if other != count:
        raise config.wrong(name, f"the same value as num_experts = {other}")
    choices = config.integer("num_experts_per_tok", choices)
    if choices > count:
        raise config.wrong("num_experts_per_tok", f"at most {name} = {count}")
    return count, choices


def _kinds() -> str:
    return ", ".join(f"{gate}{name}" for gate in ("", "gated-") for name in sorted(ACTIVATIONS))


READERS: dict[str, Callable[[Fields], Config]] = {
    **dict.fromkeys(_LLAMAS, _llama),
    **dict.fromkeys(GEMMAS, read_gemma),
    "cohere2": _cohere2,
    "gemma3n_text": read_gemma3n,
    "gemma4_text": read_gemma4,
    "gpt2": _gpt2,
    "gpt_neox": _neox,
    "llama4_text": read_llama4,
    "mixtral": read_mixtral,
    "qwen3_moe": read_qwen3_moe,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "t5": read_t5,
}
"""The readers of the supported families, by ``model_type``."""
