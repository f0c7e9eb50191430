"""A request of an engine: its parameters, and their checks."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvjax.core.validation import ArgumentError, as_int, as_python, short_repr
from kvjax.engine.drafts import ENGINE_DRAFT, DraftPlan, DraftPlanner
from kvjax.generation.beams.step import SearchConfig, resolve_search
from kvjax.generation.drafts.draft_model import DraftModel, PromptLookup
from kvjax.generation.guides.masks import Guide, check_guide
from kvjax.generation.options import (
    GenerationOptions,
    parse_eos_token_ids,
    parse_logit_bias,
    parse_logprobs,
    parse_stop,
    tokenize_prompts,
)
from kvjax.policies.model_config import positions_needed
from kvjax.prefixes.pool import CacheGroup
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.radix import checked_name
from kvjax.sampling.params import (
    Filters,
    PenaltyKeywords,
    SamplingArrays,
    SamplingKeywords,
    SamplingParams,
    prepare_sampling,
)
from kvjax.sampling.scores import MAX_LOGPROBS

MAX_EOS_TOKENS = 16
"""The maximum number of ``eos_token_ids`` of a request."""
MAX_BIASED_TOKENS = 304
"""The maximum number of tokens in a request's ``logit_bias``."""


class RequestParams(SamplingKeywords, PenaltyKeywords, total=False):
    """The keywords of ``Engine.submit``."""

    max_new_tokens: int
    seed: int
    stop: str | Sequence[str] | None
    eos_token_ids: int | Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    guide: Guide | None
    draft: PromptLookup | str | None
    tenant: Hashable
    priority: int
    deadline: float | None
    num_beams: int
    n: int
    length_penalty: float
    early_stopping: bool | Literal["never"]


@dataclass(frozen=True, kw_only=True)
class RequestOptions(SamplingParams):
    """The values of all keywords of ``Engine.submit``, with their defaults."""

    max_new_tokens: int = 64
    seed: int = 0
    stop: str | Sequence[str] | None = None
    eos_token_ids: int | Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guide: Guide | None = None
    draft: PromptLookup | str | None = ENGINE_DRAFT
    tenant: Hashable = None
    priority: int = 0
    deadline: float | None = None
    num_beams: int = 1
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request whose parameters are valid for its engine.

    Args:
      tokens: the prompt.
      max_new_tokens: the request ends after this many new tokens.
      min_new_tokens: end tokens and stop strings count only after this many new tokens.
      eos: tokens that end the request.
      stops: strings that end the request. The text ends before them.
      sampling: sampling parameters, as arrays of one row.
      logprobs: how many of the most likely tokens to report with each new token; None for no
        log-probabilities.
      prompt_logprobs: like ``logprobs``, for each prompt token.
      tenant: an identifier. Requests share prefixes only if they have the same tenant.
      priority: lower numbers are scheduled first.
      deadline: seconds after submission at which the request ends with the tokens that it has; None
        for no deadline.
      needs_history: whether sampling, or a draft model, needs the row's tokens on the device.
      guide: a guide that constrains which tokens may come next; None to allow all tokens.
      draft_plan: how tokens are drafted; None for no drafts.
      search: the beam search; None for a single sequence.
    """

    tokens: list[int]
    max_new_tokens: int
    min_new_tokens: int
    eos: frozenset[int]
    stops: tuple[str, ...]
    sampling: SamplingArrays
    logprobs: int | None
    prompt_logprobs: int | None
    tenant: Hashable
    priority: int
    deadline: float | None
    needs_history: bool
    guide: Guide | None
    draft_plan: DraftPlan | None
    search: SearchConfig | None

    @property
    def max_length(self) -> int:
        """The maximum number of tokens that a row of the request has in the cache."""
        return positions_needed(len(self.tokens), self.max_new_tokens)


def parse_request(
    planner: DraftPlanner,
    pool_config: PoolConfig,
    rows: int,
    prompt: str | Sequence[int],
    options: RequestOptions,
) -> Request:
    """Check arguments of ``Engine.submit``, and return the request. ``rows`` is the engine's number
    of rows.

    Raises:
      ArgumentError: if an argument is wrong. The error names the argument, its value and the limit.
    """
    lm = planner.lm
    (tokens,) = tokenize_prompts(lm, [prompt], [], param="prompt")  # type: ignore[list-item]
    max_new = as_int("max_new_tokens", options.max_new_tokens, 1)
    min_new = as_int("min_new_tokens", options.min_new_tokens, 0)
    if min_new > max_new:
        message = f"min_new_tokens is {min_new}, more than max_new_tokens={max_new}"
        raise ArgumentError(message, param="min_new_tokens")
    max_length = positions_needed(len(tokens), max_new)
    if max_length > pool_config.max_len:
        name = "rotary_len" if pool_config.max_len == pool_config.rotary_len else "max_seq_len"
        message = (
            f"the prompt has {len(tokens)} tokens; with max_new_tokens={max_new} they need "
            f"{max_length} positions, but the engine's {name} is {pool_config.max_len}"
        )
        raise ArgumentError(message, param="max_new_tokens")
    eos = parse_eos_token_ids(lm, options.eos_token_ids)
    guide = options.guide
    if guide is not None:
        check_guide(guide, eos, min_new)
    bias = parse_logit_bias(lm.config, options.logit_bias)
    _check_count("eos_token_ids", len(eos), MAX_EOS_TOKENS)
    _check_count("logit_bias", len(bias), MAX_BIASED_TOKENS)
    deadline, priority = as_python(options.deadline), as_python(options.priority)
    if deadline is not None and not (isinstance(deadline, int | float) and 0 < deadline < math.inf):
        message = f"deadline must be a number of seconds above 0, got {short_repr(deadline)}"
        raise ArgumentError(message, param="deadline")
    if isinstance(priority, bool) or not isinstance(priority, int):
        message = f"priority must be an integer, got {short_repr(priority)}"
        raise ArgumentError(message, param="priority")
    options = replace(options, min_new_tokens=min_new, logit_bias=bias)
    filters, sampling = options.prepare([options.seed], eos)
    search = _parse_search(options, filters, len(eos), rows)
    if search is not None:
        # The host chooses the tokens of beams, so rows of beams need no end tokens and no filters.
        sampling = prepare_sampling(seeds=[options.seed])[1]
    for number, group in enumerate(pool_config.groups):
        pages = _max_pages(group, len(tokens), max_length, options.num_beams)
        if pages > (pool := group.page_group.layout.pool or 0):
            message = (
                f"prompt and max_new_tokens may need {pages} pages of pool {number}, which has "
                f"{pool}"
            )
            raise ArgumentError(message, param="max_new_tokens")
    plan = planner.plan(options.draft, guide, options.num_beams)
    by_model = plan is not None and isinstance(plan.draft, DraftModel)
    return Request(
        tokens=tokens,
        max_new_tokens=max_new,
        min_new_tokens=min_new,
        eos=frozenset(eos),
        stops=parse_stop(lm, options.stop),
        sampling=sampling,
        logprobs=parse_logprobs(lm.config, options.logprobs),
        prompt_logprobs=parse_logprobs(lm.config, options.prompt_logprobs, name="prompt_logprobs"),
        tenant=checked_name("tenant", options.tenant),
        priority=priority,
        deadline=deadline,
        needs_history=filters.needs_seen or filters.needs_tokens or by_model,
        guide=guide,
        draft_plan=plan,
        search=search,
    )


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        message = f"{name} has {count} tokens, but an engine takes at most {limit}"
        raise ArgumentError(message, param=name)


def _parse_search(
    options: RequestOptions, filters: Filters, eos_tokens: int, rows: int
) -> SearchConfig | None:
    """Return the settings of a request's beam search; None for a single sequence.

    Raises:
      ArgumentError: for beams that do not fit the engine, or options that do not work with beams.
    """
    draft = options.draft
    beams, search = resolve_search(
        GenerationOptions(
            n=options.n,
            num_beams=options.num_beams,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
            temperature=options.temperature,
            stop=options.stop,
            draft=None if isinstance(draft, str) and draft == ENGINE_DRAFT else draft,
        )
    )
    if search is None:
        if beams > 1:
            message = (
                f"n is {beams}, but num_beams is 1: submit one request for each sample, or use "
                "Engine.best_of"
            )
            raise ArgumentError(message, param="n")
        return None
    if beams > rows:
        message = f"num_beams is {beams}, but the engine has only {rows} rows"
        raise ArgumentError(message, param="num_beams")
    if beams + eos_tokens > MAX_LOGPROBS:
        message = (
            f"num_beams is {beams} and eos_token_ids has {eos_tokens} tokens: together they may be "
            f"at most {MAX_LOGPROBS}, the number of candidates that a beam search in an engine sees"
        )
        raise ArgumentError(message, param="num_beams")
    if options.guide is not None and not hasattr(options.guide, "copy"):
        message = "num_beams needs a guide with copy(), one copy for each beam"
        raise ArgumentError(message, param="guide")
    for name, value in (
        ("logit_bias", filters.bias),
        ("repetition_penalty", filters.repetition_penalty),
        ("frequency_penalty", options.frequency_penalty),
        ("presence_penalty", options.presence_penalty),
        ("no_repeat_ngram_size", filters.ngrams),
    ):
        if value:
            message = (
                f"{name} does not work with num_beams in an engine: it may promote tokens "
                f"that are not among the {MAX_LOGPROBS} likeliest"
            )
            raise ArgumentError(message, param=name)
    return search


def _max_pages(group: CacheGroup, prompt: int, tokens: int, beams: int) -> int:
    """Return the maximum number of pages that the beams of a request use at the same time, until
    each has ``tokens`` tokens. Beams share the pages that the prompt fills."""
    shared = 0 if group.windowed else len(group.pages_for(prompt)[0])
    return shared + beams * (group.max_pages(tokens) - shared)
