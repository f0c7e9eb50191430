"""The values of the argument ``draft``, their checks, and the proposal of their tokens."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int, PyTree

from kvjax.core.array_ops import arange_row
from kvjax.core.typing import Array, PerRow, Tokens
from kvjax.core.validation import ArgumentError, as_int, normalize_bool_field, normalize_int_field
from kvjax.generation.drafts.acceptance import DraftCost
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import Model
from kvjax.generation.programs import Cached, Progress, gather_vocab
from kvjax.memory.sizes import LoadedModel
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice, budget_of
from kvjax.sampling.filters import Logits
from kvjax.sampling.history import TokenHistory

MAX_LENGTH = 31
"""The maximum number of tokens that can be drafted at a time."""


@dataclass(frozen=True)
class PromptLookup:
    """Prompt lookup decoding: draft the tokens that followed an earlier occurrence of the row's
    last tokens.

    Looking tokens up costs almost nothing, and saves passes of the model if a text repeats parts of
    itself or of its prompt.

    Source: Saxena, "Prompt Lookup Decoding", 2023; Yang et al., arXiv:2304.04487.

    Attributes:
      num_draft_tokens: the maximum number of tokens that are drafted at a time. With None, it
        depends on the platform and the number of rows.
      min_ngram: how many of the row's last tokens must occur earlier, at least.
      max_ngram: the maximum number of tokens that are compared. The longest match up to this number
        is used. Matches of more tokens are not preferred.
      adaptive: whether to draft fewer tokens, or none for some time, when few are accepted. If
        False, drafts always have ``num_draft_tokens`` tokens.

    Example:
      ```python
      draft = kvjax.PromptLookup(num_draft_tokens=3, min_ngram=2)
      result = kvjax.generate(lm, "import json; import json;", draft=draft, max_new_tokens=8)
      print(result.stats.speculation)
      ```
    """

    num_draft_tokens: int | None = None
    min_ngram: int = 2
    max_ngram: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check(self)
        normalize_int_field(self, "min_ngram", 1)
        normalize_int_field(self, "max_ngram", self.min_ngram)


@dataclass(frozen=True, eq=False)
class DraftModel:
    """A smaller model that drafts tokens, with the same random numbers as the target model, which
    generates the text.

    Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.

    ``lm`` is the draft model. It must have the target's tokenizer. It may be the first layers of
    the target (``kvjax.models.first_layers``; Elhoushi et al., LayerSkip, arXiv:2404.16710).
    ``num_draft_tokens`` and ``adaptive`` are as for ``PromptLookup``. ``cache`` is the policy of
    the draft model's cache.

    Example:
      ```python
      draft = kvjax.DraftModel(models.first_layers(lm, 2), num_draft_tokens=3)
      result = kvjax.generate(lm, "The json module", draft=draft, max_new_tokens=8)
      ```
    """

    lm: LanguageModel
    num_draft_tokens: int | None = None
    cache: PolicyChoice = "static"
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check(self)


Draft = PromptLookup | DraftModel
DraftChoice = Draft | LanguageModel | str
"""A draft. ``"lookup"`` stands for ``PromptLookup()``, and a model for ``DraftModel(model)``."""


def resolve_draft(lm: LanguageModel, choice: DraftChoice | None) -> Draft | None:
    """Return the draft that a user chose for a target model; None for no draft.

    Raises:
      ValueError: if the choice is not a draft, or does not fit the target's tokenizer or devices.
    """
    if choice is None or isinstance(choice, PromptLookup):
        return choice
    if isinstance(choice, str) and choice == "lookup":
        return PromptLookup()
    if isinstance(choice, LanguageModel):
        choice = DraftModel(choice)
    if not isinstance(choice, DraftModel):
        message = f"draft is {choice!r:.80}; give a model, 'lookup', a DraftModel or a PromptLookup"
        raise ArgumentError(message, param="draft")
    refuse_encoder("a draft", choice.lm)
    if budget_of(choice.cache) is not None:
        raise ValueError(
            "the cache of a draft can't be policy('auto'), which moves layers while it runs"
        )
    _check_tokenizer(lm, choice.lm)
    _check_devices(lm, choice.lm)
    return choice


def relative_size(lm: LoadedModel, draft: LanguageModel) -> float:
    """Return the draft model's number of parameters, divided by the target's."""
    target_size, draft_size = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(x.params)) for x in (lm, draft)
    )
    return float(draft_size / max(target_size, 1))


def check_draft_positions(draft: Draft | None, positions: int) -> None:
    """Raise ``ValueError`` if a draft model has fewer positions than a request needs."""
    if isinstance(draft, DraftModel):
        limit = position_limit(draft.lm.config)
        if limit is not None and positions > limit:
            raise ValueError(
                f"prompt and max_new_tokens need {positions} positions, but the draft model has "
                f"only {limit}"
            )


def _check_devices(lm: LanguageModel, draft: LanguageModel) -> None:
    target_devices, draft_devices = (_devices(x.params) for x in (lm, draft))
    if not target_devices:  # shapes alone
        return
    # A draft model without a mesh is put on the target's mesh.
    if draft.mesh is not None and draft.mesh != lm.mesh:
        raise ValueError(
            f"the draft {draft.source} is on another mesh than the target model; load it without a "
            "mesh"
        )
    if lm.mesh is None and draft_devices != target_devices:
        raise ValueError(f"the draft {draft.source} is on other devices than the target model")


def _devices(params: PyTree) -> set[object]:
    """Return the devices of all parameters that are arrays."""
    leaves = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    return {device for x in leaves for device in x.devices()}


def _check_tokenizer(lm: LanguageModel, draft: LanguageModel) -> None:
    if lm.tokenizer is not None and draft.tokenizer is not None:
        if not _same_vocabulary(lm.tokenizer, draft.tokenizer):
            raise ValueError(
                f"the draft {draft.source} has another tokenizer than {lm.source}; both models "
                "must have the same tokenizer"
            )
        return
    sizes = lm.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft's vocabulary has {sizes[1]} tokens, but the target model's has {sizes[0]}; "
            "without tokenizers to compare, they must be equal"
        )


@functools.lru_cache(maxsize=16)
def _same_vocabulary(target: object, draft: object) -> bool:
    """Return whether two tokenizers have the same vocabulary, as far as it is known. The result is
    cached, because vocabularies are large."""

    def vocabulary(tokenizer: object) -> object:
        get_vocab = getattr(getattr(tokenizer, "backend", tokenizer), "get_vocab", None)
        return tokenizer if get_vocab is None else get_vocab()

    return target is draft or vocabulary(target) == vocabulary(draft)


def _check(draft: Draft) -> None:
    normalize_bool_field(draft, "adaptive")
    count = draft.num_draft_tokens
    if count is not None and as_int("num_draft_tokens", count, 1) > MAX_LENGTH:
        raise ValueError(
            f"num_draft_tokens is {count}, but at most {MAX_LENGTH} tokens can be drafted"
        )


Choose = Callable[[Progress, TokenHistory, Logits, PerRow], tuple[Progress, TokenHistory]]
"""A function ``(progress, past, logits, limit)`` that chooses the next token of each row, with the
target model's random numbers. A row is done after ``limit`` (int32[batch]) new tokens."""
DraftTokens = tuple[Int[Array, "batch length"], PerRow]
"""Draft tokens, and the number of draft tokens of each row."""
_Carry = tuple[Array, Cached, Progress, TokenHistory, Array]


@dataclass(frozen=True)
class LookupProposer:
    """A ``PromptLookup`` with resolved settings. It is a static argument of programs, and drafts at
    most ``length`` tokens."""

    length: int
    cost: DraftCost | None
    shortest: int
    longest: int

    def available(self, past: TokenHistory, limit: PerRow) -> PerRow:
        """Return how many tokens can be drafted for each row, at most ``limit``."""
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
        """Draft ``lengths`` tokens for each row. If there are fewer tokens after the match, they
        are repeated."""
        assert past.tokens is not None and past.length is not None
        _, start = self._longest_match(past)
        period = jnp.maximum(past.length - start, 1)[:, None]
        at = start[:, None] + arange_row(self.length) % period
        return (jnp.take_along_axis(past.tokens, at, axis=1, mode="clip"), lengths), context

    def rewind_rejected(self, context: None, lengths: PerRow) -> None:
        """Do nothing: prompt lookup has no cache."""
        return context

    def _longest_match(self, past: TokenHistory) -> tuple[PerRow, PerRow]:
        """Return how many of a row's last tokens, at most ``longest``, occur earlier in the row,
        and the position after their newest earlier occurrence."""
        tokens, length = past.tokens, past.length
        assert tokens is not None and length is not None
        positions = arange_row(tokens.shape[1])
        # matched[p] is how many tokens up to and including position p equal the row's last tokens.
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
    """A ``DraftModel`` with resolved settings. It is a static argument of programs, and drafts at
    most ``length`` tokens.

    The draft model's vocabulary has ``draft_vocab`` tokens. They may be a few more or fewer than
    the target's ``vocab``.
    """

    length: int
    cost: DraftCost | None
    model: Model
    draft_vocab: int
    vocab: int

    def available(self, past: TokenHistory, limit: PerRow) -> PerRow:
        """Return ``limit``, because a model can always draft."""
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
        """Draft ``lengths`` tokens for each row. Afterwards the draft model's cache contains all
        draft tokens except the newest."""
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
        """Rewind the draft model's cache to at most ``lengths`` tokens per row."""
        return context.rewind(jnp.maximum(context.cache.length - lengths, 0))

    def _catch_up(
        self, params: PyTree, context: Cached, past: TokenHistory, lengths: PerRow
    ) -> tuple[Logits, Cached]:
        """Process the tokens that the draft model's cache lacks, for rows that need a draft.
        Returns the logits after these tokens."""
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
        """Run the draft model. Returns its logits, padded or cut to the target's vocabulary."""
        tokens = jnp.minimum(tokens, self.draft_vocab - 1)
        logits, context = context.forward(self.model, params, tokens, counts)
        logits = logits.astype(jnp.float32)[:, : self.vocab]
        lowest = jnp.finfo(jnp.float32).min / 2  # finite, but never drawn
        padding = (0, 0), (0, self.vocab - logits.shape[1])
        return gather_vocab(jnp.pad(logits, padding, constant_values=lowest), context), context


Proposer = LookupProposer | DraftModelProposer
