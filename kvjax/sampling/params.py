"""Sampling parameters: as a user gives them, and as arrays with one number per row."""

import math
import numbers
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array
from kvjax.core.validation import as_python, short_repr
from kvjax.sampling.history import LogitsHook

NO_TOKEN = np.int32(2**31 - 1)


@dataclass(frozen=True)
class Filters:
    """The steps of ``sample`` that are enabled.

    As Python values, they choose which steps are compiled: a hashable, static argument of ``jit``.
    As traced values (``SamplingArrays.filters``), the program chooses at run time.

    Attributes:
      counts: the frequency and presence penalties.
      ngrams: ``no_repeat_ngram_size``.
      mesh: whether rows are divided among devices, so that no device may wait for another.
      hook: a user's ``logits_hook``, applied before all other steps.
    """

    greedy: bool | Array = True
    top_k: bool | Array = False
    top_p: bool | Array = False
    min_p: bool | Array = False
    typical_p: bool | Array = False
    repetition_penalty: bool | Array = False
    counts: bool | Array = False
    ngrams: bool | Array = False
    min_new_tokens: bool | Array = False
    bias: bool | Array = False
    mesh: bool = False
    hook: LogitsHook | None = None

    @property
    def needs_seen(self) -> bool:
        """Whether they ask which tokens a row has, compiled in."""
        return bool(self.repetition_penalty)

    @property
    def needs_tokens(self) -> bool:
        """Whether they ask for all of a row's tokens, in their order."""
        return bool(self.counts) or bool(self.ngrams) or self.hook is not None


@pytree_dataclass
class SamplingArrays:
    """The numbers of ``sample``, traced, so that a new value compiles nothing: [batch] each, one a
    row. A row that a filter is not for has a number with which it changes nothing.

    ``seeds``: uint32[batch, 2], low and high word. ``eos``: int32[batch, n], padded with a number
    that is no token's. ``biased``, ``bias``: int32 and float32[batch, m], tokens, padded so, and
    what is added to their logits.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    repetition_penalty: Array
    frequency_penalty: Array
    presence_penalty: Array
    no_repeat_ngram_size: Array
    min_new_tokens: Array
    seeds: Array
    eos: Array
    biased: Array
    bias: Array

    @property
    def filters(self) -> Filters:
        """Those that some row needs, as truth values."""
        return Filters(
            greedy=jnp.all(self.temperature == 0),
            top_k=jnp.any(self.top_k < NO_TOKEN),
            top_p=jnp.any(self.top_p < 1),
            min_p=jnp.any(self.min_p > 0),
            typical_p=jnp.any(self.typical_p < 1),
            repetition_penalty=jnp.any(self.repetition_penalty != 1),
            counts=jnp.any((self.frequency_penalty != 0) | (self.presence_penalty != 0)),
            ngrams=jnp.any(self.no_repeat_ngram_size > 0),
            min_new_tokens=jnp.any(self.min_new_tokens > 0),
            bias=jnp.any(self.biased < NO_TOKEN),
        )


_TINY = float(np.finfo(np.float32).tiny)
_HOT = 1e30
"""A temperature at which all tokens are alike; the inverse of a higher one is no float32, and would
let what is forbidden be drawn."""
_RANGES = {
    "temperature": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "top_k": ("an integer >= 1", lambda x: 1 <= x < 2**64 and x == int(x)),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    "typical_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    # Beyond this, finite logits might not stay finite.
    "repetition_penalty": ("from 1e-6 to 1e6", lambda x: 1e-6 <= x <= 1e6),
    "frequency_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "presence_penalty": ("from -2 to 2", lambda x: -2 <= x <= 2),
    "no_repeat_ngram_size": (
        "an integer >= 0",
        lambda x: 0 <= x < 2**64 and x == int(x),
    ),
    "logit_bias": ("numbers from -1e6 to 1e6", lambda x: -1e6 <= x <= 1e6),
    "seed": ("an integer from 0 to 2**64 - 1", lambda x: 0 <= x < 2**64 and x == int(x)),
}


def prepare_sampling(
    *,
    seeds: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    min_new_tokens: int = 0,
    eos_token_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    logits_hook: LogitsHook | None = None,
) -> tuple[Filters, SamplingArrays]:
    """What ``sample`` needs, from the numbers as a user gives them.

    Args:
      seeds: one a row.
      temperature: 0 is greedy: the likeliest token, whatever ``top_k``, ``top_p``, ``min_p``,
        ``typical_p`` say.
      top_k: draw among the k likeliest tokens.
      top_p: draw among the fewest likeliest tokens that hold this share of the probability.
      min_p: draw among tokens at least this share as likely as the likeliest.
      typical_p: draw among the tokens whose surprise is nearest to the one expected, the fewest
        that hold this share of the probability.
      repetition_penalty: above 1 makes tokens that the row has already less likely.
      frequency_penalty: is subtracted from a token's logit for each time that it is among the row's
        new tokens.
      presence_penalty: is subtracted once from the logits of all that are.
      no_repeat_ngram_size: no run of so many tokens twice in a row's prompt and new text; 0 is
        no limit.
      min_new_tokens: none of ``eos_token_ids`` before a row has so many new tokens.
      logit_bias: numbers that are added to the logits of tokens.
      logits_hook: a function that changes the logits first, see ``kvjax.sampling.history``.

    Raises:
      ValueError: naming the value that is out of its range, and the range.
    """
    temperature, top_k, top_p, min_p = map(as_python, (temperature, top_k, top_p, min_p))
    typical_p, repetition_penalty = as_python(typical_p), as_python(repetition_penalty)
    frequency_penalty, presence_penalty = as_python(frequency_penalty), as_python(presence_penalty)
    no_repeat_ngram_size = as_python(no_repeat_ngram_size)
    seeds = [as_python(seed) for seed in seeds]
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"typical_p": typical_p, "repetition_penalty": repetition_penalty}
    given |= {"frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty}
    given["no_repeat_ngram_size"] = no_repeat_ngram_size
    bias = {token: as_python(value) for token, value in (logit_bias or {}).items()}
    every = [*given.items(), *(("seed", seed) for seed in seeds)]
    for name, value in [*every, *(("logit_bias", each) for each in bias.values())]:
        limits, fits = _RANGES[name]
        optional = name not in ("temperature", "seed", "logit_bias")
        fine = value is None and optional
        if not fine and not (isinstance(value, numbers.Real) and fits(value)):
            raise ValueError(f"{name} must be {limits}, got {short_repr(value)}")
    # A temperature that processors may round to nothing is the limit: greedy.
    greedy = temperature < _TINY
    ends = list(eos_token_ids)
    least = min(min_new_tokens, int(NO_TOKEN)) if ends else 0
    if greedy:
        top_k = top_p = min_p = typical_p = None
    filters = Filters(
        greedy=greedy,
        top_k=top_k is not None,
        top_p=top_p is not None and top_p < 1,
        min_p=min_p is not None and min_p > 0,
        typical_p=typical_p is not None and typical_p < 1,
        repetition_penalty=repetition_penalty not in (None, 1),
        counts=bool(frequency_penalty or presence_penalty),
        ngrams=bool(no_repeat_ngram_size),
        min_new_tokens=least > 0,
        bias=bool(bias),
        hook=_hashable(logits_hook),
    )
    words = [(int(seed) & 0xFFFFFFFF, int(seed) >> 32) for seed in seeds]
    fields: dict[str, Any] = {
        "temperature": np.float32(0 if greedy else min(temperature, _HOT)),
        "top_k": np.int32(min(top_k or NO_TOKEN, int(NO_TOKEN))),
        # Sums of probabilities may come to more than 1.
        "top_p": np.float32(max(top_p or 1, _TINY) if filters.top_p else 2),
        "min_p": np.float32(min_p or 0),
        "typical_p": np.float32(max(typical_p or 1, _TINY) if filters.typical_p else 2),
        "repetition_penalty": np.float32(repetition_penalty or 1),
        "frequency_penalty": np.float32(frequency_penalty or 0),
        "presence_penalty": np.float32(presence_penalty or 0),
        "no_repeat_ngram_size": np.int32(min(no_repeat_ngram_size or 0, int(NO_TOKEN))),
        "min_new_tokens": np.int32(least),
        "eos": _padded(ends, 8),
        "biased": _padded(list(bias), 8 if bias else 0),
        "bias": _padded(list(bias.values()), 8 if bias else 0, np.float32(0)),
    }
    # Of the host, until jit takes them.
    rows: Any = {name: np.stack([x] * len(words)) for name, x in fields.items()}
    rows["seeds"] = np.asarray(words, np.uint32).reshape(-1, 2)
    return filters, SamplingArrays(**rows)


def _hashable(hook: LogitsHook | None) -> LogitsHook | None:
    """A hook that a program can be compiled for.

    Raises:
      ValueError: if it is no function, or has no hash.
    """
    if hook is not None and not (callable(hook) and isinstance(hook, Hashable)):
        raise ValueError(f"logits_hook must be a function with a hash, got {hook!r:.80}")
    return hook


def _padded(numbers: Sequence[Any], least: int, fill: Any = NO_TOKEN) -> np.ndarray:
    """As many as a power of two, so that few programs are ever compiled."""
    more = max(least, 1 << len(numbers).bit_length()) if least else 0
    return np.array([*numbers, *[fill] * (more - len(numbers))], fill.dtype)
