"""A request's drafts: what proposes them, and how many tokens are worth it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.generation.drafts.acceptance import Acceptance, DraftCost, draft_cost
from kvjax.generation.drafts.draft_model import (
    Draft,
    DraftModel,
    PromptLookup,
    relative_size,
    resolve_draft,
)
from kvjax.generation.loaded_model import LanguageModel

Load = Callable[[DraftCost], DraftCost]
"""What a draft's price is beside the rows that decode now."""
MAX_DRAFT_TOKENS = 7
"""Tokens of a draft that a program checks, at most."""


@dataclass(frozen=True)
class DraftPlan:
    """How a request's tokens are to be drafted; ``price``: of a draft, None where that does not
    matter."""

    draft: Draft
    price: DraftCost | None


class DraftState:
    """Of a request, as its text goes on; ``by_model``: whether the engine's draft proposes them."""

    def __init__(self, drafting: DraftPlan, tokens: Sequence[int]) -> None:
        draft = drafting.draft
        self._most, self._price = draft.length or MAX_DRAFT_TOKENS, drafting.price
        self._fared = Acceptance.new(1)
        self._lookups = (
            PromptLookupState(draft, tokens) if isinstance(draft, PromptLookup) else None
        )
        self.by_model = self._lookups is None

    def push(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self._fared = self._fared.without_draft(len(tokens))
        if self._lookups is not None:
            self._lookups.push(tokens)

    def takes(self, most: int, load: Load, known: bool) -> float:
        """What a token takes with drafts of at most so many, of what it takes without: infinity
        where there are none, and 1 where they are made whatever they take. ``known``: whether the
        text is there to be looked up; else it is thought that something is found."""
        if self._price is None:
            return 1.0
        most = max(min(most, self._most), 0)
        if self._lookups is not None and known:
            most = len(self._lookups.found(most))
        if self._fared.cooldown > 0 or not most:
            return math.inf
        found: Any = np.array([most])
        return float(self._fared.relative_time(found, load(self._price))[0])

    def idle(self, most: int, load: Load) -> bool:
        """Whether nothing is drafted for now, of at most so many tokens, whatever they may be: for
        drafts rest, or are not worth it at this load."""
        return not self._worth(min(most, self._most), load)

    def next(self, most: int, load: Load) -> tuple[int, list[int]]:
        """How many tokens are worth checking next, at most so many, and which, where they were
        looked up."""
        most = max(min(most, self._most), 0)
        found = None if self._lookups is None else self._lookups.found(most)
        count = self._worth(most if found is None else len(found), load)
        return count, (found or [])[:count]

    def _worth(self, most: int, load: Load) -> int:
        """How many tokens of as many as could be drafted are worth it."""
        if self._fared.cooldown > 0 or not most:
            return 0
        price, found = self._price and load(self._price), np.array([most])
        given: Any = found, price, found > 0
        return int(self._fared.draft_lengths(*given)[0])

    def checked(self, count: int, accepted: int) -> None:
        """Of so many drafted tokens so many were right; the text has them already."""
        sent, right, active = np.array([count]), np.array([accepted]), np.array([True])
        each: Any = sent, right, self._most, self._price, active
        self._fared = self._fared.updated(*each)


class PromptLookupState:
    """The text of a request, and where its beginnings have ended before: see ``PromptLookup``."""

    def __init__(self, draft: PromptLookup, tokens: Sequence[int]) -> None:
        self._draft, self._text = draft, list(tokens[:1])
        self._ends: dict[tuple[int, ...], int] = {}
        self.push(tokens[1:])

    def push(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        for token in tokens:
            for count in range(self._draft.shortest, self._draft.longest + 1):
                if count <= len(self._text):
                    self._ends[tuple(self._text[-count:])] = len(self._text)
            self._text.append(token)

    def found(self, most: int) -> list[int]:
        """So many tokens that it may go on with; none where nothing was met before."""
        for count in range(self._draft.longest, self._draft.shortest - 1, -1):
            end = self._ends.get(tuple(self._text[-count:])) if count <= len(self._text) else None
            if end is not None:
                followed = self._text[end:]
                return [followed[n % len(followed)] for n in range(most)]
        return []


ENGINE_DRAFT = "engine"
"""What the engine was made with."""


@dataclass(frozen=True)
class DraftPlanner:
    """What requests of an engine can be drafted by.

    ``lm``: the model; ``own``: what the engine was made with, None for nothing; ``platform``; and
    how many rows are checked ``together``.
    """

    lm: LanguageModel
    own: Draft | None
    platform: str
    together: int

    def asked(self, given: Any, guide: Any, beams: int) -> DraftPlan | None:
        """For a request that asks for ``given``; None for nothing.

        Raises:
          ValueError: if it is no draft, or a model that the engine does not have; for a guide that
            can't be copied.
        """
        along = guide is None or hasattr(guide, "copy")
        if isinstance(given, str) and given == ENGINE_DRAFT:
            # Not asked for: where it can't be, the request goes without.
            draft = self.own if along and beams == 1 else None
        else:
            draft = resolve_draft(self.lm, given)
        if draft is None:
            return None
        if isinstance(draft, DraftModel) and draft is not self.own:
            raise ValueError(
                "an engine drafts with the model that it was made with, Engine(lm, draft=...): a "
                "request asks for that, 'engine', or for 'lookup', a PromptLookup or None"
            )
        if not along:
            raise ValueError("a guide beside a draft has copy(), and goes along it with that")
        if not draft.adaptive:
            return DraftPlan(draft, None)
        share = relative_size(self.lm, draft.lm) if isinstance(draft, DraftModel) else 0.0
        return DraftPlan(draft, draft_cost(self.platform, self.together, MAX_DRAFT_TOKENS, share))
