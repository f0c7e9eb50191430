"""A decoder in Flax Linen whose layers are scanned by ``nn.scan``.

``# cache`` marks the lines that the cache added or changed. ``# before:`` shows an original line.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.adapters.linen import as_function

VOCAB, WIDTH, HEADS, KV, DIM, LAYERS = 97, 64, 4, 2, 16, 3
TABLE = kvjax.rotary_table(10000.0 ** (-np.arange(0, DIM, 2) / DIM))
CONFIG = {
    "num_hidden_layers": LAYERS, "num_key_value_heads": KV, "head_dim": DIM, "vocab_size": VOCAB,
    "stacked": True,
}  # fmt: skip


class Block(nn.Module):
    """Grouped-query attention with rotary positions, then a gated feed-forward layer, each normed
    before and added after."""

    @nn.compact
    def __call__(self, carry, layer):
        def heads(count, name):
            return nn.DenseGeneral((count, DIM), use_bias=False, name=name)(normed).swapaxes(1, 2)

        # before: x = carry
        x, call = carry  # cache
        normed = nn.RMSNorm()(x)
        queries, keys, values = heads(HEADS, "query"), heads(KV, "key"), heads(KV, "value")
        # before: mixed = kvjax.self_attend(queries, keys, values, rotary=TABLE)
        mixed, call = call.attend(layer, queries, keys, values, rotary=TABLE)  # cache
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False)(mixed.swapaxes(1, 2))
        normed = nn.RMSNorm()(x)
        gate, up = nn.Dense(128, use_bias=False)(normed), nn.Dense(128, use_bias=False)(normed)
        x = x + nn.Dense(WIDTH, use_bias=False)(nn.silu(gate) * up)
        # before: return x, None
        return (x, call), None  # cache


class Decoder(nn.Module):
    """Tokens to logits."""

    @nn.compact
    # before: def __call__(self, tokens):
    def __call__(self, tokens, cache=None, lengths=None):  # cache
        embed = nn.Embed(VOCAB, WIDTH)
        layers = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            # That pass forgets in which memory arrays are, and so refuses caches on the host.
            check_constancy_invariants=False,  # cache
        )()
        # before: x, _ = layers(embed(tokens), jnp.arange(LAYERS))
        begun = embed(tokens), kvjax.step(cache, tokens, lengths=lengths)  # cache
        (x, call), _ = layers(begun, jnp.arange(LAYERS))  # cache
        logits = embed.attend(nn.RMSNorm()(x))
        # before: return logits
        return logits, call.done()  # cache


def make(seed: int = 0):
    """The model, and random parameters."""
    module = Decoder()
    return module, module.init(jax.random.key(seed), jnp.zeros((1, 4), jnp.int32))


def language_model(seed: int = 0):
    """The same, for ``kvjax.generate``."""
    module, params = make(seed)
    return kvjax.language_model(as_function(module), CONFIG, params)  # cache


if __name__ == "__main__":
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    print(kvjax.generate(language_model(), prompts, max_new_tokens=16, cache="static").tokens)
