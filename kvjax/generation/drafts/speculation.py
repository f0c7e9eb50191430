"""Speculation: drafts are checked by the model, several tokens a pass, and the text stays its own.

A token depends on the logits before it, its row's seed and its number alone. So the model's own
token is chosen at every place of a draft, and the draft is taken as far as it is the same: whatever
was drafted, the text is what it would have been without, greedy or drawn. What was not taken, the
cache forgets before anything goes by it.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation.context import Cached
from kvjax.generation.drafts.acceptance import Acceptance
from kvjax.generation.drafts.checking import EveryLogits, checked, told
from kvjax.generation.drafts.proposals import Drafted, Drafter
from kvjax.generation.model import Model
from kvjax.generation.programs import MAX_STEPS, Progress, choose_and_score, gather_vocab
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores


@pytree_dataclass
class _Carry:
    """A dispatch as it goes. ``held``: the draft's own text so far; ``wanted``: tokens to draft
    next; ``out``: tokens that were chosen, and their scores."""

    context: Cached
    held: Any
    fared: Acceptance
    progress: Progress
    past: TokenHistory
    wanted: PerRow
    out: tuple[Array, Scores | None]


@functools.partial(
    jax.jit, static_argnames=("model", "filters", "drafter", "scores"),
    donate_argnames=("context", "held", "past"),
)  # fmt: skip
def speculate(
    drafter: Drafter,
    draft_params: Any,
    held: Any,
    fared: Acceptance,
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

    def wanted(fared: Acceptance, progress: Progress, past: TokenHistory) -> PerRow:
        # Nothing is drafted, nor ever fed, beyond the last token that is asked for.
        left = jnp.minimum(steps - (progress.count - begin), limit - progress.count) - 1
        found = drafter.found(past, jnp.clip(left, 0, drafter.length))
        return fared.wanted(found, drafter.price, active(progress))

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
        out = told(carry.out, (after.token, found), before, after, begin)
        fared = carry.fared.rested()
        return _Carry(context, carry.held, fared, after, past, wanted(fared, after, past), out)

    def several(carry: _Carry) -> _Carry:
        """A draft of each row, checked in one pass."""
        before, now = carry.progress, active(carry.progress)
        known: Any = carry.past.length
        held: Any
        drafted, held = drafter.propose(
            draft_params, carry.held, before, carry.past, carry.wanted, draft
        )
        logits, context = fed(model, params, carry.context, before, drafted, now)
        after, past, out = checked(
            drafted, logits, context, before, carry.past, now, carry.out, begin, choose
        )
        context, held, fared = settled(
            drafter, context, held, carry.fared, drafted, before, after, known, now
        )
        return _Carry(context, held, fared, after, past, wanted(fared, after, past), out)

    def body(carry: _Carry) -> _Carry:
        # Loops, not a choice of two: of what goes through a choice, devices copy some.
        carry = lax.while_loop(lambda c: going(c) & ~jnp.any(c.wanted > 0), single, carry)
        return lax.while_loop(lambda c: going(c) & jnp.any(c.wanted > 0), several, carry)

    shape = begin.shape[0], MAX_STEPS
    out = jnp.zeros(shape, jnp.int32), None if scores is None else Scores.zeros(shape, scores)
    first = wanted(fared, progress, past)
    carry = _Carry(context, held, fared, progress, past, first, out)
    carry = lax.while_loop(going, body, carry)
    return carry.held, carry.fared, carry.context, carry.progress, carry.past, *carry.out


def fed(
    model: Model, params: Any, context: Cached, before: Progress, drafted: Drafted, now: RowMask
) -> tuple[EveryLogits, Cached]:
    """Feed the rows that it is ``now`` for their newest token, and what was drafted behind it."""
    tokens = jnp.concatenate([before.token[:, None], drafted[0]], axis=1)
    return context.forward_all(model, params, tokens, _lengths(drafted, now))


def settled(
    drafter: Drafter, context: Cached, held: Any, fared: Acceptance, drafted: Drafted,
    before: Progress, after: Progress, known: PerRow, now: RowMask,
) -> tuple[Cached, Any, Acceptance]:  # fmt: skip
    """Behind a check: both texts without what was not taken, and how drafts fare; ``known``: tokens
    of each row before it."""
    count, taken = drafted[1], after.count - before.count
    accepted = jnp.clip(taken - 1, 0, count)
    # A row's cache ends before its newest token, and holds what broke it.
    surplus = _lengths(drafted, now) - jnp.where(now, jnp.maximum(taken, 1), 0)
    fared = fared.after(count, accepted, drafter.length, drafter.price, now)
    return context.rewind(surplus), drafter.settled(held, known + accepted), fared


def _lengths(drafted: Drafted, now: RowMask) -> PerRow:
    return jnp.where(now, 1 + drafted[1], 0)
