"""The supported model families, and the config values that kvjax rejects for each."""

from kvjax.core.validation import CheckpointError

from .json_fields import Fields

EVERYWHERE = {
    "quantization_config": "none: quantized weights are not supported",
    "per_layer_config": "none: all layers have the same shape",
    "is_causal": "true: attention is causal",
    "rope_parameters": "a rope type that Transformers supports for the family, with its parameters",
}
"""Fields of ``config.json`` that every family may reject: what is expected, and why."""
_CAUSAL = {"use_bidirectional_attention": "false: attention is causal"}
_EXPERTS = {"num_experts_per_tok": "at most the number of experts"}

FAMILIES: dict[str, dict[str, str]] = {
    "gemma2": _CAUSAL,
    "gemma3_text": _CAUSAL
    | {"attn_logit_softcapping": "null: gemma3_text has no soft cap on attention scores"},
    "gemma3n_text": _CAUSAL
    | {"num_kv_shared_layers": "fewer: each layer type needs a layer with its own keys and values"},
    "gemma4_text": {
        "use_bidirectional_attention": "false or vision: attention between text tokens is causal",
        "per_layer_config": "only head_dim and num_key_value_heads, for the full_attention layers, "
        "equal in all of them",
        "num_kv_shared_layers": "fewer: each layer type needs a layer with its own keys and values",
        "rope_parameters": "the rope types default, linear and proportional, with their parameters",
        "top_k_experts": "at most the number of experts",
    },
    "gpt2": {"add_cross_attention": "false: there is no encoder to attend to"},
    "gpt_neox": {
        "head_dim": "hidden_size / num_attention_heads",
    },
    "llama": {},
    "llama4_text": _EXPERTS
    | {
        "attention_chunk_size": "an integer of at least 1: chunked_attention layers need it",
        "rope_parameters": "the rope types default, dynamic, linear and llama3: the others scale "
        "queries and keys, which the norm that follows would cancel",
    },
    "mistral": {},
    "mixtral": _EXPERTS,
    "olmo2": {},
    "phi3": {"rope_parameters": "the rope types default and longrope"},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "t5": {
        "is_encoder_decoder": "true: an encoder or decoder without the other is not supported",
        "dtype": "bfloat16 or float32: T5's activations exceed the range of float16",
    },
}
"""Further fields that a family may reject, by ``model_type``."""

RELATIVES = {
    "paligemma": "another family: PaliGemma attends to its prompts bidirectionally",
}
"""Unsupported values of ``model_type`` that are close to a supported one: what is expected, and
why."""


def supported() -> dict[str, dict[str, str]]:
    """The model families that ``load`` supports.

    Multimodal models (``gemma3``, ``gemma3n``, ``gemma4``, ``llama4``, ``mistral3``, ``qwen2_vl``,
    ``qwen2_5_vl``, ``qwen3_vl``, ``llava`` and similar ones) are supported if their text model is
    of one of these families. Only the text model is loaded.

    Returns:
      For each ``model_type``, the fields of ``config.json`` that kvjax may reject, each with what
      it expects and why. Every other field is either supported or has no effect.
    """
    return {name: EVERYWHERE | own for name, own in sorted(FAMILIES.items())}


def refused(config: Fields, name: str) -> CheckpointError:
    """The error for a rejected field."""
    return config.wrong(name, (EVERYWHERE | FAMILIES[config.raw("model_type")])[name])


def check_model_type(config: Fields) -> str:
    """Return the config's ``model_type``.

    Raises:
      CheckpointError: if it is not supported.
    """
    name = config.raw("model_type")
    if isinstance(name, str) and name in RELATIVES:
        raise config.wrong("model_type", RELATIVES[name])
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise config.wrong("model_type", f"one of {known}, see kvjax.models.supported()")
    return name
