"""What an engine is asked for, checked before it waits for its turn."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from kvjax.core.validation import as_int, as_python, short_repr
from kvjax.engine.drafts import ENGINE_DRAFT, DraftPlan, DraftPlanner
from kvjax.generation.beams.config import SearchConfig, resolve_search
from kvjax.generation.drafts.draft_model import DraftModel, PromptLookup
from kvjax.generation.guides.masks import Guide, check_guide
from kvjax.generation.inputs import (
    parse_eos_token_ids,
    parse_logit_bias,
    parse_logprobs,
    parse_stop,
    tokenize_prompts,
)
from kvjax.generation.options import GenerationOptions
from kvjax.policies.model_config import positions_needed
from kvjax.prefixes.pool import CacheGroup
from kvjax.prefixes.pool_config import PoolConfig
from kvjax.prefixes.radix import checked_name
from kvjax.sampling.params import Filters, SamplingArrays, prepare_sampling
from kvjax.sampling.scores import MAX_LOGPROBS

MOST_ENDS = 16
"""End-of-text tokens that a request can have."""
MOST_BIASED = 304
"""Tokens whose logits a request can change."""


class RequestParams(TypedDict, total=False):
    """The keywords of ``Engine.submit``."""

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    no_repeat_ngram_size: int | None
    logit_bias: Mapping[int, float] | None
    min_new_tokens: int
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
class Request:
    """A request that can run.

    ``tokens``: of its prompt; ``limit``: new tokens after which it ends; ``eos``: tokens that end
    it; ``stops``: strings before which its text ends; ``sampling``: the numbers of a row;
    ``scores``: how many of the likeliest tokens to report with each new token, None for no
    log-probabilities; ``prompt_scores``: the same with each token of its prompt;
    ``tenant``: whose prefixes it shares; ``priority``: lower goes first; ``deadline``: seconds
    after which it ends as it is, None for never; ``by_text``: whether its filters, or a draft's
    model, go by its text; ``guide``: which tokens may come next, None for all; ``drafting``: what
    proposes them, None for nothing; ``search``: of several beams, None for a text alone, whose
    texts are not to end before they have the ``least`` tokens.
    """

    tokens: list[int]
    limit: int
    eos: frozenset[int]
    stops: tuple[str, ...]
    sampling: SamplingArrays
    scores: int | None
    prompt_scores: int | None
    tenant: Hashable
    priority: int
    deadline: float | None
    by_text: bool
    guide: Guide | None
    drafting: DraftPlan | None
    search: SearchConfig | None
    least: int

    @property
    def need(self) -> int:
        """Tokens that a row of it holds, at most."""
        return positions_needed(len(self.tokens), self.limit)


def asked(
    proposers: DraftPlanner,
    pool_config: PoolConfig,
    rows: int,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    typical_p: float | None = None,
    repetition_penalty: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    no_repeat_ngram_size: int | None = None,
    logit_bias: Mapping[int, float] | None = None,
    min_new_tokens: int = 0,
    seed: int = 0,
    stop: str | Sequence[str] | None = None,
    eos_token_ids: int | Sequence[int] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    guide: Guide | None = None,
    draft: PromptLookup | str | None = ENGINE_DRAFT,
    tenant: Hashable = None,
    priority: int = 0,
    deadline: float | None = None,
    num_beams: int = 1,
    n: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> Request:
    """A request, from what a user gives; see ``Engine.submit``. ``rows``, ``proposers``: of the
    engine.

    Raises:
      ValueError: naming what can't be, and its limit.
    """
    lm = proposers.lm
    (tokens,) = tokenize_prompts(lm, [prompt], [])  # type: ignore[list-item]
    limit = as_int("max_new_tokens", max_new_tokens, 1)
    least = as_int("min_new_tokens", min_new_tokens, 0)
    if least > limit:
        raise ValueError(f"min_new_tokens is {least}, but max_new_tokens only {limit}")
    need = positions_needed(len(tokens), limit)
    if need > pool_config.max_len:
        name = "rotary_len" if pool_config.max_len == pool_config.rotary_len else "max_seq_len"
        raise ValueError(
            f"{len(tokens)} tokens of prompt and max_new_tokens={limit} need {need} positions, but "
            f"the engine's {name} is {pool_config.max_len}"
        )
    eos = parse_eos_token_ids(lm, eos_token_ids)
    if guide is not None:
        check_guide(guide, eos, least)
    bias = parse_logit_bias(lm.config, logit_bias)
    for name, count, most in (
        ("eos_token_ids", len(eos), MOST_ENDS),
        ("logit_bias", len(bias), MOST_BIASED),
    ):
        if count > most:
            raise ValueError(f"{name} has {count} tokens, and an engine's rows take {most}")
    deadline, priority = as_python(deadline), as_python(priority)
    if deadline is not None and not (isinstance(deadline, int | float) and 0 < deadline < math.inf):
        raise ValueError(f"deadline is {short_repr(deadline)}: give seconds, more than 0")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(
            f"priority is {short_repr(priority)}: give a whole number, lower goes first"
        )
    options: Any = GenerationOptions(
        n=n,
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        temperature=temperature,
        stop=stop,
        guide=guide,  # type: ignore[arg-type]
        draft=None if isinstance(draft, str) and draft == ENGINE_DRAFT else draft,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
    )
    filters, sampling = prepare_sampling(
        seeds=[seed],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        no_repeat_ngram_size=no_repeat_ngram_size,
        min_new_tokens=least,
        eos_token_ids=eos,
        logit_bias=bias,
    )
    if (search := search_of(options, filters, len(eos), rows)) is not None:
        # Its rows go on to wherever they are led.
        sampling = prepare_sampling(seeds=[seed])[1]
    for number, kind in enumerate(pool_config.groups):
        pages = most_pages(kind, len(tokens), need, num_beams)
        if pages > (pool := kind.page_group.layout.pool or 0):
            raise ValueError(
                f"prompt and max_new_tokens may need {pages} pages of pool {number}, which has "
                f"{pool}"
            )
    drafting = proposers.asked(draft, guide, num_beams)
    by_model = drafting is not None and isinstance(drafting.draft, DraftModel)
    return Request(
        tokens=tokens,
        limit=limit,
        eos=frozenset(eos),
        stops=parse_stop(lm, stop),
        sampling=sampling,
        scores=parse_logprobs(lm.config, logprobs),
        prompt_scores=parse_logprobs(lm.config, prompt_logprobs, name="prompt_logprobs"),
        tenant=checked_name("tenant", tenant),
        priority=priority,
        deadline=deadline,
        by_text=filters.needs_seen or filters.needs_tokens or by_model,
        guide=guide,
        drafting=drafting,
        search=search,
        least=least,
    )


def search_of(
    options: GenerationOptions, filters: Filters, ends: int, rows: int
) -> SearchConfig | None:
    """The search of a request, None for one of a single text; ``ends``: tokens that end a text;
    ``rows``: of the engine.

    Raises:
      ValueError: naming what does not go together, or is more than there can be.
    """
    beams, search = resolve_search(options)
    if search is None:
        if beams > 1:
            raise ValueError(
                f"n is {beams}, and num_beams is 1: an engine has several texts of a beam search "
                "alone; of samples each is a request, see Engine.best_of"
            )
        return None
    if beams > rows:
        raise ValueError(f"num_beams is {beams}, each a row, and the engine has {rows}")
    if beams + ends > MAX_LOGPROBS:
        raise ValueError(
            f"num_beams is {beams}, and {ends} tokens end a text: an engine's searches see the "
            f"{MAX_LOGPROBS} likeliest tokens, so both may be {MAX_LOGPROBS} together"
        )
    if options.guide is not None and not hasattr(options.guide, "copy"):
        raise ValueError("a guide beside num_beams has copy(): a copy goes along each beam")
    for name, given in (
        ("logit_bias", filters.bias),
        ("repetition_penalty", filters.repetition_penalty),
        ("frequency_penalty", options.frequency_penalty),
        ("presence_penalty", options.presence_penalty),
        ("no_repeat_ngram_size", filters.ngrams),
    ):
        if given:
            raise ValueError(
                f"{name} was given together with num_beams: it changes what any token is worth, "
                f"and an engine's searches see the {MAX_LOGPROBS} likeliest alone"
            )
    return search


def most_pages(kind: CacheGroup, prompt: int, tokens: int, beams: int) -> int:
    """Pages that the beams of a text have at once, at most, on their way to so many tokens: those
    that its prompt fills are the same."""
    shared = 0 if kind.windowed else len(kind.pages_for(prompt)[0])
    return shared + beams * (kind.max_pages(tokens) - shared)
