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
def tracing_for(target: Target) -> Iterator[None]:
    """Trace what is inside for a target, whatever the default device is."""
    token = _computing.set(target)
    try:
        yield
    finally:
        _computing.reset(token)


def current_target() -> Target:
    """What is traced for here: by ``tracing_for``, or else the default device."""
    return _computing.get() or target_of(default_device())


def current_platform() -> str:
    """The platform of ``current_target``."""
    return current_target().platform


def on_cpu() -> bool:
    """Whether what is traced here is for a CPU."""
    return current_platform() == "cpu"


@dataclass(frozen=True)
class DeviceSpec:
    """A kind of device: its ``platform``, bytes of ``memory``, and the ``bandwidth`` of that in
    bytes a second, as its maker says. ``topologies``: of TPUs, some of their topologies, counted in
    chips; ``devices_a_chip``: JAX devices of a chip; ``name``: the compiler's or the driver's name
    of it, where that is not its key in ``DEVICE_SPECS``;
    ``cores``, ``clock``, ``l2`` and ``generation``: of GPUs, streaming multiprocessors, gigahertz,
    bytes of the second cache, and the compute capability."""

    platform: str
    memory: int
    bandwidth: float
    topologies: str = ""
    name: str = ""
    cores: int = 0
    clock: float = 0.0
    l2: int = 0
    generation: tuple[int, int] = (0, 0)
    devices_a_chip: int = 1

    @property
    def target(self) -> Target:
        """What is traced for it."""
        return Target(self.platform, self.generation if self.platform == "gpu" else None)


GIB = 2**30


def _gpu(
    name: str, generation: tuple[int, int], gib: float, bandwidth: float, cores: int, clock: float,
    l2: int,
) -> DeviceSpec:  # fmt: skip
    """One of NVIDIA's, by the name that its driver reports; ``l2`` in MiB."""
    memory = int(gib * GIB)
    return DeviceSpec("gpu", memory, bandwidth, "", name, cores, clock, l2 * 2**20, generation)


_SQUARE = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBE = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4"
DEVICE_SPECS = {
    # https://cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x
    "v5e": DeviceSpec("tpu", 16 * GIB, 819e9, _SQUARE),
    "v6e": DeviceSpec("tpu", 32 * GIB, 1640e9, _SQUARE),
    "v5p": DeviceSpec("tpu", 95 * GIB, 2765e9, _CUBE),
    "v7x": DeviceSpec("tpu", 96 * GIB, 3690e9, _CUBE, name="tpu7x", devices_a_chip=2),
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
"""What a name stands for."""


def device_spec(name: str) -> DeviceSpec:
    """A kind by its short name.

    Raises:
      ValueError: if no such kind is known.
    """
    if name not in DEVICE_SPECS:
        raise ValueError(f"unknown device {name!r}: there are {', '.join(DEVICE_SPECS)}")
    return DEVICE_SPECS[name]


def spec_of(device: Any) -> DeviceSpec | None:
    """What is known of a device's kind; None of one that stands in no list here."""
    names = {
        "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU v5": "v5p", "TPU v5p": "v5p",
        "TPU7x": "v7x",
    }  # fmt: skip
    given = device.device_kind
    if given in names:
        return DEVICE_SPECS[names[given]]
    return next((kind for kind in DEVICE_SPECS.values() if kind.name == given), None)


_own: list[tuple[int, int]] = []


def mosaic_capability() -> tuple[int, int] | None:
    """The compute capability that this process compiles kernels for: of its GPU, or, where it has
    none, the first that it was asked for; None before that. JAX's compiler of Mosaic kernels keeps
    to one in a process."""
    if not _own and jax.default_backend() == "gpu":
        own = target_of(jax.local_devices()[0]).capability
        _own.extend([] if own is None else [own])
    return _own[0] if _own else None


def check_mosaic_capability(asked: tuple[int, int]) -> None:
    """Raise ``ValueError`` where this process compiles kernels for another one."""
    own = mosaic_capability()
    if own is None:
        _own.append(asked)
    elif own != asked:
        raise ValueError(
            f"this process compiles kernels for GPUs of compute capability {own[0]}.{own[1]}, and "
            f"JAX compiles them for one capability in a process: compile for {asked[0]}.{asked[1]} "
            "in another, with JAX_PLATFORMS=cpu"
        )
