"""The models' configurations: frozen and hashable, so that they can be static arguments."""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

DTYPES = ("bfloat16", "float16", "float32")
"""What models compute in, and what weights are stored in."""

Parameter = float | int | bool | tuple[float, ...] | None


@dataclass(frozen=True)
class TensorNames:
    """How a family's tensors are named in files.

    ``prefix``: what the names of a model saved without its head lack.
    ``embedding``: what a tied ``lm_head.weight`` is the same as.
    ``buffers``: tensors that older files hold and Transformers ignores too.
    ``transposed``: tensors stored [in, out].
    """

    prefix: str
    embedding: str
    buffers: re.Pattern[str]
    transposed: re.Pattern[str] | None = None


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
        return int(head_dim * self.partial_rotary_factor)

    def same_at(self, max_len: int, other: int, max_position_embeddings: int) -> bool:
        """Whether texts of up to these two lengths have the same frequencies."""
        if self.kind == "longrope":
            trained: Any = dict(self.parameters)["original_max_position_embeddings"]
            return (max_len > trained) == (other > trained)
        if self.kind == "dynamic":
            return max_len == other or max(max_len, other) <= max_position_embeddings
        return True


_LLAMA_NAMES = TensorNames(
    prefix="model.",
    embedding="model.embed_tokens.weight",
    buffers=re.compile(r"(^|\.)rotary_emb\.inv_freq$"),
)


@dataclass(frozen=True)
class LlamaConfig:
    """A model of the Llama family. Names are those of ``config.json``.

    ``windows``: one a layer; the query at ``p`` sees positions above ``p - window``, None all.
    ``dtype``: what the model computes in and, by default, what its cache holds.
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

    names: ClassVar = _LLAMA_NAMES

    @property
    def position_limit(self) -> int | None:
        """Positions that the model has: rotary ones do not end."""
        return None

    def same_rotary(self, max_len: int, other: int) -> bool:
        """Whether caches of these two capacities turn keys by the same frequencies."""
        return self.rope.same_at(max_len, other, self.max_position_embeddings)


@dataclass(frozen=True)
class GemmaConfig:
    """A model of the Gemma family. Names are those of ``config.json``.

    ``rope``: rotary positions of the layers that see everything; ``local_rope``: of those that
    have a window. ``windows``: one a layer; the query at ``p`` sees positions above
    ``p - window``, None all. ``query_pre_attn_scalar``: scores are divided by its root. Of the two
    soft caps, None is none. ``dtype``: what the model computes in and, by default, what its cache
    holds.
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
    hidden_activation: str
    tie_word_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    query_pre_attn_scalar: float
    attn_logit_softcapping: float | None
    final_logit_softcapping: float | None
    rope: RopeConfig
    local_rope: RopeConfig
    windows: tuple[int | None, ...]
    dtype: str = "float32"

    names: ClassVar = _LLAMA_NAMES

    @property
    def position_limit(self) -> int | None:
        """Positions that the model has: rotary ones do not end."""
        return None

    def same_rotary(self, max_len: int, other: int) -> bool:
        """Whether caches of these two capacities turn keys by the same frequencies."""
        ropes, trained = (self.rope, self.local_rope), self.max_position_embeddings
        return all(rope.same_at(max_len, other, trained) for rope in ropes)


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


Config = LlamaConfig | GemmaConfig | GPT2Config
