"""Drafts of an engine's rows: proposed, where a model does that, and checked."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvjax.core.device import fetch
from kvjax.engine.calls import Report
from kvjax.engine.checking import Drafted, check
from kvjax.engine.drafts import CHECKED, Load
from kvjax.engine.rows import Rows
from kvjax.engine.second import SecondRows
from kvjax.engine.slots import Slot
from kvjax.generation.drafts.acceptance import Price, beside_others

Draft = tuple[Slot, int, list[int]]
"""A row of whose draft so many tokens are to be checked, and which, where these are known."""


class Checks:
    """``most``: tokens of a draft; ``together``: rows that a program checks. On a CPU it is one,
    for each row takes its time; else all, for a pass takes as long as its weights are read.
    ``draft_bytes``: as of ``EngineStats``."""

    def __init__(self, rows: Rows, second: SecondRows | None) -> None:
        self._rows, self._second = rows, second
        self.draft_bytes = 0 if second is None else second.allocate()
        spans = rows.revocable, None if second is None else second.revocable
        self.most = min([CHECKED, *(span for span in spans if span is not None)])
        self.together = 1 if rows.platform == "cpu" else rows.count

    def load(self, slots: Sequence[Slot]) -> Load:
        """What drafts cost where these rows decode. Those that draft leave the pass of the others,
        which takes no less for it unless all do: so all draft, or none."""
        rows = sum(len(slot.taking) for slot in slots)
        if not rows:
            return lambda price: price
        size = next((n for n in self._rows.sizes if n >= rows), self._rows.count)

        def beside(price: Price) -> Price:
            alone = self.together == 1
            return beside_others(price, self._rows.platform, rows, size) if alone else price

        each = [slot.takes(self.most, beside) for slot in slots]
        check = 0.0 if sum(each) < len(each) else math.inf
        return lambda price: replace(beside(price), check=check)

    def send(self, drafts: Sequence[Draft]) -> tuple[Report, list[int]]:
        """Send drafts of rows, at most ``together``, whose pages are the rows' already; and where
        each of them stands in the report."""
        drafted, places = self._drafted(drafts)
        each = list(zip(places, drafts, strict=True))
        if self._second is not None:
            # Though none may want it: else the check would be given arrays of another kind.
            by_model = [(at, slot, n) for at, (slot, n, known) in each if not known]
            drafted = self._second.propose(drafted, by_model, self._rows.past)
        tokens: Any = drafted.tokens
        if any(slot.handle.request.guide is not None for slot, _, _ in drafts):
            tokens = fetch(tokens)
        for at, (slot, count, _) in each:
            if slot.handle.request.guide is not None:
                slot.handle.allow_along(tokens[at, 1 : 1 + count].tolist(), drafted.allowed[at])  # type: ignore[arg-type]
        return self._send(drafted), places

    def compile(self) -> int:
        """Run every program once, without tokens; how many there are of models."""
        if not self.most:
            return 0
        drafted, programs = self._drafted([])[0], 1
        if self._second is not None:
            programs += 1 + self._second.compile()
            drafted = self._second.propose(drafted, [], self._rows.past)
        self._send(drafted)
        return programs

    def _drafted(self, drafts: Sequence[Draft]) -> tuple[Drafted, list[int]]:
        """What is known of drafts on the host, and where each of them stands in it."""
        rows, size, wide = self._rows, self.together, 1 + self.most
        which, places = rows.some([slot.row for slot, _, _ in drafts], size)
        tokens: Any = np.zeros((size, wide), np.int32)
        count, starts = np.zeros((2, size), np.int32)
        for at, (slot, more, known) in zip(places, drafts, strict=True):
            tokens[at, : 1 + len(known)] = slot.handle.drawn[-1], *known
            count[at], starts[at] = more, slot.filled
        allowed = rows.every(size * wide).reshape(size, wide, -1)
        tables, asked = rows.tables(which), rows.board.some(which)
        found: Any = which, tokens, count, starts, tables, allowed, asked
        return Drafted(*found), places

    def _send(self, drafted: Drafted) -> Report:
        rows = self._rows
        report: Report = rows.run(check, rows.lm.architecture, rows.params, drafted)
        return report
