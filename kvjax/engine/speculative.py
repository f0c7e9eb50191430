"""Speculative decoding in an engine: drafted tokens are verified in one pass.

The method is that of ``kvjax.generation.drafts.speculative``.
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

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.engine.draft_model import DraftModelRunner
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
from kvjax.engine.sequence import RunningSequence
from kvjax.generation.drafts.acceptance import DraftCost, cost_alone
from kvjax.generation.model import Model
from kvjax.sampling.scores import MAX_LOGPROBS, Scores

PendingDraft = tuple[RunningSequence, int, list[int]]
"""A sequence, how many drafted tokens to verify, and the tokens if they were looked up."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames="engine_state")
def verify(
    engine_state: EngineState, model: Model, params: PyTree, inputs: VerifyInputs
) -> tuple[EngineState, ProgramOutput]:
    """Run the model on drafts, and choose each row's tokens as long as they match the draft, and
    one more. Rejected tokens stay in the cache past the row's end, and are overwritten."""
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

    def any_accepting(carry: Any) -> Array:
        place, accepting, *_ = carry
        return (place < places) & jnp.any(accepting)

    def one_place(carry: Any) -> Any:
        place, accepting, progress, history, outputs = carry
        here, allowed, draft = (
            lax.dynamic_index_in_dim(x, place, axis=1, keepdims=False)
            for x in (logits, inputs.allowed, drafted)
        )
        paused = replace(progress, done=~accepting)
        after, history, scores = choose_next(
            paused, history, here, context, inputs.params, no_forced, allowed
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

    ``max_tokens``: maximum number of drafted tokens; ``batch_size``: rows that are verified in one
    pass. On a CPU that is 1, since each row adds to the time of a pass; on accelerators it is all
    rows, since a pass takes as long as reading the weights. ``draft_bytes``: as in
    ``EngineStats``.
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
        """The cost of drafting while ``seqs`` decode.

        Rows that draft leave the pass of the others, which does not become cheaper unless all rows
        leave it. So either all rows draft, or none.
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
        """Dispatch at most ``batch_size`` drafts of sequences whose rows have the pages. Returns
        the output, and the place of each draft in it."""
        inputs, places = self._inputs(drafts)
        placed = list(zip(places, drafts, strict=True))
        if self._draft_runner is not None:
            # Also if no draft needs it: otherwise ``verify`` would get arrays that are not
            # committed, and be compiled again.
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
        """The inputs as far as the host knows them, and the place of each draft."""
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
