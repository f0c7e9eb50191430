"""The keywords of ``generate``: once with their types, once with what they are by default."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
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

CacheChoice = PolicyChoice | KVCache

_P = ParamSpec("_P")
_T = TypeVar("_T")


class SamplingKeywords(TypedDict, total=False):
    """How tokens are drawn."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None


class DecodingKeywords(SamplingKeywords, total=False):
    """What chooses programs of a text by itself."""

    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[int, float] | None
    min_new_tokens: int
    eos_token_ids: int | Sequence[int] | None
    prefill_chunk: int
    logprobs: int | bool | None
    logits_hook: LogitsHook | None
    draft: DraftChoice | None
    guide: GuideChoice | None


class CompileKeywords(DecodingKeywords, total=False):
    """What chooses programs."""

    num_beams: int
    num_beam_groups: int
    rotary_len: int | None


class SearchKeywords(TypedDict, total=False):
    """How more rows of a prompt are searched than are given back."""

    n: int
    best_of: int | None
    length_penalty: float
    early_stopping: bool | Literal["never"]
    diversity_penalty: float


class GenerateKeywords(CompileKeywords, SearchKeywords, total=False):
    """All of them."""

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
class GenerationOptions:
    """All of them, where those that are not given have their defaults."""

    max_new_tokens: int = 64
    cache: CacheChoice = "static"
    max_len: int | None = None
    rotary_len: int | None = None
    seed: int | Sequence[int] = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    logit_bias: Mapping[int, float] | None = None
    min_new_tokens: int = 0
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
    logits_hook: LogitsHook | None = None
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


def explicit_signature(keywords: type) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Puts the names of ``**settings: Unpack[keywords]``, and their defaults, into the signature
    of a function, for ``help``; one that is not there is a ``TypeError``, as of any function."""
    known = inspect.signature(GenerationOptions).parameters

    def spell_out(call: Callable[_P, _T]) -> Callable[_P, _T]:
        own = inspect.signature(call)
        *named, _ = own.parameters.values()
        unpacked = keywords.__annotations__.keys() - own.parameters.keys()
        given = [each for name, each in known.items() if name in unpacked]
        signature = own.replace(parameters=[*named, *given])

        @functools.wraps(call)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for name in kwargs.keys() - signature.parameters.keys():
                raise TypeError(f"{call.__name__}() got an unexpected keyword argument {name!r}")
            return call(*args, **kwargs)

        vars(called)["__signature__"] = signature
        return called

    return spell_out
