"""GPUs as their compiler is told of them, where none is here."""

from typing import Any, NamedTuple

import jax

from kvjax.core.compat import jax_0_10_describes
from kvjax.core.target import target_of


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


def described(kind: Any) -> str:
    """A GPU as XLA's compiler describes it (``stream_executor.GpuTargetConfigProto``)."""
    major, minor = kind.generation
    each = _GENERATIONS[kind.generation]
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return jax_0_10_describes(
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


_own: list[tuple[int, int]] = []


def own_capability() -> tuple[int, int] | None:
    """The compute capability that this process compiles kernels for: of its GPU, or, where it has
    none, the first that it was asked for; None before that. JAX's compiler of Mosaic kernels keeps
    to one in a process."""
    if not _own and jax.default_backend() == "gpu":
        own = target_of(jax.local_devices()[0]).capability
        _own.extend([] if own is None else [own])
    return _own[0] if _own else None


def check_capability(asked: tuple[int, int]) -> None:
    """Raise ``ValueError`` where this process compiles kernels for another one."""
    own = own_capability()
    if own is None:
        _own.append(asked)
    elif own != asked:
        raise ValueError(
            f"this process compiles kernels for GPUs of compute capability {own[0]}.{own[1]}, and "
            f"JAX compiles them for one capability in a process: compile for {asked[0]}.{asked[1]} "
            "in another, with JAX_PLATFORMS=cpu"
        )
