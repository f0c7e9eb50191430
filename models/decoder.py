"""The decoder of Llama-like and Gemma-like models, configured by a ``DecoderConfig``.

Each layer has grouped-query attention with rotary positions and a gated feed-forward layer. Norms
are applied before each of the two, in Gemma also after, and in OLMo 2 only after (Touvron et al.,
arXiv:2302.13971; Jiang et al., arXiv:2310.06825; Yang et al., arXiv:2407.10671; Gemma 2,
arXiv:2408.00118; Gemma 3, arXiv:2503.19786; OLMo 2, arXiv:2501.00656). In Phi-3 (Abdin et al.,
arXiv:2404.14219) one projection computes queries, keys and values, and one computes the gate and up
halves of the feed-forward layer. In Cohere 2 (Cohere, "Command A", arXiv:2504.00698) attention and
the feed-forward layer run in parallel with one norm for both, and only layers with a window have
rotary positions. Attributes have the same names as the tensors in Transformers.
"""

from collections.abc import Callable, Iterable
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from kvjax.core.compat import flax_0_12_list

from .config import Cohere2Config, DecoderConfig
from .frame import Frame, Layer, LayerClass, LayerContext, Logits, Rotary
from .layers import (
    ACTIVATIONS,
    Divided,
    Embedding,
    FeedForward,
    Heads,
    Hidden,
    Linear,
    RMSNorm,
    rotary_halves,
    split_heads,
)
from .rope import layer_rotary

FeedForwardModule = Callable[[Hidden], Hidden]
"""The feed-forward module of a layer."""


def make_norm(config: DecoderConfig, features: int) -> RMSNorm:
    """Create a norm with the settings of all norms of the model."""
    return RMSNorm(
        features, epsilon=config.rms_norm_eps, dtype=config.dtype, offset=config.norm_offset,
        wide=config.wide_norms, centered=config.centered_norms,
    )  # fmt: skip


class Attention(nnx.Module):
    """Grouped-query attention of one layer.

    A family with different projections derives from it and overrides ``make_projections`` and
    ``project``.
    """

    def __init__(self, config: DecoderConfig, layer: int, *, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.make_projections(width, kv_width, rngs)
        self.o_proj = self.linear(width, config.hidden_size, config.output_bias, rngs)
        if config.qk_norm:
            joint = config.qk_norm_joint
            self.q_norm = make_norm(config, width if joint else config.head_dim)
            self.k_norm = make_norm(config, kv_width if joint else config.head_dim)

    def linear(self, fan_in: int, fan_out: int, bias: bool, rngs: nnx.Rngs) -> Linear:
        return Linear(fan_in, fan_out, bias=bias, dtype=self.config.dtype, rngs=rngs)

    def make_projections(self, width: int, kv_width: int, rngs: nnx.Rngs) -> None:
        """Create the modules that ``project`` uses.

        Args:
          width: the number of query channels in all heads.
          kv_width: the number of key channels, and of value channels, in all heads.
          rngs: random number generators for the initial weights.
        """
        hidden, bias = self.config.hidden_size, self.config.qkv_bias
        self.q_proj = self.linear(hidden, width, bias, rngs)
        self.k_proj = self.linear(hidden, kv_width, bias, rngs)
        self.v_proj = self.linear(hidden, kv_width, bias, rngs)

    def project(self, x: Hidden) -> tuple[Hidden, Hidden, Hidden]:
        """Compute queries, keys and values, each [batch, new, heads * head_dim]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def heads(self, x: Hidden) -> tuple[Heads, Heads, Heads]:
        """Compute queries, keys and values, each [batch, heads, new, head_dim], not rotated."""
        config = self.config
        queries, keys, values = self.project(x)
        if config.qk_norm and config.qk_norm_joint:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries = split_heads(queries, config.num_attention_heads)
        keys = split_heads(keys, config.num_key_value_heads)
        values = split_heads(values, config.num_key_value_heads)
        if config.qk_norm and not config.qk_norm_joint:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        if config.rope_interleaved and config.ropes[self.layer]:
            queries, keys = rotary_halves(queries), rotary_halves(keys)
        return queries, keys, values

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        attention_output, context = context.attend(
            layer, *self.heads(x), scale=config.query_scale, window=config.windows[layer],
            soft_cap=config.attn_logit_softcapping,
        )  # fmt: skip
        return self.o_proj(attention_output), context


class Block(nnx.Module):
    """One layer: attention and feed-forward, each with a residual connection.

    With ``pre_norms`` the inputs of both are normed, and with ``post_norms`` their outputs. A
    family with a different attention sets ``attention``. A family with a different feed-forward
    module overrides ``make_feed_forward``. A family that combines the two differently overrides
    ``make_norms`` and ``__call__``.
    """

    attention: ClassVar[type[Attention]] = Attention

    def __init__(self, config: DecoderConfig, layer: int, *, rngs: nnx.Rngs):
        self.make_norms(config)
        self.self_attn = self.attention(config, layer, rngs=rngs)
        self.mlp = self.make_feed_forward(config, layer, rngs)

    def make_norms(self, config: DecoderConfig) -> None:
        """Create the norms that ``__call__`` uses."""

        def norm() -> RMSNorm:
            return make_norm(config, config.hidden_size)

        self.pre_norms, self.post_norms = config.pre_norms, config.post_norms
        if config.pre_norms:
            self.input_layernorm = norm()
        self.post_attention_layernorm = norm()
        if config.post_norms:
            if config.pre_norms:
                self.pre_feedforward_layernorm = norm()
            self.post_feedforward_layernorm = norm()

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> FeedForwardModule:
        """Create the feed-forward module of a layer."""
        return FeedForward(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            bias=config.mlp_bias,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        attention_output, context = self.self_attn(
            self.input_layernorm(x) if self.pre_norms else x, context
        )
        if self.post_norms:
            x = x + self.post_attention_layernorm(attention_output)
            mlp_output = self.mlp(self.pre_feedforward_layernorm(x) if self.pre_norms else x)
            return x + self.post_feedforward_layernorm(mlp_output), context
        x = x + attention_output
        return x + self.mlp(self.post_attention_layernorm(x)), context


class Stack(nnx.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: DecoderConfig, block: LayerClass, *, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs
        )
        self.layers = flax_0_12_list(
            block(config, layer, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.norm = make_norm(config, config.hidden_size)


class Decoder(Frame):
    """A decoder with its language-model head.

    Attributes:
      block: the class of a layer. Families with different layers derive theirs from ``Block``.
      stack: the class of the module with the embedding, the layers and the final norm.
    """

    block: ClassVar[LayerClass] = Block
    stack: ClassVar[type[Stack]] = Stack
    divided: ClassVar = {
        "embed_tokens": Divided.ROWS,
        "q_proj": Divided.QUERIES,
        "k_proj": Divided.HEADS,
        "v_proj": Divided.HEADS,
        "o_proj": Divided.ATTENDED,
        "gate_proj": Divided.OUTPUTS,
        "up_proj": Divided.OUTPUTS,
        "down_proj": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.model = self.stack(config, self.block, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def rotary(self, reach: int, limit: int) -> Rotary:
        return layer_rotary(self.config, reach, limit)

    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        x = self.model.embed_tokens(tokens)
        if self.config.scale_embeddings:
            # The scale is rounded to the model's dtype, as it was in training.
            x = x * jnp.float32(self.config.hidden_size**0.5).astype(x.dtype)
        return x

    def layers(self) -> Iterable[Layer]:
        return self.model.layers

    def logits(self, x: Hidden) -> Logits:
        logits = (self.lm_head or self.model.embed_tokens).logits(self.model.norm(x))
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits


class FusedAttention(Attention):
    """Attention with a fused projection of queries, keys and values."""

    def make_projections(self, width: int, kv_width: int, rngs: nnx.Rngs) -> None:
        config = self.config
        self.ends = (width, width + kv_width)
        self.qkv_proj = self.linear(config.hidden_size, width + 2 * kv_width, config.qkv_bias, rngs)

    def project(self, x: Hidden) -> tuple[Hidden, Hidden, Hidden]:
        queries, keys, values = jnp.split(self.qkv_proj(x), self.ends, axis=-1)
        return queries, keys, values


class FusedFeedForward(nnx.Module):
    """``down(act(gate) * up)`` with a fused projection of gate and up."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=False, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(self.activation(gate) * up)


class Phi3Block(Block):
    """One layer."""

    attention: ClassVar = FusedAttention

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> FusedFeedForward:
        return FusedFeedForward(config, rngs)


class Phi3(Decoder):
    """Phi-3 with its language-model head."""

    block: ClassVar = Phi3Block
    divided: ClassVar = {
        "embed_tokens": Divided.ROWS,
        # The outputs of the next two projections are fused, so shards of them would not align with
        # the parts.
        "qkv_proj": Divided.INPUTS,
        "gate_up_proj": Divided.INPUTS,
        "o_proj": Divided.ATTENDED,
        "down_proj": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }


class Cohere2Block(Block):
    """One layer. Attention and feed-forward both read the normed input of the layer."""

    def make_norms(self, config: DecoderConfig) -> None:
        self.input_layernorm = make_norm(config, config.hidden_size)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        normed = self.input_layernorm(x)
        attention_output, context = self.self_attn(normed, context)
        return x + attention_output + self.mlp(normed), context


class Cohere2(Decoder):
    """Cohere 2 with its language-model head."""

    block: ClassVar = Cohere2Block
    config: Cohere2Config

    def logits(self, x: Hidden) -> Logits:
        return super().logits(x) * self.config.logit_scale
