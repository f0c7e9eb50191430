"""A request's drafts: what proposes them, and how many tokens are worth it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.engine.lookups import Lookups
from kvjax.generation.drafts.acceptance import Acceptance, Price
from kvjax.generation.drafts.asked import Draft, PromptLookup

CHECKED = 7
"""Tokens of a draft that a program checks, at most."""


@dataclass(frozen=True)
class Drafting:
    """How a request's tokens are to be drafted; ``price``: of a draft, None where that does not
    matter."""

    draft: Draft
    price: Price | None


class Drafts:
    """Of a request, as its text goes on; ``by_model``: whether the engine's draft proposes them."""

    def __init__(self, drafting: Drafting, tokens: Sequence[int]) -> None:
        draft = drafting.draft
        self._most, self._price = draft.length or CHECKED, drafting.price
        self._fared = Acceptance.new(1)
        self._lookups = Lookups(draft, tokens) if isinstance(draft, PromptLookup) else None
        self.by_model = self._lookups is None

    def push(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self._fared = self._fared.rested(len(tokens))
        if self._lookups is not None:
            self._lookups.push(tokens)

    @property
    def resting(self) -> bool:
        """Whether nothing is drafted for now."""
        return bool(self._fared.rest > 0)

    def next(self, most: int) -> tuple[int, list[int]]:
        """How many tokens are worth checking next, at most so many, and which, where they were
        looked up."""
        most = min(most, self._most)
        if self.resting or most < 1:
            return 0, []
        found = None if self._lookups is None else self._lookups.found(most)
        known: Any = np.array([most if found is None else len(found)])
        count = int(self._fared.wanted(known, self._price, known > 0)[0])
        return count, (found or [])[:count]

    def checked(self, count: int, accepted: int) -> None:
        """Of so many drafted tokens so many were right; the text has them already."""
        sent, right, active = np.array([count]), np.array([accepted]), np.array([True])
        each: Any = sent, right, self._most, self._price, active
        self._fared = self._fared.after(*each)
