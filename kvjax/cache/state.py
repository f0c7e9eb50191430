"""The state: an immutable pytree of arrays, a layer's and a model's."""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from kvjax.cache.layer import LayerCache
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.typing import Array, LayerNumber, PerRow, PerRowAndLayer
from kvjax.core.validation import as_int, is_traced
from kvjax.layouts import UNLIMITED
from kvjax.paging.allocator import PageAllocator, PageGroup
from kvjax.placement.device import Budget
from kvjax.placement.mesh import MeshSharding


@pytree_dataclass
class PendingAppend:
    """A call that has begun: its first ``append`` makes it, and ``advance`` ends it.

    ``count``: int32[batch], tokens that each row takes. ``requested``: int32[batch], tokens that
    each row was given; it takes none of them if its pool has too few pages. ``new``: tokens per
    row, including padding. ``entries``: indices of ``KVCache.layers`` that have been appended to.
    ``append_counts``: the same for stacks, int32[stack] each: how often each layer was appended to.
    """

    count: PerRow
    requested: PerRow
    new: int = static_field()
    entries: tuple[int, ...] = static_field()
    append_counts: tuple[Array, ...] = ()


@pytree_dataclass
class KVCache:
    """A model's cache.

    ``layers``: one ``LayerCache`` a layer, each with its own arrays; or one a stack, with those of
    all layers that are alike, and then ``stacks`` says of each layer of the model in which it is,
    and as which of its layers.
    ``length``: int32[batch], tokens that each row holds.
    ``written``: int32[batch, layers], the most that each row has ever held, for each of ``layers``:
    after a rewind it tells which slots hold tokens that are no longer part of the text.
    ``status``: int32[batch], what traced steps could not raise, as bits; see ``check``.
    ``pending``: the call whose tokens are being appended, None between calls.
    ``pools``: the page tables, one for each group of layers that share them (``page_groups``).
    ``sources``: for each layer of the model, which of ``layers`` it reads; None where every layer
    has its own.
    ``positions``: how many the model has, or texts whose keys are turned as these are; None where
    they do not end.
    ``rotary_len``: the length of text that its keys were turned for, where the model's rotary
    frequencies depend on it (dynamic, longrope); it stays when the cache grows.
    ``budget``: the memory that it keeps to when it grows (``make_room``), of ``policy("auto")``.
    """

    layers: tuple[LayerCache, ...]
    length: PerRow
    written: PerRowAndLayer
    status: PerRow
    sources: tuple[int, ...] | None = static_field(default=None)
    positions: int | None = static_field(default=None)
    rotary_len: int | None = static_field(default=None)
    budget: Budget | None = static_field(default=None)
    stacks: tuple[tuple[int, int], ...] | None = static_field(default=None)
    pending: PendingAppend | None = None
    pools: tuple[PageAllocator, ...] = ()

    @property
    def batch(self) -> int:
        """Rows."""
        return self.length.shape[0]

    @property
    def max_len(self) -> int:
        """Tokens that a row's text can have, before it must grow where it can."""
        limits = [self.positions, *(layer.policy.layout.limit for layer in self.layers)]
        return min((limit for limit in limits if limit is not None), default=UNLIMITED)

    @property
    def last_position(self) -> str:
        """Why a sequence can't be longer than ``positions``, as errors say it."""
        if self.positions == self.rotary_len:
            return f"its keys are turned for texts of rotary_len={self.positions} tokens"
        return f"the model has only {self.positions} positions"

    @property
    def spread(self) -> MeshSharding | None:
        """How it is spread over a mesh; None where it is on one device."""
        return self.layers[0].policy.placement.spread

    @property
    def chunk(self) -> int | None:
        """The most tokens that ``append`` takes in one call; None for any number."""
        chunks = (layer.policy.layout.chunk for layer in self.layers)
        return min((chunk for chunk in chunks if chunk is not None), default=None)

    @property
    def max_rewind(self) -> int | None:
        """How many of its newest tokens a row can forget at any time; None for all."""
        spans = (layer.policy.max_rewind for layer in self.layers)
        return min((span for span in spans if span is not None), default=None)

    @property
    def common_heads(self) -> int:
        """The greatest number of key-value heads that divides those of each layer."""
        return math.gcd(*(layer.kv_heads for layer in self.layers))

    @property
    def reach(self) -> int:
        """Positions that distances between queries and keys stay below: what rotary kinds that
        depend on the length go by."""
        if self.rotary_len is not None:
            return self.rotary_len
        return max(layer.policy.layout.reach for layer in self.layers)

    @property
    def grows_to(self) -> int | None:
        """Tokens that it may be grown to; None where no layer grows."""
        layouts = [layer.policy.layout for layer in self.layers]
        if all(layout.grows_to is None for layout in layouts):
            return None
        last = [layout.grows_to or layout.limit for layout in layouts]
        return min(limit for limit in (self.positions, *last) if limit is not None)

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The kinds of layers in pages, in the order of ``pools``."""
        kinds = (layer.policy.page_group for layer in self.layers)
        return tuple(dict.fromkeys(kind for kind in kinds if kind is not None))

    def table(self, entry: int, *, whole: bool = False) -> Array | None:
        """int32[batch, columns]: the pages of each row, of one of ``layers``; None where its slots
        are a row's own. ``whole``: as numbers of the whole pool, not of a device's share."""
        kind = self.layers[entry].policy.page_group
        if kind is None:
            return None
        pool = self.pools[self.page_groups.index(kind)]
        return pool.whole if whole else pool.table

    def at(self, number: LayerNumber) -> tuple[int, Array | None]:
        """Which of ``layers`` layer ``number`` of the model reads, and of a stack which one of its
        layers, int32[].

        Args:
          number: counted through the model; traced where all layers are one stack; or the number of
            a stack and, traced or not, that of a layer in it.

        Raises:
          ValueError: if there is no such layer, or it can't be told which one it is.
        """
        if self.stacks is not None:
            return self._in_stack(number, self.stacks)
        if isinstance(number, tuple):
            raise ValueError(
                f"layer {number}: the cache has no stacks, so a layer has a number of its own"
            )
        if is_traced(number):
            raise ValueError(
                "the number of a layer is traced: layers have policies of their own, so loop over "
                "them in Python, or make them one stack, for scan: init_cache(..., stacked=True)"
            )
        number = as_int("layer", number, 0)
        count = len(self.layers if self.sources is None else self.sources)
        if number >= count:
            raise ValueError(f"layer {number}: the cache has {count}, 0 the first")
        return (number if self.sources is None else self.sources[number]), None

    def _in_stack(
        self, number: LayerNumber, stacks: tuple[tuple[int, int], ...]
    ) -> tuple[int, Array]:
        """``at`` of a stacked cache."""
        if isinstance(number, tuple):
            if len(number) != 2:
                raise ValueError(f"a layer of a stack is (stack, number), got {number!r:.80}")
            entry = as_int("the number of a stack", number[0], 0)
            if entry >= len(self.layers):
                raise ValueError(f"stack {entry}: the cache has {len(self.layers)}, 0 the first")
            index, count = number[1], self.layers[entry].stack or 0
        elif is_traced(number):
            entry, index, count = 0, number, len(stacks)
            if len(self.layers) > 1:
                raise ValueError(
                    f"the number of a layer is traced, and the cache has {len(self.layers)} stacks "
                    "of layers that are not alike: name one as (stack, number of its layer)"
                )
        else:
            number = as_int("layer", number, 0)
            if number >= len(stacks):
                raise ValueError(f"layer {number}: the cache has {len(stacks)}, 0 the first")
            entry, index = stacks[number]
            count = self.layers[entry].stack or 0
        if not is_traced(index):
            index = as_int("layer", index, 0)
            if index >= count:
                raise ValueError(f"layer {index} of stack {entry}: it has {count}, 0 the first")
        index = jnp.asarray(index)
        if index.ndim or not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(f"the number of a layer must be a whole number, got {index}")
        return entry, index.astype(jnp.int32)

    def entry(self, number: LayerNumber) -> int:
        """Which of ``layers`` layer ``number`` of the model reads: see ``at``."""
        return self.at(number)[0]

    def layer(self, number: int) -> LayerCache:
        """What layer ``number`` of the model reads."""
        return self.layers[self.entry(number)]

    def __repr__(self) -> str:
        """What it is and how full, not the arrays."""
        policies = ", ".join(dict.fromkeys(repr(layer.policy) for layer in self.layers))
        count = len(self.layers if self.stacks is None else self.stacks)
        return f"KVCache({count} layers of {policies}, length={self.length})"


def with_rows(cache: KVCache, **changes: Any) -> KVCache:
    """A cache with other cursors or status; on a mesh every device has those of its rows, whatever
    they were computed from."""
    changed = replace(cache, **changes)
    if changed.spread is None:
        return changed
    rows = {
        name: getattr(changed, name) for name in ("length", "written", "status", "pending", "pools")
    }
    return replace(changed, **changed.layers[0].policy.placement.put(rows))
