"""The compiled programs of an engine, their inputs and their output.

The host does the accounting: each dispatch passes the rows' lengths, their page tables and the
number of decode rounds. The state that the next program needs stays on the device: newest tokens,
which rows have ended, tails and windows. So the host can dispatch the next program before the
previous one has finished.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int, PyTree, UInt

from kvjax.attention.paths import ragged_batches
from kvjax.cache.state import KVCache
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask, Tokens
from kvjax.generation.model import Model
from kvjax.generation.programs import Cached, Context, Progress, choose_tokens, gather_vocab
from kvjax.paging.allocator import FixedPageTables
from kvjax.placement.pages import gather_pages
from kvjax.prefixes.checkpoints import row_arrays, with_row_arrays
from kvjax.sampling.filters import ALL_ALLOWED, Allowed, Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import SamplingArrays
from kvjax.sampling.sampler import filter_logits
from kvjax.sampling.scores import MAX_LOGPROBS, Scores, score_tokens

SCORE_BATCH = 32
"""The number of prompt positions whose scores are computed together. Each needs several arrays of
the vocabulary's size."""


LayerGroups = tuple[tuple[int, ...], ...]
"""For each cache group, the indices of its layers. They are static."""


@pytree_dataclass
class EngineState:
    """The state of all rows that stays on the device between programs.

    ``cache`` is the cache; every program replaces its lengths and page tables. ``progress`` has the
    newest token of each row, its number of new tokens, and whether it has ended. ``history`` has
    the tokens of the rows whose sampling or draft needs them.
    """

    cache: KVCache
    progress: Progress
    history: TokenHistory


@pytree_dataclass
class RowParams:
    """Parameters of each row's request.

    Attributes:
      sampling: parameters of ``sample``.
      limit: int32[rows], maximum number of new tokens.
      logprobs: int32[rows], 0 for no log-probabilities, otherwise 1 plus the number of most likely
        tokens to report.
      search: bool[rows], whether the row is part of a beam search. Its most likely tokens are then
        chosen among the tokens that the guide allows.
    """

    sampling: SamplingArrays
    limit: PerRow
    logprobs: PerRow
    search: RowMask


@pytree_dataclass
class PrefillInputs:
    """Chunks of the prompts of ``rows`` (int32[n]), and the parameters ``params`` of their
    requests.

    Attributes:
      tokens: int32[n, width], the tokens, padded on the right.
      lengths: int32[n], the number of real tokens in each row of ``tokens``.
      starts: int32[n], how many tokens each row already has in the cache.
      tables: for each cache group, the page tables, int32[n, columns].
      fresh: bool[n], whether the row has no state except shared pages.
      ends: bool[n], whether this is the last chunk of the prompt.
      forced: int32[n], the first new token if it is already known, otherwise -1.
      allowed: the token mask for the first new token.
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
    params: RowParams


@pytree_dataclass
class DecodeInputs:
    """Rounds of decoding for ``rows`` (int32[n]): all rows in order, or some of them.

    Attributes:
      lengths: int32[n], how many tokens each row has in the cache.
      rounds: int32[n], how many tokens to decode.
      forced: int32[n, max_rounds], tokens that are already known, otherwise -1.
      allowed: the token mask for the first round.
      tables, params: as in ``PrefillInputs``.
    """

    rows: PerRow
    lengths: PerRow
    rounds: PerRow
    tables: tuple[Array, ...]
    forced: Int[Array, "rows max_rounds"]
    allowed: Allowed
    params: RowParams


@pytree_dataclass
class VerifyInputs:
    """Drafted tokens of ``rows`` (int32[n]), to be verified.

    Attributes:
      tokens: int32[n, 1 + max_drafted], each row's newest token, followed by its drafted tokens.
      count: int32[n], the number of drafted tokens.
      starts: int32[n], how many tokens each row has in the cache.
      allowed: the token mask after each of ``tokens``.
      tables, params: as in ``PrefillInputs``.
    """

    rows: PerRow
    tokens: Tokens
    count: PerRow
    starts: PerRow
    tables: tuple[Array, ...]
    allowed: UInt[Array, "rows places words"]
    params: RowParams


@pytree_dataclass
class ProgramOutput:
    """The output that a program returns to the host.

    Attributes:
      tokens: int32[n, rounds], the new tokens. The number of tokens of a row is the increase of its
        ``count``.
      scores: the log-probabilities of ``tokens``; zeros if no row requests them.
      count, done, broken: as in ``Progress``.
      status: int32[n], as in ``KVCache``.
      prompt_scores: [1, width], the score of the token after each prompt token, if requested.
    """

    tokens: Int[Array, "rows rounds"]
    scores: Scores
    count: PerRow
    done: RowMask
    broken: RowMask
    status: PerRow
    prompt_scores: Scores | None = None


@functools.partial(jax.jit, static_argnames="model", donate_argnames="engine_state")
def prefill(
    engine_state: EngineState,
    model: Model,
    params: PyTree,
    inputs: PrefillInputs,
    next_tokens: Tokens | None = None,
) -> tuple[EngineState, ProgramOutput]:
    """Run a chunk of prompts, and choose the first new token of prompts that end in it.

    ``next_tokens`` (int32[1, width]) has the token after each token of a single prompt, if prompt
    scores are requested.
    """
    before = select_rows(engine_state, inputs.rows)
    starts, written = inputs.starts, before.cache.written
    written = jnp.where(inputs.fresh[:, None], starts[:, None], written)
    context = program_context(before.cache, starts, inputs.tables, written=written)
    prompt_scores = None
    if next_tokens is None:
        logits, context = context.forward(model, params, inputs.tokens, inputs.lengths)
    else:
        all_logits, context = context.forward_all(model, params, inputs.tokens, inputs.lengths)
        logits = all_logits[:, inputs.lengths[0] - 1]
        prompt_scores = scores_of_next(all_logits, next_tokens, context)
    zeros = jnp.zeros_like(inputs.rows)
    first = Progress(zeros, zeros, ~inputs.ends, zeros > 0)
    progress, history, scores = choose_next(
        first, before.history, logits, context, inputs.params, inputs.forced, inputs.allowed
    )
    progress = jax.tree.map(
        lambda new, old: jnp.where(inputs.ends, new, old), progress, before.progress
    )
    after = EngineState(context.cache, progress, history)
    tokens, scores = jax.tree.map(lambda x: x[:, None], (progress.token, scores))
    output = replace(program_output(after, tokens, scores), prompt_scores=prompt_scores)
    return update_rows(engine_state, inputs.rows, after), output


@functools.partial(jax.jit, static_argnames=("model", "exact"), donate_argnames="engine_state")
def decode(
    engine_state: EngineState, model: Model, params: PyTree, inputs: DecodeInputs, *, exact: bool
) -> tuple[EngineState, ProgramOutput]:
    """Decode until each row has run its rounds or has ended.

    If ``exact``, the attention of a row is bitwise independent of the lengths of other rows.
    """
    before, (rows, max_rounds) = select_rows(engine_state, inputs.rows), inputs.forced.shape
    decoding = (inputs.rounds > 0) & ~before.progress.done
    ends = jnp.where(decoding, inputs.lengths + inputs.rounds, 0)
    written = written_at(before.cache, ends)
    lengths = jnp.where(decoding, inputs.lengths, 0)
    context = program_context(before.cache, lengths, inputs.tables, written=written)
    empty = jnp.zeros((rows, max_rounds), jnp.int32), Scores.zeros((rows, max_rounds), MAX_LOGPROBS)

    def active(step: Array, progress: Progress) -> RowMask:
        return decoding & (step < inputs.rounds) & ~progress.done

    def any_active(carry: PyTree) -> Array:
        step, _, progress, *_ = carry
        return jnp.any(active(step, progress))

    def one_round(carry: PyTree) -> PyTree:
        step, context, progress, history, outputs = carry
        now = active(step, progress)
        with ragged_batches(exact=exact):
            logits, context = context.forward(
                model, params, progress.token[:, None], now.astype(jnp.int32)
            )
        paused = replace(progress, done=progress.done | ~now)
        forced = lax.dynamic_index_in_dim(inputs.forced, step, axis=1, keepdims=False)
        allowed = jnp.where(step == 0, inputs.allowed, ALL_ALLOWED)
        chosen, history, scores = choose_next(
            paused, history, logits, context, inputs.params, forced, allowed
        )
        progress = replace(chosen, done=jnp.where(now, chosen.done, progress.done))
        outputs = set_column(outputs, step, (progress.token, scores))
        return step + 1, context, progress, history, outputs

    carry = jnp.int32(0), context, before.progress, before.history, empty
    _, context, progress, history, (tokens, scores) = lax.while_loop(any_active, one_round, carry)
    after = EngineState(context.cache, progress, history)
    return update_rows(engine_state, inputs.rows, after), program_output(after, tokens, scores)


@functools.partial(jax.jit, donate_argnames="engine_state")
def set_history(
    engine_state: EngineState, row: Array, tokens: Int[Array, " n"], length: Array
) -> tuple[EngineState, None]:
    """Set a row's ``history`` to the first ``length`` of ``tokens``. The others must be padding,
    with the vocabulary's size as value."""
    history = engine_state.history
    assert history.seen is not None and history.tokens is not None and history.length is not None
    seen = jnp.zeros(history.seen.shape[1], bool).at[tokens].set(True, mode="drop")
    history = TokenHistory(
        history.seen.at[row].set(seen),
        history.tokens.at[row].set(tokens),
        history.length.at[row].set(length),
    )
    return replace(engine_state, history=history), None


@functools.partial(jax.jit, static_argnames="groups")
def save_row(
    engine_state: EngineState, row: Array, parts: list[Array], *, groups: LayerGroups
) -> PyTree:
    """Copy the state of a row, except for its full pages.

    Args:
      engine_state: the state of all rows.
      row: the row.
      parts: the partly full page (int32[1]) of each cache group whose pages contain blocks.
      groups: the layer indices of each of these groups.

    Returns:
      ``((layers, partial pages), (progress, history))``.
    """
    cache = engine_state.cache

    def of_row(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, row, keepdims=False), tree)

    layers = [of_row(row_arrays(layer.near())) for layer in cache.layers], of_row(cache.written)
    partial_pages = []
    for page, entries in zip(parts, groups, strict=True):
        for layer in (cache.layers[n] for n in entries):
            body, placement = (layer.keys, layer.values), layer.policy.placement
            pages = gather_pages(body, layer.orders, placement, page)
            partial_pages.append(jax.tree.map(lambda x: x[0], pages))
    return (layers, partial_pages), of_row((engine_state.progress, engine_state.history))


@functools.partial(jax.jit, donate_argnames="engine_state")
def restore_row(
    engine_state: EngineState, row: Array, layers: PyTree, progress: PyTree
) -> tuple[EngineState, None]:
    """Restore the state of a row from the ``layers`` and the ``(progress, history)`` that
    ``save_row`` returned."""
    cache = engine_state.cache

    def with_row(tree: PyTree, saved: PyTree) -> PyTree:
        return jax.tree.map(lambda x, new: x.at[row].set(new), tree, saved)

    saved_layers, written = layers
    restored = tuple(
        with_row_arrays(layer, with_row(row_arrays(layer), saved))
        for layer, saved in zip(cache.layers, saved_layers, strict=True)
    )
    cache = replace(cache, layers=restored, written=with_row(cache.written, written))
    return EngineState(
        cache, *with_row((engine_state.progress, engine_state.history), progress)
    ), None


def select_rows(engine_state: EngineState, rows: PerRow) -> EngineState:
    """Select the state of ``rows`` (int32[n]). Numbers outside of the cache select an arbitrary
    row. If ``n`` is the cache's number of rows, ``rows`` must be all rows in order."""
    cache = engine_state.cache
    if len(rows) == cache.batch:
        return engine_state
    layers = tuple(layer.take_rows(rows) for layer in cache.layers)
    written, progress, history = jax.tree.map(
        lambda x: jnp.take(x, rows, axis=0, mode="clip"),
        (cache.written, engine_state.progress, engine_state.history),
    )
    return EngineState(replace(cache, layers=layers, written=written), progress, history)


def update_rows(engine_state: EngineState, rows: PerRow, after: EngineState) -> EngineState:
    """Write ``after``, the state of ``rows`` after a program, into the state of all rows. Numbers
    outside of the cache are ignored."""
    cache, new = engine_state.cache, after.cache
    if len(rows) == cache.batch:
        return replace(after, cache=replace(cache, layers=new.layers, written=new.written))

    def scatter(all_rows: PyTree, selected: PyTree) -> PyTree:
        return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), all_rows, selected)

    pairs = zip(cache.layers, new.layers, strict=True)
    layers = tuple(layer.set_rows(rows, changed) for layer, changed in pairs)
    cache = replace(cache, layers=layers, written=scatter(cache.written, new.written))
    progress = scatter(engine_state.progress, after.progress)
    return EngineState(cache, progress, scatter(engine_state.history, after.history))


def set_column(outputs: PyTree, step: Array, values: PyTree) -> PyTree:
    """Set column ``step`` of arrays [rows, steps, ...] to arrays [rows, ...]."""
    return jax.tree.map(
        lambda array, new: lax.dynamic_update_slice_in_dim(array, new[:, None], step, axis=1),
        outputs,
        values,
    )


def program_context(
    cache: KVCache, length: PerRow, tables: tuple[Array, ...], **changes: Array
) -> Cached:
    """Return a cache with the lengths and page tables that the host passes to a program."""
    pools = tuple(
        FixedPageTables(table, page_group.layout.pool or 0)
        for table, page_group in zip(tables, cache.page_groups, strict=True)
    )
    status = jnp.zeros_like(length)
    return Cached(replace(cache, length=length, status=status, pools=pools, **changes))


def written_at(cache: KVCache, ends: PerRow) -> Array:
    """Return ``KVCache.written`` for rows that will have ``ends`` tokens.

    When a row has this many tokens, some of its pages are out of the window, and the host may
    already have given them to other rows. So the contents of these pages must no longer count as
    this row's. The entries of layers with a tail describe the tail, and do not change.
    """
    raw = jnp.array([x.policy.page_group is not None and x.tail is None for x in cache.layers])
    return jnp.where(raw, jnp.maximum(cache.written, ends[:, None]), cache.written)


def program_output(after: EngineState, tokens: Array, scores: Scores) -> ProgramOutput:
    progress = after.progress
    return ProgramOutput(
        tokens, scores, progress.count, progress.done, progress.broken, after.cache.status
    )


def scores_of_next(
    all_logits: Float[Array, "1 width vocab"], next_tokens: Tokens, context: Context
) -> Scores:
    """Compute the score of the token after each prompt token, for one row."""
    logits = gather_vocab(all_logits, context)[0]
    most = min(MAX_LOGPROBS, logits.shape[1])

    def score(position: tuple[Array, Array]) -> Scores:
        row, token = (x[None] for x in position)
        greedy = jnp.zeros(1, jnp.float32)
        scores = score_tokens(row, token, most, filtered=None, temperature=greedy)
        return jax.tree.map(lambda x: x[0], scores)

    scores = lax.map(score, (logits, next_tokens[0]), batch_size=SCORE_BATCH)
    return jax.tree.map(lambda x: x[None], scores)


def choose_next(
    progress: Progress,
    history: TokenHistory,
    logits: Logits,
    context: Context,
    params: RowParams,
    forced: PerRow,
    allowed: Allowed,
) -> tuple[Progress, TokenHistory, Scores]:
    """Choose the next token of each row that is not done, and compute its scores if any row
    requests scores."""
    settings, cache = params.sampling, context.cache
    filters = replace(settings.filters, mesh=cache is not None and cache.mesh_sharding is not None)
    logits = gather_vocab(logits, context)
    after, new_history = choose_tokens(
        progress, history, logits, filters, settings, params.limit, forced=forced, allowed=allowed
    )
    batch, most = logits.shape[0], min(MAX_LOGPROBS, logits.shape[1])

    def score(logits: Logits) -> Scores:
        filtered = filter_logits(
            logits.astype(jnp.float32),
            filters,
            settings,
            count=progress.count,
            past=history,
            allowed=allowed,
        )
        scores = score_tokens(
            logits,
            after.token,
            most,
            filtered=filtered,
            temperature=settings.temperature,
            among=jnp.where(params.search[:, None], allowed, ALL_ALLOWED),
        )
        missing = ((0, 0), (0, MAX_LOGPROBS - most))
        likeliest = jnp.pad(scores.top_logprobs, missing, constant_values=-jnp.inf)
        return replace(scores, top_ids=jnp.pad(scores.top_ids, missing), top_logprobs=likeliest)

    def no_scores(logits: Logits) -> Scores:
        return Scores.zeros((batch,), MAX_LOGPROBS)

    assert new_history is not None
    return after, new_history, lax.cond(jnp.any(params.logprobs > 0), score, no_scores, logits)
