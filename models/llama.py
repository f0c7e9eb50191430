"""The Llama family: llama, mistral, qwen2 (biased projections), qwen3 (normed heads).

Pre-norm blocks of grouped-query attention with rotary positions and a gated feed-forward layer
(Touvron et al., arXiv:2302.13971; Jiang et al., arXiv:2310.06825; Yang et al., arXiv:2407.10671).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.core.typing import Counts
from kvjax.attention.attending import self_attend
from kvjax.cache.state import KVCache
from kvjax.core.rotary import RotaryTable

from .config import LlamaConfig
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
from .sharding import Divided

DIVIDED = {
    "embed_tokens": Divided.ROWS,
    "q_proj": Divided.QUERIES,
    "k_proj": Divided.HEADS,
    "v_proj": Divided.HEADS,
    "o_proj": Divided.MIXTURES,
    "gate_proj": Divided.OUTPUTS,
    "up_proj": Divided.OUTPUTS,
    "down_proj": Divided.INPUTS,
    "lm_head": Divided.ROWS,
}
"""What devices of a mesh divide; Gemma too."""

Hidden = Float[Array, "batch new hidden"]


class Attention(nnx.Module):
    """Grouped-query attention of one layer."""

    def __init__(self, config: LlamaConfig, layer: int, *, rngs: nnx.Rngs):
        self.config, self.layer = config, layer
        hidden, width = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim

        def linear(fan_in: int, fan_out: int, bias: bool) -> Linear:
            return Linear(fan_in, fan_out, bias=bias, dtype=config.dtype, rngs=rngs)

        self.q_proj = linear(hidden, width, config.qkv_bias)
        self.k_proj = linear(hidden, kv_width, config.qkv_bias)
        self.v_proj = linear(hidden, kv_width, config.qkv_bias)
        self.o_proj = linear(width, hidden, config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, epsilon=config.rms_norm_eps, dtype=config.dtype)
            self.k_norm = RMSNorm(config.head_dim, epsilon=config.rms_norm_eps, dtype=config.dtype)

    def __call__(
        self,
        x: Hidden,
        cache: KVCache | None,
        rotary: RotaryTable,
        lengths: Counts | None,
    ) -> tuple[Hidden, KVCache | None]:
        config = self.config
        queries = split_heads(self.q_proj(x), config.num_attention_heads)
        keys = split_heads(self.k_proj(x), config.num_key_value_heads)
        values = split_heads(self.v_proj(x), config.num_key_value_heads)
        if config.qk_norm:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        window = config.windows[self.layer]
        if cache is None:
            mixed = self_attend(queries, keys, values, rotary=rotary, window=window)
        else:
            cache = kvjax.append(cache, self.layer, keys, values, rotary=rotary, lengths=lengths)
            mixed = kvjax.attend(
                queries, cache, self.layer, rotary=rotary, lengths=lengths, window=window
            )
        return self.o_proj(merge_heads(mixed)), cache


class Block(nnx.Module):
    """One layer: attention, then feed-forward, each normed before and added after."""

    def __init__(self, config: LlamaConfig, layer: int, *, rngs: nnx.Rngs):
        def norm() -> RMSNorm:
            return RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=config.dtype)

        self.input_layernorm = norm()
        self.self_attn = Attention(config, layer, rngs=rngs)
        self.post_attention_layernorm = norm()
        self.mlp = FeedForward(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            bias=config.mlp_bias,
            dtype=config.dtype,
            rngs=rngs,
        )

    def __call__(
        self,
        x: Hidden,
        cache: KVCache | None,
        rotary: RotaryTable,
        lengths: Counts | None,
    ) -> tuple[Hidden, KVCache | None]:
        mixed, cache = self.self_attn(self.input_layernorm(x), cache, rotary, lengths)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Decoder(nnx.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs
        )
        self.layers = nnx.List(
            Block(config, layer, rngs=rngs) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, epsilon=config.rms_norm_eps, dtype=config.dtype)


class Llama(nnx.Module):
    """A decoder of the Llama family with its language-model head."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
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
        if cache is None:
            reach = max_len or tokens.shape[1]
            limit = max(reach, tokens.shape[1])
        else:
            reach, limit = cache.reach, cache.max_len
        # Once for all layers: each array made of a numpy table is a constant of the program.
        rotary = jax.tree.map(jnp.asarray, model_rotary(self.config, reach, limit))
        x = on_every_device(self.model.embed_tokens(tokens), cache)
        for block in self.model.layers:
            x, cache = block(x, cache, rotary, lengths)
            x = on_every_device(x, cache)
        if cache is not None:
            cache = kvjax.advance(cache, tokens.shape[1], lengths)
        if last_only:
            x = last_real(x, lengths)
        head = self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.logits(self.model.norm(x)).astype(jnp.float32), cache
