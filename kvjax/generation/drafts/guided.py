"""Drafts of rows with guides: what a guide allows along a draft is made while the model reads it.

A step is three programs: one drafts, one feeds what was drafted, one checks it under masks, of
which each place of a draft has its own. A guide goes along a draft as a copy.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered
from jaxtyping import Int

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation.context import Cached
from kvjax.generation.drafts import speculative
from kvjax.generation.drafts.acceptance import DEFAULT_LENGTH, Acceptance
from kvjax.generation.drafts.propose import DraftTokens, Proposer
from kvjax.generation.drafts.speculative import EveryLogits, SpeculativeDecoder
from kvjax.generation.guides.session import GuidedSession
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, choose_and_score, gather_vocab
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import DecodeOutput, Session
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores


class DraftedGuidedSession(GuidedSession):
    """A ``GuidedSession`` with drafts. ``decode`` takes as many tokens as are right, and one more;
    drafts themselves keep to no guide."""

    @property
    def most(self) -> int:
        """The tokens that ``decode`` may take of a row."""
        draft = self._request.draft
        assert draft is not None
        return 1 + (draft.length or DEFAULT_LENGTH)

    def decode(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> DecodeOutput:
        """Choose up to so many tokens more, of all rows but those to end now (bool[batch])."""
        proposer, drafts = self.proposer, self._drafts
        if proposer is None or drafts is None:
            return super().decode(steps, halt)
        lm, context = self._lm, self.context
        assert isinstance(context, Cached)
        drafted, drafts.context = propose(*self._proposing(proposer, drafts, steps, halt))
        ended = self._caught_up(halt)
        tokens, count = fetch(drafted)
        if not count.any():
            drafts.acceptance = without_draft(drafts.acceptance)
            return super().decode(steps, halt)._replace(drafted=drafts.acceptance)
        self.context, logits = feed(
            lm.architecture, lm.params, context, self._progress, drafted, halt
        )
        allowed = self._masks.draft_masks(tokens, count, ended)
        (self.context, drafts.context, drafts.acceptance), found = verify(
            *self._checking(proposer, drafts, logits, drafted, halt, allowed)
        )
        self._progress, self._past, self._out, scores = found
        return DecodeOutput(found[2], self._progress, scores, drafts.acceptance)

    def lower_steps(self) -> dict[str, Lowered]:
        """Those of a step without a draft, and the three of one with it, to be compiled."""
        found, proposer, drafts = super().lower_steps(), self.proposer, self._drafts
        if proposer is None or drafts is None:
            return found
        lm, halt, context = self._lm, np.zeros(self._rows, bool), self.context
        assert isinstance(context, Cached)
        drafts.acceptance = without_draft(self.put(drafts.acceptance))
        if drafts.context is None:
            drafts.context = drafts.new_context()
        proposed = propose.lower(*self._proposing(proposer, drafts, np.int32(0), halt))
        drafted = self.zeros_like(proposed.out_info[0])
        feed_drafts = feed.lower(lm.architecture, lm.params, context, self._progress, drafted, halt)
        tokens, count = fetch(drafted)
        allowed = self._masks.draft_masks(tokens, count, halt)
        call = self._checking(
            proposer, drafts, self.zeros_like(feed_drafts.out_info[1]), drafted, halt, allowed
        )
        return found | {
            "propose": proposed,
            "feed drafts": feed_drafts,
            "check": verify.lower(*call),
        }

    def _proposing(
        self, proposer: Proposer, drafts: SpeculativeDecoder, steps: Any, halt: Any
    ) -> tuple[Any, ...]:
        return (
            proposer,
            drafts.params,
            drafts.context,
            drafts.acceptance,
            self._request.filters,
            self._progress,
            self._past,
            halt,
            self.sampling,
            self._limit,
            steps,
        )

    def _checking(
        self,
        proposer: Proposer,
        drafts: SpeculativeDecoder,
        logits: Any,
        drafted: DraftTokens,
        halt: Any,
        allowed: np.ndarray,
    ) -> tuple[Any, ...]:
        request = self._request
        return (
            proposer,
            self.context,
            drafts.context,
            drafts.acceptance,
            logits,
            drafted,
            request.filters,
            self.sampling,
            self._limit,
            self._progress,
            self._past,
            halt,
            allowed,
            request.logprobs,
        )


def session_of(lm: LanguageModel, request: GenerationRequest) -> Session:
    """The session of a request, with guides or without."""
    if request.guides is None:
        return Session(lm, request)
    kind = GuidedSession if request.draft is None else DraftedGuidedSession
    return kind(lm, request)


@functools.partial(jax.jit, static_argnames=("proposer", "filters"), donate_argnames="held")
def propose(
    proposer: Proposer,
    draft_params: Any,
    held: Any,
    acceptance: Acceptance,
    filters: Filters,
    progress: Progress,
    past: TokenHistory,
    halt: Any,
    settings: SamplingArrays,
    limit: Array,
    steps: Any,
) -> tuple[DraftTokens, Any]:
    """Draft of the rows that go on, so that they come to ``steps`` tokens more at most; and the
    draft's own text behind that."""
    progress = replace(progress, done=progress.done | halt)

    def choose(progress: Progress, past: TokenHistory, logits: Logits, limit: PerRow) -> Any:
        return choose_and_score(progress, past, logits, filters, settings, limit, None)[:2]

    left = jnp.minimum(steps, limit - progress.count) - 1
    found = proposer.available(past, jnp.clip(left, 0, proposer.length))
    wanted = acceptance.draft_lengths(found, proposer.cost, ~progress.done)
    return proposer.propose(draft_params, held, progress, past, wanted, choose)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="context")
def feed(
    model: Model, params: Any, context: Cached, progress: Progress, drafted: DraftTokens, halt: Any
) -> tuple[Cached, EveryLogits]:
    """Feed the newest tokens of the rows that go on, and their drafts; the logits behind all."""
    now: RowMask = ~(progress.done | halt)
    logits, context = speculative.feed_drafts(model, params, context, progress, drafted, now)
    return context, gather_vocab(logits, context)  # type: ignore[arg-type]


@functools.partial(
    jax.jit,
    static_argnames=("proposer", "filters", "scores"),
    donate_argnames=("context", "held", "past"),
)
def verify(
    proposer: Proposer,
    context: Cached,
    held: Any,
    acceptance: Acceptance,
    logits: EveryLogits,
    drafted: DraftTokens,
    filters: Filters,
    settings: SamplingArrays,
    limit: Array,
    progress: Progress,
    past: TokenHistory,
    halt: Any,
    allowed: Any,
    scores: int | None,
) -> tuple[Any, tuple[Progress, TokenHistory, Int[Array, "batch places"], Scores | None]]:
    """Choose the tokens of the rows that go on, as far as they are what was drafted, and one more;
    ``allowed``: uint32[batch, places, words]. Both texts, and how drafts fare, come first."""

    def choose(progress: Progress, past: TokenHistory, logits: Logits, allowed: Any = None) -> Any:
        return choose_and_score(
            progress, past, logits, filters, settings, limit, scores, allowed=allowed
        )

    before: Any = replace(progress, done=progress.done | halt)
    known: Any = past.length
    now, shape = ~before.done, logits.shape[:2]
    out = jnp.zeros(shape, jnp.int32), None if scores is None else Scores.zeros(shape, scores)
    after, past, (tokens, found) = speculative.verify(
        drafted, logits, context, before, past, now, out, before.count, choose, allowed
    )
    texts = speculative.rewind_rejected(
        proposer, context, held, acceptance, drafted, before, after, known, now
    )
    return texts, (after, past, tokens, found)


@jax.jit
def without_draft(acceptance: Acceptance) -> Acceptance:
    """Behind a step without a draft."""
    return acceptance.without_draft()
