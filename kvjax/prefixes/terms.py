"""What a tree of prefixes has fixed: the model's shape, the policies, and the grid of positions."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvjax.cache.state import KVCache
from kvjax.core.trees import tree_bytes
from kvjax.layouts import paged
from kvjax.memory.sizes import abstract_cache
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer
from kvjax.prefixes.checkpoints import own, state_bytes
from kvjax.prefixes.kinds import Kind


@dataclass(frozen=True, eq=False)
class Terms:
    """What texts of one tree have in common; ``policies``: of all layers, with their pages.

    ``config``, ``mesh``: of the model. The others are those of ``PrefixTree``.

    Raises:
      ValueError: if a layer keeps a whole text outside of pages, or rows are divided among devices.
    """

    config: Any
    mesh: Any
    policies: tuple[Any, ...]
    max_len: int
    prefill_chunk: int
    exact_prefix: bool
    checkpoint_every: int

    def __post_init__(self) -> None:
        spread = self.shapes(1).spread
        if spread is not None and spread.rows > 1:
            raise ValueError(
                "rows are divided among devices, each with a pool of its own: a prefix tree goes "
                "with a mesh of tensor alone"
            )
        assert self.kinds

    @functools.cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of layers in pages."""
        cache, found = self.shapes(1), []
        for number, held in enumerate(cache.layers):
            if held.policy.paging is None and held.policy.layout.window is None:
                raise ValueError(
                    f"layer {number} keeps whole texts outside of pages, {held.policy.layout}: a "
                    "prefix tree can share pages, and windows"
                )
        for paging in cache.pagings:
            entries = tuple(n for n, x in enumerate(cache.layers) if x.policy.paging == paging)
            bodies = [(cache.layers[n].keys, cache.layers[n].values) for n in entries]
            found.append(Kind(paging, entries, tree_bytes(bodies) // (paging.layout.pool or 1)))
        return tuple(found)

    @functools.cached_property
    def unit(self) -> int:
        """Tokens of a node: whole pages of every kind."""
        return math.lcm(*(kind.page for kind in self.kinds))

    @functools.cached_property
    def grid(self) -> int:
        """Of what hits are a multiple."""
        return math.lcm(self.unit, self.prefill_chunk) if self.exact_prefix else self.unit

    @functools.cached_property
    def stateful(self) -> bool:
        """Whether rows have more than full pages, without which they can't go on."""
        rows = tree_bytes([own(held) for held in self.shapes(1).layers])
        return bool(rows) or any(kind.moves for kind in self.kinds)

    @functools.cached_property
    def state_bytes(self) -> int:
        """What that takes, of a row."""
        return state_bytes(self.shapes(1), self.kinds)

    def stops(self, hit: int, known: int, tokens: int) -> set[int]:
        """Where the state of a prompt is to be taken, which goes on behind a hit and of which other
        texts have what is known: at the ends of chunks where it ends, where others leave it, and
        every so many pages."""
        if not self.stateful:
            return set()
        chunk, every = self.prefill_chunk, self.checkpoint_every * self.unit
        whole = [n for n in range(hit + chunk, tokens + 1, chunk) if n % self.unit == 0]
        found = {n for n in whole if n // every > (n - chunk) // every}
        return found | {*whole[-1:], *[n for n in whole if n <= known][-1:]}

    def shapes(self, rows: int) -> KVCache:
        """The cache of so many rows, as shapes."""
        known: dict[int, KVCache] = self.__dict__.setdefault("_shapes", {})
        if rows not in known:
            known[rows] = abstract_cache(
                self.config, list(self.policies), batch=rows, max_len=self.max_len, mesh=self.mesh
            )
        return known[rows]


def in_pages(choice: PolicyChoice, config: Any) -> tuple[Any, ...]:
    """The policies of all layers, of a tree.

    Raises:
      ValueError: if it moves layers as it runs, or none is in pages.
    """
    policies = per_layer(choice, config)
    if budget_of(choice) is not None:
        raise ValueError(
            "policy('auto') moves layers as it runs: give a prefix tree layers in pages, whose old "
            "pages go to the host by themselves"
        )
    if not any(paged(each.layout) for each in policies):
        raise ValueError(
            "a prefix tree keeps pages: give it a policy with layers in pages, such as 'paged'"
        )
    return policies


def with_pages(policies: Sequence[Any], pages: int) -> tuple[Any, ...]:
    """With pools of so many pages, where nothing else was said."""
    found = []
    for each in policies:
        layout = paged(each.layout)
        if layout is not None and layout.pages is None:
            each = replace(each, layout=replace(layout, pages=pages))
        found.append(each)
    return tuple(found)
