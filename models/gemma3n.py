"""The text part of Gemma 3n (Google, 2025).

Hidden states stand in several streams, of which a layer works on one (AltUp, Baykal et al.,
arXiv:2301.13310); beside attention there is a product of low rank (LAuReL, Menghani et al.,
arXiv:2411.07501); each layer is given inputs of its own; of gates the highest alone count; and the
last layers read keys and values of earlier ones.

Attributes bear the names that Transformers gives its tensors. Between layers the streams stand in
one axis, [batch, new, streams * hidden].
"""

from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from . import decoder
from .config_families import Gemma3nConfig
from .frame import Call, Logits
from .layers import ACTIVATIONS, Embedding, Hidden, Linear, RMSNorm, split_heads, unit
from .sharding import Divided

Streams = Float[Array, "batch new streams hidden"]


class Aside(NamedTuple):
    """``inputs`` [batch, new, layers, width] of each layer, and keys and values that later ones
    read, where there is no cache that has them."""

    inputs: Array
    shared: dict[int, tuple[Array, Array]]


def _norm(config: Gemma3nConfig, features: int) -> RMSNorm:
    return RMSNorm(features, epsilon=config.rms_norm_eps, dtype=config.dtype, wide=True)


def _linear(config: Gemma3nConfig, fan_in: int, fan_out: int, rngs: nnx.Rngs) -> Linear:
    return Linear(fan_in, fan_out, bias=False, dtype=config.dtype, rngs=rngs)


class Attention(nnx.Module):
    """Attention of one layer; values are normed too, without a scale."""

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        self.config, self.layer, self.source = config, layer, config.cache_sources[layer]
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim

        def linear(fan_in: int, fan_out: int) -> Linear:
            bias = config.qkv_bias
            return Linear(fan_in, fan_out, bias=bias, dtype=config.dtype, rngs=rngs)

        self.q_proj, self.o_proj = linear(hidden, width), linear(width, hidden)
        self.q_norm = _norm(config, config.head_dim)
        if self.source == layer:
            self.k_proj, self.v_proj = linear(hidden, kv_width), linear(hidden, kv_width)
            self.k_norm = _norm(config, config.head_dim)

    def __call__(self, x: Hidden, call: Call) -> tuple[Hidden, Call]:
        config, layer = self.config, self.layer
        queries = self.q_norm(split_heads(self.q_proj(x), config.num_attention_heads))
        keys = values = None
        if self.source == layer:
            keys = self.k_norm(split_heads(self.k_proj(x), config.num_key_value_heads))
            values = split_heads(self.v_proj(x), config.num_key_value_heads)
            values = unit(values, config.rms_norm_eps).astype(x.dtype)
        if call.step.cache is None:
            shared = dict(call.aside.shared)
            if keys is not None and values is not None:
                shared[layer] = keys, values
            keys, values = shared[self.source]
            call = call._replace(aside=call.aside._replace(shared=shared))
        scale, window = config.query_scale, config.windows[layer]
        mixed, call = call.attend(layer, queries, keys, values, scale=scale, window=window)
        return self.o_proj(mixed), call


class FeedForward(nnx.Module):
    """``down(act(gate(x)) * up(x))``; of gates, those alone count that are so far above their mean
    as the highest ones of a normal distribution are, and by how far they are."""

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.inner_sizes[layer]
        self.activation = ACTIVATIONS[config.hidden_act]
        sparsity = float(np.float32(config.sparsity[layer]))
        self.deviations = NormalDist().inv_cdf(sparsity) if sparsity else None
        self.gate_proj = _linear(config, hidden, inner, rngs)
        self.up_proj = _linear(config, hidden, inner, rngs)
        self.down_proj = _linear(config, inner, hidden, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        gate = self.gate_proj(x)
        if self.deviations is not None:
            mean, deviation = (f(gate, axis=-1, keepdims=True) for f in (jnp.mean, jnp.std))
            gate = jax.nn.relu(gate - (mean + deviation * jnp.asarray(self.deviations, x.dtype)))
        return self.down_proj(self.activation(gate) * self.up_proj(x))


class AltUp(nnx.Module):
    """What streams are to be before a layer, by all of them, and behind it, by what it gave."""

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs):
        streams, hidden = config.streams, config.hidden_size
        self.active, self.streams, self.hidden = config.active, streams, hidden
        self.correct_output_scale = nnx.Param(jnp.zeros(hidden, config.dtype))
        self.correction_coefs = _linear(config, streams, streams, rngs)
        self.prediction_coefs = _linear(config, streams, streams**2, rngs)
        self.modality_router = _linear(config, hidden, streams, rngs)
        self.router_norm = _norm(config, hidden)

    def _modes(self, x: Hidden) -> Array:
        routed = self.modality_router(self.router_norm(x) * jnp.asarray(1 / self.hidden, x.dtype))
        return jnp.tanh(routed.astype(jnp.float32)).astype(x.dtype)

    def predict(self, x: Streams) -> Streams:
        mixing = self.prediction_coefs(self._modes(x[:, :, self.active]))
        mixing = mixing.reshape(*x.shape[:2], self.streams, self.streams)
        return x + jnp.einsum("bnij,bnjh->bnih", mixing, x)

    def correct(self, predicted: Streams, found: Hidden) -> Streams:
        news = found - predicted[:, :, self.active]
        shares = self.correction_coefs(self._modes(found)) + 1
        return predicted + news[:, :, None] * shares[..., None]


class Laurel(nnx.Module):
    """``x`` and the norm of its product of low rank."""

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs):
        self.linear_left = _linear(config, config.hidden_size, config.laurel_rank, rngs)
        self.linear_right = _linear(config, config.laurel_rank, config.hidden_size, rngs)
        self.post_laurel_norm = _norm(config, config.hidden_size)

    def __call__(self, x: Hidden) -> Hidden:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class Block(nnx.Module):
    """One layer."""

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        hidden, width = config.hidden_size, config.layer_inputs
        self.config, self.layer = config, layer
        self.activation = ACTIVATIONS[config.hidden_act]
        self.self_attn = Attention(config, layer, rngs=rngs)
        self.mlp = FeedForward(config, layer, rngs=rngs)
        self.altup, self.laurel = AltUp(config, rngs=rngs), Laurel(config, rngs=rngs)
        self.input_layernorm = _norm(config, hidden)
        self.post_attention_layernorm = _norm(config, hidden)
        self.pre_feedforward_layernorm = _norm(config, hidden)
        self.post_feedforward_layernorm = _norm(config, hidden)
        self.per_layer_input_gate = _linear(config, hidden, width, rngs)
        self.per_layer_projection = _linear(config, width, hidden, rngs)
        self.post_per_layer_input_norm = _norm(config, hidden)

    def __call__(self, x: Hidden, call: Call) -> tuple[Hidden, Call]:
        config = self.config
        streams = x.reshape(*x.shape[:2], config.streams, config.hidden_size)
        predicted = self.altup.predict(streams)
        active = predicted[:, :, config.active]
        normed = self.input_layernorm(active)
        beside = self.laurel(normed)
        mixed, call = self.self_attn(normed, call)
        y = (active + self.post_attention_layernorm(mixed) + beside) / 2**0.5
        y = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        streams = self.altup.correct(predicted, y)
        first = streams[:, :, config.active]
        if config.scale_corrected:
            first = first * self.altup.correct_output_scale[...]
        given = self.activation(self.per_layer_input_gate(first))
        given = self.per_layer_projection(given * call.aside.inputs[:, :, self.layer])
        given = self.post_per_layer_input_norm(given)
        streams = streams.at[:, :, 1:].add(given[:, :, None])
        return streams.reshape(x.shape), call


class Stack(decoder.Stack):
    """Embeddings, of tokens and for each layer, the layers, and what makes and joins streams."""

    def __init__(self, config: Gemma3nConfig, block: type[Any], *, rngs: nnx.Rngs):
        super().__init__(config, block, rngs=rngs)
        hidden, width = config.hidden_size, config.num_hidden_layers * config.layer_inputs
        self.embed_tokens_per_layer = Embedding(
            config.layer_vocab, width, dtype=config.dtype, rngs=rngs
        )
        self.per_layer_model_projection = _linear(config, hidden, width, rngs)
        self.per_layer_projection_norm = _norm(config, config.layer_inputs)

        def others() -> nnx.List:
            return nnx.List(
                _linear(config, hidden, hidden, rngs) for _ in range(config.streams - 1)
            )

        self.altup_projections, self.altup_unembed_projections = others(), others()


class Gemma3n(decoder.Decoder):
    """The text part of Gemma 3n with its language-model head."""

    block: ClassVar = Block
    stack: ClassVar = Stack
    config: Gemma3nConfig
    model: Stack
    divided: ClassVar = {**decoder.Decoder.divided, "embed_tokens_per_layer": Divided.ROWS}

    def embed(self, tokens: Int[Array, "batch new"], call: Call) -> Hidden:
        first = super().embed(tokens, call)
        others = [_as_large(each(first), first) for each in self.model.altup_projections]
        return jnp.concatenate([first, *others], axis=-1)

    def aside(self, tokens: Int[Array, "batch new"], x: Hidden) -> Aside:
        config, model = self.config, self.model
        shape = (*tokens.shape, config.num_hidden_layers, config.layer_inputs)
        first, dtype = x[..., : config.hidden_size], x.dtype
        # What the table has not is given what the first token is.
        known = jnp.where(tokens < config.layer_vocab, tokens, 0)
        scale = jnp.asarray(config.layer_inputs**0.5, dtype)
        own = (model.embed_tokens_per_layer(known) * scale).reshape(shape)
        made = model.per_layer_model_projection(first)
        made = (made * jnp.asarray(config.hidden_size**-0.5, dtype)).reshape(shape)
        made = model.per_layer_projection_norm(made)
        return Aside((made + own) * jnp.asarray(2**-0.5, dtype), {})

    def logits(self, x: Hidden) -> Logits:
        first, *others = jnp.split(x, self.config.streams, axis=-1)
        joined = first
        for each, other in zip(self.model.altup_unembed_projections, others, strict=True):
            joined = joined + _as_large(each(other), first)
        return super().logits(joined / self.config.streams)


def _as_large(x: Hidden, other: Hidden) -> Hidden:
    """``x`` with the root of the mean square that ``other`` has."""

    def square(y: Hidden) -> Array:
        return jnp.mean(jnp.square(y), axis=-1, keepdims=True)

    return x * jnp.sqrt(square(other)) / jnp.sqrt(jnp.maximum(square(x), 1e-5))
