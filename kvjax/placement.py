"""Placement: where a cache's arrays live. Values never change with it."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax

_T = TypeVar("_T")


@dataclass(frozen=True)
class Device:
    """In the memory of the default device."""

    place: str = "device"

    def platform(self) -> str:
        """The name of the platform that computes on these arrays: cpu, gpu or tpu."""
        return _default_device().platform

    def put(self, tree: _T) -> _T:
        """Move a pytree's arrays there, committed: an uncommitted array beside a committed one
        would compile every step a second time."""
        return jax.device_put(tree, _default_device())


def _default_device() -> Any:
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]
