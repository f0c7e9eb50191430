"""The Gemma family: gemma2 (capped scores and logits), gemma3_text (normed heads, two bases).

Blocks of grouped-query attention and a gated feed-forward layer, each normed before and after;
layers with a window alternate with layers that see everything, and may have rotary positions of
their own (Gemma 2, arXiv:2408.00118; Gemma 3, arXiv:2503.19786). Norms scale by ``1 + weight``,
embeddings by the root of their width.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.core.typing import Counts
from kvjax.attention.attending import self_attend
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable

from .config import GemmaConfig
from .layers import (
    Embedding,
    FeedForward,
    Linear,
    RMSNorm,
    last_real,
    merge_heads,
    on_every_device,
    split_heads,
)
from .rope import model_rotary

Hidden = Float[Array, "batch new hidden"]


def _norm(config: GemmaConfig, features: int) -> RMSNorm:
    return RMSNorm(features, epsilon=config.rms_norm_eps, dtype=config.dtype, offset=1.0)


class Attention(nnx.Module):
    """Grouped-query attention of one layer, scaled and capped as its config says."""

    def __init__(self, config: GemmaConfig, layer: int, *, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim

        def linear(fan_in: int, fan_out: int) -> Linear:
            return Linear(
                fan_in, fan_out, bias=config.attention_bias, dtype=config.dtype, rngs=rngs
            )

        self.q_proj = linear(hidden, width)
        self.k_proj = linear(hidden, kv_width)
        self.v_proj = linear(hidden, kv_width)
        self.o_proj = linear(width, hidden)
        if config.qk_norm:
            self.q_norm = _norm(config, config.head_dim)
            self.k_norm = _norm(config, config.head_dim)

    def __call__(
        self,
        x: Hidden,
        cache: KVCache | None,
        rotary: RotaryTable,
        lengths: Counts | None,
    ) -> tuple[Hidden, KVCache | None]:
        config, layer = self.config, self.layer
        queries = split_heads(self.q_proj(x), config.num_attention_heads)
        keys = split_heads(self.k_proj(x), config.num_key_value_heads)
        values = split_heads(self.v_proj(x), config.num_key_value_heads)
        if config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        window, soft_cap = config.windows[layer], config.attn_logit_softcapping
        scale = config.query_pre_attn_scalar**-0.5
        if cache is None:
            mixed = self_attend(
                queries, keys, values, rotary=rotary, scale=scale, window=window, soft_cap=soft_cap
            )
        else:
            cache = kvjax.append(cache, layer, keys, values, rotary=rotary, lengths=lengths)
            mixed = kvjax.attend(
                queries, cache, layer, rotary=rotary, lengths=lengths, scale=scale, window=window,
                soft_cap=soft_cap,
            )  # fmt: skip
        return self.o_proj(merge_heads(mixed)), cache


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each normed before and after, then added."""

    def __init__(self, config: GemmaConfig, layer: int, *, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, config.hidden_size)
        self.self_attn = Attention(config, layer, rngs=rngs)
        self.post_attention_layernorm = _norm(config, config.hidden_size)
        self.pre_feedforward_layernorm = _norm(config, config.hidden_size)
        self.mlp = FeedForward(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_activation,
            bias=False,
            dtype=config.dtype,
            rngs=rngs,
        )
        self.post_feedforward_layernorm = _norm(config, config.hidden_size)

    def __call__(
        self,
        x: Hidden,
        cache: KVCache | None,
        rotary: RotaryTable,
        lengths: Counts | None,
    ) -> tuple[Hidden, KVCache | None]:
        mixed, cache = self.self_attn(self.input_layernorm(x), cache, rotary, lengths)
        x = x + self.post_attention_layernorm(mixed)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed), cache


class Decoder(nnx.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs
        )
        self.layers = nnx.List(
            Block(config, layer, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.norm = _norm(config, config.hidden_size)


class Gemma(nnx.Module):
    """A decoder of the Gemma family with its language-model head."""

    def __init__(self, config: GemmaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.model = Decoder(config, rngs=rngs)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(
                config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs
            )

    def __call__(
        self,
        tokens: Int[Array, "batch new"],
        cache: KVCache | None,
        *,
        lengths: Counts | None,
        last_only: bool,
        max_len: int | None,
    ) -> tuple[Float[Array, "batch new vocab"], KVCache | None]:
        config = self.config
        if cache is None:
            reach = max_len or tokens.shape[1]
            limit = max(reach, tokens.shape[1])
        else:
            reach, limit = cache.reach, cache.max_len
        # Once for all layers: each array made of a numpy table is a constant of the program.
        everywhere = jax.tree.map(jnp.asarray, model_rotary(config, reach, limit))
        nearby = everywhere
        if config.local_rope != config.rope:
            local = replace(config, rope=config.local_rope)
            nearby = jax.tree.map(jnp.asarray, model_rotary(local, reach, limit))
        x = self.model.embed_tokens(tokens)
        # The root is rounded to what the model computes in, as it was in training.
        x = x * jnp.float32(config.hidden_size**0.5).astype(x.dtype)
        x = on_every_device(x, cache)
        for block, window in zip(self.model.layers, config.windows, strict=True):
            x, cache = block(x, cache, everywhere if window is None else nearby, lengths)
            x = on_every_device(x, cache)
        if cache is not None:
            cache = kvjax.advance(cache, tokens.shape[1], lengths)
        if last_only:
            x = last_real(x, lengths)
        head = self.model.embed_tokens if config.tie_word_embeddings else self.lm_head
        logits = head.logits(self.model.norm(x)).astype(jnp.float32)
        if (cap := config.final_logit_softcapping) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits, cache
