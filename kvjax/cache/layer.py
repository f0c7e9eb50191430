"""The arrays of one layer or of a stack of layers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from kvjax.codecs import Store
from kvjax.core.pytree import pytree_dataclass, static_field
from kvjax.core.transfer import fetch
from kvjax.core.typing import Array, PerRow, Scalar
from kvjax.core.validation import is_traced
from kvjax.placement.order import arrange
from kvjax.policies.cache_policy import CachePolicy


@pytree_dataclass
class Tail:
    """The newest tokens of a layer, as ``Raw`` stores them: [batch, kv_heads, slots, head_dim].

    Keys are rotated, or not, as the body's codec wants them.
    """

    keys: Array
    values: Array


@pytree_dataclass
class Strip:
    """What queries of a call that is longer than a block see raw, between ``append`` and
    ``advance``: the tail as it was before, and the call's own keys and values, as the tail stores
    them."""

    tail: Tail
    keys: Array
    values: Array


Body = tuple[Store, Store]
"""What the codecs keep of the body's keys and values."""


@pytree_dataclass
class LayerCache:
    """Keys and values of one layer, as their codecs store them, and the policy they follow: codes,
    or, on CPUs before JAX 0.11, the bits of 16-bit floats. Users see numbers by ``kvjax.read``.

    With ``Raw`` codecs both are arrays [batch, kv_heads, slots, head_dim]. With codecs of whole
    blocks they are the body, of [batch, kv_heads, blocks, block, head_dim], which a device keeps in
    the order that ``orders`` says, and ``tail`` has the newest tokens; ``strip`` is there between
    ``append`` and ``advance`` alone, and ``low``, int32[batch], is the first position that a
    conversion left behind the sinks. ``fetched`` is the body on the device, where a placement
    fetches it ahead, within a call. ``window`` is the layer's own, from the model's config.
    ``stack``: of so many layers that are alike it has the arrays in one, [layers, ...] of each; but
    ``strip``, which is of one layer, ``strip_of``, int32[].
    """

    keys: Any
    values: Any
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

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """From a pickle, which knows no kinds of memory: the body goes to where the policy says."""
        self.__dict__.update(fields)
        arrays = all(isinstance(x, jax.Array | np.ndarray) for x in jax.tree.leaves(self))
        if arrays and not self.in_place:
            self.__dict__.update(vars(self.placed()))

    @property
    def in_place(self) -> bool:
        """Whether all arrays are JAX's, and the body is in its kind of memory."""
        space, body = self.policy.placement.space, jax.tree.leaves((self.keys, self.values))
        arrays = all(isinstance(x, jax.Array) for x in jax.tree.leaves(self))
        return arrays and all(jax.typeof(x).memory_space == space for x in body)

    @property
    def orders(self) -> tuple[Any, Any]:
        """In which order keys and values are kept."""
        return self.policy.orders(self.kv_heads, self.head_dim)

    @property
    def batch(self) -> int:
        """Rows."""
        return jax.tree.leaves(self.keys)[0].shape[0 if self.stack is None else 1]

    def copy(self) -> "LayerCache":
        """With arrays of its own."""
        return self.map_arrays(jnp.copy)

    def take_rows(self, rows: Array) -> "LayerCache":
        """The layer of rows int[n], the nearest one where there is none; pages stay as they are."""
        return self._of_rows(lambda x: jnp.take(x, rows, axis=0, mode="clip"))

    def set_rows(self, rows: Array, others: "LayerCache") -> "LayerCache":
        """The layer, in which rows int[n] are those of ``others``; what is behind the last row is
        none. Pages are as ``others`` have them."""

        def into(mine: Any, new: Any) -> Any:
            return jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), mine, new)

        if self.policy.page_group is None:
            return self.map_arrays(lambda x, y: x.at[rows].set(y, mode="drop"), others)
        tail = self.policy.placement.put_tokens(into(self.tail, others.tail))
        low = into(self.low, others.low)
        return replace(self, keys=others.keys, values=others.values, tail=tail, low=low)

    def repeat_rows(self, times: int) -> "LayerCache":
        """Every row ``times`` times; pages stay where they are."""
        return self._of_rows(lambda x: jnp.repeat(x, times, axis=0))

    def _of_rows(self, change: Callable[[Array], Array]) -> "LayerCache":
        """The same for every array that has rows."""
        if self.policy.page_group is None:
            return self.map_arrays(change)
        tail, strip, low = jax.tree.map(change, (self.tail, self.strip, self.low))
        placement = self.policy.placement
        tail, strip = placement.put_tokens((tail, strip)) if placement.spread else (tail, strip)
        return replace(self, tail=tail, strip=strip, low=low)

    def concatenate(self, others: Sequence["LayerCache"]) -> "LayerCache":
        """The rows of this layer, and behind them those of others of the same policy; or the pages
        of all pools."""
        return self.map_arrays(lambda *arrays: jnp.concatenate(arrays), *others)

    def map_arrays(self, change: Callable[..., Array], *others: "LayerCache") -> "LayerCache":
        """The same for every array; a body that is kept elsewhere comes near for it."""
        near = jax.tree.map(change, self.near(), *(other.near() for other in others))
        placement = self.policy.placement
        if placement.spread is not None:
            return near.placed()
        return replace(near, keys=placement.far(near.keys), values=placement.far(near.values))

    def near(self) -> "LayerCache":
        """With the body on the device, to compute with all of it."""
        placement = self.policy.placement
        return replace(self, keys=placement.near(self.keys), values=placement.near(self.values))

    def placed(self) -> "LayerCache":
        """With every array where the policy says."""
        placement = self.policy.placement
        if (spread := placement.spread) is not None:
            specs, kind = self.partition_specs(), placement.memory_kind
            body = spread.put_with_specs((self.keys, self.values), (specs.keys, specs.values), kind)
            rest = spread.put_with_specs((self.tail, self.low), (specs.tail, specs.low))
        else:
            body = placement.store((self.keys, self.values), self.orders)
            rest = placement.put((self.tail, self.low))
        return replace(self, keys=body[0], values=body[1], tail=rest[0], low=rest[1])

    def partition_specs(self) -> "LayerCache":
        """How each array is spread over the mesh."""
        spread = self.policy.placement.spread
        assert spread is not None

        def each(part: Any, spec: Callable[[tuple[int, ...]], Any]) -> Any:
            return jax.tree.map(lambda x: spec(x.shape), part)

        own: Any = (self.keys, self.values, self.tail, self.low)
        if self.stack is not None:
            own = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), own)
        *body, tail, low = own
        bodies = tuple(spread.body_specs(tuple(body), self.orders))
        own = *bodies, each(tail, spread.token_spec), each(low, spread.row_spec)
        if self.stack is not None:
            own = jax.tree.map(lambda spec: PartitionSpec(None, *spec), own)
        keys, values, tail, low = own
        return replace(
            self, keys=keys, values=values, tail=tail, low=low,
            strip=each(self.strip, spread.token_spec),
            strip_of=None if self.strip_of is None else PartitionSpec(),
            fetched=None if self.fetched is None else bodies,
        )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def layer_shapes(
    policy: CachePolicy, batch: int, kv_heads: int, head_dim: int, stack: int | None = None
) -> LayerCache:
    """The arrays of an empty layer, or of a stack, as shapes."""
    make = functools.partial(empty_layer, policy, batch, kv_heads, head_dim, None, stack)
    return jax.eval_shape(make)


def empty_layer(
    policy: CachePolicy, batch: int, kv_heads: int, head_dim: int, window: int | None,
    stack: int | None = None,
) -> LayerCache:  # fmt: skip
    """A layer that holds nothing, or a stack of so many."""
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


def unstacked(held: LayerCache, index: Array) -> LayerCache:
    """A layer of a stack, int32[], whose arrays stay among those of the others.

    Not as rows one behind the other: where a stack or a batch is of one, a compiler might take that
    for another order of axes, or write what is read and what is kept each on its own, and copy all
    of it.
    """
    return replace(held, low=index_stack(held.low, index), stack=None)


def check_strip(held: LayerCache, index: Array, new: int) -> Array | None:
    """Whether what queries of a call of ``new`` tokens see raw is of this layer of a stack, bool[]:
    the stack has that of the last one appended to. None for a call that is not so long.

    Raises:
      ValueError: if it is seen not to be.
    """
    if held.tail is None or new <= held.policy.split.block:
        return None
    same = None if held.strip_of is None else held.strip_of == index
    if same is None or not (is_traced(same) or bool(fetch(same))):
        raise ValueError(
            f"a call of {new} tokens, more than a block: a stack has what is seen raw of it for "
            "its last layer alone, so attend to a layer, or read it, right behind its own append "
            "(call.attend of kvjax.step does both, once)"
        )
    return same


def index_stack(arrays: _T, index: Array | None) -> _T:
    """Arrays [layers, ...] of one layer, sliced out; without an index they are of one."""
    if index is None:
        return arrays
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), arrays)


def update_stack(arrays: _T, new: _T, index: Array | None) -> _T:
    """With new ones of a layer, in place."""
    if index is None:
        return new
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), arrays, new)
