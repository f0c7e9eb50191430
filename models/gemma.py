"""The text parts of Gemma 3n (Google, 2025) and Gemma 4 (Google, 2026).

In both, the last layers reuse the keys and values of earlier layers, and each layer may have
additional input embeddings. Attributes have the same names as the tensors in Transformers.

Gemma 3n also differs from Gemma 3 as follows. The hidden state consists of several streams, and
each layer computes on one of them (AltUp, Baykal et al., arXiv:2301.13310). Between layers, the
streams are concatenated: [batch, new, streams * hidden]. A low-rank branch runs in parallel with
attention (LAuReL, Menghani et al., arXiv:2411.07501). In some layers, only the largest feed-forward
gates are active.

In Gemma 4, layers with full attention have larger heads than layers with sliding windows, and
rotate a quarter of their channels. Values may be the keys before their norm. Some models add
experts in parallel with the dense feed-forward module.
"""

from statistics import NormalDist
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from kvjax.cache.state import KVCache
from kvjax.core.compat import flax_0_12_list

from . import decoder
from .config import DecoderConfig
from .config_gemma import Gemma3nConfig, Gemma4Config, SharingConfig
from .frame import LayerClass, LayerContext, Logits
from .layers import (
    ACTIVATIONS,
    Divided,
    Embedding,
    Hidden,
    Linear,
    RMSNorm,
    along,
    split_heads,
    unit,
)
from .moe import Experts


class LayerInputs(NamedTuple):
    """Additional inputs of the layers.

    ``inputs`` has the per-layer inputs, [batch, new, layers, width], or is None. Without a cache,
    ``shared`` has the keys and values that later layers reuse, by layer.
    """

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

        def projection(fan_in: int, fan_out: int) -> Linear:
            return Linear(fan_in, fan_out, bias=own.qkv_bias, dtype=own.dtype, rngs=rngs)

        self.q_proj, self.o_proj = projection(hidden, width), projection(width, hidden)
        self.q_norm = norm(own, own.head_dim)
        if self.read == layer:
            self.k_proj, self.k_norm = projection(hidden, kv_width), norm(own, own.head_dim)
            if has_values:
                self.v_proj = projection(hidden, kv_width)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        queries = self.q_norm(split_heads(self.q_proj(x), config.num_attention_heads))
        keys = values = None
        if self.read == layer:
            projected = self.k_proj(x)
            values = self.v_proj(x) if self.has_values else projected
            keys = self.k_norm(split_heads(projected, config.num_key_value_heads))
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
        hidden, inner = config.hidden_size, config.intermediate_sizes[layer]
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
        hidden, width = config.hidden_size, config.hidden_size_per_layer_input
        self.layer, self.activation = layer, ACTIVATIONS[config.hidden_act]
        self.per_layer_input_gate = linear(config, hidden, width, rngs)
        self.per_layer_projection = linear(config, width, hidden, rngs)
        self.post_per_layer_input_norm = norm(config, hidden)

    def per_layer_input(self, x: Hidden, context: LayerContext) -> Hidden:
        """Compute the contribution of the per-layer inputs, gated by the hidden states ``x``."""
        gate = self.activation(self.per_layer_input_gate(x))
        projected = self.per_layer_projection(gate * context.extra.inputs[:, :, self.layer])
        return self.post_per_layer_input_norm(projected)


class Stack(decoder.Stack):
    """Token embeddings, per-layer embeddings, layers and the final norm."""

    def __init__(self, config: SharingConfig, block: LayerClass, *, rngs: nnx.Rngs):
        super().__init__(config, block, rngs=rngs)
        hidden = config.hidden_size
        width = config.num_hidden_layers * config.hidden_size_per_layer_input
        if width:
            self.embed_tokens_per_layer = Embedding(
                config.vocab_size_per_layer_input, width, dtype=config.dtype, rngs=rngs
            )
            self.per_layer_model_projection = linear(config, hidden, width, rngs)
            self.per_layer_projection_norm = norm(config, config.hidden_size_per_layer_input)


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
        if not config.hidden_size_per_layer_input:
            return LayerInputs(None, {})
        shape = (*tokens.shape, config.num_hidden_layers, config.hidden_size_per_layer_input)
        first, dtype = x[..., : config.hidden_size], x.dtype
        # Tokens that are not in the table use the entry of token 0.
        known = jnp.where(tokens < config.vocab_size_per_layer_input, tokens, 0)
        scale = jnp.asarray(config.hidden_size_per_layer_input**0.5, dtype)
        embedded = (model.embed_tokens_per_layer(known) * scale).reshape(shape)
        projected = model.per_layer_model_projection(first)
        projected = (projected * jnp.asarray(config.hidden_size**-0.5, dtype)).reshape(shape)
        projected = model.per_layer_projection_norm(projected)
        return LayerInputs((projected + embedded) * jnp.asarray(2**-0.5, dtype), {})


Streams = Float[Array, "batch new streams hidden"]


class SparseFeedForward(FeedForward):
    """Feed-forward layer with sparse gates.

    Gates are reduced by a threshold, and negative results are set to 0. The threshold is the
    quantile ``sparsity`` of a normal distribution with the gates' mean and standard deviation.
    """

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        sparsity = float(np.float32(config.activation_sparsity_pattern[layer]))
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None

    def gate(self, x: Hidden) -> Hidden:
        gate = super().gate(x)
        if self.deviations is not None:
            mean, deviation = (f(gate, axis=-1, keepdims=True) for f in (jnp.mean, jnp.std))
            gate = jax.nn.relu(gate - (mean + deviation * jnp.asarray(self.deviations, x.dtype)))
        return gate


class AltUp(nnx.Module):
    """AltUp: predicts the layer's output in every stream, then corrects all streams with the
    layer's actual output in the active stream."""

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs):
        streams, hidden = config.altup_num_inputs, config.hidden_size
        self.active, self.streams, self.hidden = config.altup_active_idx, streams, hidden
        self.correct_output_scale = nnx.Param(jnp.zeros(hidden, config.dtype))
        self.correction_coefs = linear(config, streams, streams, rngs)
        self.prediction_coefs = linear(config, streams, streams**2, rngs)
        self.modality_router = linear(config, hidden, streams, rngs)
        self.router_norm = norm(config, hidden)

    def _modes(self, x: Hidden) -> Array:
        routed = self.modality_router(self.router_norm(x) * jnp.asarray(1 / self.hidden, x.dtype))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def predict(self, x: Streams) -> Streams:
        mixing = self.prediction_coefs(self._modes(x[:, :, self.active]))
        mixing = mixing.reshape(*x.shape[:2], self.streams, self.streams)
        return x + jnp.einsum("bnij,bnjh->bnih", mixing, x)

    def correct(self, predicted: Streams, activated: Hidden) -> Streams:
        innovation = activated - predicted[:, :, self.active]
        coefficients = self.correction_coefs(self._modes(activated)) + 1
        return predicted + innovation[:, :, None] * coefficients[..., None]


class Laurel(nnx.Module):
    """LAuReL: ``x`` plus the norm of a low-rank projection of it."""

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs):
        self.linear_left = linear(config, config.hidden_size, config.laurel_rank, rngs)
        self.linear_right = linear(config, config.laurel_rank, config.hidden_size, rngs)
        self.post_laurel_norm = norm(config, config.hidden_size)

    def __call__(self, x: Hidden) -> Hidden:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class Gemma3nBlock(PerLayerInputBlock):
    """One layer."""

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.config = config
        self.self_attn = Attention(config, layer, rngs=rngs)
        self.mlp = SparseFeedForward(config, layer, rngs=rngs)
        self.altup, self.laurel = AltUp(config, rngs=rngs), Laurel(config, rngs=rngs)
        self.input_layernorm = norm(config, hidden)
        self.post_attention_layernorm = norm(config, hidden)
        self.pre_feedforward_layernorm = norm(config, hidden)
        self.post_feedforward_layernorm = norm(config, hidden)
        self.make_per_layer_input(config, layer, rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config = self.config
        streams = x.reshape(*x.shape[:2], config.altup_num_inputs, config.hidden_size)
        predicted = self.altup.predict(streams)
        active = predicted[:, :, config.altup_active_idx]
        normed = self.input_layernorm(active)
        laurel = self.laurel(normed)
        attention_output, context = self.self_attn(normed, context)
        y = (active + self.post_attention_layernorm(attention_output) + laurel) / 2**0.5
        y = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        streams = self.altup.correct(predicted, y)
        first = streams[:, :, config.altup_active_idx]
        if config.altup_correct_scale:
            first = first * along(self.altup.correct_output_scale, first)
        streams = streams.at[:, :, 1:].add(self.per_layer_input(first, context)[:, :, None])
        return streams.reshape(x.shape), context


class Gemma3nStack(Stack):
    """Token and per-layer embeddings, layers, final norm, and the projections that create and merge
    the streams."""

    def __init__(self, config: Gemma3nConfig, block: LayerClass, *, rngs: nnx.Rngs):
        super().__init__(config, block, rngs=rngs)
        hidden = config.hidden_size

        def others() -> nnx.List:
            count = config.altup_num_inputs - 1
            return flax_0_12_list(linear(config, hidden, hidden, rngs) for _ in range(count))

        self.altup_projections, self.altup_unembed_projections = others(), others()


class Gemma3n(Decoder):
    """The text part of Gemma 3n with its language-model head."""

    block: ClassVar = Gemma3nBlock
    stack: ClassVar = Gemma3nStack
    config: Gemma3nConfig
    model: Gemma3nStack

    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        first = super().embed(tokens, context)
        others = [_match_rms(project(first), first) for project in self.model.altup_projections]
        return jnp.concatenate([first, *others], axis=-1)

    def logits(self, x: Hidden) -> Logits:
        first, *others = jnp.split(x, self.config.altup_num_inputs, axis=-1)
        total = first
        for project, other in zip(self.model.altup_unembed_projections, others, strict=True):
            total = total + _match_rms(project(other), first)
        return super().logits(total / self.config.altup_num_inputs)


def _match_rms(x: Hidden, other: Hidden) -> Hidden:
    """Scale ``x`` to the root mean square of ``other``."""

    def mean_square(y: Hidden) -> Array:
        return jnp.mean(jnp.square(y), axis=-1, keepdims=True)

    return x * jnp.sqrt(mean_square(other)) / jnp.sqrt(jnp.maximum(mean_square(x), 1e-5))


class Router(nnx.Module):
    """Top-k router. The selected probabilities are normalized to sum to 1, then multiplied by a
    learned scale per expert."""

    def __init__(self, config: Gemma4Config, *, rngs: nnx.Rngs):
        self.choices, self.epsilon = config.num_experts_per_tok, config.rms_norm_eps
        self.proj = linear(config, config.hidden_size, config.num_experts, rngs)
        self.scale = nnx.Param(jnp.ones(config.hidden_size, config.dtype))
        self.per_expert_scale = nnx.Param(jnp.ones(config.num_experts, config.dtype))

    def __call__(
        self, x: Float[Array, "tokens hidden"]
    ) -> tuple[Int[Array, "tokens choices"], Float[Array, "tokens choices"]]:
        normed = unit(x, self.epsilon).astype(x.dtype)
        normed = normed * along(self.scale, normed) * jnp.asarray(x.shape[-1] ** -0.5, x.dtype)
        probabilities = jax.nn.softmax(self.proj(normed).astype(jnp.float32), axis=-1)
        parts, chosen = lax.top_k(probabilities, self.choices)
        parts = parts / jnp.sum(parts, axis=-1, keepdims=True)
        scale = self.per_expert_scale[...][chosen].astype(jnp.float32)
        return chosen, parts * scale


class Gemma4Block(PerLayerInputBlock):
    """One layer."""

    def __init__(self, config: Gemma4Config, layer: int, *, rngs: nnx.Rngs):
        def hidden_norm() -> RMSNorm:
            return norm(config, config.hidden_size)

        windowed = config.windows[layer] is not None
        self.self_attn = Attention(
            config, layer, has_values=windowed or not config.attention_k_eq_v, rngs=rngs
        )
        self.mlp = FeedForward(config, layer, rngs=rngs)
        self.input_layernorm = hidden_norm()
        self.post_attention_layernorm = hidden_norm()
        self.pre_feedforward_layernorm = hidden_norm()
        self.post_feedforward_layernorm = hidden_norm()
        self.layer_scalar = nnx.Param(jnp.ones(1, config.dtype))
        self.has_per_layer_input = config.hidden_size_per_layer_input > 0
        self.has_experts = config.num_experts > 0
        if self.has_per_layer_input:
            self.make_per_layer_input(config, layer, rngs)
        if self.has_experts:
            self.router, self.experts = Router(config, rngs=rngs), Experts(config, rngs=rngs)
            self.post_feedforward_layernorm_1 = hidden_norm()
            self.post_feedforward_layernorm_2 = hidden_norm()
            self.pre_feedforward_layernorm_2 = hidden_norm()

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        attention_output, context = self.self_attn(self.input_layernorm(x), context)
        x = x + self.post_attention_layernorm(attention_output)
        mlp_output = self.mlp(self.pre_feedforward_layernorm(x))
        if self.has_experts:
            mlp_output = self.post_feedforward_layernorm_1(mlp_output) + self._expert_output(x)
        x = x + self.post_feedforward_layernorm(mlp_output)
        if self.has_per_layer_input:
            x = x + self.per_layer_input(x, context)
        return x * along(self.layer_scalar, x), context

    def _expert_output(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        chosen, parts = self.router(rows)
        output = self.experts(self.pre_feedforward_layernorm_2(rows), chosen, parts)
        return self.post_feedforward_layernorm_2(output).reshape(x.shape)


class Gemma4(Decoder):
    """The text part of Gemma 4 with its language-model head."""

    block: ClassVar = Gemma4Block
