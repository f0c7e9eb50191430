"""The options of a beam search, and of the best of several samples, checked."""

import math
from dataclasses import dataclass
from typing import Any

from kvjax.core.validation import ArgumentError, as_int, as_python, short_repr
from kvjax.generation.options import GenerationOptions

MAX_ROWS = 65536
"""The most rows of a prompt; the host keeps a sequence for each."""
_EARLY_STOPPING: dict[Any, int] = {False: 0, True: 1, "never": 2}


@dataclass(frozen=True)
class BeamConfig:
    """Beams of each prompt, and the groups that they form. A static argument of programs."""

    num_beams: int
    num_groups: int = 1

    @property
    def group_size(self) -> int:
        """Beams of a group."""
        return self.num_beams // self.num_groups


@dataclass(frozen=True)
class SearchConfig:
    """A beam search, or, if ``beams`` is None, the best of several samples.

    ``num_return``: sequences returned for each prompt, fewer than its rows. ``length_penalty``: the
    exponent of the length that scores are divided by. ``early_stopping``: when a group ends; 0:
    once no better sequence is likely; 1: once it has as many finished sequences as beams; 2: once
    no better sequence is possible. ``diversity_penalty``: subtracted for tokens that other groups
    have chosen in the same step.
    """

    num_return: int
    beams: BeamConfig | None = None
    length_penalty: float = 1.0
    early_stopping: int = 0
    diversity_penalty: float = 0.0


def resolve_search(options: GenerationOptions) -> tuple[int, SearchConfig | None]:
    """The rows of each prompt, and the search among them, None for plain samples.

    Raises:
      ValueError: if options are out of range, or exclude each other.
    """
    n = as_int("n", options.n, 1, MAX_ROWS)
    beams = as_int("num_beams", options.num_beams, 1, MAX_ROWS)
    if beams > 1:
        return beams, _beam_search(options, n, beams)
    defaults = GenerationOptions()
    for name in ("num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"):
        value = as_python(getattr(options, name))
        is_default = isinstance(value, bool | int | float | str) and value == getattr(
            defaults, name
        )
        if not is_default:
            message = (
                f"{name} is {short_repr(value)}, but num_beams is 1; it needs a beam search, for "
                "example num_beams=4"
            )
            raise ArgumentError(message, param=name)
    if options.best_of is None:
        return n, None
    samples = as_int("best_of", options.best_of, 1, MAX_ROWS)
    if samples < n:
        message = f"best_of is {samples}, but must be at least n={n}"
        raise ArgumentError(message, param="best_of")
    return samples, SearchConfig(n)


def _beam_search(options: GenerationOptions, n: int, beams: int) -> SearchConfig:
    groups = as_int("num_beam_groups", options.num_beam_groups, 1)
    if n > beams:
        message = f"n is {n}, but num_beams={beams} finds only {beams} sequences"
        raise ArgumentError(message, param="n")
    if options.best_of is not None:
        message = "best_of can't be combined with num_beams; give one of them"
        raise ArgumentError(message, param="best_of")
    if beams % groups:
        message = f"num_beam_groups is {groups}, but must divide num_beams={beams}"
        raise ArgumentError(message, param="num_beam_groups")
    temperature = as_python(options.temperature)
    if temperature != 0:
        message = (
            f"temperature is {short_repr(temperature)}, but a beam search does not sample; omit "
            "temperature or num_beams"
        )
        raise ArgumentError(message, param="temperature")
    if options.draft is not None:
        message = "a draft was given together with num_beams; give one of them"
        raise ArgumentError(message, param="draft")
    if options.stop:
        message = (
            "a beam search can't use stop strings, which are searched for on the host; use "
            "eos_token_ids"
        )
        raise ArgumentError(message, param="stop")
    early = as_python(options.early_stopping)
    if not isinstance(early, bool | str) or early not in _EARLY_STOPPING:
        message = f"early_stopping is {short_repr(early)}, but must be False, True or 'never'"
        raise ArgumentError(message, param="early_stopping")
    penalty = _number("length_penalty", options.length_penalty, 7)
    diversity = _number("diversity_penalty", options.diversity_penalty, 10**6)
    if diversity < 0 or (diversity > 0) != (groups > 1):
        message = (
            f"diversity_penalty is {diversity} with num_beam_groups={groups}; it must be above 0 "
            "for several groups, which would otherwise be equal, and 0 for one"
        )
        raise ArgumentError(message, param="diversity_penalty")
    return SearchConfig(n, BeamConfig(beams, groups), penalty, _EARLY_STOPPING[early], diversity)


def _number(name: str, value: Any, limit: int) -> float:
    # Beyond these limits a score is not finite in float32.
    value = as_python(value)
    numeric = isinstance(value, int | float)
    if isinstance(value, bool) or not numeric or not math.isfinite(value) or abs(value) > limit:
        message = f"{name} must be a number from {-limit} to {limit}, got {short_repr(value)}"
        raise ArgumentError(message, param=name)
    return float(value)
