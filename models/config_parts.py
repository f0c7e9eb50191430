"""Parts of ``config.json`` that families share, and what each has where a file says nothing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .config import DTYPES, NARROWED
from .fields import Fields
from .layers import ACTIVATIONS
from .rope_config import RopeForm


@dataclass(frozen=True)
class Family:
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
    norm: tuple[str, float] = ("rms_norm_eps", 1e-6)
    """What the norms' epsilon is called, and its default."""
    rope: RopeForm = field(default_factory=RopeForm)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """What is so in every model of the family: fields of its configuration."""


def read_shared(config: Fields, family: Family) -> tuple[dict[str, Any], dict[str, int]]:
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
        rms_norm_eps=config.number(*family.norm, positive=False),
        hidden_act=config.choice(*family.activation, ACTIVATIONS),
        tie_word_embeddings=config.flag("tie_word_embeddings", family.tie_word_embeddings),
        qkv_bias=bias or family.qkv_bias,
        output_bias=bias,
        mlp_bias=family.mlp_bias and config.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        windows=_windows(config, family.sliding_window, layers),
        dtype=read_dtype(config),
    )
    return {**shared, **sizes, **family.settings}, sizes


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


def read_cap(config: Fields, name: str, default: float | None) -> float | None:
    """A soft cap: null is none; left out, it has the family's default."""
    if config.raw(name) is None and (default is None or name in config.values):
        return None
    return config.number(name, default)


def _windows(config: Fields, rule: str, layers: int) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees everything: by ``layer_types``, or by a rule.

    ``rule``: which layers have one where ``layer_types`` does not say. "none"; "all"; "some":
    where ``use_sliding_window``, those from ``max_window_layers`` on; "alternate": all but every
    second; "pattern": all but each ``sliding_window_pattern``-th. Of families that do not read
    ``layer_types``: "named": all, if there is a size; "used": all, where ``use_sliding_window``.
    """
    if rule == "none":
        return (None,) * layers
    # Left out, the window is 4,096 (but of "named"); null switches it off.
    told, named = "sliding_window" in config.values, config.raw("sliding_window") is not None
    has_window = named or (not told and rule != "named")
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


def read_dtype(config: Fields) -> str:
    name = "dtype" if config.raw("dtype") is not None else "torch_dtype"
    value = config.raw(name, "")
    if isinstance(value, str):
        value = value.removeprefix("torch.")
        value = NARROWED.get(value, value)
    if value not in ("", "auto", *DTYPES):
        raise config.wrong(name, f"one of {', '.join((*DTYPES, *NARROWED))}")
    return "" if value == "auto" else value
