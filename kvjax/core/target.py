"""What programs are traced for: a platform, and what its devices can do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

AMPERE = 8, 0
"""The first compute capability with bfloat16, and for which XLA compiles Triton."""

_SHARED = {(7, 5): 64, (8, 0): 163, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory that a program may have, by compute capability; others have 99."""


@dataclass(frozen=True)
class Target:
    """The devices that a program is traced for.

    ``platform``: cpu, gpu or tpu. ``capability``: of NVIDIA's GPUs, their compute capability, such
    as (8, 0); None of all other devices.
    """

    platform: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return f"a {self.platform.upper()}"
        return "a GPU of compute capability {}.{}".format(*self.capability)

    @property
    def before_ampere(self) -> bool:
        """Whether it is one of NVIDIA's GPUs without bfloat16, and without what XLA has Triton
        compile: a T4."""
        return self.capability is not None and self.capability < AMPERE

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a GPU's program may have; of devices that do not say their
        compute capability as many as all have from Ampere on."""
        return (99 if self.capability is None else _SHARED.get(self.capability, 99)) * 1024


def target_of(device: Any) -> Target:
    """The target of a device."""
    given = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform != "gpu" or given is None:
        return Target(device.platform)
    return Target("gpu", (int(given[1]), int(given[2])))


def default_device() -> Any:
    """JAX's default device: the first of its platform, where only a platform was named."""
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


_computing: ContextVar[Target | None] = ContextVar("computing", default=None)


@contextmanager
def computing_on(target: Target) -> Iterator[None]:
    """Trace what is inside for a target, whatever the default device is."""
    token = _computing.set(target)
    try:
        yield
    finally:
        _computing.reset(token)


def current_target() -> Target:
    """What is traced for here: by ``computing_on``, or else the default device."""
    return _computing.get() or target_of(default_device())


def traced_for() -> str:
    """The platform of ``current_target``."""
    return current_target().platform


def on_cpu() -> bool:
    """Whether what is traced here is for a CPU."""
    return traced_for() == "cpu"
