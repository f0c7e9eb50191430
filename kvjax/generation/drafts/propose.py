"""What drafts propose, inside a program: from the text so far, or by a second model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Int

from kvjax.core.array_ops import arange_row
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.generation.context import Cached
from kvjax.generation.drafts.acceptance import DraftCost
from kvjax.generation.model import Model
from kvjax.generation.programs import Progress, gather_vocab
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory

Choose = Callable[[Progress, TokenHistory, Logits, PerRow], tuple[Progress, TokenHistory]]
"""How the next tokens are chosen, with the model's own draws: ``(progress, past, logits, limit)``;
a row is done after so many new tokens, int32[batch]."""
DraftTokens = tuple[Int[Array, "batch length"], PerRow]
"""Tokens, and how many of each row's are real."""


@dataclass(frozen=True)
class LookupProposer:
    """``PromptLookup``, as it is compiled: ``length`` tokens at most."""

    length: int
    cost: DraftCost | None
    shortest: int
    longest: int

    def available(self, past: TokenHistory, most: PerRow) -> PerRow:
        """How many tokens of each row could be drafted, and at most so many."""
        return jnp.where(self._matched(past)[0] >= self.shortest, most, 0)

    def propose(
        self,
        params: None,
        held: None,
        progress: Progress,
        past: TokenHistory,
        wanted: PerRow,
        choose: Choose,
    ) -> tuple[DraftTokens, None]:
        """So many tokens of each row. Where the text repeats what has not ended, it does so on."""
        assert past.tokens is not None and past.length is not None
        _, after = self._matched(past)
        period = jnp.maximum(past.length - after, 1)[:, None]
        at = after[:, None] + arange_row(self.length) % period
        return (jnp.take_along_axis(past.tokens, at, axis=1, mode="clip"), wanted), held

    def rewind_rejected(self, held: None, known: PerRow) -> None:
        """There is nothing to take back."""
        return held

    def _matched(self, past: TokenHistory) -> tuple[PerRow, PerRow]:
        """How many tokens at a row's end stand earlier in it, as far as they count, and the place
        behind the newest such."""
        tokens, length = past.tokens, past.length
        assert tokens is not None and length is not None
        places = arange_row(tokens.shape[1])
        run = jnp.zeros(tokens.shape, jnp.int32)
        alike = (places < length[:, None] - 1) & (places >= 0)
        for back in range(self.longest):
            newest = jnp.take_along_axis(tokens, (length - 1 - back)[:, None], axis=1, mode="clip")
            before = jnp.pad(tokens, ((0, 0), (back, 0)), constant_values=-1)
            before = before[:, : tokens.shape[1]]
            alike &= (before == newest) & (length[:, None] > back)
            run += alike.astype(jnp.int32)
        best = jnp.max(run, axis=1)
        # Of those that are as long, the newest.
        last = jnp.max(jnp.where(run == best[:, None], places, -1), axis=1)
        return best, last + 1


@dataclass(frozen=True)
class DraftModelProposer:
    """``DraftModel``, as it is compiled: ``length`` tokens at most; ``own``: tokens of its
    vocabulary, which may have a few more or fewer than the ``vocab`` of the model."""

    length: int
    cost: DraftCost | None
    model: Model
    own: int
    vocab: int

    def available(self, past: TokenHistory, most: PerRow) -> PerRow:
        """It can always go on."""
        return most

    def propose(
        self,
        params: Any,
        held: Cached,
        progress: Progress,
        past: TokenHistory,
        wanted: PerRow,
        choose: Choose,
    ) -> tuple[DraftTokens, Cached]:
        """So many tokens of each row, which its cache then holds, but for the newest of them."""
        logits, held = self._caught_up(params, held, past, wanted)
        batch, begin = len(wanted), progress.count
        limit = begin + wanted
        progress = replace(progress, done=progress.done | (wanted == 0))
        progress, past = choose(progress, past, logits, limit)
        tokens = jnp.zeros((batch, self.length), jnp.int32).at[:, 0].set(progress.token)

        def go_on(carry: Any) -> Array:
            step, _, progress, *_ = carry
            return (step < self.length) & ~jnp.all(progress.done)

        def one(carry: Any) -> Any:
            step, held, progress, past, tokens = carry
            real = (~progress.done).astype(jnp.int32)
            logits, held = self._fed(params, held, progress.token[:, None], real)
            progress, past = choose(progress, past, logits, limit)
            tokens = lax.dynamic_update_slice_in_dim(tokens, progress.token[:, None], step, axis=1)
            return step + 1, held, progress, past, tokens

        carry = jnp.int32(1), held, progress, past, tokens
        _, held, progress, _, tokens = lax.while_loop(go_on, one, carry)
        return (tokens, progress.count - begin), held

    def rewind_rejected(self, held: Cached, known: PerRow) -> Cached:
        """Without what it holds beyond the ``known`` tokens of each row."""
        return held.rewind(jnp.maximum(held.cache.length - known, 0))

    def _caught_up(
        self, params: Any, held: Cached, past: TokenHistory, wanted: PerRow
    ) -> tuple[Logits, Cached]:
        """Its logits behind the text, of which it may have missed some."""
        tokens, length = past.tokens, past.length
        assert tokens is not None and length is not None

        def missing(held: Cached) -> PerRow:
            return jnp.where(wanted > 0, length - held.cache.length, 0)

        def one(carry: tuple[Logits, Cached]) -> tuple[Logits, Cached]:
            logits, held = carry
            at = held.cache.length[:, None] + arange_row(self.length + 1)
            part = jnp.take_along_axis(tokens, at, axis=1, mode="clip")
            real = jnp.clip(missing(held), 0, self.length + 1)
            new, held = self._fed(params, held, part, real)
            return jnp.where((real > 0)[:, None], new, logits), held

        empty = jnp.zeros((tokens.shape[0], self.vocab), jnp.float32)
        return lax.while_loop(lambda carry: jnp.any(missing(carry[1]) > 0), one, (empty, held))

    def _fed(
        self, params: Any, held: Cached, tokens: Tokens, real: PerRow
    ) -> tuple[Logits, Cached]:
        """Its logits behind some tokens, for the model's vocabulary."""
        logits, held = held.forward(self.model, params, jnp.minimum(tokens, self.own - 1), real)
        logits = logits.astype(jnp.float32)[:, : self.vocab]
        least = jnp.finfo(jnp.float32).min / 2  # a finite number, which no token is drawn from
        more = (0, 0), (0, self.vocab - logits.shape[1])
        return gather_vocab(jnp.pad(logits, more, constant_values=least), held), held


Proposer = LookupProposer | DraftModelProposer
"""Static, for the compiler."""
