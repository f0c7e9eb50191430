"""A request's drafts: what proposes them, and how many tokens are worth it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.engine.lookups import Lookups
from kvjax.generation.drafts.acceptance import Acceptance, Price
from kvjax.generation.drafts.asked import Draft, PromptLookup

Load = Callable[[Price], Price]
"""What a draft's price is beside the rows that decode now."""
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

    def takes(self, most: int, load: Load, known: bool) -> float:
        """What a token takes with drafts of at most so many, of what it takes without: infinity
        where there are none, and 1 where they are made whatever they take. ``known``: whether the
        text is there to be looked up; else it is thought that something is found."""
        if self._price is None:
            return 1.0
        most = max(min(most, self._most), 0)
        if self._lookups is not None and known:
            most = len(self._lookups.found(most))
        if self._fared.rest > 0 or not most:
            return math.inf
        found: Any = np.array([most])
        return float(self._fared.takes(found, load(self._price))[0])

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
        if self._fared.rest > 0 or not most:
            return 0
        price, found = self._price and load(self._price), np.array([most])
        given: Any = found, price, found > 0
        return int(self._fared.wanted(*given)[0])

    def checked(self, count: int, accepted: int) -> None:
        """Of so many drafted tokens so many were right; the text has them already."""
        sent, right, active = np.array([count]), np.array([accepted]), np.array([True])
        each: Any = sent, right, self._most, self._price, active
        self._fared = self._fared.after(*each)
