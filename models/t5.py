"""T5 (Raffel et al., arXiv:1910.10683): an encoder and a decoder with relative position biases.

Attributes have the same names as the tensors in Transformers.
"""

import math
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.attention.mask import Bias
from kvjax.cache.state import KVCache
from kvjax.core.compat import flax_0_12_list
from kvjax.core.typing import Counts
from kvjax.generation.encoder import NOT_ENCODED

from .config import T5Config
from .frame import Frame, Layer, LayerContext, Logits, Rotary
from .layers import (
    ACTIVATIONS,
    Divided,
    Embedding,
    Hidden,
    Linear,
    RMSNorm,
    merge_heads,
    split_heads,
)


def linear(config: T5Config, fan_in: int, fan_out: int, rngs: nnx.Rngs) -> Linear:
    return Linear(fan_in, fan_out, bias=False, dtype=config.dtype, rngs=rngs)


def norm(config: T5Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


class Attention(nnx.Module):
    """The projections of an attention layer. The first layer of a stack (``biased``) has the
    relative position biases that all layers of the stack use."""

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        self.config = config
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        self.q, self.k, self.v = (linear(config, hidden, width, rngs) for _ in range(3))
        self.o = linear(config, width, hidden, rngs)
        if biased:
            self.relative_attention_bias = Embedding(
                config.relative_attention_num_buckets,
                config.num_attention_heads,
                dtype=config.dtype,
                rngs=rngs,
            )

    def queries(self, x: Hidden) -> Array:
        """Compute queries, [batch, heads, new, head_dim]."""
        return split_heads(self.q(x), self.config.num_attention_heads)

    def keys_values(self, x: Hidden) -> tuple[Array, Array]:
        """Compute keys and values, each [batch, heads, new, head_dim]."""
        heads = self.config.num_attention_heads
        return split_heads(self.k(x), heads), split_heads(self.v(x), heads)

    def bias(self, *, both_ways: bool) -> Bias:
        """Return a function of query and key positions that computes the bias of the scores,
        float32[batch, heads, new, n]."""
        config = self.config
        buckets = buckets_of(
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            both_ways=both_ways,
        )
        # One entry per distance. Larger distances use the entry of the largest one.
        values = self.relative_attention_bias.weight[...].astype(jnp.float32)[buckets]

        return jax.tree_util.Partial(_of_distances, values)


def _of_distances(values: Array, queries: Array, keys: Array) -> Array:
    """Look up ``values`` [2 * farthest + 1, heads] by distance. Returns float32[batch, heads, new,
    n]."""
    farthest = values.shape[0] // 2
    distance = keys[:, None, :] - queries[:, :, None]
    places = jnp.clip(distance, -farthest, farthest) + farthest
    return jnp.moveaxis(values[places], -1, 1)


def buckets_of(buckets: int, farthest: int, *, both_ways: bool) -> np.ndarray:
    """Return the relative position bucket of each distance from ``-farthest`` to ``farthest``,
    int32[2 * farthest + 1]. The distance is positive if the key is after the query.

    Half of the buckets cover a single distance each. The others cover ranges that grow
    logarithmically. With ``both_ways``, half of all buckets are for keys after the query. Otherwise
    attention is causal, and such keys have distance 0.
    """
    distance = np.arange(-farthest, farthest + 1)
    first = np.zeros_like(distance)
    if both_ways:
        buckets //= 2
        first = np.where(distance > 0, buckets, 0)
        distance = np.abs(distance)
    else:
        distance = np.maximum(-distance, 0)
    alone = buckets // 2
    with np.errstate(divide="ignore"):
        growth = np.log(distance.astype(np.float32) / np.float32(alone))
    growth = growth / np.float32(math.log(farthest / alone)) * np.float32(buckets - alone)
    wide = np.minimum(alone + np.maximum(growth, 0).astype(np.int32), buckets - 1)
    return (first + np.where(distance < alone, distance, wide)).astype(np.int32)


class FeedForward(nnx.Module):
    """``wo(act(wi(x)))``, or if gated, ``wo(act(wi_0(x)) * wi_1(x))``."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation, self.gated = ACTIVATIONS[config.activation], config.is_gated_act
        if config.is_gated_act:
            self.wi_0 = linear(config, hidden, inner, rngs)
            self.wi_1 = linear(config, hidden, inner, rngs)
        else:
            self.wi = linear(config, hidden, inner, rngs)
        self.wo = linear(config, inner, hidden, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        if self.gated:
            return self.wo(self.activation(self.wi_0(x)) * self.wi_1(x))
        return self.wo(self.activation(self.wi(x)))


class SelfAttentionPart(nnx.Module):
    """A layer's self-attention, and the norm before it."""

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        self.SelfAttention = Attention(config, biased=biased, rngs=rngs)
        self.layer_norm = norm(config)


class CrossAttentionPart(nnx.Module):
    """A layer's cross-attention to the source, and the norm before it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.EncDecAttention = Attention(config, biased=False, rngs=rngs)
        self.layer_norm = norm(config)

    def __call__(self, x: Hidden, layer: int, source: KVCache) -> Hidden:
        queries = self.EncDecAttention.queries(self.layer_norm(x))
        rows, heads, new, head_dim = queries.shape
        # Consecutive rows that share a source are folded into one row with more queries.
        each = rows // source.batch
        queries = queries.reshape(source.batch, each, heads, new, head_dim).swapaxes(1, 2)
        queries = queries.reshape(source.batch, heads, each * new, head_dim)
        attention_output = kvjax.attend(queries, source, layer, scale=1.0, causal=False)
        attention_output = attention_output.reshape(
            source.batch, heads, each, new, head_dim
        ).swapaxes(1, 2)
        return x + self.EncDecAttention.o(
            merge_heads(attention_output.reshape(rows, heads, new, head_dim))
        )


class FeedForwardPart(nnx.Module):
    """A layer's feed-forward module, and the norm before it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.DenseReluDense = FeedForward(config, rngs=rngs)
        self.layer_norm = norm(config)

    def __call__(self, x: Hidden) -> Hidden:
        return x + self.DenseReluDense(self.layer_norm(x))


PIECE = 512
"""The number of queries that the encoder processes together in long texts."""


class LayerInputs(NamedTuple):
    """The ``bias`` of the decoder's self-attention, and the ``source`` of its cross-attention."""

    bias: Bias
    source: KVCache


class EncoderBlock(nnx.Module):
    """One layer of the encoder, with bidirectional attention."""

    def __init__(self, config: T5Config, layer: int, *, rngs: nnx.Rngs):
        self.layer = flax_0_12_list(
            [
                SelfAttentionPart(config, biased=layer == 0, rngs=rngs),
                FeedForwardPart(config, rngs=rngs),
            ]
        )

    def __call__(self, x: Hidden, bias: Bias, lengths: Counts) -> Hidden:
        own, feed = self.layer
        attention, normed = own.SelfAttention, own.layer_norm(x)
        queries = attention.queries(normed)
        keys, values = attention.keys_values(normed)
        x = x + attention.o(
            merge_heads(_bidirectional_attention(queries, keys, values, bias, lengths))
        )
        return feed(x)


def _bidirectional_attention(
    queries: Array, keys: Array, values: Array, bias: Bias, lengths: Counts
) -> Float[Array, "batch heads new head_dim"]:
    """Compute bidirectional attention over the real tokens. Long texts are processed in pieces of
    ``PIECE`` queries."""
    new = queries.shape[2]
    places = jnp.arange(new, dtype=jnp.int32)
    keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)

    def attend_piece(piece: tuple[Array, Array]) -> Array:
        some, at = piece
        return jax.nn.dot_product_attention(
            some.swapaxes(1, 2), keys, values, bias=bias(at[None], places[None]), scale=1.0,
            key_value_seq_lengths=lengths,
        ).swapaxes(1, 2)  # fmt: skip

    if new <= PIECE or new % PIECE:
        return attend_piece((queries, places))
    batch, heads, _, head_dim = queries.shape
    pieces = queries.reshape(batch, heads, -1, PIECE, head_dim).transpose(2, 0, 1, 3, 4)
    output = lax.map(attend_piece, (pieces, places.reshape(-1, PIECE)))
    return output.transpose(1, 2, 0, 3, 4).reshape(queries.shape)


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
        own, across, feed = self.layer
        attention, normed = own.SelfAttention, own.layer_norm(x)
        keys, values = attention.keys_values(normed)
        attention_output, context = context.attend(
            self.number,
            attention.queries(normed),
            keys,
            values,
            scale=1.0,
            bias=context.extra.bias,
        )
        x = across(x + attention.o(attention_output), self.number, context.extra.source)
        return feed(x), context


class Stack(nnx.Module):
    """The layers of the encoder or decoder, and the final norm."""

    def __init__(
        self, config: T5Config, block: Callable[..., nnx.Module], layers: int, *, rngs: nnx.Rngs
    ):
        self.block = flax_0_12_list(block(config, layer, rngs=rngs) for layer in range(layers))
        self.final_layer_norm = norm(config)

    def bias(self, *, both_ways: bool) -> Bias:
        return self.block[0].layer[0].SelfAttention.bias(both_ways=both_ways)


class T5(Frame):
    """T5 with its language-model head. ``Frame`` runs the decoder, and ``read`` runs the
    encoder."""

    config: T5Config
    divided: ClassVar = {
        "shared": Divided.ROWS,
        "q": Divided.QUERIES,
        "k": Divided.HEADS,
        "v": Divided.HEADS,
        "o": Divided.ATTENDED,
        "wi": Divided.OUTPUTS,
        "wi_0": Divided.OUTPUTS,
        "wi_1": Divided.OUTPUTS,
        "wo": Divided.INPUTS,
        "lm_head": Divided.ROWS,
    }

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        if config.dtype == "float16":
            raise ValueError(
                "dtype is float16, but T5's activations exceed its range: load the model in "
                "bfloat16 or float32"
            )
        self.config = config
        size = config.vocab_size, config.hidden_size
        self.shared = Embedding(*size, dtype=config.dtype, rngs=rngs)
        self.encoder = Stack(config, EncoderBlock, config.num_encoder_layers, rngs=rngs)
        self.decoder = Stack(config, DecoderBlock, config.num_hidden_layers, rngs=rngs)
        super().__init__(config, rngs=rngs)

    def read(self, tokens: Int[Array, "batch new"], lengths: Counts, source: KVCache) -> KVCache:
        """Run the encoder, and append the cross-attention keys and values of each decoder layer to
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

    def extra(
        self, tokens: Int[Array, "batch new"], x: Hidden, source: KVCache | None
    ) -> LayerInputs:
        if source is None:
            raise ValueError(NOT_ENCODED)
        if tokens.shape[0] % source.batch:
            raise ValueError(
                f"the encoder has read {source.batch} text(s), but this call has "
                f"{tokens.shape[0]} row(s): pass the same number of rows for each text"
            )
        return LayerInputs(self.decoder.bias(both_ways=False), source)

    def layers(self) -> Iterable[Layer]:
        return self.decoder.block

    def logits(self, x: Hidden) -> Logits:
        x = self.decoder.final_layer_norm(x)
        if self.config.scale_decoder_outputs:
            x = x * jnp.asarray(self.config.hidden_size**-0.5, x.dtype)
        return (self.lm_head or self.shared).logits(x)
