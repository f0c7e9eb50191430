"""The arrays of one layer or of a stack of layers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from kvjax.codecs import Store
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, Scalar
from kvjax.core.validation import is_traced
from kvjax.placement.order import Orders, arrange
from kvjax.policies.cache_policy import CachePolicy


@pytree_dataclass
class Tail:
    """The newest tokens of a layer, and its first ones if they stay raw: [batch, kv_heads, slots,
    head_dim].

    Keys are unrotated if the body's codec has ``before_rotary``, otherwise rotated.
    """

    keys: Array
    values: Array


@pytree_dataclass
class Strip:
    """The raw tokens that queries see in a call with more tokens than a block: the tail before the
    call, and the keys and values of the call.

    A strip exists only between ``append`` and ``advance``. Keys and values are stored as in the
    tail.
    """

    tail: Tail
    keys: Array
    values: Array


Body = tuple[Store, Store]
"""The stored keys and the stored values of a body."""


@pytree_dataclass
class LayerCache:
    """The stored keys and values of one layer, or of a stack of layers, and their policy.

    ``keys`` and ``values`` are in the form in which the codecs store them. ``kvjax.read`` returns
    them as numbers. With ``Raw`` codecs and no tail, they are arrays [batch, kv_heads, slots,
    head_dim] (16-bit floats are stored as bits on CPUs before JAX 0.11). With a tail, they are the
    body, [batch, kv_heads, blocks, block, head_dim], stored in the order ``orders``. If slots are
    in pages, the first axis is the pages of the pool instead of the rows.

    ``window`` is the layer's window in the model's config. ``tail`` has the newest tokens; None if
    the policy has no tail. ``strip`` exists only between ``append`` and ``advance`` of a call of
    more than one block. ``low`` (int32[batch]) is the first position, apart from sinks, whose token
    a conversion could supply. ``fetched`` is the body on the device, during a call, if the
    placement prefetches it.

    ``stack`` is the number of layers if this is a stack of equal layers. All arrays then have a
    first axis of layers, except for ``strip``, which belongs to the layer ``strip_of`` (int32[]).
    """

    keys: Store
    values: Store
    policy: CachePolicy = static_field()
    kv_heads: int = static_field()
    head_dim: int = static_field()
    window: int | None = static_field(default=None)
    tail: Tail | None = None
    strip: Strip | None = None
    low: PerRow | None = None
    fetched: Body | None = None
    stack: int | None = static_field(default=None)
    strip_of: Scalar | None = None

    def __setstate__(self, fields: dict[str, object]) -> None:
        """Restore from a pickle, and move the body to the memory of its policy, because pickles do
        not record kinds of memory."""
        self.__dict__.update(fields)
        arrays = all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(self))
        if arrays and not self.in_place:
            self.__dict__.update(vars(self.placed()))

    @property
    def in_place(self) -> bool:
        """Whether all arrays are JAX arrays and the body is in the kind of memory that its policy
        chooses."""
        space, body = self.policy.placement.space, jax.tree.leaves((self.keys, self.values))
        arrays = all(isinstance(x, jax.Array) for x in jax.tree.leaves(self))
        return arrays and all(jax.typeof(x).memory_space == space for x in body)

    @property
    def orders(self) -> tuple[Orders, Orders]:
        """The orders in which the arrays of keys and of values are stored."""
        return self.policy.orders(self.kv_heads, self.head_dim)

    @property
    def batch(self) -> int:
        """The number of rows."""
        return jax.tree.leaves(self.keys)[0].shape[0 if self.stack is None else 1]

    def copy(self) -> "LayerCache":
        """Copy all arrays."""
        return self.map_arrays(jnp.copy)

    def take_rows(self, rows: Array) -> "LayerCache":
        """Select the rows ``rows`` (int[n], clipped to existing rows). Pages are unchanged."""
        return self._map_rows(lambda x: jnp.take(x, rows, axis=0, mode="clip"))

    def set_rows(self, rows: Array, others: "LayerCache") -> "LayerCache":
        """Replace the rows ``rows`` (int[n]) by the rows of ``others``. Out-of-range rows are
        ignored. If slots are in pages, all pages are taken from ``others``."""

        def set_in(old: PyTree, new: PyTree) -> PyTree:
            return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), old, new)

        if self.policy.page_group is None:
            return self.map_arrays(lambda x, y: x.at[rows].set(y, mode="drop"), others)
        tail = self.policy.placement.put_tokens(set_in(self.tail, others.tail))
        low = set_in(self.low, others.low)
        return replace(self, keys=others.keys, values=others.values, tail=tail, low=low)

    def repeat_rows(self, times: int) -> "LayerCache":
        """Repeat each row ``times`` times. Pages are unchanged."""
        return self._map_rows(lambda x: jnp.repeat(x, times, axis=0))

    def _map_rows(self, change: Callable[[Array], Array]) -> "LayerCache":
        """Apply ``change`` to every array that has rows."""
        if self.policy.page_group is None:
            return self.map_arrays(change)
        tail, strip, low = jax.tree.map(change, (self.tail, self.strip, self.low))
        placement = self.policy.placement
        tail, strip = (
            placement.put_tokens((tail, strip)) if placement.mesh_sharding else (tail, strip)
        )
        return replace(self, tail=tail, strip=strip, low=low)

    def concatenate(self, others: Sequence["LayerCache"]) -> "LayerCache":
        """Concatenate the rows (or the pages) of this layer and of other layers with the same
        policy."""
        return self.map_arrays(lambda *arrays: jnp.concatenate(arrays), *others)

    def map_arrays(self, change: Callable[..., Array], *others: "LayerCache") -> "LayerCache":
        """Apply ``change`` on the device to every array. ``change`` also receives the same array of
        each layer in ``others``."""
        near = jax.tree.map(change, self.near(), *(other.near() for other in others))
        placement = self.policy.placement
        if placement.mesh_sharding is not None:
            return near.placed()
        return replace(near, keys=placement.far(near.keys), values=placement.far(near.values))

    def near(self) -> "LayerCache":
        """Return this layer with the whole body in device memory."""
        placement = self.policy.placement
        return replace(self, keys=placement.near(self.keys), values=placement.near(self.values))

    def placed(self) -> "LayerCache":
        """Return this layer with every array in the memory that the policy chooses."""
        placement = self.policy.placement
        if (mesh_sharding := placement.mesh_sharding) is not None:
            specs, kind = self.partition_specs(), placement.memory_kind
            body = mesh_sharding.put_with_specs(
                (self.keys, self.values), (specs.keys, specs.values), kind
            )
            rest = mesh_sharding.put_with_specs((self.tail, self.low), (specs.tail, specs.low))
        else:
            body = placement.store((self.keys, self.values), self.orders)
            rest = placement.put((self.tail, self.low))
        return replace(self, keys=body[0], values=body[1], tail=rest[0], low=rest[1])

    def partition_specs(self) -> "LayerCache":
        """Return the ``PartitionSpec`` of each array, for a layer on a mesh."""
        mesh_sharding = self.policy.placement.mesh_sharding
        assert mesh_sharding is not None

        def each(part: PyTree, spec: Callable[[tuple[int, ...]], PartitionSpec]) -> PyTree:
            return jax.tree.map(lambda x: spec(x.shape), part)

        own: PyTree = (self.keys, self.values, self.tail, self.low)
        if self.stack is not None:
            own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own)
        *body, tail, low = own
        bodies = tuple(mesh_sharding.body_specs(tuple(body), self.orders))
        own = *bodies, each(tail, mesh_sharding.token_spec), each(low, mesh_sharding.row_spec)
        if self.stack is not None:
            own = jax.tree.map(lambda spec: PartitionSpec(None, *spec), own)
        keys, values, tail, low = own
        return replace(
            self,
            keys=keys,
            values=values,
            tail=tail,
            low=low,
            strip=each(self.strip, mesh_sharding.token_spec),
            strip_of=None if self.strip_of is None else PartitionSpec(),
            fetched=None if self.fetched is None else bodies,
        )


@functools.lru_cache(maxsize=1024)
def layer_shapes(
    policy: CachePolicy, batch: int, kv_heads: int, head_dim: int, stack: int | None = None
) -> LayerCache:
    """Return the shapes of an empty layer, or of an empty stack."""
    make = functools.partial(empty_layer, policy, batch, kv_heads, head_dim, None, stack)
    return jax.eval_shape(make)


def empty_layer(
    policy: CachePolicy,
    batch: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    stack: int | None = None,
) -> LayerCache:
    """Create an empty layer, or a stack of ``stack`` empty layers."""
    if stack is not None:
        one = functools.partial(empty_layer, policy, batch, kv_heads, head_dim, window)
        return replace(jax.vmap(lambda _: one())(jnp.arange(stack, dtype=jnp.int32)), stack=stack)
    slots: tuple[int, ...] = (policy.stored_layout.slots,)
    tail = low = None
    if policy.raw is not None:
        slots, low = (*slots, policy.block), jnp.zeros(batch, jnp.int32)
        in_tail = (batch, kv_heads, policy.split.tail.slots, head_dim)
        tail = Tail(*(codec.empty(in_tail) for codec in policy.raw))
    rows = batch
    if page_group := policy.page_group:
        assert page_group.layout.pool is not None
        rows, slots = page_group.layout.pool, (page_group.layout.page_size, *slots[1:])
    shape = (rows, kv_heads, *slots, head_dim)
    body = policy.keys.empty(shape), policy.values.empty(shape)
    keys, values = arrange(body, policy.orders(kv_heads, head_dim))
    return LayerCache(keys, values, policy, kv_heads, head_dim, window, tail, low=low)


_T = TypeVar("_T")


def unstacked(stack: LayerCache, index: Array) -> LayerCache:
    """Return layer ``index`` (int32[]) of a stack. Its body and tail remain arrays of all layers.

    The arrays are not reshaped to merge the axes of layers and rows. If a stack or a batch has size
    1, a compiler may treat such a reshape as a different order of axes, or use separate memory for
    reads and for writes. In both cases, it copies everything.
    """
    return replace(stack, low=index_stack(stack.low, index), stack=None)


def check_strip(stack: LayerCache, index: Array, new: int) -> Array | None:
    """Check that the strip of a stack belongs to layer ``index``. A stack keeps only the strip of
    the layer that was appended to last.

    Returns:
      bool[], whether it does; None if a call of ``new`` tokens needs no strip.

    Raises:
      ValueError: if it does not, and no value is traced.
    """
    if stack.tail is None or new <= stack.policy.split.block:
        return None
    same = None if stack.strip_of is None else stack.strip_of == index
    if same is None or not (is_traced(same) or bool(fetch(same))):
        raise ValueError(
            f"this call has {new} tokens, more than a block. A stack then keeps raw tokens only "
            "for the layer that was appended to last: attend to a layer, or read it, right after "
            "its append, as call.attend of kvjax.step does"
        )
    return same


def index_stack(arrays: _T, index: Array | None) -> _T:
    """Slice one layer out of arrays [layers, ...]. If ``index`` is None, return them unchanged."""
    if index is None:
        return arrays
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), arrays)


def update_stack(arrays: _T, new: _T, index: Array | None) -> _T:
    """Write ``new`` to one layer of arrays [layers, ...] in place. If ``index`` is None, return
    ``new``."""
    if index is None:
        return new
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), arrays, new)
