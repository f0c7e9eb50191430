"""What is asked of a beam search, or of the best of several samples, checked."""

import math
from dataclasses import dataclass
from typing import Any

from kvjax.core.validation import as_int, as_python, short_repr
from kvjax.generation.options import GenerationOptions

MOST_ROWS = 65536
"""Rows of a prompt: each has a text of its own on the host."""
_EARLY: dict[Any, int] = {False: 0, True: 1, "never": 2}


@dataclass(frozen=True)
class BeamConfig:
    """How wide a search is: beams of a prompt, and the groups that they are in; compiled in."""

    num_beams: int
    num_groups: int = 1

    @property
    def group_size(self) -> int:
        """Beams of a group."""
        return self.num_beams // self.num_groups


@dataclass(frozen=True)
class SearchConfig:
    """More rows of a prompt than are given back: ``kept`` of them. ``beams``: of a beam search,
    None for the best of samples; its numbers: exponent of the length, how it ends (0, 1, 2: not
    before no better text is likely, with as many texts as beams, not before no better one can
    come), and the penalty of what other groups have chosen."""

    num_return: int
    beams: BeamConfig | None = None
    length_penalty: float = 1.0
    early_stopping: int = 0
    diversity_penalty: float = 0.0


def resolve_search(options: GenerationOptions) -> tuple[int, SearchConfig | None]:
    """How many rows of each prompt there are, and of a search what it is.

    Raises:
      ValueError: naming what does not go together, or is out of its range.
    """
    n = as_int("n", options.n, 1, MOST_ROWS)
    beams = as_int("num_beams", options.num_beams, 1, MOST_ROWS)
    if beams > 1:
        return beams, _search(options, n, beams)
    defaults = GenerationOptions()
    for name in ("num_beam_groups", "diversity_penalty", "length_penalty", "early_stopping"):
        value = as_python(getattr(options, name))
        usual = isinstance(value, bool | int | float | str) and value == getattr(defaults, name)
        if not usual:
            raise ValueError(
                f"{name} is {short_repr(value)}, and num_beams is 1: it is of a beam "
                "search, num_beams=4 perhaps"
            )
    if options.best_of is None:
        return n, None
    samples = as_int("best_of", options.best_of, 1, MOST_ROWS)
    if samples < n:
        raise ValueError(f"best_of is {samples}, and n is {n}: no more than all can be the best")
    return samples, SearchConfig(n)


def _search(options: GenerationOptions, n: int, beams: int) -> SearchConfig:
    groups = as_int("num_beam_groups", options.num_beam_groups, 1)
    if n > beams:
        raise ValueError(f"n is {n}, and num_beams is {beams}: a search finds as many texts")
    if options.best_of is not None:
        raise ValueError("best_of is of samples, and num_beams of a search: give one of them")
    if beams % groups:
        raise ValueError(f"num_beam_groups is {groups}, and must divide num_beams, {beams}")
    temperature = as_python(options.temperature)
    if temperature != 0:
        raise ValueError(
            f"temperature is {short_repr(temperature)}: a beam search takes the likeliest texts, "
            "and draws nothing; leave it out, or num_beams"
        )
    if options.draft is not None:
        raise ValueError(
            "a draft was given together with num_beams: it goes along one text, and beams go on "
            "from one another"
        )
    if options.stop:
        raise ValueError(
            "stop strings are looked for in texts, on the host, and beams are chosen on the "
            "device: a beam ends at eos_token_ids"
        )
    early = as_python(options.early_stopping)
    if not isinstance(early, bool | str) or early not in _EARLY:
        raise ValueError(
            f"early_stopping is {short_repr(early)}: there are False, True and 'never'"
        )
    penalty = _number("length_penalty", options.length_penalty, 7)
    diversity = _number("diversity_penalty", options.diversity_penalty, 10**6)
    if diversity < 0 or (diversity > 0) != (groups > 1):
        raise ValueError(
            f"diversity_penalty is {diversity} of {groups} num_beam_groups: it must be above 0 "
            "where there are several, which would else be all the same, and 0 where there is one"
        )
    return SearchConfig(n, BeamConfig(beams, groups), penalty, _EARLY[early], diversity)


def _number(name: str, value: Any, most: int) -> float:
    # Beyond this, a long text's length to this power, or a sum, is no float32.
    value = as_python(value)
    fine = isinstance(value, int | float)
    if isinstance(value, bool) or not fine or not math.isfinite(value) or abs(value) > most:
        raise ValueError(f"{name} must be a number from {-most} to {most}, got {short_repr(value)}")
    return float(value)
