"""The programs that generation runs on the device: a prefill chunk, and the decode loop.

Both are compiled once for a model, a batch and a capacity; how many tokens are real, how many
steps to run and every number of the sampling are traced. The cache is donated to both.
"""

import functools
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

from kvjax.cache.state import KVCache
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask, Tokens
from kvjax.generation.context import Cached, Context
from kvjax.generation.model import Model
from kvjax.operations.rows import repeat
from kvjax.sampling.filters import Allowed, Logits, set_at
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.sampler import filter_logits, sample
from kvjax.sampling.scores import Scores, score_tokens


@pytree_dataclass
class Progress:
    """Where each row stands.

    ``token``: the newest, which the model has not seen yet; ``count``: new tokens; ``done``,
    ``broken``: finished, and finished because its logits were not finite numbers.
    """

    token: PerRow
    count: PerRow
    done: RowMask
    broken: RowMask


def choose_and_score(
    before: Progress,
    past: TokenHistory | None,
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    limit: Array,
    scores: int | None,
    *,
    allowed: Allowed | None = None,
) -> tuple[Progress, TokenHistory | None, Scores | None]:
    """The next token of the rows that are not done, their texts with it, and its scores;
    ``allowed``: see ``sample``."""
    raw = logits
    if past is not None:
        logits = past.apply_hook(logits, filters.hook)
    after, then = choose_tokens(before, past, logits, filters, settings, limit, allowed=allowed)
    found = None
    if scores is not None:
        filtered = None
        if not filters.greedy:
            filtered = filter_logits(
                logits.astype(jnp.float32),
                filters,
                settings,
                count=before.count,
                past=past,
                allowed=allowed,
            )
        found = score_tokens(
            raw, after.token, scores, filtered=filtered, temperature=settings.temperature
        )
    return after, then, found


def gather_vocab(logits: Logits, context: Context) -> Logits:
    """Logits with the whole vocabulary of its rows on every device of a cache's mesh: drawing looks
    at them many times, and programs should not depend on how they were divided."""
    spread = None if context.cache is None else context.cache.spread
    if spread is None:
        return logits
    return lax.with_sharding_constraint(logits, spread.sharding(spread.row_spec()))


def choose_tokens(
    progress: Progress,
    past: TokenHistory | None,
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    limit: Array,
    *,
    forced: PerRow | None = None,
    allowed: Allowed | None = None,
) -> tuple[Progress, TokenHistory | None]:
    """Choose the next token of the rows that are not done, and their texts with it.

    ``limit``: of all rows, or of each. ``forced``: int32[batch], tokens that are known already, -1
    for none. ``allowed``: see ``sample``.
    """
    token, finite = sample(
        logits, filters, settings, count=progress.count, past=past, allowed=allowed
    )
    if forced is not None:
        token = jnp.where(forced >= 0, forced, token)
    broken = progress.broken | (~progress.done & ~finite)
    taken = ~progress.done & finite
    token = jnp.where(taken, token, progress.token)
    count = progress.count + taken.astype(jnp.int32)
    ended = taken & jnp.any(token[:, None] == settings.eos, axis=-1)
    done = progress.done | broken | ended | (count >= limit)
    if past is not None:
        seen = past.seen
        if seen is not None:
            seen = set_at(seen, jnp.where(taken, token, seen.shape[1]), True)
        past = past.append_tokens(seen, token, taken)
    return Progress(token, count, done, broken), past


_T = TypeVar("_T")

MAX_STEPS = 128
"""The most steps that one dispatch of the decode loop can run."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("context", "logits"))
def prefill(
    model: Model,
    params: Any,
    context: Context,
    logits: Logits,
    tokens: Tokens,
    lengths: PerRow,
    ends: RowMask,
) -> tuple[Context, Logits]:
    """Feed a chunk of the prompts; the context, and the logits after its text.

    ``tokens`` are padded on the right, ``lengths`` of them real; ``ends``: rows whose prompts end
    here; ``logits``: of those whose prompts ended in an earlier chunk.
    """
    new, context = context.forward(model, params, tokens, lengths)
    return context, gather_vocab(jnp.where(ends[:, None], new, logits), context)


def repeat_rows(context: Context, logits: Logits, times: int) -> tuple[Context, Logits]:
    """Every row, and its logits, ``times`` times, one behind the other. Pages are used up, and stay
    where they are."""
    cache = context.cache
    if cache is None:
        return _repeated((context, logits), times)
    shared = [(x.keys, x.values) if x.policy.page_group else None for x in cache.layers]
    own = [replace(x, keys=None, values=None) if x.policy.page_group else x for x in cache.layers]
    cache, logits = _sampled(shared, replace(cache, layers=tuple(own)), logits, times)
    return Cached(cache), logits


@functools.partial(jax.jit, static_argnames="times")
def _repeated(arrays: _T, times: int) -> _T:
    return jax.tree.map(lambda x: jnp.repeat(x, times, axis=0), arrays)


@functools.partial(jax.jit, static_argnames="times", donate_argnames="shared")
def _sampled(shared: Any, cache: KVCache, logits: Logits, times: int) -> tuple[KVCache, Logits]:
    layers = [
        held if body is None else replace(held, keys=body[0], values=body[1])
        for held, body in zip(cache.layers, shared, strict=True)
    ]
    cache = repeat(replace(cache, layers=tuple(layers)), times)
    return cache, gather_vocab(jnp.repeat(logits, times, axis=0), Cached(cache))


@functools.partial(jax.jit, static_argnames=("filters", "scores"), donate_argnames="past")
def choose_first(
    logits: Logits,
    filters: Filters,
    settings: SamplingArrays,
    limit: Array,
    past: TokenHistory | None,
    scores: int | None = None,
) -> tuple[Progress, TokenHistory | None, Scores | None]:
    """Choose the first new token of each row, from the logits after its prompt; ``past`` and
    ``scores`` as of ``decode``, of [batch, 1]."""
    zeros = jnp.zeros(logits.shape[0], jnp.int32)
    progress = Progress(zeros, zeros, zeros > 0, zeros > 0)
    progress, past, found = choose_and_score(
        progress, past, logits, filters, settings, limit, scores
    )
    return progress, past, jax.tree.map(lambda x: x[:, None], found)


@functools.partial(
    jax.jit, static_argnames=("model", "filters", "scores"), donate_argnames=("context", "past")
)
def decode(
    model: Model,
    filters: Filters,
    params: Any,
    context: Context,
    progress: Progress,
    past: TokenHistory | None,
    halt: RowMask,
    settings: SamplingArrays,
    limit: Array,
    steps: Array,
    scores: int | None = None,
) -> tuple[Context, Progress, TokenHistory | None, Int[Array, "batch chunk"], Scores | None]:
    """Decode until ``steps`` more tokens are chosen, or all rows are done.

    ``past``: of each row, where a penalty or a hook asks for it; ``halt``: rows to end now;
    ``limit``: int32, new tokens after which a row is done; ``steps``: int32, at most ``MAX_STEPS``;
    ``scores``: the likeliest tokens that are told with each, None for no log-probabilities.

    Returns:
      Context, progress and ``past``, and int32[batch, CHUNK], the tokens chosen: as many of a row
      as its ``count`` has grown by; their scores, of [batch, CHUNK].
    """
    progress = Progress(progress.token, progress.count, progress.done | halt, progress.broken)
    return decode_loop(
        model, filters, params, context, progress, past, settings, limit, steps, scores, MAX_STEPS
    )


def decode_loop(
    model: Model,
    filters: Filters,
    params: Any,
    context: Context,
    progress: Progress,
    past: TokenHistory | None,
    settings: SamplingArrays,
    limit: Array,
    steps: Array,
    scores: int | None,
    room: int,
    *,
    go_on_broken: bool = False,
) -> tuple[Context, Progress, TokenHistory | None, Int[Array, "batch room"], Scores | None]:
    """``decode``, inside a program, of at most ``room`` steps; with ``go_on_broken`` rows go on
    beside those that are."""
    shape = progress.token.shape[0], room
    out = jnp.zeros(shape, jnp.int32), None if scores is None else Scores.zeros(shape, scores)

    def go_on(carry: Any) -> Array:
        step, _, progress, *_ = carry
        ending = jnp.all(progress.done)
        if not go_on_broken:
            ending |= jnp.any(progress.broken)
        return (step < steps) & ~ending

    def one(carry: Any) -> Any:
        step, context, progress, past, out = carry
        # A row that is done feeds nothing, so that its cache ends where its text does.
        lengths = (~progress.done).astype(jnp.int32)
        logits, context = context.forward(model, params, progress.token[:, None], lengths)
        logits = logits if filters.greedy and scores is None else gather_vocab(logits, context)
        progress, past, found = choose_and_score(
            progress, past, logits, filters, settings, limit, scores
        )
        out = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], step, axis=1),
            out,
            (progress.token, found),
        )
        return step + 1, context, progress, past, out

    carry = jnp.int32(0), context, progress, past, out
    _, context, progress, past, out = lax.while_loop(go_on, one, carry)
    return context, progress, past, *out
