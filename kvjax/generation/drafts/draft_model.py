"""Drafts: what a text may go on with, said by something cheaper than its model."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax

from kvjax.core.validation import as_int, normalize_bool_field, normalize_int_field
from kvjax.generation.encoder import refuse_encoder
from kvjax.generation.loaded_model import LanguageModel
from kvjax.policies.model_config import position_limit
from kvjax.policies.presets import PolicyChoice, budget_of

MAX_LENGTH = 31
"""Tokens that can be drafted at a time."""


@dataclass(frozen=True)
class PromptLookup:
    """What followed, earlier in a row's text, on the tokens that it ends with now: costs nothing,
    and is right where a text repeats itself, or its prompt.

    Source: Saxena, prompt lookup decoding, 2023; Yang et al., arXiv:2304.04487.

    ``length``: tokens that are drafted at a time, at most; None leaves it to the device and the
    number of rows. ``shortest``, ``longest``: tokens at the end of the text that must be met again,
    and beyond which a longer match is worth no more. ``adaptive``: whether fewer are drafted, or
    none for a while, where few were accepted; else it is always ``length``.
    """

    length: int | None = None
    shortest: int = 2
    longest: int = 4
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check(self)
        normalize_int_field(self, "shortest", 1)
        normalize_int_field(self, "longest", self.shortest)


@dataclass(frozen=True, eq=False)
class DraftModel:
    """What a second model would write, from the same text and with the same draws.

    Source: Leviathan et al., arXiv:2211.17192; Chen et al., arXiv:2302.01318.

    ``lm``: the model, of the same tokenizer, perhaps the first layers of the model itself
    (``kvjax.models.first_layers``; Elhoushi et al., arXiv:2404.16710). ``length``,
    ``adaptive``: as of ``PromptLookup``. ``cache``: the policy of its own cache.
    """

    lm: LanguageModel
    length: int | None = None
    cache: PolicyChoice = "static"
    adaptive: bool = True

    def __post_init__(self) -> None:
        _check(self)


Draft = PromptLookup | DraftModel
DraftChoice = Draft | LanguageModel | str
"""``"lookup"`` for ``PromptLookup()``; a model for ``DraftModel`` of it."""


def resolve_draft(lm: LanguageModel, given: DraftChoice | None) -> Draft | None:
    """A draft for a model.

    Raises:
      ValueError: if it is none, or of another tokenizer.
    """
    if given is None or isinstance(given, PromptLookup):
        return given
    if isinstance(given, str) and given == "lookup":
        return PromptLookup()
    if isinstance(given, LanguageModel):
        given = DraftModel(given)
    if not isinstance(given, DraftModel):
        raise ValueError(
            f"draft is {given!r:.80}: give a model, 'lookup', or a DraftModel or PromptLookup"
        )
    refuse_encoder("a draft", given.lm)
    if budget_of(given.cache) is not None:
        raise ValueError(
            "a draft's cache can't be policy('auto'): its layers would move as it runs"
        )
    _check_tokenizer(lm, given.lm)
    _check_devices(lm, given.lm)
    return given


def relative_size(lm: Any, draft: LanguageModel) -> float:
    """Parameters of a draft's model, as a share of those of a model."""
    ours, its = (
        sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(x.params)) for x in (lm, draft)
    )
    return float(its / max(ours, 1))


def check_draft_positions(draft: Draft | None, need: int) -> None:
    """Raise ``ValueError`` where a draft's model has not the positions of a text."""
    if isinstance(draft, DraftModel):
        limit = position_limit(draft.lm.config)
        if limit is not None and need > limit:
            raise ValueError(
                f"prompt and max_new_tokens need {need} positions, but the draft has only {limit}"
            )


def _check_devices(lm: LanguageModel, draft: LanguageModel) -> None:
    ours, its = (_devices(x.params) for x in (lm, draft))
    if not ours:  # shapes alone
        return
    # A draft that is on no mesh goes onto the model's.
    if draft.mesh is not None and draft.mesh != lm.mesh:
        raise ValueError(
            f"the draft {draft.source} is on another mesh than the model: give one that is on none"
        )
    if lm.mesh is None and its != ours:
        raise ValueError(f"the draft {draft.source} is on other devices than the model")


def _devices(params: Any) -> set[Any]:
    """That have parameters, where these are arrays."""
    leaves = (x for x in jax.tree.leaves(params) if isinstance(x, jax.Array))
    return {device for x in leaves for device in x.devices()}


def _check_tokenizer(lm: LanguageModel, draft: LanguageModel) -> None:
    if lm.tokenizer is not None and draft.tokenizer is not None:
        if not _same_words(lm.tokenizer, draft.tokenizer):
            raise ValueError(
                f"the draft {draft.source} has another tokenizer than {lm.source}: its tokens are "
                "not the same words"
            )
        return
    sizes = lm.config.vocab_size, draft.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the draft's vocabulary has {sizes[1]} tokens, and the model's {sizes[0]}: without "
            "tokenizers to compare they must be the same"
        )


@functools.lru_cache(maxsize=16)
def _same_words(ours: Any, its: Any) -> bool:
    """Whether two tokenizers have the same words, as far as these are known. Remembered: they are
    many."""

    def words(tokenizer: Any) -> Any:
        known = getattr(getattr(tokenizer, "backend", tokenizer), "get_vocab", None)
        return tokenizer if known is None else known()

    return ours is its or words(ours) == words(its)


def _check(draft: Any) -> None:
    normalize_bool_field(draft, "adaptive")
    if draft.length is not None and as_int("length", draft.length, 1) > MAX_LENGTH:
        raise ValueError(f"length is {draft.length}, and at most {MAX_LENGTH} tokens are drafted")
