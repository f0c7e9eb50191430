"""``rollout``: generation as one program, with the model's parameters as an argument."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from kvjax.cache.checks import validated
from kvjax.cache.creation import allocate
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import commit_like
from kvjax.core.typing import Array, Counts, PerRow, Tokens
from kvjax.core.validation import UNLIMITED, ArgumentError, as_int, is_traced
from kvjax.generation.cache_choice import size_pools
from kvjax.generation.loaded_model import LanguageModel, check_params_match, without_weak_types
from kvjax.generation.model import Model, ModelConfig, check_model, choose_capacity
from kvjax.generation.options import (
    Prompts,
    check_token_ids,
    explicit_signature,
    parse_eos_token_ids,
    parse_logit_bias,
    tokenize_prompts,
)
from kvjax.generation.programs import Cached, choose_first, decode_loop, gather_vocab
from kvjax.layouts.paged import MAX_PAGE_SIZE
from kvjax.operations.rows import repeat, reset
from kvjax.policies.model_config import (
    layer_heads,
    layer_sources,
    layer_windows,
    model_dtype,
    position_limit,
    positions_needed,
    resolve_rotary_len,
    same_rotary,
    scanned,
)
from kvjax.policies.presets import PolicyChoice, budget_of
from kvjax.rollouts.results import Rollout
from kvjax.sampling.history import LogitsHook, TokenHistory
from kvjax.sampling.params import (
    Filters,
    PenaltyKeywords,
    SamplingArrays,
    SamplingKeywords,
    prepare_sampling,
)


class RolloutSettings(SamplingKeywords, PenaltyKeywords, total=False):
    """Settings of how tokens are sampled. Hooks and the kinds of filters are compiled into the
    program."""

    eos_token_ids: int | Sequence[int] | None
    logits_hook: LogitsHook | None


@explicit_signature(RolloutSettings, temperature=1.0)
@without_mesh_context
@automatic_axes
def rollout(
    lm: LanguageModel,
    params: PyTree,
    prompts: Prompts | tuple[Tokens, PerRow],
    *,
    n: int = 1,
    max_new_tokens: int = 64,
    seed: int | Array = 0,
    cache: PolicyChoice = "static",
    buffer: KVCache | None = None,
    put: bool | Callable[[PyTree], PyTree] = False,
    **settings: Unpack[RolloutSettings],
) -> Rollout:
    """Sample ``n`` continuations of each prompt, for a training loop.

    The model's parameters are an argument, so new parameters in every step compile and copy
    nothing. A rollout is one program, and may be called inside ``jit``.

    Args:
      lm: the model. Its own parameters are not used.
      params: the parameters to use, with the same names, shapes and dtypes as the model's own.
      prompts: prompts as for ``generate``, or a pair of arrays: tokens int32[batch, prompt], padded
        on the right, and int32[batch], the number of tokens in each row. The arrays may be traced;
        rows with an invalid prompt are then marked in ``Rollout.broken``. Each width compiles a
        program. Lists are padded to a power of two, at least 16, unless the model's rotary
        frequencies depend on the length.
      n: the number of continuations of each prompt. They share one prefill and, if the cache is
        paged, the prompt's full pages.
      max_new_tokens: the maximum number of new tokens of a row.
      seed: an integer below 2**32, or uint32[], which may be traced. Row ``i`` uses the random
        numbers of ``generate(seed=seed * 2**32 + i)``, so rows with different seeds never share
        random numbers.
      cache: a policy, its name, or a list with one for each layer. On a mesh, the size of the
        ``data`` axis must divide the number of prompts.
      buffer: the ``cache`` of an earlier rollout with the same shapes. Its memory is reused, and it
        is donated. Without it, an empty cache is created. The program is the same in both cases.
      put: True to convert the parameters with ``lm.put``, if their dtypes or shardings differ from
        the model's, or a function that converts them. A trainer's parameters may need this.
      settings: sampling settings as for ``generate``, but ``temperature`` is 1 by default.

    Raises:
      ValueError: for the same reasons as ``generate``, if the parameters don't match the model's,
        or if the buffer's shapes differ.

    Example:
      ```python
      rollout = kvjax.rollout(lm, lm.params, ["The json module"], n=2, max_new_tokens=8, seed=1)
      print(rollout.tokens.shape, rollout.logprobs)
      ```
    """
    check_model(lm, inside=True)
    if put:
        params = lm.put(params) if put is True else put(params)
    check_params_match(params, lm.params)
    new = as_int("max_new_tokens", max_new_tokens, 1)
    samples = as_int("n", n, 1)
    tokens, lengths = prompt_arrays(lm, prompts, new)
    rows, width = tokens.shape[0] * samples, tokens.shape[1]
    filters, sampling = sampling_of(lm, rows, new, seed, settings)
    capacity = choose_capacity(lm.config, width, new, None, None)
    if budget_of(cache) is not None:
        raise ValueError(
            "policy('auto') moves layers while it runs, but a rollout is one program; give another "
            "policy"
        )
    # A prompt may have any length up to the width, so its last page may be filled to any extent.
    possible = range(max(1, width - MAX_PAGE_SIZE + 1), width + 1)
    policy = size_pools(lm.config, cache, possible, new, samples, rows=tokens.shape[0])
    spec = _CacheSpec(lm.config, policy, tokens.shape[0], capacity, lm.mesh)
    if buffer is None:
        buffer = _empty(spec, samples)
    else:
        _check_buffer(buffer, _abstract(spec, samples))
    # Committed arguments give committed results, which are the next step's arguments. Commit both
    # in the same way, or the second step would compile again.
    params = commit_like(without_weak_types(params), buffer)
    buffer = commit_like(buffer, params)
    return _rollout(
        lm.architecture, filters, spec, samples, new, params, tokens, lengths, sampling, buffer
    )


def prompt_arrays(lm: LanguageModel, prompts: Any, new: int) -> tuple[Tokens, Counts]:
    """Convert prompts to tokens, int32[batch, prompt], and lengths, int32[batch].

    Raises:
      ValueError: if ``prompts`` are not valid prompts.
    """
    if not (isinstance(prompts, tuple) and len(prompts) == 2 and np.ndim(prompts[0]) == 2):
        rows = tokenize_prompts(lm, prompts, [])
        width = longest = max(map(len, rows))
        if same_rotary(lm.config, 1, UNLIMITED):  # otherwise padding would change the frequencies
            width = max(16, 1 << (longest - 1).bit_length())
            most = (position_limit(lm.config) or UNLIMITED) - positions_needed(0, new)
            width = max(longest, min(width, most))
        tokens = np.zeros((len(rows), width), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return tokens, np.array([len(ids) for ids in rows], np.int32)
    tokens, lengths = prompts
    if np.shape(lengths) != np.shape(tokens)[:1]:
        raise ArgumentError(
            "prompts must be tokens [batch, prompt] and lengths [batch], got shapes "
            f"{list(np.shape(tokens))} and {list(np.shape(lengths))}",
            param="prompts",
        )
    for name, array in (("tokens", tokens), ("lengths", lengths)):
        dtype = jnp.result_type(array)
        if not jnp.issubdtype(dtype, jnp.integer):
            raise ValueError(f"{name} of prompts must be integers, got {dtype}")
    if not any(map(is_traced, (tokens, lengths))):
        rows = zip(np.asarray(tokens), np.asarray(lengths), strict=True)
        for row, (ids, length) in enumerate(rows):
            if not 1 <= length <= len(ids):
                raise ValueError(f"prompt {row} has length {length}, but must have 1 to {len(ids)}")
            check_token_ids(lm.config, ids[:length].tolist(), f"prompt {row}", "prompts")
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def sampling_of(
    lm: LanguageModel, rows: int, new: int, seed: int | Array, settings: RolloutSettings
) -> tuple[Filters, SamplingArrays]:
    """Split sampling settings into a static part and arrays. The seed may be traced."""
    keywords: dict[str, Any] = {"temperature": 1.0, **settings}
    min_new = as_int("min_new_tokens", keywords.pop("min_new_tokens", 0), 0)
    if min_new > new:
        message = f"min_new_tokens is {min_new}, but max_new_tokens is only {new}"
        raise ArgumentError(message, param="min_new_tokens")
    eos = parse_eos_token_ids(lm, keywords.pop("eos_token_ids", None))
    bias = parse_logit_bias(lm.config, keywords.pop("logit_bias", None))
    filters, sampling = prepare_sampling(
        seeds=range(rows), eos_token_ids=eos, min_new_tokens=min_new, logit_bias=bias, **keywords
    )
    filters = replace(filters, mesh=lm.mesh is not None)
    high = seed
    if not is_traced(seed) and not isinstance(seed, jax.Array):
        if as_int("seed", seed, 0) >= 2**32:
            raise ArgumentError(f"seed is {seed}, but must be below 2**32", param="seed")
        high = np.uint32(int(seed))
    high = jnp.broadcast_to(jnp.asarray(high).astype(jnp.uint32), (rows,))
    seeds = jnp.stack([jnp.asarray(sampling.seeds[:, 0]), high], axis=1)
    return filters, replace(sampling, seeds=seeds)


@dataclass(frozen=True, eq=False)
class _CacheSpec:
    """The arguments to create a cache. Two objects are equal if they create equal caches."""

    config: ModelConfig
    policy: PolicyChoice
    batch: int
    capacity: int
    mesh: Mesh | None

    def __post_init__(self) -> None:
        policy, config = self.policy, self.config
        policy = tuple(policy) if isinstance(policy, list) else policy
        # The key is computed once, because every rollout compares it several times.
        vars(self)["_key"] = (
            layer_heads(config),
            str(model_dtype(config)),
            layer_windows(config),
            layer_sources(config),
            position_limit(config),
            scanned(config),
            resolve_rotary_len(config, self.capacity),
            policy,
            self.batch,
            self.capacity,
            self.mesh,
        )

    def __hash__(self) -> int:
        return hash(vars(self)["_key"])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CacheSpec) and vars(self)["_key"] == vars(other)["_key"]

    def make(self) -> KVCache:
        """Create an empty cache."""
        return allocate(
            self.config,
            self.policy,
            batch=self.batch,
            max_len=self.capacity,
            initial_len=self.capacity,
            mesh=self.mesh,
        )


@functools.partial(jax.jit, static_argnames=("spec", "n"))
def _empty(spec: _CacheSpec, n: int) -> KVCache:
    """Create a buffer for the first rollout, so that it runs the same program as later ones."""
    return repeat(spec.make(), n)


@functools.lru_cache(maxsize=64)
def _abstract(spec: _CacheSpec, n: int) -> KVCache:
    """Return the shapes of the cache that a rollout returns."""
    return jax.eval_shape(lambda: repeat(spec.make(), n))


@functools.partial(
    jax.jit,
    static_argnames=("model", "filters", "spec", "n", "new"),
    donate_argnames="buffer",
    keep_unused=True,  # the buffer's values are not used, only its memory
)
def _rollout(
    model: Model,
    filters: Filters,
    spec: _CacheSpec,
    n: int,
    new: int,
    params: PyTree,
    tokens: Tokens,
    lengths: PerRow,
    sampling: SamplingArrays,
    buffer: KVCache,
) -> Rollout:
    cache = reset(buffer) if n == 1 else spec.make()
    logits, cache = model.apply(params, tokens, cache, lengths=lengths, last_only=True)
    if n > 1:
        cache, logits = repeat(cache, n), jnp.repeat(logits, n, axis=0)
        tokens, lengths = (jnp.repeat(x, n, axis=0) for x in (tokens, lengths))
    rows, width = tokens.shape
    context, limit = Cached(cache), jnp.int32(new)
    index = arange_row(width + new)
    sequences = jnp.where(index < lengths[:, None], jnp.pad(tokens, ((0, 0), (0, new))), 0)
    in_prompt = index[:, :width] < lengths[:, None]
    unknown = (tokens < 0) | (tokens >= logits.shape[-1])
    invalid = (lengths < 1) | (lengths > width) | jnp.any(unknown & in_prompt, axis=1)
    past = _history(filters, sequences, lengths, logits.shape[-1])
    progress, past, first = choose_first(
        gather_vocab(logits[:, 0], context), filters, sampling, limit, past, 0
    )
    progress = replace(
        progress,
        count=jnp.where(invalid, 0, progress.count),
        done=progress.done | invalid,
        broken=progress.broken | invalid,
    )
    first_token = progress.token[:, None]
    context, progress, _, out, scores = decode_loop(
        model,
        filters,
        params,
        context,
        progress,
        past,
        sampling,
        limit,
        limit - 1,
        0,
        max(new - 1, 1),
        ignore_broken=True,
    )
    assert first is not None and scores is not None and context.cache is not None
    chosen, logprobs, drawn = (
        jnp.concatenate([x, y], axis=1)[:, :new]
        for x, y in (
            (first_token, out),
            (first.logprobs, scores.logprobs),
            (first.sampling_logprobs, scores.sampling_logprobs),
        )
    )
    real = arange_row(new) < progress.count[:, None]
    where = jnp.where(real, lengths[:, None] + arange_row(new), width + new)
    row_index = jnp.arange(rows, dtype=jnp.int32)[:, None]
    ended = jnp.any(progress.token[:, None] == sampling.eos, axis=-1) & (progress.count > 0)
    return Rollout(
        tokens=sequences.at[row_index, where].set(chosen, mode="drop"),
        prompt_lengths=lengths,
        lengths=progress.count,
        logprobs=jnp.where(real, logprobs, 0),
        sampling_logprobs=jnp.where(real, drawn, 0),
        ended=ended,
        broken=progress.broken,
        cache=context.cache,
    )


def _history(
    filters: Filters, sequences: Array, lengths: PerRow, vocab: int
) -> TokenHistory | None:
    """Return the prompts in the form that filters and hooks need; None if they need nothing."""
    if not filters.needs_seen and not filters.needs_tokens:
        return None
    rows = jnp.arange(sequences.shape[0], dtype=jnp.int32)[:, None]
    seen = None
    if filters.needs_seen:
        real = arange_row(sequences.shape[1]) < lengths[:, None]
        seen = jnp.zeros((sequences.shape[0], vocab), bool)
        seen = seen.at[rows, jnp.where(real, sequences, vocab)].set(True, mode="drop")
    return TokenHistory(seen, sequences, lengths) if filters.needs_tokens else TokenHistory(seen)


def _check_buffer(buffer: KVCache, expected: KVCache) -> None:
    """Raise ``ValueError`` if a buffer can't be reused."""
    validated("kvjax.rollout", buffer)
    shapes, expected_shapes = (
        [(x.shape, x.dtype) for x in jax.tree.leaves(cache)] for cache in (buffer, expected)
    )
    if jax.tree.structure(buffer) != jax.tree.structure(expected) or shapes != expected_shapes:
        raise ValueError(
            f"the buffer, {buffer!r:.60}..., does not have this rollout's policy and shapes; "
            "give the cache of a rollout with the same prompt width, n and max_new_tokens, or none"
        )
