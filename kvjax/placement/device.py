"""Where a layer's arrays are stored: on the device or in host memory."""

import functools
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from kvjax.core import control_flow
from kvjax.core.compat import jax_0_10_2_host_memory
from kvjax.core.target import Target, current_target, default_device
from kvjax.core.transfer import to_device_memory
from kvjax.core.validation import is_traced, normalize_int_field
from kvjax.layouts import Shard
from kvjax.placement.mesh import SEQUENCE, MeshSharding

_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """In the memory of the default device, or of the devices of a mesh.

    ``spread``: the sharding over a mesh, which ``init_cache(..., mesh=)`` and ``migrate`` set.
    ``compute_target``: the kind of device that computes with the arrays, set when a cache is made.
    """

    spread: MeshSharding | None = field(default=None, kw_only=True, repr=False)
    compute_target: Target | None = field(default=None, kw_only=True, repr=False)

    place: ClassVar[str] = "device"
    """The place's name, in ``nbytes`` and reports."""

    needs_tail: ClassVar[bool] = False
    """Whether the newest tokens stand in a tail on the device, and only whole blocks are moved."""

    @property
    def memory_kind(self) -> str | None:
        """The kind of memory that a body is kept in, as JAX calls it; None for the device's own."""
        return None

    @property
    def space(self) -> Any:
        """The same as traced arrays tell it."""
        return jax.memory.Space.Device if self.memory_kind is None else jax.memory.Space.Host

    @property
    def ahead(self) -> int:
        """How many layers before its turn a layer's body is fetched, whole; 0 for never."""
        return 0

    @property
    def parts(self) -> int:
        """How many devices share the slots of a layer."""
        return 1 if self.spread is None else self.spread.parts

    def shard(self) -> Shard | None:
        """This device's shard of the slots, inside ``MeshSharding.run``; None if it has all."""
        if self.spread is None or self.parts == 1:
            return None
        return Shard(self.spread.index(SEQUENCE), self.parts)

    def on_mesh(self, spread: MeshSharding | None) -> Self:
        """The same place of other devices."""
        return replace(self, spread=spread, compute_target=None)

    def like(self, other: "Device") -> Self:
        """The same place of the devices of another."""
        return replace(self, spread=other.spread, compute_target=other.compute_target)

    def with_target(self) -> Self:
        """With what computes, the devices here now where it is open."""
        return replace(self, compute_target=self.target())

    def target(self) -> Target:
        """What computes on these arrays."""
        if self.compute_target is not None:
            return self.compute_target
        return current_target() if self.spread is None else self.spread.target

    def platform(self) -> str:
        """The name of its platform: cpu, gpu or tpu."""
        return self.target().platform

    def put(self, tree: _T) -> _T:
        """Move a pytree's arrays [batch, ...] there."""
        return (
            to_device_memory(tree)
            if self.spread is None
            else self.spread.put(tree, self.spread.row_spec)
        )

    def put_tokens(self, tree: _T) -> _T:
        """``put`` of arrays [batch, kv_heads, ...] of which every share of the slots has all."""
        if self.spread is None:
            return self.put(tree)
        return self.spread.put(tree, self.spread.token_spec)

    def store(self, body: _T, orders: Any) -> _T:
        """Move a body's arrays, kept in these orders, to where they are kept."""
        if self.spread is not None:
            return self.spread.put_bodies(body, orders)
        return self.put(body)

    def near(self, part: _T, after: Any = None) -> _T:
        """Part of a body, to compute with; inside ``jit`` too."""
        return part

    def far(self, part: _T) -> _T:
        """Part of a body, to be kept; inside ``jit`` too."""
        return part


def check_placement(placement: Any) -> Device:
    """A placement as it is, or a ``ValueError`` for what is none."""
    if not isinstance(placement, Device):
        raise ValueError(f"{placement!r} is no placement: give Device() or Host()")
    return placement


def on_device_of(array: jax.Array) -> Any:
    """The context in which arrays are put to where ``array`` is, if that is one device."""
    devices = array.devices()
    return nullcontext() if len(devices) > 1 else jax.default_device(next(iter(devices)))


@dataclass(frozen=True)
class Host(Device):
    """The body in the host's memory, pinned; the tail, and what is computed with, on the device.

    A block crosses to the host once, when it leaves the tail. Updates stay in place inside a
    donated, jitted step. Gradients do not pass through such a cache.

    ``prefetch``: 0 fetches the filled blocks while attention walks them, one after the other, so
    that never more than one is on the device. With ``k`` layer ``i + k``'s whole body, filled or
    not, is on its way while layer ``i`` is computed, and up to ``k + 1`` layers of it are on the
    device: for accelerators, and not for stacks. Whether a copy goes on beside computation there is
    not known: none has run it, and a TPU's compiler has it in a branch.
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

    def store(self, body: _T, orders: Any) -> _T:
        if self.memory_kind is None:  # a move makes new arrays: the old ones are deleted behind it
            body = jax.device_put(body, may_alias=False)
        if self.spread is not None:
            return self.spread.put_bodies(body, orders, self.memory_kind)
        if not jax.sharding.get_abstract_mesh().empty and is_traced(jnp.zeros(())):
            # Which devices these are is up to the user's ``jax.shard_map`` or ``jax.set_mesh``.
            return self.far(body)
        sharding = SingleDeviceSharding(default_device(), memory_kind=self.memory_kind)
        return jax.device_put(body, sharding)

    def near(self, part: _T, after: Any = None) -> _T:
        """Part of a body, on the device; inside ``jit`` not to be fetched before ``after`` is
        there, a call's keys and the rows' lengths."""
        if self.memory_kind is None:
            return part
        if after is None or not is_traced(after[0]):
            return _fetched(part)
        # Compilers drop a barrier, or copy on the host for it, and would fetch all layers at once.
        # This is always true, which they can't know.
        there = (after[0].ravel()[0] == 0) | (after[1].ravel()[0] >= 0)
        empty = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, x.dtype))
        return control_flow.cond(there, _fetched, empty, part)

    def far(self, part: _T) -> _T:
        return part if self.memory_kind is None else jax.device_put(part, self.space)


def _fetched(part: _T) -> _T:
    return jax.device_put(part, jax.memory.Space.Device)


_BACK = 0.75
"""What part of the memory may be full once a layer has come back: the rest keeps it from being
sent away again by the next few tokens."""


class LayerBytes(NamedTuple):
    """Bytes of a layer: of the device where it is there, and where it is on the host (its tail),
    and of the host then; ``grows``: whether it may be enlarged."""

    device: int
    tail: int
    host: int
    grows: bool = False


@dataclass(frozen=True)
class Budget:
    """Bytes that a cache may take of the device, and where layers go that would be too much.

    A layer that moves or grows is there twice for a moment: where layers on the device may grow,
    room for the largest of them is kept free.
    """

    memory: int
    placement: Device = field(default_factory=Host)

    def __post_init__(self) -> None:
        normalize_int_field(self, "memory", 1)
        check_placement(self.placement)
        if not self.placement.needs_tail:
            raise ValueError(f"{self.placement!r}: layers that are too much go to the host")

    def offloaded(self, sizes: Sequence[LayerBytes], out: Collection[int]) -> frozenset[int]:
        """Which layers are to be on the host, the last ones first.

        Args:
          sizes: of each layer.
          out: those that are on the host now. They come back, the first ones first, where that
            leaves a quarter of the memory free.

        Raises:
          ValueError: if the device can't hold what stays there of layers on the host.
        """
        chosen = set(out)
        while self._taken(sizes, chosen) > self.memory:
            here = [n for n, size in enumerate(sizes) if n not in chosen and _leaves(size)]
            if not here:
                fetched = " and the layers fetched ahead" if self.placement.ahead else ""
                raise ValueError(
                    f"the cache may take {self.memory:,} bytes of the device, but with every layer "
                    f"on the host its newest tokens{fetched} would take "
                    f"{self._taken(sizes, chosen):,}"
                )
            chosen.add(here[-1])
        for n in sorted(chosen):
            if n in out and self._taken(sizes, chosen - {n}) <= _BACK * self.memory:
                chosen.remove(n)
        return frozenset(chosen)

    def _taken(self, sizes: Sequence[LayerBytes], out: Collection[int]) -> int:
        here = [size for n, size in enumerate(sizes) if n not in out]
        there = [size for n, size in enumerate(sizes) if n in out]
        free = max((size.device for size in here if size.grows and _leaves(size)), default=0)
        fetched = ahead_bytes([(size.host, self.placement) for size in there])
        return sum(s.device for s in here) + sum(s.tail for s in there) + free + fetched


def ahead_bytes(bodies: Sequence[tuple[int, Device]]) -> int:
    """Bytes of the device that layers take which are fetched ahead, at most: of bodies with so many
    bytes, and their placements."""
    most = max((placement.ahead for _, placement in bodies), default=0)
    fetched = sorted((size for size, placement in bodies if placement.ahead), reverse=True)
    return sum(fetched[: most + 1])


def _leaves(size: LayerBytes) -> bool:
    """Whether the device has less of the layer when it is on the host."""
    return size.tail < size.device
