"""Speculative decoding."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered
from jaxtyping import Float, Int, UInt

from kvjax.cache.creation import allocate
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation import programs
from kvjax.generation.context import Cached
from kvjax.generation.drafts.acceptance import Acceptance, default_length, draft_cost
from kvjax.generation.drafts.draft_model import Draft, DraftModel, PromptLookup, relative_size
from kvjax.generation.drafts.propose import (
    DraftModelProposer,
    DraftTokens,
    LookupProposer,
    Proposer,
)
from kvjax.generation.model import Model
from kvjax.generation.programs import MAX_STEPS, Progress, choose_and_score, gather_vocab
from kvjax.generation.request import GenerationRequest, PromptChunk, prompt_chunks
from kvjax.placement.device import Device
from kvjax.policies.model_config import position_limit
from kvjax.sampling.filters import Logits, set_at
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores

Chosen = tuple[Progress, TokenHistory, Any]
"""As ``choosing.chosen`` gives it."""
EveryLogits = Float[Array, "batch places vocab"]
Choose = Callable[..., Chosen]
"""``(progress, past, logits, allowed=)``."""


def verify(
    drafted: DraftTokens,
    logits: EveryLogits,
    context: Cached,
    before: Progress,
    past: TokenHistory,
    now: RowMask,
    out: Any,
    begin: PerRow,
    choose: Choose,
    allowed: UInt[Array, "batch places words"] | None = None,
) -> tuple[Progress, TokenHistory, Any]:
    """The model's own tokens of the rows that it is ``now`` for, as far as they are what was
    drafted, and one more of each.

    Args:
      logits: behind the newest token, and behind each that was drafted.
      out: a row's tokens and scores, into which they are written from count ``begin`` on.
      allowed: bits of what may stand at each place, see ``sample``.
    """
    tokens, count = drafted

    def go_on(carry: Any) -> Array:
        place, _, _, still, _ = carry
        return (place <= tokens.shape[1]) & jnp.any(still)

    def one(carry: Any) -> Any:
        place, progress, past, still, out = carry
        here = gather_vocab(
            lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False), context
        )
        may = None
        if allowed is not None:
            may = lax.dynamic_index_in_dim(allowed, place, axis=1, keepdims=False)
        after, past, found = choose(replace(progress, done=~still), past, here, allowed=may)
        after = replace(after, done=jnp.where(still, after.done, progress.done))
        out = record(out, (after.token, found), progress, after, begin)
        guess = jnp.take(tokens, place, axis=1, mode="clip")
        still &= (place < count) & (after.token == guess) & ~after.done
        return place + 1, after, past, still, out

    carry = jnp.int32(0), before, past, now, out
    _, after, past, _, out = lax.while_loop(go_on, one, carry)
    return after, past, out


def record(out: Any, found: Any, before: Progress, after: Progress, begin: PerRow) -> Any:
    """With what was found of the rows that took a token: [batch] each, into [batch, room]."""
    room = jax.tree.leaves(out)[0].shape[1]
    at = jnp.where(after.count > before.count, before.count - begin, room)
    return jax.tree.map(lambda all, new: set_at(all, at, new), out, found)


@pytree_dataclass
class _Carry:
    """A dispatch as it goes. ``held``: the draft's own text so far; ``wanted``: tokens to draft
    next; ``out``: tokens that were chosen, and their scores."""

    context: Cached
    held: Any
    acceptance: Acceptance
    progress: Progress
    past: TokenHistory
    wanted: PerRow
    out: tuple[Array, Scores | None]


@functools.partial(
    jax.jit,
    static_argnames=("model", "filters", "proposer", "scores"),
    donate_argnames=("context", "held", "past"),
)
def speculate(
    proposer: Proposer,
    draft_params: Any,
    held: Any,
    acceptance: Acceptance,
    model: Model,
    filters: Filters,
    params: Any,
    context: Cached,
    progress: Progress,
    past: TokenHistory,
    halt: RowMask,
    settings: SamplingArrays,
    limit: Array,
    steps: Array,
    scores: int | None = None,
) -> tuple[
    Cached | None,
    Acceptance,
    Cached,
    Progress,
    TokenHistory,
    Int[Array, "batch chunk"],
    Scores | None,
]:
    """``programs.decode`` with drafts: until each row has ``steps`` more tokens, or is done.

    ``drafter``: what proposes; ``draft_params``, ``held``: its parameters, and its text so far;
    ``fared``: how drafts fare. The last two are given back, before what ``decode`` gives.
    """
    progress = replace(progress, done=progress.done | halt)
    begin = progress.count

    def choose(progress: Progress, past: TokenHistory, logits: Logits, allowed: None = None) -> Any:
        return choose_and_score(progress, past, logits, filters, settings, limit, scores)

    def active(progress: Progress) -> RowMask:
        return ~progress.done & (progress.count - begin < steps)

    def wanted(acceptance: Acceptance, progress: Progress, past: TokenHistory) -> PerRow:
        # Nothing is drafted, nor ever fed, beyond the last token that is asked for.
        left = jnp.minimum(steps - (progress.count - begin), limit - progress.count) - 1
        found = proposer.available(past, jnp.clip(left, 0, proposer.length))
        return acceptance.draft_lengths(found, proposer.cost, active(progress))

    def draft(
        progress: Progress, past: TokenHistory, logits: Logits, limit: PerRow
    ) -> tuple[Progress, TokenHistory]:
        return choose_and_score(progress, past, logits, filters, settings, limit, None)[:2]  # type: ignore[return-value]

    def going(carry: _Carry) -> Array:
        return jnp.any(active(carry.progress)) & ~jnp.any(carry.progress.broken)

    def single(carry: _Carry) -> _Carry:
        """A token of each row."""
        before = carry.progress
        now = active(before)
        context: Any
        logits, context = carry.context.forward(
            model, params, before.token[:, None], now.astype(jnp.int32)
        )
        waiting = replace(before, done=~now)
        logits = gather_vocab(logits, context)
        after, past, found = choose(waiting, carry.past, logits)
        after = replace(after, done=jnp.where(now, after.done, before.done))
        out = record(carry.out, (after.token, found), before, after, begin)
        acceptance = carry.acceptance.without_draft()
        return _Carry(
            context, carry.held, acceptance, after, past, wanted(acceptance, after, past), out
        )

    def several(carry: _Carry) -> _Carry:
        """A draft of each row, checked in one pass."""
        before, now = carry.progress, active(carry.progress)
        known: Any = carry.past.length
        held: Any
        drafted, held = proposer.propose(
            draft_params, carry.held, before, carry.past, carry.wanted, draft
        )
        logits, context = feed_drafts(model, params, carry.context, before, drafted, now)
        after, past, out = verify(
            drafted, logits, context, before, carry.past, now, carry.out, begin, choose
        )
        context, held, acceptance = rewind_rejected(
            proposer, context, held, carry.acceptance, drafted, before, after, known, now
        )
        return _Carry(context, held, acceptance, after, past, wanted(acceptance, after, past), out)

    def body(carry: _Carry) -> _Carry:
        # Loops, not a choice of two: of what goes through a choice, devices copy some.
        carry = lax.while_loop(lambda c: going(c) & ~jnp.any(c.wanted > 0), single, carry)
        return lax.while_loop(lambda c: going(c) & jnp.any(c.wanted > 0), several, carry)

    shape = begin.shape[0], MAX_STEPS
    out = jnp.zeros(shape, jnp.int32), None if scores is None else Scores.zeros(shape, scores)
    first = wanted(acceptance, progress, past)
    carry = _Carry(context, held, acceptance, progress, past, first, out)
    carry = lax.while_loop(going, body, carry)
    return carry.held, carry.acceptance, carry.context, carry.progress, carry.past, *carry.out


def feed_drafts(
    model: Model, params: Any, context: Cached, before: Progress, drafted: DraftTokens, now: RowMask
) -> tuple[EveryLogits, Cached]:
    """Feed the rows that it is ``now`` for their newest token, and what was drafted behind it."""
    tokens = jnp.concatenate([before.token[:, None], drafted[0]], axis=1)
    return context.forward_all(model, params, tokens, _lengths(drafted, now))


def rewind_rejected(
    proposer: Proposer,
    context: Cached,
    held: Any,
    acceptance: Acceptance,
    drafted: DraftTokens,
    before: Progress,
    after: Progress,
    known: PerRow,
    now: RowMask,
) -> tuple[Cached, Any, Acceptance]:
    """Behind a check: both texts without what was not taken, and how drafts fare; ``known``: tokens
    of each row before it."""
    count, taken = drafted[1], after.count - before.count
    accepted = jnp.clip(taken - 1, 0, count)
    # A row's cache ends before its newest token, and holds what broke it.
    surplus = _lengths(drafted, now) - jnp.where(now, jnp.maximum(taken, 1), 0)
    acceptance = acceptance.updated(count, accepted, proposer.length, proposer.cost, now)
    return context.rewind(surplus), proposer.rewind_rejected(held, known + accepted), acceptance


def _lengths(drafted: DraftTokens, now: RowMask) -> PerRow:
    return jnp.where(now, 1 + drafted[1], 0)


class SpeculativeDecoder:
    """``held``: the draft's own cache, None where there is none; ``fared``: how they fare;
    ``params``: of its model."""

    def __init__(self, lm: Any, request: GenerationRequest, draft: Draft, platform: str) -> None:
        self._request, self._draft, self._platform = request, draft, platform
        self._rows = len(request.row_prompts)
        self.context: Cached | None = None
        self.params: Any = None
        self._share = 0.0
        if isinstance(draft, DraftModel):
            self._lm = draft.lm if lm.mesh is None else draft.lm.on(lm.mesh)
            self.params, self._share = self._lm.params, relative_size(lm, draft.lm)
        self._vocab = lm.config.vocab_size
        self.acceptance = Acceptance.new(self._rows)

    @property
    def architecture(self) -> Model:
        """Of its model."""
        return self._lm.architecture

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes of its cache, by place."""
        return Counter() if self.context is None else Counter(nbytes(self.context.cache))

    def new_context(self) -> Cached | None:
        """The cache that its model reads prompts into: as long as the other, as far as it has
        positions."""
        draft, request = self._draft, self._request
        if not isinstance(draft, DraftModel):
            return None
        limit = position_limit(self._lm.config)
        capacity = request.history_len if limit is None else min(request.history_len, limit)
        cache = allocate(
            self._lm.config,
            draft.cache,
            batch=len(request.prompts),
            max_len=capacity,
            initial_len=capacity,
            mesh=self._lm.mesh,
        )
        return Cached(cache)

    def prefill(self) -> None:
        """Let it read the prompts."""
        context: Any = self.new_context()
        if context is None:
            return
        request = self._request
        logits = self._no_logits(context)
        texts = request.prompts if request.cache_tokens is None else request.row_sequences
        for chunk in prompt_chunks(
            replace(request, prompts=texts, cache_lengths=0 * request.cache_lengths)
        ):
            context, logits = programs.prefill(*self._prefill_args(context, logits, chunk))
        if request.samples > 1:
            context, _ = programs.repeat_rows(context, logits, request.samples)
        self.context = context

    def decode(self, proposer: Proposer, call: tuple[Any, ...]) -> Any:
        """``programs.decode`` with drafts, of what that is given."""
        self.context, self.acceptance, *found = speculate(
            proposer, self.params, self.context, self.acceptance, *call
        )
        return found

    def lowered(self, proposer: Proposer, call: tuple[Any, ...]) -> Lowered:
        """The same, to be compiled."""
        held = self.new_context() if self.context is None else self.context
        return speculate.lower(proposer, self.params, held, self.acceptance, *call)

    def lowered_prefill(self, chunks: list[PromptChunk]) -> list[Lowered]:
        """Its reading of these chunks, likewise."""
        held = self.new_context()
        if held is None:
            return []
        logits = self._no_logits(held)
        calls = [self._prefill_args(held, logits, chunk) for chunk in chunks]
        return [programs.prefill.lower(*call) for call in calls]

    def _no_logits(self, context: Cached) -> Any:
        shape = len(self._request.prompts), self._lm.config.vocab_size
        return Device(spread=context.cache.spread).put(np.zeros(shape, np.float32))

    def _prefill_args(self, context: Any, logits: Any, chunk: PromptChunk) -> tuple[Any, ...]:
        lm, last = self._lm, self._lm.config.vocab_size - 1
        tokens = jnp.minimum(chunk.tokens, last) if last + 1 < self._vocab else chunk.tokens
        return lm.architecture, lm.params, context, logits, tokens, chunk.lengths, chunk.ends

    def proposer(self, cache: KVCache, draft_context: Cached | None) -> Proposer | None:
        """What proposes, as it is compiled for a cache, and ``its`` own: no more tokens at a time
        than these can forget; None where they can't forget any."""
        draft, rows = self._draft, self._rows
        length = draft.length or default_length(self._platform, rows)
        for held in (cache, draft_context and draft_context.cache):
            if held is not None and held.max_rewind is not None:
                # Of what a stop string takes back, half is left.
                stops = bool(self._request.stop) and held is cache
                length = min(length, held.max_rewind // (2 if stops else 1))
        if length < 1:
            return None
        cost = draft_cost(self._platform, rows, length, self._share) if draft.adaptive else None
        if isinstance(draft, PromptLookup):
            return LookupProposer(length, cost, draft.shortest, draft.longest)
        config = self._lm.config
        return DraftModelProposer(length, cost, self.architecture, config.vocab_size, self._vocab)
