"""Read ``config.json`` of the mixture-of-experts families."""

from dataclasses import replace

from .config import Llama4Config, MixtralConfig, MoeConfig
from .config_fields import Family, RopeForm, read_rope, read_shared
from .json_fields import Fields
from .model_types import refused

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
    num_attention_heads=40, norm=("rms_norm_eps", 1e-5),
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
    every = config.integer("no_rope_layer_interval", 4)
    rotated = config.raw("no_rope_layers") or [int((n + 1) % every != 0) for n in range(layers)]
    wrong = not isinstance(rotated, list) or len(rotated) < layers
    if wrong or not all(flag in (0, 1) for flag in rotated):
        raise config.wrong("no_rope_layers", f"a list of {layers} numbers, each 0 or 1")
    rotated = rotated[:layers]
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
        rope_layers=tuple(flag == 1 for flag in rotated),
        qk_unit=config.flag("use_qk_norm", True),
        temperature=(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192))
        if tuned
        else None,
    )


def _experts(config: Fields, count: int, choices: int) -> tuple[int, int]:
    """The number of experts, by either field name, and the number selected per token."""
    name = "num_experts" if config.raw("num_local_experts") is None else "num_local_experts"
    count = config.integer(name, count)
    other = config.integer("num_experts", count)
    if other != count:
        raise config.wrong(name, f"the same value as num_experts = {other}")
    choices = config.integer("num_experts_per_tok", choices)
    if choices > count:
        raise config.wrong("num_experts_per_tok", f"at most {name} = {count}")
    return count, choices
