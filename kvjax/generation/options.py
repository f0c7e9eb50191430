"""The keywords of ``generate`` and its relatives: their types, and their defaults."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec, TypedDict, TypeVar

from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.validation import normalize_bool_field
from kvjax.generation.drafts.draft_model import DraftChoice
from kvjax.generation.guides.masks import GuideChoice
from kvjax.memory.limits import InferenceLimits
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.policies.presets import PolicyChoice
from kvjax.prefixes.tree import PrefixTree, Tenant
from kvjax.sampling.history import LogitsHook
from kvjax.sampling.params import (
    PenaltyKeywords,
    SamplingKeywords,
    SamplingParams,
    describe_params,
)

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
    """Keywords of ``compile``: all that can select different compiled programs."""

    num_beams: int
    num_beam_groups: int
    rotary_len: int | None


class SearchKeywords(TypedDict, total=False):
    """How many rows of a prompt are computed, and how results are selected among them."""

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
            raise ValueError(f"limits must be InferenceLimits, got {self.limits!r:.80}")
        if not isinstance(self.prefix_cache, PrefixTree | Tenant | None):
            raise ValueError(f"prefix_cache must be a PrefixTree, got {self.prefix_cache!r:.80}")


def explicit_signature(
    keywords: type, options_class: type = GenerationOptions, **defaults: object
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator for functions with ``**settings: Unpack[keywords]``: puts the names and defaults
    of these keywords into the signature, for ``help``. Unknown keywords raise ``TypeError``.

    A line ``{sampling parameters}`` of the docstring becomes the description of those among them.

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
