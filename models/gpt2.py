"""GPT-2: learned positions, layer norms, and biases in all linear layers.

Radford et al., "Language models are unsupervised multitask learners", 2019. Attributes have the
same names as the tensors in Transformers. Weights are [out, in] here, so ``load`` transposes them.
"""

from collections.abc import Iterable
from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from kvjax.core.compat import flax_0_12_list

from .config import GPT2Config
from .frame import Frame, Layer, LayerContext, Logits, Rotary
from .layers import ACTIVATIONS, Divided, Embedding, Hidden, LayerNorm, Linear, split_heads


def _linear(config: GPT2Config, fan_in: int, fan_out: int, rngs: nnx.Rngs) -> Linear:
    return Linear(fan_in, fan_out, bias=True, dtype=config.dtype, rngs=rngs)


def _norm(config: GPT2Config) -> LayerNorm:
    return LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


class Attention(nnx.Module):
    """Attention of one layer. Queries, keys and values have one fused projection."""

    def __init__(self, config: GPT2Config, layer: int, *, rngs: nnx.Rngs):
        self.heads, self.layer = config.num_attention_heads, layer
        self.scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.c_attn = _linear(config, config.hidden_size, 3 * config.hidden_size, rngs)
        self.c_proj = _linear(config, config.hidden_size, config.hidden_size, rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        queries, keys, values = (
            split_heads(part, self.heads) for part in jnp.split(self.c_attn(x), 3, axis=-1)
        )
        attention_output, context = context.attend(
            self.layer, queries, keys, values, scale=self.scale
        )
        return self.c_proj(attention_output), context


class FeedForward(nnx.Module):
    """``c_proj(act(c_fc(x)))``."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = _linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.c_proj = _linear(config, config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nnx.Module):
    """One layer: attention and feed-forward, each with a norm before it and a residual."""

    def __init__(self, config: GPT2Config, layer: int, *, rngs: nnx.Rngs):
        self.ln_1 = _norm(config)
        self.attn = Attention(config, layer, rngs=rngs)
        self.ln_2 = _norm(config)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        attention_output, context = self.attn(self.ln_1(x), context)
        x = x + attention_output
        return x + self.mlp(self.ln_2(x)), context


class Stack(nnx.Module):
    """Token and position embeddings, layers, and the final norm."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        def embedding(count: int) -> Embedding:
            return Embedding(count, config.hidden_size, dtype=config.dtype, rngs=rngs)

        self.wte = embedding(config.vocab_size)
        self.wpe = embedding(config.max_position_embeddings)
        self.h = flax_0_12_list(
            Block(config, layer, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.ln_f = _norm(config)


class GPT2(Frame):
    """GPT-2 with its language-model head."""

    divided: ClassVar = {
        "wte": Divided.ROWS,
        # The outputs are fused queries, keys and values, so shards of them would not align with
        # heads.
        "c_attn": Divided.INPUTS,
        "c_fc": Divided.OUTPUTS,
        "c_proj": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.transformer = Stack(config, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def rotary(self, reach: int, limit: int) -> Rotary:
        return (None,) * self.config.num_hidden_layers

    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        new, limit = tokens.shape[1], self.config.max_position_embeddings
        if context.step.cache is None and new > limit:
            raise ValueError(f"{new} tokens a row, but the model has only {limit} positions")
        positions = context.step.positions
        return self.transformer.wte(tokens) + self.transformer.wpe(positions)

    def layers(self) -> Iterable[Layer]:
        return self.transformer.h

    def logits(self, x: Hidden) -> Logits:
        return (self.lm_head or self.transformer.wte).logits(self.transformer.ln_f(x))
