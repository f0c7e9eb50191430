"""The keywords of ``generate`` and similar functions: their types, their defaults, and their
checks."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypedDict, TypeVar

import numpy as np
from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.validation import (
    ArgumentError,
    as_int,
    as_list,
    as_python,
    check_unicode,
    normalize_bool_field,
    short_repr,
)
from kvjax.generation.drafts.draft_model import DraftChoice
from kvjax.generation.guides.masks import GuideChoice
from kvjax.generation.loaded_model import LanguageModel
from kvjax.generation.model import ModelConfig
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.tree import PrefixTree, Tenant
from kvjax.sampling.history import LogitsHook
from kvjax.sampling.params import PenaltyKeywords, SamplingKeywords, SamplingParams, describe_params
from kvjax.sampling.scores import MAX_LOGPROBS

CacheChoice = PolicyChoice | KVCache

_P = ParamSpec("_P")
_T = TypeVar("_T")


class DecodingKeywords(SamplingKeywords, PenaltyKeywords, total=False):
    """Keywords of a chat's answers. Each of them can select different compiled programs."""

    eos_token_ids: int | Sequence[int] | None
    prefill_chunk: int
    logprobs: int | bool | None
    draft: DraftChoice | None
    guide: GuideChoice | None
    logits_hook: LogitsHook | None


class CompileKeywords(DecodingKeywords, total=False):
    """Keywords of ``compile``: all keywords of ``generate`` that can select different compiled
    programs."""

    num_beams: int
    num_beam_groups: int
    rotary_len: int | None


class SearchKeywords(TypedDict, total=False):
    """Keywords that say how many rows of a prompt are computed, and how results are selected among
    them."""

    n: int
    best_of: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    diversity_penalty: float


class GenerateKeywords(CompileKeywords, SearchKeywords, total=False):
    """All keywords of ``generate``."""

    max_new_tokens: int
    cache: CacheChoice
    max_len: int | None
    seed: int | Sequence[int]
    stop: str | Sequence[str] | None
    use_cache: bool
    limits: InferenceLimits | None
    mesh: Mesh | None
    padded: bool
    prefix_cache: PrefixTree | Tenant | None


@dataclass(frozen=True, kw_only=True)
class GenerationOptions(SamplingParams):
    """The values of all keywords of ``generate``, with their defaults."""

    max_new_tokens: int = 64
    cache: CacheChoice = "static"
    max_len: int | None = None
    rotary_len: int | None = None
    seed: int | Sequence[int] = 0
    stop: str | Sequence[str] | None = None
    eos_token_ids: int | Sequence[int] | None = None
    use_cache: bool = True
    prefill_chunk: int = PREFILL_CHUNK
    limits: InferenceLimits | None = None
    mesh: Mesh | None = None
    n: int = 1
    best_of: int | None = None
    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_beam_groups: int = 1
    diversity_penalty: float = 0.0
    padded: bool = False
    logprobs: int | bool | None = None
    draft: DraftChoice | None = None
    guide: GuideChoice | None = None
    prefix_cache: PrefixTree | Tenant | None = None

    def __post_init__(self) -> None:
        normalize_bool_field(self, "padded")
        normalize_bool_field(self, "use_cache")
        if not isinstance(self.limits, InferenceLimits | None):
            raise ArgumentError(
                f"limits must be InferenceLimits, got {self.limits!r:.80}", param="limits"
            )
        if not isinstance(self.prefix_cache, PrefixTree | Tenant | None):
            raise ArgumentError(
                f"prefix_cache must be a PrefixTree, got {self.prefix_cache!r:.80}",
                param="prefix_cache",
            )


def explicit_signature(
    keywords: type, options_class: type = GenerationOptions, **defaults: object
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function with ``**settings: Unpack[keywords]``, so that its signature has the
    names and defaults of these keywords, for ``help``. Unknown keywords raise ``TypeError``.

    A line ``{sampling parameters}`` in the docstring is replaced by the description of those
    keywords that are sampling parameters.

    Args:
      options_class: a dataclass with the keywords and their defaults.
      defaults: the function's own defaults.
    """
    options = dict(inspect.signature(options_class).parameters)
    options |= {name: options[name].replace(default=value) for name, value in defaults.items()}

    def decorate(call: Callable[_P, _T]) -> Callable[_P, _T]:
        own = inspect.signature(call)
        *named, _ = own.parameters.values()
        names = keywords.__annotations__.keys() - own.parameters.keys()
        added = [parameter for name, parameter in options.items() if name in names]
        signature = own.replace(parameters=[*named, *added])

        @functools.wraps(call)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs.keys() - signature.parameters.keys():
                raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}")
            return call(*args, **kwargs)

        vars(wrapped)["__signature__"] = signature
        wrapped.__doc__ = re.sub(
            r"^( +)\{sampling parameters\}$",
            lambda line: describe_params(names, len(line[1])),
            call.__doc__ or "",
            flags=re.MULTILINE,
        )
        return wrapped

    return decorate


Prompts = str | Sequence[str] | Sequence[Sequence[int]]

_PROMPTS = "prompts are a string, a list of strings, or a list of lists of token ids"


def tokenize_prompts(
    lm: LanguageModel,
    prompts: Prompts,
    cache_lengths: Sequence[int],
    *,
    what: str = "prompt",
    param: str = "prompts",
) -> list[list[int]]:
    """Tokenize prompts, and check their token ids.

    Args:
      lm: the model.
      prompts: texts or token ids.
      cache_lengths: the number of tokens in each row of a given cache. A text that continues a row
        with tokens gets no BOS token.
      what: the name of an entry of ``prompts`` in error messages.
      param: the name of the argument with the prompts, for errors.
    """
    try:
        entries = [prompts] if isinstance(prompts, str) else list(prompts)
    except TypeError:
        raise ArgumentError(f"{_PROMPTS}, got {short_repr(prompts)}", param=param) from None
    if not entries:
        raise ArgumentError("no prompts: the list is empty", param=param)
    rows = []
    for number, entry in enumerate(entries):
        if isinstance(entry, str):
            if lm.tokenizer is None:
                message = "the model has no tokenizer: give prompts as lists of token ids"
                raise ArgumentError(message, param=param)
            continues = number < len(cache_lengths) and cache_lengths[number] > 0
            ids = lm.tokenizer.encode(entry, add_special_tokens=not continues)
        else:
            ids = _as_token_ids(entry, f"{what} {number}", param)
        if not ids:
            message = f"{what} {number} is empty: give at least one token"
            raise ArgumentError(message, param=param)
        check_token_ids(lm.config, ids, f"{what} {number}", param)
        rows.append(ids)
    return rows


def _as_token_ids(entry: object, name: str, param: str) -> list[int]:
    try:
        ids = np.asarray(entry)
    except (TypeError, ValueError):  # lists of uneven lengths, and objects without an array form
        ids = np.asarray(None)
    if ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        message = (
            f"{name} must be a string or a list of token ids, got {short_repr(entry)}: {_PROMPTS}"
        )
        raise ArgumentError(message, param=param)
    return ids.tolist()


def check_token_ids(config: ModelConfig, ids: Sequence[int], name: str, param: str) -> None:
    """Raise ``ArgumentError`` for a token id outside the vocabulary. ``name`` is the name of
    ``ids`` in the message, and ``param`` the name of the argument with the ids."""
    for i in ids:
        if not 0 <= i < config.vocab_size:
            message = (
                f"{name}: token id {i} is out of range: the vocabulary has {config.vocab_size} "
                f"tokens, 0 to {config.vocab_size - 1}"
            )
            raise ArgumentError(message, param=param)


def parse_logit_bias(
    config: ModelConfig, logit_bias: Mapping[int, float] | None
) -> dict[int, float]:
    """Check ``logit_bias``. Returns the numbers that are added to logits, by token id."""
    if not isinstance(logit_bias, Mapping | None):
        message = f"logit_bias must map token ids to numbers, got {short_repr(logit_bias)}"
        raise ArgumentError(message, param="logit_bias")
    biases = {
        as_int("a token of logit_bias", token, 0): bias
        for token, bias in (logit_bias or {}).items()
    }
    check_token_ids(config, list(biases), "logit_bias", "logit_bias")
    return biases


def parse_logprobs(
    config: ModelConfig, logprobs: int | bool | None, *, name: str = "logprobs"
) -> int | None:
    """Check ``logprobs``. Returns how many of the most likely tokens to report with each new token;
    None for no log-probabilities."""
    logprobs = as_python(logprobs)
    if logprobs is None or logprobs is False:
        return None
    count = as_int(name, 0 if logprobs is True else logprobs, 0)
    if count > MAX_LOGPROBS:
        message = f"{name} must be at most {MAX_LOGPROBS}, got {count}"
        raise ArgumentError(message, param=name)
    return min(count, config.vocab_size)


def parse_seeds(seed: int | Sequence[int], rows: int) -> list[int]:
    """Return the seed of each row."""
    seed = as_python(seed)
    if isinstance(seed, int):
        return [seed + row for row in range(rows)]
    seeds = as_list("seed", seed, "an integer, or one per row")
    if len(seeds) != rows:
        message = f"{len(seeds)} seeds for {rows} rows: give one number, or one per row"
        raise ArgumentError(message, param="seed")
    return [as_python(each) for each in seeds]


def parse_eos_token_ids(
    lm: LanguageModel, eos_token_ids: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Return the tokens that end a row: the given ones, or else the checkpoint's."""
    if eos_token_ids is None:
        return tuple(lm.generation.eos_token_ids)
    given = as_python(eos_token_ids)
    expected = "a token id, or a list of them"
    entries = (given,) if isinstance(given, int) else as_list("eos_token_ids", given, expected)
    tokens = tuple(as_int("a token of eos_token_ids", token, 0) for token in entries)
    check_token_ids(lm.config, tokens, "eos_token_ids", "eos_token_ids")
    return tokens


def parse_stop(lm: LanguageModel, stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Check ``stop``. Returns the strings that end a text."""
    given = () if stop is None else stop
    stops = (
        (given,)
        if isinstance(given, str)
        else tuple(as_list("stop", given, "a string or a list of strings"))
    )
    for text in stops:
        if not isinstance(text, str) or not text:
            message = f"a stop string must have at least one character, got {short_repr(text)}"
            raise ArgumentError(message, param="stop")
        check_unicode("a stop string", text, "stop")
    if stops and lm.tokenizer is None:
        message = "the model has no tokenizer, so stop strings can't be found: leave out stop="
        raise ArgumentError(message, param="stop")
    return stops
