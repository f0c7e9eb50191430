"""A decoder in Flax NNX, of ``nnx.MultiHeadAttention``.

``# cache`` marks the lines that the cache added or changed. ``# before:`` shows an original line.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import kvjax
from kvjax.adapters.nnx import as_function, attention_fn, positions

VOCAB, WIDTH, HEADS, LAYERS, POSITIONS = 97, 64, 4, 3, 256
CONFIG = {
    "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS,
    "vocab_size": VOCAB, "position_limit": POSITIONS,
}  # fmt: skip


class Block(nnx.Module):
    """Attention, then feed-forward, each normed before and added after."""

    def __init__(self, layer: int, *, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            HEADS,
            WIDTH,
            attention_fn=attention_fn(layer),  # cache
            decode=False,
            rngs=rngs,
        )
        self.up, self.down = nnx.Linear(WIDTH, 128, rngs=rngs), nnx.Linear(128, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Decoder(nnx.Module):
    """Tokens to logits."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(POSITIONS, WIDTH, rngs=rngs)
        self.blocks = nnx.Sequential(*(Block(layer, rngs=rngs) for layer in range(LAYERS)))
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        # before: places = jnp.arange(tokens.shape[1])[None]
        places = positions(tokens)  # cache
        x, mask = self.tokens(tokens) + self.positions(places), nnx.make_causal_mask(tokens)
        for block in self.blocks.layers:
            x = block(x, mask)
        return jnp.asarray(self.tokens.attend(self.norm(x)))


def make(seed: int = 0) -> Decoder:
    """The model with random parameters."""
    return Decoder(rngs=nnx.Rngs(seed))


def language_model(seed: int = 0) -> kvjax.LanguageModel:
    """The same, for ``kvjax.generate``."""
    apply, params = as_function(make(seed))  # cache
    return kvjax.language_model(apply, CONFIG, params)  # cache


if __name__ == "__main__":
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    print(kvjax.generate(language_model(), prompts, max_new_tokens=16, cache="static").tokens)
