"""`KVCache`: the cache of a model, an immutable pytree of arrays."""

import math
from dataclasses import replace

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
    """A call whose tokens are being appended. The first ``append`` begins it, ``advance`` ends it.

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
    """The cache of a model.

    ``layers``: one `LayerCache` per layer, or per stack of equal layers. ``stacks`` then gives, for
    each layer of the model, its stack and its number in that stack.

    ``length``: int32[batch], tokens that each row holds.

    ``written``: int32[batch, layers], the most tokens that each row has ever held, for each of
    ``layers``. After a rewind it shows which slots hold tokens that no longer count.

    ``status``: int32[batch], errors of traced steps, as bits; see ``check``.

    ``pending``: the call whose tokens are being appended, None between calls.

    ``pools``: the page tables, one for each group of layers that share them (``page_groups``).

    ``sources``: for each layer of the model, which of ``layers`` it reads; None if every layer has
    its own keys and values.

    ``positions``: the most tokens that a row can have with the model's positions and rotary
    frequencies; None for no limit.

    ``rotary_len``: the sequence length for which keys were rotated, if the model's rotary
    frequencies depend on it (dynamic, longrope). It stays the same when the cache grows.

    ``budget``: the device memory that the cache may use when it grows, from ``policy("auto")``.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, batch=2, max_len=64)
      print(cache.batch, cache.length, cache.max_len, cache.layer(0).keys.shape)
      ```
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
        """Tokens that a row can hold now; a cache that can grow may hold more later."""
        limits = [self.positions, *(layer.policy.layout.limit for layer in self.layers)]
        return min((limit for limit in limits if limit is not None), default=UNLIMITED)

    @property
    def last_position(self) -> str:
        """Why a row can't be longer than ``positions``, for error messages."""
        if self.positions == self.rotary_len:
            return f"its keys are rotated for sequences of rotary_len={self.positions} tokens"
        return f"the model has only {self.positions} positions"

    @property
    def mesh_sharding(self) -> MeshSharding | None:
        """The sharding over a mesh; None if the cache is on one device."""
        return self.layers[0].policy.placement.mesh_sharding

    @property
    def chunk(self) -> int | None:
        """The most tokens that one call can append; None for any number."""
        chunks = (layer.policy.layout.chunk for layer in self.layers)
        return min((chunk for chunk in chunks if chunk is not None), default=None)

    @property
    def max_rewind(self) -> int | None:
        """How many of its newest tokens a row can always forget; None for all."""
        spans = (layer.policy.max_rewind for layer in self.layers)
        return min((span for span in spans if span is not None), default=None)

    @property
    def common_heads(self) -> int:
        """The greatest common divisor of the layers' numbers of key-value heads."""
        return math.gcd(*(layer.kv_heads for layer in self.layers))

    @property
    def reach(self) -> int:
        """The sequence length for rotary frequencies that depend on it: distances between queries
        and keys are smaller than this."""
        if self.rotary_len is not None:
            return self.rotary_len
        return max(layer.policy.layout.reach for layer in self.layers)

    @property
    def grows_to(self) -> int | None:
        """Tokens per row that the cache may grow to; None if no layer can grow."""
        layouts = [layer.policy.layout for layer in self.layers]
        if all(layout.grows_to is None for layout in layouts):
            return None
        last = [layout.grows_to or layout.limit for layout in layouts]
        return min(limit for limit in (self.positions, *last) if limit is not None)

    @property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """The groups of layers that share page tables, in the order of ``pools``."""
        groups = (layer.policy.page_group for layer in self.layers)
        return tuple(dict.fromkeys(group for group in groups if group is not None))

    def table(self, entry: int, *, whole: bool = False) -> Array | None:
        """int32[batch, columns]: the page table of one of ``layers``; None if it has no pages.
        ``whole``: with page numbers of the whole pool rather than of a device's shard."""
        group = self.layers[entry].policy.page_group
        if group is None:
            return None
        pool = self.pools[self.page_groups.index(group)]
        return pool.whole if whole else pool.table

    def at(self, number: LayerNumber) -> tuple[int, Array | None]:
        """The index in ``layers`` of the entry that layer ``number`` of the model reads; for a
        stack also the number of the layer in it, int32[].

        Args:
          number: a layer of the model; may be traced if all layers are one stack. Or the number of
            a stack and the number of a layer in it, which may be traced.

        Raises:
          ValueError: if the layer does not exist, or a traced number is ambiguous.
        """
        if self.stacks is not None:
            return self._in_stack(number, self.stacks)
        if isinstance(number, tuple):
            raise ValueError(
                f"layer {number}: the cache has no stacks, so name a layer by one number"
            )
        if is_traced(number):
            raise ValueError(
                "the layer number is traced, but the layers are not stacked: loop over them in "
                "Python, or stack them for lax.scan: init_cache(..., stacked=True)"
            )
        number = as_int("layer", number, 0)
        count = len(self.layers if self.sources is None else self.sources)
        if number >= count:
            raise ValueError(f"layer {number}: the cache has {count} layers, counted from 0")
        return (number if self.sources is None else self.sources[number]), None

    def _in_stack(
        self, number: LayerNumber, stacks: tuple[tuple[int, int], ...]
    ) -> tuple[int, Array]:
        """``at`` for a stacked cache: the number of the stack, and of the layer in it."""
        if isinstance(number, tuple):
            if len(number) != 2:
                raise ValueError(f"a layer of a stack must be (stack, number), got {number!r:.80}")
            entry = as_int("the number of a stack", number[0], 0)
            if entry >= len(self.layers):
                raise ValueError(
                    f"stack {entry}: the cache has {len(self.layers)} stacks, counted from 0"
                )
            index, count = number[1], self.layers[entry].stack or 0
        elif is_traced(number):
            entry, index, count = 0, number, len(stacks)
            if len(self.layers) > 1:
                raise ValueError(
                    "the layer number is traced, but the cache has "
                    f"{len(self.layers)} stacks: pass the layer as (stack, number)"
                )
        else:
            number = as_int("layer", number, 0)
            if number >= len(stacks):
                raise ValueError(
                    f"layer {number}: the cache has {len(stacks)} layers, counted from 0"
                )
            entry, index = stacks[number]
            count = self.layers[entry].stack or 0
        if not is_traced(index):
            index = as_int("layer", index, 0)
            if index >= count:
                raise ValueError(
                    f"layer {index} of stack {entry}: it has {count} layers, counted from 0"
                )
        index = jnp.asarray(index)
        if index.ndim or not jnp.issubdtype(index.dtype, jnp.integer):
            raise ValueError(f"the number of a layer must be an integer, got {index}")
        return entry, index.astype(jnp.int32)

    def entry(self, number: LayerNumber) -> int:
        """The index in ``layers`` of the entry that layer ``number`` of the model reads; see
        ``at``."""
        return self.at(number)[0]

    def layer(self, number: int) -> LayerCache:
        """The keys and values that layer ``number`` of the model reads."""
        return self.layers[self.entry(number)]

    def __repr__(self) -> str:
        """The policies and lengths, without the arrays."""
        policies = ", ".join(dict.fromkeys(repr(layer.policy) for layer in self.layers))
        count = len(self.layers if self.stacks is None else self.stacks)
        return f"KVCache({count} layers of {policies}, length={self.length})"


def with_rows(cache: KVCache, **changes: object) -> KVCache:
    """Replace fields of a cache. On a mesh, arrays [batch, ...] are put on the devices of their
    rows."""
    changed = replace(cache, **changes)
    if changed.mesh_sharding is None:
        return changed
    rows = {
        name: getattr(changed, name) for name in ("length", "written", "status", "pending", "pools")
    }
    return replace(changed, **changed.layers[0].policy.placement.put(rows))
