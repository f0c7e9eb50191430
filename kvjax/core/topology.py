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
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.core.compat import jax_0_8_libtpu, jax_0_10_gpu_description
from kvjax.core.errors import MissingCompilerError
from kvjax.core.target import DEVICE_SPECS, device_spec, spec_of

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


def target_device(name: str) -> Any:
    """A device by the name of its kind, ``"v5e"`` or ``"h200"``, that need not be here.

    Raises:
      ValueError: if no such kind is known.
      MissingCompilerError: if its compiler is not installed.
    """
    return target_devices(name, 1)[0]


def target_devices(name: str, count: int) -> list[Any]:
    """So many of a kind, linked with one another.

    Raises:
      ValueError: if no such kind is known, or it has no topology of so many devices.
      MissingCompilerError: as of ``target_device``.
    """
    device_spec(name)
    return _topology(name, count)


def resolve_device(device: Any) -> Any:
    """A ``jax.Device``, of a topology the first one, and of a kind's name one that need not be
    here; None is the default device.

    Raises:
      ValueError: if it is none of these.
      MissingCompilerError: as of ``target_device``.
    """
    if device is None or isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        return target_device(device)
    if isinstance(device, AbstractMesh):
        raise ValueError("an AbstractMesh has no devices: make_mesh(tensor=2, devices='v5e') has")
    devices = getattr(device, "devices", None)
    if devices:
        return devices[0]
    known = ", ".join(DEVICE_SPECS)
    raise ValueError(
        f"device must be a jax.Device, a topology or one of {known}; got {device!r:.80}"
    )


def resolve_device_or_mesh(given: Any) -> tuple[Any, Mesh | None]:
    """A device, as of ``resolve_device``, and None; or of a mesh its first device, and the mesh."""
    if isinstance(given, Mesh):
        return given.devices.flat[0], given
    return resolve_device(given), None


class TargetDescription(NamedTuple):
    """Devices that are not here, by name: their kind, and of a mesh its axes."""

    kind: str
    shape: tuple[int, ...] | None
    axes: tuple[str, ...] = ()
    types: tuple[AxisType, ...] = ()

    def make(self) -> Any:
        """The device, or the mesh."""
        if self.shape is None:
            return target_device(self.kind)
        devices = np.array(target_devices(self.kind, math.prod(self.shape))).reshape(self.shape)
        return Mesh(devices, self.axes, axis_types=self.types)


def describe_target(device: Any, mesh: Mesh | None) -> TargetDescription:
    """A device that is not here, or a mesh of such, by the name of its kind."""
    kind = next(name for name, kind in DEVICE_SPECS.items() if kind == spec_of(device))
    if mesh is None:
        return TargetDescription(kind, None)
    return TargetDescription(kind, mesh.devices.shape, mesh.axis_names, mesh.axis_types)


@contextmanager
def compiling_for(device: Any) -> Iterator[None]:
    """It is the default device, and a cache of programs, which can't give back those of a device
    that is not here, is not heard of."""
    with jax.default_device(device), jax_0_8_libtpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache")
        yield


def check_host_memory(device: Any) -> None:
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


def is_target_device(device: Any) -> bool:
    """Whether a device was made here of a topology, and nothing can be put on it."""
    return device in _made


@functools.lru_cache(maxsize=32)
def _topology(name: str, count: int) -> list[Any]:
    from jax.experimental import topologies

    kind = DEVICE_SPECS[name]
    check_compiler(kind.platform)
    for variable, value in _QUIET.items():
        os.environ.setdefault(variable, value)
    more = {}
    if kind.platform == "gpu":
        more = {"topology": f"1x1x{count}", "target_config": gpu_description(kind)}
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
    kind = DEVICE_SPECS[name]
    sizes = {
        math.prod(map(int, x.split("x"))) * kind.devices_a_chip: x for x in kind.topologies.split()
    }
    if count not in (1, 2, *sizes):
        known = ", ".join(map(str, sizes))
        raise ValueError(f"{name} comes as 1, 2, {known} devices, not as {count}")
    return next(each for size, each in sizes.items() if size >= count)


class _Generation(NamedTuple):
    """Of a compute capability, per streaming multiprocessor: bytes of shared memory, and of those
    what one block can't have; threads; and floating-point units."""

    shared: int
    reserved: int
    threads: int
    units: int


_GENERATIONS = {
    (7, 5): _Generation(65536, 0, 1024, 64),
    (8, 0): _Generation(167936, 1024, 2048, 64),
    (8, 6): _Generation(102400, 1024, 1536, 128),
    (8, 9): _Generation(102400, 1024, 1536, 128),
    (9, 0): _Generation(233472, 1024, 2048, 128),
    (10, 0): _Generation(233472, 1024, 2048, 128),
    (12, 0): _Generation(102400, 1024, 1536, 128),
}
"""CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""


def gpu_description(kind: Any) -> str:
    """A GPU as XLA's compiler describes it (``stream_executor.GpuTargetConfigProto``)."""
    major, minor = kind.generation
    each = _GENERATIONS[kind.generation]
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return jax_0_10_gpu_description(
        f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {each.shared}
  shared_memory_per_block_optin: {each.shared - each.reserved}
  threads_per_core_limit: {each.threads}
  core_count: {kind.cores}
  fpus_per_core: {each.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(kind.bandwidth)}
  l2_cache_size: {kind.l2}
  clock_rate_ghz: {kind.clock}
  device_memory_size: {kind.memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  ecc_enabled: true
  name: "{kind.name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{kind.name}"
"""
    )
