"""The families that are read, and what of each is refused: the one place that says so."""

from kvjax.core.errors import CheckpointError

from .json_fields import Fields

EVERYWHERE = {
    "quantization_config": "none: quantized weights are not read, only float ones",
    "per_layer_config": "none: all layers have the same shape",
    "is_causal": "true: attention is causal",
    "rope_parameters": "one of the kinds that Transformers has for the family, with its numbers",
}
"""What is refused of every family: a field of ``config.json``, and what was expected, and why."""
_CAUSAL = {"use_bidirectional_attention": "false: attention is causal"}
_EXPERTS = {"num_experts_per_tok": "at most as many as there are experts"}

FAMILIES: dict[str, dict[str, str]] = {
    "gemma2": _CAUSAL,
    "gemma3_text": _CAUSAL | {"attn_logit_softcapping": "null: gemma3_text caps no scores"},
    "gemma3n_text": _CAUSAL
    | {"num_kv_shared_layers": "fewer: before them each kind of layer has keys of its own"},
    "gemma4_text": {
        "use_bidirectional_attention": "false or vision: attention of text is causal",
        "per_layer_config": "head_dim and num_key_value_heads of layers of full_attention alone, "
        "the same of each",
        "num_kv_shared_layers": "fewer: before them each kind of layer has keys of its own",
        "rope_parameters": "the kinds default, linear and proportional, with their numbers",
        "top_k_experts": "at most as many as there are experts",
    },
    "gpt2": {"add_cross_attention": "false: there is no encoder to attend to"},
    "gpt_neox": {
        "head_dim": "hidden_size / num_attention_heads, the width of every head",
    },
    "llama": {},
    "llama4_text": _EXPERTS
    | {
        "attention_chunk_size": "an integer of at least 1: some layers need it",
        "rope_parameters": "the kinds default, dynamic, linear and llama3: others scale queries "
        "and keys, which a norm behind undoes",
    },
    "mistral": {},
    "mixtral": _EXPERTS,
    "olmo2": {},
    "phi3": {"rope_parameters": "the kinds default and longrope: Phi-3 has no other"},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": _EXPERTS,
    "t5": {
        "is_encoder_decoder": "true: an encoder or a decoder alone is not read",
        "dtype": "bfloat16 or float32: float16 can't hold what T5's layers give",
    },
}
"""By ``model_type``, what is refused besides."""

RELATIVES = {
    "paligemma": "another: PaliGemma reads its prompts in both directions",
}
"""Other values of ``model_type`` that are near to one: what to give instead, and why."""


def supported() -> dict[str, dict[str, str]]:
    """The models that ``load`` reads: by ``model_type`` of ``config.json``, which fields of it are
    refused, each with what is expected, and why. Any other field is read, or changes nothing.

    Of models that read images, audio or video too (``gemma3``, ``gemma3n``, ``gemma4``, ``llama4``,
    ``mistral3``, ``qwen2_vl``, ``qwen2_5_vl``, ``qwen3_vl``, ``llava`` and their like) the text
    part is loaded, where it is one of these families."""
    return {name: EVERYWHERE | own for name, own in sorted(FAMILIES.items())}


def refused(config: Fields, name: str) -> CheckpointError:
    """The error for a field that is refused."""
    return config.wrong(name, (EVERYWHERE | FAMILIES[config.raw("model_type")])[name])


def check_model_type(config: Fields) -> str:
    """The config's ``model_type``.

    Raises:
      CheckpointError: if it is not read.
    """
    name = config.raw("model_type")
    if isinstance(name, str) and name in RELATIVES:
        raise config.wrong("model_type", RELATIVES[name])
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise config.wrong("model_type", f"one of {known}, see kvjax.models.supported()")
    return name
