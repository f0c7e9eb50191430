"""Configurations of Gemma 3n and Gemma 4, and readers of the Gemma families' ``config.json``."""

import re
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from .config import DecoderConfig, GemmaConfig
from .config_fields import Family, read_cap, read_shared, refused
from .files import Fields
from .rope import FULL, LOCAL, RopeForm, read_rope, read_ropes


@dataclass(frozen=True)
class SharingConfig(DecoderConfig):
    """The fields that Gemma 3n and Gemma 4 have in common.

    Attributes:
      intermediate_sizes: the feed-forward width of each layer.
      num_kv_shared_layers: the number of last layers that attend to the keys and values of earlier
        layers.
      hidden_size_per_layer_input: the width of the per-layer embeddings; 0 without such embeddings.
      vocab_size_per_layer_input: the number of rows of the per-layer embedding table.
    """

    _: KW_ONLY
    intermediate_sizes: tuple[int, ...]
    num_kv_shared_layers: int
    hidden_size_per_layer_input: int
    vocab_size_per_layer_input: int

    names: ClassVar = replace(
        DecoderConfig.names,
        # Files may contain key and value weights of layers that do not use them.
        buffers=re.compile(r"(^|\.)(rotary_emb\.\w*inv_freq|self_attn\.[kv]_(proj|norm)\.\w+)$"),
    )

    @property
    def cache_sources(self) -> tuple[int, ...]:
        """For each layer, the index of the layer to whose keys and values it attends."""
        own = self.num_hidden_layers - self.num_kv_shared_layers
        last = {(window is None): n for n, window in enumerate(self.windows[:own])}
        return (*range(own), *(last[window is None] for window in self.windows[own:]))


@dataclass(frozen=True)
class Gemma3nConfig(SharingConfig):
    """The text part of Gemma 3n.

    Attributes:
      activation_sparsity_pattern: for each layer, the fraction of its feed-forward gates that are
        set to zero.
      altup_num_inputs: the number of parallel hidden states (AltUp).
      altup_active_idx: the index of the hidden state on which layers compute.
      altup_correct_scale: whether the corrected active state is scaled.
      laurel_rank: the rank of the low-rank branch next to attention (LAuReL).

    Example:
      ```python
      own = dict(
          intermediate_sizes=(64,) * 4, num_kv_shared_layers=0, hidden_size_per_layer_input=8,
          vocab_size_per_layer_input=4096, activation_sparsity_pattern=(0.0,) * 4,
          altup_num_inputs=2, altup_active_idx=0, altup_correct_scale=True, laurel_rank=4,
      )
      config = models.Gemma3nConfig(**vars(lm.config), **own)
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    activation_sparsity_pattern: tuple[float, ...]
    altup_num_inputs: int
    altup_active_idx: int
    altup_correct_scale: bool
    laurel_rank: int


@dataclass(frozen=True)
class Gemma4Config(SharingConfig):
    """The text part of Gemma 4.

    Attributes:
      num_key_value_heads, head_dim: the number of key-value heads, and the head dimension, of
        layers with a window.
      num_global_key_value_heads, global_head_dim: the same of layers with full attention.
      attention_k_eq_v: whether layers with full attention have no value projection and use the keys
        as values.
      num_experts: the number of experts; 0 if the model has none.

    Example:
      ```python
      own = dict(
          intermediate_sizes=(64,) * 4, num_kv_shared_layers=0, hidden_size_per_layer_input=0,
          vocab_size_per_layer_input=4096, num_global_key_value_heads=1, global_head_dim=64,
          attention_k_eq_v=False,
      )
      config = models.Gemma4Config(**vars(lm.config), **own)
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    num_global_key_value_heads: int
    global_head_dim: int
    attention_k_eq_v: bool
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    names: ClassVar = replace(SharingConfig.names, experts="stacked")

    @property
    def per_layer_config(self) -> tuple[DecoderConfig, ...]:
        """The configuration of each layer, with its own heads."""
        others = replace(
            self, num_key_value_heads=self.num_global_key_value_heads, head_dim=self.global_head_dim
        )
        return tuple(others if window is None else self for window in self.windows)


_GEMMA2 = Family(
    256000, 9216, 4, 256, 8192, attention_bias=True, sliding_window="alternate", hidden_size=2304,
    num_hidden_layers=26, num_attention_heads=8, tie_word_embeddings=True, score_cap=50.0,
    activation=("hidden_activation", "gelu_pytorch_tanh"), final_cap=30.0,
)  # fmt: skip
GEMMAS = {
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2, vocab_size=262208, max_position_embeddings=131072, qk_norm=True, two_ropes=True,
        sliding_window="pattern", score_cap=None, final_cap=None,
    ),
}  # fmt: skip

_GEMMA3N = Family(
    262400, 16384, 2, 256, 32768, attention_bias=True, sliding_window="alternate", hidden_size=2048,
    num_hidden_layers=35, num_attention_heads=8, tie_word_embeddings=True, qk_norm=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"), final_cap=30.0,
    settings={"wide_norms": True, "scale_embeddings": True, "query_pre_attn_scalar": 1.0},
)  # fmt: skip
_GEMMA4 = replace(
    _GEMMA3N, vocab_size=262144, intermediate_size=9216, num_key_value_heads=4,
    max_position_embeddings=131072, hidden_size=2304, num_hidden_layers=30, final_cap=None,
)  # fmt: skip
_FULL4 = RopeForm(theta=1e6, kinds=("default", "linear", "proportional"))
_LOCAL4 = RopeForm(kinds=_FULL4.kinds)
_ROPES4 = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
    "sliding_attention": {},
}
_NOT_READ4 = "rope_scaling", "rope_theta", "rope_local_base_freq", "partial_rotary_factor"


def read_gemma(config: Fields) -> GemmaConfig:
    family = GEMMAS[config.raw("model_type")]
    if config.raw("use_bidirectional_attention", False) is not False:
        raise refused(config, "use_bidirectional_attention")
    if family.score_cap is None and config.raw("attn_logit_softcapping") is not None:
        raise refused(config, "attn_logit_softcapping")
    shared, sizes = read_shared(config, family)
    if family.two_ropes:
        rope, local_rope = read_ropes(config, FULL, LOCAL, **sizes)
    else:
        rope = local_rope = read_rope(config, family.rope, **sizes)
    return GemmaConfig(
        **shared,
        rope=rope,
        local_rope=local_rope,
        query_pre_attn_scalar=config.number("query_pre_attn_scalar", 256),
        attn_logit_softcapping=read_cap(config, "attn_logit_softcapping", family.score_cap),
        final_logit_softcapping=read_cap(config, "final_logit_softcapping", family.final_cap),
    )


def read_gemma3n(config: Fields) -> Gemma3nConfig:
    if config.raw("use_bidirectional_attention", False) is not False:
        raise refused(config, "use_bidirectional_attention")
    layers = config.integer("num_hidden_layers", _GEMMA3N.num_hidden_layers)
    inner = config.raw("intermediate_size", _GEMMA3N.intermediate_size)
    sizes = inner if isinstance(inner, list) else [inner] * layers
    if len(sizes) != layers or not all(type(size) is int and size > 0 for size in sizes):
        raise config.wrong("intermediate_size", f"a number above 0, or a list of {layers}")
    sparse = config.raw("activation_sparsity_pattern")
    if sparse is None:
        sparse = [0.95] * (10 if layers > 10 else 0)
        sparse += [0.0] * (layers - len(sparse))
    wrong = not isinstance(sparse, list) or len(sparse) != layers
    if wrong or not all(type(part) in (int, float) and 0 <= part < 1 for part in sparse):
        raise config.wrong("activation_sparsity_pattern", f"{layers} numbers from 0 to below 1")
    kinds = ["full_attention" if (n + 1) % 5 == 0 else "sliding_attention" for n in range(layers)]
    defaults = {"layer_types": config.raw("layer_types", kinds), "intermediate_size": sizes[0]}
    defaults["sliding_window"] = config.raw("sliding_window", 512)
    completed = replace(config, values={**config.values, **defaults})
    shared, rope_sizes = read_shared(completed, _GEMMA3N)
    rope, local_rope = read_ropes(config, FULL, LOCAL, **rope_sizes)
    result = Gemma3nConfig(
        **shared,
        rope=rope,
        local_rope=local_rope,
        final_logit_softcapping=read_cap(config, "final_logit_softcapping", _GEMMA3N.final_cap),
        intermediate_sizes=tuple(sizes),
        activation_sparsity_pattern=tuple(map(float, sparse)),
        num_kv_shared_layers=config.integer("num_kv_shared_layers", 15, least=0),
        hidden_size_per_layer_input=config.integer("hidden_size_per_layer_input", 256),
        vocab_size_per_layer_input=config.integer("vocab_size_per_layer_input", 262144),
        altup_num_inputs=config.integer("altup_num_inputs", 4),
        altup_active_idx=config.integer("altup_active_idx", 0, least=0),
        altup_correct_scale=config.flag("altup_correct_scale", True),
        laurel_rank=config.integer("laurel_rank", 64),
    )
    if result.altup_active_idx >= result.altup_num_inputs:
        raise config.wrong(
            "altup_active_idx", f"below altup_num_inputs = {result.altup_num_inputs}"
        )
    _check_shared(config, result)
    return result


def read_gemma4(config: Fields) -> Gemma4Config:
    if config.raw("use_bidirectional_attention", False) not in (False, "vision"):
        raise refused(config, "use_bidirectional_attention")
    layers = config.integer("num_hidden_layers", _GEMMA4.num_hidden_layers)
    kinds = ["full_attention" if (n + 1) % 6 == 0 else "sliding_attention" for n in range(layers)]
    kinds = config.raw("layer_types", kinds)
    if isinstance(kinds, list) and kinds:
        kinds = [*kinds[:-1], "full_attention"]  # always, as in Transformers
    # Like Transformers, ignore the older top-level fields for rotary positions.
    defaults = {**dict.fromkeys(_NOT_READ4), "layer_types": kinds}
    defaults["rope_parameters"] = config.raw("rope_parameters", _ROPES4)
    defaults["sliding_window"] = config.raw("sliding_window", 512)
    config = replace(config, values={**config.values, **defaults})
    shared, sizes = read_shared(config, _GEMMA4)
    attention_k_eq_v = config.flag("attention_k_eq_v", False)
    kv_heads, head_dim = _full_attention_heads(config, shared, attention_k_eq_v)
    rope, local_rope = read_ropes(config, _FULL4, _LOCAL4, **sizes, full_head_dim=head_dim)
    num_kv_shared_layers = config.integer("num_kv_shared_layers", 0, least=0)
    inner = shared["intermediate_size"]
    wide = 2 if config.flag("use_double_wide_mlp", False) else 1
    if config.flag("enable_moe_block", False):
        shared |= {
            "num_experts": config.integer("num_experts"),
            "num_experts_per_tok": config.integer("top_k_experts"),
            "moe_intermediate_size": config.integer("moe_intermediate_size"),
        }
        if shared["num_experts_per_tok"] > shared["num_experts"]:
            raise refused(config, "top_k_experts")
    result = Gemma4Config(
        **shared,
        rope=rope,
        local_rope=local_rope,
        final_logit_softcapping=read_cap(config, "final_logit_softcapping", _GEMMA4.final_cap),
        intermediate_sizes=tuple(
            inner * (wide if n >= layers - num_kv_shared_layers else 1) for n in range(layers)
        ),
        num_kv_shared_layers=num_kv_shared_layers,
        hidden_size_per_layer_input=config.integer("hidden_size_per_layer_input", 256, least=0),
        vocab_size_per_layer_input=config.integer("vocab_size_per_layer_input", 262144),
        num_global_key_value_heads=kv_heads,
        global_head_dim=head_dim,
        attention_k_eq_v=attention_k_eq_v,
    )
    _check_shared(config, result)
    return result


def _check_shared(config: Fields, result: SharingConfig) -> None:
    own = result.num_hidden_layers - result.num_kv_shared_layers
    if own < 1 or len({*result.windows[:own]}) < len({*result.windows}):
        raise refused(config, "num_kv_shared_layers")


def _full_attention_heads(
    config: Fields, shared: dict[str, Any], attention_k_eq_v: bool
) -> tuple[int, int]:
    """Read the number of key-value heads and the head dimension of full-attention layers.

    Transformers writes them as ``per_layer_config``, which takes precedence. Published files have
    ``global_head_dim`` and ``num_global_key_value_heads`` instead. ``num_global_key_value_heads``
    is used only if ``attention_k_eq_v`` is true.
    """
    heads = shared["num_attention_heads"]
    own = config.inner("per_layer_config") or Fields(config.file, {})
    if "per_layer_config" not in config.values:
        kv_heads = shared["num_key_value_heads"]
        if attention_k_eq_v:
            kv_heads = config.integer("num_global_key_value_heads", kv_heads)
        return _divides(config, heads, kv_heads), config.integer("global_head_dim", 512)
    full = {str(n): {} for n, window in enumerate(shared["windows"]) if window is None}
    layers = {**full, **own.values}
    first = next(iter(layers.values()), {})
    alike = set(layers) == set(full) and all(layer == first for layer in layers.values())
    if not (
        alike and isinstance(first, dict) and set(first) <= {"head_dim", "num_key_value_heads"}
    ):
        raise refused(config, "per_layer_config")
    fields = Fields(config.file, first, "per_layer_config.")
    kv_heads = fields.integer("num_key_value_heads", shared["num_key_value_heads"])
    return _divides(config, heads, kv_heads), fields.integer("head_dim", shared["head_dim"])


def _divides(config: Fields, heads: int, kv_heads: int) -> int:
    if heads % kv_heads:
        raise config.wrong(
            "num_global_key_value_heads", f"a divisor of num_attention_heads = {heads}"
        )
    return kv_heads
