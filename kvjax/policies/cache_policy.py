"""A cache policy: one layout, one codec each for keys and values, and one placement."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvjax.codecs import MULTIPLE, Codec, Raw
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, normalize_int_field
from kvjax.layouts import Dense, Layout, Split, as_paged
from kvjax.paging.allocator import PageGroup
from kvjax.placement.device import Device
from kvjax.placement.order import (
    Orders,
    block_alignment,
    fold_of,
    orders_of,
    slot_alignment,
    subblocks_of,
)
from kvjax.policies.model_config import CacheShape, layer_windows


@dataclass(frozen=True)
class CachePolicy:
    """How the cache of a layer is laid out, encoded and placed: three independent choices.

    If a codec encodes whole blocks, the newest tokens are first kept raw (unquantized), in a tail.
    The query at position ``p`` sees its own block of ``block`` tokens and the last ``recent``
    blocks before it raw, and everything older through the codec, no matter how the tokens are
    divided into calls (forward passes). With ``prefill="exact"``, the queries of a call see all
    tokens of the same call raw, as in Transformers and KIVI. The logits then depend on how the
    tokens are divided into calls.

    With ``sinks``, the first tokens of a row stay raw too, in the tail. Many models give much of
    their attention to the first token (an attention sink, Xiao et al., arXiv:2309.17453), and its
    keys are much larger than others. A ring has its own ``sinks`` instead.

    ``raw`` has the codecs of the tail's keys and values. ``resolve`` sets it. Without a tail, it is
    None.

    Example:
      ```python
      from kvjax.codecs import Int4, Int8

      policy = kvjax.CachePolicy(kvjax.layouts.Dense(), keys=Int8(), values=Int4())
      cache = kvjax.init_cache(lm.config, policy, max_len=64)
      ```
    """

    layout: Any = field(default_factory=Dense)
    keys: Codec = field(default_factory=Raw)
    values: Codec = field(default_factory=Raw)
    placement: Device = field(default_factory=Device)
    block: int = 64
    recent: int = 1
    prefill: str = "sight"
    sinks: int = 0
    raw: tuple[Raw, Raw] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        members = dict(layout="resolve", keys="blockwise", values="blockwise", placement="put")
        for part, member in members.items():
            value = getattr(self, part)
            if isinstance(value, type) or not hasattr(value, member):
                raise ValueError(
                    f"{part} of a CachePolicy is {value!r}: give an object, such as "
                    f"{CachePolicy.__dataclass_fields__[part].default_factory()!r}"
                )
        normalize_int_field(self, "recent", 0)
        normalize_int_field(self, "sinks", 0)
        if normalize_int_field(self, "block", 1) % MULTIPLE:
            raise ArgumentError(
                f"block={self.block}: packed codes need a multiple of {MULTIPLE}", param="block"
            )
        if self.prefill not in ("sight", "exact"):
            raise ArgumentError(
                f"prefill={self.prefill!r}: use 'sight' or 'exact'", param="prefill"
            )

    @property
    def has_tail(self) -> bool:
        """Whether the newest tokens are kept in a raw tail until a block of them is encoded or
        moved to the host."""
        return self.keys.blockwise or self.values.blockwise or self.placement.needs_tail

    @property
    def mark_base(self) -> int:
        """In a layout that can grow, the highest value of ``written`` in normal operation. A higher
        value also records that a conversion could not supply some tokens; see ``Layout.hiding``.
        With pages it is 0, because growing does not change ``written``."""
        if as_paged(self.layout):
            return 0
        return self.layout.slots if self.has_tail else self.stored_layout.slots

    @property
    def unit(self) -> int:
        """Tokens per unit of the body's arrays: ``block`` with a tail, otherwise 1."""
        return self.block if self.has_tail else 1

    def subblocks(self, head_dim: int) -> int:
        """Return the number of subblocks of a block that a kernel reads one after another. Keys and
        values use the same number: the larger of their codecs' two numbers."""
        return max(subblocks_of(x) for x in (self.keys, self.values)) * fold_of(head_dim)

    def orders(self, kv_heads: int, head_dim: int) -> tuple[Orders, Orders]:
        """Return how the arrays of keys and of values are arranged in memory. The two pytrees have
        the structure of the stores, with an ``Order`` for each array."""
        placement, block = self.placement, self.block if self.has_tail else None
        far, mesh_sharding = placement.needs_tail, placement.mesh_sharding
        heads_divided = mesh_sharding is not None and mesh_sharding.heads > 1
        heads = kv_heads if far else None
        settings = block, head_dim, self.subblocks(head_dim), heads, heads_divided
        platform = placement.platform()
        keys, values = (orders_of(platform, x, *settings) for x in (self.keys, self.values))
        return keys, values

    @property
    def grain(self) -> int:
        """The number of slots is a multiple of this number, which depends on the placement's
        platform."""
        return slot_alignment(self.placement.platform())

    @property
    def split(self) -> Split:
        """How tokens are divided between tail and body, for a policy with a tail."""
        blocks = block_alignment(self.placement.platform(), self.layout.slots, self.block)
        parts = self.placement.parts * blocks
        return Split(self.layout, self.block, self.recent, parts, self.grain, sinks=self.sinks)

    @property
    def stored_layout(self) -> Layout:
        """The layout of the arrays that the codecs fill. Its slots contain tokens, or blocks if
        there is a tail. The number of slots is rounded up so that all devices have equally many."""
        if as_paged(self.layout) and self.placement.parts > 1:
            raise ValueError(
                "pages can't be divided along sequence: use a mesh with only data and tensor, or a "
                "layout without pages"
            )
        if self.has_tail:
            body: Layout = self.split.body
            return body
        return self.layout.rounded(self.placement.parts * self.grain)

    @property
    def page_group(self) -> PageGroup | None:
        """The layer's page group; None if slots are not in pages. Layers with equal page groups
        share a page table."""
        layout = as_paged(self.layout) and as_paged(self.stored_layout)
        # Pages do not depend on which first tokens are raw.
        split = replace(self.split, sinks=0) if self.has_tail else None
        return None if layout is None else PageGroup(layout, split)

    @property
    def storage_key(self) -> tuple[Codec, Codec, tuple[int, int, str, int] | None]:
        """A key that is equal for policies that store the same numbers, in any layout. It contains
        the codecs and, for blockwise codecs, the settings that determine which tokens queries see
        raw."""
        blockwise = self.keys.blockwise or self.values.blockwise
        sight = (self.block, self.recent, self.prefill, self.sinks) if blockwise else None
        return self.keys, self.values, sight

    @property
    def max_rewind(self) -> int | None:
        """The number of newest tokens that a row can always remove; None if it can remove all."""
        own = None if self.layout.chunk is None else self.layout.chunk - 1
        if not self.has_tail:
            return own
        return self.block if own is None else min(self.block, own)

    def rewindable(self, length: Array, written: Array) -> Array:
        """Return the number of newest tokens that each row can remove, int32[batch]; see
        ``Layout.rewindable``."""
        return (self.split if self.has_tail else self.layout).rewindable(length, written)

    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        model_dtype: str | None,
        *,
        values_dtype: str | None = None,
        initial_len: int | None = None,
        rows: int = 1,
    ) -> "CachePolicy":
        """Return the policy of one layer, with all settings resolved.

        Args:
          max_len, window, initial_len: see ``LayoutSpec.resolve``.
          model_dtype: the dtype of keys and values, unless the codecs have their own.
          values_dtype: the dtype of values, if it differs from the dtype of keys.
          rows: number of rows of the cache.
        """
        platform = self.placement.platform()
        min_rewind = max(16, self.block) if self.has_tail else 16
        layout: Layout = self.layout.resolve(max_len, window, initial_len, min_rewind)
        keys = self.keys.resolve(model_dtype, platform)
        values = self.values.resolve(values_dtype or model_dtype, platform)
        placement = self.placement.with_target()
        resolved = replace(self, layout=layout, keys=keys, values=values, placement=placement)
        return resolved._with_raw().with_pool(rows)

    def with_pool(self, rows: int) -> "CachePolicy":
        """Return this policy with a pool for ``rows`` rows, if slots are in pages. All other
        settings must already be resolved."""
        layout = as_paged(self.layout)
        mesh_sharding = self.placement.mesh_sharding
        page_group = self.page_group
        if layout is None or page_group is None:
            return self
        pages = rows * page_group.layout.columns if layout.pages is None else layout.pages
        pages = max(pages, layout.pool or 0)  # pools never shrink
        shards = 1 if mesh_sharding is None else mesh_sharding.rows
        return replace(self, layout=replace(layout, pool=pages + -pages % shards))

    def with_placement(self, placement: Device) -> "CachePolicy":
        """Return this resolved policy with another placement for its body, on the same devices."""
        return replace(self, placement=placement.like(self.placement))._with_raw()

    def _with_raw(self) -> "CachePolicy":
        """Return this policy with the tail's codecs set. Its own codecs must already be
        resolved."""
        raw, platform = None, self.placement.platform()
        if self.has_tail:
            raw = tuple(Raw(x.dtype).resolve(None, platform) for x in (self.keys, self.values))
        return replace(self, raw=raw)

    def per_layer(self, config: CacheShape) -> tuple["CachePolicy", ...]:
        """Return this policy once per layer."""
        return (self,) * config.num_hidden_layers


@dataclass(frozen=True)
class Hybrid:
    """One policy for layers with full attention, another for layers with a window.

    The model's config gives the windows.

    Example:
      ```python
      ring = kvjax.CachePolicy(kvjax.layouts.Ring())
      policy = kvjax.policies.Hybrid(full=kvjax.CachePolicy(), sliding=ring)
      cache = kvjax.init_cache(lm.config, policy, max_len=64)
      ```
    """

    full: CachePolicy
    sliding: CachePolicy

    def __post_init__(self) -> None:
        for policy in (self.full, self.sliding):
            if not isinstance(policy, CachePolicy):
                raise ValueError(f"Hybrid needs two CachePolicy objects, got {policy!r:.80}")

    def per_layer(self, config: CacheShape) -> tuple[CachePolicy, ...]:
        """Return one policy per layer."""
        windows = layer_windows(config)
        return tuple(self.full if window is None else self.sliding for window in windows)


class PerLayer(Protocol):
    """An object that chooses a policy for each layer of a model."""

    def per_layer(self, config: CacheShape) -> tuple[CachePolicy, ...]: ...
