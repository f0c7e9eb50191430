"""Requirements of generation on a model, processing of a long call in chunks, and cache
capacities."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from kvjax.cache.appending import admit
from kvjax.cache.state import KVCache
from kvjax.core import control_flow
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.target import default_device
from kvjax.core.typing import Array, Counts, Tokens
from kvjax.core.validation import ArgumentError, as_int, check_not_traced, is_traced
from kvjax.layouts import UNLIMITED
from kvjax.memory.sizes import LoadedModel
from kvjax.policies.model_config import (
    CacheShape,
    layer_heads,
    position_limit,
    positions_needed,
    same_rotary,
)


@dataclass(frozen=True)
class GenerationDefaults:
    """The values of a checkpoint's ``generation_config.json``. A value that the file does not have
    is None.

    ``decoder_start_token_id`` is the first token of the decoder of an encoder-decoder model.

    Example:
      ```python
      print(lm.generation.eos_token_ids, lm.generation.temperature)
      ```
    """

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    decoder_start_token_id: int | None = None


class Model(Protocol):
    """A model without its parameters. It must be hashable, see ``kvjax.models.architecture``."""

    def apply(
        self,
        params: PyTree,
        tokens: Tokens,
        cache: KVCache | None = None,
        *,
        lengths: Array | None = None,
        last_only: bool = False,
        max_len: int | None = None,
    ) -> PyTree: ...


class ModelConfig(CacheShape, Protocol):
    """The attributes that generation needs from a model's config."""

    @property
    def vocab_size(self) -> int: ...


@allow_host_to_device
def check_model(lm: Any, *, inside: bool = False) -> None:
    """Raise ``ValueError`` if ``lm`` can't generate, or if this is called inside ``jit`` and
    ``inside`` is False."""
    parts = ("config", "params", "mesh", "tokenizer", "generation", "architecture")
    if missing := [part for part in parts if not hasattr(lm, part)]:
        raise ValueError(
            f"expected a model, as kvjax.models.load returns, got a {type(lm).__name__}: it has no "
            f"{missing[0]}"
        )
    if not hasattr(lm.config, "vocab_size"):
        raise ValueError("the model's config has no vocab_size: generation needs it")
    layer_heads(lm.config)
    check_device(lm)
    try:
        hash(lm.architecture)
    except TypeError:
        raise ValueError(
            "lm.architecture is not hashable, but it is a static argument of compiled programs: "
            "make it a frozen dataclass with hashable fields"
        ) from None
    if not inside:
        # Inside jit, new arrays are traced.
        check_not_traced("generation", jnp.zeros(()))


def check_device(lm: LoadedModel) -> None:
    """Raise ``ValueError`` if the model is on one device that is not the default device. Caches are
    created on the default device, so every call would transfer them."""
    leaf = next(iter(jax.tree.leaves(lm.params)), None)
    if lm.mesh is not None or not isinstance(leaf, jax.Array) or is_traced(leaf):
        return
    devices, default = leaf.sharding.device_set, default_device()
    if devices != {default}:
        names = ", ".join(map(str, devices))
        raise ValueError(
            f"the model is on {names}, but JAX's default device is {default}: call this inside "
            "jax.default_device(...) with the model's device, or move the model"
        )


MAX_CHUNK = 1024
"""The maximum number of tokens of a long call that are processed together."""


def chunk_size(cache: KVCache, last_only: bool, new: int) -> int:
    """Return how many tokens of a long call are processed together.

    The slack of ring layouts limits it. If only the last logits are needed, ``MAX_CHUNK`` limits it
    too, because the hidden states of a long call would take more memory than its cache. With
    ``prefill="exact"``, ``MAX_CHUNK`` is ignored, because results then depend on how a sequence is
    divided into calls.
    """
    exact = any(layer.policy.prefill == "exact" for layer in cache.layers)
    size = MAX_CHUNK if last_only and not exact else new
    return min(size, cache.chunk or size)


def apply_in_chunks(
    run: Callable[[Tokens, KVCache, Counts | None], tuple[Array, KVCache]],
    tokens: Tokens,
    cache: KVCache,
    lengths: Counts | None,
    *,
    last_only: bool,
    vocab: int,
) -> tuple[Array, KVCache]:
    """Call ``run(tokens, cache, lengths)``, which returns logits and the cache. A long call becomes
    a scan over chunks. With ``last_only``, only the logits after each row's last real token are
    returned."""
    batch, new = tokens.shape
    size = chunk_size(cache, last_only, new)
    if new <= size:
        return run(tokens, cache, lengths)
    count = -(-new // size)
    # A row takes all tokens of the call or none. This is decided before the first chunk.
    cache, counts = admit(cache, new, lengths)
    chunks = jnp.pad(tokens, ((0, 0), (0, count * size - new)))
    chunks = chunks.reshape(batch, count, size).swapaxes(0, 1)
    real = jnp.clip(counts[None] - size * jnp.arange(count, dtype=jnp.int32)[:, None], 0, size)

    def step(carry: tuple[KVCache, Array], chunk: tuple[Array, Array]):
        (cache, last), (tokens, lengths) = carry, chunk
        logits, cache = run(tokens, cache, lengths)
        if not last_only:
            return (cache, last), logits
        return (cache, jnp.where((lengths > 0)[:, None, None], logits, last)), None

    last = jnp.zeros((batch, 1, vocab), jnp.float32)
    (cache, last), every = control_flow.scan(step, (cache, last), (chunks, real))
    if last_only:
        return last, cache
    logits = every.swapaxes(0, 1).reshape(batch, count * size, -1)
    return logits[:, :new], cache


_SMALLEST_CAPACITY = 64


def capacity_bucket(tokens: int) -> int:
    """Return the smallest capacity of the form 2**k or 3 * 2**k, at least 64, in which ``tokens``
    tokens fit."""
    power = max(_SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
    between = power // 4 * 3
    return between if between >= max(tokens, _SMALLEST_CAPACITY) else power


def max_capacity(cache: KVCache) -> int:
    """Return the maximum number of tokens per row of a cache after it has grown."""
    return cache.max_len if cache.grows_to is None else cache.grows_to


def grown_capacity(cache: KVCache, tokens: int) -> int:
    """Return the capacity to which a cache grows so that ``tokens`` tokens per row fit."""
    return min(capacity_bucket(tokens), max_capacity(cache))


def choose_capacity(
    config: ModelConfig,
    longest: int,
    limit: int,
    max_len: int | None,
    given: KVCache | None,
    *,
    new: str = "max_new_tokens=",
    rounded: bool = False,
) -> int:
    """Choose the capacity in tokens per row for a prompt of ``longest`` tokens and ``limit`` new
    tokens.

    Args:
      config: the model's config.
      longest: the number of tokens of the longest prompt.
      limit: the maximum number of new tokens.
      max_len: the value that the user gave, or None.
      given: the cache to continue, or None.
      new: how error messages introduce ``limit``.
      rounded: whether to round the capacity up even if rotary frequencies depend on it.

    Raises:
      ValueError: if ``max_len``, the model's positions or the given cache's capacity are too small.
    """
    need, positions = positions_needed(longest, limit), position_limit(config)
    required = f"{longest} tokens of prompt and {new}{limit} need {need} positions"
    if positions is not None and need > positions:
        raise ValueError(f"{required}, but the model has only {positions}")
    if given is not None:
        most = max_capacity(given)
        if max_len not in (None, most):
            raise ArgumentError(
                f"max_len is {max_len}, but the given cache's capacity is {most}", param="max_len"
            )
        if need > most:
            raise ValueError(
                f"{required}, but the given cache's capacity is {most}: call "
                f"kvjax.grow(cache, {need})"
            )
        max_len = most
    if max_len is None:
        bucket = capacity_bucket(need)
        # Rounding must not change the frequencies of length-dependent rotary embeddings.
        if not rounded and not same_rotary(config, need, bucket):
            return need
        return bucket if positions is None else min(bucket, positions)
    max_len = as_int("max_len", max_len, 1)
    if positions is not None and positions < max_len < UNLIMITED:
        raise ArgumentError(
            f"max_len is {max_len}, but the model has only {positions} positions", param="max_len"
        )
    if need > max_len:
        raise ArgumentError(f"{required}, but max_len is {max_len}", param="max_len")
    return max_len
