"""GPUs as their compiler is told of them, where none is here."""

from typing import Any


def described(kind: Any) -> str:
    """A GPU as XLA's compiler describes it (``stream_executor.GpuTargetConfigProto``)."""
    major, minor = kind.generation
    shared = {8: 167936, 9: 233472}[major]
    accelerated = " feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  shared_memory_per_block_optin: {shared - 1024}
  threads_per_core_limit: 2048
  core_count: {kind.cores}
  fpus_per_core: {128 if major >= 9 else 64}
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
