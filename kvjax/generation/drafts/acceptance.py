"""How many tokens are drafted: by what was accepted of those before. On the device, or on the
host."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvjax.core.array_ops import xp
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask

_HOPE, _AT_FIRST, _AGAIN = 0.85, 2.0, 1.0
"""The share that is thought to be accepted where nothing is known, and how many tokens that counts
for: at first, and after a rest."""
_KEPT = 0.9
"""What the rounds before count in the next."""
_REST, _LONGEST_REST = 16, 512
"""Tokens that are decoded one by one before drafts are tried again: doubled each time."""
DEFAULT_LENGTH = 7
"""Tokens that are drafted at a time, at most, where no number is given."""
_TOKEN = {"cpu": 0.07, "gpu": 0.004, "tpu": 0.005}
"""What a token more adds to a pass over one, by platform: on a CPU as measured, on others what
its products take of the time in which weights are read. See docs/notes/speculation.md."""


@dataclass(frozen=True)
class DraftCost:
    """In passes over one token a row: ``check``: what a pass over a draft takes more; ``token``:
    what a drafted token takes."""

    verify: float
    token: float


def draft_cost(platform: str, rows: int, length: int, token: float) -> DraftCost:
    """Of drafts of so many tokens, for so many rows; ``token``: the draft's size, as a share of the
    model's."""
    each = _TOKEN.get(platform, _TOKEN["gpu"])
    return DraftCost((1 + each * rows * (length + 1)) / (1 + each * rows) - 1, token)


def cost_alone(cost: DraftCost, platform: str, rows: int, size: int) -> DraftCost:
    """Of a draft of one row, checked alone, where else it would take part in a pass of so many
    rows, in a program for ``size`` rows."""
    each = _TOKEN.get(platform, _TOKEN["gpu"])
    share = (1 + each * size) / (1 + each) / rows
    return DraftCost((1 + cost.verify) / share - 1, cost.token / share)


def default_length(platform: str, rows: int) -> int:
    """Tokens that are drafted at a time: fewer where a pass over them takes much longer."""
    return 3 if platform == "cpu" and rows > 2 else DEFAULT_LENGTH


@pytree_dataclass
class Acceptance:
    """``right`` of ``judged``: float32[batch], drafted tokens that were accepted, and those that
    were looked at, the older the less they count. ``rest``: int32, passes before any row's next
    draft; ``wait``: int32, those of the next rest. In all: ``proposed`` and ``accepted``,
    int32[batch], and ``passes`` of the model, int32."""

    recent_accepted: Array
    recent_checked: Array
    cooldown: Array
    next_cooldown: Array
    proposed: PerRow
    accepted: PerRow
    passes: Array

    @classmethod
    def new(cls, batch: int) -> "Acceptance":
        """Of rows that begin, as NumPy's arrays."""
        zeros: Any = np.zeros(batch, np.int32)
        known: Any = np.full(batch, _AT_FIRST, np.float32)
        zero: Any = np.int32(0)
        cooldown: Any = np.int32(_REST)
        recent_accepted: Any = known * np.float32(_HOPE)
        return cls(recent_accepted, known, zero, cooldown, zeros, zeros, zero)

    def draft_lengths(self, found: PerRow, cost: DraftCost | None, active: RowMask) -> PerRow:
        """How many tokens of each row are to be drafted, of as many as could be ``found``: none
        where it would take longer than without. Without a price, all."""
        lib = xp(self.recent_accepted, found)
        found = lib.where(active, found, 0)
        if cost is None:
            return found
        count, gain = self._best_lengths(found, cost)
        overhead = cost.verify * lib.sum(active, dtype=np.float32)
        return lib.where((self.cooldown <= 0) & (lib.sum(gain) > overhead), count, 0)

    def updated(
        self, count: PerRow, accepted: PerRow, length: int, cost: DraftCost | None, active: RowMask
    ) -> "Acceptance":
        """Behind a round in which so many tokens were drafted, and accepted, of ``length`` at most.
        Where drafts are worth nothing, they rest."""
        lib = xp(self.recent_accepted, count)
        kept = lib.where(count > 0, np.float32(_KEPT), np.float32(1))
        wrong = accepted < count
        # Behind the first that was wrong none is looked at.
        new = replace(
            self,
            recent_accepted=kept * self.recent_accepted + accepted.astype(np.float32),
            recent_checked=kept * self.recent_checked
            + (accepted + wrong.astype(np.int32)).astype(np.float32),
            proposed=self.proposed + count,
            accepted=self.accepted + accepted,
            passes=self.passes + 1,
        )
        if cost is None:
            return new
        gain = new._best_lengths(lib.where(active, length, 0), cost)[1]
        poor = lib.sum(gain) <= cost.verify * lib.sum(active, dtype=np.float32)
        next_cooldown = lib.where(
            lib.any((count > 0) & (accepted == count)), _REST, self.next_cooldown
        )
        return replace(
            new,
            recent_accepted=lib.where(poor, _HOPE * _AGAIN, new.recent_accepted),
            recent_checked=lib.where(poor, _AGAIN, new.recent_checked),
            cooldown=lib.where(poor, next_cooldown, 0),
            next_cooldown=lib.where(
                poor, lib.minimum(2 * next_cooldown, _LONGEST_REST), next_cooldown
            ),
        )

    def without_draft(self, passes: int = 1) -> "Acceptance":
        """Behind so many passes over one token a row."""
        cooldown = xp(self.cooldown).maximum(self.cooldown - passes, 0)
        return replace(self, cooldown=cooldown, passes=self.passes + passes)

    def relative_time(self, most: PerRow, cost: DraftCost) -> Array:
        """What a token of each row takes where at most so many are drafted, of what it takes
        without: below 1 drafts are worth it."""
        count, gain = self._best_lengths(most, cost)
        drafting = cost.token * count.astype(np.float32)
        return (1 + cost.verify + drafting) / (1 + gain + drafting)

    def _best_lengths(self, most: PerRow, cost: DraftCost) -> tuple[PerRow, Array]:
        """How many tokens of each row, at most so many, are worth drafting, and what they save, in
        passes: each is accepted where all before it are."""
        lib = xp(self.recent_accepted, most)
        share = lib.clip(self.recent_accepted / self.recent_checked, 0.0, 0.99)
        # As long as the next is likelier accepted than it costs.
        dear = max(cost.token, 1e-6)
        count = lib.floor(np.float32(math.log(dear)) / lib.log(lib.maximum(share, 1e-6))).astype(
            np.int32
        )
        count = lib.minimum(lib.maximum(count, 1), most)
        each = count.astype(np.float32)
        expected = share * (1 - share**each) / (1 - share)
        return count, expected - cost.token * each
