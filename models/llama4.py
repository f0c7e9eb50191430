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

from . import decoder
from .config import DecoderConfig, Llama4Config
from .frame import LayerContext
from .layers import FeedForward, Hidden, Linear, unit
from .moe import Experts


class Attention(decoder.Attention):
    """Attention of one layer: chunked with rotary positions, or full without them."""

    def __init__(self, config: Llama4Config, layer: int, *, rngs: nnx.Rngs):
        super().__init__(config, layer, rngs=rngs)
        self.epsilon, self.temperature = config.rms_norm_eps, config.attn_temperature
        self.rotated = config.ropes[layer] is not None
        self.unit = self.rotated and config.use_qk_norm

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        config, layer = self.config, self.layer
        queries, keys, values = self.heads(x)
        if not self.rotated and self.temperature is not None:
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
