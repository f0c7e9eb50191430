"""What a layer of T5 is made of. Attributes bear the names that Transformers gives its tensors."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

import kvjax
from kvjax.attention.mask import Bias
from kvjax.cache.state import KVCache

from .config_families import T5Config
from .layers import ACTIVATIONS, Embedding, Hidden, Linear, RMSNorm, merge_heads, split_heads


def linear(config: T5Config, fan_in: int, fan_out: int, rngs: nnx.Rngs) -> Linear:
    return Linear(fan_in, fan_out, bias=False, dtype=config.dtype, rngs=rngs)


def norm(config: T5Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


class Attention(nnx.Module):
    """Projections of one attention; the first layer of a stack has the biases of all of them."""

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        self.config = config
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        self.q, self.k, self.v = (linear(config, hidden, width, rngs) for _ in range(3))
        self.o = linear(config, width, hidden, rngs)
        if biased:
            self.relative_attention_bias = Embedding(
                config.buckets, config.num_attention_heads, dtype=config.dtype, rngs=rngs
            )

    def queries(self, x: Hidden) -> Array:
        """[batch, heads, new, head_dim]."""
        return split_heads(self.q(x), self.config.num_attention_heads)

    def keys_values(self, x: Hidden) -> tuple[Array, Array]:
        """Each [batch, heads, new, head_dim]."""
        heads = self.config.num_attention_heads
        return split_heads(self.k(x), heads), split_heads(self.v(x), heads)

    def bias(self, *, both_ways: bool) -> Bias:
        """float32 [batch, heads, new, n] of the positions of queries and of keys."""
        config = self.config
        buckets = buckets_of(config.buckets, config.max_distance, both_ways=both_ways)
        # Of each distance at most: what is farther has the farthest one's.
        values = self.relative_attention_bias.weight[...].astype(jnp.float32)[buckets]

        return jax.tree_util.Partial(_of_distances, values)


def _of_distances(values: Array, queries: Array, keys: Array) -> Array:
    """float32 [batch, heads, new, n], of ``values`` [2 * farthest + 1, heads] by distance."""
    farthest = values.shape[0] // 2
    distance = keys[:, None, :] - queries[:, :, None]
    places = jnp.clip(distance, -farthest, farthest) + farthest
    return jnp.moveaxis(values[places], -1, 1)


def buckets_of(buckets: int, farthest: int, *, both_ways: bool) -> np.ndarray:
    """Which bias a key has that is ``distance`` tokens ahead of its query, int32[2 * farthest + 1],
    of distances from ``-farthest`` on.

    Half of the buckets are of one distance each, the others of ever wider ranges. ``both_ways``:
    half of all are for keys ahead; else those count as no distance, and are not seen.
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
    """``wo(act(wi(x)))``, or with gates ``wo(act(wi_0(x)) * wi_1(x))``."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        hidden, inner = config.hidden_size, config.intermediate_size
        self.activation, self.gated = ACTIVATIONS[config.activation], config.gated
        if config.gated:
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
    """A layer's attention to its own text, and the norm before it."""

    def __init__(self, config: T5Config, *, biased: bool, rngs: nnx.Rngs):
        self.SelfAttention = Attention(config, biased=biased, rngs=rngs)
        self.layer_norm = norm(config)


class CrossAttentionPart(nnx.Module):
    """A layer's attention to the source, and the norm before it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.EncDecAttention = Attention(config, biased=False, rngs=rngs)
        self.layer_norm = norm(config)

    def __call__(self, x: Hidden, layer: int, source: KVCache) -> Hidden:
        queries = self.EncDecAttention.queries(self.layer_norm(x))
        rows, heads, new, head_dim = queries.shape
        # Rows one behind the other that go by the same text are more queries to it.
        each = rows // source.batch
        queries = queries.reshape(source.batch, each, heads, new, head_dim).swapaxes(1, 2)
        queries = queries.reshape(source.batch, heads, each * new, head_dim)
        mixed = kvjax.attend(queries, source, layer, scale=1.0, causal=False)
        mixed = mixed.reshape(source.batch, heads, each, new, head_dim).swapaxes(1, 2)
        return x + self.EncDecAttention.o(merge_heads(mixed.reshape(rows, heads, new, head_dim)))


class FeedForwardPart(nnx.Module):
    """A layer's feed-forward part, and the norm before it."""

    def __init__(self, config: T5Config, *, rngs: nnx.Rngs):
        self.DenseReluDense = FeedForward(config, rngs=rngs)
        self.layer_norm = norm(config)

    def __call__(self, x: Hidden) -> Hidden:
        return x + self.DenseReluDense(self.layer_norm(x))
