"""The compiled programs of a generation: prefill of a chunk, the next token, and the decode loop.

Each is compiled once per model, batch and capacity. The number of real tokens, the number of steps
and the sampling parameters are traced. The cache is donated. A program continues a ``Context``,
which is a sequence in a cache or, without a cache, all tokens of the sequence.
"""

import functools
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, PyTree

from kvjax.cache.state import KVCache
from kvjax.core.array_ops import arange_row
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, PerRow, RowMask, Tokens
from kvjax.generation.model import Model
from kvjax.operations.rows import repeat, rewind
from kvjax.sampling.filters import Allowed, Logits, set_at
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.sampler import filter_logits, sample
from kvjax.sampling.scores import Scores, score_tokens


@pytree_dataclass
class Cached:
    """A sequence in a cache."""

    cache: KVCache

    def forward(
        self, model: Model, params: PyTree, tokens: Tokens, lengths: PerRow
    ) -> tuple[Logits, "Cached"]:
        """Append each row's first ``lengths`` tokens, and return the logits after the last one."""
        logits, cache = model.apply(params, tokens, self.cache, lengths=lengths, last_only=True)
        return logits[:, 0], Cached(cache)

    def forward_all(
        self, model: Model, params: PyTree, tokens: Tokens, lengths: PerRow
    ) -> tuple[Float[Array, "batch new vocab"], "Cached"]:
        """Append tokens like ``forward``, and return the logits after every token."""
        logits, cache = model.apply(params, tokens, self.cache, lengths=lengths)
        return logits, Cached(cache)

    def rewind(self, tokens: PerRow) -> "Cached":
        """Remove the newest ``tokens`` tokens of each row."""
        return Cached(rewind(self.cache, tokens))


@pytree_dataclass
class Uncached:
    """A sequence without a cache. Every step processes all its tokens again.

    Attributes:
      tokens: int32[batch, capacity], the tokens of each row.
      length: int32[batch], the number of tokens of each row.
      rotary_len: the length for which rotary frequencies are computed; None for the capacity.
    """

    tokens: Array
    length: Array
    rotary_len: int | None = static_field(default=None)

    @property
    def cache(self) -> None:
        """Always None."""

    def forward(
        self, model: Model, params: PyTree, tokens: Tokens, lengths: PerRow
    ) -> tuple[Logits, "Uncached"]:
        """Append each row's first ``lengths`` tokens, and return the logits after the last one."""
        capacity = self.tokens.shape[1]
        index = arange_row(capacity) - self.length[:, None]
        new = jnp.take_along_axis(tokens, jnp.clip(index, 0, tokens.shape[1] - 1), axis=1)
        tokens = jnp.where((index >= 0) & (index < lengths[:, None]), new, self.tokens)
        length = self.length + lengths
        max_len = self.rotary_len or capacity
        logits = model.apply(params, tokens, lengths=length, last_only=True, max_len=max_len)
        return logits[:, 0], Uncached(tokens, length, self.rotary_len)


Context = Cached | Uncached
_Past = TypeVar("_Past", TokenHistory, TokenHistory | None)


@pytree_dataclass
class Progress:
    """The state of each row.

    Attributes:
      token: the newest token, which the model will process next.
      count: the number of new tokens.
      done: whether the row has ended.
      broken: whether the row has ended because its logits were not finite.
    """

    token: PerRow
    count: PerRow
    done: RowMask
    broken: RowMask


def choose_and_score(
    progress: Progress,
    past: _Past,
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    limit: Array,
    logprobs: int | None,
    *,
    allowed: Allowed | None = None,
) -> tuple[Progress, _Past, Scores | None]:
    """Apply the user's hook, choose the next token of each unfinished row, and compute its scores.

    Arguments are as for ``choose_tokens`` and ``decode``. Scores are None if ``logprobs`` is None.
    """
    raw = logits
    if past is not None:
        logits = past.apply_hook(logits, filters.hook)
    after, history = choose_tokens(
        progress, past, logits, filters, sampling, limit, allowed=allowed
    )
    scores = None
    if logprobs is not None:
        filtered = None
        if not filters.greedy:
            filtered = filter_logits(
                logits.astype(jnp.float32),
                filters,
                sampling,
                count=progress.count,
                past=past,
                allowed=allowed,
            )
        scores = score_tokens(
            raw, after.token, logprobs, filtered=filtered, temperature=sampling.temperature
        )
    return after, history, scores


def gather_vocab(logits: Logits, context: Context) -> Logits:
    """On a mesh, replicate the vocabulary axis of logits, while rows stay sharded. Sampling reads
    logits many times, and programs should not depend on how the model sharded them."""
    mesh = None if context.cache is None else context.cache.mesh_sharding
    if mesh is None:
        return logits
    return lax.with_sharding_constraint(logits, mesh.sharding(mesh.row_spec()))


def choose_tokens(
    progress: Progress,
    past: _Past,
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    limit: Array,
    *,
    forced: PerRow | None = None,
    allowed: Allowed | None = None,
) -> tuple[Progress, _Past]:
    """Choose the next token of each unfinished row, and append it to the history.

    Args:
      progress, past: the rows before this token.
      logits, filters, sampling, allowed: as for ``sample``.
      limit: the number of new tokens after which a row ends: one number, or one per row.
      forced: int32[batch], tokens to use instead of drawing; -1 to draw.
    """
    token, finite = sample(
        logits, filters, sampling, count=progress.count, past=past, allowed=allowed
    )
    if forced is not None:
        token = jnp.where(forced >= 0, forced, token)
    broken = progress.broken | (~progress.done & ~finite)
    taken = ~progress.done & finite
    token = jnp.where(taken, token, progress.token)
    count = progress.count + taken.astype(jnp.int32)
    ended = taken & jnp.any(token[:, None] == sampling.eos, axis=-1)
    done = progress.done | broken | ended | (count >= limit)
    if past is not None:
        seen = past.seen
        if seen is not None:
            seen = set_at(seen, jnp.where(taken, token, seen.shape[1]), True)
        past = past.append_tokens(seen, token, taken)
    return Progress(token, count, done, broken), past


_T = TypeVar("_T")

MAX_STEPS = 128
"""The maximum number of steps that one dispatch of the decode loop runs."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("context", "logits"))
def prefill(
    model: Model,
    params: PyTree,
    context: Context,
    logits: Logits,
    tokens: Tokens,
    lengths: PerRow,
    ends: RowMask,
) -> tuple[Context, Logits]:
    """Process a chunk of the prompts.

    Args:
      model, params, context: the model, and the sequences before this chunk.
      logits: the logits of rows whose prompts ended in an earlier chunk.
      tokens: int32[batch, new], right-padded.
      lengths: int32[batch], the number of real tokens of each row.
      ends: bool[batch], the rows whose prompts end in this chunk.

    Returns:
      The context, and the logits after the last token of each prompt that has ended.
    """
    new, context = context.forward(model, params, tokens, lengths)
    return context, gather_vocab(jnp.where(ends[:, None], new, logits), context)


def repeat_rows(context: Context, logits: Logits, times: int) -> tuple[Context, Logits]:
    """Repeat every row and its logits ``times`` times, in consecutive rows. Repeated rows share
    pages, so pages are donated instead of copied."""
    cache = context.cache
    if cache is None:
        return _repeat_arrays((context, logits), times)
    pages = [(x.keys, x.values) if x.policy.page_group else None for x in cache.layers]
    layers = [
        replace(x, keys=None, values=None) if x.policy.page_group else x for x in cache.layers
    ]
    cache, logits = _repeat_cache(pages, replace(cache, layers=tuple(layers)), logits, times)
    return Cached(cache), logits


@functools.partial(jax.jit, static_argnames="times")
def _repeat_arrays(arrays: _T, times: int) -> _T:
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), arrays)


@functools.partial(jax.jit, static_argnames="times", donate_argnames="pages")
def _repeat_cache(
    pages: PyTree, cache: KVCache, logits: Logits, times: int
) -> tuple[KVCache, Logits]:
    layers = [
        layer if body is None else replace(layer, keys=body[0], values=body[1])
        for layer, body in zip(cache.layers, pages, strict=True)
    ]
    cache = repeat(replace(cache, layers=tuple(layers)), times)
    return cache, gather_vocab(jnp.repeat(logits, times, axis=0), Cached(cache))


@functools.partial(jax.jit, static_argnames=("filters", "logprobs"), donate_argnames="past")
def choose_first(
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    limit: Array,
    past: TokenHistory | None,
    logprobs: int | None = None,
) -> tuple[Progress, TokenHistory | None, Scores | None]:
    """Choose the first new token of each row, from the logits after its prompt. Arguments are as
    for ``decode``. Scores have the shape [batch, 1]."""
    zeros = jnp.zeros(logits.shape[0], jnp.int32)
    progress = Progress(zeros, zeros, zeros > 0, zeros > 0)
    progress, past, scores = choose_and_score(
        progress, past, logits, filters, sampling, limit, logprobs
    )
    return progress, past, jax.tree.map(lambda x: x[:, None], scores)


@functools.partial(
    jax.jit, static_argnames=("model", "filters", "logprobs"), donate_argnames=("context", "past")
)
def decode(
    model: Model,
    filters: Filters,
    params: PyTree,
    context: Context,
    progress: Progress,
    past: TokenHistory | None,
    halt: RowMask,
    sampling: SamplingArrays,
    limit: Array,
    steps: Array,
    logprobs: int | None = None,
) -> tuple[Context, Progress, TokenHistory | None, Int[Array, "batch chunk"], Scores | None]:
    """Choose ``steps`` more tokens per row, or stop when all rows have ended.

    Args:
      model, params: the model.
      context, progress: the rows.
      filters, sampling: how tokens are sampled.
      past: the tokens of each row, if a penalty or hook needs them.
      halt: bool[batch], the rows to end now.
      limit: int32[], the number of new tokens after which a row ends.
      steps: int32[], the number of steps, at most ``MAX_STEPS``.
      logprobs: how many of the most likely tokens to score with each new token; None for no scores.

    Returns:
      ``context``, ``progress`` and ``past``; the chosen tokens, int32[batch, MAX_STEPS]; and their
      scores, [batch, MAX_STEPS]. The number of tokens of a row is the increase of its ``count``.
    """
    progress = Progress(progress.token, progress.count, progress.done | halt, progress.broken)
    return decode_loop(
        model, filters, params, context, progress, past, sampling, limit, steps, logprobs, MAX_STEPS
    )


def decode_loop(
    model: Model,
    filters: Filters,
    params: PyTree,
    context: Context,
    progress: Progress,
    past: TokenHistory | None,
    sampling: SamplingArrays,
    limit: Array,
    steps: Array,
    logprobs: int | None,
    max_steps: int,
    *,
    ignore_broken: bool = False,
) -> tuple[Context, Progress, TokenHistory | None, Int[Array, "batch max_steps"], Scores | None]:
    """Do the work of ``decode`` as a plain function, with at most ``max_steps`` steps. Unless
    ``ignore_broken``, it stops when a row's logits are not finite."""
    shape = progress.token.shape[0], max_steps
    out = jnp.zeros(shape, jnp.int32), None if logprobs is None else Scores.zeros(shape, logprobs)

    def running(carry: PyTree) -> Array:
        step, _, progress, *_ = carry
        stop = jnp.all(progress.done)
        if not ignore_broken:
            stop |= jnp.any(progress.broken)
        return (step < steps) & ~stop

    def step_once(carry: PyTree) -> PyTree:
        step, context, progress, past, out = carry
        # A row that has ended appends no token, so its cache ends where its text does.
        lengths = (~progress.done).astype(jnp.int32)
        logits, context = context.forward(model, params, progress.token[:, None], lengths)
        logits = logits if filters.greedy and logprobs is None else gather_vocab(logits, context)
        progress, past, scores = choose_and_score(
            progress, past, logits, filters, sampling, limit, logprobs
        )
        out = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], step, axis=1),
            out,
            (progress.token, scores),
        )
        return step + 1, context, progress, past, out

    carry = jnp.int32(0), context, progress, past, out
    _, context, progress, past, out = lax.while_loop(running, step_once, carry)
    return context, progress, past, *out
