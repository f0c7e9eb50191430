"""A memory to keep to: which layers stay on the device, and which go to the host."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvjax._checks import whole_number
from kvjax.placement import Host

_BACK = 0.75
"""What part of the memory may be full once a layer has come back: the rest keeps it from being
sent away again by the next few tokens."""


@dataclass(frozen=True)
class Budget:
    """Bytes that a cache may take of the device, and where layers go that would be too much."""

    memory: int
    placement: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        whole_number("memory", self.memory, 1)

    def away(
        self, sizes: Sequence[tuple[int, int, int]], out: frozenset[int], twice: int = 0
    ) -> frozenset[int]:
        """Which layers are to be on the host, the last ones first.

        Args:
          sizes: of each layer, bytes that it takes of the device when it is there, bytes that it
            takes of it when it is on the host, and bytes that it then has on the host.
          out: those that are on the host now. They come back, the first ones first, where that
            leaves a quarter of the memory free.
          twice: bytes that are there twice while layers on the device grow.

        Raises:
          ValueError: if the device can't hold what stays there of layers on the host.
        """
        chosen = set(out)
        while self._taken(sizes, chosen, twice) > self.memory:
            here = [n for n in range(len(sizes)) if n not in chosen and sizes[n][1] < sizes[n][0]]
            if not here:
                fetched = " and the layers fetched ahead" if self.placement.ahead else ""
                raise ValueError(
                    f"the cache may take {self.memory:,} bytes of the device, but with every layer "
                    f"on the host its newest tokens{fetched} would take "
                    f"{self._taken(sizes, chosen, twice):,}"
                )
            chosen.add(here[-1])
        for n in sorted(chosen):
            if n in out and self._taken(sizes, chosen - {n}, twice) <= _BACK * self.memory:
                chosen.remove(n)
        return frozenset(chosen)

    def _taken(self, sizes: Sequence[tuple[int, int, int]], out: Any, twice: int) -> int:
        fetched = [sizes[n][2] for n in out] if self.placement.ahead else []
        ahead = sum(sorted(fetched)[-self.placement.ahead - 1 :])
        here = sum(tail if n in out else device for n, (device, tail, _) in enumerate(sizes))
        return here + ahead + (twice if len(out) < len(sizes) else 0)


@dataclass(frozen=True)
class Auto:
    """A policy of layers on the device, of which so many go to the host as its memory asks for.

    ``inner``: their policy, as for ``init_cache``. ``memory``: bytes that the cache may take of the
    device; None leaves it to ``generate``, which knows the weights. ``placement``: where layers go
    that would be too much.
    """

    inner: Any
    memory: int | None = None
    placement: Host = field(default_factory=Host)

    def __post_init__(self) -> None:
        if self.memory is not None:
            whole_number("memory", self.memory, 1)

    @property
    def budget(self) -> Budget:
        """The memory to keep to.

        Raises:
          ValueError: if none is given.
        """
        if self.memory is None:
            raise ValueError(
                "policy('auto') must know how much of the device the cache may take: give memory="
            )
        return Budget(self.memory, self.placement)

    def per_layer(self, config: Any) -> Any:
        """The policy of each layer as long as it is on the device."""
        inner = self.inner
        return tuple(inner) if isinstance(inner, Sequence) else inner.per_layer(config)
