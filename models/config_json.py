"""Read ``config.json``.

Defaults are those of Transformers' configuration classes (5.23): a field that a file leaves out
has the value there that it has here. Fields that those models do not read are not read here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import DTYPES, Config, GemmaConfig, GPT2Config, LlamaConfig
from .fields import Fields, read_json
from .layers import ACTIVATIONS
from .rope_config import read_rope, read_ropes


@dataclass(frozen=True)
class _Family:
    """What distinguishes a family: defaults of fields, and which fields it reads at all."""

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
    """Which layers have a window where ``layer_types`` does not say; see ``_windows``."""
    hidden_size: int = 4096
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    activation: tuple[str, str] = ("hidden_act", "silu")
    """What the field is called, and its default."""
    tie_word_embeddings: bool = False
    score_cap: float | None = None
    """None: there is no such thing."""
    final_cap: float | None = None
    two_ropes: bool = False


_LLAMAS = {
    "llama": _Family(32000, 11008, None, None, 2048, attention_bias=True, mlp_bias=True),
    "mistral": _Family(32000, 14336, 8, None, 131072, sliding_window="all"),
    "qwen2": _Family(qkv_bias=True, sliding_window="some"),
    "qwen3": _Family(head_dim=128, attention_bias=True, qk_norm=True, sliding_window="some"),
}
_GEMMA2 = _Family(
    256000, 9216, 4, 256, 8192, attention_bias=True, sliding_window="alternate", hidden_size=2304,
    num_hidden_layers=26, num_attention_heads=8, tie_word_embeddings=True, score_cap=50.0,
    activation=("hidden_activation", "gelu_pytorch_tanh"), final_cap=30.0,
)  # fmt: skip
_GEMMAS = {
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, vocab_size=262208, max_position_embeddings=131072, qk_norm=True, two_ropes=True,
        sliding_window="pattern", score_cap=None, final_cap=None,
    ),
}  # fmt: skip


def read_config(folder: Path) -> Config:
    """Read ``config.json`` of a checkpoint.

    Args:
      folder: the checkpoint's folder, or the file itself.

    Returns:
      The configuration; its ``dtype`` is the file's, or "" where the file has none.

    Raises:
      CheckpointError: if the file can't be read, the model is not of a known family, or a field
        would change the result and is not understood; it names the file, the field, its value
        and what was expected.
    """
    file = folder if (folder := Path(folder)).is_file() else folder / "config.json"
    config = Fields(file, read_json(file))
    if config.raw("model_type") == "gemma3":
        raise config.wrong("model_type", "gemma3_text: a model that takes images too is not read")
    model_type = config.choice("model_type", "", READERS)
    if config.raw("quantization_config"):
        raise config.wrong(
            "quantization_config", "none: quantized weights are not read, only float ones"
        )
    if config.raw("per_layer_config"):
        raise config.wrong("per_layer_config", "none: all layers have the same shape")
    if not config.values.get("is_causal", True):
        raise config.wrong("is_causal", "true: attention is causal")
    return READERS[model_type](config)


def _llama(config: Fields) -> LlamaConfig:
    shared, sizes = _shared(config, _LLAMAS[config.raw("model_type")])
    return LlamaConfig(**shared, rope=read_rope(config, **sizes))


def _gemma(config: Fields) -> GemmaConfig:
    family = _GEMMAS[model_type := config.raw("model_type")]
    if config.raw("use_bidirectional_attention", False) is not False:
        raise config.wrong("use_bidirectional_attention", "false: attention is causal")
    if family.score_cap is None and config.raw("attn_logit_softcapping") is not None:
        raise config.wrong("attn_logit_softcapping", f"null: {model_type} caps no scores")
    shared, sizes = _shared(config, family)
    if family.two_ropes:
        rope, local_rope = read_ropes(config, **sizes)
    else:
        rope = local_rope = read_rope(config, **sizes)
    return GemmaConfig(
        **shared,
        rope=rope,
        local_rope=local_rope,
        query_pre_attn_scalar=config.number("query_pre_attn_scalar", 256),
        attn_logit_softcapping=_cap(config, "attn_logit_softcapping", family.score_cap),
        final_logit_softcapping=_cap(config, "final_logit_softcapping", family.final_cap),
    )


def _shared(config: Fields, family: _Family) -> tuple[dict[str, Any], dict[str, int]]:
    """What all decoders with rotary positions have, and the sizes that these go by."""
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
        rms_norm_eps=config.number("rms_norm_eps", 1e-6, positive=False),
        hidden_act=config.choice(*family.activation, ACTIVATIONS),
        tie_word_embeddings=config.flag("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=_windows(config, family.sliding_window, layers),
        dtype=_dtype(config),
    )
    return shared | sizes, sizes


def _kv_heads(config: Fields, heads: int, default: int | None) -> int:
    # null means as many as there are heads; left out, it has the family's default.
    if "num_key_value_heads" in config.values:
        default = None
    kv_heads = config.integer("num_key_value_heads", default or heads)
    if heads % kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"a divisor of num_attention_heads = {heads}, not {kv_heads}"
        )
    return kv_heads


def _cap(config: Fields, name: str, default: float | None) -> float | None:
    """A soft cap: null is none; left out, it has the family's default."""
    if config.raw(name) is None and (default is None or name in config.values):
        return None
    return config.number(name, default)


def _windows(config: Fields, rule: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees everything: by ``layer_types``, or by a rule.

    ``rule``: which layers have one where ``layer_types`` does not say. "none"; "all"; "some":
    where ``use_sliding_window``, those from ``max_window_layers`` on; "alternate": all but every
    second; "pattern": all but each ``sliding_window_pattern``-th.
    """
    if rule == "none":
        return (None,) * layers
    # Left out, the window is 4,096; null switches it off.
    has_window = "sliding_window" not in config.values or config.raw("sliding_window") is not None
    window = config.integer("sliding_window", 4096) if has_window else None
    if rule == "some" and not config.flag("use_sliding_window", False):
        window = None
    kinds = config.raw("layer_types")
    if kinds is None and rule in ("all", "some"):
        first = config.integer("max_window_layers", 28, least=0) if rule == "some" else 0
        return tuple(window if layer >= first else None for layer in range(layers))
    if kinds is None:
        every = config.integer("sliding_window_pattern", 6) if rule == "pattern" else 2
        if window is None and every > 1:
            raise config.wrong("sliding_window", "an integer of at least 1: some layers need it")
        return tuple(window if (layer + 1) % every else None for layer in range(layers))
    known = {"full_attention": None, "attention": None, "sliding_attention": window}
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= {*known}:
        raise config.wrong(
            "layer_types", f"{layers} names, each full_attention or sliding_attention"
        )
    if window is None and "sliding_attention" in kinds:
        raise config.wrong("layer_types", "full_attention alone: sliding_window is not in use")
    return tuple(known[kind] for kind in kinds)


def _gpt2(config: Fields) -> GPT2Config:
    if config.flag("add_cross_attention", False):
        raise config.wrong("add_cross_attention", "false: there is no encoder to attend to")
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
        dtype=_dtype(config),
    )


def _either(config: Fields, name: str, own: str, default: int) -> int:
    """A field by its general name, which goes first, or by GPT-2's own."""
    return config.integer(name if config.raw(name) is not None else own, default)


def _dtype(config: Fields) -> str:
    name = "dtype" if config.raw("dtype") is not None else "torch_dtype"
    value = config.raw(name, "")
    if isinstance(value, str):
        value = value.removeprefix("torch.")
    if value not in ("", "auto", *DTYPES):
        raise config.wrong(name, f"one of {', '.join(DTYPES)}")
    return "" if value == "auto" else value


READERS: dict[str, Callable[[Fields], Config]] = {
    **dict.fromkeys(_LLAMAS, _llama),
    **dict.fromkeys(_GEMMAS, _gemma),
    "gpt2": _gpt2,
}
"""By ``model_type``."""
