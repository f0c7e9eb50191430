"""Placement: where a cache's arrays live. Values never change with it."""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import jax
from jax.sharding import SingleDeviceSharding

_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """In the memory of the default device."""

    place: str = "device"

    behind_tail: ClassVar[bool] = False
    """Whether the newest tokens stand in a tail on the device, and only whole blocks are moved."""

    def platform(self) -> str:
        """The name of the platform that computes on these arrays: cpu, gpu or tpu."""
        return _default_device().platform

    def put(self, tree: _T) -> _T:
        """Move a pytree's arrays there, committed: an uncommitted array beside a committed one
        would compile every step a second time."""
        return jax.device_put(tree, _default_device())

    def store(self, body: _T) -> _T:
        """Move a body's arrays to where they are kept, committed."""
        return self.put(body)

    def near(self, part: _T) -> _T:
        """Part of a body, to compute with; inside ``jit`` too."""
        return part

    def far(self, part: _T) -> _T:
        """Part of a body, to be kept; inside ``jit`` too."""
        return part


@dataclass(frozen=True)
class Host(Device):
    """The body in the host's memory, pinned; the tail, and what is computed with, on the device.

    A block crosses to the host once, when it leaves the tail, and attention fetches the filled
    blocks one after the other: never more than one of them is on the device. Updates stay in
    place inside a donated, jitted step. Gradients do not pass through such a cache.
    """

    place: str = "host"

    behind_tail: ClassVar[bool] = True

    def store(self, body: _T) -> _T:
        """Move a body's arrays to pinned memory of the host, committed."""
        sharding = SingleDeviceSharding(_default_device(), memory_kind="pinned_host")
        return jax.device_put(body, sharding)

    def near(self, part: _T) -> _T:
        """Part of a body, on the device."""
        return jax.device_put(part, jax.memory.Space.Device)

    def far(self, part: _T) -> _T:
        """Part of a body, on the host."""
        return jax.device_put(part, jax.memory.Space.Host)


def _default_device() -> Any:
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]
