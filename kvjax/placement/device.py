"""On a device, or on the devices of a mesh; what a placement answers."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

from kvjax.core.device import default_device, own_memory, traced_for
from kvjax.layouts import Share
from kvjax.placement.mesh import SEQUENCE
from kvjax.placement.spread import Spread

_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """In the memory of the default device, or of the devices of a mesh.

    ``spread``: how a cache is spread over a mesh, which ``init_cache(..., mesh=)`` says, and
    ``migrate``. ``computes``: the platform that computes on its arrays, which is fixed when a cache
    is made.
    """

    spread: Spread | None = field(default=None, kw_only=True, repr=False)
    computes: str | None = field(default=None, kw_only=True, repr=False)

    place: ClassVar[str] = "device"
    """The place's name, in ``nbytes`` and reports."""

    behind_tail: ClassVar[bool] = False
    """Whether the newest tokens stand in a tail on the device, and only whole blocks are moved."""

    memory_kind: ClassVar[str | None] = None
    """The kind of memory that a body is kept in, as JAX calls it; None for the device's own."""

    space: ClassVar[Any] = jax.memory.Space.Device
    """The same as traced arrays tell it."""

    @property
    def ahead(self) -> int:
        """How many layers before its turn a layer's body is fetched, whole; 0 for never."""
        return 0

    @property
    def parts(self) -> int:
        """How many devices share the slots of a layer."""
        return 1 if self.spread is None else self.spread.parts

    def share(self) -> Share | None:
        """The share of the slots that a device of the mesh has, in ``Spread.run``; None for all."""
        if self.spread is None or self.parts == 1:
            return None
        return Share(self.spread.index(SEQUENCE), self.parts)

    def over(self, spread: Spread | None) -> Self:
        """The same place of other devices."""
        return replace(self, spread=spread, computes=None)

    def of(self, other: "Device") -> Self:
        """The same place of the devices of another."""
        return replace(self, spread=other.spread, computes=other.computes)

    def fixed(self) -> Self:
        """With the platform that computes, the one here now where it is open."""
        return replace(self, computes=self.platform())

    def platform(self) -> str:
        """The name of the platform that computes on these arrays: cpu, gpu or tpu."""
        if self.computes is not None:
            return self.computes
        return traced_for() if self.spread is None else self.spread.platform

    def put(self, tree: _T) -> _T:
        """Move a pytree's arrays [batch, ...] there, committed: an uncommitted array beside a
        committed one would compile every step a second time."""
        if self.spread is not None:
            return self.spread.put(tree, self.spread.of_rows)
        device = default_device()
        # Named, or what is on the host would stay there.
        return jax.device_put(tree, SingleDeviceSharding(device, memory_kind=own_memory(device)))

    def put_tokens(self, tree: _T) -> _T:
        """``put`` of arrays [batch, kv_heads, ...] of which every share of the slots has all."""
        if self.spread is None:
            return self.put(tree)
        return self.spread.put(tree, self.spread.of_tokens)

    def store(self, body: _T, orders: Any) -> _T:
        """Move a body's arrays, kept in these orders, to where they are kept, committed."""
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


def beside(array: jax.Array) -> Any:
    """The context in which arrays are put to where ``array`` is, if that is one device."""
    devices = array.devices()
    return nullcontext() if len(devices) > 1 else jax.default_device(next(iter(devices)))
