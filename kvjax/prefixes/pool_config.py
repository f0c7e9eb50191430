"""What a tree of prefixes has fixed: the model's shape, the policies, and the grid of positions."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.reporting import parse_bytes
from kvjax.core.validation import INT32_MAX, as_bool, as_int, as_optional_int
from kvjax.layouts import paged
from kvjax.memory.sizes import abstract_cache, has_encoder
from kvjax.policies.model_config import decoder_config, position_limit, scanned
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer
from kvjax.prefixes.checkpoints import checkpoint_bytes, row_arrays
from kvjax.prefixes.pool import CacheGroup


@dataclass(frozen=True, eq=False)
class PoolConfig:
    """What texts of one tree have in common; ``policies``: of all layers, with their pages.

    ``config``, ``mesh``: of the model. The others are those of ``PrefixTree``.

    Raises:
      ValueError: if a layer keeps a whole text outside of pages, or rows are divided among devices.
    """

    model_config: Any
    mesh: Any
    policies: tuple[Any, ...]
    max_len: int
    prefill_chunk: int
    exact_prefix: bool
    checkpoint_every: int
    rotary_len: int | None = None

    def __post_init__(self) -> None:
        spread = self.cache_shapes(1).spread
        if spread is not None and spread.rows > 1:
            raise ValueError(
                "rows are divided among devices, each with a pool of its own: a prefix tree goes "
                "with a mesh of tensor alone"
            )
        assert self.groups

    @functools.cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The kinds of layers in pages."""
        cache, found = self.cache_shapes(1), []
        for number, held in enumerate(cache.layers):
            if held.policy.page_group is None and held.policy.layout.window is None:
                raise ValueError(
                    f"layer {number} keeps whole texts outside of pages, {held.policy.layout}: a "
                    "prefix tree can share pages, and windows"
                )
        for page_group in cache.page_groups:
            entries = tuple(
                n for n, x in enumerate(cache.layers) if x.policy.page_group == page_group
            )
            bodies = [(cache.layers[n].keys, cache.layers[n].values) for n in entries]
            found.append(
                CacheGroup(page_group, entries, tree_bytes(bodies) // (page_group.layout.pool or 1))
            )
        return tuple(found)

    @functools.cached_property
    def node_tokens(self) -> int:
        """Tokens of a node: whole pages of every kind."""
        return math.lcm(*(group.page_tokens for group in self.groups))

    @functools.cached_property
    def hit_multiple(self) -> int:
        """Of what hits are a multiple."""
        if not self.exact_prefix:
            return self.node_tokens
        return math.lcm(self.node_tokens, self.prefill_chunk)

    @functools.cached_property
    def needs_checkpoints(self) -> bool:
        """Whether rows have more than full pages, without which they can't go on."""
        rows = tree_bytes([row_arrays(held) for held in self.cache_shapes(1).layers])
        return bool(rows) or any(group.windowed for group in self.groups)

    @functools.cached_property
    def checkpoint_bytes(self) -> int:
        """What that takes, of a row."""
        return checkpoint_bytes(self.cache_shapes(1), self.groups)

    def checkpoint_positions(self, hit: int, known: int, tokens: int) -> set[int]:
        """Where the state of a prompt is to be taken, which goes on behind a hit and of which other
        texts have what is known: at the ends of chunks where it ends, where the same prompt can be
        gone on from, where others leave it, and every so many pages."""
        if not self.needs_checkpoints:
            return set()
        chunk, every = self.prefill_chunk, self.checkpoint_every * self.node_tokens
        whole = [n for n in range(hit + chunk, tokens + 1, chunk) if n % self.node_tokens == 0]
        found = {n for n in whole if n // every > (n - chunk) // every}
        inside, left = ([n for n in whole if n <= most] for most in (tokens - 1, known))
        return found | {*whole[-1:], *inside[-1:], *left[-1:]}

    def cache_shapes(self, rows: int) -> KVCache:
        """The cache of so many rows, as shapes."""
        known: dict[int, KVCache] = self.__dict__.setdefault("_shapes", {})
        if rows not in known:
            known[rows] = abstract_cache(
                self.model_config,
                list(self.policies),
                batch=rows,
                max_len=self.max_len,
                mesh=self.mesh,
                rotary_len=self.rotary_len,
            )
        return known[rows]


def make_pool_config(
    lm: Any,
    policy: PolicyChoice,
    pages: int | None,
    memory: int | str | None,
    max_len: int | None,
    prefill_chunk: int,
    exact_prefix: bool,
    checkpoint_every: int,
    rotary_len: int | None = None,
) -> PoolConfig:
    """The terms of a tree, by its arguments; see ``PrefixTree``.

    Raises:
      ValueError: as it says.
    """
    if scanned(lm.config):
        raise ValueError(
            "trees of prefixes, and engines, keep what rows have a layer at a time: a model whose "
            "config says stacked can't be lent it"
        )
    if has_encoder(lm):
        raise ValueError(
            "trees of prefixes, and engines, tell texts by their tokens, and what this model's "
            "decoder writes goes by what its encoder has read besides"
        )
    most = as_optional_int("max_len", max_len, 1, INT32_MAX)
    limit = position_limit(decoder_config(lm.config))
    most = limit if most is None else most
    if most is None:
        raise ValueError("this model's positions have no end: give max_len=")
    if limit is not None and most > limit:
        raise ValueError(f"max_len is {most}, but the model has {limit} positions")
    exact_prefix = as_bool("exact_prefix", exact_prefix)
    policies = _in_pages(policy, lm.config)
    found = PoolConfig(
        lm.config,
        lm.mesh,
        _with_pages(policies, 1),
        most,
        as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX),
        exact_prefix,
        as_int("checkpoint_every", checkpoint_every, 1),
        as_optional_int("rotary_len", rotary_len, 1),
    )
    # Longer texts would be turned by other frequencies.
    found = replace(found, max_len=min(most, found.cache_shapes(1).max_len))
    room = None if memory is None else in_bytes("memory", memory)
    return replace(found, policies=_pages_for(found, policies, pages, room))


def in_bytes(name: str, size: int | str) -> int:
    """A number of bytes, which may be given as text."""
    return parse_bytes(size) if isinstance(size, str) else as_int(name, size, 0)


def _in_pages(choice: PolicyChoice, config: Any) -> tuple[Any, ...]:
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


def _pages_for(
    config: PoolConfig, policies: Sequence[Any], pages: int | None, memory: int | None
) -> tuple[Any, ...]:
    """With pools of so many pages, or of as many as so many bytes hold.

    Raises:
      ValueError: if neither was given, or both, or the policies say it themselves; if there is no
        page.
    """
    layouts = [paged(each.layout) for each in policies]
    said = [layout.pages is not None for layout in layouts if layout is not None]
    if any(said):
        if not all(said) or pages is not None or memory is not None:
            raise ValueError(
                "the policy names the pages of its pools: let it name those of all, and leave "
                "pages= and memory= out; or give one of these alone"
            )
        return tuple(policies)
    if (pages is None) == (memory is None):
        raise ValueError("give pages=, or memory= in bytes")
    if memory is not None:
        page = sum(group.page_bytes for group in config.groups)
        pages = memory // page
        if not pages:
            raise ValueError(f"memory is {memory} bytes, and a page of all layers takes {page}")
    return _with_pages(policies, as_int("pages", pages, 1))


def _with_pages(policies: Sequence[Any], pages: int) -> tuple[Any, ...]:
    """With pools of so many pages, where nothing else was said."""
    found = []
    for each in policies:
        layout = paged(each.layout)
        if layout is not None and layout.pages is None:
            each = replace(each, layout=replace(layout, pages=pages))
        found.append(each)
    return tuple(found)
