"""The text part of Llama 4 (Meta, "The Llama 4 herd", 2025): attention in chunks, layers without
positions, and experts beside one that all tokens take.

Layers with rotary positions see their own chunk; the others see everything, and their queries grow
with position, so that attention stays sharp (Nakanishi, arXiv:2501.19399).
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from . import decoder
from .config import DecoderConfig, Llama4Config
from .frame import LayerContext, Rotary
from .layers import FeedForward, Hidden, Linear, split_heads, unit
from .moe import Experts

Heads = Float[Array, "batch heads new head_dim"]


class Attention(decoder.Attention):
    """Attention of one layer, with rotary positions in a chunk, or without any."""

    def __init__(self, config: Llama4Config, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.epsilon, self.temperature = config.rms_norm_eps, config.temperature
        self.turned = config.rope_layers[layer]
        self.unit = self.turned and config.qk_unit

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        queries, keys, values = self.project(x)
        queries = split_heads(queries, config.num_attention_heads)
        keys = split_heads(keys, config.num_key_value_heads)
        values = split_heads(values, config.num_key_value_heads)
        if self.turned:
            queries, keys = _halves(queries), _halves(keys)
        elif self.temperature is not None:
            factor, step = self.temperature
            steps = jnp.floor((context.step.positions.astype(jnp.float32) + 1) / step)
            growth = jnp.log1p(steps) * factor + 1
            queries = (queries * growth[:, None, :, None]).astype(queries.dtype)
        if self.unit:
            # Turning them changes no length, so that it may come behind this.
            queries, keys = (unit(x, self.epsilon).astype(x.dtype) for x in (queries, keys))
        chunk = config.windows[layer]
        mixed, context = context.attend(
            layer, queries, keys, values, scale=config.query_scale, window=chunk, chunk=chunk
        )
        return self.o_proj(mixed), context


def _halves(x: Heads) -> Heads:
    """Channels that are turned in pairs (2i, 2i + 1), as pairs (i, i + half)."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


class Mixture(nnx.Module):
    """One expert for all tokens, and experts that a router chooses: by the highest of its logits,
    whose sigmoids multiply what they take."""

    def __init__(self, config: Llama4Config, *, rngs: nnx.Rngs):
        self.choices = config.num_experts_per_tok
        hidden, dtype = config.hidden_size, config.dtype
        self.router = Linear(hidden, config.num_experts, bias=False, dtype=dtype, rngs=rngs)
        self.experts = Experts(config, scales_inputs=True, rngs=rngs)
        self.shared_expert = FeedForward(
            hidden, config.moe_intermediate_size, activation=config.hidden_act, bias=False,
            dtype=dtype, rngs=rngs,
        )  # fmt: skip

    def __call__(self, x: Hidden) -> Hidden:
        rows = x.reshape(-1, x.shape[-1])
        found, chosen = lax.top_k(self.router(rows), self.choices)
        parts = jax.nn.sigmoid(found.astype(jnp.float32))
        return self.shared_expert(x) + self.experts(rows, chosen, parts).reshape(x.shape)


class Block(decoder.Block):
    """One layer; some have a feed-forward part without experts."""

    attention: ClassVar = Attention

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> decoder.Feeding:
        assert isinstance(config, Llama4Config)
        if layer in config.dense_layers:
            return super().make_feed_forward(config, layer, rngs)
        return Mixture(config, rngs=rngs)


class Llama4(decoder.Decoder):
    """The text part of Llama 4 with its language-model head."""

    block: ClassVar = Block
    config: Llama4Config

    def rotary(self, reach: int, limit: int) -> Rotary:
        tables = super().rotary(reach, limit)
        return tuple(
            table if turned else None
            for table, turned in zip(tables, self.config.rope_layers, strict=True)
        )
