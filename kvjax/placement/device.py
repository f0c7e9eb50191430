"""Where a layer's arrays are stored: on the device or in host memory."""

import functools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import PyTree

from kvjax.core import control_flow
from kvjax.core.compat import jax_0_10_2_host_memory
from kvjax.core.target import Target, current_target, default_device
from kvjax.core.transfer import to_device_memory
from kvjax.core.validation import is_traced, normalize_int_field
from kvjax.layouts import Shard
from kvjax.placement.mesh import SEQUENCE, MeshSharding
from kvjax.placement.order import Orders

_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """Arrays in the memory of the default device, or of the devices of a mesh.

    ``mesh_sharding`` is the sharding over a mesh, which ``init_cache(..., mesh=)`` and ``migrate``
    set. ``compute_target`` is the kind of device that computes with the arrays. It is set when a
    cache is created.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy("offloaded"), max_len=64)
      cache = kvjax.migrate(cache, kvjax.Device())
      ```
    """

    mesh_sharding: MeshSharding | None = field(default=None, kw_only=True, repr=False)
    compute_target: Target | None = field(default=None, kw_only=True, repr=False)

    place: ClassVar[str] = "device"
    """The name in ``nbytes`` and reports."""

    needs_tail: ClassVar[bool] = False
    """Whether the newest tokens are kept in a tail on the device, and only whole blocks are moved
    to the body's memory."""

    @property
    def memory_kind(self) -> str | None:
        """JAX's name for the kind of memory of a body; None for the device's default memory."""
        return None

    @property
    def space(self) -> Any:
        """The memory space of a body, as traced arrays report it."""
        return jax.memory.Space.Device if self.memory_kind is None else jax.memory.Space.Host

    @property
    def ahead(self) -> int:
        """How many layers in advance whole bodies are fetched to the device; 0 if they are not."""
        return 0

    @property
    def parts(self) -> int:
        """The number of devices that divide the slots of a layer."""
        return 1 if self.mesh_sharding is None else self.mesh_sharding.parts

    def shard(self) -> Shard | None:
        """Return this device's shard of the slots, inside ``MeshSharding.run``; None if it has all
        slots."""
        if self.mesh_sharding is None or self.parts == 1:
            return None
        return Shard(self.mesh_sharding.index(SEQUENCE), self.parts)

    def on_mesh(self, mesh_sharding: MeshSharding | None) -> Self:
        """Return the same placement over a mesh, or on one device."""
        return replace(self, mesh_sharding=mesh_sharding, compute_target=None)

    def like(self, other: "Device") -> Self:
        """Return the same placement on the devices of ``other``."""
        return replace(self, mesh_sharding=other.mesh_sharding, compute_target=other.compute_target)

    def with_target(self) -> Self:
        """Return the same placement with ``compute_target`` set."""
        return replace(self, compute_target=self.target())

    def target(self) -> Target:
        """Return the kind of device that computes with the arrays."""
        if self.compute_target is not None:
            return self.compute_target
        return current_target() if self.mesh_sharding is None else self.mesh_sharding.target

    def platform(self) -> str:
        """Return the platform that computes with the arrays: ``"cpu"``, ``"gpu"`` or ``"tpu"``."""
        return self.target().platform

    def put(self, tree: PyTree) -> PyTree:
        """Move a pytree of arrays [batch, ...] to the devices."""
        if self.mesh_sharding is None:
            return to_device_memory(tree)
        return self.mesh_sharding.put(tree, self.mesh_sharding.row_spec)

    def put_tokens(self, tree: _T) -> _T:
        """Move a pytree of arrays [batch, kv_heads, ...], such as a tail, to the devices. They are
        not divided along ``sequence``."""
        if self.mesh_sharding is None:
            return self.put(tree)
        return self.mesh_sharding.put(tree, self.mesh_sharding.token_spec)

    def store(self, body: _T, orders: Orders) -> _T:
        """Move the arrays of a body to the memory for bodies. ``orders`` are their storage
        orders."""
        if self.mesh_sharding is not None:
            return self.mesh_sharding.put_bodies(body, orders)
        return self.put(body)

    def near(self, part: _T, after: Sequence[jax.Array | np.ndarray] | None = None) -> _T:
        """Move a part of a body to device memory, to compute with it. This works inside ``jit``.

        ``after`` has the keys of a call and the rows' lengths. Inside ``jit``, the move starts only
        after they are computed.
        """
        return part

    def far(self, part: _T) -> _T:
        """Move a part of a body to the memory for bodies. This works inside ``jit``."""
        return part


def check_placement(placement: object) -> Device:
    """Return ``placement``, or raise ``ValueError`` if it is not one."""
    if not isinstance(placement, Device):
        raise ValueError(f"{placement!r} is not a placement: give Device() or Host()")
    return placement


def on_device_of(array: jax.Array) -> AbstractContextManager[object]:
    """Return a context in which the device of ``array`` is the default device, if ``array`` is on
    one device."""
    devices = array.devices()
    return nullcontext() if len(devices) > 1 else jax.default_device(next(iter(devices)))


@dataclass(frozen=True)
class Host(Device):
    """The body (a layer's older tokens, in whole blocks) is in pinned host memory. The tail (the
    newest tokens) and all computation are on the device.

    A block is moved to the host once, when it leaves the tail. Inside a donated, jitted step,
    updates are in place. Gradients do not flow through such a cache.

    With ``prefetch=0``, attention fetches the filled slots in pieces of up to 1,024 tokens, so that
    at most one piece is on the device. With ``prefetch=k``, the whole body of layer ``i + k``,
    filled or not, is fetched while layer ``i`` is computed. Up to ``k + 1`` bodies are then on the
    device. Prefetching is meant for accelerators, and has no effect on stacked layers. We have not
    measured whether accelerators overlap these copies with computation.

    Example:
      ```python
      policy = kvjax.CachePolicy(placement=kvjax.Host(prefetch=1))
      cache = kvjax.init_cache(lm.config, policy, max_len=256)
      print(kvjax.nbytes(cache))  # bytes on the device and on the host
      ```
    """

    prefetch: int = 0

    place: ClassVar[str] = "host"
    needs_tail: ClassVar[bool] = True

    def __post_init__(self) -> None:
        normalize_int_field(self, "prefetch", 0)

    @property
    def memory_kind(self) -> str | None:
        return "pinned_host" if jax_0_10_2_host_memory(self.platform()) else None

    @property
    def ahead(self) -> int:
        return self.prefetch

    def store(self, body: _T, orders: Orders) -> _T:
        if self.memory_kind is None:  # callers delete the old arrays, so create new ones
            body = jax.device_put(body, may_alias=False)
        if self.mesh_sharding is not None:
            return self.mesh_sharding.put_bodies(body, orders, self.memory_kind)
        if not jax.sharding.get_abstract_mesh().empty and is_traced(jnp.zeros(())):
            # The user's ``jax.shard_map`` or ``jax.set_mesh`` decides which devices are used.
            return self.far(body)
        sharding = SingleDeviceSharding(default_device(), memory_kind=self.memory_kind)
        return jax.device_put(body, sharding)

    def near(self, part: _T, after: Sequence[jax.Array | np.ndarray] | None = None) -> _T:
        if self.memory_kind is None:
            return part
        if after is None or not is_traced(after[0]):
            return _fetched(part)
        # With an optimization barrier instead, compilers would remove it or copy on the host, and
        # fetch all layers at the same time. This condition is always true, but compilers can't know
        # this.
        ready = (after[0].ravel()[0] == 0) | (after[1].ravel()[0] >= 0)
        empty = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        return control_flow.cond(ready, _fetched, empty, part)

    def far(self, part: _T) -> _T:
        return part if self.memory_kind is None else jax.device_put(part, self.space)


def _fetched(part: _T) -> _T:
    return jax.device_put(part, jax.memory.Space.Device)


_REFILL = 0.75
"""A layer returns from the host only if at most this fraction of the memory is then in use. So the
next tokens do not send it back."""


class LayerBytes(NamedTuple):
    """The bytes of a layer.

    ``device`` is its size if it is stored on the device. If it is stored on the host, ``tail`` is
    its size on the device, and ``host`` its size on the host. ``grows`` says whether it may grow.
    """

    device: int
    tail: int
    host: int
    grows: bool = False


@dataclass(frozen=True)
class Budget:
    """The device memory that a cache may use, in bytes, and the placement of layers that exceed it.

    While a layer moves or grows, it exists twice. So if layers on the device may grow, space for
    the largest of them is kept free.
    """

    memory: int
    placement: Device = field(default_factory=Host)

    def __post_init__(self) -> None:
        normalize_int_field(self, "memory", 1)
        check_placement(self.placement)
        if not self.placement.needs_tail:
            raise ValueError(
                f"{self.placement!r}: layers that exceed the budget need a placement on the host"
            )

    def offloaded(self, sizes: Sequence[LayerBytes], out: Collection[int]) -> frozenset[int]:
        """Return the layers that must be on the host to stay within the budget. Later layers leave
        first.

        Args:
          sizes: the bytes of each layer.
          out: the layers that are on the host at present. The first of them return to the device if
            a quarter of the memory stays free.

        Raises:
          ValueError: if the tails of all layers do not fit on the device.
        """
        chosen = set(out)
        while self._taken(sizes, chosen) > self.memory:
            movable = [n for n, size in enumerate(sizes) if n not in chosen and _leaves(size)]
            if not movable:
                fetched = " and the prefetched layers" if self.placement.ahead else ""
                raise ValueError(
                    f"the cache may use {self.memory:,} bytes of the device, but with every layer "
                    f"on the host its newest tokens{fetched} need {self._taken(sizes, chosen):,}"
                )
            chosen.add(movable[-1])
        for n in sorted(chosen):
            if n in out and self._taken(sizes, chosen - {n}) <= _REFILL * self.memory:
                chosen.remove(n)
        return frozenset(chosen)

    def _taken(self, sizes: Sequence[LayerBytes], out: Collection[int]) -> int:
        """Return the bytes that are used on the device if the layers ``out`` are on the host."""
        on_device = [size for n, size in enumerate(sizes) if n not in out]
        on_host = [size for n, size in enumerate(sizes) if n in out]
        free = max((size.device for size in on_device if size.grows and _leaves(size)), default=0)
        fetched = ahead_bytes([(size.host, self.placement) for size in on_host])
        return sum(s.device for s in on_device) + sum(s.tail for s in on_host) + free + fetched


def ahead_bytes(bodies: Sequence[tuple[int, Device]]) -> int:
    """Return the maximum bytes that prefetched bodies need on the device. ``bodies`` has the bytes
    and the placement of each body."""
    most = max((placement.ahead for _, placement in bodies), default=0)
    fetched = sorted((size for size, placement in bodies if placement.ahead), reverse=True)
    return sum(fetched[: most + 1])


def _leaves(size: LayerBytes) -> bool:
    """Return whether moving the layer to the host frees device memory."""
    return size.tail < size.device
