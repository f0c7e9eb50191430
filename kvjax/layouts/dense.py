"""The layout in which every position has a slot of its own."""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Array, Int


@dataclass(frozen=True)
class Dense:
    """Position ``p`` stands in slot ``p``; ``max_len`` positions, None until ``resolve``."""

    max_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_len is not None and self.max_len < 1:
            raise ValueError(f"max_len must be at least 1, got {self.max_len}")

    def resolve(self, max_len: int) -> "Dense":
        """Fix the capacity: a ``max_len`` given to the layout itself must be the same."""
        if self.max_len not in (None, max_len):
            raise ValueError(f"the layout holds {self.max_len} positions, max_len asks {max_len}")
        return replace(self, max_len=max_len)

    @property
    def slots(self) -> int:
        """Slots a row has."""
        if self.max_len is None:
            raise ValueError("this Dense has no max_len yet: init_cache gives it one")
        return self.max_len

    def first_slot(self, length: Int[Array, " batch"]) -> Int[Array, " batch"]:
        """The slot where each row's next token goes; those after it follow on."""
        return length

    def accepts(
        self, length: Int[Array, " batch"], new: Int[Array, " batch"]
    ) -> Int[Array, " batch"]:
        """How many of ``new`` tokens each row takes: all, or none when they would not fit."""
        return jnp.where(length + new <= self.slots, new, 0)

    def positions(
        self,
        length: Int[Array, " batch"],
        written: Int[Array, " batch"],
        slots: Int[Array, " slots"],
    ) -> Int[Array, "batch slots"]:
        """The position that each of ``slots`` holds, a row; -1 where it is empty or stale."""
        return jnp.where(slots < length[:, None], slots, -1)

    def occupied(self, length: Int[Array, " batch"]) -> Int[Array, ""]:
        """Slots from the first on that may hold anything, in any row."""
        return jnp.max(length)

    def bounds(
        self, length: Int[Array, " batch"], start: Int[Array, ""] | int, size: int
    ) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Lowest and highest position in slots ``start`` to ``start + size - 1``, over all rows.

        May be wider than the truth, never narrower; the highest is below the lowest where all
        are empty.
        """
        low = jnp.asarray(start, jnp.int32)
        return low, jnp.minimum(low + size, jnp.max(length)) - 1
