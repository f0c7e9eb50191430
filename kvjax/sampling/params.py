"""Sampling parameters: declarations, checks, and conversion to arrays with a value per row.

To add a parameter that takes a number:

1. Here, declare it as a field of ``SamplingParams``. Add its type to ``SamplingKeywords`` or
   ``PenaltyKeywords``, its array to ``SamplingArrays``, and a flag for its step to ``Filters``.
2. In ``kvjax.sampling.filters``, write the step as a function of logits.
3. In ``kvjax.sampling.sampler``, apply the step where it belongs in the order.
4. In ``tests/test_sampling.py``, compare it with a NumPy version.

All users of the parameter read this declaration: ``generate`` and similar functions, chats,
rollouts, ``score``, engines, the server, the commands and their help, and the reference.
"""

import math
import numbers
import textwrap
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypedDict

import jax.numpy as jnp
import numpy as np

from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, as_python, short_repr
from kvjax.sampling.history import LogitsHook

NO_TOKEN = np.int32(2**31 - 1)
"""The padding of arrays of token ids. It is larger than any id."""
_TINY = float(np.finfo(np.float32).tiny)
_MAX_TEMPERATURE = 1e30
"""At this temperature all tokens are equally likely. The inverse of a higher one underflows to 0 in
float32, which would turn forbidden logits (minus infinity) into NaN."""
_MIN_WIDTH = 8
"""The minimum width of the arrays of end tokens and biased tokens."""


@dataclass(frozen=True)
class Param:
    """The declaration of a parameter that takes a number.

    Attributes:
      help: what the parameter does. The first sentence is the help of the command-line option.
      range: the allowed values, in words.
      allowed: whether a value is in this range.
      example: a usual value, for the reference and for tests.
      neutral: the array value with which the parameter has no effect. Its dtype is the array's
        dtype.
      step: the flag of ``Filters`` that enables the parameter's step, or "".
      draws: whether the parameter is ignored when decoding is greedy.
      encode: a function that converts a user's value to the array value.
    """

    help: str
    range: str
    allowed: Callable[[Any], bool]
    example: float
    neutral: np.generic
    step: str
    draws: bool = False
    encode: Callable[[Any], Any] = lambda value: value

    def array_value(self, value: Any) -> np.generic:
        """Return the array value for a checked value, or for None."""
        return self.neutral if value is None else self.neutral.dtype.type(self.encode(value))


def _param(default: Any, **declaration: Any) -> Any:
    return field(default=default, metadata={"param": Param(**declaration)})


def _is_whole(value: Any, least: int = 0) -> bool:
    return least <= value < 2**64 and value == int(value)


def _as_int32(value: Any) -> int:
    return min(int(value), int(NO_TOKEN))


def _as_share(value: Any) -> float:
    # Sums of probabilities can exceed 1 by rounding, so the value 2 keeps every token.
    return max(float(value), _TINY) if value < 1 else 2.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters that determine how the next token is chosen. None disables a parameter.

    Every parameter that takes a number is declared by the ``Param`` in the metadata of its field.

    Attributes:
      logit_bias: a mapping from token ids to numbers that are added to the logits of these tokens.
      logits_hook: a function that changes the logits before all other steps, see
        ``kvjax.sampling.history``.
    """

    temperature: float = _param(
        0.0,
        help="Divides the logits before the draw; 0 always takes the most likely token.",
        range="a finite number, at least 0",
        allowed=lambda x: 0 <= x < math.inf,
        example=0.7,
        neutral=np.float32(0),
        step="",
        # Processors may flush subnormal numbers to 0, so a subnormal temperature is greedy too.
        encode=lambda x: 0 if x < _TINY else min(float(x), _MAX_TEMPERATURE),
    )
    top_k: int | None = _param(
        None,
        help="Draw among the k most likely tokens.",
        range="an integer >= 1",
        allowed=lambda x: _is_whole(x, 1),
        example=20,
        neutral=NO_TOKEN,
        step="top_k",
        draws=True,
        encode=_as_int32,
    )
    top_p: float | None = _param(
        None,
        help="Draw from the smallest set of most likely tokens whose total probability is at least "
        "this.",
        range="above 0 and at most 1",
        allowed=lambda x: 0 < x <= 1,
        example=0.9,
        neutral=np.float32(2),
        step="top_p",
        draws=True,
        encode=_as_share,
    )
    min_p: float | None = _param(
        None,
        help="Draw among tokens at least this many times as likely as the most likely token.",
        range="from 0 to 1",
        allowed=lambda x: 0 <= x <= 1,
        example=0.05,
        neutral=np.float32(0),
        step="min_p",
        draws=True,
    )
    typical_p: float | None = _param(
        None,
        help="Draw from the tokens whose information content is closest to the entropy: the "
        "smallest set with at least this total probability.",
        range="above 0 and at most 1",
        allowed=lambda x: 0 < x <= 1,
        example=0.9,
        neutral=np.float32(2),
        step="typical_p",
        draws=True,
        encode=_as_share,
    )
    xtc_probability: float | None = _param(
        None,
        help="Probability that a draw excludes top choices (XTC): the tokens with a probability "
        "above xtc_threshold, except the least likely of them and end-of-text tokens.",
        range="from 0 to 1",
        allowed=lambda x: 0 <= x <= 1,
        example=0.5,
        neutral=np.float32(0),
        step="xtc",
        draws=True,
    )
    xtc_threshold: float = _param(
        0.1,
        help="The probability above which XTC considers a token a top choice.",
        range="from 0 to 0.5",
        allowed=lambda x: 0 <= x <= 0.5,
        example=0.2,
        neutral=np.float32(0.1),
        step="",
        draws=True,
    )
    repetition_penalty: float | None = _param(
        None,
        help="Above 1, tokens that the row already contains become less likely. This counts the "
        "tokens of the prompt and new tokens, but not those of a given cache.",
        # Outside of this range, finite logits might not stay finite.
        range="from 1e-6 to 1e6",
        allowed=lambda x: 1e-6 <= x <= 1e6,
        example=1.1,
        neutral=np.float32(1),
        step="repetition_penalty",
    )
    frequency_penalty: float | None = _param(
        None,
        help="Subtracted from a token's logit once for every occurrence in the row's new tokens.",
        range="from -2 to 2",
        allowed=lambda x: -2 <= x <= 2,
        example=0.5,
        neutral=np.float32(0),
        step="counts",
    )
    presence_penalty: float | None = _param(
        None,
        help="Subtracted once from the logit of every token that occurs in the row's new tokens.",
        range="from -2 to 2",
        allowed=lambda x: -2 <= x <= 2,
        example=0.5,
        neutral=np.float32(0),
        step="counts",
    )
    no_repeat_ngram_size: int | None = _param(
        None,
        help="No sequence of this many tokens occurs twice in a row's prompt and new tokens; 0 is "
        "no limit.",
        range="an integer >= 0",
        allowed=_is_whole,
        example=3,
        neutral=np.int32(0),
        step="ngrams",
        encode=_as_int32,
    )
    min_new_tokens: int = _param(
        0,
        help="The minimum number of new tokens. No end-of-text token is drawn before, and stop "
        "strings that are complete by then are ignored.",
        range="an integer >= 0",
        allowed=lambda x: 0 <= x < math.inf and x == int(x),
        example=2,
        neutral=np.int32(0),
        step="min_new_tokens",
        encode=_as_int32,
    )
    logit_bias: Mapping[int, float] | None = None
    logits_hook: LogitsHook | None = None

    def prepare(
        self, seeds: Sequence[int], eos_token_ids: Sequence[int] = ()
    ) -> tuple["Filters", "SamplingArrays"]:
        """Check the parameters, and return the arguments of ``sample`` for rows with these seeds.

        Args:
          seeds: the seed of each row.
          eos_token_ids: tokens that end a row.

        Raises:
          ValueError: if a value is out of its range. The message has the value and the range.
        """
        values, bias = self._checked_values(), self._checked_bias()
        seeds = [as_python(seed) for seed in seeds]
        for seed in seeds:
            _check("seed", seed, "an integer from 0 to 2**64 - 1", _is_whole)
        if not eos_token_ids:
            values["min_new_tokens"] = None
        if greedy := values["temperature"] < _TINY:
            values |= {name: None for name, param in PARAMS.items() if param.draws}
        arrays: dict[str, Any] = {
            name: param.array_value(values[name]) for name, param in PARAMS.items()
        }
        steps = {
            param.step: True
            for name, param in PARAMS.items()
            if param.step and arrays[name] != param.neutral
        }
        hook = _check_hook(self.logits_hook)
        filters = Filters(greedy=greedy, bias=bool(bias), hook=hook, **steps)
        width = _MIN_WIDTH if bias else 0
        arrays |= {
            "eos": _padded(list(eos_token_ids), NO_TOKEN, _MIN_WIDTH),
            "biased": _padded(list(bias), NO_TOKEN, width),
            "bias": _padded(list(bias.values()), np.float32(0), width),
        }
        # These are NumPy arrays until jit transfers them.
        rows: dict[str, Any] = {
            name: np.stack([value] * len(seeds)) for name, value in arrays.items()
        }
        words = [(int(seed) & 0xFFFFFFFF, int(seed) >> 32) for seed in seeds]
        rows["seeds"] = np.asarray(words, np.uint32).reshape(-1, 2)
        return filters, SamplingArrays(**rows)

    def _checked_values(self) -> dict[str, Any]:
        values = {name: as_python(getattr(self, name)) for name in PARAMS}
        for name, param in PARAMS.items():
            if values[name] is not None or getattr(SamplingParams, name) is not None:
                _check(name, values[name], param.range, param.allowed)
        return values

    def _checked_bias(self) -> dict[int, float]:
        bias = {token: as_python(value) for token, value in (self.logit_bias or {}).items()}
        for value in bias.values():
            _check("logit_bias", value, "numbers from -1e6 to 1e6", lambda x: -1e6 <= x <= 1e6)
        return bias


PARAMS: dict[str, Param] = {
    each.name: each.metadata["param"] for each in fields(SamplingParams) if each.metadata
}
"""The declarations of all parameters that take a number, by name."""


def describe_params(names: Container[str], indent: int = 2) -> str:
    """Return the lines of a docstring that describe the parameters in ``names``, in the order of
    ``PARAMS``."""
    texts = (f"{name}: {x.help} Must be {x.range}." for name, x in PARAMS.items() if name in names)
    first, rest = " " * indent, " " * (indent + 2)
    return "\n".join(
        textwrap.fill(x, 100, initial_indent=first, subsequent_indent=rest) for x in texts
    )


SamplingParams.__doc__ = f"{SamplingParams.__doc__}{describe_params(PARAMS)}\n"
NEUTRAL: dict[str, np.generic] = {name: param.neutral for name, param in PARAMS.items()} | {
    "biased": NO_TOKEN
}
"""The values of ``SamplingArrays`` with which a row enables no step."""


class SamplingKeywords(TypedDict, total=False):
    """The parameters of the distribution from which tokens are drawn."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    xtc_probability: float | None
    xtc_threshold: float


class PenaltyKeywords(TypedDict, total=False):
    """The parameters that change logits before the draw."""

    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    min_new_tokens: int
    logit_bias: Mapping[int, float] | None


@dataclass(frozen=True)
class Filters:
    """The steps of ``sample`` that are enabled.

    With Python values, it is a hashable, static argument of ``jit`` that chooses which steps are
    compiled. With traced values (``SamplingArrays.filters``), the program chooses the steps at run
    time.

    Attributes:
      counts: the step of the frequency and presence penalties.
      ngrams: the step of ``no_repeat_ngram_size``.
      mesh: whether rows are divided among devices, so that no device may wait for another.
      hook: the user's ``logits_hook``, which is applied before all other steps.
    """

    greedy: bool | Array = True
    top_k: bool | Array = False
    top_p: bool | Array = False
    min_p: bool | Array = False
    typical_p: bool | Array = False
    xtc: bool | Array = False
    repetition_penalty: bool | Array = False
    counts: bool | Array = False
    ngrams: bool | Array = False
    min_new_tokens: bool | Array = False
    bias: bool | Array = False
    mesh: bool = False
    hook: LogitsHook | None = None

    @property
    def needs_seen(self) -> bool:
        """Whether a compiled step needs to know which tokens a row contains."""
        return bool(self.repetition_penalty)

    @property
    def needs_tokens(self) -> bool:
        """Whether a compiled step needs all tokens of a row, in order."""
        return bool(self.counts) or bool(self.ngrams) or self.hook is not None


@pytree_dataclass
class SamplingArrays:
    """The parameters as arrays [batch], with a value per row. They are traced, so new values
    compile nothing. A row that does not use a step has the step's neutral value.

    Attributes:
      seeds: uint32[batch, 2], the low and the high word of each seed.
      eos: int32[batch, n], end tokens, padded with ``NO_TOKEN``.
      biased: int32[batch, m], the tokens with a bias, padded with ``NO_TOKEN``.
      bias: float32[batch, m], the numbers that are added to the logits of ``biased``.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    typical_p: Array
    xtc_probability: Array
    xtc_threshold: Array
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
        """The steps that at least one row enables, as traced truth values."""
        steps: dict[str, Any] = {}
        for name, param in PARAMS.items():
            if param.step:
                enabled = jnp.any(getattr(self, name) != param.neutral)
                known = steps.get(param.step)
                steps[param.step] = enabled if known is None else known | enabled
        return Filters(
            greedy=jnp.all(self.temperature == 0), bias=jnp.any(self.biased < NO_TOKEN), **steps
        )


def prepare_sampling(
    *, seeds: Sequence[int], eos_token_ids: Sequence[int] = (), **params: Any
) -> tuple[Filters, SamplingArrays]:
    """Return ``SamplingParams(**params).prepare(seeds, eos_token_ids)``."""
    return SamplingParams(**params).prepare(seeds, eos_token_ids)


def _check(name: str, value: Any, range: str, allowed: Callable[[Any], bool]) -> None:
    if not (isinstance(value, numbers.Real) and allowed(value)):
        raise ArgumentError(f"{name} must be {range}, got {short_repr(value)}", param=name)


def _check_hook(hook: LogitsHook | None) -> LogitsHook | None:
    """Check that a hook is hashable, so that programs can be compiled for it, and return it."""
    if hook is not None and not (callable(hook) and isinstance(hook, Hashable)):
        message = f"logits_hook must be a hashable function, got {hook!r:.80}"
        raise ArgumentError(message, param="logits_hook")
    return hook


def _padded(values: Sequence[Any], fill: np.generic, width: int) -> np.ndarray:
    """Pad ``values`` to ``width`` or, if there are more, to the next power of two, so that few
    programs are compiled. If ``width`` is 0, they are not padded."""
    width = max(width, 1 << len(values).bit_length()) if width else 0
    return np.array([*values, *[fill] * (width - len(values))], fill.dtype)
