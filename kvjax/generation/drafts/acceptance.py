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
USUAL = 7
"""Tokens that are drafted at a time, at most, where no number is given."""
_TOKEN = {"cpu": 0.07, "gpu": 0.004, "tpu": 0.005}
"""What a token more adds to a pass over one, by platform: on a CPU as measured, on others what
its products take of the time in which weights are read. See docs/notes/speculation.md."""


@dataclass(frozen=True)
class Price:
    """In passes over one token a row: ``check``: what a pass over a draft takes more; ``token``:
    what a drafted token takes."""

    check: float
    token: float


def price_of(platform: str, rows: int, length: int, token: float) -> Price:
    """Of drafts of so many tokens, for so many rows; ``token``: the draft's size, as a share of the
    model's."""
    each = _TOKEN.get(platform, _TOKEN["gpu"])
    return Price((1 + each * rows * (length + 1)) / (1 + each * rows) - 1, token)


def beside_others(price: Price, platform: str, rows: int, size: int) -> Price:
    """Of a draft of one row, checked alone, where else it would take part in a pass of so many
    rows, in a program for ``size`` rows."""
    each = _TOKEN.get(platform, _TOKEN["gpu"])
    share = (1 + each * size) / (1 + each) / rows
    return Price((1 + price.check) / share - 1, price.token / share)


def usual_length(platform: str, rows: int) -> int:
    """Tokens that are drafted at a time: fewer where a pass over them takes much longer."""
    return 3 if platform == "cpu" and rows > 2 else USUAL


@pytree_dataclass
class Acceptance:
    """``right`` of ``judged``: float32[batch], drafted tokens that were accepted, and those that
    were looked at, the older the less they count. ``rest``: int32, passes before any row's next
    draft; ``wait``: int32, those of the next rest. In all: ``proposed`` and ``accepted``,
    int32[batch], and ``passes`` of the model, int32."""

    right: Array
    judged: Array
    rest: Array
    wait: Array
    proposed: PerRow
    accepted: PerRow
    passes: Array

    @classmethod
    def new(cls, batch: int) -> "Acceptance":
        """Of rows that begin, as NumPy's arrays."""
        zeros: Any = np.zeros(batch, np.int32)
        known: Any = np.full(batch, _AT_FIRST, np.float32)
        zero: Any = np.int32(0)
        rest: Any = np.int32(_REST)
        right: Any = known * np.float32(_HOPE)
        return cls(right, known, zero, rest, zeros, zeros, zero)

    def wanted(self, found: PerRow, price: Price | None, active: RowMask) -> PerRow:
        """How many tokens of each row are to be drafted, of as many as could be ``found``: none
        where it would take longer than without. Without a price, all."""
        lib = xp(self.right, found)
        found = lib.where(active, found, 0)
        if price is None:
            return found
        count, gain = self._best(found, price)
        cost = price.check * lib.sum(active, dtype=np.float32)
        return lib.where((self.rest <= 0) & (lib.sum(gain) > cost), count, 0)

    def after(
        self, count: PerRow, accepted: PerRow, length: int, price: Price | None, active: RowMask
    ) -> "Acceptance":
        """Behind a round in which so many tokens were drafted, and accepted, of ``length`` at most.
        Where drafts are worth nothing, they rest."""
        lib = xp(self.right, count)
        kept = lib.where(count > 0, np.float32(_KEPT), np.float32(1))
        wrong = accepted < count
        # Behind the first that was wrong none is looked at.
        new = replace(
            self,
            right=kept * self.right + accepted.astype(np.float32),
            judged=kept * self.judged + (accepted + wrong.astype(np.int32)).astype(np.float32),
            proposed=self.proposed + count, accepted=self.accepted + accepted,
            passes=self.passes + 1,
        )  # fmt: skip
        if price is None:
            return new
        gain = new._best(lib.where(active, length, 0), price)[1]
        poor = lib.sum(gain) <= price.check * lib.sum(active, dtype=np.float32)
        wait = lib.where(lib.any((count > 0) & (accepted == count)), _REST, self.wait)
        return replace(
            new,
            right=lib.where(poor, _HOPE * _AGAIN, new.right),
            judged=lib.where(poor, _AGAIN, new.judged),
            rest=lib.where(poor, wait, 0),
            wait=lib.where(poor, lib.minimum(2 * wait, _LONGEST_REST), wait),
        )

    def rested(self, passes: int = 1) -> "Acceptance":
        """Behind so many passes over one token a row."""
        rest = xp(self.rest).maximum(self.rest - passes, 0)
        return replace(self, rest=rest, passes=self.passes + passes)

    def takes(self, most: PerRow, price: Price) -> Array:
        """What a token of each row takes where at most so many are drafted, of what it takes
        without: below 1 drafts are worth it."""
        count, gain = self._best(most, price)
        drafting = price.token * count.astype(np.float32)
        return (1 + price.check + drafting) / (1 + gain + drafting)

    def _best(self, most: PerRow, price: Price) -> tuple[PerRow, Array]:
        """How many tokens of each row, at most so many, are worth drafting, and what they save, in
        passes: each is accepted where all before it are."""
        lib = xp(self.right, most)
        share = lib.clip(self.right / self.judged, 0.0, 0.99)
        # As long as the next is likelier accepted than it costs.
        dear = max(price.token, 1e-6)
        count = lib.floor(np.float32(math.log(dear)) / lib.log(lib.maximum(share, 1e-6))).astype(
            np.int32
        )
        count = lib.minimum(lib.maximum(count, 1), most)
        each = count.astype(np.float32)
        expected = share * (1 - share**each) / (1 - share)
        return count, expected - price.token * each
