"""The fields of ``config.json`` that families share, and the values that kvjax rejects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvjax.core.validation import CheckpointError

from .config import DTYPES, NARROWED
from .files import Fields
from .layers import ACTIVATIONS
from .rope import RopeForm


@dataclass(frozen=True)
class Family:
    """A family's defaults, and which optional fields it reads."""

    vocab_size: int = 151936
    intermediate_size: int = 22016
    num_key_value_heads: int | None = 32
    head_dim: int | None = None
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: str = "none"
    """Which layers have a window if there are no ``layer_types``; see ``_windows``."""
    sliding_window_pattern: int = 6
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The name and the default of the field with the activation function."""
    tie_word_embeddings: bool = False
    score_cap: float | None = None
    """The default soft cap; None if the family has none."""
    final_cap: float | None = None
    two_ropes: bool = False
    norm: tuple[str, float] = ("rms_norm_eps", 1e-6)
    """The name and the default of the field with the norms' epsilon."""
    rope: RopeForm = field(default_factory=RopeForm)
    settings: Mapping[str, object] = field(default_factory=dict)
    """Configuration fields that have the same value in every model of the family."""


def read_shared(config: Fields, family: Family) -> tuple[dict[str, Any], dict[str, int]]:
    """Read the fields of all decoders with rotary positions. Returns them, and the sizes that
    ``read_rope`` needs."""
    hidden = config.integer("hidden_size", family.hidden_size)
    heads = config.integer("num_attention_heads", family.num_attention_heads)
    head_dim = config.integer("head_dim", family.head_dim or max(hidden // heads, 1))
    positions = config.integer("max_position_embeddings", family.max_position_embeddings)
    layers = config.integer("num_hidden_layers", family.num_hidden_layers)
    sizes = {"head_dim": head_dim, "max_position_embeddings": positions}
    bias = family.attention_bias and config.flag("attention_bias", False)
    shared = dict(
        model_type=config.raw("model_type"),
        vocab_size=config.integer("vocab_size", family.vocab_size),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size", family.intermediate_size),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(config, heads, family.num_key_value_heads),
        rms_norm_eps=config.number(*family.norm, positive=False),
        hidden_act=config.choice(*family.activation, ACTIVATIONS),
        tie_word_embeddings=config.flag("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=_windows(config, family, layers),
        dtype=read_dtype(config),
    )
    return {**shared, **sizes, **family.settings}, sizes


def read_rope_layers(config: Fields, layers: int) -> tuple[bool, ...]:
    """Read whether each layer has rotary positions. Despite the name of the field, an entry of 1 in
    ``no_rope_layers`` means that the layer has rotary positions. Without this field, all layers
    have rotary positions, except every ``no_rope_layer_interval``-th."""
    every = config.integer("no_rope_layer_interval", 4)
    rotated = config.raw("no_rope_layers") or [int((n + 1) % every != 0) for n in range(layers)]
    wrong = not isinstance(rotated, list) or len(rotated) < layers
    if wrong or not all(flag in (0, 1) for flag in rotated):
        raise config.wrong("no_rope_layers", f"a list of {layers} numbers, each 0 or 1")
    return tuple(flag == 1 for flag in rotated[:layers])


def _kv_heads(config: Fields, heads: int, default: int | None) -> int:
    # null means num_attention_heads; a missing field has the family's default.
    if "num_key_value_heads" in config.values:
        default = None
    kv_heads = config.integer("num_key_value_heads", default or heads)
    if heads % kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}, not {kv_heads}"
        )
    return kv_heads


def read_cap(config: Fields, name: str, default: float | None) -> float | None:
    """Read a soft cap. null disables it. A missing field has the family's default."""
    if config.raw(name) is None and (default is None or name in config.values):
        return None
    return config.number(name, default)


def _windows(config: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    """Read the window of each layer, None for full attention, from ``layer_types`` or from a rule.

    Without ``layer_types``, the rule ``family.sliding_window`` says which layers have a window:

    - "none": no layer.
    - "all": all layers.
    - "some": the layers from ``max_window_layers`` on, if ``use_sliding_window``.
    - "alternate": all layers except every second.
    - "pattern": all layers except every ``sliding_window_pattern``-th.

    Families that ignore ``layer_types`` have the rules "named" (all layers, if ``sliding_window``
    is set) and "used" (all layers, if ``use_sliding_window``).
    """
    rule = family.sliding_window
    if rule == "none":
        return (None,) * layers
    # A missing window is 4,096, except with the rule "named". null disables it.
    present, named = "sliding_window" in config.values, config.raw("sliding_window") is not None
    has_window = named or (not present and rule != "named")
    window = config.integer("sliding_window", 4096) if has_window else None
    if rule in ("some", "used") and not config.flag("use_sliding_window", False):
        window = None
    if rule in ("named", "used"):
        return (window,) * layers
    kinds = config.raw("layer_types")
    if kinds is None and rule in ("all", "some"):
        first = config.integer("max_window_layers", 28, least=0) if rule == "some" else 0
        return tuple(window if layer >= first else None for layer in range(layers))
    if kinds is None:
        every = 2
        if rule == "pattern":
            every = config.integer("sliding_window_pattern", family.sliding_window_pattern)
        if window is None and every > 1:
            raise config.wrong("sliding_window", "an integer of at least 1: some layers need it")
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    known = {"full_attention": None, "attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {*known}:
        raise config.wrong(
            "layer_types", f"{layers} names, each full_attention or sliding_attention"
        )
    if window is None and "sliding_attention" in kinds:
        raise config.wrong("layer_types", "only full_attention: sliding_window is not in use")
    return tuple(known[kind] for kind in kinds)


def read_dtype(config: Fields) -> str:
    name = "dtype" if config.raw("dtype") is not None else "torch_dtype"
    value = config.raw(name, "")
    if isinstance(value, str):
        value = value.removeprefix("torch.")
        value = NARROWED.get(value, value)
    if value not in ("", "auto", *DTYPES):
        raise config.wrong(name, f"one of {', '.join((*DTYPES, *NARROWED))}")
    return "" if value == "auto" else value


EVERYWHERE = {
    "quantization_config": "none: quantized weights are not supported",
    "per_layer_config": "none: all layers have the same shape",
    "is_causal": "true: attention is causal",
    "rope_parameters": "a rope type that Transformers supports for the family, with its parameters",
}
"""Fields of ``config.json`` that every family may reject, each with what is expected and why."""
_CAUSAL = {"use_bidirectional_attention": "false: attention is causal"}
_EXPERTS = {"num_experts_per_tok": "at most the number of experts"}

_OWN_KEYS = {
    "num_kv_shared_layers": "fewer: each layer type needs a layer with its own keys and values"
}
_NO_CAP = {"attn_logit_softcapping": "null: gemma3_text has no soft cap on attention scores"}


@dataclass(frozen=True)
class ModelType:
    """A supported value of ``model_type``.

    Attributes:
      bos, eos: token ids to use if no file has them. They are the defaults of Transformers'
        configuration class.
      rejects: the fields of ``config.json`` that the family may reject in addition to
        ``EVERYWHERE``, each with what is expected and why.
    """

    bos: int | None = None
    eos: int | None = None
    rejects: Mapping[str, str] = field(default_factory=dict)


FAMILIES = {
    "cohere2": ModelType(5, 255001),
    "gemma2": ModelType(2, 1, _CAUSAL),
    "gemma3_text": ModelType(2, 1, _CAUSAL | _NO_CAP),
    "gemma3n_text": ModelType(2, 1, _CAUSAL | _OWN_KEYS),
    "gemma4_text": ModelType(2, 1, _OWN_KEYS | {
        "use_bidirectional_attention": "false or vision: attention between text tokens is causal",
        "per_layer_config": "only head_dim and num_key_value_heads, for the full_attention layers, "
        "equal in all of them",
        "rope_parameters": "the rope types default, linear and proportional, with their parameters",
        "top_k_experts": "at most the number of experts",
    }),
    "gpt2": ModelType(50256, 50256, {
        "add_cross_attention": "false: there is no encoder to attend to",
    }),
    "gpt_neox": ModelType(0, 2, {"head_dim": "hidden_size / num_attention_heads"}),
    "llama": ModelType(1, 2),
    "llama4_text": ModelType(1, 2, _EXPERTS | {
        "attention_chunk_size": "an integer of at least 1: chunked_attention layers need it",
        "rope_parameters": "the rope types default, dynamic, linear and llama3: the others scale "
        "queries and keys, which the norm that follows would cancel",
    }),
    "mistral": ModelType(1, 2),
    "mixtral": ModelType(1, 2, _EXPERTS),
    "olmo2": ModelType(None, 50279),
    "phi3": ModelType(1, 32000, {"rope_parameters": "the rope types default and longrope"}),
    "qwen2": ModelType(),
    "qwen3": ModelType(),
    "qwen3_moe": ModelType(rejects=_EXPERTS),
    "smollm3": ModelType(128000, 128001),
    "t5": ModelType(None, 1, {
        "is_encoder_decoder": "true: an encoder or decoder without the other is not supported",
        "dtype": "bfloat16 or float32: T5's activations exceed the range of float16",
    }),
}  # fmt: skip
"""The supported model families, by ``model_type``."""

RELATIVES = {
    "paligemma": "another family: PaliGemma attends to its prompts bidirectionally",
}
"""Unsupported values of ``model_type`` that are close to a supported one, each with what is
expected and why."""


def supported() -> dict[str, dict[str, str]]:
    """Return the model families that ``load`` supports.

    Multimodal models (``gemma3``, ``gemma3n``, ``gemma4``, ``llama4``, ``mistral3``, ``qwen2_vl``,
    ``qwen2_5_vl``, ``qwen3_vl``, ``llava`` and similar ones) are supported if their text model is
    of one of these families. Only the text model is loaded.

    Returns:
      For each ``model_type``, the fields of ``config.json`` that kvjax may reject, each with what
      it expects and why. Every other field is either supported or has no effect.

    Example:
      ```python
      for model_type, rejected in models.supported().items():
          print(model_type, rejected)
      ```
    """
    return {name: {**EVERYWHERE, **own.rejects} for name, own in sorted(FAMILIES.items())}


def refused(config: Fields, name: str) -> CheckpointError:
    """Create the error for a rejected field."""
    return config.wrong(name, {**EVERYWHERE, **FAMILIES[config.raw("model_type")].rejects}[name])


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
