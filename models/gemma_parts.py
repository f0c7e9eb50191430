"""Parts shared by Gemma 3n and Gemma 4: layers that reuse the keys and values of an earlier layer,
and per-layer input embeddings.

Attributes have the same names as the tensors in Transformers.
"""

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from kvjax.cache.state import KVCache

from . import decoder
from .config import DecoderConfig, SharingConfig
from .frame import LayerContext
from .layers import ACTIVATIONS, Embedding, Hidden, Linear, RMSNorm, split_heads, unit
from .sharding import Divided


class LayerInputs(NamedTuple):
    """``inputs``: the per-layer inputs, [batch, new, layers, width], or None. ``shared``: without a
    cache, the keys and values that later layers reuse, by layer."""

    inputs: Array | None
    shared: dict[int, tuple[Array, Array]]


def norm(config: DecoderConfig, features: int) -> RMSNorm:
    return RMSNorm(features, epsilon=config.rms_norm_eps, dtype=config.dtype, wide=True)


def linear(config: DecoderConfig, fan_in: int, fan_out: int, rngs: nnx.Rngs) -> Linear:
    return Linear(fan_in, fan_out, bias=False, dtype=config.dtype, rngs=rngs)


class Attention(nnx.Module):
    """Attention of one layer. Values are normed too, without a scale.

    ``read`` is the layer whose keys and values this layer uses. If ``has_values`` is False, there
    is no value projection: the values are the keys before their norm.
    """

    def __init__(
        self, config: SharingConfig, layer: int, *, has_values: bool = True, rngs: nnx.Rngs
    ):
        own = config.per_layer_config[layer]
        self.config, self.layer, self.read = own, layer, config.cache_sources[layer]
        self.has_values = has_values
        hidden, width = own.hidden_size, own.num_attention_heads * own.head_dim
        kv_width = own.num_key_value_heads * own.head_dim

        def made(fan_in: int, fan_out: int) -> Linear:
            return Linear(fan_in, fan_out, bias=own.qkv_bias, dtype=own.dtype, rngs=rngs)

        self.q_proj, self.o_proj = made(hidden, width), made(width, hidden)
        self.q_norm = norm(own, own.head_dim)
        if self.read == layer:
            self.k_proj, self.k_norm = made(hidden, kv_width), norm(own, own.head_dim)
            if has_values:
                self.v_proj = made(hidden, kv_width)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        queries = self.q_norm(split_heads(self.q_proj(x), config.num_attention_heads))
        keys = values = None
        if self.read == layer:
            made = self.k_proj(x)
            values = self.v_proj(x) if self.has_values else made
            keys = self.k_norm(split_heads(made, config.num_key_value_heads))
            values = split_heads(values, config.num_key_value_heads)
            values = unit(values, config.rms_norm_eps).astype(x.dtype)
        if context.step.cache is None:
            shared = dict(context.extra.shared)
            if keys is not None and values is not None:
                shared[layer] = keys, values
            keys, values = shared[self.read]
            context = context._replace(extra=context.extra._replace(shared=shared))
        scale, window = config.query_scale, config.windows[layer]
        attention_output, context = context.attend(
            layer, queries, keys, values, scale=scale, window=window
        )
        return self.o_proj(attention_output), context


class FeedForward(nnx.Module):
    """``down(act(gate(x)) * up(x))``. Each layer has its own intermediate size."""

    def __init__(self, config: SharingConfig, layer: int, *, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.inner_sizes[layer]
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_proj = linear(config, hidden, inner, rngs)
        self.up_proj = linear(config, hidden, inner, rngs)
        self.down_proj = linear(config, inner, hidden, rngs)

    def gate(self, x: Hidden) -> Hidden:
        return self.gate_proj(x)

    def __call__(self, x: Hidden) -> Hidden:
        return self.down_proj(self.activation(self.gate(x)) * self.up_proj(x))


class PerLayerInputBlock(nnx.Module):
    """A layer with per-layer inputs."""

    def make_per_layer_input(self, config: SharingConfig, layer: int, rngs: nnx.Rngs) -> None:
        """Create the modules that ``per_layer_input`` uses."""
        hidden, width = config.hidden_size, config.layer_inputs
        self.layer, self.activation = layer, ACTIVATIONS[config.hidden_act]
        self.per_layer_input_gate = linear(config, hidden, width, rngs)
        self.per_layer_projection = linear(config, width, hidden, rngs)
        self.post_per_layer_input_norm = norm(config, hidden)

    def per_layer_input(self, x: Hidden, context: LayerContext) -> Hidden:
        """The contribution of the layer's inputs, gated by the hidden states ``x``."""
        gate = self.activation(self.per_layer_input_gate(x))
        projected = self.per_layer_projection(gate * context.extra.inputs[:, :, self.layer])
        return self.post_per_layer_input_norm(projected)


class Stack(decoder.Stack):
    """Token embeddings, per-layer embeddings, layers and the final norm."""

    def __init__(self, config: SharingConfig, block: type[Any], *, rngs: nnx.Rngs):
        super().__init__(config, block, rngs=rngs)
        hidden, width = config.hidden_size, config.num_hidden_layers * config.layer_inputs
        if width:
            self.embed_tokens_per_layer = Embedding(
                config.layer_vocab, width, dtype=config.dtype, rngs=rngs
            )
            self.per_layer_model_projection = linear(config, hidden, width, rngs)
            self.per_layer_projection_norm = norm(config, config.layer_inputs)


class Decoder(decoder.Decoder):
    """A decoder with shared key-value layers and per-layer inputs, and its language-model head."""

    stack: ClassVar = Stack
    config: SharingConfig
    model: Stack
    divided: ClassVar = {**decoder.Decoder.divided, "embed_tokens_per_layer": Divided.ROWS}

    def extra(
        self, tokens: Int[Array, "batch new"], x: Hidden, source: KVCache | None
    ) -> LayerInputs:
        config, model = self.config, self.model
        if not config.layer_inputs:
            return LayerInputs(None, {})
        shape = (*tokens.shape, config.num_hidden_layers, config.layer_inputs)
        first, dtype = x[..., : config.hidden_size], x.dtype
        # Tokens outside the table use the entry of token 0.
        known = jnp.where(tokens < config.layer_vocab, tokens, 0)
        scale = jnp.asarray(config.layer_inputs**0.5, dtype)
        own = (model.embed_tokens_per_layer(known) * scale).reshape(shape)
        made = model.per_layer_model_projection(first)
        made = (made * jnp.asarray(config.hidden_size**-0.5, dtype)).reshape(shape)
        made = model.per_layer_projection_norm(made)
        return LayerInputs((made + own) * jnp.asarray(2**-0.5, dtype), {})
