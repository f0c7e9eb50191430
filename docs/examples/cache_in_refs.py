"""A cache in ``jax.new_ref``s: a jitted step updates it in place, without donation."""

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax import models


def make_step(lm):
    """A jitted step (params, tokens, refs) to logits [batch, vocab]; it writes to the refs."""

    @jax.jit
    def step(params, tokens, refs):
        cache = jax.tree.map(lambda ref: ref[...], refs)
        logits, cache = lm.apply(params, tokens, cache, last_only=True)
        jax.tree.map(write, refs, cache)
        return logits[:, 0]

    return step


def write(ref, x):
    """Put an array in the place of a ref's."""
    ref[...] = x


def decode(lm, refs, tokens, steps):
    """Logits [steps, batch, vocab] of a greedy loop after prompts [batch, new]."""
    step, found = make_step(lm), []
    for _ in range(steps):
        logits = step(lm.params, tokens, refs)
        tokens = jnp.argmax(logits, axis=-1)[:, None]
        found.append(np.asarray(logits))
    return np.stack(found)


def main():
    lm = models.load()
    cache = kvjax.init_cache(lm.config, "static", batch=1, max_len=64)
    refs = jax.tree.map(jax.new_ref, cache)  # copies it once
    prompts = lm.encode(["Once upon a time"])[0]
    print(decode(lm, refs, prompts, steps=8).argmax(-1)[:, 0].tolist())
    print(int(refs.length[0]), "tokens are in the cache")  # length is a ref, too


if __name__ == "__main__":
    main()
