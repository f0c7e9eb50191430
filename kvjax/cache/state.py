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
    """A call in progress, whose tokens are being appended. The first ``append`` begins it, and
    ``advance`` ends it.

    ``requested`` (int32[batch]) is the number of tokens given for each row, and ``count``
    (int32[batch]) the number that the row takes, which is 0 if its pool has too few pages. ``new``
    is the number of tokens per row, including padding. ``entries`` has the indices in
    ``KVCache.layers`` of layers that were appended to. ``append_counts`` has an array int32[layers]
    for each stack: how often each of its layers was appended to.
    """

    count: PerRow
    requested: PerRow
    new: int = static_field()
    entries: tuple[int, ...] = static_field()
    append_counts: tuple[Array, ...] = ()


@pytree_dataclass
class KVCache:
    """The cache of a model.

    Attributes:
      layers: one `LayerCache` per layer, or one per stack of equal layers.
      length: int32[batch], the number of tokens in each row.
      written: int32[batch, layers], the maximum number of tokens that each row has ever had, for
        each of ``layers``. After a rewind it shows which slots have tokens that no longer count.
      status: int32[batch], a bit for each error that traced steps recorded; see ``check``.
      sources: for each layer of the model, the index in ``layers`` that it reads; None if every
        layer has its own keys and values.
      positions: the maximum number of tokens per row that the model's positions and rotary
        frequencies allow; None for no limit.
      rotary_len: the sequence length for which keys were rotated, if the model's rotary frequencies
        depend on it (dynamic, longrope). It stays the same when the cache grows.
      budget: the device memory that the cache may use when it grows, from ``policy("auto")``.
      stacks: for each layer of the model, the index of its stack and its index in that stack; None
        if layers are not stacked.
      pending: the call (forward pass) in progress; None between calls.
      pools: the page tables, one for each group of layers that share them (``page_groups``).

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
        """The number of rows."""
        return self.length.shape[0]

    @property
    def max_len(self) -> int:
        """The maximum number of tokens per row at present. A cache that can grow may have more
        later."""
        limits = [self.positions, *(layer.policy.layout.limit for layer in self.layers)]
        return min((limit for limit in limits if limit is not None), default=UNLIMITED)

    @property
    def last_position(self) -> str:
        """The reason why a row can't be longer than ``positions``, for error messages."""
        if self.positions == self.rotary_len:
            return f"its keys are rotated for sequences of rotary_len={self.positions} tokens"
        return f"the model has only {self.positions} positions"

    @property
    def mesh_sharding(self) -> MeshSharding | None:
        """The sharding over a mesh; None if the cache is on one device."""
        return self.layers[0].policy.placement.mesh_sharding

    @property
    def chunk(self) -> int | None:
        """The maximum number of tokens that one call can append; None for no limit."""
        chunks = (layer.policy.layout.chunk for layer in self.layers)
        return min((chunk for chunk in chunks if chunk is not None), default=None)

    @property
    def max_rewind(self) -> int | None:
        """The number of newest tokens that a row can always remove; None if it can remove all."""
        spans = (layer.policy.max_rewind for layer in self.layers)
        return min((span for span in spans if span is not None), default=None)

    @property
    def common_heads(self) -> int:
        """The greatest common divisor of the layers' numbers of key-value heads."""
        return math.gcd(*(layer.kv_heads for layer in self.layers))

    @property
    def reach(self) -> int:
        """The sequence length for rotary frequencies that depend on it. All distances between
        queries and keys are smaller."""
        if self.rotary_len is not None:
            return self.rotary_len
        return max(layer.policy.layout.reach for layer in self.layers)

    @property
    def grows_to(self) -> int | None:
        """The number of tokens per row to which the cache may grow; None if no layer can grow."""
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
        """Return the page table of an entry of ``layers``, int32[batch, columns]; None if it has no
        pages. If ``whole``, page numbers refer to the whole pool instead of a device's shard."""
        group = self.layers[entry].policy.page_group
        if group is None:
            return None
        pool = self.pools[self.page_groups.index(group)]
        return pool.whole if whole else pool.table

    def at(self, number: LayerNumber) -> tuple[int, Array | None]:
        """Find the entry of ``layers`` that layer ``number`` of the model reads.

        Args:
          number: the index of a layer of the model, which may be traced if all layers are in one
            stack, or a pair of the index of a stack and the index of a layer in it, which may be
            traced.

        Returns:
          The index of the entry, and for a stack the index of the layer in it (int32[]), otherwise
          None.

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
        """Do the work of ``at`` for a stacked cache."""
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
        """Return the index in ``layers`` of the entry that layer ``number`` of the model reads; see
        ``at``."""
        return self.at(number)[0]

    def layer(self, number: int) -> LayerCache:
        """Return the keys and values that layer ``number`` of the model reads."""
        return self.layers[self.entry(number)]

    def __repr__(self) -> str:
        """Return the policies and lengths as text, without the arrays."""
        policies = ", ".join(dict.fromkeys(repr(layer.policy) for layer in self.layers))
        count = len(self.layers if self.stacks is None else self.stacks)
        return f"KVCache({count} layers of {policies}, length={self.length})"


def with_rows(cache: KVCache, **changes: object) -> KVCache:
    """Replace fields of a cache. On a mesh, arrays [batch, ...] are put on the devices that have
    their rows."""
    changed = replace(cache, **changes)
    if changed.mesh_sharding is None:
        return changed
    rows = {
        name: getattr(changed, name) for name in ("length", "written", "status", "pending", "pools")
    }
    return replace(changed, **changed.layers[0].policy.placement.put(rows))
