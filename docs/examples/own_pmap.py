"""A decode step under ``jax.pmap``: each device has a cache of its own and decodes its own rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import jax_utils

import kvjax
from kvjax import models


def stack_caches(lm, policy, rows, max_len):
    """One empty cache for each device, stacked along a new first axis."""
    devices = range(jax.local_device_count())
    caches = [kvjax.init_cache(lm.config, policy, batch=rows, max_len=max_len) for _ in devices]
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *caches)


def replicate_cache(lm, policy, rows, max_len):
    """The same as copies of one empty cache."""
    return jax_utils.replicate(kvjax.init_cache(lm.config, policy, batch=rows, max_len=max_len))


def decode(lm, caches, tokens, steps):
    """Logits [steps, devices, rows, vocab] of a greedy loop after prompts [devices, rows, new]."""

    @functools.partial(jax.pmap, in_axes=(None, 0, 0), donate_argnums=2)
    def step(params, tokens, cache):
        logits, cache = lm.apply(params, tokens, cache, last_only=True)
        return logits[:, 0], cache

    found = []
    for _ in range(steps):
        logits, caches = step(lm.params, tokens, caches)
        tokens = jnp.argmax(logits, axis=-1)[..., None]
        found.append(np.asarray(logits))
    return np.stack(found)


def main():
    lm = models.load()  # as it is: pmap copies the parameters to every device
    prompts = np.tile(lm.encode(["Once upon a time"])[0], (jax.local_device_count(), 2, 1))
    for make in (stack_caches, replicate_cache):
        logits = decode(lm, make(lm, "static", rows=2, max_len=64), prompts, steps=8)
        print(make.__name__, logits.argmax(-1)[:, 0, 0].tolist())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without accelerators
    main()
