"""The fixed configuration of a prefix cache: model shape, policies, pools, and granularity of
hits."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.reporting import parse_bytes
from kvjax.core.validation import INT32_MAX, ArgumentError, as_bool, as_int, as_optional_int
from kvjax.layouts import as_paged
from kvjax.memory.sizes import LoadedModel, abstract_cache, has_encoder
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import CacheShape, decoder_config, position_limit, scanned
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer
from kvjax.prefixes.checkpoints import checkpoint_bytes, row_arrays
from kvjax.prefixes.pool import CacheGroup


@dataclass(frozen=True, eq=False)
class PoolConfig:
    """The settings that all sequences of one prefix cache have in common.

    ``model_config`` and ``mesh`` are the model's. ``policies`` has one policy per layer, with the
    number of pages of its pool. The other fields are arguments of ``PrefixTree``.

    Raises:
      ValueError: if a layer keeps whole sequences outside of pages, or rows are split over devices.
    """

    model_config: CacheShape
    mesh: Mesh | None
    policies: tuple[CachePolicy, ...]
    max_len: int
    prefill_chunk: int
    exact_prefix: bool
    checkpoint_every: int
    rotary_len: int | None = None

    def __post_init__(self) -> None:
        mesh_sharding = self.cache_shapes(1).mesh_sharding
        if mesh_sharding is not None and mesh_sharding.rows > 1:
            raise ValueError(
                f"the mesh splits rows over {mesh_sharding.rows} devices, each with its own pool; "
                "a prefix tree needs a mesh with the tensor axis alone"
            )
        assert self.groups

    @functools.cached_property
    def groups(self) -> tuple[CacheGroup, ...]:
        """The groups of paged layers."""
        cache, groups = self.cache_shapes(1), []
        for number, layer in enumerate(cache.layers):
            if layer.policy.page_group is None and layer.policy.layout.window is None:
                raise ValueError(
                    f"layer {number} keeps whole sequences outside of pages, in "
                    f"{layer.policy.layout}; a prefix tree needs layers with pages or a window"
                )
        for page_group in cache.page_groups:
            layers = tuple(
                n for n, layer in enumerate(cache.layers) if layer.policy.page_group == page_group
            )
            bodies = [(cache.layers[n].keys, cache.layers[n].values) for n in layers]
            page_bytes = tree_bytes(bodies) // (page_group.layout.pool or 1)
            groups.append(CacheGroup(page_group, layers, page_bytes))
        return tuple(groups)

    @functools.cached_property
    def node_tokens(self) -> int:
        """The number of tokens of a node of the radix tree. They fill whole pages of every
        group."""
        return math.lcm(*(group.page_tokens for group in self.groups))

    @functools.cached_property
    def hit_multiple(self) -> int:
        """The granularity of hits. The length of every hit is a multiple of this number of
        tokens."""
        if not self.exact_prefix:
            return self.node_tokens
        return math.lcm(self.node_tokens, self.prefill_chunk)

    @functools.cached_property
    def needs_checkpoints(self) -> bool:
        """Whether a sequence can be resumed only where a checkpoint was taken."""
        rows = tree_bytes([row_arrays(layer) for layer in self.cache_shapes(1).layers])
        return bool(rows) or any(group.windowed for group in self.groups)

    @functools.cached_property
    def checkpoint_bytes(self) -> int:
        """The bytes of one checkpoint."""
        return checkpoint_bytes(self.cache_shapes(1), self.groups)

    def checkpoint_positions(self, hit: int, matched: int, tokens: int) -> set[int]:
        """Choose the positions at which checkpoints of a prompt are taken. Each is the end of a
        prefill chunk.

        They are the end of the prompt's last chunk, the last position from which the same prompt
        could be resumed, the last position within the common prefix with a cached sequence, and one
        position every ``checkpoint_every`` nodes.

        Args:
          hit: the number of cached tokens from which the prompt is resumed.
          matched: the number of tokens that the prompt has in common with a cached sequence.
          tokens: the length of the prompt.
        """
        if not self.needs_checkpoints:
            return set()
        chunk, every = self.prefill_chunk, self.checkpoint_every * self.node_tokens
        ends = [n for n in range(hit + chunk, tokens + 1, chunk) if n % self.node_tokens == 0]
        positions = {n for n in ends if n // every > (n - chunk) // every}
        resumable = [n for n in ends if n < tokens]  # one token must be left to compute
        shared = [n for n in ends if n <= matched]
        return positions | {*ends[-1:], *resumable[-1:], *shared[-1:]}

    def cache_shapes(self, rows: int) -> KVCache:
        """Return the shapes of a cache with ``rows`` rows."""
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
    lm: LoadedModel,
    policy: PolicyChoice,
    pages: int | None,
    memory: int | str | None,
    max_len: int | None,
    prefill_chunk: int,
    exact_prefix: bool,
    checkpoint_every: int,
    rotary_len: int | None = None,
) -> PoolConfig:
    """Check the arguments of a ``PrefixTree`` or an engine, and size the pools.

    Raises:
      ValueError: for the same reasons as ``PrefixTree``.
    """
    if scanned(lm.config):
        raise ValueError(
            "prefix trees and engines need a cache with separate layers, but the model's config "
            "has stacked=True"
        )
    if has_encoder(lm):
        raise ValueError(
            "prefix trees and engines identify sequences by their tokens, but this model's decoder "
            "also depends on its encoder's input"
        )
    limit = position_limit(decoder_config(lm.config))
    length = as_optional_int("max_len", max_len, 1, INT32_MAX)
    length = limit if length is None else length
    if length is None:
        raise ValueError("the model has no position limit; give max_len=")
    if limit is not None and length > limit:
        raise ArgumentError(
            f"max_len is {length}, but the model has {limit} positions", param="max_len"
        )
    exact_prefix = as_bool("exact_prefix", exact_prefix)
    policies = _paged_policies(policy, lm.config)
    config = PoolConfig(
        lm.config,
        lm.mesh,
        _with_pages(policies, 1),
        length,
        as_int("prefill_chunk", prefill_chunk, 1, INT32_MAX),
        exact_prefix,
        as_int("checkpoint_every", checkpoint_every, 1),
        as_optional_int("rotary_len", rotary_len, 1),
    )
    # Some rotary tables depend on a length. Longer sequences would need different frequencies.
    config = replace(config, max_len=min(length, config.cache_shapes(1).max_len))
    memory_bytes = None if memory is None else in_bytes("memory", memory)
    return replace(config, policies=_size_pools(config, policies, pages, memory_bytes))


def in_bytes(name: str, size: int | str) -> int:
    """Convert a size, an integer or a string such as ``"2GiB"``, to a number of bytes."""
    return parse_bytes(size) if isinstance(size, str) else as_int(name, size, 0)


def _paged_policies(choice: PolicyChoice, config: CacheShape) -> tuple[CachePolicy, ...]:
    """Return the policy of each layer.

    Raises:
      ValueError: if the choice moves layers while it runs, or no layer is paged.
    """
    policies = per_layer(choice, config)
    if budget_of(choice) is not None:
        raise ValueError(
            "policy('auto') moves layers while it runs; give a policy with paged layers, whose "
            "unused pages are swapped out to the host"
        )
    if not any(as_paged(policy.layout) for policy in policies):
        raise ValueError("no layer is paged; give a policy with paged layers, such as 'paged'")
    return policies


def _size_pools(
    config: PoolConfig, policies: Sequence[CachePolicy], pages: int | None, memory: int | None
) -> tuple[CachePolicy, ...]:
    """Return policies whose pools have ``pages`` pages, or as many as fit in ``memory`` bytes.

    Raises:
      ValueError: if the number of pages is missing, given twice, or 0.
    """
    layouts = [as_paged(policy.layout) for policy in policies]
    sized = [layout.pages is not None for layout in layouts if layout is not None]
    if any(sized):
        if not all(sized) or pages is not None or memory is not None:
            raise ValueError(
                "the policy sets the pages of some pools; set the pages of all pools in the "
                "policy, or give either pages= or memory= instead"
            )
        return tuple(policies)
    if (pages is None) == (memory is None):
        raise ValueError("give either pages=, or memory= in bytes")
    if memory is not None:
        page_bytes = sum(group.page_bytes for group in config.groups)
        pages = memory // page_bytes
        if not pages:
            raise ArgumentError(
                f"memory is {memory} bytes, but one page of all layers takes {page_bytes}",
                param="memory",
            )
    return _with_pages(policies, as_int("pages", pages, 1))


def _with_pages(policies: Sequence[CachePolicy], pages: int) -> tuple[CachePolicy, ...]:
    """Return policies whose pools have ``pages`` pages, unless a policy sets its own number."""
    sized = []
    for policy in policies:
        layout = as_paged(policy.layout)
        if layout is not None and layout.pages is None:
            policy = replace(policy, layout=replace(layout, pages=pages))
        sized.append(policy)
    return tuple(sized)
