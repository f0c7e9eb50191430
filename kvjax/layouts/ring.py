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

    A query sees its own position and the ``window - 1`` positions before it. With ``sinks``, it
    also sees the first tokens of the row, which have separate slots. Their distance is capped at
    ``sinks + window - 1``, so that no distance exceeds those in the model's training (Xiao et al.,
    StreamingLLM, arXiv:2309.17453; without sinks, the sliding window of Jiang et al., Mistral,
    arXiv:2310.06825).

    Attributes:
      window: the window in tokens. None means the layer's window in the model's config.
      sinks: the number of first tokens that are never overwritten. A layer gets no sinks if it has
        a window in the config and ``window`` is given and at least as wide, because the ring then
        keeps everything that the layer was trained to see. With ``Ring(sinks=4)``, which has no
        ``window`` of its own, such a layer gets sinks.
      slack: the number of slots in addition to sinks and window. A call (forward pass) of up to
        ``slack + 1`` tokens overwrites nothing that its own queries see, and ``slack`` tokens can
        be rewound. The default is the largest of 16, an eighth of the window, and a block (64
        tokens) if the cache is quantized or on the host.
      max_len: the number of slots, and the maximum number of tokens per row, if it is less than
        ``sinks + window + slack``; otherwise None, and rows have no maximum.
      grows_to: the value to which ``kvjax.generate`` may raise ``max_len``; None if it may not.

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
        """Resolve the settings, as in `LayoutSpec.resolve`. ``max_len`` is kept only if it makes
        the ring smaller."""
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
        """The number of slots that are reused, which are all slots except the sinks."""
        return self.slots - self.sinks

    @property
    def _whole(self) -> int:
        """The number of slots of the ring if ``max_len`` does not make it smaller."""
        return self.sinks + (self.window or 1) + (self.slack or 0)

    @property
    def slots(self) -> int:
        """The number of slots per row: first the sinks, then the ring."""
        if self.window is None or self.slack is None:
            raise ValueError("this Ring has no window or slack yet: init_cache sets them")
        return self._whole if self.max_len is None else max(self.max_len, self.sinks + 1)

    @property
    def limit(self) -> int | None:
        return self.max_len

    def grown(self, to: int) -> "Ring":
        """Return the layout for rows of ``to`` tokens. A ring that ``max_len`` makes smaller grows
        up to its whole size."""
        if self.max_len is None:
            raise ValueError("a ring does not grow: it holds its window for rows of any length")
        check_growth(to, self.max_len, self.grows_to)
        if to < self._whole:
            return replace(self, max_len=to)
        return replace(self, max_len=None, grows_to=None)

    def rounded(self, parts: int) -> "Ring":
        """Return the ring with more slack, which changes nothing that queries see."""
        more = -self.slots % parts
        if not more:
            return self
        if self.max_len is not None:
            return replace(self, max_len=self.slots + more, grows_to=None)
        return replace(self, slack=(self.slack or 0) + more)

    def joined(self, other: Layout) -> "Ring":
        """Return the ring with the larger capacity. The rings may differ in nothing else."""
        alike = replace(self, max_len=None, grows_to=None)
        if not isinstance(other, Ring) or alike != replace(other, max_len=None, grows_to=None):
            raise ValueError(f"{self} and {other} are different layouts")
        if self.max_len is None or other.max_len is None:
            return alike
        larger = max(self.max_len, other.max_len)
        grows = [ring.grows_to for ring in (self, other) if ring.grows_to is not None]
        return replace(alike, max_len=larger, grows_to=max([larger, *grows]) if grows else None)

    def in_blocks(self, block: int, recent: int) -> Layout:
        """Return a ring of blocks. It has a slot for each block that the queries of one call see,
        and at least as many slots as blocks can leave the tail in one call."""
        if self.max_len is not None:
            return super().in_blocks(block, recent)
        seen = -(-(self.slots - 1) // block) - recent
        return Ring(max(seen, -(-(self.chunk or 1) // block), 1), slack=0)

    def runs(self, length: PerRow, new: int) -> list[Run]:
        """Return one run for the sinks and two for the ring: up to its last slot, and from its
        first slot on. A single token has one run."""
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
        """Return the position in each slot, as in `Layout.positions`. A slot has the last position
        that was ever written to it. After a rewind, this position may no longer be part of the
        row."""
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
        """Return the lowest and the highest position, as in `Layout.bounds`. When a row has filled
        the ring, any slot may have any of the newest positions."""
        start = jnp.asarray(start, jnp.int32)
        longest = jnp.max(length)
        low = jnp.minimum(start, jnp.maximum(jnp.min(length) - self.slots, 0))
        low = jnp.where(longest > self.slots, low, start)
        high = jnp.where(longest > self.slots, longest, jnp.minimum(start + size, longest)) - 1
        return low, high

    def hiding(
        self, length: PerRow, positions: SlotPositions, missing: SlotMask
    ) -> tuple[PerRow, RowMask]:
        """Mark slots as empty, as in `Layout.hiding`. The result is the same as if up to ``slack``
        of the oldest slots had been overwritten and then rewound."""
        newest = jnp.max(jnp.where(missing, positions, -1), axis=1)
        written = jnp.where(newest < 0, length, newest + self._ring + 1)
        in_sinks = jnp.any(missing & (positions < self.sinks), axis=1)
        # A ring that `max_len` makes smaller than its window needs all tokens, and may have them.
        in_window = (newest >= 0) & (written > length + self._ring - (self.window or 1))
        return written, in_sinks | in_window

    def rewindable(self, length: PerRow, written: PerRow) -> PerRow:
        """Return how many tokens can be rewound. While no slot has been overwritten, all tokens can
        be rewound. After that, a row can be rewound until it is ``slack`` tokens shorter than
        ``written``, the maximum number of tokens that it has ever had."""
        slack = self._ring - (self.window or 1)
        kept = jnp.where(written > self.slots, written - slack, 0)
        return jnp.maximum(length - kept, 0)
