"""The layout that keeps the last tokens of a text, and perhaps its first."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.layouts.layout import Region, Run

Counts = Int[Array, " batch"]


@dataclass(frozen=True)
class Ring:
    """The last ``window`` tokens, in slots that are written round and round.

    A query sees its own position and the ``window - 1`` before it; with ``sinks``, the first
    tokens of the text as well, which have slots of their own. These it sees from no further than
    ``sinks + window - 1``, so that no distance leaves what the model was trained on (Xiao et al.,
    StreamingLLM, arXiv:2309.17453; without sinks, the sliding window of Jiang et al., Mistral,
    arXiv:2310.06825).

    ``window``: None is the layer's own window, from the model's config. ``sinks``: tokens kept for
    ever. ``slack``: slots beside the window's, so that a call of ``slack + 1`` tokens overwrites
    nothing that its own queries see, and ``slack`` tokens can be taken back; by default the larger
    of 16 and an eighth of the window. A text never fills a ring. ``max_len`` is only of use to
    make it smaller than its window; it is None where it does not.
    """

    window: int | None = None
    sinks: int = 0
    slack: int | None = None
    max_len: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (
            ("window", self.window, 1), ("sinks", self.sinks, 0), ("slack", self.slack, 0),
            ("max_len", self.max_len, 1),
        ):  # fmt: skip
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    def resolve(self, max_len: int | None, window: int | None) -> "Ring":
        """Fix window and slack; ``max_len`` counts where the text can't fill the ring."""
        if self.window is None and window is None:
            raise ValueError(
                "a ring needs a window, and this layer of the model has none of its own: give "
                "window="
            )
        own = self.window or window or 1
        slack = max(16, own // 8) if self.slack is None else self.slack
        shorter = max_len is not None and max_len < self.sinks + own + slack
        return replace(self, window=own, slack=slack, max_len=max_len if shorter else None)

    @property
    def open_ended(self) -> bool:
        """A text never fills it."""
        return True

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
        """Tokens a row's text can have."""
        return self.max_len

    @property
    def chunk(self) -> int | None:
        """Tokens that one call can append; any number where the ring is never full."""
        return None if self.max_len is not None or self.slack is None else self.slack + 1

    @property
    def cap(self) -> int:
        """The position from which queries look at the sinks at most."""
        return self.sinks + (self.window or 1) - 1

    @property
    def reach(self) -> int:
        """Distances stay below sinks and window together."""
        return min(self.sinks + (self.window or 1), self.slots)

    @property
    def grows_to(self) -> int | None:
        """It does not grow."""
        return None

    def grown(self, to: int) -> "Ring":
        """One that is shorter than its window grows, to its whole size at most; others need not."""
        if self.max_len is None:
            raise ValueError("a ring does not grow: it holds its window however long the text is")
        if to < self.max_len:
            raise ValueError(f"the cache holds {self.max_len} tokens a row: {to} would be fewer")
        return replace(self, max_len=None).resolve(to, None)

    def runs(self, length: Counts, new: int) -> list[Run]:
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

    def positions(
        self, length: Counts, written: Counts, slots: Int[Array, " slots"]
    ) -> Int[Array, "batch slots"]:
        """The position that each of ``slots`` holds, a row; -1 where it is empty or stale.

        A slot holds the last position that was ever written to it. After a rewind that can be one
        that is no longer part of the text.
        """
        newest = written[:, None] - 1 - self.sinks
        held = newest - (newest - (slots - self.sinks)) % self._ring
        held = jnp.where(held >= 0, held + self.sinks, -1)
        held = jnp.where(slots < self.sinks, slots, held)
        return jnp.where(held < length[:, None], held, -1)

    def slot_of(self, positions: Int[Array, "batch n"]) -> Int[Array, "batch n"]:
        """The slot where a position stands, if it is held at all."""
        turned = self.sinks + (positions - self.sinks) % self._ring
        return jnp.where(positions < self.sinks, positions, turned)

    def regions(self) -> tuple[Region, ...]:
        """The sinks, if there are any, and the ring."""
        ring = Region(self.sinks, self._ring)
        return (Region(0, self.sinks, capped=True), ring) if self.sinks else (ring,)

    def occupied(self, length: Counts) -> Int[Array, ""]:
        """Slots from the first on that may hold anything, in any row."""
        return jnp.minimum(jnp.max(length), self.slots)

    def bounds(
        self, length: Counts, start: Int[Array, ""] | int, size: int
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Lowest and highest position in slots ``start`` to ``start + size - 1``, over all rows.

        Where a ring has been filled, its slots hold anything that is left of the text.
        """
        start = jnp.asarray(start, jnp.int32)
        longest = jnp.max(length)
        low = jnp.minimum(start, jnp.maximum(jnp.min(length) - self.slots, 0))
        low = jnp.where(longest > self.slots, low, start)
        high = jnp.where(longest > self.slots, longest, jnp.minimum(start + size, longest)) - 1
        return low, high

    def hiding(
        self,
        length: Counts,
        positions: Int[Array, "batch slots"],
        missing: Bool[Array, "batch slots"],
    ) -> tuple[Counts, Bool[Array, " batch"]]:
        """As if the oldest slots had been written again and taken back: up to ``slack`` of them."""
        newest = jnp.max(jnp.where(missing, positions, -1), axis=1)
        written = jnp.where(newest < 0, length, newest + self._ring + 1)
        in_sinks = jnp.any(missing & (positions < self.sinks), axis=1)
        return written, in_sinks | (written > length + (self.slack or 0))

    def rewindable(self, length: Counts, written: Counts) -> Counts:
        """Down to what was overwritten: all while no slot was, else to ``slack`` before the most
        that was ever written."""
        kept = jnp.where(written > self.slots, written - (self.slack or 0), 0)
        return jnp.maximum(length - kept, 0)
