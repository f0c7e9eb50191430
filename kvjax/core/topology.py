"""Target devices: TPUs and GPUs for which programs are compiled, without being attached.

``jax.experimental.topologies`` creates the devices from a description. Nothing is allocated or
executed, but the compiled programs are the ones that real devices would run.
"""

import functools
import importlib
import importlib.util
import math
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.core.compat import jax_0_8_libtpu, jax_0_10_gpu_description
from kvjax.core.target import DEVICE_SPECS, DeviceSpec, JaxDevice, device_spec, spec_of
from kvjax.core.validation import ArgumentError, MissingCompilerError

DeviceChoice = JaxDevice | Mesh | str | None
"""A device or a topology, a mesh, or the name of a device type."""
_PACKAGES = {
    "tpu": ("libtpu", ("libtpu",), 'pip install "kvjax[aot]"'),
    "gpu": (
        "jax-cuda12-plugin and jax-cuda12-pjrt",
        ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"),
        "pip install --no-deps jax-cuda12-plugin=={0} jax-cuda12-pjrt=={0}",
    ),
}
"""For each platform: the packages that contain its compiler, their modules, and the command to
install them."""

_ENVIRONMENT = {
    # libtpu's lock file would end a second process, although neither process holds a TPU.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # Don't wait for a metadata server.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Without a CUDA driver, its version can't be checked.
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
}


def target_device(name: str) -> JaxDevice:
    """Return a target device by the name of its type, such as ``"v5e"`` or ``"h200"``.

    Raises:
      ValueError: if the name is unknown.
      MissingCompilerError: if the device's compiler is not installed.
    """
    return target_devices(name, 1)[0]


def target_devices(name: str, count: int) -> list[JaxDevice]:
    """Return ``count`` connected target devices of one type.

    Raises:
      ValueError: if the name is unknown, or the type has no topology of this size.
      MissingCompilerError: if the device's compiler is not installed.
    """
    device_spec(name)
    return _topology(name, count)


def resolve_device(device: DeviceChoice) -> JaxDevice:
    """Return the device that an argument names.

    ``device`` may be a ``jax.Device``, a topology, for which the first device is returned, or the
    name of a device type, for which a target device is returned. None means the default device, and
    is returned unchanged.

    Raises:
      ValueError: for any other value.
      MissingCompilerError: if a target device's compiler is not installed.
    """
    if device is None or isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        return target_device(device)
    if isinstance(device, AbstractMesh):
        raise ValueError(
            "an AbstractMesh has no devices: use kvjax.make_mesh(tensor=2, devices='v5e')"
        )
    devices = getattr(device, "devices", None)
    if devices:
        return devices[0]
    known = ", ".join(DEVICE_SPECS)
    raise ArgumentError(
        f"device must be a jax.Device, a topology or one of {known}; got {device!r:.80}",
        param="device",
    )


def resolve_device_or_mesh(device: DeviceChoice) -> tuple[JaxDevice, Mesh | None]:
    """Return a device and a mesh. For a mesh they are its first device and the mesh, otherwise
    ``resolve_device(device)`` and None."""
    if isinstance(device, Mesh):
        return device.devices.flat[0], device
    return resolve_device(device), None


class TargetDescription(NamedTuple):
    """A target device or a mesh of them, in a form that can be pickled."""

    name: str
    shape: tuple[int, ...] | None
    axes: tuple[str, ...] = ()
    types: tuple[AxisType, ...] = ()

    def make(self) -> JaxDevice | Mesh:
        """Create the device or the mesh."""
        if self.shape is None:
            return target_device(self.name)
        devices = np.array(target_devices(self.name, math.prod(self.shape))).reshape(self.shape)
        return Mesh(devices, self.axes, axis_types=self.types)


def describe_target(device: JaxDevice, mesh: Mesh | None) -> TargetDescription:
    """Describe a target device, or a mesh of target devices."""
    name = next(name for name, spec in DEVICE_SPECS.items() if spec == spec_of(device))
    if mesh is None:
        return TargetDescription(name, None)
    return TargetDescription(name, mesh.devices.shape, mesh.axis_names, mesh.axis_types)


@contextmanager
def compiling_for(device: JaxDevice) -> Iterator[None]:
    """Make ``device`` the default device, and hide warnings that JAX's compilation cache can't load
    programs for target devices."""
    with jax.default_device(device), jax_0_8_libtpu(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error (read|writ)ing persistent compilation cache")
        yield


def check_host_memory(device: JaxDevice) -> None:
    """Raise ``ValueError`` if programs for a device can't keep arrays in host memory."""
    try:
        kinds = {memory.kind for memory in device.addressable_memories()}
    except jax.errors.JaxRuntimeError:  # target devices don't implement this
        kinds = {"pinned_host"} if device.platform == "tpu" else set()
    if "pinned_host" not in kinds:
        raise ValueError(
            f"caches on the host can't be compiled for a {device.device_kind or device.platform} "
            "that is not attached: its compiler does not support host memory"
        )


def check_compiler(platform: str) -> None:
    """Raise ``MissingCompilerError`` if the compiler for a platform is not installed."""
    packages, modules, command = _PACKAGES[platform]
    try:
        installed = all(importlib.util.find_spec(module) for module in modules)
    except ModuleNotFoundError:
        installed = False
    if not installed:
        raise MissingCompilerError(
            f"compiling for a {platform} needs {packages}: {command.format(jax.__version__)}"
        )


_target_devices: set[JaxDevice] = set()


def is_target_device(device: JaxDevice) -> bool:
    """Return whether a device was created in this module from a topology. Such a device can't have
    arrays."""
    return device in _target_devices


@functools.lru_cache(maxsize=32)
def _topology(name: str, count: int) -> list[JaxDevice]:
    from jax.experimental import topologies

    spec = DEVICE_SPECS[name]
    check_compiler(spec.platform)
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    options = {}
    if spec.platform == "gpu":
        options = {"topology": f"1x1x{count}", "target_config": gpu_description(spec)}
    else:
        name = f"{spec.name or name}:{_smallest_topology(name, count)}"
    platform = {"gpu": "cuda"}.get(spec.platform, spec.platform)
    make = functools.partial(topologies.get_topology_desc, name, platform=platform, **options)
    try:
        try:
            topology = make()
        except NotImplementedError:
            # JAX was initialized before _ENVIRONMENT was set and skipped the CUDA plugin.
            importlib.import_module("jax_plugins.xla_cuda12").initialize()
            topology = make()
    except jax.errors.JaxRuntimeError as error:
        if "Invalid TPU external name" not in str(error):
            raise
        raise MissingCompilerError(
            f"the installed libtpu does not know {name.partition(':')[0]}: install a newer libtpu, "
            f"which needs a newer JAX than {jax.__version__}"
        ) from error
    devices = list(topology.devices[:count])
    _target_devices.update(devices)
    return devices


def _smallest_topology(name: str, count: int) -> str:
    """Return the smallest topology with at least ``count`` TPUs."""
    spec = DEVICE_SPECS[name]
    sizes = {
        math.prod(map(int, shape.split("x"))) * spec.devices_per_chip: shape
        for shape in spec.topologies.split()
    }
    if count not in (1, 2, *sizes):
        known = ", ".join(map(str, sizes))
        raise ValueError(f"{name} comes as 1, 2, {known} devices, not as {count}")
    return next(shape for size, shape in sizes.items() if size >= count)


class _Multiprocessor(NamedTuple):
    """A streaming multiprocessor.

    Attributes:
      shared: bytes of shared memory.
      reserved: bytes of shared memory that a block can't use.
      threads: maximum number of resident threads.
      units: number of floating-point units.
    """

    shared: int
    reserved: int
    threads: int
    units: int


_MULTIPROCESSORS = {
    (7, 5): _Multiprocessor(65536, 0, 1024, 64),
    (8, 0): _Multiprocessor(167936, 1024, 2048, 64),
    (8, 6): _Multiprocessor(102400, 1024, 1536, 128),
    (8, 9): _Multiprocessor(102400, 1024, 1536, 128),
    (9, 0): _Multiprocessor(233472, 1024, 2048, 128),
    (10, 0): _Multiprocessor(233472, 1024, 2048, 128),
    (12, 0): _Multiprocessor(102400, 1024, 1536, 128),
}
"""Multiprocessors by compute capability. Source: the CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability"."""


def gpu_description(spec: DeviceSpec) -> str:
    """Describe a GPU in the format of XLA's compiler (``stream_executor.GpuTargetConfigProto``)."""
    major, minor = spec.capability
    core = _MULTIPROCESSORS[spec.capability]
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return jax_0_10_gpu_description(
        f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {core.shared}
  shared_memory_per_block_optin: {core.shared - core.reserved}
  threads_per_core_limit: {core.threads}
  core_count: {spec.cores}
  fpus_per_core: {core.units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {int(spec.bandwidth)}
  l2_cache_size: {spec.l2}
  clock_rate_ghz: {spec.clock}
  device_memory_size: {spec.memory}
  cuda_compute_capability {{ major: {major} minor: {minor}{accelerated} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  ecc_enabled: true
  name: "{spec.name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{spec.name}"
"""
    )
