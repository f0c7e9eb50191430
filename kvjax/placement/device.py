"""On a device, or on the devices of a mesh; what a placement answers."""

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

import jax

from kvjax.core.device import put_here
from kvjax.core.target import Target, current_target
from kvjax.layouts import Share
from kvjax.placement.mesh import SEQUENCE
from kvjax.placement.spread import Spread

_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """In the memory of the default device, or of the devices of a mesh.

    ``spread``: how a cache is spread over a mesh, which ``init_cache(..., mesh=)`` says, and
    ``migrate``. ``computes``: what computes on its arrays, which is fixed when a cache is made.
    """

    spread: Spread | None = field(default=None, kw_only=True, repr=False)
    computes: Target | None = field(default=None, kw_only=True, repr=False)

    place: ClassVar[str] = "device"
    """The place's name, in ``nbytes`` and reports."""

    behind_tail: ClassVar[bool] = False
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
        """With what computes, the devices here now where it is open."""
        return replace(self, computes=self.target())

    def target(self) -> Target:
        """What computes on these arrays."""
        if self.computes is not None:
            return self.computes
        return current_target() if self.spread is None else self.spread.target

    def platform(self) -> str:
        """The name of its platform: cpu, gpu or tpu."""
        return self.target().platform

    def put(self, tree: _T) -> _T:
        """Move a pytree's arrays [batch, ...] there."""
        return put_here(tree) if self.spread is None else self.spread.put(tree, self.spread.of_rows)

    def put_tokens(self, tree: _T) -> _T:
        """``put`` of arrays [batch, kv_heads, ...] of which every share of the slots has all."""
        if self.spread is None:
            return self.put(tree)
        return self.spread.put(tree, self.spread.of_tokens)

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


def beside(array: jax.Array) -> Any:
    """The context in which arrays are put to where ``array`` is, if that is one device."""
    devices = array.devices()
    return nullcontext() if len(devices) > 1 else jax.default_device(next(iter(devices)))
