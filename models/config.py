"""Model configurations: frozen and hashable, so that they can be static arguments of ``jit``."""

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

DTYPES = ("bfloat16", "float16", "float32")
"""The dtypes in which models can compute."""

NARROWED = {"float64": "float32"}
"""Stored dtypes that are converted when weights are read."""

Parameter = float | int | bool | tuple[float, ...] | None


@dataclass(frozen=True)
class TensorNames:
    """The names of a model family's tensors in files.

    Attributes:
      prefix: the prefix that is missing in files of a model without its head.
      embedding: the tensor that a tied ``lm_head.weight`` equals.
      buffers: tensors in older files that are ignored, as in Transformers.
      transposed: tensors that files store as [in, out].
      renamed: patterns and replacements for names that are read.
      written: patterns and replacements for names that are written.
      experts: how files store the weights of experts, see ``models/moe.py``; None for models
        without experts.
    """

    prefix: str
    embedding: str
    buffers: re.Pattern[str]
    transposed: re.Pattern[str] | None = None
    renamed: tuple[tuple[re.Pattern[str], str], ...] = ()
    written: tuple[tuple[re.Pattern[str], str], ...] = ()
    experts: Literal["apart", "joined", "stacked"] | None = None


@dataclass(frozen=True)
class RopeConfig:
    """A kind of rotary position embedding and its parameters, named as in ``config.json``.

    ``parameters`` is sorted by name. It contains the context length before scaling
    (``original_max_position_embeddings``) for every kind that depends on it.

    Example:
      ```python
      rope = models.RopeConfig("linear", theta=10000.0, parameters=(("factor", 2.0),))
      print(rope.rotary_dim(64), rope.context(2048))
      ```
    """

    rope_type: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    parameters: tuple[tuple[str, Parameter], ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many channels of a head are rotated, counted from the first."""
        # The kind `proportional` rotates the other channels by an angle of 0.
        part = 1.0 if self.rope_type == "proportional" else self.partial_rotary_factor
        return int(head_dim * part)

    def context(self, max_position_embeddings: int) -> int:
        """Return the context length after scaling. For yarn and dynamic,
        ``max_position_embeddings`` may be the length before scaling."""
        parameters: Any = dict(self.parameters)
        if self.rope_type not in ("yarn", "dynamic"):
            return max_position_embeddings
        trained = parameters.get("original_max_position_embeddings", max_position_embeddings)
        return max(max_position_embeddings, int(trained * parameters.get("factor", 1.0)))

    def same_at(self, max_len: int, other: int, max_position_embeddings: int) -> bool:
        """Return whether sequences of up to ``max_len`` and up to ``other`` tokens use the same
        frequencies."""
        if self.rope_type == "longrope":
            trained: Any = dict(self.parameters)["original_max_position_embeddings"]
            return (max_len > trained) == (other > trained)
        if self.rope_type == "dynamic":
            return max_len == other or max(max_len, other) <= max_position_embeddings
        return True


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder with rotary positions. Fields are named as in ``config.json`` where it has them.

    Attributes:
      qk_norm: whether queries and keys are normalized, each head separately.
      qk_norm_joint: whether this norm is over all heads together.
      rope: rotary positions.
      rope_layers: for each layer, whether it has rotary positions; empty if all layers have them.
        Layers without rotary positions have no positions at all.
      rope_interleaved: whether channels 2i and 2i + 1 form a rotated pair. Otherwise channels i and
        i + half form a pair.
      local_rope: rotary positions of layers with a window; None if they are the same as ``rope``.
      windows: the window of each layer, or None for full attention. The query at position ``p``
        sees positions greater than ``p - window``.
      dtype: the dtype of computation and, by default, of the cache.
      norm_offset: norms scale by ``norm_offset + weight``.
      wide_norms: whether norms scale in float32. Norms with an offset always do.
      centered_norms: whether norms subtract the mean first, which makes them layer norms without a
        bias.
      pre_norms, post_norms: whether attention and feed-forward are normalized before and after.
      scale_embeddings: whether embeddings are multiplied by the square root of their width.
      query_pre_attn_scalar: a number by whose square root scores are divided; None means
        ``head_dim``.
      attn_logit_softcapping, final_logit_softcapping: soft caps; None disables them.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str = "float32"
    _: KW_ONLY
    local_rope: RopeConfig | None = None
    rope_layers: tuple[bool, ...] = ()
    rope_interleaved: bool = False
    norm_offset: float = 0.0
    wide_norms: bool = False
    centered_norms: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    qk_norm_joint: bool = False
    scale_embeddings: bool = False
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None

    names: ClassVar = TensorNames(
        prefix="model.",
        embedding="model.embed_tokens.weight",
        buffers=re.compile(r"(^|\.)rotary_emb\.inv_freq$"),
    )

    @property
    def per_layer_config(self) -> "tuple[DecoderConfig, ...]":
        """The configuration of each layer. Only some families have layers that differ."""
        return (self,) * self.num_hidden_layers

    @property
    def position_limit(self) -> int | None:
        """The number of positions that the model supports. It is None, because rotary positions
        have no limit."""
        return None

    @property
    def context(self) -> int:
        """The context length for which the model was trained, in tokens."""
        trained = self.max_position_embeddings
        return max((rope.context(trained) for rope in self.ropes if rope), default=trained)

    @property
    def query_scale(self) -> float:
        """The factor by which attention scores are multiplied."""
        scalar = self.query_pre_attn_scalar
        return (self.head_dim if scalar is None else scalar) ** -0.5

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """The rotary positions of each layer; None for layers without rotary positions."""
        local = self.local_rope or self.rope
        rotated = self.rope_layers or (True,) * self.num_hidden_layers
        return tuple(
            (self.rope if window is None else local) if rotates else None
            for window, rotates in zip(self.windows, rotated, strict=True)
        )

    def same_rotary(self, max_len: int, other: int) -> bool:
        """Return whether caches with the capacities ``max_len`` and ``other`` rotate keys with the
        same frequencies."""
        trained = self.max_position_embeddings
        return all(rope.same_at(max_len, other, trained) for rope in set(self.ropes) if rope)


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """A model of the Llama family.

    Example:
      ```python
      import dataclasses

      config = dataclasses.replace(lm.config, num_hidden_layers=2)
      params = models.Architecture(config).abstract_params()
      ```
    """


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """A model of the Gemma family.

    Example:
      ```python
      config = models.GemmaConfig(**vars(lm.config) | {"model_type": "gemma", "norm_offset": 1.0})
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    norm_offset: float = 1.0
    post_norms: bool = True
    scale_embeddings: bool = True


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2 model. Fields have the Llama family's names where they mean the same.

    Example:
      ```python
      config = models.GPT2Config(
          "gpt2", 97, 32, 64, 2, 4, 4, 8, max_position_embeddings=64, layer_norm_epsilon=1e-5,
          activation="gelu_new", tie_word_embeddings=True, scale_attn_weights=True,
          scale_attn_by_inverse_layer_idx=False,
      )
      params = models.Architecture(config).abstract_params()
      ```
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    layer_norm_epsilon: float
    activation: str
    tie_word_embeddings: bool
    scale_attn_weights: bool
    scale_attn_by_inverse_layer_idx: bool
    dtype: str = "float32"

    names: ClassVar = TensorNames(
        prefix="transformer.",
        embedding="transformer.wte.weight",
        buffers=re.compile(r"(^|\.)attn\.(bias|masked_bias)$"),
        transposed=re.compile(r"\.(c_attn|c_proj|c_fc)\.weight$"),
    )

    @property
    def position_limit(self) -> int | None:
        """The number of positions that the model supports, which is the number of rows of its
        position table."""
        return self.max_position_embeddings

    @property
    def context(self) -> int:
        """The context length for which the model was trained, in tokens."""
        return self.max_position_embeddings


@dataclass(frozen=True)
class Cohere2Config(DecoderConfig):
    """A Cohere 2 model. ``logit_scale`` is the factor by which logits are multiplied.

    Example:
      ```python
      own = {"model_type": "cohere2", "logit_scale": 0.0625}
      config = models.Cohere2Config(**vars(lm.config) | own)
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    logit_scale: float


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """A model of the Phi-3 family, with fused projections.

    Example:
      ```python
      config = models.Phi3Config(**vars(lm.config) | {"model_type": "phi3"})
      params = models.Architecture(config).abstract_params()
      ```
    """


@dataclass(frozen=True)
class NeoXConfig(DecoderConfig):
    """A GPT-NeoX model. Its norms are LayerNorms with the epsilon ``rms_norm_eps``.

    ``parallel_residual`` says whether attention and feed-forward both read the layer's input.

    Example:
      ```python
      config = models.NeoXConfig(**vars(lm.config) | {"model_type": "gpt_neox"})
      params = models.Architecture(config).abstract_params()
      ```
    """

    _: KW_ONLY
    parallel_residual: bool = True

    names: ClassVar = TensorNames(
        prefix="gpt_neox.",
        embedding="gpt_neox.embed_in.weight",
        buffers=re.compile(r"(^|\.)(rotary_emb\.inv_freq|attention\.(bias|masked_bias))$"),
        renamed=((re.compile(r"^embed_out\."), "lm_head."),),
        written=((re.compile(r"^lm_head\."), "embed_out."),),
    )


@dataclass(frozen=True)
class T5Config:
    """A T5 model. Fields have the Llama family's names where they mean the same.

    Attributes:
      num_hidden_layers: the number of decoder layers, whose keys and values are cached.
      is_gated_act: whether feed-forward layers have gates.
      scale_decoder_outputs: whether decoder outputs are divided by the square root of their width
        before the head.
      relative_attention_num_buckets: the number of buckets of the relative position biases.
      relative_attention_max_distance: the distance from which on all positions share a bucket.

    Example:
      ```python
      config = models.T5Config(
          "t5", 97, 32, 64, num_hidden_layers=2, num_encoder_layers=2, num_attention_heads=4,
          num_key_value_heads=4, head_dim=8, layer_norm_epsilon=1e-6, activation="relu",
          is_gated_act=False, tie_word_embeddings=True, scale_decoder_outputs=True,
          relative_attention_num_buckets=32, relative_attention_max_distance=128,
      )
      params = models.Architecture(config).abstract_params()
      ```
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_encoder_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_norm_epsilon: float
    activation: str
    is_gated_act: bool
    tie_word_embeddings: bool
    scale_decoder_outputs: bool
    relative_attention_num_buckets: int
    relative_attention_max_distance: int
    dtype: str = "float32"

    names: ClassVar = TensorNames(
        prefix="",
        embedding="shared.weight",
        # Cross-attention has no relative position bias.
        buffers=re.compile(r"EncDecAttention\.relative_attention_bias\.weight$"),
        renamed=((re.compile(r"^(en|de)coder\.embed_tokens\."), "shared."),),
    )

    @property
    def position_limit(self) -> int | None:
        """The number of positions that the model supports. It is None, because relative positions
        have no limit."""
        return None

    @property
    def context(self) -> int | None:
        """The context length for which the model was trained. It is None, because T5 has no such
        limit."""
        return None

    @property
    def written(self) -> dict[str, bool]:
        """Fields of ``config.json`` that older files express with other fields."""
        return {"scale_decoder_outputs": self.scale_decoder_outputs}


Config = DecoderConfig | GPT2Config | T5Config
