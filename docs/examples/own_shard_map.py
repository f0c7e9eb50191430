"""A decode step in ``jax.shard_map`` over rows, inside ``jit``, with the cache as an argument."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import models


def make_cache(lm, policy, mesh, batch, max_len):
    """An empty cache: each device makes its own rows, and with pages its own pool."""
    rows = batch // mesh.shape["rows"]
    make = functools.partial(kvjax.init_cache, lm.config, policy, batch=rows, max_len=max_len)
    return jax.jit(jax.shard_map(make, mesh=mesh, in_specs=(), out_specs=P("rows")))()


def make_step(lm, mesh):
    """A jitted step (params, tokens, cache) to logits [batch, vocab] and the cache."""
    specs = {"in_specs": (P(), P("rows"), P("rows")), "out_specs": P("rows")}

    @functools.partial(jax.jit, donate_argnums=2)
    @functools.partial(jax.shard_map, mesh=mesh, **specs)
    def step(params, tokens, cache):
        logits, cache = lm.apply(params, tokens, cache, last_only=True)
        return logits[:, 0], cache

    return step


def decode(lm, mesh, cache, tokens, steps):
    """Logits [steps, batch, vocab] of a greedy loop after prompts [batch, new]."""
    step, found = make_step(lm, mesh), []
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("rows")))  # explicit axes ask for it
    for _ in range(steps):
        logits, cache = step(lm.params, tokens, cache)
        tokens = jnp.argmax(logits, axis=-1)[:, None]
        found.append(np.asarray(logits))
    return np.stack(found)


def main():
    lm = models.load()
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    batch = 2 * jax.device_count()
    prompts = np.tile(lm.encode(["Once upon a time"])[0], (batch, 1))
    cache = make_cache(lm, "static", mesh, batch, max_len=64)
    print(decode(lm, mesh, cache, prompts, steps=8).argmax(-1)[:, 0].tolist())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without accelerators
    main()
