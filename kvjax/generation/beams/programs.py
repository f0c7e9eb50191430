"""The compiled programs of a beam search: first tokens, loop, guided step, row selection."""

import functools
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree, UInt

from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, PerRow
from kvjax.generation.beams.step import (
    BeamChoice,
    BeamConfig,
    SearchParams,
    SearchState,
    advance,
    initial_state,
)
from kvjax.generation.model import Model
from kvjax.generation.programs import MAX_STEPS, Cached, Context, Uncached, gather_vocab
from kvjax.generation.request import GenerationRequest
from kvjax.operations.rows import branch_rows, rewind, rewindable, select
from kvjax.placement.mesh import MeshSharding
from kvjax.sampling.filters import Logits, set_at
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import Scores

Columns = tuple[Array, Array, Scores | None]
"""The choices of some steps. The three parts are [rows, steps]: tokens, the beam of the prompt that
each token continues, and scores."""
Rows = Array | np.ndarray
_T = TypeVar("_T")
_Carry = tuple[Array, Context, SearchState, TokenHistory | None, Columns]


@functools.partial(
    jax.jit, static_argnames=("filters", "beams", "scores", "mesh_sharding"), donate_argnames="past"
)
def begin(
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    settings: SamplingArrays,
    params: SearchParams,
    limit: Array,
    past: TokenHistory | None,
    real: Array,
    start: PerRow,
    scores: int | None,
    mesh_sharding: MeshSharding | None,
    allowed: UInt[Array, "batch words"] | None = None,
) -> tuple[SearchState, TokenHistory | None, Columns]:
    """Choose the first tokens, from the logits after the prompts, with one row for each beam.

    ``real`` and ``start`` are as for ``initial_state``, and ``allowed`` as for ``sample``.
    """
    before = initial_state(real, start, beams, scores)
    after, past, choice = _choose(
        before, past, logits, filters, beams, settings, params, limit, scores, allowed
    )
    # The rows of a prompt are still equal, so none must be moved.
    columns = jax.tree.map(lambda x: x[:, None], _flatten_beams((after.token, *choice)))
    return _constrain((after, past, columns), mesh_sharding)


@functools.partial(
    jax.jit,
    static_argnames=("model", "filters", "beams", "scores"),
    donate_argnames=("context", "past"),
)
def search(
    model: Model,
    filters: Filters,
    beams: BeamConfig,
    params: PyTree,
    context: Context,
    before: SearchState,
    past: TokenHistory | None,
    settings: SamplingArrays,
    search_params: SearchParams,
    limit: Array,
    steps: Array,
    scores: int | None = None,
) -> tuple[Context, SearchState, TokenHistory | None, Columns]:
    """Run ``steps`` steps, at most ``MAX_STEPS``, or fewer if all prompts are done. A step runs the
    model on the newest token of each beam, chooses the next tokens, and moves rows."""
    mesh_sharding = None if context.cache is None else context.cache.mesh_sharding
    shape = before.token.size, MAX_STEPS
    zeros = jnp.zeros(shape, jnp.int32)
    columns: Columns = zeros, zeros, None if scores is None else Scores.zeros(shape, scores)

    def unfinished(carry: _Carry) -> Array:
        step, _, state, *_ = carry
        return (step < steps) & ~jnp.all(state.done) & ~jnp.any(state.broken)

    def run_step(carry: _Carry) -> _Carry:
        step, context, state, past, columns = carry
        context, logits = _feed(model, params, context, state)
        context, state, past, new = _step(
            context, state, past, logits, filters, beams, settings, search_params, limit, scores
        )
        columns = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], step, axis=1),
            columns,
            new,
        )
        return step + 1, context, state, past, columns

    carry = jnp.int32(0), context, before, past, columns
    _, context, after, past, columns = lax.while_loop(unfinished, run_step, carry)
    after, past, columns = _constrain((after, past, columns), mesh_sharding)
    return context, after, past, columns


@functools.partial(jax.jit, static_argnames="model", donate_argnames="context")
def feed(
    model: Model, params: PyTree, context: Context, state: SearchState
) -> tuple[Context, Logits]:
    """Run the model on the newest token of each running beam. Returns the logits after it."""
    return _feed(model, params, context, state)


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
    params: SearchParams,
    limit: Array,
    allowed: UInt[Array, "batch words"] | None,
    scores: int | None = None,
) -> tuple[Context, SearchState, TokenHistory | None, Columns]:
    """Choose the next tokens among the allowed ones, and move rows. ``feed`` and this program
    together are one step of ``search``."""
    mesh_sharding = None if context.cache is None else context.cache.mesh_sharding
    context, after, past, new = _step(
        context, before, past, logits, filters, beams, settings, params, limit, scores, allowed
    )
    columns = jax.tree.map(lambda x: x[:, None], new)
    return context, *_constrain((after, past, columns), mesh_sharding)


def _feed(
    model: Model, params: PyTree, context: Context, state: SearchState
) -> tuple[Context, Logits]:
    group_size = state.token.shape[1] // state.done.shape[1]
    done = jnp.repeat(state.done, group_size, axis=1)
    lengths = (~done.ravel()).astype(jnp.int32)
    logits, context = context.forward(model, params, state.token.reshape(-1, 1), lengths)
    return context, gather_vocab(logits, context)


def _step(
    context: Context,
    before: SearchState,
    past: TokenHistory | None,
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    settings: SamplingArrays,
    params: SearchParams,
    limit: Array,
    scores: int | None,
    allowed: UInt[Array, "batch words"] | None = None,
) -> tuple[Context, SearchState, TokenHistory | None, Columns]:
    """Choose tokens and move rows. The returned columns have the shape [rows]."""
    after, past, choice = _choose(
        before, past, logits, filters, beams, settings, params, limit, scores, allowed
    )
    context = _move_rows(context, after, choice.parent)
    return context, after, past, _flatten_beams((after.token, *choice))


def _choose(
    before: SearchState,
    past: TokenHistory | None,
    logits: Logits,
    filters: Filters,
    beams: BeamConfig,
    settings: SamplingArrays,
    params: SearchParams,
    limit: Array,
    scores: int | None,
    allowed: UInt[Array, "batch words"] | None,
) -> tuple[SearchState, TokenHistory | None, BeamChoice]:
    """Choose the next token of each beam, and update the token histories."""
    batch = len(before.token)

    def by_beam(x: Array) -> Array:
        return x.reshape(batch, beams.num_beams, *x.shape[1:])

    raw_logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    seen = None if past is None else past.seen
    logprobs = raw_logprobs if past is None else past.apply_hook(raw_logprobs, filters.hook)
    count = jnp.repeat(before.count, beams.group_size, axis=1).ravel()
    logprobs = filter_logits(logprobs, filters, settings, count=count, past=past, allowed=allowed)
    finite = jnp.all(jnp.isfinite(raw_logprobs), axis=-1) & jnp.all(logprobs < jnp.inf, axis=-1)
    running = ~jnp.repeat(before.done, beams.group_size, axis=1)
    real = (before.score > -jnp.inf) & running
    broken = before.broken | jnp.any(real & ~by_beam(finite), axis=1)
    eos = by_beam(settings.eos)[:, 0]
    after, choice = advance(
        before, by_beam(logprobs), by_beam(raw_logprobs), eos, params, limit, beams, scores
    )
    if past is not None:
        parents: TokenHistory = jax.tree.map(lambda x: _gather_beams(x, choice.parent), past)
        token, vocab, taken = after.token.ravel(), logits.shape[1], running.ravel()
        if parents.seen is not None:
            seen = set_at(parents.seen, jnp.where(taken, token, vocab), True)
        past = parents.append_tokens(seen, token, taken)
    broken |= after.broken
    count = jnp.where(broken[:, None], before.count, after.count)
    return replace(after, broken=broken, count=count), past, choice


def _gather_beams(x: Array, parent: Array) -> Array:
    """Replace each of the rows [batch * beams, ...] by the row that it continues."""
    by_beam = x.reshape(*parent.shape, *x.shape[1:])
    index = parent.reshape(*parent.shape, *[1] * (by_beam.ndim - 2))
    return jnp.take_along_axis(by_beam, index, axis=1, mode="clip").reshape(x.shape)


def _flatten_beams(tree: PyTree) -> PyTree:
    """Reshape arrays [batch, beams, ...] to [batch * beams, ...]."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def _move_rows(context: Context, state: SearchState, parent: Array) -> Context:
    """Give each row the sequence that it continues."""
    if isinstance(context, Uncached):
        return jax.tree.map(lambda x: _gather_beams(x, parent), context)
    rows = jnp.arange(len(parent), dtype=jnp.int32)[:, None] * parent.shape[1] + parent
    return Cached(branch_rows(context.cache, rows.ravel(), state.start.ravel()))


def _constrain(tree: _T, mesh_sharding: MeshSharding | None) -> _T:
    """On a mesh, shard every array by rows, so that the next call does not compile a new
    program."""
    if mesh_sharding is None:
        return tree
    return jax.tree.map(
        lambda x: lax.with_sharding_constraint(
            x, mesh_sharding.sharding(mesh_sharding.row_spec(x.shape))
        ),
        tree,
    )


def rows_to_keep(
    rows: np.ndarray, rewound: np.ndarray, request: GenerationRequest
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows to keep of all real prompts, followed by empty rows that fill the mesh.

    Args:
      rows: int[prompts, n], the rows to keep of each prompt.
      rewound: int[prompts, n], how many tokens to rewind from each of these rows.
      request: the request of the search.

    Returns:
      The rows, and the numbers of tokens to rewind, both int32[rows].
    """
    prompts = request.rows // request.samples
    rows, rewound = rows[:prompts].ravel(), rewound[:prompts].ravel()
    padding = 0 if request.mesh_sharding is None else -len(rows) % request.mesh_sharding.rows
    empty = request.rows + np.arange(padding)
    return (
        np.concatenate([rows, empty]).astype(np.int32),
        np.concatenate([rewound, np.zeros(padding)]).astype(np.int32),
    )


def keep_rows(cache: KVCache, rows: Rows, rewound: Rows) -> KVCache:
    """Select the rows ``rows`` (int32[n]) of a cache, and rewind ``rewound`` tokens (int32[n]) of
    these rows. Page pools are not copied. The given cache is donated."""
    shared = [(x.keys, x.values) if x.policy.page_group else None for x in cache.layers]
    own = [replace(x, keys=None, values=None) if x.policy.page_group else x for x in cache.layers]
    return _keep_rows(shared, replace(cache, layers=tuple(own)), rows, rewound)


@functools.partial(jax.jit, donate_argnames="shared")
def _keep_rows(shared: PyTree, cache: KVCache, rows: Array, rewound: Array) -> KVCache:
    layers = [
        layer if body is None else replace(layer, keys=body[0], values=body[1])
        for layer, body in zip(cache.layers, shared, strict=True)
    ]
    cache = select(replace(cache, layers=tuple(layers)), rows)
    return rewind(cache, rewound)


max_rewind = jax.jit(rewindable)
"""A compiled function that returns how many tokens can be rewound from each row of a cache."""
