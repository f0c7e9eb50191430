"""The text part of Gemma 3n (Google, 2025).

Hidden states stand in several streams, of which a layer works on one (AltUp, Baykal et al.,
arXiv:2301.13310); beside attention there is a product of low rank (LAuReL, Menghani et al.,
arXiv:2411.07501); each layer is given inputs of its own; of gates the highest alone count; and the
last layers read keys and values of earlier ones.

Attributes bear the names that Transformers gives its tensors. Between layers the streams stand in
one axis, [batch, new, streams * hidden].
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
    """Of gates, those alone count that are so far above their mean as the highest ones of a normal
    distribution are, and by how far they are."""

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
    """What streams are to be before a layer, by all of them, and behind it, by what it gave."""

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

    def correct(self, predicted: Streams, found: Hidden) -> Streams:
        news = found - predicted[:, :, self.active]
        shares = self.correction_coefs(self._modes(found)) + 1
        return predicted + news[:, :, None] * shares[..., None]


class Laurel(nnx.Module):
    """``x`` and the norm of its product of low rank."""

    def __init__(self, config: Gemma3nConfig, *, rngs: nnx.Rngs):
        self.linear_left = linear(config, config.hidden_size, config.laurel_rank, rngs)
        self.linear_right = linear(config, config.laurel_rank, config.hidden_size, rngs)
        self.post_laurel_norm = norm(config, config.hidden_size)

    def __call__(self, x: Hidden) -> Hidden:
        return x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))


class Block(gemma_parts.GivenBlock):
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
        self.make_given(config, layer, rngs)

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config = self.config
        streams = x.reshape(*x.shape[:2], config.streams, config.hidden_size)
        predicted = self.altup.predict(streams)
        active = predicted[:, :, config.active]
        normed = self.input_layernorm(active)
        beside = self.laurel(normed)
        mixed, context = self.self_attn(normed, context)
        y = (active + self.post_attention_layernorm(mixed) + beside) / 2**0.5
        y = y + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(y)))
        streams = self.altup.correct(predicted, y)
        first = streams[:, :, config.active]
        if config.scale_corrected:
            first = first * along(self.altup.correct_output_scale, first)
        streams = streams.at[:, :, 1:].add(self.given(first, context)[:, :, None])
        return streams.reshape(x.shape), context


class Stack(gemma_parts.Stack):
    """Embeddings, of tokens and for each layer, the layers, and what makes and joins streams."""

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
        others = [_as_large(each(first), first) for each in self.model.altup_projections]
        return jnp.concatenate([first, *others], axis=-1)

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
