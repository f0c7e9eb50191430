"""Differences between the versions of JAX and Flax that kvjax runs on, and nothing else.

The oldest are those of Colab: JAX 0.7.2 and Flax 0.11.2. Each function is named after the version
that makes it unnecessary; the ``has_`` ones say which kernels a version of JAX can compile.
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


def _version(package: str) -> tuple[int, ...]:
    """Of an installed package, as numbers; () of one that is not installed."""
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


JAX = _version("jax")
"""JAX's version: major, minor, patch."""


def flax_0_12_list(modules: Iterable[Any]) -> Any:
    """``nnx.List(modules)``. Before Flax 0.12 a module's attribute could be a plain list of
    others, and there was no other kind."""
    from flax import nnx

    make: Any = getattr(nnx, "List", list)
    return make(modules)


def jax_0_10_2_host_memory(platform: str) -> bool:
    """Whether programs for a platform can keep arrays in a memory of its host. Before JAX 0.10.2 a
    CPU's results always come back in its own memory, which is the host's."""
    return platform != "cpu" or JAX >= (0, 10, 2)


def jax_0_10_gpu_description(gpu: str) -> str:
    """A description of a GPU, without the lines that older compilers refuse to read."""
    if JAX >= (0, 10):
        return gpu
    unknown = r" *(thread_dim|device_vendor|device_address|ecc_enabled|name:|driver|runtime)"
    return "\n".join(line for line in gpu.splitlines() if not re.match(unknown, line))


def jax_0_10_varying(aval: Any) -> frozenset[str]:
    """Along which axes of a ``jax.shard_map`` an array varies, where that is checked."""
    if JAX < (0, 10):
        return getattr(aval, "vma", frozenset())
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset() if kind is None else kind.varying


RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
"""The ``jax_0_10_error_code`` of a device without memory left."""


def jax_0_10_error_code(error: BaseException) -> str | None:
    """An error's ``error_code_string``, such as RESOURCE_EXHAUSTED; None of one that is not XLA's.
    Before JAX 0.10 its message begins with that."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    code: str = getattr(error, "error_code_string", None) or str(error).partition(":")[0]
    return code


def jax_0_10_indexes_in_place(platform: str) -> bool:
    """Whether gathers and scatters along axes that do not follow each other leave an array as it
    is. Before JAX 0.10 a CPU's compiler makes a transposed copy of it."""
    return platform != "cpu" or JAX >= (0, 10)


def jax_0_8_scatters_in_place(platform: str) -> bool:
    """The same of scatters alone, of which a GPU's compiler makes such a copy before JAX 0.8."""
    return platform != "gpu" or JAX >= (0, 8)


def jax_0_9_matmul(x: Any, weight: Any) -> Any:
    """``x @ weight.T`` in float32 on a CPU, of x [rows, in] and a weight [out, in] of 16 bits; None
    where JAX needs no help. Before JAX 0.9 XLA widens the whole weight for more than one row, which
    takes up to a hundred times as long, and multiplies some shapes not at all."""
    if JAX >= (0, 9):
        return None
    axes = (((1,), (1,)), ((), ()))
    if len(x) <= 16:  # one after the other; without the barrier a loop would widen it beforehand
        x, weight = lax.optimization_barrier((x, weight))
        rows = [
            lax.dot_general(x[n : n + 1], weight, axes, preferred_element_type=jnp.float32)
            for n in range(len(x))
        ]
        return jnp.concatenate(rows)
    # With the weights as the first factor it takes half as long; the barrier keeps them there.
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    return lax.optimization_barrier(lax.dot_general(weight, x, axes)).T


def jax_0_10_varying_shape(shape: tuple[int, ...], dtype: Any, axes: frozenset[str]) -> Any:
    """An array's shape, of one that varies along some axes of a ``jax.shard_map``."""
    make: Any = jax.ShapeDtypeStruct
    if not axes:
        return make(shape, dtype)
    if JAX < (0, 10):
        return make(shape, dtype, vma=axes)
    return make(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))


def jax_0_8_pcast(x: Any, axes: tuple[str, ...]) -> Any:
    """``lax.pcast(x, axes, to="varying")``, which JAX 0.7 calls ``pvary``."""
    if JAX < (0, 8):
        return getattr(lax, "pvary")(x, axes)  # noqa: B009 - newer versions have none
    return lax.pcast(x, axes, to="varying")


def jax_0_8_in_hbm(x: Any) -> Any:
    """An array, pinned in a TPU's large memory for a Pallas kernel. JAX 0.7 takes no such array in
    a kernel whose grid is dynamic, so there it is left to the compiler."""
    if JAX < (0, 8):
        return x
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.with_memory_space_constraint(x, pltpu.HBM)


def jax_0_9_shutdown_timeout(seconds: int) -> dict[str, Any]:
    """What ``jax.distributed.initialize`` is told of how long the end may take: before JAX 0.9
    nothing, where it is five minutes."""
    return {} if JAX < (0, 9) else {"shutdown_timeout_seconds": seconds}


@contextmanager
def jax_0_8_libtpu() -> Iterator[None]:
    """Compile for TPUs that are not here by Colab's libtpu, which is older than JAX 0.7 expects.

    JAX asks a TPU that is here how old its libtpu is, and without one takes the newest. This one
    reads kernels of the form before, and ends the process where it is asked for its layouts.
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
    """Options of ``lowered.compile`` for a device that is not here: JAX 0.7 else asks for what a
    GPU's autotuner has found."""
    if JAX < (0, 8) and device.platform == "gpu":
        return {"xla_gpu_autotune_level": 0}
    return {}


def jax_0_8_program_text(program: Any) -> str:
    """``program.as_text()`` of a compiled program. JAX 0.7 has none of one for a GPU that is not
    here, but the compiler's own record of it."""
    text = program.as_text()
    if text is not None or JAX >= (0, 8):
        return str(text)
    record = program.runtime_executable().serialize()
    module = _field(_field(_field(record, 1), 1), 1)  # a HloModuleProto, in two messages around it
    hlo: Any = importlib.import_module("jaxlib._jax").HloModule
    return str(hlo.from_serialized_hlo_module_proto(module).to_string())


def _field(message: bytes, number: int) -> bytes:
    """A field of a Protocol Buffers message, the first with that number, which has a length."""
    at = 0

    def varint() -> int:
        nonlocal at
        found = shift = 0
        while True:
            byte, at = message[at], at + 1
            found, shift = found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found

    while at < len(message):
        key = varint()
        if key & 7 == 0:  # a number
            varint()
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        if key == number << 3 | 2:
            return message[at : at + size]
        at += size
    raise ValueError(f"no field {number} in the compiler's record of a program")


@functools.cache
def has_triton() -> bool:
    """Whether JAX lowers Pallas kernels by Triton, and means to keep that: JAX 0.12 says that it
    will be removed."""
    return JAX < (0, 12) and _has("jax.experimental.pallas.triton", "CompilerParams")


@functools.cache
def has_mosaic_gpu() -> bool:
    """Whether JAX has the parts of Mosaic GPU that our kernel is made of: since JAX 0.12."""
    return JAX >= (0, 12) and _has("jax.experimental.pallas.mosaic_gpu", "kernel", "mma")


def _has(module: str, *names: str) -> bool:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return all(hasattr(found, name) for name in names)
