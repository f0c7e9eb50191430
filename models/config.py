"""The models' configurations: frozen and hashable, so that they can be static arguments."""

import re
from dataclasses import KW_ONLY, dataclass, replace
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
    ``experts``: how files have them, if there are any: see ``models/moe.py``.
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


@dataclass(frozen=True)
class Phi3Config(DecoderConfig):
    """A model of the Phi-3 family: its projections are joined."""


@dataclass(frozen=True)
class MoeConfig(DecoderConfig):
    """A decoder whose feed-forward layers are mixtures of experts, but for ``dense_layers``.

    ``norm_topk_prob``: the parts of the experts that a token chose add up to 1.
    """

    _: KW_ONLY
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    dense_layers: tuple[int, ...] = ()

    names: ClassVar = replace(DecoderConfig.names, experts="apart")


@dataclass(frozen=True)
class MixtralConfig(MoeConfig):
    """A Mixtral, whose files have other names."""

    names: ClassVar = replace(
        MoeConfig.names,
        renamed=(
            (re.compile(r"\.block_sparse_moe\."), ".mlp."),
            (re.compile(r"(\.experts\.\d+)\.w1\."), r"\1.gate_proj."),
            (re.compile(r"(\.experts\.\d+)\.w2\."), r"\1.down_proj."),
            (re.compile(r"(\.experts\.\d+)\.w3\."), r"\1.up_proj."),
        ),
        written=(
            (re.compile(r"\.mlp\."), ".block_sparse_moe."),
            (re.compile(r"\.gate_proj\."), ".w1."),
            (re.compile(r"\.down_proj\."), ".w2."),
            (re.compile(r"\.up_proj\."), ".w3."),
        ),
    )


@dataclass(frozen=True)
class Llama4Config(MoeConfig):
    """The text part of a Llama 4. ``windows`` are chunks: a query sees its own alone.

    ``rope_layers``: those that have rotary positions, the others none; ``qk_unit``: there, queries
    and keys are divided by the root of their mean square; ``temperature``: in the others, queries
    grow with their position, by a factor and the positions that a step takes; None where they do
    not. ``intermediate_size``: of ``dense_layers``.
    """

    _: KW_ONLY
    rope_layers: tuple[bool, ...]
    qk_unit: bool
    temperature: tuple[float, int] | None

    names: ClassVar = replace(
        DecoderConfig.names,
        experts="joined",
        renamed=((re.compile(r"\.feed_forward\."), ".mlp."),),
        written=((re.compile(r"\.mlp\."), ".feed_forward."),),
    )


@dataclass(frozen=True)
class SharingConfig(DecoderConfig):
    """What Gemma 3n and Gemma 4 have in common.

    ``inner_sizes``: of each layer's feed-forward part; ``shared_layers``: so many at the end read
    keys and values of earlier ones. ``layer_inputs``: the width of what each layer is given of a
    token besides, from a table of ``layer_vocab`` rows; 0 is none.
    """

    _: KW_ONLY
    inner_sizes: tuple[int, ...]
    shared_layers: int
    layer_inputs: int
    layer_vocab: int

    names: ClassVar = replace(
        DecoderConfig.names,
        # Of layers that share, files may have keys' and values' weights, which nothing reads.
        buffers=re.compile(r"(^|\.)(rotary_emb\.\w*inv_freq|self_attn\.[kv]_(proj|norm)\.\w+)$"),
    )

    @property
    def cache_sources(self) -> tuple[int, ...]:
        """Of each layer, whose keys and values it reads."""
        own = self.num_hidden_layers - self.shared_layers
        last = {(window is None): n for n, window in enumerate(self.windows[:own])}
        return (*range(own), *(last[window is None] for window in self.windows[own:]))


@dataclass(frozen=True)
class Gemma3nConfig(SharingConfig):
    """The text part of a Gemma 3n.

    ``sparsity``: of each layer's gates, how many of 1 are cut off. ``streams``: hidden states
    beside each other, of which layers work on the ``active`` one; ``scale_corrected``: what it
    became is scaled before it meets the input of the layer. ``laurel_rank``: of the product beside
    attention.
    """

    _: KW_ONLY
    sparsity: tuple[float, ...]
    streams: int
    active: int
    scale_corrected: bool
    laurel_rank: int


@dataclass(frozen=True)
class Gemma4Config(SharingConfig):
    """The text part of a Gemma 4.

    ``num_key_value_heads`` and ``head_dim`` are those of layers with a window; the others have
    ``global_key_value_heads`` and ``global_head_dim``, and where ``keys_are_values`` no projection
    of values. ``num_experts``: 0 where there are none.
    """

    _: KW_ONLY
    global_key_value_heads: int
    global_head_dim: int
    keys_are_values: bool
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    names: ClassVar = replace(SharingConfig.names, experts="stacked")

    @property
    def per_layer_config(self) -> tuple[DecoderConfig, ...]:
        """The configuration of each layer, by its heads."""
        others = replace(
            self, num_key_value_heads=self.global_key_value_heads, head_dim=self.global_head_dim
        )
        return tuple(others if window is None else self for window in self.windows)


@dataclass(frozen=True)
class NeoXConfig(DecoderConfig):
    """A GPT-NeoX model: its norms centre, with the epsilon ``rms_norm_eps``.

    ``parallel_residual``: attention and feed-forward are both of what the layer was given.
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
    """A T5 model; names are those of the Llama family where they mean the same.

    ``num_hidden_layers``: of the decoder, whose keys and values a cache has; ``encoder_layers``.
    ``gated``: feed-forward layers have gates. ``scale_outputs``: what the decoder gives is divided
    by the root of its width before the head. ``buckets``, ``max_distance``: of the biases that tell
    positions.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    encoder_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_norm_epsilon: float
    activation: str
    gated: bool
    tie_word_embeddings: bool
    scale_outputs: bool
    buckets: int
    max_distance: int
    dtype: str = "float32"

    names: ClassVar = TensorNames(
        prefix="",
        embedding="shared.weight",
        # The decoder does not go by distances to what it attends to across.
        buffers=re.compile(r"EncDecAttention\.relative_attention_bias\.weight$"),
        renamed=((re.compile(r"^(en|de)coder\.embed_tokens\."), "shared."),),
    )

    @property
    def position_limit(self) -> int | None:
        """Positions that the model has: distances do not end."""
        return None

    @property
    def context(self) -> int | None:
        """Tokens of the longest texts that it was made for: any."""
        return None

    @property
    def written(self) -> dict[str, Any]:
        """Fields of ``config.json`` that older files say by others."""
        return {"scale_decoder_outputs": self.scale_outputs}


Config = DecoderConfig | GPT2Config | T5Config
