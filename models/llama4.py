"""The text part of Llama 4 (Meta, "The Llama 4 herd", 2025): chunked attention, layers without
rotary positions, and routed experts with a shared expert.

Queries in layers with rotary positions see only their own chunk. The other layers have full
attention, and scale their queries up with the position to keep attention sharp in long sequences
(Nakanishi, arXiv:2501.19399).
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
    """Attention of one layer: chunked with rotary positions, or full without them."""

    def __init__(self, config: Llama4Config, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.epsilon, self.temperature = config.rms_norm_eps, config.attn_temperature
        self.rotated = config.rope_layers[layer]
        self.unit = self.rotated and config.use_qk_norm

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        queries, keys, values = self.project(x)
        queries = split_heads(queries, config.num_attention_heads)
        keys = split_heads(keys, config.num_key_value_heads)
        values = split_heads(values, config.num_key_value_heads)
        if self.rotated:
            queries, keys = _to_halves(queries), _to_halves(keys)
        elif self.temperature is not None:
            factor, step = self.temperature
            steps = jnp.floor((context.step.positions.astype(jnp.float32) + 1) / step)
            growth = jnp.log1p(steps) * factor + 1
            queries = (queries * growth[:, None, :, None]).astype(queries.dtype)
        if self.unit:
            # Rotation preserves the norm, so normalizing before the rotation is equivalent.
            queries, keys = (unit(x, self.epsilon).astype(x.dtype) for x in (queries, keys))
        chunk = config.windows[layer]
        attention_output, context = context.attend(
            layer, queries, keys, values, scale=config.query_scale, window=chunk, chunk=chunk
        )
        return self.o_proj(attention_output), context


def _to_halves(x: Heads) -> Heads:
    """Reorder the channels: rotated pairs (2i, 2i + 1) become pairs (i, i + half)."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


class SparseFeedForward(nnx.Module):
    """A shared expert, and routed experts. The router selects the top-k logits; their sigmoids
    scale the inputs of the selected experts."""

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
        logits, chosen = lax.top_k(self.router(rows), self.choices)
        parts = jax.nn.sigmoid(logits.astype(jnp.float32))
        return self.shared_expert(x) + self.experts(rows, chosen, parts).reshape(x.shape)


class Block(decoder.Block):
    """One layer. The layers in ``dense_layers`` have a feed-forward module without experts."""

    attention: ClassVar = Attention

    def make_feed_forward(
        self, config: DecoderConfig, layer: int, rngs: nnx.Rngs
    ) -> decoder.FeedForwardModule:
        assert isinstance(config, Llama4Config)
        if layer in config.dense_layers:
            return super().make_feed_forward(config, layer, rngs)
        return SparseFeedForward(config, rngs=rngs)


class Llama4(decoder.Decoder):
    """The text part of Llama 4 with its language-model head."""

    block: ClassVar = Block
    config: Llama4Config

    def rotary(self, reach: int, limit: int) -> Rotary:
        tables = super().rotary(reach, limit)
        return tuple(
            table if rotated else None
            for table, rotated in zip(tables, self.config.rope_layers, strict=True)
        )
