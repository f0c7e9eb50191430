"""A call of more tokens than a model should be fed at once, in parts."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from kvjax.cache.admission import admit
from kvjax.cache.state import KVCache
from kvjax.core import control
from kvjax.core.typing import Array, Counts, Tokens

PIECE = 1024
"""Tokens of a prompt that are fed together, at most."""


def fed_together(cache: KVCache, last_only: bool, new: int) -> int:
    """Tokens of a call that are fed together: as many as rings have slack for, and where only the
    last logits are wanted no more than ``PIECE``, for a long text's hidden states would take more
    memory than its cache. A policy that lets a call see its own tokens raw is not cut."""
    exact = any(layer.policy.prefill == "exact" for layer in cache.layers)
    usual = PIECE if last_only and not exact else new
    return min(usual, cache.chunk or usual)


def in_parts(
    run: Callable[[Tokens, KVCache, Counts | None], tuple[Array, KVCache]],
    tokens: Tokens,
    cache: KVCache,
    lengths: Counts | None,
    *,
    last_only: bool,
    vocab: int,
) -> tuple[Array, KVCache]:
    """``run(tokens, cache, lengths)``, which gives logits, of each row's last real token alone
    where ``last_only``, and the cache; of a long call in parts, one compiled for all of them."""
    batch, new = tokens.shape
    size = fed_together(cache, last_only, new)
    if new <= size:
        return run(tokens, cache, lengths)
    count = -(-new // size)
    # All of a row's tokens or none: a part that fits must not follow one that did not.
    cache, taken = admit(cache, new, lengths)
    parts = jnp.pad(tokens, ((0, 0), (0, count * size - new)))
    parts = parts.reshape(batch, count, size).swapaxes(0, 1)
    real = jnp.clip(taken[None] - size * jnp.arange(count, dtype=jnp.int32)[:, None], 0, size)

    def one(carry: tuple[KVCache, Array], part: tuple[Array, Array]) -> Any:
        (cache, last), (tokens, lengths) = carry, part
        logits, cache = run(tokens, cache, lengths)
        if not last_only:
            return (cache, last), logits
        return (cache, jnp.where((lengths > 0)[:, None, None], logits, last)), None

    last = jnp.zeros((batch, 1, vocab), jnp.float32)
    (cache, last), every = control.scan(one, (cache, last), (parts, real))
    if last_only:
        return last, cache
    logits = every.swapaxes(0, 1).reshape(batch, count * size, -1)
    return logits[:, :new], cache
