"""A decoder in Equinox, of ``eqx.nn.MultiheadAttention``.

``# cache`` marks the lines that the cache added or changed. ``# before:`` shows an original line.
"""

import equinox as eqx
import jax
import jax.numpy as jnp

import kvjax
from kvjax.adapters.equinox import as_function, attend

VOCAB, WIDTH, HEADS, LAYERS, POSITIONS = 97, 64, 4, 3, 256
CONFIG = {
    "num_hidden_layers": LAYERS, "num_key_value_heads": HEADS, "head_dim": WIDTH // HEADS,
    "vocab_size": VOCAB, "position_limit": POSITIONS,
}  # fmt: skip


def of_each(layer, x):
    """A layer of a token's features, of all tokens of all rows."""
    return jax.vmap(jax.vmap(layer))(x)


def causal(attention, x):
    """What every row's tokens see, without a cache."""
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    return jax.vmap(lambda row: attention(row, row, row, mask=mask))(x)


class Block(eqx.Module):
    """Attention, then feed-forward, each normed before and added after."""

    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    feed_forward: eqx.nn.MLP

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.norm_1, self.norm_2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.feed_forward = eqx.nn.MLP(WIDTH, WIDTH, 128, 1, activation=jax.nn.gelu, key=second)

    # before: def __call__(self, x):
    def __call__(self, x, call, layer):  # cache
        normed = of_each(self.norm_1, x)
        # before: mixed = causal(self.attention, normed)
        mixed, call = attend(self.attention, normed, call, layer)  # cache
        x = x + mixed
        x = x + of_each(self.feed_forward, of_each(self.norm_2, x))
        # before: return x
        return x, call  # cache


class Decoder(eqx.Module):
    """Tokens to logits."""

    tokens: jax.Array
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm

    def __init__(self, key):
        first, second, *others = jax.random.split(key, LAYERS + 2)
        self.tokens = jax.random.normal(first, (VOCAB, WIDTH))
        self.places = jax.random.normal(second, (POSITIONS, WIDTH))
        self.blocks, self.norm = [Block(each) for each in others], eqx.nn.LayerNorm(WIDTH)

    # before: def __call__(self, tokens):
    def __call__(self, tokens, cache=None, lengths=None):  # cache
        # before: x = self.tokens[tokens] + self.places[jnp.arange(tokens.shape[1])]
        call = kvjax.step(cache, tokens, lengths=lengths)  # cache
        x = self.tokens[tokens] + self.places[call.positions]  # cache
        for layer, block in enumerate(self.blocks):
            # before: x = block(x)
            x, call = block(x, call, layer)  # cache
        logits = of_each(self.norm, x) @ self.tokens.T
        # before: return logits
        return logits, call.done()  # cache


def make(seed: int = 0):
    """The model with random parameters."""
    return Decoder(jax.random.key(seed))


def language_model(seed: int = 0):
    """The same, for ``kvjax.generate``."""
    apply, params = as_function(make(seed))  # cache
    return kvjax.language_model(apply, CONFIG, params)  # cache


if __name__ == "__main__":
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    print(kvjax.generate(language_model(), prompts, max_new_tokens=16, cache="static").tokens)
