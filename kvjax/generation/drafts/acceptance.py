"""Choice of the draft length from the recent acceptance rate and the cost of drafting.

The same code runs inside programs and on the host.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from kvjax.core.array_ops import xp
from kvjax.core.pytree import pytree_dataclass
from kvjax.core.typing import Array, PerRow, RowMask

_PRIOR_RATE = 0.85
"""The acceptance rate that is assumed at first."""
_PRIOR_WEIGHT, _WEIGHT_AFTER_COOLDOWN = 2.0, 1.0
"""The weight of the assumed rate as a number of draft tokens, at first and after a cooldown."""
_DECAY = 0.9
"""The factor by which the weight of all earlier rounds is multiplied in each round."""
_COOLDOWN, _MAX_COOLDOWN = 16, 512
"""When drafting becomes slower than decoding, ``_COOLDOWN`` tokens are decoded without drafts. If
this happens repeatedly, the number doubles, up to ``_MAX_COOLDOWN``."""
DEFAULT_LENGTH = 7
"""The maximum number of tokens that are drafted at a time, if the user gives none."""
_TOKEN_COST = {"cpu": 0.07, "gpu": 0.004, "tpu": 0.005}
"""The cost of one more token in a pass, divided by the cost of a pass over one token, by platform.
It is measured on a CPU. On other platforms it is the ratio of compute time to the time for reading
weights. See docs/notes/speculation.md."""


@dataclass(frozen=True)
class DraftCost:
    """Costs of drafting. The unit is a pass of the target model over one token per row.

    ``verify`` is the additional cost of a pass over a draft, compared with a pass over one token.
    ``token`` is the cost of drafting one token.
    """

    verify: float
    token: float


def draft_cost(platform: str, rows: int, length: int, token: float) -> DraftCost:
    """Estimate the cost of drafting ``length`` tokens for each of ``rows`` rows. ``token`` is the
    draft model's size divided by the target model's."""
    per_token = _TOKEN_COST.get(platform, _TOKEN_COST["gpu"])
    verify = (1 + per_token * rows * (length + 1)) / (1 + per_token * rows) - 1
    return DraftCost(verify, token)


def cost_alone(cost: DraftCost, platform: str, rows: int, size: int) -> DraftCost:
    """Return the cost of drafting for one row that is verified in a separate pass. Without a draft,
    this row would share a pass with other rows: ``rows`` rows in all, in a program of ``size``
    rows."""
    per_token = _TOKEN_COST.get(platform, _TOKEN_COST["gpu"])
    share = (1 + per_token * size) / (1 + per_token) / rows
    return DraftCost((1 + cost.verify) / share - 1, cost.token / share)


def default_length(platform: str, rows: int) -> int:
    """Return the maximum number of tokens to draft at a time. It is smaller where verification
    costs more."""
    return 3 if platform == "cpu" and rows > 2 else DEFAULT_LENGTH


@pytree_dataclass
class Acceptance:
    """Acceptance statistics of a batch.

    Attributes:
      recent_accepted, recent_verified: float32[batch], the numbers of accepted and of verified
        draft tokens, with exponential decay.
      cooldown: int32[], how many passes must run before the next draft of any row.
      next_cooldown: int32[], the length of the next cooldown.
      proposed, accepted: int32[batch], the total numbers of proposed and of accepted draft tokens.
      passes: int32[], the number of passes of the target model.
    """

    recent_accepted: Array
    recent_verified: Array
    cooldown: Array
    next_cooldown: Array
    proposed: PerRow
    accepted: PerRow
    passes: Array

    @classmethod
    def new(cls, batch: int) -> "Acceptance":
        """Create the statistics of new rows, as NumPy arrays."""
        verified, zeros = np.full(batch, _PRIOR_WEIGHT, np.float32), np.zeros(batch, np.int32)
        fields = {
            "recent_accepted": verified * np.float32(_PRIOR_RATE),
            "recent_verified": verified,
            "cooldown": np.int32(0),
            "next_cooldown": np.int32(_COOLDOWN),
            "proposed": zeros,
            "accepted": zeros,
            "passes": np.int32(0),
        }
        return cls(**fields)

    def draft_lengths(self, available: PerRow, cost: DraftCost | None, active: RowMask) -> PerRow:
        """Return how many tokens to draft for each row, int32[batch], at most ``available``.

        The number is 0 for rows that are not ``active``, and for all rows if drafting would be
        slower. If ``cost`` is None, it is ``available`` for all active rows.
        """
        lib = xp(self.recent_accepted, available)
        available = lib.where(active, available, 0)
        if cost is None:
            return available
        length, saved = self._best_lengths(available, cost)
        overhead = cost.verify * lib.sum(active, dtype=np.float32)
        return lib.where((self.cooldown <= 0) & (lib.sum(saved) > overhead), length, 0)

    def updated(
        self,
        drafted: PerRow,
        accepted: PerRow,
        length: int,
        cost: DraftCost | None,
        active: RowMask,
    ) -> "Acceptance":
        """Return the statistics after a round of drafting and verification. If drafting no longer
        saves time, a cooldown begins.

        Args:
          drafted: the number of draft tokens of each row.
          accepted: how many of them were accepted.
          length: the maximum number of tokens that can be drafted.
          cost: the cost of drafting; None to draft always.
          active: the rows that are decoding.
        """
        lib = xp(self.recent_accepted, drafted)
        decay = lib.where(drafted > 0, np.float32(_DECAY), np.float32(1))
        # Tokens after the first rejected one are not verified.
        verified = accepted + (accepted < drafted).astype(np.int32)
        new = replace(
            self,
            recent_accepted=decay * self.recent_accepted + accepted.astype(np.float32),
            recent_verified=decay * self.recent_verified + verified.astype(np.float32),
            proposed=self.proposed + drafted,
            accepted=self.accepted + accepted,
            passes=self.passes + 1,
        )
        if cost is None:
            return new
        saved = new._best_lengths(lib.where(active, length, 0), cost)[1]
        slower = lib.sum(saved) <= cost.verify * lib.sum(active, dtype=np.float32)
        all_accepted = lib.any((drafted > 0) & (accepted == drafted))
        cooldown = lib.where(all_accepted, _COOLDOWN, self.next_cooldown)
        prior = _PRIOR_RATE * _WEIGHT_AFTER_COOLDOWN
        return replace(
            new,
            recent_accepted=lib.where(slower, prior, new.recent_accepted),
            recent_verified=lib.where(slower, _WEIGHT_AFTER_COOLDOWN, new.recent_verified),
            cooldown=lib.where(slower, cooldown, 0),
            next_cooldown=lib.where(slower, lib.minimum(2 * cooldown, _MAX_COOLDOWN), cooldown),
        )

    def without_draft(self, passes: int = 1) -> "Acceptance":
        """Return the statistics after ``passes`` passes without a draft, over one token per row."""
        cooldown = xp(self.cooldown).maximum(self.cooldown - passes, 0)
        return replace(self, cooldown=cooldown, passes=self.passes + passes)

    def relative_time(self, limit: PerRow, cost: DraftCost) -> Array:
        """Return the expected time per token of each row with at most ``limit`` draft tokens,
        divided by the time without drafts. If it is below 1, drafting is faster."""
        length, saved = self._best_lengths(limit, cost)
        drafting = cost.token * length.astype(np.float32)
        return (1 + cost.verify + drafting) / (1 + saved + drafting)

    def _best_lengths(self, limit: PerRow, cost: DraftCost) -> tuple[PerRow, Array]:
        """Return the best draft length of each row, at most ``limit``, and the number of passes
        that it is expected to save."""
        lib = xp(self.recent_accepted, limit)
        rate = lib.clip(self.recent_accepted / self.recent_verified, 0.0, 0.99)
        # A token is accepted only if all tokens before it are. Draft a token if the probability of
        # this is higher than its cost: rate ** length > cost.
        token_cost = max(cost.token, 1e-6)
        length = lib.floor(np.float32(math.log(token_cost)) / lib.log(lib.maximum(rate, 1e-6)))
        length = lib.minimum(lib.maximum(length.astype(np.int32), 1), limit)
        n = length.astype(np.float32)
        expected = rate * (1 - rate**n) / (1 - rate)
        return length, expected - cost.token * n
