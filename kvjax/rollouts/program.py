"""Rollouts: generation as one program, from parameters that change at every step."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import validated
from kvjax.cache.creation import allocate
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.transfer import commit_like
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import UNLIMITED, as_int, is_traced
from kvjax.generation.cache_choice import size_pools
from kvjax.generation.capacity import choose_capacity
from kvjax.generation.context import Cached
from kvjax.generation.inputs import (
    Prompts,
    check_token_ids,
    parse_eos_token_ids,
    parse_logit_bias,
    tokenize_prompts,
)
from kvjax.generation.loaded_model import LanguageModel, check_params_match, without_weak_types
from kvjax.generation.model import Model, check_model
from kvjax.generation.options import explicit_signature
from kvjax.generation.programs import choose_first, decode_loop, gather_vocab
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
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import (
    Filters,
    SamplingArrays,
    SamplingKeywords,
    prepare_sampling,
)


class RolloutSettings(SamplingKeywords, total=False):
    """How tokens are drawn, and what else is compiled in."""

    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Any
    min_new_tokens: int
    eos_token_ids: Any
    logits_hook: Any


def prompt_arrays(lm: LanguageModel, prompts: Any, new: int) -> tuple[Any, Any]:
    """Prompts as int32[batch, prompt] and int32[batch].

    Raises:
      ValueError: if they are none.
    """
    if not (isinstance(prompts, tuple) and len(prompts) == 2 and np.ndim(prompts[0]) == 2):
        rows = tokenize_prompts(lm, prompts, [])
        width = longest = max(map(len, rows))
        if same_rotary(lm.config, 1, UNLIMITED):  # padding would change frequencies of a length
            width = max(16, 1 << (longest - 1).bit_length())
            most = (position_limit(lm.config) or UNLIMITED) - positions_needed(0, new)
            width = max(longest, min(width, most))
        tokens = np.zeros((len(rows), width), np.int32)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        return tokens, np.array([len(ids) for ids in rows], np.int32)
    tokens, lengths = prompts
    if np.shape(lengths) != np.shape(tokens)[:1]:
        raise ValueError(
            f"prompts are tokens [batch, prompt] and lengths [batch], got {list(np.shape(tokens))} "
            f"and {list(np.shape(lengths))}"
        )
    for name, each in (("tokens", tokens), ("lengths", lengths)):
        if not jnp.issubdtype(jnp.result_type(each), jnp.integer):
            raise ValueError(f"{name} of prompts are whole numbers, got {jnp.result_type(each)}")
    if not any(map(is_traced, (tokens, lengths))):
        known = zip(np.asarray(tokens), np.asarray(lengths), strict=True)
        for row, (ids, real) in enumerate(known):
            if not 1 <= real <= len(ids):
                raise ValueError(f"prompt {row} has {real} tokens, and must have 1 to {len(ids)}")
            check_token_ids(lm.config, ids[:real].tolist(), f"prompt {row}")
    return jnp.asarray(tokens, jnp.int32), jnp.asarray(lengths, jnp.int32)


def drawing_of(
    lm: LanguageModel, rows: int, new: int, seed: Any, settings: RolloutSettings
) -> tuple[Filters, SamplingArrays]:
    """How tokens are drawn, with a seed that may be traced."""
    given: dict[str, Any] = {"temperature": 1.0, **settings}
    least = as_int("min_new_tokens", given.pop("min_new_tokens", 0), 0)
    if least > new:
        raise ValueError(f"min_new_tokens is {least}, but max_new_tokens only {new}")
    ends = parse_eos_token_ids(lm, given.pop("eos_token_ids", None))
    bias = parse_logit_bias(lm.config, given.pop("logit_bias", None))
    filters, found = prepare_sampling(
        seeds=range(rows), eos_token_ids=ends, min_new_tokens=least, logit_bias=bias, **given
    )
    filters = replace(filters, mesh=lm.mesh is not None)
    if not is_traced(seed) and not isinstance(seed, jax.Array):
        seed = np.uint32(_below(seed))
    high = jnp.broadcast_to(jnp.asarray(seed).astype(jnp.uint32), (rows,))
    return filters, replace(found, seeds=jnp.stack([jnp.asarray(found.seeds[:, 0]), high], axis=1))


def _below(seed: Any) -> int:
    """A seed, or a ``ValueError``."""
    if as_int("seed", seed, 0) >= 2**32:
        raise ValueError(f"seed is {seed}, and must be below 2**32")
    return int(seed)


@explicit_signature(RolloutSettings)
@without_mesh_context
@automatic_axes
def rollout(
    lm: LanguageModel,
    params: Any,
    prompts: Prompts | tuple[Tokens, PerRow],
    *,
    n: int = 1,
    max_new_tokens: int = 64,
    seed: int | Array = 0,
    cache: PolicyChoice = "static",
    buffer: KVCache | None = None,
    put: bool | Callable[[Any], Any] = False,
    **settings: Unpack[RolloutSettings],
) -> Rollout:
    """Draw ``n`` continuations of each prompt from parameters that are an argument: new ones at
    every step compile nothing and copy nothing. One program, which may stand inside ``jit``.

    Args:
      lm: the model; its own parameters are not used.
      params: of the same names, shapes and dtypes.
      prompts: as of ``generate``; or int32[batch, prompt], padded on the right, and int32[batch],
        how many are real, arrays that may be traced (then a row that is no prompt is ``broken``).
        Programs are compiled for a width: texts are padded to a power of two, from 16 up, but for
        a model whose rotary frequencies depend on the length of its text, which goes by the width.
      n: continuations of each, which share its one prefill, and in a paged cache its full pages.
      max_new_tokens: a row ends after so many.
      seed: a whole number below 2**32, or uint32[], which may be traced. Row ``i`` draws as that of
        ``generate(seed=seed * 2**32 + i)``: rows of other seeds are never the same.
      cache: a policy, its name, or one a layer. On a mesh, ``data`` must divide the prompts.
      buffer: the ``cache`` of an earlier rollout of the same shapes, whose memory is used again; it
        is used up, by donation. Without it an empty one is made, for the same program.
      put: True for parameters of another dtype or sharding than the model's own, such as a
        trainer's: they go through ``lm.put`` first. Or a function of them.
      temperature: 1 by default. It, the filters and ``logits_hook`` are those of ``generate``.

    Raises:
      ValueError: as of ``generate``; if the parameters are those of another model, or the buffer is
        not of these shapes.
    """
    check_model(lm, inside=True)
    if put:
        params = lm.put(params) if put is True else put(params)
    check_params_match(params, lm.params)
    new = as_int("max_new_tokens", max_new_tokens, 1)
    samples = as_int("n", n, 1)
    tokens, lengths = prompt_arrays(lm, prompts, new)
    rows, width = tokens.shape[0] * samples, tokens.shape[1]
    filters, drawing = drawing_of(lm, rows, new, seed, settings)
    capacity = choose_capacity(lm.config, width, new, None, None)
    if budget_of(cache) is not None:
        raise ValueError(
            "policy('auto') moves its layers while it runs, and a rollout is one program"
        )
    # Of a page the prompts may have any part, and be as long as they are wide or shorter.
    texts = range(max(1, width - MAX_PAGE_SIZE + 1), width + 1)
    policy = size_pools(lm.config, cache, texts, new, samples, rows=tokens.shape[0])
    made = _Made(lm.config, policy, tokens.shape[0], capacity, lm.mesh)
    if buffer is None:
        buffer = _empty(made, samples)
    else:
        _check_buffer(buffer, _abstract(made, samples))
    # What is committed makes the results so: parameters of the next step would be, and this one's.
    params = commit_like(without_weak_types(params), buffer)
    buffer = commit_like(buffer, params)
    return _rolled(
        lm.architecture, filters, made, samples, new, params, tokens, lengths, drawing, buffer
    )


@dataclass(frozen=True, eq=False)
class _Made:
    """How a cache is made: equal where all is that a cache goes by."""

    config: Any
    policy: Any
    batch: int
    capacity: int
    mesh: Any

    def __post_init__(self) -> None:
        policy, config = self.policy, self.config
        policy = tuple(policy) if isinstance(policy, list) else policy
        # Of every rollout, several times.
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
        return isinstance(other, _Made) and vars(self)["_key"] == vars(other)["_key"]

    def __call__(self) -> KVCache:
        """The empty cache."""
        return allocate(
            self.config,
            self.policy,
            batch=self.batch,
            max_len=self.capacity,
            initial_len=self.capacity,
            mesh=self.mesh,
        )


@functools.partial(jax.jit, static_argnames=("made", "n"))
def _empty(made: _Made, n: int) -> KVCache:
    """A buffer for the first rollout: with one, its program is that of all the others."""
    return repeat(made(), n)


@functools.lru_cache(maxsize=64)
def _abstract(made: _Made, n: int) -> KVCache:
    """The cache that a rollout gives, as shapes."""
    return jax.eval_shape(lambda: repeat(made(), n))


@functools.partial(
    jax.jit,
    static_argnames=("model", "filters", "made", "n", "new"),
    donate_argnames="buffer",
    keep_unused=True,  # a buffer's numbers are not looked at: its memory is taken
)
def _rolled(
    model: Model,
    filters: Filters,
    made: _Made,
    n: int,
    new: int,
    params: Any,
    tokens: Tokens,
    lengths: PerRow,
    drawing: SamplingArrays,
    buffer: KVCache,
) -> Rollout:
    """The program of a rollout."""
    cache = reset(buffer) if n == 1 else made()
    logits, cache = model.apply(params, tokens, cache, lengths=lengths, last_only=True)
    if n > 1:
        cache, logits = repeat(cache, n), jnp.repeat(logits, n, axis=0)
        tokens, lengths = (jnp.repeat(x, n, axis=0) for x in (tokens, lengths))
    rows, width = tokens.shape
    context, limit = Cached(cache), jnp.int32(new)
    at = arange_row(width + new)
    text = jnp.where(at < lengths[:, None], jnp.pad(tokens, ((0, 0), (0, new))), 0)
    real = at[:, :width] < lengths[:, None]
    unknown = (tokens < 0) | (tokens >= logits.shape[-1])
    wrong = (lengths < 1) | (lengths > width) | jnp.any(unknown & real, axis=1)
    past = _past(filters, text, lengths, logits.shape[-1])
    progress, past, first = choose_first(
        gather_vocab(logits[:, 0], context), filters, drawing, limit, past, 0
    )
    progress = replace(
        progress,
        count=jnp.where(wrong, 0, progress.count),
        done=progress.done | wrong,
        broken=progress.broken | wrong,
    )
    start = progress.token[:, None]
    context, progress, _, out, scores = decode_loop(
        model,
        filters,
        params,
        context,
        progress,
        past,
        drawing,
        limit,
        limit - 1,
        0,
        max(new - 1, 1),
        ignore_broken=True,
    )
    assert first is not None and scores is not None and context.cache is not None
    chosen, logprobs, drawn = (
        jnp.concatenate([x, y], axis=1)[:, :new]
        for x, y in ((start, out), (first.chosen, scores.chosen), (first.drawn, scores.drawn))
    )
    real = arange_row(new) < progress.count[:, None]
    where = jnp.where(real, lengths[:, None] + arange_row(new), width + new)
    text = text.at[jnp.arange(rows, dtype=jnp.int32)[:, None], where].set(chosen, mode="drop")
    ended = jnp.any(progress.token[:, None] == drawing.eos, axis=-1) & (progress.count > 0)
    return Rollout(
        text,
        lengths,
        progress.count,
        jnp.where(real, logprobs, 0),
        jnp.where(real, drawn, 0),
        ended,
        progress.broken,
        context.cache,
    )


def _past(filters: Filters, text: Array, lengths: PerRow, vocab: int) -> TokenHistory | None:
    """What filters or a hook go by, from the prompts."""
    if not filters.needs_seen and not filters.needs_tokens:
        return None
    rows = jnp.arange(text.shape[0], dtype=jnp.int32)[:, None]
    seen = None
    if filters.needs_seen:
        real = arange_row(text.shape[1]) < lengths[:, None]
        seen = jnp.zeros((text.shape[0], vocab), bool)
        seen = seen.at[rows, jnp.where(real, text, vocab)].set(True, mode="drop")
    return TokenHistory(seen, text, lengths) if filters.needs_tokens else TokenHistory(seen)


def _check_buffer(buffer: KVCache, wanted: KVCache) -> None:
    """Raise ``ValueError`` for a buffer that can't be used again."""
    validated("kvjax.rollout", buffer)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(buffer)]
    if jax.tree.structure(buffer) != jax.tree.structure(wanted) or shapes != [
        (x.shape, x.dtype) for x in jax.tree.leaves(wanted)
    ]:
        raise ValueError(
            f"the buffer, {buffer!r:.60}..., is not of this rollout's policy and shapes: give the "
            "cache of one with the same prompts' width, n and max_new_tokens, or none"
        )
