"""Phi-3: Llama with fused projections (Abdin et al., arXiv:2404.14219).

One projection computes queries, keys and values, and one computes the gate and up halves of the
feed-forward layer.
"""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx

from . import decoder
from .config import DecoderConfig
from .layers import ACTIVATIONS, Hidden, Linear
from .sharding import Divided


class Attention(decoder.Attention):
    """Attention with a fused projection of queries, keys and values."""

    def make_projections(self, width: int, kv_width: int, rngs: nnx.Rngs) -> None:
        config = self.config
        self.ends = (width, width + kv_width)
        self.qkv_proj = self.linear(config.hidden_size, width + 2 * kv_width, config.qkv_bias, rngs)

    def project(self, x: Hidden) -> tuple[Hidden, Hidden, Hidden]:
        queries, keys, values = jnp.split(self.qkv_proj(x), self.ends, axis=-1)
        return queries, keys, values


class FeedForward(nnx.Module):
    """``down(act(gate) * up)`` with a fused projection of gate and up."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.activation = ACTIVATIONS[config.hidden_act]
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=False, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(inner, hidden, bias=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: Hidden) -> Hidden:
        gate, up = jnp.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(self.activation(gate) * up)


class Block(decoder.Block):
    """One layer."""

    attention: ClassVar = Attention

    def make_feed_forward(self, config: DecoderConfig, layer: int, rngs: nnx.Rngs) -> FeedForward:
        return FeedForward(config, rngs)


class Phi3(decoder.Decoder):
    """Phi-3 with its language-model head."""

    block: ClassVar = Block
    divided: ClassVar = {
        "embed_tokens": Divided.ROWS,
        # The outputs of the next two are fused: shards of them would not align with the parts.
        "qkv_proj": Divided.INPUTS,
        "gate_up_proj": Divided.INPUTS,
        "o_proj": Divided.ATTENDED,
        "down_proj": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }
