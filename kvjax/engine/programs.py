"""The programs that an engine runs: chunks of prompts, rounds of decoding, rows put and taken.

The host counts: how long each row is, which pages it has and how many rounds it takes part in are
given with every program. What a program leaves for the next one is on the device: newest tokens,
which rows have ended, tails and windows. So the next program can be given before this one is done.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, UInt

from kvjax.attention.paths import ragged_batches
from kvjax.cache.state import KVCache
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask, Tokens
from kvjax.generation.context import Cached, Context
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, choose_tokens, gather_vocab
from kvjax.paging.allocator import FixedPageTables
from kvjax.placement.pages import gather_pages
from kvjax.prefixes.checkpoints import row_arrays, with_row_arrays
from kvjax.sampling.filters import ALL_ALLOWED, Allowed, Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import SamplingArrays
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import MAX_LOGPROBS, Scores, score_tokens


@pytree_dataclass
class EngineState:
    """What the device has of all rows: ``cache``, whose lengths and tables are given anew with each
    program; ``progress``, where each row stands; ``past``: the text of each row, which its filters
    go by, where they do; else anything."""

    cache: KVCache
    progress: Progress
    past: TokenHistory


@pytree_dataclass
class SamplingParams:
    """What rows are asked for, an entry a row: the numbers of sampling; ``limit``: int32, new
    tokens after which each is done; ``scores``: int32, 0 for no log-probability, else one more than
    the likeliest tokens that are told; ``search``: bool, whether these are of those allowed."""

    sampling: SamplingArrays
    limit: PerRow
    scores: PerRow
    search: RowMask


@pytree_dataclass
class PrefillInputs:
    """A chunk of the prompts of some rows.

    ``rows``: int32[n], which; ``tokens``: int32[n, new], ``lengths`` of them real, behind the
    ``starts`` that they have; ``tables``: of each kind of layers, int32[n, columns]. ``fresh``:
    bool[n], rows that begin, and have nothing but pages; ``ends``: bool[n], prompts that end here;
    ``forced``: int32[n], their first tokens, where these are known, or -1; ``allowed``: bits of
    what these may be.
    """

    rows: PerRow
    tokens: Tokens
    lengths: PerRow
    starts: PerRow
    tables: tuple[Array, ...]
    fresh: RowMask
    ends: RowMask
    forced: PerRow
    allowed: Allowed
    asked: SamplingParams


@pytree_dataclass
class DecodeInputs:
    """Some rounds of decoding, of all rows in order, or of some.

    ``rows``: int32[n], which; ``lengths``: int32[n], tokens that each has in the cache; ``rounds``:
    int32[n], how many it takes part in; ``tables``: as of ``PrefillInputs``; ``forced``: int32[n,
    most], tokens that are known already, or -1. ``allowed``: bits of what the first of them may be.
    """

    rows: PerRow
    lengths: PerRow
    rounds: PerRow
    tables: tuple[Array, ...]
    forced: Int[Array, "rows most"]
    allowed: Allowed
    asked: SamplingParams


@pytree_dataclass
class VerifyInputs:
    """Drafts of some rows.

    ``rows``: int32[n], which; ``tokens``: int32[n, 1 + most], each row's newest token, and behind
    it ``count`` drafted ones, int32[n]; ``starts``: int32[n], tokens that each has in the cache;
    ``tables``: of each kind of layers, int32[n, columns]. ``allowed``:
    bits of what may come behind each token.
    """

    rows: PerRow
    tokens: Tokens
    count: PerRow
    starts: PerRow
    tables: tuple[Array, ...]
    allowed: UInt[Array, "rows places words"]
    asked: SamplingParams


@pytree_dataclass
class ProgramOutput:
    """What a program has done: ``tokens``: int32[rows, most], those that it chose, as many of a row
    as its ``count`` has grown by; their ``scores``, where they were asked for; ``count``, ``done``,
    ``broken``: as of ``Progress``; ``status``: int32[rows], of the cache; ``prompt``: scores of the
    tokens of a prompt, [1, new], each of the next one, if they were requested."""

    tokens: Int[Array, "rows most"]
    scores: Scores
    count: PerRow
    done: RowMask
    broken: RowMask
    status: PerRow
    prompt: Scores | None = None


SCORED = 32
"""Places of a prompt that are scored at once."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames="held")
def feed(
    held: EngineState,
    model: Model,
    params: Any,
    piece: PrefillInputs,
    following: Tokens | None = None,
) -> tuple[EngineState, ProgramOutput]:
    """Feed a chunk of prompts, and choose the first token of those that end in it; ``following``:
    int32[1, new], the token after each one of a single prompt, to be scored."""
    before = some_of(held, piece.rows)
    starts, written = piece.starts, before.cache.written
    written = jnp.where(piece.fresh[:, None], starts[:, None], written)
    context: Any = context_of(before.cache, starts, piece.tables, written=written)
    told = None
    if following is None:
        logits, context = context.forward(model, params, piece.tokens, piece.lengths)
    else:
        every, context = context.forward_all(model, params, piece.tokens, piece.lengths)
        logits, told = every[:, piece.lengths[0] - 1], scores_along(every, following, context)
    zeros = jnp.zeros_like(piece.rows)
    waiting = Progress(zeros, zeros, ~piece.ends, zeros > 0)
    progress, past, scores = choose_next(
        waiting, before.past, logits, context, piece.asked, piece.forced, piece.allowed
    )
    # Where a prompt goes on, nothing was chosen.
    progress = jax.tree.map(
        lambda new, old: jnp.where(piece.ends, new, old), progress, before.progress
    )
    after = EngineState(context.cache, progress, past)
    tokens, scores = jax.tree.map(lambda x: x[:, None], (progress.token, scores))
    report = replace(report_of(after, tokens, scores), prompt=told)
    return with_some(held, piece.rows, after), report


@functools.partial(jax.jit, static_argnames=("model", "exact"), donate_argnames="held")
def decode(
    held: EngineState, model: Model, params: Any, call: DecodeInputs, *, exact: bool
) -> tuple[EngineState, ProgramOutput]:
    """Decode, until each row has taken part in its rounds, or is done; ``exact``: such that what it
    gets does not depend on the others."""
    before, (rows, most) = some_of(held, call.rows), call.forced.shape
    begins = (call.rounds > 0) & ~before.progress.done
    written = written_to(before.cache, jnp.where(begins, call.lengths + call.rounds, 0))
    lengths = jnp.where(begins, call.lengths, 0)
    context = context_of(before.cache, lengths, call.tables, written=written)
    out = jnp.zeros((rows, most), jnp.int32), Scores.zeros((rows, most), MAX_LOGPROBS)

    def active(step: Array, progress: Progress) -> RowMask:
        return begins & (step < call.rounds) & ~progress.done

    def go_on(carry: Any) -> Array:
        step, _, progress, *_ = carry
        return jnp.any(active(step, progress))

    def one(carry: Any) -> Any:
        step, context, progress, past, (tokens, scores) = carry
        now = active(step, progress)
        with ragged_batches(exact=exact):
            logits, context = context.forward(
                model, params, progress.token[:, None], now.astype(jnp.int32)
            )
        waiting = replace(progress, done=progress.done | ~now)
        forced = lax.dynamic_index_in_dim(call.forced, step, axis=1, keepdims=False)
        allowed = jnp.where(step == 0, call.allowed, ALL_ALLOWED)
        chosen, past, found = choose_next(
            waiting, past, logits, context, call.asked, forced, allowed
        )
        progress = replace(chosen, done=jnp.where(now, chosen.done, progress.done))
        tokens, scores = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], step, axis=1),
            (tokens, scores),
            (progress.token, found),
        )
        return step + 1, context, progress, past, (tokens, scores)

    begin = jnp.int32(0), context, before.progress, before.past, out
    _, context, progress, past, (tokens, scores) = lax.while_loop(go_on, one, begin)
    after = EngineState(context.cache, progress, past)
    return with_some(held, call.rows, after), report_of(after, tokens, scores)


@functools.partial(jax.jit, donate_argnames="held")
def mark(
    held: EngineState, row: Array, tokens: Int[Array, " n"], length: Array
) -> tuple[EngineState, None]:
    """Let a row's text be so many of these tokens, padded with numbers that are none's."""
    past = held.past
    assert past.seen is not None and past.tokens is not None and past.length is not None
    mine = jnp.zeros(past.seen.shape[1], bool).at[tokens].set(True, mode="drop")
    past = TokenHistory(
        past.seen.at[row].set(mine),
        past.tokens.at[row].set(tokens),
        past.length.at[row].set(length),
    )
    return replace(held, past=past), None


@functools.partial(jax.jit, static_argnames="splits")
def take(held: EngineState, row: Array, parts: list[Array], *, splits: Any) -> Any:
    """What a row has beside full pages, and where it stands.

    ``parts``: of each kind of layers whose pages are of blocks int32[1], the page that is not full;
    ``splits``: the numbers of these layers, of each.
    """
    cache = held.cache

    def mine(tree: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False), tree)

    rows = [mine(row_arrays(layer.near())) for layer in cache.layers], mine(cache.written)
    found = []
    for page, entries in zip(parts, splits, strict=True):
        for layer in (cache.layers[n] for n in entries):
            body, placement = (layer.keys, layer.values), layer.policy.placement
            pages = gather_pages(body, layer.orders, placement, page)
            found.append(jax.tree.map(lambda x: x[0], pages))
    return (rows, found), mine((held.progress, held.past))


@functools.partial(jax.jit, donate_argnames="held")
def put(held: EngineState, row: Array, rows: Any, stands: Any) -> tuple[EngineState, None]:
    """A row with what ``take`` gave of its layers, and where it stands."""
    cache = held.cache

    def into(tree: Any, mine: Any) -> Any:
        return jax.tree.map(lambda x, new: x.at[row].set(new), tree, mine)

    owns, written = rows
    layers = tuple(
        with_row_arrays(layer, into(row_arrays(layer), mine))
        for layer, mine in zip(cache.layers, owns, strict=True)
    )
    cache = replace(cache, layers=layers, written=into(cache.written, written))
    return EngineState(cache, *into((held.progress, held.past), stands)), None


def some_of(held: EngineState, rows: PerRow) -> EngineState:
    """Some rows, int32[n]; what is behind the last is anything. All of them, in order, are as they
    are."""
    if len(rows) == held.cache.batch:
        return held
    cache = held.cache
    layers = tuple(layer.take_rows(rows) for layer in cache.layers)
    written, progress, past = jax.tree.map(
        lambda x: jnp.take(x, rows, axis=0, mode="clip"),
        (cache.written, held.progress, held.past),
    )
    return EngineState(replace(cache, layers=layers, written=written), progress, past)


def with_some(held: EngineState, rows: PerRow, after: EngineState) -> EngineState:
    """With some rows as a program has left them; lengths and tables are given with the next."""
    cache, new = held.cache, after.cache
    if len(rows) == cache.batch:
        return replace(after, cache=replace(cache, layers=new.layers, written=new.written))

    def into(all: Any, some: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), all, some)

    both = zip(cache.layers, new.layers, strict=True)
    layers = tuple(layer.set_rows(rows, found) for layer, found in both)
    cache = replace(cache, layers=layers, written=into(cache.written, new.written))
    return EngineState(cache, into(held.progress, after.progress), into(held.past, after.past))


def context_of(
    cache: KVCache, length: PerRow, tables: tuple[Array, ...], **changes: Array
) -> Cached:
    """The rows as a program is given them: so long, and with these tables."""
    pools: Any = tuple(
        FixedPageTables(table, page_group.layout.pool or 0)
        for table, page_group in zip(tables, cache.page_groups, strict=True)
    )
    status = jnp.zeros_like(length)
    return Cached(replace(cache, length=length, status=status, pools=pools, **changes))


def written_to(cache: KVCache, ends: PerRow) -> Array:
    """What a cache's layers have come to where rows will end there. Windows in pages have given
    back what is behind that: whatever stands there now is no number of the row's. Of layers with a
    tail the marks say what that holds."""
    raw = jnp.array([x.policy.page_group is not None and x.tail is None for x in cache.layers])
    return jnp.where(raw, jnp.maximum(cache.written, ends[:, None]), cache.written)


def report_of(after: EngineState, tokens: Array, scores: Scores) -> ProgramOutput:
    progress = after.progress
    return ProgramOutput(
        tokens, scores, progress.count, progress.done, progress.broken, after.cache.status
    )


def scores_along(every: Float[Array, "1 new vocab"], tokens: Tokens, context: Context) -> Scores:
    """The scores of the token after each one of a single row, from the logits there."""
    logits = gather_vocab(every, context)[0]
    most = min(MAX_LOGPROBS, logits.shape[1])

    def scored(one: tuple[Array, Array]) -> Scores:
        row, token = (x[None] for x in one)
        none = jnp.zeros(1, jnp.float32)
        found = score_tokens(row, token, most, filtered=None, temperature=none)
        return jax.tree.map(lambda x: x[0], found)

    # Few places at once: each takes several rows of the vocabulary.
    found = lax.map(scored, (logits, tokens[0]), batch_size=SCORED)
    return jax.tree.map(lambda x: x[None], found)


def choose_next(
    progress: Progress,
    past: TokenHistory,
    logits: Logits,
    context: Context,
    asked: SamplingParams,
    forced: PerRow,
    allowed: Allowed | None,
) -> tuple[Progress, TokenHistory, Scores]:
    """The next token of the rows that are not done, and its scores where some row asks for them."""
    settings, cache = asked.sampling, context.cache
    filters = replace(settings.filters, mesh=cache is not None and cache.spread is not None)
    logits = gather_vocab(logits, context)
    after, then = choose_tokens(
        progress,
        past,
        logits,
        filters,
        settings,
        asked.limit,
        forced=forced,
        allowed=allowed,
    )
    batch, most = logits.shape[0], min(MAX_LOGPROBS, logits.shape[1])

    def scored(logits: Logits) -> Scores:
        filtered = filter_logits(
            logits.astype(jnp.float32),
            filters,
            settings,
            count=progress.count,
            past=past,
            allowed=allowed,
        )
        among = None
        if allowed is not None:
            among = jnp.where(asked.search[:, None], allowed, ALL_ALLOWED)
        found = score_tokens(
            logits,
            after.token,
            most,
            filtered=filtered,
            temperature=settings.temperature,
            among=among,
        )
        more = ((0, 0), (0, MAX_LOGPROBS - most))
        likeliest = jnp.pad(found.likeliest, more, constant_values=-jnp.inf)
        return replace(found, ids=jnp.pad(found.ids, more), likeliest=likeliest)

    def none(logits: Logits) -> Scores:
        return Scores.zeros((batch,), MAX_LOGPROBS)

    assert then is not None
    return after, then, lax.cond(jnp.any(asked.scores > 0), scored, none, logits)
