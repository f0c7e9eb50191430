"""Drafts of an engine's rows: proposed, where a model does that, and checked."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array
from kvjax.engine.draft_model import DraftModelRunner
from kvjax.engine.drafts import MAX_DRAFT_TOKENS, Load
from kvjax.engine.model_runner import ModelRunner
from kvjax.engine.programs import (
    EngineState,
    ProgramOutput,
    VerifyInputs,
    choose_next,
    context_of,
    report_of,
    some_of,
    with_some,
    written_to,
)
from kvjax.engine.sequence import RunningSequence
from kvjax.generation.drafts.acceptance import DraftCost, cost_alone
from kvjax.generation.model import Model
from kvjax.sampling.scores import MAX_LOGPROBS, Scores


@functools.partial(jax.jit, static_argnames="model", donate_argnames="held")
def verify(
    held: EngineState, model: Model, params: Any, drafted: VerifyInputs
) -> tuple[EngineState, ProgramOutput]:
    """Feed drafts, and choose a row's tokens as far as they are what was drafted, and one more.
    What was not taken stays behind the row's end: the next program writes over it."""
    before, (rows, wide) = some_of(held, drafted.rows), drafted.tokens.shape
    fed = jnp.where(before.progress.done | (drafted.count == 0), 0, 1 + drafted.count)
    lengths = jnp.where(fed > 0, drafted.starts, 0)
    written = written_to(before.cache, lengths + fed)
    context: Any = context_of(before.cache, lengths, drafted.tables, written=written)
    logits, context = context.forward_all(model, params, drafted.tokens, fed)
    guesses = jnp.pad(drafted.tokens[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    out = jnp.zeros((rows, wide), jnp.int32), Scores.zeros((rows, wide), MAX_LOGPROBS)

    def go_on(carry: Any) -> Array:
        place, still, *_ = carry
        return (place < wide) & jnp.any(still)

    def one(carry: Any) -> Any:
        place, still, progress, past, out = carry
        here = lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False)
        waiting = replace(progress, done=~still)
        allowed = lax.dynamic_index_in_dim(drafted.allowed, place, axis=1, keepdims=False)
        after, past, scores = choose_next(
            waiting, past, here, context, drafted.asked, -jnp.ones_like(fed), allowed
        )
        after = replace(after, done=jnp.where(still, after.done, progress.done))
        out = jax.tree.map(
            lambda all, new: lax.dynamic_update_slice_in_dim(all, new[:, None], place, axis=1),
            out,
            (after.token, scores),
        )
        guess = lax.dynamic_index_in_dim(guesses, place, axis=1, keepdims=False)
        still &= (place < drafted.count) & (after.token == guess) & ~after.done
        return place + 1, still, after, past, out

    carry = jnp.int32(0), fed > 0, before.progress, before.past, out
    _, _, progress, past, (tokens, scores) = lax.while_loop(go_on, one, carry)
    after = EngineState(context.cache, progress, past)
    return with_some(held, drafted.rows, after), report_of(after, tokens, scores)


Draft = tuple[RunningSequence, int, list[int]]
"""A row of whose draft so many tokens are to be checked, and which, where these are known."""


class SpeculativeDecoder:
    """``most``: tokens of a draft; ``together``: rows that a program checks. On a CPU it is one,
    for each row takes its time; else all, for a pass takes as long as its weights are read.
    ``draft_bytes``: as of ``EngineStats``."""

    def __init__(self, rows: ModelRunner, second: DraftModelRunner | None) -> None:
        self._runner, self._draft_runner = rows, second
        self.draft_bytes = 0 if second is None else second.allocate()
        spans = rows.max_rewind, None if second is None else second.max_rewind
        self.most = min([MAX_DRAFT_TOKENS, *(span for span in spans if span is not None)])
        self.together = 1 if rows.platform == "cpu" else rows.count

    def load(self, seqs: Sequence[RunningSequence]) -> Load:
        """What drafts cost where these rows decode. Those that draft leave the pass of the others,
        which takes no less for it unless all do: so all draft, or none."""
        rows = sum(len(seq.taking) for seq in seqs)
        if not rows:
            return lambda price: price
        size = next((n for n in self._runner.sizes if n >= rows), self._runner.count)

        def beside(price: DraftCost) -> DraftCost:
            alone = self.together == 1
            return cost_alone(price, self._runner.platform, rows, size) if alone else price

        each = [seq.takes(self.most, beside) for seq in seqs]
        check = 0.0 if sum(each) < len(each) else math.inf
        return lambda price: replace(beside(price), verify=check)

    def send(self, drafts: Sequence[Draft]) -> tuple[ProgramOutput, list[int]]:
        """Send drafts of rows, at most ``together``, whose pages are the rows' already; and where
        each of them stands in the report."""
        drafted, places = self._drafted(drafts)
        each = list(zip(places, drafts, strict=True))
        if self._draft_runner is not None:
            # Though none may want it: else the check would be given arrays of another kind.
            by_model = [(at, seq, n) for at, (seq, n, known) in each if not known]
            drafted = self._draft_runner.propose(drafted, by_model, self._runner.past)
        tokens: Any = drafted.tokens
        if any(seq.handle.request.guide is not None for seq, _, _ in drafts):
            tokens = fetch(tokens)
        for at, (seq, count, _) in each:
            if seq.handle.request.guide is not None:
                seq.handle.allow_along(tokens[at, 1 : 1 + count].tolist(), drafted.allowed[at])  # type: ignore[arg-type]
        return self._send(drafted), places

    def compile(self) -> int:
        """Run every program once, without tokens; how many there are of models."""
        if not self.most:
            return 0
        drafted, programs = self._drafted([])[0], 1
        if self._draft_runner is not None:
            programs += 1 + self._draft_runner.compile()
            drafted = self._draft_runner.propose(drafted, [], self._runner.past)
        self._send(drafted)
        return programs

    def _drafted(self, drafts: Sequence[Draft]) -> tuple[VerifyInputs, list[int]]:
        """What is known of drafts on the host, and where each of them stands in it."""
        rows, size, wide = self._runner, self.together, 1 + self.most
        which, places = rows.some([seq.row for seq, _, _ in drafts], size)
        tokens: Any = np.zeros((size, wide), np.int32)
        count, starts = np.zeros((2, size), np.int32)
        for at, (seq, more, known) in zip(places, drafts, strict=True):
            tokens[at, : 1 + len(known)] = seq.handle.drawn[-1], *known
            count[at], starts[at] = more, seq.filled
        allowed = rows.every(size * wide).reshape(size, wide, -1)
        tables, asked = rows.tables(which), rows.sampling_state.some(which)
        found: Any = which, tokens, count, starts, tables, allowed, asked
        return VerifyInputs(*found), places

    def _send(self, drafted: VerifyInputs) -> ProgramOutput:
        rows = self._runner
        report: ProgramOutput = rows.run(verify, rows.lm.architecture, rows.params, drafted)
        return report
