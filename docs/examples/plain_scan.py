"""A decoder in plain JAX, with stacked parameters and ``lax.scan``.

``# cache`` marks the lines that the cache added or changed. ``# before:`` shows an original line.
"""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

VOCAB, WIDTH, HEADS, KV, DIM, LAYERS = 97, 64, 4, 2, 16, 3
TABLE = kvjax.rotary_table(10000.0 ** (-np.arange(0, DIM, 2) / DIM))
CONFIG = {
    "num_hidden_layers": LAYERS, "num_key_value_heads": KV, "head_dim": DIM, "vocab_size": VOCAB,
    "stacked": True,
}  # fmt: skip
SHAPES = {
    "norm_1": (WIDTH,), "norm_2": (WIDTH,), "in": (WIDTH, (HEADS + 2 * KV) * DIM),
    "out": (HEADS * DIM, WIDTH), "up": (WIDTH, 128), "down": (128, WIDTH),
}  # fmt: skip


def make(seed: int = 0):
    """Random parameters; those of the layers are stacked."""
    keys = jax.random.split(jax.random.key(seed), len(SHAPES) + 1)
    layers = {
        name: jax.random.normal(key, (LAYERS, *shape)) / np.sqrt(shape[0])
        for key, (name, shape) in zip(keys[1:], SHAPES.items(), strict=True)
    }
    return {"embed": jax.random.normal(keys[0], (VOCAB, WIDTH)), "layers": layers}


def norm(x):
    """By the root of the mean square, arXiv:1910.07467."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def block(carry, weights_and_number):
    """A layer: attention, then feed-forward, each normed before and added after."""
    weights, layer = weights_and_number
    # before: x = carry
    x, call = carry  # cache
    new = weights["norm_1"] * norm(x) @ weights["in"]
    heads = new.reshape(*x.shape[:2], -1, DIM).swapaxes(1, 2)
    queries, keys, values = jnp.split(heads, [HEADS, HEADS + KV], axis=1)
    # before: mixed = kvjax.self_attend(queries, keys, values, rotary=TABLE)
    mixed, call = call.attend(layer, queries, keys, values, rotary=TABLE)  # cache
    x = x + mixed.swapaxes(1, 2).reshape(*x.shape[:2], -1) @ weights["out"]
    x = x + jax.nn.gelu(weights["norm_2"] * norm(x) @ weights["up"]) @ weights["down"]
    # before: return x, None
    return (x, call), None  # cache


# before: def apply(params, tokens):
def apply(params, tokens, cache, lengths):  # cache
    """Tokens to logits."""
    layers = params["layers"], jnp.arange(LAYERS)
    # before: x, _ = jax.lax.scan(block, params["embed"][tokens], layers)
    begun = params["embed"][tokens], kvjax.step(cache, tokens, lengths=lengths)  # cache
    (x, call), _ = jax.lax.scan(block, begun, layers)  # cache
    logits = norm(x) @ params["embed"].T
    # before: return logits
    return logits, call.done()  # cache


def language_model(seed: int = 0):
    """The model, for ``kvjax.generate``."""
    return kvjax.language_model(apply, CONFIG, make(seed))  # cache


if __name__ == "__main__":
    prompts = [[1, 2, 3], [4, 5, 6, 7]]
    print(kvjax.generate(language_model(), prompts, max_new_tokens=16, cache="static").tokens)
