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
from jaxtyping import Float, Int

from kvjax.attention.paths import rows_of_any_length
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, PerRow, RowMask, Tokens
from kvjax.engine.calls import Asked, Held, Piece, Report, Rounds
from kvjax.generation.context import Cached, Context
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, choose, whole
from kvjax.paging.given import GivenPages
from kvjax.placement.pages import pages_at
from kvjax.prefixes.checkpoints import own, with_own
from kvjax.sampling.filters import EVERY, Allowed, Logits
from kvjax.sampling.history import Past
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import MOST_SCORES, Scores, scores_of

SCORED = 32
"""Places of a prompt that are scored at once."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames="held")
def feed(
    held: Held, model: Model, params: Any, piece: Piece, following: Tokens | None = None
) -> tuple[Held, Report]:
    """Feed a chunk of prompts, and choose the first token of those that end in it; ``following``:
    int32[1, new], the token after each one of a single prompt, to be scored."""
    before = some_of(held, piece.rows)
    starts, written = piece.starts, before.cache.written
    written = jnp.where(piece.fresh[:, None], starts[:, None], written)
    context: Any = context_of(before.cache, starts, piece.tables, written=written)
    told = None
    if following is None:
        logits, context = context.feed(model, params, piece.tokens, piece.lengths)
    else:
        every, context = context.feed_all(model, params, piece.tokens, piece.lengths)
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
    after = Held(context.cache, progress, past)
    tokens, scores = jax.tree.map(lambda x: x[:, None], (progress.token, scores))
    report = replace(report_of(after, tokens, scores), prompt=told)
    return with_some(held, piece.rows, after), report


@functools.partial(jax.jit, static_argnames=("model", "exact"), donate_argnames="held")
def decode(
    held: Held, model: Model, params: Any, call: Rounds, *, exact: bool
) -> tuple[Held, Report]:
    """Decode, until each row has taken part in its rounds, or is done; ``exact``: such that what it
    gets does not depend on the others."""
    before, (rows, most) = some_of(held, call.rows), call.forced.shape
    begins = (call.rounds > 0) & ~before.progress.done
    written = written_to(before.cache, jnp.where(begins, call.lengths + call.rounds, 0))
    lengths = jnp.where(begins, call.lengths, 0)
    context = context_of(before.cache, lengths, call.tables, written=written)
    out = jnp.zeros((rows, most), jnp.int32), Scores.zeros((rows, most), MOST_SCORES)

    def active(step: Array, progress: Progress) -> RowMask:
        return begins & (step < call.rounds) & ~progress.done

    def go_on(carry: Any) -> Array:
        step, _, progress, *_ = carry
        return jnp.any(active(step, progress))

    def one(carry: Any) -> Any:
        step, context, progress, past, (tokens, scores) = carry
        now = active(step, progress)
        with rows_of_any_length(exact=exact):
            logits, context = context.feed(
                model, params, progress.token[:, None], now.astype(jnp.int32)
            )
        waiting = replace(progress, done=progress.done | ~now)
        forced = lax.dynamic_index_in_dim(call.forced, step, axis=1, keepdims=False)
        allowed = jnp.where(step == 0, call.allowed, EVERY)
        chosen, past, found = choose_next(
            waiting, past, logits, context, call.asked, forced, allowed
        )
        progress = replace(chosen, done=jnp.where(now, chosen.done, progress.done))
        tokens, scores = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], step, axis=1),
            (tokens, scores), (progress.token, found),
        )  # fmt: skip
        return step + 1, context, progress, past, (tokens, scores)

    begin = jnp.int32(0), context, before.progress, before.past, out
    _, context, progress, past, (tokens, scores) = lax.while_loop(go_on, one, begin)
    after = Held(context.cache, progress, past)
    return with_some(held, call.rows, after), report_of(after, tokens, scores)


@functools.partial(jax.jit, donate_argnames="held")
def mark(held: Held, row: Array, tokens: Int[Array, " n"], length: Array) -> tuple[Held, None]:
    """Let a row's text be so many of these tokens, padded with numbers that are none's."""
    past = held.past
    assert past.seen is not None and past.tokens is not None and past.length is not None
    mine = jnp.zeros(past.seen.shape[1], bool).at[tokens].set(True, mode="drop")
    past = Past(
        past.seen.at[row].set(mine),
        past.tokens.at[row].set(tokens),
        past.length.at[row].set(length),
    )
    return replace(held, past=past), None


@functools.partial(jax.jit, static_argnames="splits")
def take(held: Held, row: Array, parts: list[Array], *, splits: Any) -> Any:
    """What a row has beside full pages, and where it stands.

    ``parts``: of each kind of layers whose pages are of blocks int32[1], the page that is not full;
    ``splits``: the numbers of these layers, of each.
    """
    cache = held.cache

    def mine(tree: Any) -> Any:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False), tree)

    rows = [mine(own(layer.near())) for layer in cache.layers], mine(cache.written)
    found = []
    for page, entries in zip(parts, splits, strict=True):
        for layer in (cache.layers[n] for n in entries):
            body, placement = (layer.keys, layer.values), layer.policy.placement
            pages = pages_at(body, layer.orders, placement, page)
            found.append(jax.tree.map(lambda x: x[0], pages))
    return (rows, found), mine((held.progress, held.past))


@functools.partial(jax.jit, donate_argnames="held")
def put(held: Held, row: Array, rows: Any, stands: Any) -> tuple[Held, None]:
    """A row with what ``take`` gave of its layers, and where it stands."""
    cache = held.cache

    def into(tree: Any, mine: Any) -> Any:
        return jax.tree.map(lambda x, new: x.at[row].set(new), tree, mine)

    owns, written = rows
    layers = tuple(
        with_own(layer, into(own(layer), mine))
        for layer, mine in zip(cache.layers, owns, strict=True)
    )
    cache = replace(cache, layers=layers, written=into(cache.written, written))
    return Held(cache, *into((held.progress, held.past), stands)), None


def some_of(held: Held, rows: PerRow) -> Held:
    """Some rows, int32[n]; what is behind the last is anything. All of them, in order, are as they
    are."""
    if len(rows) == held.cache.batch:
        return held
    cache = held.cache
    layers = tuple(layer.taken(rows) for layer in cache.layers)
    written, progress, past = jax.tree.map(
        lambda x: jnp.take(x, rows, axis=0, mode="clip"),
        (cache.written, held.progress, held.past),
    )
    return Held(replace(cache, layers=layers, written=written), progress, past)


def with_some(held: Held, rows: PerRow, after: Held) -> Held:
    """With some rows as a program has left them; lengths and tables are given with the next."""
    cache, new = held.cache, after.cache
    if len(rows) == cache.batch:
        return replace(after, cache=replace(cache, layers=new.layers, written=new.written))

    def into(all: Any, some: Any) -> Any:
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), all, some)

    both = zip(cache.layers, new.layers, strict=True)
    layers = tuple(layer.with_rows(rows, found) for layer, found in both)
    cache = replace(cache, layers=layers, written=into(cache.written, new.written))
    return Held(cache, into(held.progress, after.progress), into(held.past, after.past))


def context_of(
    cache: KVCache, length: PerRow, tables: tuple[Array, ...], **changes: Array
) -> Cached:
    """The rows as a program is given them: so long, and with these tables."""
    pools: Any = tuple(
        GivenPages(table, paging.layout.pool or 0)
        for table, paging in zip(tables, cache.pagings, strict=True)
    )
    status = jnp.zeros_like(length)
    return Cached(replace(cache, length=length, status=status, pools=pools, **changes))


def written_to(cache: KVCache, ends: PerRow) -> Array:
    """What a cache's layers have come to where rows will end there. Windows in pages have given
    back what is behind that: whatever stands there now is no number of the row's. Of layers with a
    tail the marks say what that holds."""
    raw = jnp.array([x.policy.paging is not None and x.tail is None for x in cache.layers])
    return jnp.where(raw, jnp.maximum(cache.written, ends[:, None]), cache.written)


def report_of(after: Held, tokens: Array, scores: Scores) -> Report:
    progress = after.progress
    return Report(
        tokens, scores, progress.count, progress.done, progress.broken, after.cache.status
    )


def scores_along(every: Float[Array, "1 new vocab"], tokens: Tokens, context: Context) -> Scores:
    """The scores of the token after each one of a single row, from the logits there."""
    logits = whole(every, context)[0]
    most = min(MOST_SCORES, logits.shape[1])

    def scored(one: tuple[Array, Array]) -> Scores:
        row, token = (x[None] for x in one)
        none = jnp.zeros(1, jnp.float32)
        found = scores_of(row, token, most, filtered=None, temperature=none)
        return jax.tree.map(lambda x: x[0], found)

    # Few places at once: each takes several rows of the vocabulary.
    found = lax.map(scored, (logits, tokens[0]), batch_size=SCORED)
    return jax.tree.map(lambda x: x[None], found)


def choose_next(
    progress: Progress, past: Past, logits: Logits, context: Context, asked: Asked, forced: PerRow,
    allowed: Allowed | None,
) -> tuple[Progress, Past, Scores]:  # fmt: skip
    """The next token of the rows that are not done, and its scores where some row asks for them."""
    settings, cache = asked.sampling, context.cache
    filters = replace(settings.filters, mesh=cache is not None and cache.spread is not None)
    logits = whole(logits, context)
    after, then = choose(
        progress, past, logits, filters, settings, asked.limit,
        forced=forced, allowed=allowed,
    )  # fmt: skip
    batch, most = logits.shape[0], min(MOST_SCORES, logits.shape[1])

    def scored(logits: Logits) -> Scores:
        filtered = filter_logits(
            logits.astype(jnp.float32), filters, settings, count=progress.count,
            past=past, allowed=allowed,
        )  # fmt: skip
        among = None
        if allowed is not None:
            among = jnp.where(asked.search[:, None], allowed, EVERY)
        found = scores_of(
            logits, after.token, most, filtered=filtered, temperature=settings.temperature,
            among=among,
        )  # fmt: skip
        more = ((0, 0), (0, MOST_SCORES - most))
        likeliest = jnp.pad(found.likeliest, more, constant_values=-jnp.inf)
        return replace(found, ids=jnp.pad(found.ids, more), likeliest=likeliest)

    def none(logits: Logits) -> Scores:
        return Scores.zeros((batch,), MOST_SCORES)

    assert then is not None
    return after, then, lax.cond(jnp.any(asked.scores > 0), scored, none, logits)
