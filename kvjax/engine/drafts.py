"""Choice of a request's draft, and of how many tokens it drafts next."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core.validation import ArgumentError
from kvjax.generation.drafts.acceptance import Acceptance, DraftCost, draft_cost
from kvjax.generation.drafts.draft_model import (
    Draft,
    DraftChoice,
    DraftModel,
    PromptLookup,
    relative_size,
    resolve_draft,
)
from kvjax.generation.guides.masks import Guide
from kvjax.generation.loaded_model import LanguageModel

ENGINE_DRAFT = "engine"
"""The value of a request's ``draft`` that means the draft with which the engine was created."""
MAX_DRAFT_TOKENS = 7
"""The maximum number of drafted tokens that one pass verifies."""

AdjustCost = Callable[[DraftCost], DraftCost]
"""A function that takes the cost of drafting for a row that decodes alone, and returns the cost if
other rows decode at the same time."""


@dataclass(frozen=True)
class DraftPlan:
    """A request's draft and its ``cost``. If the cost is None, as many tokens as possible are
    drafted."""

    draft: Draft
    cost: DraftCost | None


@dataclass(frozen=True)
class DraftPlanner:
    """Chooses the draft of each request of an engine.

    ``engine_draft`` is the draft with which the engine was created. ``batch_size`` is the number of
    rows that one pass verifies.
    """

    lm: LanguageModel
    engine_draft: Draft | None
    platform: str
    batch_size: int

    def plan(self, draft: DraftChoice | None, guide: Guide | None, beams: int) -> DraftPlan | None:
        """Choose the draft of a request with this ``draft`` argument; None for no draft.

        Raises:
          ValueError: if ``draft`` is neither a draft nor ``"engine"``, is a model that is not the
            engine's draft model, or if the guide has no ``copy()``.
        """
        copyable = guide is None or hasattr(guide, "copy")
        if isinstance(draft, str) and draft == ENGINE_DRAFT:
            # This is the default. Requests for which tokens can't be drafted use no draft.
            chosen = self.engine_draft if copyable and beams == 1 else None
        else:
            chosen = resolve_draft(self.lm, draft)
        if chosen is None:
            return None
        if isinstance(chosen, DraftModel) and chosen is not self.engine_draft:
            raise ArgumentError(
                "draft is a model that the engine was not created with: give it to Engine(lm, "
                "draft=...), or use draft='engine', 'lookup', a PromptLookup or None",
                param="draft",
            )
        if not copyable:
            raise ArgumentError(
                "draft needs a guide with copy(), to compute masks along the draft", param="draft"
            )
        if not chosen.adaptive:
            return DraftPlan(chosen, None)
        size = relative_size(self.lm, chosen.lm) if isinstance(chosen, DraftModel) else 0.0
        cost = draft_cost(self.platform, self.batch_size, MAX_DRAFT_TOKENS, size)
        return DraftPlan(chosen, cost)


class DraftState:
    """A request's drafts while it runs: the recent acceptance, and the lookup table of its tokens.

    ``by_model`` says whether the engine's draft model proposes the tokens. Otherwise they are
    looked up.
    """

    def __init__(self, plan: DraftPlan, tokens: Sequence[int]) -> None:
        draft = plan.draft
        self._max_tokens, self._cost = draft.num_draft_tokens or MAX_DRAFT_TOKENS, plan.cost
        self._acceptance = Acceptance.new(1)
        self._lookup = LookupTable(draft, tokens) if isinstance(draft, PromptLookup) else None
        self.by_model = self._lookup is None

    def push(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the request."""
        self._acceptance = self._acceptance.without_draft(len(tokens))
        if self._lookup is not None:
            self._lookup.push(tokens)

    def relative_cost(self, limit: int, adjust: AdjustCost, known: bool) -> float:
        """Return the cost of a token with drafts of at most ``limit`` tokens, divided by the cost
        without drafts. It is infinity if nothing can be drafted, and 1 if draft lengths are not
        adaptive.

        ``known`` says whether all tokens of the request are known, so that the lookup can run.
        Otherwise it is assumed to find a match.
        """
        if self._cost is None:
            return 1.0
        limit = max(min(limit, self._max_tokens), 0)
        if self._lookup is not None and known:
            limit = len(self._lookup.propose(limit))
        if self._acceptance.cooldown > 0 or not limit:
            return math.inf
        return float(self._acceptance.relative_time(_array(limit), adjust(self._cost))[0])

    def idle(self, limit: int, adjust: AdjustCost) -> bool:
        """Return whether no draft of up to ``limit`` tokens is worth its cost now."""
        return not self._worthwhile(min(limit, self._max_tokens), adjust)

    def next(self, limit: int, adjust: AdjustCost) -> tuple[int, list[int]]:
        """Return how many tokens to verify next, at most ``limit``, and the tokens themselves if
        they are looked up."""
        limit = max(min(limit, self._max_tokens), 0)
        tokens = None if self._lookup is None else self._lookup.propose(limit)
        count = self._worthwhile(limit if tokens is None else len(tokens), adjust)
        return count, (tokens or [])[:count]

    def record(self, count: int, accepted: int) -> None:
        """Record that ``accepted`` of ``count`` drafted tokens were accepted. Call this after
        ``push``."""
        drafted, right, active = _array(count), _array(accepted), _array(True)
        self._acceptance = self._acceptance.updated(
            drafted, right, self._max_tokens, self._cost, active
        )

    def _worthwhile(self, available: int, adjust: AdjustCost) -> int:
        """Return how many of the ``available`` tokens are worth drafting."""
        if self._acceptance.cooldown > 0 or not available:
            return 0
        cost, count = self._cost and adjust(self._cost), _array(available)
        return int(self._acceptance.draft_lengths(count, cost, count > 0)[0])


class LookupTable:
    """Proposes the tokens that followed an earlier occurrence of the request's newest n-gram; see
    ``PromptLookup``."""

    def __init__(self, draft: PromptLookup, tokens: Sequence[int]) -> None:
        self._draft, self._text = draft, list(tokens[:1])
        self._ends: dict[tuple[int, ...], int] = {}
        self.push(tokens[1:])

    def push(self, tokens: Sequence[int]) -> None:
        """Append new tokens of the request."""
        for token in tokens:
            for count in range(self._draft.min_ngram, self._draft.max_ngram + 1):
                if count <= len(self._text):
                    self._ends[tuple(self._text[-count:])] = len(self._text)
            self._text.append(token)

    def propose(self, limit: int) -> list[int]:
        """Propose ``limit`` tokens, or none if no n-gram at the end of the text occurred before."""
        for count in range(self._draft.max_ngram, self._draft.min_ngram - 1, -1):
            end = self._ends.get(tuple(self._text[-count:])) if count <= len(self._text) else None
            if end is not None:
                followed = self._text[end:]
                return [followed[n % len(followed)] for n in range(limit)]
        return []


def _array(value: int) -> Any:
    """Return an array for a batch of one."""
    return np.array([value])
