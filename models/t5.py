"""T5: an encoder that reads a text, and a decoder that attends to what it made of it.

Positions are told by a bias of the distance between two tokens; scores are not divided (Raffel et
al., arXiv:1910.10683; version 1.1: gated feed-forward layers, arXiv:2002.05202). Attributes bear
the names that Transformers gives its tensors.

The keys and values that the decoder's layers attend to across are a cache of their own, the
``source``, which is filled once: any codec and any place serve it.
"""

from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.attention.mask import Bias
from kvjax.cache.state import KVCache
from kvjax.core.compat import flax_0_12_list
from kvjax.core.typing import Counts
from kvjax.generation.encoder import NOT_ENCODED

from .config_families import T5Config
from .frame import Frame, Layer, LayerContext, Logits, Rotary
from .layers import Embedding, Hidden, merge_heads
from .sharding import Divided
from .t5_parts import CrossAttentionPart, FeedForwardPart, SelfAttentionPart, norm

PIECE = 512
"""Queries of a long text that the encoder takes together."""


class Aside(NamedTuple):
    """The ``bias`` of the decoder's own attention, and the ``source`` that it attends to across."""

    bias: Bias
    source: KVCache


class EncoderBlock(nnx.Module):
    """One layer of the encoder: every token sees every other."""

    def __init__(self, config: T5Config, layer: int, *, rngs: nnx.Rngs):
        self.layer = flax_0_12_list(
            [
                SelfAttentionPart(config, biased=layer == 0, rngs=rngs),
                FeedForwardPart(config, rngs=rngs),
            ]
        )

    def __call__(self, x: Hidden, bias: Bias, lengths: Counts) -> Hidden:
        parts: Any = self.layer
        own, feed = parts
        attention, normed = own.SelfAttention, own.layer_norm(x)
        queries = attention.queries(normed)
        keys, values = attention.keys_values(normed)
        x = x + attention.o(merge_heads(_each_sees_all(queries, keys, values, bias, lengths)))
        return feed(x)


def _each_sees_all(
    queries: Array, keys: Array, values: Array, bias: Bias, lengths: Counts
) -> Float[Array, "batch heads new head_dim"]:
    """Attention in which every query sees every real token; many queries are taken in pieces."""
    new = queries.shape[2]
    places = jnp.arange(new, dtype=jnp.int32)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def mixed(piece: tuple[Array, Array]) -> Array:
        some, at = piece
        return jax.nn.dot_product_attention(
            some.swapaxes(1, 2), keys, values, bias=bias(at[None], places[None]), scale=1.0,
            key_value_seq_lengths=lengths,
        ).swapaxes(1, 2)  # fmt: skip

    if new <= PIECE or new % PIECE:
        return mixed((queries, places))
    batch, heads, _, head_dim = queries.shape
    pieces = queries.reshape(batch, heads, -1, PIECE, head_dim).transpose(2, 0, 1, 3, 4)
    found = lax.map(mixed, (pieces, places.reshape(-1, PIECE)))
    return found.transpose(1, 2, 0, 3, 4).reshape(queries.shape)


class DecoderBlock(nnx.Module):
    """One layer of the decoder."""

    def __init__(self, config: T5Config, layer: int, *, rngs: nnx.Rngs):
        self.number = layer
        self.layer = flax_0_12_list(
            [
                SelfAttentionPart(config, biased=layer == 0, rngs=rngs),
                CrossAttentionPart(config, rngs=rngs),
                FeedForwardPart(config, rngs=rngs),
            ]
        )

    def __call__(self, x: Hidden, context: LayerContext) -> tuple[Hidden, LayerContext]:
        parts: Any = self.layer
        own, across, feed = parts
        attention, normed = own.SelfAttention, own.layer_norm(x)
        keys, values = attention.keys_values(normed)
        mixed, context = context.attend(
            self.number, attention.queries(normed), keys, values, scale=1.0, bias=context.aside.bias
        )
        x = across(x + attention.o(mixed), self.number, context.aside.source)
        return feed(x), context


class Stack(nnx.Module):
    """The layers of one side, and the norm behind them."""

    def __init__(self, config: T5Config, block: type[Any], layers: int, *, rngs: nnx.Rngs):
        self.block = flax_0_12_list(block(config, layer, rngs=rngs) for layer in range(layers))
        self.final_layer_norm = norm(config)

    def bias(self, *, both_ways: bool) -> Bias:
        first: Any = self.block[0]
        return first.layer[0].SelfAttention.bias(both_ways=both_ways)


class T5(Frame):
    """T5 with its language-model head: the frame is the decoder's."""

    config: T5Config
    divided: ClassVar = {
        "shared": Divided.ROWS,
        "q": Divided.QUERIES,
        "k": Divided.HEADS,
        "v": Divided.HEADS,
        "o": Divided.MIXTURES,
        "wi": Divided.OUTPUTS,
        "wi_0": Divided.OUTPUTS,
        "wi_1": Divided.OUTPUTS,
        "wo": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        if config.dtype == "float16":
            raise ValueError(
                "dtype is float16, which can't hold what T5's layers give: load it in bfloat16 or "
                "float32"
            )
        self.config = config
        size = config.vocab_size, config.hidden_size
        self.shared = Embedding(*size, dtype=config.dtype, rngs=rngs)
        self.encoder = Stack(config, EncoderBlock, config.encoder_layers, rngs=rngs)
        self.decoder = Stack(config, DecoderBlock, config.num_hidden_layers, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def read(self, tokens: Int[Array, "batch new"], lengths: Counts, source: KVCache) -> KVCache:
        """The encoder's one pass over a text: keys and values of each of the decoder's layers, in
        the empty cache ``source``."""
        x, bias = self.shared(tokens), self.encoder.bias(both_ways=True)
        for block in self.encoder.block:
            x = block(x, bias, lengths)
        x = self.encoder.final_layer_norm(x)
        for number, block in enumerate(self.decoder.block):
            keys, values = block.layer[1].EncDecAttention.keys_values(x)
            source = kvjax.append(source, number, keys, values, lengths=lengths)
        return kvjax.advance(source, tokens.shape[1])

    def rotary(self, reach: int, limit: int) -> Rotary:
        return (None,) * self.config.num_hidden_layers

    def embed(self, tokens: Int[Array, "batch new"], context: LayerContext) -> Hidden:
        return self.shared(tokens)

    def aside(self, tokens: Int[Array, "batch new"], x: Hidden, source: KVCache | None) -> Aside:
        if source is None:
            raise ValueError(NOT_ENCODED)
        if tokens.shape[0] % source.batch:
            raise ValueError(
                f"the encoder has read {source.batch} texts, and this call has {tokens.shape[0]} "
                "row(s): give as many of each"
            )
        return Aside(self.decoder.bias(both_ways=False), source)

    def layers(self) -> Iterable[Layer]:
        return self.decoder.block

    def logits(self, x: Hidden) -> Logits:
        x = self.decoder.final_layer_norm(x)
        if self.config.scale_outputs:
            x = x * jnp.asarray(self.config.hidden_size**-0.5, x.dtype)
        return (self.lm_head or self.shared).logits(x)
