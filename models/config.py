"""The models' configurations: frozen and hashable, so that they can be static arguments."""

import re
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

DTYPES = ("bfloat16", "float16", "float32")
"""What models compute in."""

NARROWED = {"float64": "float32"}
"""Other dtypes of stored weights, and the dtypes that they are read as."""

Parameter = float | int | bool | tuple[float, ...] | None


@dataclass(frozen=True)
class TensorNames:
    """How a family's tensors are named in files.

    ``prefix``: what the names of a model saved without its head lack.
    ``embedding``: what a tied ``lm_head.weight`` is the same as.
    ``buffers``: tensors that older files hold and Transformers ignores too.
    ``transposed``: tensors stored [in, out].
    ``renamed``: what stands otherwise in names of files, and what it is here.
    ``written``: the same for names that are written.
    ``experts``: how files have them, if there are any: see ``models/experts.py``.
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
    """Rotary positions: the kind, and the kind's own parameters under their ``config.json`` names.

    ``parameters`` is sorted by name, and holds the context length before scaling
    (``original_max_position_embeddings``) for every kind that goes by one.
    """

    kind: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    parameters: tuple[tuple[str, Parameter], ...] = ()

    def rotary_dim(self, head_dim: int) -> int:
        """Channels of a head that are rotated, the first ones."""
        # The kind `proportional` turns the rest by angles of 0.
        part = 1.0 if self.kind == "proportional" else self.partial_rotary_factor
        return int(head_dim * part)

    def context(self, max_position_embeddings: int) -> int:
        """Tokens of the texts that such positions are for: ``max_position_embeddings``, but where
        configs keep there what came before the scaling."""
        parameters: Any = dict(self.parameters)
        if self.kind not in ("yarn", "dynamic"):
            return max_position_embeddings
        trained = parameters.get("original_max_position_embeddings", max_position_embeddings)
        return max(max_position_embeddings, int(trained * parameters.get("factor", 1.0)))

    def same_at(self, max_len: int, other: int, max_position_embeddings: int) -> bool:
        """Whether texts of up to these two lengths have the same frequencies."""
        if self.kind == "longrope":
            trained: Any = dict(self.parameters)["original_max_position_embeddings"]
            return (max_len > trained) == (other > trained)
        if self.kind == "dynamic":
            return max_len == other or max(max_len, other) <= max_position_embeddings
        return True


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder with rotary positions, and what it does. Names are those of ``config.json``.

    ``qk_norm``: queries and keys are normed, a head at a time, or with ``qk_norm_joint`` all heads
    together. ``rope``: rotary positions;
    ``local_rope``: of the layers that have a window, where those have others. ``windows``: one a
    layer; the query at ``p`` sees positions above ``p - window``, None all. ``dtype``: what the
    model computes in and, by default, what its cache holds. ``norm_offset``: norms scale by
    ``norm_offset + weight``; ``wide_norms``: they scale in float32, as those with an offset do.
    ``pre_norms``: a layer's parts are normed before; ``post_norms``: behind.
    ``scale_embeddings``: by the root of their width. ``query_pre_attn_scalar``: scores are divided
    by its root, and by that of ``head_dim`` where it is None. Of the soft caps, None is none.
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
    norm_offset: float = 0.0
    wide_norms: bool = False
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
        """The configuration of each layer: they are alike but in families that say otherwise."""
        return (self,) * self.num_hidden_layers

    @property
    def position_limit(self) -> int | None:
        """Positions that the model has: rotary ones do not end."""
        return None

    @property
    def context(self) -> int:
        """Tokens of the longest texts that it was made for."""
        return max(rope.context(self.max_position_embeddings) for rope in self.ropes)

    @property
    def query_scale(self) -> float:
        """What scores are multiplied by."""
        scalar = self.query_pre_attn_scalar
        return (self.head_dim if scalar is None else scalar) ** -0.5

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary positions of each layer."""
        local = self.local_rope or self.rope
        return tuple(self.rope if window is None else local for window in self.windows)

    def same_rotary(self, max_len: int, other: int) -> bool:
        """Whether caches of these two capacities turn keys by the same frequencies."""
        trained = self.max_position_embeddings
        return all(rope.same_at(max_len, other, trained) for rope in set(self.ropes))


@dataclass(frozen=True)
class LlamaConfig(DecoderConfig):
    """A model of the Llama family."""


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """A model of the Gemma family."""

    _: KW_ONLY
    norm_offset: float = 1.0
    post_norms: bool = True
    scale_embeddings: bool = True


@dataclass(frozen=True)
class GPT2Config:
    """A GPT-2 model. Names are those of the Llama family where they mean the same."""

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
        """Positions that the model has: each is a row of a table."""
        return self.max_position_embeddings

    @property
    def context(self) -> int:
        """Tokens of the longest texts that it was made for."""
        return self.max_position_embeddings
