"""Log-probabilities of texts that are given."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import INT32_MAX, as_int, as_list, is_traced
from kvjax.generation.capacity import choose_capacity
from kvjax.generation.inputs import Prompts, tokenize_prompts
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model, check_model
from kvjax.generation.request import padded_width
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.operations.rows import select
from kvjax.policies.presets import PolicyChoice
from kvjax.sampling.filters import Logits
from kvjax.sampling.params import Filters, SamplingArrays, prepare_sampling
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import take_tokens

Continuations = Sequence[str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]]


@pytree_dataclass
class Scored:
    """Of each continuation, a row: ``tokens``, int32[rows, new], and ``lengths``, how many are
    real, int32[rows]; ``logprobs``, float32[rows, new], by the model's own distribution, and
    ``drawn``, by the one that tokens would be drawn from with the temperature and filters that were
    given; both are 0 behind a row's tokens."""

    tokens: Array
    lengths: Array
    logprobs: Array
    drawn: Array

    @property
    def totals(self) -> Array:
        """The log-probability of each continuation as a whole, by the model's own distribution:
        float32[rows]."""
        return jnp.sum(self.logprobs, axis=1)


@allow_host_to_device
def score(
    lm: LanguageModel,
    prompts: Prompts,
    continuations: Continuations,
    *,
    cache: PolicyChoice = "static",
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> Scored:
    """Log-probabilities of continuations of prompts, each prompt read once for all of its own.

    Differentiable through the parameters: ``jax.grad(lambda params:
    kvjax.score(lm.with_params(params), prompts, continuations).totals.sum())``; it may stand in
    ``jit``.

    Args:
      lm, prompts: as of ``generate``.
      continuations: for each prompt a text or a list of token ids, or a list of several of these.
      cache: a policy, or its name.
      temperature, top_k, top_p, min_p, typical_p: of the distribution that ``drawn`` is of.
      prefill_chunk: tokens of prompts and of continuations that are fed together.

    Returns:
      One row for each continuation, a prompt's one behind the other.

    Raises:
      ValueError: if there is not an entry of continuations for each prompt, one is empty, or a
        token is not in the vocabulary; if prompt and continuation are more than the model's
        positions; on a mesh, if its ``data`` does not divide the prompts, and the continuations.
    """
    check_model(lm, inside=True)
    chunk = as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX)
    rows = tokenize_prompts(lm, prompts, [])
    if isinstance(continuations, str):
        continuations = [continuations]
    continuations = as_list("continuations", continuations, "a list with an entry for each prompt")
    if len(continuations) != len(rows):
        raise ValueError(
            f"{len(rows)} prompts and {len(continuations)} entries of continuations: give one a "
            "prompt, a continuation or a list of several"
        )
    each = [_several(lm, n, entry) for n, entry in enumerate(continuations)]
    of = np.array([prompt for prompt, entry in enumerate(each) for _ in entry], np.int32)
    new = [ids for entry in each for ids in entry]
    longest, most = max(map(len, rows)), max(map(len, new))
    capacity = choose_capacity(lm.config, longest, most, None, None, new="a continuation of ")
    held = allocate(
        lm.config, cache, batch=len(rows), max_len=capacity, initial_len=capacity, mesh=lm.mesh
    )
    last, held = _fed(lm, held, rows, chunk, last_only=True)
    held = select(held, of.tolist()) if len(of) != len(rows) else held
    # The last token of a continuation is fed to nobody.
    every, _ = _fed(lm, held, [ids[:-1] for ids in new], chunk, last_only=False)
    filters, settings = prepare_sampling(
        seeds=[0] * len(new),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
    )
    before = last[of] if every is None else jnp.concatenate([last[of], every], axis=1)
    tokens, lengths = _padded(new, before.shape[1])
    logprobs, drawn = _scored(filters, settings, before, jnp.asarray(tokens), lengths)
    return Scored(
        jnp.asarray(tokens[:, :most]), jnp.asarray(lengths), logprobs[:, :most], drawn[:, :most]
    )


def _several(lm: LanguageModel, prompt: int, entry: Any) -> list[list[int]]:
    """The continuations of a prompt, as token ids."""
    single = isinstance(entry, str)
    some = [entry] if single else as_list(f"the continuations of prompt {prompt}", entry, "a list")
    single |= bool(some) and not isinstance(some[0], str) and np.ndim(some[0]) == 0
    entry = [entry] if single else some
    if not entry:
        raise ValueError(f"prompt {prompt} has no continuations: the list is empty")
    # A second BOS token would stand inside the text.
    return tokenize_prompts(lm, entry, [1] * len(entry), what=f"of prompt {prompt} continuation")


def _fed(
    lm: LanguageModel, cache: KVCache, rows: list[list[int]], chunk: int, *, last_only: bool
) -> tuple[Any, KVCache]:
    """Logits of rows' tokens, [batch, 1 or new, vocab], None where there are none, and the cache;
    ``new`` is their number, filled up so that few programs are compiled."""
    longest = max(map(len, rows))
    full, rest = longest // chunk * chunk, longest % chunk
    tokens, lengths = _padded(rows, full + (padded_width(rest, chunk) if rest else 0))
    found: list[Any] = []
    # What a derivative needs of the cache is kept; else it is written where it is.
    call = _call if any(map(is_traced, jax.tree.leaves((lm.params, cache)))) else _donating
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        real = np.clip(lengths - start, 0, part.shape[1]).astype(np.int32)
        logits, cache = call(lm.architecture, lm.params, part, cache, real, last_only)
        if last_only and found:
            found = [jnp.where((real > 0)[:, None, None], logits, found[0])]
        else:
            found.append(logits)
    return (jnp.concatenate(found, axis=1) if found else None), cache


def _fed_once(
    model: Model, params: Any, tokens: Tokens, cache: KVCache, lengths: PerRow, last_only: bool
) -> tuple[Array, KVCache]:
    return model.apply(params, tokens, cache, lengths=lengths, last_only=last_only)


_call = jax.jit(_fed_once, static_argnames=("model", "last_only"))
_donating = jax.jit(_fed_once, static_argnames=("model", "last_only"), donate_argnames="cache")


@functools.partial(jax.jit, static_argnames="filters")
def _scored(
    filters: Filters, settings: SamplingArrays, logits: Array, tokens: Array, lengths: PerRow
) -> tuple[Array, Array]:
    """float32[rows, new] twice: by the model's own distribution, and by the one drawn from."""
    logits = logits.astype(jnp.float32)
    real = arange_row(tokens.shape[1]) < lengths[:, None]
    own = take_tokens(jax.nn.log_softmax(logits, axis=-1), tokens)
    drawn = jax.vmap(
        lambda each: filtered_log_softmax(each, filters, settings), in_axes=1, out_axes=1
    )(logits)
    return jnp.where(real, own, 0), jnp.where(real, take_tokens(drawn, tokens), 0)


def filtered_log_softmax(logits: Logits, filters: Filters, settings: SamplingArrays) -> Array:
    """log-probabilities, float32[batch, vocab], of what tokens are drawn from, differentiable: what
    the filters leave out is at minus infinity."""
    if filters.greedy:
        best = jnp.argmax(logits, axis=-1)[:, None] == arange_row(logits.shape[1])
        return jnp.where(best, 0.0, -jnp.inf)
    count = jnp.zeros(logits.shape[0], jnp.int32)
    left = filter_logits(jax.lax.stop_gradient(logits), filters, settings, count=count)
    warm = logits / settings.temperature[:, None]
    return jax.nn.log_softmax(jnp.where(jnp.isfinite(left), warm, -jnp.inf), axis=-1)


def _padded(rows: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """int32[batch, width], padded with 0, and int32[batch]."""
    lengths = np.array([len(ids) for ids in rows], np.int32)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths
