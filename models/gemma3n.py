"""The text part of Gemma 3n (Google, 2025).

It differs from Gemma 3 as follows. The hidden state consists of several streams, and each layer
computes on one of them (AltUp, Baykal et al., arXiv:2301.13310). A low-rank branch runs in parallel
with attention (LAuReL, Menghani et al., arXiv:2411.07501). Each layer has its own input embeddings.
In some layers, only the largest feed-forward gates are active. The last layers reuse the keys and
values of earlier layers.

Attributes have the same names as the tensors in Transformers. Between layers, the streams are
concatenated: [batch, new, streams * hidden].
"""

from statistics import NormalDist
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from kvjax.core.compat import flax_0_12_list

from . import gemma_parts
from .config import Gemma3nConfig
from .frame import LayerContext, Logits
from .gemma_parts import linear, norm
from .layers import Hidden, along

Streams = Float[Array, "batch new streams hidden"]


class FeedForward(gemma_parts.FeedForward):
    """Feed-forward layer with sparse gates.

    Gates are reduced by a threshold, and negative results are set to 0. The threshold is the
    quantile ``sparsity`` of a normal distribution with the gates' mean and standard deviation.
    """

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        sparsity = float(np.float32(config.sparsity[layer]))
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
        streams, hidden = config.streams, config.hidden_size
        self.active, self.streams, self.hidden = config.active, streams, hidden
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


class Block(gemma_parts.PerLayerInputBlock):
    """One layer."""

    def __init__(self, config: Gemma3nConfig, layer: int, *, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.config = config
        self.self_attn = gemma_parts.Attention(config, layer, rngs=rngs)
        self.mlp = FeedForward(config, layer, rngs=rngs)
        self.altup, self.laurel = AltUp(config, rngs=rngs), Laurel(config, rngs=rngs)
        self.input_layernorm = norm(config, hidden)
        self.post_attention_layernorm = norm(config, hidden)
        self.pre_feedforward_layernorm = norm(config, hidden)
        self.post_feedforward_layernorm = norm(config, hidden)
        self.make_per_layer_input(config, layer, rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config = self.config
        streams = x.reshape(*x.shape[:2], config.streams, config.hidden_size)
        predicted = self.altup.predict(streams)
        active = predicted[:, :, config.active]
        normed = self.input_layernorm(active)
        laurel = self.laurel(normed)
        attention_output, context = self.self_attn(normed, context)
        y = (active + self.post_attention_layernorm(attention_output) + laurel) / 2**0.5
        y = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        streams = self.altup.correct(predicted, y)
        first = streams[:, :, config.active]
        if config.scale_corrected:
            first = first * along(self.altup.correct_output_scale, first)
        streams = streams.at[:, :, 1:].add(self.per_layer_input(first, context)[:, :, None])
        return streams.reshape(x.shape), context


class Stack(gemma_parts.Stack):
    """Token and per-layer embeddings, layers, final norm, and the projections that create and merge
    the streams."""

    def __init__(self, config: Gemma3nConfig, block: type[Any], *, rngs: nnx.Rngs):
        super().__init__(config, block, rngs=rngs)
        hidden = config.hidden_size

        def others() -> Any:
            count = config.streams - 1
            return flax_0_12_list(linear(config, hidden, hidden, rngs) for _ in range(count))

        self.altup_projections, self.altup_unembed_projections = others(), others()


class Gemma3n(gemma_parts.Decoder):
    """The text part of Gemma 3n with its language-model head."""

    block: ClassVar = Block
    stack: ClassVar = Stack
    config: Gemma3nConfig
    model: Stack

    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        first = super().embed(tokens, context)
        others = [_match_rms(project(first), first) for project in self.model.altup_projections]
        return jnp.concatenate([first, *others], axis=-1)

    def logits(self, x: Hidden) -> Logits:
        first, *others = jnp.split(x, self.config.streams, axis=-1)
        total = first
        for project, other in zip(self.model.altup_unembed_projections, others, strict=True):
            total = total + _match_rms(project(other), first)
        return super().logits(total / self.config.streams)


def _match_rms(x: Hidden, other: Hidden) -> Hidden:
    """``x`` scaled to the root mean square of ``other``."""

    def mean_square(y: Hidden) -> Array:
        return jnp.mean(jnp.square(y), axis=-1, keepdims=True)

    return x * jnp.sqrt(mean_square(other)) / jnp.sqrt(jnp.maximum(mean_square(x), 1e-5))
