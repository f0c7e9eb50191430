"""A cache policy: one layout, a codec for keys and one for values, and one placement."""

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvjax.codecs import MULTIPLE, Codec, Raw
from kvjax.core.validation import normalize_int_field
from kvjax.layouts import Dense, Layout, Split, paged
from kvjax.paging.allocator import PageGroup
from kvjax.placement.device import Device
from kvjax.placement.tpu import block_alignment, fold_of, orders_of, slot_alignment, subblocks_of
from kvjax.policies.model_config import layer_windows


@dataclass(frozen=True)
class CachePolicy:
    """How a layer's cache is laid out, stored and placed: three choices that do not interfere.

    Where a codec encodes whole blocks, the newest tokens stand before them in a raw tail: the
    query at position ``p`` sees its own block of ``block`` tokens and the ``recent`` blocks before
    it raw, and everything older through the codec, however the text was cut into calls. With
    ``prefill="exact"`` a call sees all of its own tokens raw, as in Transformers and KIVI, and its
    logits depend on the cut.

    ``raw``: the codecs of the tail's keys and values; ``resolve`` sets them, None without a tail.
    """

    layout: Any = field(default_factory=Dense)
    keys: Codec = field(default_factory=Raw)
    values: Codec = field(default_factory=Raw)
    placement: Device = field(default_factory=Device)
    block: int = 64
    recent: int = 1
    prefill: str = "sight"
    raw: tuple[Raw, Raw] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = {
            "layout": "resolve", "keys": "blockwise", "values": "blockwise", "placement": "put",
        }  # fmt: skip
        for part, needed in parts.items():
            given = getattr(self, part)
            if isinstance(given, type) or not hasattr(given, needed):
                raise ValueError(
                    f"{part} of a CachePolicy is {given!r}: give an object, such as "
                    f"{CachePolicy.__dataclass_fields__[part].default_factory()!r}"
                )
        normalize_int_field(self, "recent", 0)
        if normalize_int_field(self, "block", 1) % MULTIPLE:
            raise ValueError(f"block={self.block}: packed codes need a multiple of {MULTIPLE}")
        if self.prefill not in ("sight", "exact"):
            raise ValueError(f"prefill={self.prefill!r}: there are 'sight' and 'exact'")

    @property
    def has_tail(self) -> bool:
        """Whether tokens stand in a raw tail before they are encoded, or moved, in blocks."""
        return self.keys.blockwise or self.values.blockwise or self.placement.needs_tail

    @property
    def marked(self) -> int:
        """Slots of a layout beyond which ``written`` tells what a conversion did not have; of pages
        the same in any."""
        if paged(self.layout):
            return 0
        return self.layout.slots if self.has_tail else self.stored_layout.slots

    @property
    def unit(self) -> int:
        """Tokens of a unit of what the codecs keep, on axis 2."""
        return self.block if self.has_tail else 1

    def subblocks(self, head_dim: int) -> int:
        """Runs of a block's tokens that a kernel reads one after the other, of both codecs."""
        return max(subblocks_of(x) for x in (self.keys, self.values)) * fold_of(head_dim)

    def orders(self, kv_heads: int, head_dim: int) -> tuple[Any, Any]:
        """In which order the arrays of keys and of values are kept: pytrees like their stores."""
        placement, block = self.placement, self.block if self.has_tail else None
        far, spread = placement.needs_tail, placement.spread
        apart = spread is not None and spread.heads > 1
        settings = block, head_dim, self.subblocks(head_dim), kv_heads if far else None, apart
        platform = placement.platform()
        first, second = (orders_of(platform, x, *settings) for x in (self.keys, self.values))
        return first, second

    @property
    def grain(self) -> int:
        """Of what the slots are a multiple, where the placement's arrays are."""
        return slot_alignment(self.placement.platform())

    @property
    def split(self) -> Split:
        """Which tokens stand in the tail, and which in the body; of a policy that has a tail."""
        blocks = block_alignment(self.placement.platform(), self.layout.slots, self.block)
        parts = self.placement.parts * blocks
        return Split(self.layout, self.block, self.recent, parts, self.grain)

    @property
    def stored_layout(self) -> Layout:
        """The layout of what the codecs keep: of tokens, or behind a tail of blocks; with a few
        more where that many devices can't have the same number each."""
        if paged(self.layout) and self.placement.parts > 1:
            raise ValueError(
                "pages can't be divided along sequence: give the mesh data and tensor alone, or a "
                "layout whose slots are a row's own"
            )
        if self.has_tail:
            body: Layout = self.split.body
            return body
        return self.layout.rounded(self.placement.parts * self.grain)

    @property
    def page_group(self) -> PageGroup | None:
        """By which tables its slots are found, where they are in pages."""
        layout = paged(self.layout) and paged(self.stored_layout)
        return None if layout is None else PageGroup(layout, self.split if self.has_tail else None)

    @property
    def storage_key(self) -> Any:
        """What tells whether rows of two policies go on alike, their layouts aside: the codecs,
        and, where they encode blocks, what queries see through them."""
        blockwise = self.keys.blockwise or self.values.blockwise
        sight = (self.block, self.recent, self.prefill) if blockwise else None
        return self.keys, self.values, sight

    @property
    def max_rewind(self) -> int | None:
        """How many of its newest tokens a row can forget at any time; None for all."""
        own = None if self.layout.chunk is None else self.layout.chunk - 1
        if not self.has_tail:
            return own
        return self.block if own is None else min(self.block, own)

    def rewindable(self, length: Any, written: Any) -> Any:
        """int32[batch]: how many of its newest tokens each row can forget now."""
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
        """Fix what was left open: from the capacity, the layer's own window, the model's dtype
        (``values_dtype`` where values have another), the platform, and how many rows there are."""
        platform = self.placement.platform()
        back = max(16, self.block) if self.has_tail else 16
        layout: Layout = self.layout.resolve(max_len, window, initial_len, back)
        keys = self.keys.resolve(model_dtype, platform)
        values = self.values.resolve(values_dtype or model_dtype, platform)
        place = self.placement.with_target()
        fixed = replace(self, layout=layout, keys=keys, values=values, placement=place)._with_raw()
        return fixed.with_pool(rows)

    def with_pool(self, rows: int) -> "CachePolicy":
        """With a pool for so many rows, where its slots are in pages; resolved but for that."""
        layout, spread, page_group = paged(self.layout), self.placement.spread, self.page_group
        if layout is None or page_group is None:
            return self
        pages = rows * page_group.layout.columns if layout.pages is None else layout.pages
        pages = max(pages, layout.pool or 0)  # one that rows have joined, or left
        shares = 1 if spread is None else spread.rows
        return replace(self, layout=replace(layout, pool=pages + -pages % shares))

    def with_placement(self, placement: Device) -> "CachePolicy":
        """A resolved policy, with its body in another place of the same devices."""
        return replace(self, placement=placement.like(self.placement))._with_raw()

    def _with_raw(self) -> "CachePolicy":
        """With the codecs of the tail, of a policy whose own are resolved."""
        raw, platform = None, self.placement.platform()
        if self.has_tail:
            raw = tuple(Raw(x.dtype).resolve(None, platform) for x in (self.keys, self.values))
        return replace(self, raw=raw)

    def per_layer(self, config: Any) -> tuple["CachePolicy", ...]:
        """The same for every layer."""
        return (self,) * config.num_hidden_layers


@dataclass(frozen=True)
class Hybrid:
    """One policy for layers that see everything, another for those with a window of their own.

    Which is which, ``layer_windows`` says.
    """

    full: CachePolicy
    sliding: CachePolicy

    def __post_init__(self) -> None:
        for given in (self.full, self.sliding):
            if not isinstance(given, CachePolicy):
                raise ValueError(f"Hybrid is of two CachePolicy objects, not of a {given!r:.80}")

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]:
        """A policy a layer."""
        windows = layer_windows(config)
        return tuple(self.full if window is None else self.sliding for window in windows)


class PerLayer(Protocol):
    """What can say the policy of each layer of a model."""

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]: ...
