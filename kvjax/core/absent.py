"""Devices that are not here, for which the compilers of TPUs and GPUs compile all the same.

A topology is made from a description alone (``jax.experimental.topologies``): nothing is allocated
or run, but what is compiled for its devices is the program that they would run.
"""

import functools
import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.core.compat import jax_0_8_libtpu
from kvjax.core.errors import MissingCompilerError
from kvjax.core.gpus import described
from kvjax.core.target import Target


@dataclass(frozen=True)
class Kind:
    """A kind of device: its ``platform``, bytes of ``memory``, and the ``bandwidth`` of that in
    bytes a second, as its maker says. ``topologies``: of TPUs, some of their topologies, counted in
    chips; ``devices_a_chip``: JAX devices of a chip; ``name``: the compiler's or the driver's name
    of it, where that is not its key in ``KINDS``;
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
) -> Kind:  # fmt: skip
    """One of NVIDIA's, by the name that its driver reports; ``l2`` in MiB."""
    memory = int(gib * GIB)
    return Kind("gpu", memory, bandwidth, "", name, cores, clock, l2 * 2**20, generation)


_SQUARE = "2x2 2x4 4x4 4x8 8x8 8x16 16x16"
_CUBE = "2x2x1 2x2x2 2x2x4 2x4x4 4x4x4"
KINDS = {
    # https://cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x
    "v5e": Kind("tpu", 16 * GIB, 819e9, _SQUARE),
    "v6e": Kind("tpu", 32 * GIB, 1640e9, _SQUARE),
    "v5p": Kind("tpu", 95 * GIB, 2765e9, _CUBE),
    "v7x": Kind("tpu", 96 * GIB, 3690e9, _CUBE, name="tpu7x", devices_a_chip=2),
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

_PACKAGES = {
    "tpu": ("libtpu", ("libtpu",), 'pip install "kvjax[aot]"'),
    "gpu": (
        "jax-cuda12-plugin and jax-cuda12-pjrt",
        ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"),
        "pip install --no-deps jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}",
    ),
}
"""Of each platform: the packages that have its compiler, their modules, and how they come here."""

_QUIET = {
    # A second process would end at the lock file of the first, which holds no device either.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # There is no server of metadata to wait for.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # No driver has a version to be checked.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def absent(name: str) -> Any:
    """A device by the name of its kind, ``"v5e"`` or ``"h200"``, that need not be here.

    Raises:
      ValueError: if no such kind is known.
      MissingCompilerError: if its compiler is not installed.
    """
    return absent_devices(name, 1)[0]


def absent_devices(name: str, count: int) -> list[Any]:
    """So many of a kind, linked with one another.

    Raises:
      ValueError: if no such kind is known, or it has no topology of so many devices.
      MissingCompilerError: as of ``absent``.
    """
    kind_named(name)
    return _topology(name, count)


def kind_named(name: str) -> Kind:
    """A kind by its short name.

    Raises:
      ValueError: if no such kind is known.
    """
    if name not in KINDS:
        raise ValueError(f"unknown device {name!r}: there are {', '.join(KINDS)}")
    return KINDS[name]


def device_of(device: Any) -> Any:
    """A ``jax.Device``, of a topology the first one, and of a kind's name one that need not be
    here; None is the default device.

    Raises:
      ValueError: if it is none of these.
      MissingCompilerError: as of ``absent``.
    """
    if device is None or isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        return absent(device)
    if isinstance(device, AbstractMesh):
        raise ValueError("an AbstractMesh has no devices: make_mesh(tensor=2, devices='v5e') has")
    devices = getattr(device, "devices", None)
    if devices:
        return devices[0]
    raise ValueError(
        f"a device is a jax.Device, a topology or a name ({', '.join(KINDS)}), got {device!r:.80}"
    )


def device_or_mesh(given: Any) -> tuple[Any, Mesh | None]:
    """A device, as of ``device_of``, and None; or of a mesh its first device, and the mesh."""
    if isinstance(given, Mesh):
        return given.devices.flat[0], given
    return device_of(given), None


class Named(NamedTuple):
    """Devices that are not here, by name: their kind, and of a mesh its axes."""

    kind: str
    shape: tuple[int, ...] | None
    axes: tuple[str, ...] = ()
    types: tuple[AxisType, ...] = ()

    def make(self) -> Any:
        """The device, or the mesh."""
        if self.shape is None:
            return absent(self.kind)
        devices = np.array(absent_devices(self.kind, math.prod(self.shape))).reshape(self.shape)
        return Mesh(devices, self.axes, axis_types=self.types)


def named(device: Any, mesh: Mesh | None) -> Named:
    """A device that is not here, or a mesh of such, by the name of its kind."""
    kind = next(name for name, kind in KINDS.items() if kind == kind_of(device))
    if mesh is None:
        return Named(kind, None)
    return Named(kind, mesh.devices.shape, mesh.axis_names, mesh.axis_types)


def kind_of(device: Any) -> Kind | None:
    """What is known of a device's kind; None of one that stands in no list here."""
    names = {
        "TPU v5 lite": "v5e", "TPU v6 lite": "v6e", "TPU v5": "v5p", "TPU v5p": "v5p",
        "TPU7x": "v7x",
    }  # fmt: skip
    given = device.device_kind
    if given in names:
        return KINDS[names[given]]
    return next((kind for kind in KINDS.values() if kind.name == given), None)


@contextmanager
def compiling_for(device: Any) -> Iterator[None]:
    """It is the default device, and a cache of programs, which can't give back those of a device
    that is not here, is not heard of."""
    with jax.default_device(device), jax_0_8_libtpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache")
        yield


def check_host(device: Any) -> None:
    """Raise ``ValueError`` for a device for which no program with arrays on its host can be
    compiled."""
    try:
        kinds = {memory.kind for memory in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:  # of a topology
        kinds = {"pinned_host"} if device.platform == "tpu" else set()
    if "pinned_host" not in kinds:
        raise ValueError(
            f"caches on the host can't be compiled for a {device.device_kind or device.platform} "
            "that is not here: its compiler knows no memory of a host"
        )


def check_compiler(platform: str) -> None:
    """Raise ``MissingCompilerError`` where the compiler of a platform is not installed."""
    packages, modules, command = _PACKAGES[platform]
    try:
        found = all(importlib.util.find_spec(module) for module in modules)
    except ModuleNotFoundError:
        found = False
    if not found:
        raise MissingCompilerError(
            f"compiling for a {platform} needs {packages}: {command.format(jax.__version__)}"
        )


_made: set[Any] = set()


def is_absent(device: Any) -> bool:
    """Whether a device was made here of a topology, and nothing can be put on it."""
    return device in _made


@functools.lru_cache(maxsize=32)
def _topology(name: str, count: int) -> list[Any]:
    from jax.experimental import topologies

    kind = KINDS[name]
    check_compiler(kind.platform)
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    more = {}
    if kind.platform == "gpu":
        more = {"topology": f"1x1x{count}", "target_config": described(kind)}
    else:
        name = f"{kind.name or name}:{_smallest(name, count)}"
    platform = {"gpu": "cuda"}.get(kind.platform, kind.platform)
    make = functools.partial(topologies.get_topology_desc, name, platform=platform, **more)
    try:
        try:
            found = make()
        except NotImplementedError:
            # JAX started before ``_QUIET`` was set, and left a plugin without a driver out.
            importlib.import_module("jax_plugins.xla_cuda12").initialize()
            found = make()
    except jax.errors.JaxRuntimeError as error:
        if "Invalid TPU external name" not in str(error):
            raise
        raise MissingCompilerError(
            f"the installed libtpu does not know {name.partition(':')[0]}: a newer one does, which "
            f"needs a newer JAX than {jax.__version__}"
        ) from error
    devices = list(found.devices[:count])
    _made.update(devices)
    return devices


def _smallest(name: str, count: int) -> str:
    """The smallest topology of so many TPUs."""
    kind = KINDS[name]
    sizes = {
        math.prod(map(int, x.split("x"))) * kind.devices_a_chip: x for x in kind.topologies.split()
    }
    if count not in (1, 2, *sizes):
        known = ", ".join(map(str, sizes))
        raise ValueError(f"{name} comes as 1, 2, {known} devices, not as {count}")
    return next(each for size, each in sizes.items() if size >= count)
