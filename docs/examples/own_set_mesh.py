"""Caches under ``jax.set_mesh``, with a mesh of automatic axes and with one of explicit axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvjax
from kvjax import models


def make_mesh(kind):
    """All devices along the axis "rows"."""
    return jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(kind,))


def place(cache, mesh):
    """The cache with its rows divided over the mesh; what is not by rows is on every device."""
    rows, whole = NamedSharding(mesh, P("rows")), NamedSharding(mesh, P())
    return jax.tree.map(
        lambda x: jax.device_put(x, rows if x.shape[:1] == (cache.batch,) else whole), cache
    )


def decode(lm, cache, tokens, steps):
    """Logits [steps, batch, vocab] of a greedy loop after prompts [batch, new]."""

    @functools.partial(jax.jit, donate_argnums=2)
    def step(params, tokens, cache):
        logits, cache = lm.apply(params, tokens, cache, last_only=True)
        return logits[:, 0], cache

    found = []
    for _ in range(steps):
        logits, cache = step(lm.params, tokens, cache)
        tokens = jnp.argmax(logits, axis=-1)[:, None]
        found.append(np.asarray(logits))
    return np.stack(found)


@functools.partial(jax.jit, donate_argnums=0)
def attend_once(cache, queries, keys, values):
    """One layer of a model of one's own, by ``append``, ``attend`` and ``advance``."""
    cache = kvjax.append(cache, 0, keys, values)
    return kvjax.attend(queries, cache, 0), kvjax.advance(cache, keys.shape[2])


@functools.partial(jax.jit, donate_argnums=0)
def step_once(cache, queries, keys, values):
    """The same by ``kvjax.step``."""
    call = kvjax.step(cache, keys.shape[2])
    mixed, call = call.attend(0, queries, keys, values)
    return mixed, call.done()


def main():
    lm = models.load()
    batch = jax.device_count()
    prompts = np.tile(lm.encode(["Once upon a time"])[0], (batch, 1))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = make_mesh(kind)
        with jax.set_mesh(mesh):
            cache = place(kvjax.init_cache(lm.config, "static", batch=batch, max_len=64), mesh)
            print(kind.name, decode(lm, cache, prompts, steps=8).argmax(-1)[:, 0].tolist())
            print(kvjax.generate(lm, ["Once upon a time"], max_new_tokens=8).tokens)
            made = kvjax.rollout(lm, lm.params, ["Once upon a time"], max_new_tokens=8)
            print(np.asarray(made.tokens).tolist())


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # simulated, on a machine without accelerators
    main()
