"""What a model's config says of positions: how many there are, and how keys are turned for them."""

from typing import Any

from kvjax.core.checks import UNLIMITED, whole_or_none
from kvjax.policies.model_config import decoder_config


def beyond_context(config: Any, tokens: int) -> int:
    """By how many tokens a distance between two of them is beyond what the model was trained for:
    the config's ``context``, or ``max_position_embeddings``; 0 where it does not say."""
    context = trained_context(config)
    return max(tokens - context, 0) if context else 0


def trained_context(config: Any) -> int | None:
    """The length that a model was trained for, or None where its config does not say."""
    config = decoder_config(config)
    context = getattr(config, "context", None) or getattr(config, "max_position_embeddings", None)
    return context or position_limit(config)


def position_limit(config: Any) -> int | None:
    """How many positions a model has: its config's ``position_limit``; None, where it does not say,
    for rotary ones, which do not end."""
    return whole_or_none("position_limit", getattr(config, "position_limit", None), 1)


def positions_needed(prompt: int, new: int) -> int:
    """Positions of a model, and places in its cache, for ``prompt`` tokens and ``new`` ones. The
    last new token needs none, because the model never reads it."""
    return prompt + max(new - 1, 0)


def new_tokens_for(positions: int, prompt: int) -> int:
    """The most new tokens after a prompt for which positions suffice: see ``positions_needed``."""
    return positions - prompt + 1 if prompt <= positions else 0


def rotary_terms(
    config: Any, reach: int, chosen: int | None = None
) -> tuple[int | None, int | None]:
    """The length of text that a cache's keys are turned for, None if all lengths are alike; and
    how many tokens a row may have for it, None where the cache itself says how many.

    ``reach``: positions that its distances stay below. By the config's ``same_rotary(length,
    other)``, where it has that. ``chosen``: the length to go by in place of ``reach``.

    Raises:
      ValueError: if ``chosen`` is no length, or frequencies depend on it, none was chosen, and the
        cache has no end.
    """
    chosen = whole_or_none("rotary_len", chosen, 1)
    if same_rotary(config, 1, UNLIMITED):
        return None, None
    if chosen is not None and not same_rotary(config, chosen, reach):
        if chosen < reach:
            return chosen, chosen
        reach = chosen
    if reach >= UNLIMITED:
        raise ValueError(
            "the model's rotary frequencies depend on the length of the text: a cache that grows "
            "needs max_len, the tokens that a row can ever hold, or rotary_len"
        )
    return (1 if same_rotary(config, 1, reach) else reach), None


def same_rotary(config: Any, length: int, other: int) -> bool:
    """Whether texts of up to these two lengths have the same rotary frequencies."""
    told = getattr(config, "same_rotary", None)
    return told is None or told(length, other)
