"""Speculative decoding: the target model verifies several draft tokens in one pass.

A token depends only on the logits before it, its row's seed and its index. So the target model's
own token is chosen at each position of a draft, and draft tokens are accepted as long as they are
equal to it. The sequence is therefore the same as without drafts, greedy or sampled. Rejected
tokens are rewound from the caches.

Source: Leviathan et al., arXiv:2211.17192. Their acceptance rule keeps the distribution of samples.
Here the samples themselves are the same as without drafts.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Lowered
from jaxtyping import Float, Int, PyTree, UInt

from kvjax.cache.creation import allocate
from kvjax.cache.sizes import nbytes
from kvjax.cache.state import KVCache
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask
from kvjax.generation import programs
from kvjax.generation.drafts.acceptance import Acceptance, default_length, draft_cost
from kvjax.generation.drafts.draft_model import (
    Draft,
    DraftModel,
    DraftModelProposer,
    DraftTokens,
    LookupProposer,
    PromptLookup,
    Proposer,
    relative_size,
)
from kvjax.generation.model import Model
from kvjax.generation.programs import MAX_STEPS, Cached, Progress, choose_and_score, gather_vocab
from kvjax.generation.request import GenerationRequest, PromptChunk, prompt_chunks
from kvjax.memory.sizes import LoadedModel
from kvjax.placement.device import Device
from kvjax.policies.model_config import position_limit
from kvjax.sampling.filters import Logits, set_at
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import Filters, SamplingArrays
from kvjax.sampling.scores import Scores

DraftLogits = Float[Array, "batch places vocab"]
"""The target model's logits after each row's newest token, and after each of its draft tokens."""
Choice = tuple[Progress, TokenHistory, Scores | None]
Choose = Callable[..., Choice]
"""A function ``(progress, past, logits, allowed=)`` that works like
``programs.choose_and_score``."""
Output = tuple[Array, Scores | None]
"""New tokens and their scores, both [batch, steps]."""
_VerifyCarry = tuple[Array, Progress, TokenHistory, RowMask, Output]


def verify(
    draft: DraftTokens,
    logits: DraftLogits,
    context: Cached,
    before: Progress,
    past: TokenHistory,
    active: RowMask,
    output: Output,
    begin: PerRow,
    choose: Choose,
    allowed: UInt[Array, "batch places words"] | None = None,
) -> tuple[Progress, TokenHistory, Output]:
    """Choose the target model's tokens for the ``active`` rows: one for each accepted draft token,
    and one more.

    Args:
      output: the arrays to which the tokens are written. A row's token with the index ``begin`` is
        written to column 0.
      allowed: bit masks of the tokens that guides allow at each position, see ``sample``.
    """
    tokens, lengths = draft

    def unfinished(carry: _VerifyCarry) -> Array:
        place, _, _, accepting, _ = carry
        return (place <= tokens.shape[1]) & jnp.any(accepting)

    def verify_one(carry: _VerifyCarry) -> _VerifyCarry:
        place, progress, past, accepting, output = carry
        place_logits = lax.dynamic_index_in_dim(logits, place, axis=1, keepdims=False)
        mask = None
        if allowed is not None:
            mask = lax.dynamic_index_in_dim(allowed, place, axis=1, keepdims=False)
        after, past, scores = choose(
            replace(progress, done=~accepting),
            past,
            gather_vocab(place_logits, context),
            allowed=mask,
        )
        after = replace(after, done=jnp.where(accepting, after.done, progress.done))
        output = record(output, (after.token, scores), progress, after, begin)
        proposed = jnp.take(tokens, place, axis=1, mode="clip")
        accepting &= (place < lengths) & (after.token == proposed) & ~after.done
        return place + 1, after, past, accepting, output

    carry = jnp.int32(0), before, past, active, output
    _, after, past, _, output = lax.while_loop(unfinished, verify_one, carry)
    return after, past, output


def record(output: Output, new: Output, before: Progress, after: Progress, begin: PerRow) -> Output:
    """Write new tokens and scores (both [batch]) to the output, for rows that took a token."""
    steps = jax.tree.leaves(output)[0].shape[1]
    at = jnp.where(after.count > before.count, before.count - begin, steps)
    return jax.tree.map(lambda column, value: set_at(column, at, value), output, new)


@pytree_dataclass
class _Carry:
    """The state of the decode loop. ``lengths`` is the number of tokens to draft next."""

    context: Cached
    draft_context: PyTree
    acceptance: Acceptance
    progress: Progress
    past: TokenHistory
    lengths: PerRow
    output: Output


@functools.partial(
    jax.jit,
    static_argnames=("model", "filters", "proposer", "scores"),
    donate_argnames=("context", "draft_context", "past"),
)
def speculate(
    proposer: Proposer,
    draft_params: PyTree,
    draft_context: PyTree,
    acceptance: Acceptance,
    model: Model,
    filters: Filters,
    params: PyTree,
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
    """Do the work of ``programs.decode`` with drafts: decode until each row has ``steps`` more
    tokens or is done.

    ``draft_params`` and ``draft_context`` are the parameters and the context of the draft model;
    None for prompt lookup. Returns the draft context and the acceptance statistics, followed by the
    results of ``decode``.
    """
    progress = replace(progress, done=progress.done | halt)
    begin = progress.count

    def choose(progress: Progress, past: TokenHistory, logits: Logits, allowed: None) -> Choice:
        return choose_and_score(progress, past, logits, filters, settings, limit, scores)

    def choose_draft(
        progress: Progress, past: TokenHistory, logits: Logits, limit: PerRow
    ) -> tuple[Progress, TokenHistory]:
        return choose_and_score(progress, past, logits, filters, settings, limit, None)[:2]

    def active_rows(progress: Progress) -> RowMask:
        return ~progress.done & (progress.count - begin < steps)

    def next_lengths(acceptance: Acceptance, progress: Progress, past: TokenHistory) -> PerRow:
        # The last requested token is never drafted, and no model reads it.
        left = jnp.minimum(steps - (progress.count - begin), limit - progress.count) - 1
        available = proposer.available(past, jnp.clip(left, 0, proposer.length))
        return acceptance.draft_lengths(available, proposer.cost, active_rows(progress))

    def unfinished(carry: _Carry) -> Array:
        return jnp.any(active_rows(carry.progress)) & ~jnp.any(carry.progress.broken)

    def decode_one(carry: _Carry) -> _Carry:
        """Decode one token of each row, without a draft."""
        before = carry.progress
        active = active_rows(before)
        logits, context = carry.context.forward(
            model, params, before.token[:, None], active.astype(jnp.int32)
        )
        logits = gather_vocab(logits, context)
        after, past, new = choose(replace(before, done=~active), carry.past, logits, None)
        after = replace(after, done=jnp.where(active, after.done, before.done))
        output = record(carry.output, (after.token, new), before, after, begin)
        acceptance = carry.acceptance.without_draft()
        lengths = next_lengths(acceptance, after, past)
        return _Carry(context, carry.draft_context, acceptance, after, past, lengths, output)

    def decode_draft(carry: _Carry) -> _Carry:
        """Draft tokens for each row, and verify them in one pass."""
        before, active = carry.progress, active_rows(carry.progress)
        length: PyTree = carry.past.length
        draft, draft_context = proposer.propose(
            draft_params, carry.draft_context, before, carry.past, carry.lengths, choose_draft
        )
        logits, context = feed_draft(model, params, carry.context, before, draft, active)
        after, past, output = verify(
            draft, logits, context, before, carry.past, active, carry.output, begin, choose
        )
        context, draft_context, acceptance = rewind_rejected(
            proposer, context, draft_context, carry.acceptance, draft, before, after, length, active
        )
        lengths = next_lengths(acceptance, after, past)
        return _Carry(context, draft_context, acceptance, after, past, lengths, output)

    def body(carry: _Carry) -> _Carry:
        # Use two loops instead of lax.cond, which copies some of its operands on accelerators.
        carry = lax.while_loop(lambda c: unfinished(c) & ~jnp.any(c.lengths > 0), decode_one, carry)
        return lax.while_loop(lambda c: unfinished(c) & jnp.any(c.lengths > 0), decode_draft, carry)

    shape = begin.shape[0], MAX_STEPS
    output = jnp.zeros(shape, jnp.int32), None if scores is None else Scores.zeros(shape, scores)
    lengths = next_lengths(acceptance, progress, past)
    carry = _Carry(context, draft_context, acceptance, progress, past, lengths, output)
    carry = lax.while_loop(unfinished, body, carry)
    results = carry.context, carry.progress, carry.past
    return carry.draft_context, carry.acceptance, *results, *carry.output


def feed_draft(
    model: Model,
    params: PyTree,
    context: Cached,
    before: Progress,
    draft: DraftTokens,
    active: RowMask,
) -> tuple[DraftLogits, Cached]:
    """Run the target model on the newest token and the draft of each active row."""
    tokens = jnp.concatenate([before.token[:, None], draft[0]], axis=1)
    return context.forward_all(model, params, tokens, _fed(draft, active))


def rewind_rejected(
    proposer: Proposer,
    context: Cached,
    draft_context: PyTree,
    acceptance: Acceptance,
    draft: DraftTokens,
    before: Progress,
    after: Progress,
    length: PerRow,
    active: RowMask,
) -> tuple[Cached, PyTree, Acceptance]:
    """After a verification, rewind both caches to the accepted tokens, and update the statistics.

    ``length`` is the number of tokens of each row before the draft.
    """
    drafted, new = draft[1], after.count - before.count
    accepted = jnp.clip(new - 1, 0, drafted)
    # A cache does not contain its row's newest token. A broken row keeps the token after which its
    # logits were not finite.
    rejected = _fed(draft, active) - jnp.where(active, jnp.maximum(new, 1), 0)
    acceptance = acceptance.updated(drafted, accepted, proposer.length, proposer.cost, active)
    draft_context = proposer.rewind_rejected(draft_context, length + accepted)
    return context.rewind(rejected), draft_context, acceptance


def _fed(draft: DraftTokens, active: RowMask) -> PerRow:
    """Return how many tokens of each row ``feed_draft`` processes."""
    return jnp.where(active, 1 + draft[1], 0)


class SpeculativeDecoder:
    """The part of a session that drafts.

    ``context`` and ``params`` are the context and the parameters of the draft model; None for
    prompt lookup. ``acceptance`` has the acceptance statistics.
    """

    def __init__(
        self, lm: LoadedModel, request: GenerationRequest, draft: Draft, platform: str
    ) -> None:
        self._request, self._draft, self._platform = request, draft, platform
        self._rows = len(request.row_prompts)
        self.context: Cached | None = None
        self.params: PyTree = None
        self._relative_size = 0.0
        if isinstance(draft, DraftModel):
            self._lm = draft.lm if lm.mesh is None else draft.lm.on(lm.mesh)
            self.params, self._relative_size = self._lm.params, relative_size(lm, draft.lm)
        self._vocab = lm.config.vocab_size
        self.acceptance = Acceptance.new(self._rows)

    @property
    def architecture(self) -> Model:
        """The draft model's architecture."""
        return self._lm.architecture

    @property
    def nbytes(self) -> Counter[str]:
        """Bytes of the draft model's cache, by memory."""
        return Counter() if self.context is None else Counter(nbytes(self.context.cache))

    def new_context(self) -> Cached | None:
        """Create an empty cache for the draft model; None for prompt lookup. Its capacity is what
        the request needs, but at most the draft model's number of positions."""
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
        """Prefill the draft model's cache with the prompts."""
        context: PyTree = self.new_context()
        if context is None:
            return
        request = self._request
        logits = self._zero_logits(context)
        prompts = request.prompts if request.cache_tokens is None else request.row_sequences
        request = replace(request, prompts=prompts, cache_lengths=0 * request.cache_lengths)
        for chunk in prompt_chunks(request):
            context, logits = programs.prefill(*self._prefill_args(context, logits, chunk))
        if request.samples > 1:
            context, _ = programs.repeat_rows(context, logits, request.samples)
        self.context = context

    def decode(self, proposer: Proposer, args: tuple[object, ...]) -> list[PyTree]:
        """Do the work of ``programs.decode`` with drafts. ``args`` are the arguments of
        ``programs.decode``."""
        self.context, self.acceptance, *results = speculate(
            proposer, self.params, self.context, self.acceptance, *args
        )
        return results

    def lowered(self, proposer: Proposer, args: tuple[object, ...]) -> Lowered:
        """Lower the program of ``decode``."""
        context = self.new_context() if self.context is None else self.context
        return speculate.lower(proposer, self.params, context, self.acceptance, *args)

    def lowered_prefill(self, chunks: list[PromptChunk]) -> list[Lowered]:
        """Lower the programs of ``prefill`` for these chunks."""
        context = self.new_context()
        if context is None:
            return []
        logits = self._zero_logits(context)
        return [
            programs.prefill.lower(*self._prefill_args(context, logits, chunk)) for chunk in chunks
        ]

    def _zero_logits(self, context: Cached) -> Logits:
        shape = len(self._request.prompts), self._lm.config.vocab_size
        return Device(mesh_sharding=context.cache.mesh_sharding).put(np.zeros(shape, np.float32))

    def _prefill_args(
        self, context: Cached, logits: Logits, chunk: PromptChunk
    ) -> tuple[object, ...]:
        lm, last = self._lm, self._lm.config.vocab_size - 1
        tokens = jnp.minimum(chunk.tokens, last) if last + 1 < self._vocab else chunk.tokens
        return lm.architecture, lm.params, context, logits, tokens, chunk.lengths, chunk.ends

    def proposer(self, cache: KVCache, draft_context: PyTree) -> Proposer | None:
        """Return the proposer for a target cache and a draft context. The proposer drafts at most
        as many tokens as the target's cache and the draft model's cache can rewind. If this number
        is 0, the result is None."""
        draft, rows = self._draft, self._rows
        length = draft.num_draft_tokens or default_length(self._platform, rows)
        if cache.max_rewind is not None:
            # A stop string may also need to rewind. Leave half of the tokens for it.
            length = min(length, cache.max_rewind // (2 if self._request.stop else 1))
        if draft_context is not None and draft_context.cache.max_rewind is not None:
            length = min(length, draft_context.cache.max_rewind)
        if length < 1:
            return None
        cost = None
        if draft.adaptive:
            cost = draft_cost(self._platform, rows, length, self._relative_size)
        if isinstance(draft, PromptLookup):
            return LookupProposer(length, cost, draft.min_ngram, draft.max_ngram)
        draft_vocab = self._lm.config.vocab_size
        return DraftModelProposer(length, cost, self.architecture, draft_vocab, self._vocab)
