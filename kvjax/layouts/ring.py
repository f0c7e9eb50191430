"""The layout that keeps the last tokens of a row, and optionally the first."""

from dataclasses import dataclass, replace
from typing import ClassVar

import jax.numpy as jnp

from kvjax.core.array_ops import expand_over_rows, expand_over_slots
from kvjax.core.typing import (
    Cursors,
    PerRow,
    PositionPerSlot,
    Positions,
    RowMask,
    Scalar,
    SlotMask,
    SlotPositions,
    Slots,
)
from kvjax.core.validation import UNLIMITED, normalize_int_field
from kvjax.layouts.layout import Layout, Run, check_growth


@dataclass(frozen=True)
class Ring(Layout):
    """The last ``window`` tokens, in slots that are reused in a circle.

    A query sees its own position and the ``window - 1`` before it. With ``sinks`` it also sees the
    first tokens of the row, which have slots of their own. Their distance is capped at ``sinks +
    window - 1``, so that no distance exceeds what the model was trained on (Xiao et al.,
    StreamingLLM, arXiv:2309.17453; without sinks, the sliding window of Jiang et al., Mistral,
    arXiv:2310.06825).

    ``window``: None is the layer's own window, from the model's config.

    ``sinks``: first tokens that are never overwritten. If ``window`` is given, and the layer's own
    window is not wider, the layer has no sinks: nothing that it was trained to see is forgotten.
    ``Ring(sinks=4)``, without a window, gives such a layer sinks.

    ``slack``: slots in excess of the window. A call of up to ``slack + 1`` tokens overwrites
    nothing that its own queries see, and ``slack`` tokens can be rewound. By default the largest of
    16, a block where codecs encode blocks, and an eighth of the window.

    ``max_len``: tokens that a row can hold, if that needs fewer slots than window and slack; None
    if not. ``grows_to``: how far ``kvjax.generate`` may raise ``max_len``, None for not at all.

    Example:
      ```python
      policy = kvjax.CachePolicy(kvjax.layouts.Ring(window=32, sinks=4, slack=16))
      cache = kvjax.init_cache(lm.config, policy)
      print(cache.max_len, cache.max_rewind)
      ```
    """

    window: int | None = None
    sinks: int = 0
    slack: int | None = None
    max_len: int | None = None
    grows_to: int | None = None

    open_ended: ClassVar[bool] = True

    def __post_init__(self) -> None:
        normalize_int_field(self, "window", 1, optional=True)
        normalize_int_field(self, "sinks", 0)
        normalize_int_field(self, "slack", 0, optional=True)
        normalize_int_field(self, "max_len", 1, optional=True)
        normalize_int_field(self, "grows_to", self.max_len or 1, optional=True)

    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        initial_len: int | None = None,
        min_rewind: int = 16,
    ) -> "Ring":
        """``max_len`` is kept only if it makes the ring smaller."""
        own = window if self.window is None else self.window
        if own is None:
            raise ValueError(
                "a ring needs a window, but this layer of the model has none of its own: give "
                "window="
            )
        slack = max(min_rewind, own // 8) if self.slack is None else self.slack
        sees_all = self.window is not None and window is not None and window <= self.window
        sinks = 0 if sees_all else self.sinks
        fixed = replace(self, window=own, sinks=sinks, slack=slack, max_len=None, grows_to=None)
        limits = [limit for limit in (self.max_len, max_len) if limit is not None]
        whole, limit = sinks + own + slack, min(limits, default=UNLIMITED)
        if initial_len is not None and initial_len < min(whole, limit):
            return replace(fixed, max_len=initial_len, grows_to=limit)
        return replace(fixed, max_len=limit) if limit < whole else fixed

    def with_slack(self, slack: int) -> "Ring":
        return replace(self, slack=max(self.slack or 0, slack))

    @property
    def _ring(self) -> int:
        """Slots that are reused: all but the sinks'."""
        return self.slots - self.sinks

    @property
    def _whole(self) -> int:
        """Slots of a ring that ``max_len`` does not make smaller."""
        return self.sinks + (self.window or 1) + (self.slack or 0)

    @property
    def slots(self) -> int:
        """Slots per row: first the sinks', then the ring's."""
        if self.window is None or self.slack is None:
            raise ValueError("this Ring has no window or slack yet: init_cache sets them")
        return self._whole if self.max_len is None else max(self.max_len, self.sinks + 1)

    @property
    def limit(self) -> int | None:
        return self.max_len

    def grown(self, to: int) -> "Ring":
        """A ring that ``max_len`` makes smaller grows up to its whole size."""
        if self.max_len is None:
            raise ValueError("a ring does not grow: it holds its window for rows of any length")
        check_growth(to, self.max_len, self.grows_to)
        if to < self._whole:
            return replace(self, max_len=to)
        return replace(self, max_len=None, grows_to=None)

    def rounded(self, parts: int) -> "Ring":
        """More slack, which changes nothing that queries see."""
        more = -self.slots % parts
        if not more:
            return self
        if self.max_len is not None:
            return replace(self, max_len=self.slots + more, grows_to=None)
        return replace(self, slack=(self.slack or 0) + more)

    def joined(self, other: Layout) -> "Ring":
        """The larger capacity of two rings that differ in nothing else."""
        alike = replace(self, max_len=None, grows_to=None)
        if not isinstance(other, Ring) or alike != replace(other, max_len=None, grows_to=None):
            raise ValueError(f"{self} and {other} are different layouts")
        if self.max_len is None or other.max_len is None:
            return alike
        larger = max(self.max_len, other.max_len)
        grows = [ring.grows_to for ring in (self, other) if ring.grows_to is not None]
        return replace(alike, max_len=larger, grows_to=max([larger, *grows]) if grows else None)

    def in_blocks(self, block: int, recent: int) -> Layout:
        """A ring with a slot for each block that the queries of one call see, but at least one for
        each block that can leave the tail in one call."""
        if self.max_len is not None:
            return super().in_blocks(block, recent)
        seen = -(-(self.slots - 1) // block) - recent
        return Ring(max(seen, -(-(self.chunk or 1) // block), 1), slack=0)

    def runs(self, length: PerRow, new: int) -> list[Run]:
        """A run for the sinks and two for the ring, before and after its end; one for one token."""
        if new == 1:
            return [Run(self.slot_of(length[:, None])[:, 0], 0, self.slots)]
        start = self.sinks + (length - self.sinks) % self._ring
        skip = jnp.maximum(self.sinks - length, 0)
        ring = [
            Run(start, self.sinks, self.slots, skip),
            Run(start - self._ring, self.sinks, self.slots, skip),
        ]
        return [Run(length, 0, self.sinks), *ring] if self.sinks else ring

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """A slot holds the last position that was ever written to it. After a rewind this may be
        one that is no longer part of the row."""
        slots = expand_over_rows(slots, written)
        newest = expand_over_slots(written) - 1 - self.sinks
        position = newest - (newest - (slots - self.sinks)) % self._ring
        position = jnp.where(position >= 0, position + self.sinks, -1)
        position = jnp.where(slots < self.sinks, slots, position)
        return jnp.where(position < expand_over_slots(length), position, -1)

    def slot_of(self, positions: Positions) -> Positions:
        in_ring = self.sinks + (positions - self.sinks) % self._ring
        return jnp.where(positions < self.sinks, positions, in_ring)

    def occupied(self, length: PerRow) -> Scalar:
        return jnp.minimum(jnp.max(length), self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Once a row fills the ring, any slot may hold any of the newest positions."""
        start = jnp.asarray(start, jnp.int32)
        longest = jnp.max(length)
        low = jnp.minimum(start, jnp.maximum(jnp.min(length) - self.slots, 0))
        low = jnp.where(longest > self.slots, low, start)
        high = jnp.where(longest > self.slots, longest, jnp.minimum(start + size, longest)) - 1
        return low, high

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """The result is the same as if up to ``slack`` of the oldest slots had been overwritten and
        then rewound."""
        newest = jnp.max(jnp.where(missing, positions, -1), axis=1)
        written = jnp.where(newest < 0, length, newest + self._ring + 1)
        in_sinks = jnp.any(missing & (positions < self.sinks), axis=1)
        return written, in_sinks | (written > length + self._ring - (self.window or 1))

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """All tokens while no slot has been overwritten; then back to ``slack`` tokens before the
        most that was ever written."""
        slack = self._ring - (self.window or 1)
        kept = jnp.where(written > self.slots, written - slack, 0)
        return jnp.maximum(length - kept, 0)
