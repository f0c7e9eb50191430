"""The programs of a beam search: the first tokens, the loop, a guided step, the rows given back."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, PerRow
from kvjax.generation.beams.config import BeamConfig
from kvjax.generation.beams.step import (
    BeamChoice,
    SearchParams,
    SearchState,
    advance,
    initial_state,
)
from kvjax.generation.context import Cached, Context, Uncached
from kvjax.generation.model import Model
from kvjax.generation.programs import MAX_STEPS, gather_vocab
from kvjax.generation.request import GenerationRequest
from kvjax.operations.rows import branch_rows, rewind, rewindable, select
from kvjax.placement.mesh import MeshSharding
from kvjax.sampling.filters import Logits, set_at
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import Scores

Columns = tuple[Array, Array, Scores | None]
"""Of each step and row, [batch, steps] each: the token chosen, the beam that it was chosen for, of
its prompt's, and its scores."""


@functools.partial(
    jax.jit, static_argnames=("filters", "beams", "scores", "spread"), donate_argnames="past"
)
def begin(
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    settings: SamplingArrays,
    numbers: SearchParams,
    limit: Array,
    past: TokenHistory | None,
    asked: Array,
    since: PerRow,
    scores: int | None,
    spread: MeshSharding | None,
    allowed: Any = None,
) -> tuple[SearchState, TokenHistory | None, Columns]:
    """Choose the first tokens, from the logits after the prompts, a row for every beam; ``asked``:
    of the prompts, those that are any; ``since``: tokens that rows have; ``allowed``: see
    ``sample``."""
    before = initial_state(asked, since, beams, scores)
    after, past, chosen = _chosen(
        before, past, logits, filters, beams, settings, numbers, limit, scores, allowed
    )
    # As long as all rows are the same they go on from themselves.
    columns = jax.tree.map(lambda x: x[:, None], _of_rows((after.token, *chosen)))
    return _placed((after, past, columns), spread)


@functools.partial(
    jax.jit,
    static_argnames=("model", "filters", "beams", "scores"),
    donate_argnames=("context", "past"),
)
def search(
    model: Model,
    filters: Filters,
    beams: BeamConfig,
    params: Any,
    context: Context,
    before: SearchState,
    past: TokenHistory | None,
    settings: SamplingArrays,
    numbers: SearchParams,
    limit: Array,
    steps: Array,
    scores: int | None = None,
) -> tuple[Context, SearchState, TokenHistory | None, Columns]:
    """Go on until ``steps`` more tokens of each beam are chosen, at most ``CHUNK``, or all prompts
    are done. A step feeds each beam's newest token, chooses, and has rows go on from others."""
    spread = None if context.cache is None else context.cache.spread
    shape = before.token.size, MAX_STEPS
    zeros = jnp.zeros(shape, jnp.int32)
    out: Columns = zeros, zeros, None if scores is None else Scores.zeros(shape, scores)

    def go_on(carry: Any) -> Array:
        step, _, search, *_ = carry
        return (step < steps) & ~jnp.all(search.done) & ~jnp.any(search.broken)

    def one(carry: Any) -> Any:
        step, context, search, past, out = carry
        context, logits = _fed(model, params, context, search)
        context, search, past, new = _step(
            context, search, past, logits, filters, beams, settings, numbers, limit, scores
        )
        out = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], step, axis=1),
            out,
            new,
        )
        return step + 1, context, search, past, out

    carry = jnp.int32(0), context, before, past, out
    _, context, after, past, out = lax.while_loop(go_on, one, carry)
    after, past, out = _placed((after, past, out), spread)
    return context, after, past, out


@functools.partial(jax.jit, static_argnames="model", donate_argnames="context")
def feed(
    model: Model, params: Any, context: Context, before: SearchState
) -> tuple[Context, Logits]:
    """Feed the newest token of the beams that go on; the logits behind it."""
    return _fed(model, params, context, before)


@functools.partial(
    jax.jit, static_argnames=("filters", "beams", "scores"), donate_argnames=("context", "past")
)
def choose(
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    context: Context,
    before: SearchState,
    past: TokenHistory | None,
    settings: SamplingArrays,
    numbers: SearchParams,
    limit: Array,
    allowed: Any,
    scores: int | None = None,
) -> tuple[Context, SearchState, TokenHistory | None, Columns]:
    """The next token of the beams that go on, among those allowed, and rows that go on from
    others: behind ``feed``, a step of ``search``."""
    spread = None if context.cache is None else context.cache.spread
    context, after, past, new = _step(
        context, before, past, logits, filters, beams, settings, numbers, limit, scores, allowed
    )
    columns = jax.tree.map(lambda x: x[:, None], new)
    return context, *_placed((after, past, columns), spread)


def _fed(
    model: Model, params: Any, context: Context, search: SearchState
) -> tuple[Context, Logits]:
    """``feed``."""
    width = search.token.shape[1] // search.done.shape[1]
    done = jnp.repeat(search.done, width, axis=1)
    lengths = (~done.ravel()).astype(jnp.int32)
    logits, context = context.forward(model, params, search.token.reshape(-1, 1), lengths)
    return context, gather_vocab(logits, context)


def _step(
    context: Context,
    before: SearchState,
    past: TokenHistory | None,
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    settings: SamplingArrays,
    numbers: SearchParams,
    limit: Array,
    scores: int | None,
    allowed: Any = None,
) -> tuple[Context, SearchState, TokenHistory | None, Columns]:
    """Choose, and have rows go on from others; columns of [rows]."""
    after, past, chosen = _chosen(
        before, past, logits, filters, beams, settings, numbers, limit, scores, allowed
    )
    context = _branched(context, after, chosen.parent)
    return context, after, past, _of_rows((after.token, *chosen))


def _chosen(
    before: SearchState,
    past: TokenHistory | None,
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    settings: SamplingArrays,
    numbers: SearchParams,
    limit: Array,
    scores: int | None,
    allowed: Any,
) -> tuple[SearchState, TokenHistory | None, BeamChoice]:
    """The next tokens of all beams, and their rows' pasts with them."""
    batch = len(before.token)

    def apart(x: Array) -> Array:
        return x.reshape(batch, beams.num_beams, *x.shape[1:])

    own = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    seen = None if past is None else past.seen
    known = own if past is None else past.apply_hook(own, filters.hook)
    count = jnp.repeat(before.count, beams.group_size, axis=1).ravel()
    known = filter_logits(known, filters, settings, count=count, past=past, allowed=allowed)
    fine = jnp.all(jnp.isfinite(own), axis=-1) & jnp.all(known < jnp.inf, axis=-1)
    real = (before.score > -jnp.inf) & ~jnp.repeat(before.done, beams.group_size, axis=1)
    broken = before.broken | jnp.any(real & ~apart(fine), axis=1)
    after, chosen = advance(
        before, apart(known), apart(own), apart(settings.eos)[:, 0], numbers, limit, beams, scores
    )
    if past is not None:
        mine: TokenHistory = jax.tree.map(lambda x: _of_beams(x, chosen.parent), past)
        token, vocab = after.token.ravel(), logits.shape[1]
        taken = ~jnp.repeat(before.done, beams.group_size, axis=1).ravel()
        if mine.seen is not None:
            at = jnp.where(taken, token, vocab)
            seen = set_at(mine.seen, at, True)
        past = mine.append_tokens(seen, token, taken)
    broken |= after.broken
    count = jnp.where(broken[:, None], before.count, after.count)
    return replace(after, broken=broken, count=count), past, chosen


def _of_beams(x: Array, parent: Array) -> Array:
    """Arrays of rows, [batch * beams, ...], each as the beam that it goes on from has it."""
    each = x.reshape(*parent.shape, *x.shape[1:])
    at = parent.reshape(*parent.shape, *[1] * (each.ndim - 2))
    return jnp.take_along_axis(each, at, axis=1, mode="clip").reshape(x.shape)


def _of_rows(tree: Any) -> Any:
    """Arrays [batch, beams, ...] as arrays of rows."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def _branched(context: Context, search: SearchState, parent: Array) -> Context:
    """The context, each row's that which it goes on from."""
    if isinstance(context, Uncached):
        return jax.tree.map(lambda x: _of_beams(x, parent), context)
    rows = jnp.arange(len(parent), dtype=jnp.int32)[:, None] * parent.shape[1] + parent
    return Cached(branch_rows(context.cache, rows.ravel(), search.since.ravel()))


def _placed(tree: Any, spread: MeshSharding | None) -> Any:
    """On a mesh every array with its rows, whatever it was computed from, so that a program is
    given what it was compiled for."""
    if spread is None:
        return tree
    return jax.tree.map(
        lambda x: lax.with_sharding_constraint(x, spread.sharding(spread.row_spec(x.shape))), tree
    )


def rows_to_keep(rows: np.ndarray, back: np.ndarray, request: GenerationRequest) -> tuple[Any, Any]:
    """Of rows that the prompts of a mesh keep, int[prompts, n], and tokens that they forget, those
    of the prompts that were asked for, and behind them as many empty ones as fill the mesh up."""
    asked = request.rows // request.samples
    rows, back = rows[:asked].ravel(), back[:asked].ravel()
    more = 0 if request.spread is None else -len(rows) % request.spread.rows
    empty = request.rows + np.arange(more)
    return (
        np.concatenate([rows, empty]).astype(np.int32),
        np.concatenate([back, np.zeros(more)]).astype(np.int32),
    )


def keep_rows(cache: KVCache, rows: Any, back: Any) -> KVCache:
    """Some rows of a cache, int32[n], without their newest ``back`` tokens. What pools have stays
    where it is; the cache given is used up."""
    shared = [(x.keys, x.values) if x.policy.page_group else None for x in cache.layers]
    own = [replace(x, keys=None, values=None) if x.policy.page_group else x for x in cache.layers]
    return _kept(shared, replace(cache, layers=tuple(own)), rows, back)


@functools.partial(jax.jit, donate_argnames="shared")
def _kept(shared: Any, cache: KVCache, rows: Array, back: Array) -> KVCache:
    layers = [
        held if body is None else replace(held, keys=body[0], values=body[1])
        for held, body in zip(cache.layers, shared, strict=True)
    ]
    cache = select(replace(cache, layers=tuple(layers)), rows)
    return rewind(cache, back)


max_rewind = jax.jit(rewindable)
"""How many of its newest tokens each row can forget."""
