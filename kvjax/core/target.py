"""The target of a program: the platform and device type that it is traced and compiled for."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax

JaxDevice: TypeAlias = Any
"""A ``jax.Device``, which has no static type."""
AMPERE = 8, 0
"""The first compute capability with bfloat16 and with support in XLA's Triton compiler."""

_SHARED = {(7, 5): 64, (8, 0): 163, (9, 0): 227, (10, 0): 227}
"""KiB of shared memory per program, by compute capability. Other capabilities have 99."""


@dataclass(frozen=True)
class Target:
    """The type of device that a program is traced for.

    Attributes:
      platform: cpu, gpu or tpu.
      capability: the compute capability of an NVIDIA GPU, such as (8, 0), or None.
    """

    platform: str
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.capability is None:
            return f"a {self.platform.upper()}"
        return "a GPU of compute capability {}.{}".format(*self.capability)

    @property
    def before_ampere(self) -> bool:
        """Whether this is an NVIDIA GPU without bfloat16 and without Triton, such as a T4."""
        return self.capability is not None and self.capability < AMPERE

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that a GPU program may use.

        If the compute capability is unknown, this is the minimum over Ampere and later GPUs.
        """
        return (99 if self.capability is None else _SHARED.get(self.capability, 99)) * 1024


def target_of(device: JaxDevice) -> Target:
    """Return the target for a device."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    if device.platform != "gpu" or match is None:
        return Target(device.platform)
    return Target("gpu", (int(match[1]), int(match[2])))


def default_device() -> JaxDevice:
    """Return JAX's default device. If JAX's config names a platform instead of a device, it is the
    first device of that platform."""
    chosen = jax.config.values["jax_default_device"]
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


_target: ContextVar[Target | None] = ContextVar("target", default=None)


@contextmanager
def tracing_for(target: Target) -> Iterator[None]:
    """Within this context, trace programs for ``target`` instead of the default device."""
    token = _target.set(target)
    try:
        yield
    finally:
        _target.reset(token)


def current_target() -> Target:
    """Return the target set by ``tracing_for``, or the default device's target."""
    return _target.get() or target_of(default_device())


def current_platform() -> str:
    """Return the platform of ``current_target``."""
    return current_target().platform


def on_cpu() -> bool:
    """Return whether programs are currently traced for a CPU."""
    return current_platform() == "cpu"


@dataclass(frozen=True)
class DeviceSpec:
    """The data sheet of a device type.

    Attributes:
      platform: gpu or tpu.
      memory: size of the device's memory in bytes.
      bandwidth: memory bandwidth in bytes per second.
      topologies: known topologies of TPUs, in chips.
      name: the name that the compiler or driver uses, if it is not the key in ``DEVICE_SPECS``.
      cores: streaming multiprocessors of a GPU.
      clock: clock frequency of a GPU in GHz.
      l2: size of a GPU's L2 cache in bytes.
      capability: compute capability of a GPU.
      devices_per_chip: JAX devices per TPU chip.
    """

    platform: str
    memory: int
    bandwidth: float
    topologies: str = ""
    name: str = ""
    cores: int = 0
    clock: float = 0.0
    l2: int = 0
    capability: tuple[int, int] = (0, 0)
    devices_per_chip: int = 1

    @property
    def target(self) -> Target:
        """The target for this device type."""
        return Target(self.platform, self.capability if self.platform == "gpu" else None)


GIB = 2**30


def _gpu(
    name: str,
    capability: tuple[int, int],
    gib: float,
    bandwidth: float,
    cores: int,
    clock: float,
    l2_mib: int,
) -> DeviceSpec:
    """Return the data sheet of an NVIDIA GPU. ``name`` is the name that its driver reports."""
    memory = int(gib * GIB)
    return DeviceSpec("gpu", memory, bandwidth, "", name, cores, clock, l2_mib * 2**20, capability)


_SQUARE = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBE = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4"
DEVICE_SPECS = {
    # https://cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x
    "v5e": DeviceSpec("tpu", 16 * GIB, 819e9, _SQUARE),
    "v6e": DeviceSpec("tpu", 32 * GIB, 1640e9, _SQUARE),
    "v5p": DeviceSpec("tpu", 95 * GIB, 2765e9, _CUBE),
    "v7x": DeviceSpec("tpu", 96 * GIB, 3690e9, _CUBE, name="tpu7x", devices_per_chip=2),
    # NVIDIA's data sheets
    "t4": _gpu("Tesla T4", (7, 5), 15, 320e9, 40, 1.59, 4),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80, 2.039e12, 108, 1.41, 40),
    "a100-40gb": _gpu("NVIDIA A100-SXM4-40GB", (8, 0), 40, 1.555e12, 108, 1.41, 40),
    "a10": _gpu("NVIDIA A10", (8, 6), 22.5, 600e9, 72, 1.695, 6),
    "rtx3090": _gpu("NVIDIA GeForce RTX 3090", (8, 6), 24, 936e9, 82, 1.695, 6),
    "l4": _gpu("NVIDIA L4", (8, 9), 22.5, 300e9, 58, 2.04, 48),
    "rtx4090": _gpu("NVIDIA GeForce RTX 4090", (8, 9), 24, 1.008e12, 128, 2.52, 72),
    "h100": _gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 3.35e12, 132, 1.98, 50),
    "h200": _gpu("NVIDIA H200", (9, 0), 141, 4.8e12, 132, 1.98, 50),
    "b200": _gpu("NVIDIA B200", (10, 0), 179, 8e12, 148, 1.965, 126),
    "rtxpro6000": _gpu(
        "NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), 96, 1.597e12, 188, 2.6, 128
    ),
}
"""Device types by short name."""

_TPU_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v6 lite": "v6e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU7x": "v7x",
}
"""Short names of TPUs by ``device_kind``."""


def device_spec(name: str) -> DeviceSpec:
    """Return the data sheet of a device type, by its short name.

    Raises:
      ValueError: if the name is unknown.
    """
    if name not in DEVICE_SPECS:
        raise ValueError(f"unknown device {name!r}: choose one of {', '.join(DEVICE_SPECS)}")
    return DEVICE_SPECS[name]


def spec_of(device: JaxDevice) -> DeviceSpec | None:
    """Return the data sheet of a device; None if its type is not in ``DEVICE_SPECS``."""
    kind = device.device_kind
    if kind in _TPU_KINDS:
        return DEVICE_SPECS[_TPU_KINDS[kind]]
    return next((spec for spec in DEVICE_SPECS.values() if spec.name == kind), None)


_mosaic: list[tuple[int, int]] = []


def mosaic_capability() -> tuple[int, int] | None:
    """Return the compute capability for which this process compiles Mosaic kernels; None if it is
    not yet decided.

    JAX's Mosaic compiler supports one compute capability per process. It is the capability of the
    process's GPU or, without a GPU, the first capability with which ``check_mosaic_capability`` was
    called.
    """
    if not _mosaic and jax.default_backend() == "gpu":
        own = target_of(jax.local_devices()[0]).capability
        _mosaic.extend([] if own is None else [own])
    return _mosaic[0] if _mosaic else None


def check_mosaic_capability(capability: tuple[int, int]) -> None:
    """Raise ``ValueError`` if this process compiles Mosaic kernels for a different compute
    capability."""
    own = mosaic_capability()
    if own is None:
        _mosaic.append(capability)
    elif own != capability:
        raise ValueError(
            f"this process compiles kernels for GPUs of compute capability {own[0]}.{own[1]}, and "
            "JAX supports one capability per process: compile for "
            f"{capability[0]}.{capability[1]} in another process, with JAX_PLATFORMS=cpu"
        )
