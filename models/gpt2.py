"""GPT-2: learned positions, biases everywhere, norms that centre.

Radford et al., "Language models are unsupervised multitask learners", 2019. Attributes bear the
names that Transformers gives its tensors; weights are [out, in] here, so ``load`` transposes them.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.cache.admission import positions_from
from kvjax.attention.attending import self_attend
from kvjax.cache.state import KVCache

from .config import GPT2Config
from .layers import (
    ACTIVATIONS,
    Embedding,
    LayerNorm,
    Linear,
    last_real,
    merge_heads,
    on_every_device,
    split_heads,
)
from .sharding import Divided

DIVIDED = {
    "wte": Divided.ROWS,
    # Its outputs are queries, keys and values, one behind the other: shares of them would cut
    # across all three.
    "c_attn": Divided.INPUTS,
    "c_fc": Divided.OUTPUTS,
    "c_proj": Divided.INPUTS,
    "lm_head": Divided.ROWS,
}
"""What devices of a mesh divide."""

Hidden = Float[Array, "batch new hidden"]


def _linear(config: GPT2Config, fan_in: int, fan_out: int, rngs: nnx.Rngs) -> Linear:
    return Linear(fan_in, fan_out, bias=True, dtype=config.dtype, rngs=rngs)


def _norm(config: GPT2Config) -> LayerNorm:
    return LayerNorm(config.hidden_size, epsilon=config.layer_norm_epsilon, dtype=config.dtype)


class Attention(nnx.Module):
    """Attention of one layer; queries, keys and values come from one projection."""

    def __init__(self, config: GPT2Config, layer: int, *, rngs: nnx.Rngs):
        self.heads, self.layer = config.num_attention_heads, layer
        self.scale = config.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scale /= layer + 1
        self.c_attn = _linear(config, config.hidden_size, 3 * config.hidden_size, rngs)
        self.c_proj = _linear(config, config.hidden_size, config.hidden_size, rngs)

    def __call__(
        self, x: Hidden, cache: KVCache | None, lengths: Int[Array, " batch"] | None
    ) -> tuple[Hidden, KVCache | None]:
        queries, keys, values = (
            split_heads(part, self.heads) for part in jnp.split(self.c_attn(x), 3, axis=-1)
        )
        if cache is None:
            mixed = self_attend(queries, keys, values, scale=self.scale)
        else:
            cache = kvjax.append(cache, self.layer, keys, values, lengths=lengths)
            mixed = kvjax.attend(queries, cache, self.layer, lengths=lengths, scale=self.scale)
        return self.c_proj(merge_heads(mixed)), cache


class FeedForward(nnx.Module):
    """``c_proj(act(c_fc(x)))``."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.activation = ACTIVATIONS[config.activation]
        self.c_fc = _linear(config, config.hidden_size, config.intermediate_size, rngs)
        self.c_proj = _linear(config, config.intermediate_size, config.hidden_size, rngs)

    def __call__(self, x: Hidden) -> Hidden:
        return self.c_proj(self.activation(self.c_fc(x)))


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each normed before and added after."""

    def __init__(self, config: GPT2Config, layer: int, *, rngs: nnx.Rngs):
        self.ln_1 = _norm(config)
        self.attn = Attention(config, layer, rngs=rngs)
        self.ln_2 = _norm(config)
        self.mlp = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: Hidden, cache: KVCache | None, lengths: Int[Array, " batch"] | None
    ) -> tuple[Hidden, KVCache | None]:
        mixed, cache = self.attn(self.ln_1(x), cache, lengths)
        x = x + mixed
        return x + self.mlp(self.ln_2(x)), cache


class Decoder(nnx.Module):
    """Embeddings of tokens and positions, layers, and the last norm."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        def embedding(count: int) -> Embedding:
            return Embedding(count, config.hidden_size, dtype=config.dtype, rngs=rngs)

        self.wte = embedding(config.vocab_size)
        self.wpe = embedding(config.max_position_embeddings)
        self.h = nnx.List(
            Block(config, layer, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.ln_f = _norm(config)


class GPT2(nnx.Module):
    """GPT-2 with its language-model head."""

    def __init__(self, config: GPT2Config, *, rngs: nnx.Rngs):
        self.config = config
        self.transformer = Decoder(config, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(
                config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs
            )

    def __call__(
        self,
        tokens: Int[Array, "batch new"],
        cache: KVCache | None,
        *,
        lengths: Int[Array, " batch"] | None,
        last_only: bool,
        max_len: int | None,
    ) -> tuple[Float[Array, "batch new vocab"], KVCache | None]:
        new, limit = tokens.shape[1], self.config.max_position_embeddings
        if cache is None and new > limit:
            raise ValueError(f"{new} tokens a row, but the model has only {limit} positions")
        positions = jnp.arange(new)[None] if cache is None else positions_from(cache.length, new)
        x = self.transformer.wte(tokens) + self.transformer.wpe(positions)
        x = on_every_device(x, cache)
        for block in self.transformer.h:
            x, cache = block(x, cache, lengths)
            x = on_every_device(x, cache)
        if cache is not None:
            cache = kvjax.advance(cache, new, lengths)
        if last_only:
            x = last_real(x, lengths)
        head = self.transformer.wte if self.config.tie_word_embeddings else self.lm_head
        return head.logits(self.transformer.ln_f(x)).astype(jnp.float32), cache
