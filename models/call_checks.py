"""What a call of a model is refused for: its tokens, its cache, and where they are."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.cache.state import KVCache
from kvjax.core.transfer import fetch
from kvjax.core.typing import Counts
from kvjax.core.validation import is_traced
from kvjax.policies.model_config import layer_heads

from .config_families import Config


def unknown_tokens(tokens: Array, lengths: Counts | None, size: int) -> Array | None:
    """bool[batch, new]: real tokens that a vocabulary of ``size`` has not; None where that can be
    seen, and is so of none.

    Raises:
      ValueError: if it can be seen, naming the first.
    """
    seen = not any(is_traced(x) for x in (tokens, lengths)) and tokens.is_fully_addressable
    numbers = np if seen else jnp
    ids = fetch(tokens) if seen else tokens
    wrong = (ids < 0) | (ids >= size)
    if lengths is not None:
        wrong &= numbers.arange(ids.shape[1])[None] < numbers.asarray(lengths)[:, None]
    if not seen:
        return wrong
    if np.any(wrong):
        row = int(np.argmax(np.any(wrong, axis=1)))
        raise ValueError(
            f"token id {ids[row][wrong[row]][0]} in row {row}: the vocabulary has {size}, 0 to "
            f"{size - 1} (what stands behind a row's lengths may be anything)"
        )
    return None


def without_unknown(logits: Array, wrong: Array) -> Array:
    """Logits [batch, new or 1, vocab], NaN from the first token on that is ``wrong``."""
    behind = jnp.cumsum(wrong, axis=1, dtype=jnp.int32)[:, -logits.shape[1] :]
    return jnp.where(behind[:, :, None] > 0, jnp.nan, logits)


def check_cache_of(config: Config, cache: KVCache, batch: int) -> None:
    """Raise ``ValueError`` for a cache of another model, or of other rows."""
    if cache.batch != batch:
        raise ValueError(f"tokens have {batch} rows, the cache has {cache.batch}")
    count = len(cache.layers if cache.sources is None else cache.sources)
    if count != config.num_hidden_layers:
        raise ValueError(f"the cache has {count} layers, the model {config.num_hidden_layers}")
    of_model = layer_heads(config)
    for number, wanted in enumerate(of_model):
        layer = cache.layers[number if cache.sources is None else cache.sources[number]]
        if (layer.kv_heads, layer.head_dim) != wanted:
            raise ValueError(
                f"layer {number} of the cache has kv_heads={layer.kv_heads}, head_dim="
                f"{layer.head_dim}, the model {wanted[0]} and {wanted[1]}: make it with "
                "init_cache(lm.config, ...)"
            )


def check_devices(params: Any, cache: KVCache) -> None:
    """Raise ``ValueError`` for a cache elsewhere, where that can be seen: not inside ``jit``."""
    leaf = next(iter(jax.tree.leaves(params)), None)
    if isinstance(leaf, jax.Array) and not is_traced(leaf) and not is_traced(cache.length):
        # JAX would move what is uncommitted, all of it at every call.
        ours, theirs = leaf.sharding.device_set, cache.length.sharding.device_set
        if ours != theirs:
            raise ValueError(
                f"the parameters are on {len(ours)} device(s), the cache on {len(theirs)}, not the "
                "same ones: lm.on(mesh) and init_cache(..., mesh=mesh) put both on one mesh"
            )
