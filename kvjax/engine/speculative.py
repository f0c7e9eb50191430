"""Speculative decoding in an engine: proposals of a draft model, and their verification.

The method is the same as in ``kvjax.generation.drafts.speculative``.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import PyTree

from kvjax.core.pytree import pytree_dataclass, tree_bytes
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import as_int
from kvjax.engine.cache_manager import max_pages_per_row, with_window_slack
from kvjax.engine.drafts import MAX_DRAFT_TOKENS, AdjustCost
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.programs import (
    EngineState,
    ProgramOutput,
    VerifyInputs,
    choose_next,
    program_context,
    program_output,
    select_rows,
    set_column,
    update_rows,
    written_at,
)
from kvjax.engine.rows import RunningSequence
from kvjax.generation.drafts.acceptance import DraftCost, cost_alone
from kvjax.generation.drafts.draft_model import Draft, DraftModel, DraftModelProposer
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, choose_tokens
from kvjax.layouts import Paged, as_paged
from kvjax.memory.sizes import device_bytes
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import per_layer
from kvjax.prefixes.pool_config import PoolConfig, make_pool_config
from kvjax.prefixes.sequences import CachedSequences
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.scores import MAX_LOGPROBS, Scores


@pytree_dataclass
class ProposeInputs:
    """What a draft model must propose for the rows of a ``VerifyInputs``.

    Attributes:
      count: int32[n], the number of tokens to propose.
      lengths: int32[n], the number of the row's tokens in the draft model's cache.
      sampled: int32[n], the number of new tokens of the row.
      tables: the page table of each of the draft model's cache groups, int32[n, columns].
    """

    count: PerRow
    lengths: PerRow
    sampled: PerRow
    tables: tuple[Array, ...]


@functools.partial(jax.jit, static_argnames="proposer", donate_argnames="engine_state")
def propose(
    engine_state: EngineState,
    proposer: DraftModelProposer,
    params: PyTree,
    history: TokenHistory,
    verify: VerifyInputs,
    inputs: ProposeInputs,
) -> tuple[EngineState, tuple[Tokens, PerRow]]:
    """Read the tokens that the draft model's cache lacks, and propose the next ones.

    Args:
      engine_state: the state of the draft model's rows.
      history: the token history of all rows of the engine.
      verify: the inputs of the verification.
      inputs: what to propose.

    Returns:
      The new state, and ``tokens`` and ``count`` of ``verify`` with the proposals. The draft
      model's cache then has all proposed tokens except the last.
    """
    before, drafting = select_rows(engine_state, verify.rows), inputs.count > 0
    cache, settings = before.cache, verify.params.sampling
    if len(verify.rows) < engine_state.cache.batch:
        history = jax.tree.map(lambda x: jnp.take(x, verify.rows, axis=0, mode="clip"), history)
    assert history.length is not None
    fresh = drafting & (inputs.lengths == 0)
    cache = replace(cache, written=jnp.where(fresh[:, None], 0, cache.written))
    ends = jnp.where(drafting, history.length + inputs.count - 1, 0)
    lengths = jnp.where(drafting, inputs.lengths, 0)
    context = program_context(cache, lengths, inputs.tables, written=written_at(cache, ends))
    filters = replace(settings.filters, mesh=cache.mesh_sharding is not None)

    def choose(
        progress: Progress, history: TokenHistory, logits: Logits, limit: PerRow
    ) -> tuple[Progress, TokenHistory]:
        return choose_tokens(progress, history, logits, filters, settings, limit)

    newest: Any = verify.tokens[:, 0]
    none_broken = jnp.zeros_like(drafting)
    progress = Progress(newest, inputs.sampled, ~drafting, none_broken)
    (tokens, count), context = proposer.propose(
        params, context, progress, history, inputs.count, choose
    )
    tokens = jnp.where(drafting[:, None], tokens, verify.tokens[:, 1:])
    tokens = jnp.concatenate([verify.tokens[:, :1], tokens], axis=1)
    after = EngineState(context.cache, before.progress, before.history)
    # At least one token is verified, even if it is wrong, because the pass also chooses the model's
    # own token.
    count = jnp.where(drafting, jnp.maximum(count, 1), verify.count)
    return update_rows(engine_state, verify.rows, after), (tokens, count)


class DraftModelRunner:
    """A draft model with as many rows as the engine, and with pools for all rows at full length.

    ``nbytes`` is the device memory of its cache and of the parameters that it does not share with
    the model. ``max_rewind`` is as in ``ModelRunner``.

    Raises:
      ValueError: if the draft model has fewer positions than ``max_len``, or its policy sets the
        number of pages or can't use pages.
    """

    def __init__(
        self, lm: LanguageModel, draft: DraftModel, count: int, max_len: int, chunk: int
    ) -> None:
        limit = position_limit(draft.lm.config)
        if limit is not None and limit < max_len:
            raise ValueError(
                f"the engine's max_seq_len is {max_len}, but the draft has only {limit} positions"
            )
        self._lm = draft.lm if lm.mesh is None else draft.lm.on(lm.mesh)
        self._chunk, self._vocab, self._count = chunk, lm.config.vocab_size, count
        self._pool_config = config = draft_pool_config(self._lm, draft, count, max_len, chunk)
        shared = {id(x) for x in jax.tree.leaves(lm.params)}
        own = [x for x in jax.tree.leaves(draft.lm.params) if id(x) not in shared]
        self._weight_bytes = tree_bytes(own)
        cache = device_bytes(
            config.model_config, list(config.policies), count, max_len, config.mesh
        )
        self.nbytes = cache + self._weight_bytes

    def allocate(self) -> int:
        """Allocate the cache. Returns the value of ``EngineStats.draft_bytes``."""
        prefixes = CachedSequences(self._pool_config, (0, 0, None))
        self._runner = ModelRunner(self._lm, self._pool_config, prefixes, self._count, 1, True)
        self.max_rewind, allocated = self._runner.max_rewind, self._runner.allocated
        return self._weight_bytes + allocated["pool_bytes"] + allocated["row_bytes"]

    def propose(
        self,
        verify: VerifyInputs,
        drafting: Sequence[tuple[int, RunningSequence, int]],
        history: TokenHistory,
    ) -> VerifyInputs:
        """Propose tokens, and return ``verify`` with the proposed tokens.

        Args:
          verify: the inputs of the verification.
          drafting: the sequences to draft for. Each has its index in ``verify`` and the number of
            tokens to propose.
          history: the token history of all rows.
        """
        count, lengths, sampled = np.zeros((3, len(verify.rows)), np.int32)
        for place, seq, tokens in drafting:
            self._catch_up(seq, tokens)
            count[place], lengths[place], sampled[place] = tokens, seq.draft_length, seq.sampled
            seq.draft_length = seq.length + 1
        numbers: Any = count, lengths, sampled, self._runner.tables_of(verify.rows)
        limit, own_vocab = verify.tokens.shape[1] - 1, self._lm.config.vocab_size
        proposer = DraftModelProposer(limit, None, self._lm.architecture, own_vocab, self._vocab)
        tokens, counts = self._runner.dispatch(
            propose, proposer, self._runner.params, history, verify, ProposeInputs(*numbers)
        )
        return replace(verify, tokens=tokens, count=counts)

    def compile(self) -> int:
        """Run every prefill program once without tokens. Returns the number of programs."""
        for width in self._runner.chunk_widths:
            self._runner.append(0, [], 0, width)
        return len(self._runner.chunk_widths)

    def _catch_up(self, seq: RunningSequence, tokens: int) -> None:
        """Give a row the pages for its sequence and ``tokens`` more tokens. Prefill the tokens that
        the draft model's cache lacks, except for the last ones, which ``propose`` reads."""
        tables, length = self._runner.page_tables, seq.length + 1
        if not seq.draft_length:  # the row may still have pages of another request
            tables.release(seq.row)
        while length - seq.draft_length > MAX_DRAFT_TOKENS + 1:
            start, last_id = seq.draft_length, self._lm.config.vocab_size - 1
            end = min(start + self._chunk, length - 1)
            chunk = [*seq.prompt, *seq.handle.generated][start:end]
            tables.extend(seq.row, end)
            self._runner.append(seq.row, [min(token, last_id) for token in chunk], start)
            seq.draft_length = end
        tables.extend(seq.row, length + tokens - 1)


def draft_runner_of(
    lm: LanguageModel, draft: Draft | None, count: int, max_len: int, chunk: int
) -> DraftModelRunner | None:
    """Create the runner of an engine's draft model; None for other drafts."""
    if not isinstance(draft, DraftModel):
        return None
    return DraftModelRunner(lm, draft, count, max_len, as_int("prefill_chunk", chunk, 1))


def draft_pool_config(
    lm: LanguageModel, draft: DraftModel, count: int, max_len: int, chunk: int
) -> PoolConfig:
    """Compute the pools of a draft model with ``count`` rows."""
    policies = [_paged(policy) for policy in per_layer(draft.cache, lm.config)]
    layouts = [as_paged(policy.layout) for policy in policies]
    if any(layout is not None and layout.pages is not None for layout in layouts):
        raise ValueError(
            "the draft's policy sets pages, but an engine allocates enough pages for all rows: "
            "leave pages out"
        )
    policies = with_window_slack(policies, max(chunk, MAX_DRAFT_TOKENS + 1) - 1)

    def config(pages: int) -> PoolConfig:
        return make_pool_config(lm, policies, pages, None, max_len, chunk, True, 1)

    return config(count * max_pages_per_row(config(1)))


def _paged(policy: CachePolicy) -> CachePolicy:
    inner = policy.layout
    return policy if as_paged(inner) else replace(policy, layout=Paged(inner=inner))


PendingDraft = tuple[RunningSequence, int, list[int]]
"""A sequence, the number of drafted tokens to verify, and the tokens themselves if they were looked
up."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames="engine_state")
def verify(
    engine_state: EngineState, model: Model, params: PyTree, inputs: VerifyInputs
) -> tuple[EngineState, ProgramOutput]:
    """Run the model on drafts. Each row accepts drafted tokens as long as they equal the model's
    own choice, and gets one more token from the model. Rejected tokens stay in the cache after the
    row's end, and are overwritten later."""
    before, (rows, places) = select_rows(engine_state, inputs.rows), inputs.tokens.shape
    active = ~before.progress.done & (inputs.count > 0)
    count = jnp.where(active, 1 + inputs.count, 0)
    lengths = jnp.where(active, inputs.starts, 0)
    written = written_at(before.cache, lengths + count)
    context = program_context(before.cache, lengths, inputs.tables, written=written)
    logits, context = context.forward_all(model, params, inputs.tokens, count)
    drafted = jnp.pad(inputs.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    no_forced = -jnp.ones_like(count)
    empty = jnp.zeros((rows, places), jnp.int32), Scores.zeros((rows, places), MAX_LOGPROBS)

    def any_accepting(carry: PyTree) -> Array:
        place, accepting, *_ = carry
        return (place < places) & jnp.any(accepting)

    def one_place(carry: PyTree) -> PyTree:
        place, accepting, progress, history, outputs = carry
        place_logits, allowed, draft = (
            lax.dynamic_index_in_dim(x, place, axis=1, keepdims=False)
            for x in (logits, inputs.allowed, drafted)
        )
        paused = replace(progress, done=~accepting)
        after, history, scores = choose_next(
            paused, history, place_logits, context, inputs.params, no_forced, allowed
        )
        after = replace(after, done=jnp.where(accepting, after.done, progress.done))
        outputs = set_column(outputs, place, (after.token, scores))
        accepting &= (place < inputs.count) & (after.token == draft) & ~after.done
        return place + 1, accepting, after, history, outputs

    carry = jnp.int32(0), active, before.progress, before.history, empty
    _, _, progress, history, (tokens, scores) = lax.while_loop(any_accepting, one_place, carry)
    after = EngineState(context.cache, progress, history)
    return update_rows(engine_state, inputs.rows, after), program_output(after, tokens, scores)


class SpeculativeDecoder:
    """Proposes and verifies drafts of an engine's sequences.

    ``max_tokens`` is the maximum number of drafted tokens. ``batch_size`` is the number of rows
    that one pass verifies. On a CPU it is 1, because each row adds to the time of a pass. On
    accelerators it is all rows, because a pass takes as long as reading the weights.
    ``draft_bytes`` is as in ``EngineStats``.
    """

    def __init__(self, runner: ModelRunner, draft_runner: DraftModelRunner | None) -> None:
        self._runner, self._draft_runner = runner, draft_runner
        self.draft_bytes, rewinds = 0, [runner.max_rewind]
        if draft_runner is not None:
            self.draft_bytes = draft_runner.allocate()
            rewinds.append(draft_runner.max_rewind)
        self.max_tokens = min([MAX_DRAFT_TOKENS, *(n for n in rewinds if n is not None)])
        self.batch_size = 1 if runner.platform == "cpu" else runner.count

    def adjust_cost(self, seqs: Sequence[RunningSequence]) -> AdjustCost:
        """Return a function that adjusts the cost of drafting to the sequences ``seqs`` that are
        decoding.

        Rows that draft do not take part in the decoding pass of the other rows. That pass becomes
        cheaper only if no row is left in it. So either all rows draft, or none.
        """
        rows = sum(len(seq.entries) for seq in seqs)
        if not rows:
            return lambda cost: cost
        size = next((n for n in self._runner.batch_sizes if n >= rows), self._runner.count)

        def next_to_others(cost: DraftCost) -> DraftCost:
            if self.batch_size > 1:
                return cost
            return cost_alone(cost, self._runner.platform, rows, size)

        relative = [seq.relative_cost(self.max_tokens, next_to_others) for seq in seqs]
        verify_cost = 0.0 if sum(relative) < len(relative) else math.inf
        return lambda cost: replace(next_to_others(cost), verify=verify_cost)

    def verify(self, drafts: Sequence[PendingDraft]) -> tuple[ProgramOutput, list[int]]:
        """Dispatch the verification of at most ``batch_size`` drafts. The rows must already have
        the pages. Returns the output, and the index of each draft in it."""
        inputs, places = self._inputs(drafts)
        placed = list(zip(places, drafts, strict=True))
        if self._draft_runner is not None:
            # Do this even if no draft needs it. Otherwise ``verify`` would get arrays that are not
            # committed, and would be compiled again.
            by_model = [(place, seq, n) for place, (seq, n, tokens) in placed if not tokens]
            inputs = self._draft_runner.propose(inputs, by_model, self._runner.history)
        guided = [(p, seq, n) for p, (seq, n, _) in placed if seq.handle.request.guide is not None]
        if guided:
            tokens, masks = fetch(inputs.tokens), np.asarray(inputs.allowed)
            for place, seq, count in guided:
                draft = tokens[place, 1 : 1 + count].tolist()
                seq.handle.set_draft_masks(draft, masks[place])
        return self._dispatch(inputs), places

    def compile(self) -> int:
        """Run every program once without tokens. Returns how many of them run a model."""
        if not self.max_tokens:
            return 0
        inputs, programs = self._inputs([])[0], 1
        if self._draft_runner is not None:
            programs += 1 + self._draft_runner.compile()
            inputs = self._draft_runner.propose(inputs, [], self._runner.history)
        self._dispatch(inputs)
        return programs

    def _inputs(self, drafts: Sequence[PendingDraft]) -> tuple[VerifyInputs, list[int]]:
        """Make the inputs from what the host knows. Also returns the index of each draft in
        them."""
        runner, size, width = self._runner, self.batch_size, 1 + self.max_tokens
        rows, places = runner.select([seq.row for seq, _, _ in drafts], size)
        tokens = np.zeros((size, width), np.int32)
        counts, starts = np.zeros((2, size), np.int32)
        for place, (seq, count, looked_up) in zip(places, drafts, strict=True):
            tokens[place, : 1 + len(looked_up)] = seq.handle.generated[-1], *looked_up
            counts[place], starts[place] = count, seq.length
        allowed = runner.full_masks(size * width).reshape(size, width, -1)
        tables, params = runner.tables_of(rows), runner.sampling_state.for_rows(rows)
        arrays: Any = rows, tokens, counts, starts, tables, allowed, params
        return VerifyInputs(*arrays), places

    def _dispatch(self, inputs: VerifyInputs) -> ProgramOutput:
        runner = self._runner
        output: ProgramOutput = runner.dispatch(
            verify, runner.lm.architecture, runner.params, inputs
        )
        return output
