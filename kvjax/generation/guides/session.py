"""A generation with guides: the masks of each step depend on the tokens of the previous one.

A step is two programs: one processes the newest tokens, and one chooses the next tokens. While the
first runs, the host computes the masks for the second.

With drafts, a step is three programs: one proposes a draft, one runs the target model on it, and
one verifies it with the guides' masks. While the target model runs, a copy of each guide accepts
the row's draft token by token, which gives a mask for each position.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Lowered
from jaxtyping import Int, PyTree, UInt

from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation.drafts import speculative
from kvjax.generation.drafts.acceptance import DEFAULT_LENGTH, Acceptance
from kvjax.generation.drafts.draft_model import DraftTokens, Proposer
from kvjax.generation.drafts.speculative import DraftLogits, SpeculativeDecoder
from kvjax.generation.guides.masks import GuideMasks, mask_words
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.programs import Cached, Context, Progress, choose_and_score, gather_vocab
from kvjax.generation.request import GenerationRequest
from kvjax.generation.session import DecodeOutput, Session
from kvjax.sampling.filters import Allowed, Logits
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores


class GuidedSession(Session):
    """A ``Session`` with guides. ``decode`` takes one step, and waits for the previous one."""

    def __init__(self, lm: LanguageModel, request: GenerationRequest) -> None:
        super().__init__(lm, request)
        assert request.guides is not None
        self._masks = GuideMasks(request.guides, mask_words(lm.config), request.eos_token_ids)
        self._tokens: Array | None = None

    @property
    def max_steps(self) -> int:
        """Always 1, because the host computes masks between two steps."""
        return 1

    def begin(self) -> DecodeOutput:
        """Choose the first token of each row."""
        self._past = self.expand_samples()
        zeros = np.zeros(self._rows, np.int32)
        self._progress = self.put(Progress(zeros, zeros, zeros > 0, zeros > 0))  # type: ignore[arg-type]
        logits = self.logits
        del self.logits
        return self._choose(logits, np.zeros(self._rows, bool))

    def decode(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> DecodeOutput:
        """Choose one more token per row. Rows where ``halt`` (bool[batch]) is true end now."""
        self.context, logits = forward(
            self._lm.architecture, self._lm.params, self.context, self._progress, halt
        )
        return self._choose(logits, self._catch_up(halt))

    def lower_steps(self) -> dict[str, Lowered]:
        """Lower the two programs of a step."""
        lm, halt = self._lm, np.zeros(self._rows, bool)
        lowered = forward.lower(lm.architecture, lm.params, self.context, self._progress, halt)
        call = self._choose_args(self.zeros_like(lowered.out_info[1]), halt)
        return {"feed": lowered, "choose": choose.lower(*call)}

    def close(self, texts: list[list[int]] | None) -> None:
        """Let the guides accept all remaining tokens, and close the session like
        ``Session.close``."""
        try:
            if texts is not None and self._tokens is not None:
                self._catch_up(np.zeros(self._rows, bool))
        finally:
            super().close(texts)

    def _catch_up(self, halt: np.ndarray | Array) -> np.ndarray:
        """Advance the guides past the chosen tokens. Returns bool[batch], the rows that have
        ended."""
        # The next program is already running, and these small arrays have been fetched before.
        tokens, count, done = fetch((self._tokens, self._progress.count, self._progress.done))
        self._masks.accept(tokens, count)
        return np.asarray(halt) | done

    def _choose(self, logits: Logits, ended: np.ndarray) -> DecodeOutput:
        self._progress, self._past, tokens, scores = choose(*self._choose_args(logits, ended))
        self._tokens = tokens
        return DecodeOutput(tokens, self._progress, scores, None)

    def _choose_args(self, logits: Logits, ended: np.ndarray) -> tuple[object, ...]:
        request, allowed = self._request, self._masks.next_masks(ended)
        return (
            logits,
            request.filters,
            self.sampling,
            self._limit,
            self._progress,
            self._past,
            ended,
            allowed,
            request.logprobs,
        )


@functools.partial(jax.jit, static_argnames="model", donate_argnames="context")
def forward(
    model: Model, params: PyTree, context: Context, progress: Progress, halt: RowMask
) -> tuple[Context, Logits]:
    """Process the newest token of each unfinished row, and return the logits after it."""
    lengths: PerRow = (~(progress.done | halt)).astype(jnp.int32)
    logits, context = context.forward(model, params, progress.token[:, None], lengths)
    return context, gather_vocab(logits, context)


@functools.partial(jax.jit, static_argnames=("filters", "logprobs"), donate_argnames="past")
def choose(
    logits: Logits,
    filters: Filters,
    sampling: SamplingArrays,
    limit: Array,
    progress: Progress,
    past: TokenHistory | None,
    halt: RowMask,
    allowed: Allowed,
    logprobs: int | None,
) -> tuple[Progress, TokenHistory | None, Array, Scores | None]:
    """Choose the next token of each unfinished row among the allowed ones. Tokens and scores have
    the shape [batch, 1]."""
    progress = replace(progress, done=progress.done | halt)
    progress, past, scores = choose_and_score(
        progress, past, logits, filters, sampling, limit, logprobs, allowed=allowed
    )
    tokens, scores = jax.tree.map(lambda x: x[:, None], (progress.token, scores))
    return progress, past, tokens, scores


class DraftedGuidedSession(GuidedSession):
    """A ``GuidedSession`` with drafts. ``decode`` adds the accepted draft tokens and one more
    token. Drafts are proposed without guides."""

    @property
    def max_steps(self) -> int:
        """The maximum number of tokens that ``decode`` adds to a row."""
        draft = self._request.draft
        assert draft is not None
        return 1 + (draft.num_draft_tokens or DEFAULT_LENGTH)

    def decode(self, steps: np.int32 | Array, halt: np.ndarray | Array) -> DecodeOutput:
        """Decode at most ``steps`` tokens of each row. Rows where ``halt`` (bool[batch]) is true
        end now."""
        proposer, drafts = self.proposer, self._drafts
        if proposer is None or drafts is None:
            return super().decode(steps, halt)
        lm, context = self._lm, self.context
        assert isinstance(context, Cached)
        draft, drafts.context = propose(*self._propose_args(proposer, drafts, steps, halt))
        ended = self._catch_up(halt)
        tokens, lengths = fetch(draft)
        if not lengths.any():
            drafts.acceptance = without_draft(drafts.acceptance)
            return super().decode(steps, halt)._replace(acceptance=drafts.acceptance)
        self.context, logits = feed(
            lm.architecture, lm.params, context, self._progress, draft, halt
        )
        allowed = self._masks.draft_masks(tokens, lengths, ended)
        (self.context, drafts.context, drafts.acceptance), results = verify(
            *self._verify_args(proposer, drafts, logits, draft, halt, allowed)
        )
        self._progress, self._past, self._tokens, scores = results
        return DecodeOutput(results[2], self._progress, scores, drafts.acceptance)

    def lower_steps(self) -> dict[str, Lowered]:
        """Lower the programs of a step, both without and with a draft."""
        lowered, proposer, drafts = super().lower_steps(), self.proposer, self._drafts
        if proposer is None or drafts is None:
            return lowered
        lm, halt, context = self._lm, np.zeros(self._rows, bool), self.context
        assert isinstance(context, Cached)
        drafts.acceptance = without_draft(self.put(drafts.acceptance))
        if drafts.context is None:
            drafts.context = drafts.new_context()
        propose_step = propose.lower(*self._propose_args(proposer, drafts, np.int32(0), halt))
        draft = self.zeros_like(propose_step.out_info[0])
        feed_step = feed.lower(lm.architecture, lm.params, context, self._progress, draft, halt)
        tokens, lengths = fetch(draft)
        allowed = self._masks.draft_masks(tokens, lengths, halt)
        logits = self.zeros_like(feed_step.out_info[1])
        args = self._verify_args(proposer, drafts, logits, draft, halt, allowed)
        return lowered | {
            "propose": propose_step,
            "feed drafts": feed_step,
            "check": verify.lower(*args),
        }

    def _propose_args(
        self,
        proposer: Proposer,
        drafts: SpeculativeDecoder,
        steps: np.int32 | Array,
        halt: np.ndarray | Array,
    ) -> tuple[object, ...]:
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

    def _verify_args(
        self,
        proposer: Proposer,
        drafts: SpeculativeDecoder,
        logits: DraftLogits,
        draft: DraftTokens,
        halt: np.ndarray | Array,
        allowed: np.ndarray,
    ) -> tuple[object, ...]:
        request = self._request
        return (
            proposer,
            self.context,
            drafts.context,
            drafts.acceptance,
            logits,
            draft,
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
    """Create the session of a request without beams."""
    if request.guides is None:
        return Session(lm, request)
    session_class = GuidedSession if request.draft is None else DraftedGuidedSession
    return session_class(lm, request)


@functools.partial(
    jax.jit, static_argnames=("proposer", "filters"), donate_argnames="draft_context"
)
def propose(
    proposer: Proposer,
    draft_params: PyTree,
    draft_context: PyTree,
    acceptance: Acceptance,
    filters: Filters,
    progress: Progress,
    past: TokenHistory,
    halt: RowMask,
    settings: SamplingArrays,
    limit: Array,
    steps: Array,
) -> tuple[DraftTokens, PyTree]:
    """Draft tokens for the rows that continue. No row may get more than ``steps`` tokens in the
    step. Returns the draft and the draft context."""
    progress = replace(progress, done=progress.done | halt)

    def choose(
        progress: Progress, past: TokenHistory, logits: Logits, limit: PerRow
    ) -> tuple[Progress, TokenHistory]:
        return choose_and_score(progress, past, logits, filters, settings, limit, None)[:2]

    left = jnp.minimum(steps, limit - progress.count) - 1
    available = proposer.available(past, jnp.clip(left, 0, proposer.length))
    lengths = acceptance.draft_lengths(available, proposer.cost, ~progress.done)
    return proposer.propose(draft_params, draft_context, progress, past, lengths, choose)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="context")
def feed(
    model: Model,
    params: PyTree,
    context: Cached,
    progress: Progress,
    draft: DraftTokens,
    halt: RowMask,
) -> tuple[Cached, DraftLogits]:
    """Run the target model on the newest tokens and drafts of the rows that continue. Returns the
    logits after each of them."""
    active: RowMask = ~(progress.done | halt)
    logits, context = speculative.feed_draft(model, params, context, progress, draft, active)
    return context, gather_vocab(logits, context)  # type: ignore[arg-type]


@functools.partial(
    jax.jit,
    static_argnames=("proposer", "filters", "scores"),
    donate_argnames=("context", "draft_context", "past"),
)
def verify(
    proposer: Proposer,
    context: Cached,
    draft_context: PyTree,
    acceptance: Acceptance,
    logits: DraftLogits,
    draft: DraftTokens,
    filters: Filters,
    settings: SamplingArrays,
    limit: Array,
    progress: Progress,
    past: TokenHistory,
    halt: RowMask,
    allowed: UInt[Array, "batch places words"],
    scores: int | None,
) -> tuple[PyTree, tuple[Progress, TokenHistory, Int[Array, "batch places"], Scores | None]]:
    """Verify the drafts of the rows that continue, and rewind rejected tokens.

    ``allowed`` (uint32[batch, places, words]) has masks of the allowed tokens. Returns the two
    contexts and the acceptance statistics, followed by progress, history, tokens and scores.
    """

    def choose(
        progress: Progress, past: TokenHistory, logits: Logits, allowed: Array | None = None
    ) -> speculative.Choice:
        return choose_and_score(
            progress, past, logits, filters, settings, limit, scores, allowed=allowed
        )

    before = replace(progress, done=progress.done | halt)
    length: PyTree = past.length
    active, shape = ~before.done, logits.shape[:2]
    output = jnp.zeros(shape, jnp.int32), None if scores is None else Scores.zeros(shape, scores)
    after, past, output = speculative.verify(
        draft, logits, context, before, past, active, output, before.count, choose, allowed
    )
    contexts = speculative.rewind_rejected(
        proposer, context, draft_context, acceptance, draft, before, after, length, active
    )
    return contexts, (after, past, *output)


@jax.jit
def without_draft(acceptance: Acceptance) -> Acceptance:
    """Return the statistics after a step without a draft."""
    return acceptance.without_draft()
