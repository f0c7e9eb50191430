"""Differences between supported versions of JAX and Flax.

The oldest supported versions are JAX 0.7.2 and Flax 0.11.2, which Colab has. Most functions are
named after the version that makes them unnecessary. The functions ``has_...`` say which kernels the
installed JAX can compile.
"""

import functools
import importlib
import importlib.metadata
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def _version(package: str) -> tuple[int, ...]:
    """Return the version of a package as integers; () if it is not installed."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


JAX = _version("jax")
"""JAX's version: major, minor, patch."""


def flax_0_12_list(modules: Iterable[object]) -> Any:
    """Return ``nnx.List(modules)``, or a plain list before Flax 0.12."""
    from flax import nnx

    return getattr(nnx, "List", list)(modules)


def jax_0_10_2_host_memory(platform: str) -> bool:
    """Return whether programs for a platform can keep results in host memory.

    Before JAX 0.10.2, results of CPU programs are always in the CPU's default memory.
    """
    return platform != "cpu" or JAX >= (0, 10, 2)


def jax_0_10_gpu_description(gpu: str) -> str:
    """Remove the lines of a GPU description that older compilers reject."""
    if JAX >= (0, 10):
        return gpu
    unknown = r" *(thread_dim|device_vendor|device_address|ecc_enabled|name:|driver|runtime)"
    return "\n".join(line for line in gpu.splitlines() if not re.match(unknown, line))


def jax_0_10_varying(aval: object) -> frozenset[str]:
    """Return the axes of a ``jax.shard_map`` along which an array varies, if JAX checks this."""
    if JAX < (0, 10):
        return getattr(aval, "vma", frozenset())
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""The result of ``jax_0_10_error_code`` if a device has run out of memory."""


def jax_0_10_error_code(error: BaseException) -> str | None:
    """Return the ``error_code_string`` of an XLA error, such as RESOURCE_EXHAUSTED; None for other
    errors.

    Before JAX 0.10 the code is the beginning of the message.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    code: str = getattr(error, "error_code_string", None) or str(error).partition(":")[0]
    return code


def jax_0_10_indexes_in_place(platform: str) -> bool:
    """Return whether gathers and scatters along non-adjacent axes work without a copy.

    Before JAX 0.10 the CPU compiler makes a transposed copy of the array.
    """
    return platform != "cpu" or JAX >= (0, 10)


def jax_0_8_scatters_in_place(platform: str) -> bool:
    """Return whether scatters along non-adjacent axes work without a copy.

    Before JAX 0.8 the GPU compiler makes a transposed copy of the array.
    """
    return platform != "gpu" or JAX >= (0, 8)


def jax_0_9_matmul(x: jax.Array, weight: jax.Array) -> jax.Array | None:
    """Compute ``x @ weight.T`` in float32 on a CPU, for 16-bit ``x`` [rows, in] and ``weight``
    [out, in].

    Returns None from JAX 0.9 on, where XLA does this well. Before, XLA converts the whole weight to
    float32 for more than one row, which is up to 100 times as slow, and it fails for some shapes.
    """
    if JAX >= (0, 9):
        return None
    axes = (((1,), (1,)), ((), ()))
    if len(x) <= 16:  # row by row; without the barrier, XLA converts all weights before a loop
        x, weight = lax.optimization_barrier((x, weight))
        rows = [
            lax.dot_general(x[n : n + 1], weight, axes, preferred_element_type=jnp.float32)
            for n in range(len(x))
        ]
        return jnp.concatenate(rows)
    # This is twice as fast with the weights as the first factor. The barrier keeps this order.
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return lax.optimization_barrier(lax.dot_general(weight, x, axes)).T


def jax_0_10_varying_shape(shape: tuple[int, ...], dtype: DTypeLike, axes: frozenset[str]):
    """Create a ``ShapeDtypeStruct`` that varies along some axes of a ``jax.shard_map``."""
    make: Any = jax.ShapeDtypeStruct
    if not axes:
        return make(shape, dtype)
    if JAX < (0, 10):
        return make(shape, dtype, vma=axes)
    return make(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))


def jax_0_8_pcast(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return ``lax.pcast(x, axes, to="varying")``, which JAX 0.7 calls ``pvary``."""
    if JAX < (0, 8):
        return getattr(lax, "pvary")(x, axes)  # noqa: B009 - newer versions have none
    return lax.pcast(x, axes, to="varying")


def jax_0_8_in_hbm(x: jax.Array) -> jax.Array:
    """Pin an array to a TPU's HBM for a Pallas kernel.

    JAX 0.7 rejects such arrays in kernels with a dynamic grid. There the array is not pinned, and
    the compiler decides.
    """
    if JAX < (0, 8):
        return x
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def jax_0_9_shutdown_timeout(seconds: int) -> dict[str, Any]:
    """Return the shutdown timeout as an argument of ``jax.distributed.initialize``.

    Before JAX 0.9, this argument does not exist, and the timeout is always five minutes.
    """
    return {} if JAX < (0, 9) else {"shutdown_timeout_seconds": seconds}


@contextmanager
def jax_0_8_libtpu() -> Iterator[None]:
    """Compile for target TPUs with Colab's libtpu, which is older than JAX 0.7 expects.

    JAX asks an attached TPU for the version of libtpu and otherwise assumes the newest one. Colab's
    libtpu reads an older format of kernels, and crashes on requests for layouts.
    """
    if JAX >= (0, 8) or not () < _version("libtpu") < (0, 0, 22):
        yield
        return
    kernels: Any = importlib.import_module("jax._src.tpu_custom_call")
    programs: Any = importlib.import_module("jax._src.interpreters.pxla")
    before = kernels.get_ir_version, programs.is_default_layout
    kernels.get_ir_version = lambda ctx: 7
    programs.is_default_layout = lambda layout, sharding, aval: True
    try:
        yield
    finally:
        kernels.get_ir_version, programs.is_default_layout = before


def jax_0_8_compiler_options(device: Any) -> dict[str, Any]:
    """Return options for ``lowered.compile`` on a target device.

    Without them, JAX 0.7 requires autotuning results for GPUs.
    """
    if JAX < (0, 8) and device.platform == "gpu":
        return {"xla_gpu_autotune_level": 0}
    return {}


def jax_0_8_program_text(program: jax.stages.Compiled) -> str:
    """Return the text of a compiled program, as ``program.as_text()`` does.

    For target GPUs, JAX 0.7 returns None from that method, so the text is made from the serialized
    executable.
    """
    text = program.as_text()
    if text is not None or JAX >= (0, 8):
        return str(text)
    executable: Any = program.runtime_executable()
    record = executable.serialize()
    module = _field(_field(_field(record, 1), 1), 1)  # a HloModuleProto, nested in two messages
    hlo = importlib.import_module("jaxlib._jax").HloModule
    return str(hlo.from_serialized_hlo_module_proto(module).to_string())


def _field(message: bytes, number: int) -> bytes:
    """Return the first length-delimited field with the number ``number`` in a Protocol Buffers
    message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:  # a varint
            varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        if key == number << 3 | 2:
            return message[at : at + size]
        at += size
    raise ValueError(f"the serialized program has no field {number}")


@functools.cache
def has_triton() -> bool:
    """Return whether JAX lowers Pallas kernels with Triton. JAX 0.12 deprecates this."""
    return JAX < (0, 12) and _has("jax.experimental.pallas.triton", "CompilerParams")


@functools.cache
def has_mosaic_gpu() -> bool:
    """Return whether JAX has the parts of Mosaic GPU that kvjax's kernel needs. JAX 0.12 is the
    first version that has them."""
    return JAX >= (0, 12) and _has("jax.experimental.pallas.mosaic_gpu", "kernel", "mma")


def _has(module: str, *names: str) -> bool:
    try:
        imported = importlib.import_module(module)
    except ImportError:
        return False
    return all(hasattr(imported, name) for name in names)
