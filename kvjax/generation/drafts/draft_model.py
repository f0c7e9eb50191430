"""What a user gives as ``draft``: a draft model or prompt lookup, checked against the target
model."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

from kvjax.core.validation import as_int, normalize_bool_field, normalize_int_field
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice, budget_of

MAX_LENGTH = 31
"""The most tokens that can be drafted at a time."""


@dataclass(frozen=True)
class PromptLookup:
    """Prompt lookup decoding: draft the tokens that followed an earlier occurrence of the row's
    last tokens. It costs nothing, and helps where a text repeats parts of itself or of its prompt.

    Source: Saxena, "Prompt Lookup Decoding", 2023; Yang et al., arXiv:2304.04487.

    ``num_draft_tokens``: the most tokens drafted at a time; None chooses by platform and number of
    rows. ``min_ngram``: tokens that must match; ``max_ngram``: beyond these, a longer match counts
    no more. ``adaptive``: whether to draft fewer tokens, or none for a while, when few are
    accepted. Without it, drafts always have ``num_draft_tokens`` tokens.
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
    """A smaller model that drafts tokens, with the same random numbers as the target model.

    Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.

    ``lm``: the draft model. It needs the target's tokenizer. It may be the first layers of the
    target (``kvjax.models.first_layers``; Elhoushi et al., LayerSkip, arXiv:2404.16710).
    ``num_draft_tokens``, ``adaptive``: as for ``PromptLookup``. ``cache``: the policy of its cache.
    """

    lm: LanguageModel
    num_draft_tokens: int | None = None
    cache: PolicyChoice = "static"
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check(self)


Draft = PromptLookup | DraftModel
DraftChoice = Draft | LanguageModel | str
"""``"lookup"`` means ``PromptLookup()``, and a model ``DraftModel(model)``."""


def resolve_draft(lm: LanguageModel, choice: DraftChoice | None) -> Draft | None:
    """The draft that a user chose for a target model.

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
        raise ValueError(
            f"draft is {choice!r:.80}; give a model, 'lookup', a DraftModel or a PromptLookup"
        )
    refuse_encoder("a draft", choice.lm)
    if budget_of(choice.cache) is not None:
        raise ValueError(
            "the cache of a draft can't be policy('auto'), which moves layers while it runs"
        )
    _check_tokenizer(lm, choice.lm)
    _check_devices(lm, choice.lm)
    return choice


def relative_size(lm: Any, draft: LanguageModel) -> float:
    """The draft model's number of parameters, relative to the target's."""
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
    # A draft model without a mesh is put onto the target's.
    if draft.mesh is not None and draft.mesh != lm.mesh:
        raise ValueError(
            f"the draft {draft.source} is on another mesh than the target model; load it without a "
            "mesh"
        )
    if lm.mesh is None and draft_devices != target_devices:
        raise ValueError(f"the draft {draft.source} is on other devices than the target model")


def _devices(params: PyTree) -> set[Any]:
    """The devices of those parameters that are arrays."""
    leaves = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    return {device for x in leaves for device in x.devices()}


def _check_tokenizer(lm: LanguageModel, draft: LanguageModel) -> None:
    if lm.tokenizer is not None and draft.tokenizer is not None:
        if not _same_vocabulary(lm.tokenizer, draft.tokenizer):
            raise ValueError(
                f"the draft {draft.source} has another tokenizer than {lm.source}; their tokens "
                "must mean the same"
            )
        return
    sizes = lm.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft's vocabulary has {sizes[1]} tokens, but the target model's has {sizes[0]}; "
            "without tokenizers to compare, they must be equal"
        )


@functools.lru_cache(maxsize=16)
def _same_vocabulary(target: Any, draft: Any) -> bool:
    """Whether two tokenizers have the same vocabulary, as far as it is known. Cached, because
    vocabularies are large."""

    def vocabulary(tokenizer: Any) -> Any:
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
