"""GPT-NeoX and Pythia: fused projections, layer norms, and parallel attention and feed-forward.

Black et al., arXiv:2204.06745; Biderman et al., arXiv:2304.01373. Attributes have the same names as
the tensors in Transformers, except for the head, which is ``embed_out`` in files.
"""

from collections.abc import Iterable
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from kvjax.core.compat import flax_0_12_list

from .config import NeoXConfig
from .frame import Frame, Layer, LayerContext, Logits, Rotary
from .layers import ACTIVATIONS, Divided, Embedding, Hidden, LayerNorm, Linear, split_heads
from .rope import layer_rotary


def _norm(config: NeoXConfig) -> LayerNorm:
    return LayerNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=config.dtype)


class Attention(nnx.Module):
    """Attention of one layer. The fused projection gives the query, key and value of each head."""

    def __init__(self, config: NeoXConfig, layer: int, *, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        hidden, dtype = config.hidden_size, config.dtype
        self.query_key_value = Linear(
            hidden, 3 * hidden, bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.dense = Linear(hidden, hidden, bias=config.output_bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        heads = split_heads(self.query_key_value(x), self.config.num_attention_heads)
        queries, keys, values = jnp.split(heads, 3, axis=-1)
        scale = self.config.query_scale
        attention_output, context = context.attend(self.layer, queries, keys, values, scale=scale)
        return self.dense(attention_output), context


class FeedForward(nnx.Module):
    """``dense_4h_to_h(act(dense_h_to_4h(x)))``."""

    def __init__(self, config: NeoXConfig, *, rngs: nnx.Rngs):
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.activation = ACTIVATIONS[config.hidden_act]
        self.dense_h_to_4h = Linear(hidden, inner, bias=config.mlp_bias, dtype=dtype, rngs=rngs)
        self.dense_4h_to_h = Linear(inner, hidden, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))


class Block(nnx.Module):
    """One layer. With ``parallel_residual``, attention and feed-forward both read the layer's
    input. Otherwise feed-forward follows attention."""

    def __init__(self, config: NeoXConfig, layer: int, *, rngs: nnx.Rngs):
        self.parallel = config.parallel_residual
        self.input_layernorm = _norm(config)
        self.attention = Attention(config, layer, rngs=rngs)
        self.post_attention_layernorm = _norm(config)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        attention_output, context = self.attention(self.input_layernorm(x), context)
        between = x if self.parallel else x + attention_output
        mlp_output = self.mlp(self.post_attention_layernorm(between))
        return x + attention_output + mlp_output, context


class Stack(nnx.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: NeoXConfig, *, rngs: nnx.Rngs):
        self.embed_in = Embedding(
            config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs
        )
        self.layers = flax_0_12_list(
            Block(config, layer, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.final_layer_norm = _norm(config)


class NeoX(Frame):
    """GPT-NeoX with its language-model head."""

    divided: ClassVar = {
        "embed_in": Divided.ROWS,
        # The query, key and value of a head are adjacent, so each shard has whole heads.
        "query_key_value": Divided.HEADS,
        "dense": Divided.ATTENDED,
        "dense_h_to_4h": Divided.OUTPUTS,
        "dense_4h_to_h": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }

    def __init__(self, config: NeoXConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.gpt_neox = Stack(config, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def rotary(self, reach: int, limit: int) -> Rotary:
        return layer_rotary(self.config, reach, limit)

    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        return self.gpt_neox.embed_in(tokens)

    def layers(self) -> Iterable[Layer]:
        return self.gpt_neox.layers

    def logits(self, x: Hidden) -> Logits:
        return (self.lm_head or self.gpt_neox.embed_in).logits(self.gpt_neox.final_layer_norm(x))
