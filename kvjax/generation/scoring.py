"""``score``: log-probabilities of given continuations."""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from kvjax.cache.creation import allocate
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.mesh_context import allow_host_to_device
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import INT32_MAX, ArgumentError, as_int, as_list, is_traced
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model, check_model, choose_capacity
from kvjax.generation.options import Prompts, explicit_signature, tokenize_prompts
from kvjax.generation.request import padded_width
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.operations.rows import select
from kvjax.policies.presets import PolicyChoice
from kvjax.sampling.filters import Logits
from kvjax.sampling.params import Filters, SamplingArrays, SamplingKeywords, prepare_sampling
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import take_tokens

Continuations = Sequence[str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]]


@pytree_dataclass
class Scored:
    """The scores of continuations, one row each.

    Attributes:
      tokens: int32[rows, new], right-padded.
      lengths: int32[rows], the number of real tokens.
      logprobs: float32[rows, new], log-probabilities under the model's distribution; 0 for padding.
      sampling_logprobs: float32[rows, new], log-probabilities under the distribution from which
        tokens would be drawn with the given temperature and filters; 0 for padding.

    Example:
      ```python
      scored = kvjax.score(lm, "The json module", [" provides"])
      print(scored.tokens, scored.logprobs, scored.totals)
      ```
    """

    tokens: Array
    lengths: Array
    logprobs: Array
    sampling_logprobs: Array

    @property
    def totals(self) -> Array:
        """The log-probability of each continuation, float32[rows]."""
        return jnp.sum(self.logprobs, axis=1)


@explicit_signature(SamplingKeywords, temperature=1.0)
@allow_host_to_device
def score(
    lm: LanguageModel,
    prompts: Prompts,
    continuations: Continuations,
    *,
    cache: PolicyChoice = "static",
    prefill_chunk: int = PREFILL_CHUNK,
    **sampling: Unpack[SamplingKeywords],
) -> Scored:
    """Compute log-probabilities of continuations of prompts. Each prompt is processed once for all
    its continuations.

    The function is differentiable with respect to the parameters: ``jax.grad(lambda params:
    kvjax.score(lm.with_params(params), prompts, continuations).totals.sum())``. It works inside
    ``jit``.

    Args:
      lm, prompts: as for ``generate``.
      continuations: for each prompt, a text, a list of token ids, or a list of several texts or
        lists of token ids.
      cache: a policy, or its name.
      sampling: sampling parameters of the distribution for ``Scored.sampling_logprobs``, as for
        ``generate``. ``temperature`` is 1 by default. ``xtc_probability`` is not supported, because
        its effect depends on the seed of each draw.
      prefill_chunk: the maximum number of tokens of prompts and continuations that are processed
        together.

    Returns:
      One row per continuation. The continuations of a prompt are in consecutive rows.

    Raises:
      ValueError: if ``continuations`` does not have one entry per prompt, an entry is empty, a
        token is outside the vocabulary, or a prompt with its continuation exceeds the model's
        positions. On a mesh, also if ``data`` does not divide the number of prompts or of
        continuations.

    Example:
      ```python
      scored = kvjax.score(lm, "The json module", [[" provides", " forgets"]])
      print(scored.totals)  # the log-probability of each continuation
      ```
    """
    check_model(lm, inside=True)
    chunk = as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX)
    if sampling.get("xtc_probability"):
        message = "score can't use xtc_probability: its effect depends on the seed of each draw"
        raise ArgumentError(message, param="xtc_probability")
    rows = tokenize_prompts(lm, prompts, [])
    if isinstance(continuations, str):
        continuations = [continuations]
    continuations = as_list("continuations", continuations, "a list with an entry for each prompt")
    if len(continuations) != len(rows):
        message = (
            f"{len(rows)} prompts, but {len(continuations)} entries of continuations: give one per "
            "prompt, a continuation or a list of several"
        )
        raise ArgumentError(message, param="continuations")
    entries = [_tokenize_entry(lm, n, entry) for n, entry in enumerate(continuations)]
    prompt_of = np.array([prompt for prompt, entry in enumerate(entries) for _ in entry], np.int32)
    new = [ids for entry in entries for ids in entry]
    longest, most = max(map(len, rows)), max(map(len, new))
    capacity = choose_capacity(lm.config, longest, most, None, None, new="a continuation of ")
    kv_cache = allocate(
        lm.config, cache, batch=len(rows), max_len=capacity, initial_len=capacity, mesh=lm.mesh
    )
    last, kv_cache = _process(lm, kv_cache, rows, chunk, last_only=True)
    if len(prompt_of) != len(rows):
        kv_cache = select(kv_cache, prompt_of.tolist())
    # The logits after the last token of a continuation are not needed.
    after, _ = _process(lm, kv_cache, [ids[:-1] for ids in new], chunk, last_only=False)
    logits = last[prompt_of]
    logits = logits if after is None else jnp.concatenate([logits, after], axis=1)
    tokens, lengths = _pad(new, logits.shape[1])
    with_temperature: SamplingKeywords = {"temperature": 1.0, **sampling}
    filters, arrays = prepare_sampling(seeds=[0] * len(new), **with_temperature)
    logprobs, drawn = _score_tokens(filters, arrays, logits, jnp.asarray(tokens), lengths)
    return Scored(
        jnp.asarray(tokens[:, :most]), jnp.asarray(lengths), logprobs[:, :most], drawn[:, :most]
    )


def _tokenize_entry(lm: LanguageModel, prompt: int, entry: Any) -> list[list[int]]:
    """Tokenize a prompt's continuations."""
    single = isinstance(entry, str)
    what = f"the continuations of prompt {prompt}"
    items = [entry] if single else as_list(what, entry, "a list", "continuations")
    single |= bool(items) and not isinstance(items[0], str) and np.ndim(items[0]) == 0
    entries = [entry] if single else items
    if not entries:
        message = f"prompt {prompt} has no continuations: the list is empty"
        raise ArgumentError(message, param="continuations")
    # Pass lengths above 0, so that a continuation gets no BOS token.
    what = f"of prompt {prompt} continuation"
    return tokenize_prompts(lm, entries, [1] * len(entries), what=what, param="continuations")


def _process(
    lm: LanguageModel, cache: KVCache, rows: list[list[int]], chunk: int, *, last_only: bool
) -> tuple[Any, KVCache]:
    """Append tokens to a cache, chunk by chunk.

    Returns:
      The logits and the cache. The logits are [batch, 1, vocab], after the last token of each row,
      or [batch, width, vocab], after every token, where ``width`` is padded. They are None if the
      rows have no tokens.
    """
    longest = max(map(len, rows))
    full, rest = longest // chunk * chunk, longest % chunk
    tokens, lengths = _pad(rows, full + (padded_width(rest, chunk) if rest else 0))
    outputs: list[Array] = []
    # A derivative needs the old caches, so they are donated only if nothing is traced.
    call = _call if any(map(is_traced, jax.tree.leaves((lm.params, cache)))) else _donating_call
    for start in range(0, tokens.shape[1], chunk):
        part = tokens[:, start : start + chunk]
        real = np.clip(lengths - start, 0, part.shape[1]).astype(np.int32)
        logits, cache = call(lm.architecture, lm.params, part, cache, real, last_only)
        if last_only and outputs:
            outputs = [jnp.where((real > 0)[:, None, None], logits, outputs[0])]
        else:
            outputs.append(logits)
    return (jnp.concatenate(outputs, axis=1) if outputs else None), cache


def _apply(
    model: Model, params: PyTree, tokens: Tokens, cache: KVCache, lengths: PerRow, last_only: bool
) -> tuple[Array, KVCache]:
    return model.apply(params, tokens, cache, lengths=lengths, last_only=last_only)


_call = jax.jit(_apply, static_argnames=("model", "last_only"))
_donating_call = jax.jit(_apply, static_argnames=("model", "last_only"), donate_argnames="cache")


@functools.partial(jax.jit, static_argnames="filters")
def _score_tokens(
    filters: Filters, sampling: SamplingArrays, logits: Array, tokens: Array, lengths: PerRow
) -> tuple[Array, Array]:
    """Return the log-probabilities of tokens under the model's distribution and under the filtered
    distribution, both float32[rows, new]."""
    logits = logits.astype(jnp.float32)
    real = arange_row(tokens.shape[1]) < lengths[:, None]
    own = take_tokens(jax.nn.log_softmax(logits, axis=-1), tokens)
    drawn = jax.vmap(lambda x: filtered_log_softmax(x, filters, sampling), in_axes=1, out_axes=1)(
        logits
    )
    return jnp.where(real, own, 0), jnp.where(real, take_tokens(drawn, tokens), 0)


def filtered_log_softmax(logits: Logits, filters: Filters, sampling: SamplingArrays) -> Array:
    """Compute log-probabilities of the distribution from which tokens are drawn, float32[batch,
    vocab]. Tokens that the filters remove get minus infinity. The function is differentiable."""
    if filters.greedy:
        best = jnp.argmax(logits, axis=-1)[:, None] == arange_row(logits.shape[1])
        return jnp.where(best, 0.0, -jnp.inf)
    count = jnp.zeros(logits.shape[0], jnp.int32)
    kept = filter_logits(jax.lax.stop_gradient(logits), filters, sampling, count=count)
    warm = logits / sampling.temperature[:, None]
    return jax.nn.log_softmax(jnp.where(jnp.isfinite(kept), warm, -jnp.inf), axis=-1)


def _pad(rows: list[list[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Pad rows with 0. Returns the tokens, int32[batch, width], and the lengths, int32[batch]."""
    lengths = np.array([len(ids) for ids in rows], np.int32)
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, lengths
