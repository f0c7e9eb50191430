"""The layout that keeps the last tokens of a text, and perhaps its first."""

from dataclasses import dataclass, replace

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
from kvjax.layouts.layout import Dense, Layout, Region, Run, check_growth


@dataclass(frozen=True)
class Ring:
    """The last ``window`` tokens, in slots that are written round and round.

    A query sees its own position and the ``window - 1`` before it; with ``sinks``, the first
    tokens of the text as well, which have slots of their own. These it sees from no further than
    ``sinks + window - 1``, so that no distance leaves what the model was trained on (Xiao et al.,
    StreamingLLM, arXiv:2309.17453; without sinks, the sliding window of Jiang et al., Mistral,
    arXiv:2310.06825).

    ``window``: None is the layer's own window, from the model's config. ``sinks``: tokens kept for
    ever; a layer whose own window is not wider than a ``window`` that is given has none, for
    nothing that it was trained to see is forgotten: ``Ring(sinks=4)``, without a window, gives
    such a layer sinks. ``slack``: slots beside the window's, so that a call of ``slack + 1``
    tokens overwrites nothing that its own queries see, and ``slack`` tokens can be taken back; by
    default the largest of 16, a block where codecs work on blocks, and an eighth of the window. A
    text never fills a ring. ``max_len`` is only of use to make it smaller than all that, for texts
    that are shorter; it is None where it does not, and ``grows_to`` says how far
    ``kvjax.generate`` may lift it (None: not at all).
    """

    window: int | None = None
    sinks: int = 0
    slack: int | None = None
    max_len: int | None = None
    grows_to: int | None = None

    open_ended = True

    def __post_init__(self) -> None:
        normalize_int_field(self, "window", 1, optional=True)
        normalize_int_field(self, "sinks", 0)
        normalize_int_field(self, "slack", 0, optional=True)
        normalize_int_field(self, "max_len", 1, optional=True)
        normalize_int_field(self, "grows_to", self.max_len or 1, optional=True)

    def resolve(
        self, max_len: int | None, window: int | None, room: int | None = None, back: int = 16
    ) -> "Ring":
        """Fix window and slack; ``max_len`` counts where the text can't fill the ring."""
        own = window if self.window is None else self.window
        if own is None:
            raise ValueError(
                "a ring needs a window, and this layer of the model has none of its own: give "
                "window="
            )
        slack = max(back, own // 8) if self.slack is None else self.slack
        # A layer that sees no more than this keeps all that it was trained to see.
        kept = self.window is not None and window is not None and window <= self.window
        sinks = 0 if kept else self.sinks
        fixed = replace(self, window=own, sinks=sinks, slack=slack, max_len=None, grows_to=None)
        limits = [limit for limit in (self.max_len, max_len) if limit is not None]
        whole, limit = sinks + own + slack, min(limits, default=UNLIMITED)
        if room is not None and room < min(whole, limit):
            return replace(fixed, max_len=room, grows_to=limit)
        return replace(fixed, max_len=limit) if limit < whole else fixed

    @property
    def _ring(self) -> int:
        """Slots that are written round and round."""
        return self.slots - self.sinks

    @property
    def slots(self) -> int:
        """Slots a row has: the sinks', then the ring's."""
        if self.window is None or self.slack is None:
            raise ValueError("this Ring has no window or slack yet: init_cache gives it both")
        whole = self.sinks + self.window + self.slack
        return whole if self.max_len is None else max(self.max_len, self.sinks + 1)

    @property
    def limit(self) -> int | None:
        return self.max_len

    @property
    def chunk(self) -> int | None:
        """Tokens that one call can append; any number where the ring is never full."""
        return None if self.max_len is not None or self.slack is None else self.slack + 1

    @property
    def reach(self) -> int:
        """Distances stay below sinks and window together."""
        whole = self.sinks + (self.window or 1)
        return whole if self.max_len is None else min(whole, self.grows_to or self.max_len)

    def grown(self, to: int) -> "Ring":
        """One that is shorter than its window grows, to its whole size at most; others need not."""
        if self.max_len is None:
            raise ValueError("a ring does not grow: it holds its window however long the text is")
        check_growth(to, self.max_len, self.grows_to)
        whole = self.sinks + (self.window or 1) + (self.slack or 0)
        # What may not grow further ends where it was asked to, what may goes round.
        if to < whole:
            return replace(self, max_len=to)
        return replace(self, max_len=None, grows_to=None)

    def rounded(self, parts: int) -> "Ring":
        """With so many slots that they divide: more slack, which changes nothing that is seen."""
        more = -self.slots % parts
        if not more:
            return self
        if self.max_len is not None:
            return replace(self, max_len=self.slots + more, grows_to=None)
        return replace(self, slack=(self.slack or 0) + more)

    def joined(self, other: Layout) -> "Ring":
        """The larger of two that differ in nothing else."""
        alike = replace(self, max_len=None, grows_to=None)
        if not isinstance(other, Ring) or alike != replace(other, max_len=None, grows_to=None):
            raise ValueError(f"{self} and {other} are different layouts")
        if self.max_len is None or other.max_len is None:
            return alike
        larger = max(self.max_len, other.max_len)
        grows = [ring.grows_to for ring in (self, other) if ring.grows_to is not None]
        return replace(alike, max_len=larger, grows_to=max([larger, *grows]) if grows else None)

    def in_blocks(self, block: int, recent: int) -> Layout:
        """Slots for the blocks that the queries of one call see between them, and as many as one
        call makes leave the tail."""
        if self.max_len is not None:
            return Dense(max((self.slots - 1) // block - recent, 1))
        seen = -(-(self.slots - 1) // block) - recent
        return Ring(max(seen, -(-(self.chunk or 1) // block), 1), slack=0)

    def runs(self, length: PerRow, new: int) -> list[Run]:
        """One run for a single token; else the sinks', the first round's and the second's."""
        if new == 1:
            return [Run(self.slot_of(length[:, None])[:, 0], 0, self.slots)]
        start = self.sinks + (length - self.sinks) % self._ring
        behind_sinks = jnp.maximum(self.sinks - length, 0)
        rounds = [
            Run(start, self.sinks, self.slots, behind_sinks),
            Run(start - self._ring, self.sinks, self.slots, behind_sinks),
        ]
        return [Run(length, 0, self.sinks), *rounds] if self.sinks else rounds

    def positions(self, length: Cursors, written: Cursors, slots: Slots) -> PositionPerSlot:
        """A slot holds the last position that was ever written to it. After a rewind that can be
        one that is no longer part of the text."""
        slots = expand_over_rows(slots, written)
        newest = expand_over_slots(written) - 1 - self.sinks
        held = newest - (newest - (slots - self.sinks)) % self._ring
        held = jnp.where(held >= 0, held + self.sinks, -1)
        held = jnp.where(slots < self.sinks, slots, held)
        return jnp.where(held < expand_over_slots(length), held, -1)

    def slot_of(self, positions: Positions) -> Positions:
        turned = self.sinks + (positions - self.sinks) % self._ring
        return jnp.where(positions < self.sinks, positions, turned)

    def regions(self) -> tuple[Region, ...]:
        ring = Region(self.sinks, self._ring)
        return (Region(0, self.sinks, capped=True), ring) if self.sinks else (ring,)

    def occupied(self, length: PerRow) -> Scalar:
        return jnp.minimum(jnp.max(length), self.slots)

    def bounds(self, length: PerRow, start: Scalar | int, size: int) -> tuple[Scalar, Scalar]:
        """Where a ring has been filled, its slots hold anything that is left of the text."""
        start = jnp.asarray(start, jnp.int32)
        longest = jnp.max(length)
        low = jnp.minimum(start, jnp.maximum(jnp.min(length) - self.slots, 0))
        low = jnp.where(longest > self.slots, low, start)
        high = jnp.where(longest > self.slots, longest, jnp.minimum(start + size, longest)) - 1
        return low, high

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """As if the oldest slots had been written again and taken back: up to ``slack`` of them."""
        newest = jnp.max(jnp.where(missing, positions, -1), axis=1)
        written = jnp.where(newest < 0, length, newest + self._ring + 1)
        in_sinks = jnp.any(missing & (positions < self.sinks), axis=1)
        return written, in_sinks | (written > length + self._ring - (self.window or 1))

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """Down to what was overwritten: all while no slot was, else to ``slack`` before the most
        that was ever written."""
        spare = self._ring - (self.window or 1)
        kept = jnp.where(written > self.slots, written - spare, 0)
        return jnp.maximum(length - kept, 0)
