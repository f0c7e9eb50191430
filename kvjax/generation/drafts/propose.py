"""Proposers of draft tokens, inside a program: prompt lookup, and a draft model."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int, PyTree

from kvjax.core.array_ops import arange_row
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.generation.drafts.acceptance import DraftCost
from kvjax.generation.model import Model
from kvjax.generation.programs import Cached, Progress, gather_vocab
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory

Choose = Callable[[Progress, TokenHistory, Logits, PerRow], tuple[Progress, TokenHistory]]
"""``(progress, past, logits, limit)``: choose the next token of each row with the target model's
random numbers. A row is done after ``limit`` new tokens, int32[batch]."""
DraftTokens = tuple[Int[Array, "batch length"], PerRow]
"""Draft tokens, and the number of them in each row."""
_Carry = tuple[Array, Cached, Progress, TokenHistory, Array]


@dataclass(frozen=True)
class LookupProposer:
    """``PromptLookup`` with its settings resolved, a static argument of programs. It drafts at most
    ``length`` tokens."""

    length: int
    cost: DraftCost | None
    shortest: int
    longest: int

    def available(self, past: TokenHistory, limit: PerRow) -> PerRow:
        """How many tokens can be drafted for each row, at most ``limit``."""
        return jnp.where(self._longest_match(past)[0] >= self.shortest, limit, 0)

    def propose(
        self,
        params: None,
        context: None,
        progress: Progress,
        past: TokenHistory,
        lengths: PerRow,
        choose: Choose,
    ) -> tuple[DraftTokens, None]:
        """Draft ``lengths`` tokens for each row. If the match overlaps the end of the sequence, the
        repetition continues."""
        assert past.tokens is not None and past.length is not None
        _, start = self._longest_match(past)
        period = jnp.maximum(past.length - start, 1)[:, None]
        at = start[:, None] + arange_row(self.length) % period
        return (jnp.take_along_axis(past.tokens, at, axis=1, mode="clip"), lengths), context

    def rewind_rejected(self, context: None, lengths: PerRow) -> None:
        """Do nothing: prompt lookup has no cache."""
        return context

    def _longest_match(self, past: TokenHistory) -> tuple[PerRow, PerRow]:
        """How many of a row's last tokens, at most ``longest``, occur earlier in it, and the
        position after their newest earlier occurrence."""
        tokens, length = past.tokens, past.length
        assert tokens is not None and length is not None
        positions = arange_row(tokens.shape[1])
        # matched[p]: how many tokens up to and including position p equal the row's last ones.
        matched = jnp.zeros(tokens.shape, jnp.int32)
        equal = (positions < length[:, None] - 1) & (positions >= 0)
        for offset in range(self.longest):
            last = jnp.take_along_axis(tokens, (length - 1 - offset)[:, None], axis=1, mode="clip")
            shifted = jnp.pad(tokens, ((0, 0), (offset, 0)), constant_values=-1)
            shifted = shifted[:, : tokens.shape[1]]
            equal &= (shifted == last) & (length[:, None] > offset)
            matched += equal.astype(jnp.int32)
        best = jnp.max(matched, axis=1)
        newest = jnp.max(jnp.where(matched == best[:, None], positions, -1), axis=1)
        return best, newest + 1


@dataclass(frozen=True)
class DraftModelProposer:
    """``DraftModel`` with its settings resolved, a static argument of programs. It drafts at most
    ``length`` tokens. The draft model's vocabulary has ``draft_vocab`` tokens, which may be a few
    more or fewer than the target's ``vocab``."""

    length: int
    cost: DraftCost | None
    model: Model
    draft_vocab: int
    vocab: int

    def available(self, past: TokenHistory, limit: PerRow) -> PerRow:
        """A model can always draft ``limit`` tokens."""
        return limit

    def propose(
        self,
        params: PyTree,
        context: Cached,
        progress: Progress,
        past: TokenHistory,
        lengths: PerRow,
        choose: Choose,
    ) -> tuple[DraftTokens, Cached]:
        """Draft ``lengths`` tokens for each row. The draft model's cache then holds all of them but
        the newest."""
        logits, context = self._catch_up(params, context, past, lengths)
        batch, begin = len(lengths), progress.count
        limit = begin + lengths
        progress = replace(progress, done=progress.done | (lengths == 0))
        progress, past = choose(progress, past, logits, limit)
        tokens = jnp.zeros((batch, self.length), jnp.int32).at[:, 0].set(progress.token)

        def unfinished(carry: _Carry) -> Array:
            step, _, progress, *_ = carry
            return (step < self.length) & ~jnp.all(progress.done)

        def draft_one(carry: _Carry) -> _Carry:
            step, context, progress, past, tokens = carry
            active = (~progress.done).astype(jnp.int32)
            logits, context = self._forward(params, context, progress.token[:, None], active)
            progress, past = choose(progress, past, logits, limit)
            tokens = lax.dynamic_update_slice_in_dim(tokens, progress.token[:, None], step, axis=1)
            return step + 1, context, progress, past, tokens

        carry = jnp.int32(1), context, progress, past, tokens
        _, context, progress, _, tokens = lax.while_loop(unfinished, draft_one, carry)
        return (tokens, progress.count - begin), context

    def rewind_rejected(self, context: Cached, lengths: PerRow) -> Cached:
        """Rewind the draft model's cache to at most ``lengths`` tokens a row."""
        return context.rewind(jnp.maximum(context.cache.length - lengths, 0))

    def _catch_up(
        self, params: PyTree, context: Cached, past: TokenHistory, lengths: PerRow
    ) -> tuple[Logits, Cached]:
        """Process the tokens that the draft model's cache lacks, for rows that need a draft;
        the logits after them."""
        tokens, length = past.tokens, past.length
        assert tokens is not None and length is not None

        def missing(context: Cached) -> PerRow:
            return jnp.where(lengths > 0, length - context.cache.length, 0)

        def process(carry: tuple[Logits, Cached]) -> tuple[Logits, Cached]:
            logits, context = carry
            at = context.cache.length[:, None] + arange_row(self.length + 1)
            chunk = jnp.take_along_axis(tokens, at, axis=1, mode="clip")
            counts = jnp.clip(missing(context), 0, self.length + 1)
            new, context = self._forward(params, context, chunk, counts)
            return jnp.where((counts > 0)[:, None], new, logits), context

        zeros = jnp.zeros((tokens.shape[0], self.vocab), jnp.float32)
        carry = zeros, context
        return lax.while_loop(lambda carry: jnp.any(missing(carry[1]) > 0), process, carry)

    def _forward(
        self, params: PyTree, context: Cached, tokens: Tokens, counts: PerRow
    ) -> tuple[Logits, Cached]:
        """A pass of the draft model; its logits, padded or cut to the target's vocabulary."""
        tokens = jnp.minimum(tokens, self.draft_vocab - 1)
        logits, context = context.forward(self.model, params, tokens, counts)
        logits = logits.astype(jnp.float32)[:, : self.vocab]
        lowest = jnp.finfo(jnp.float32).min / 2  # finite, but such a token is never drawn
        padding = (0, 0), (0, self.vocab - logits.shape[1])
        return gather_vocab(jnp.pad(logits, padding, constant_values=lowest), context), context


Proposer = LookupProposer | DraftModelProposer
