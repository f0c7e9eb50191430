"""Memory and traffic of a model with a cache on any device, computed by the device's own compiler.

The device need not be attached. A decode step and a prompt chunk are compiled for it from shapes.
Of identical layers, only one or two are compiled, and the cost of the second is used for all
others. On a mesh, all numbers are per device.
"""

import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding
from jaxtyping import PyTree

from kvjax.attention.paths import kernels_for
from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import abstract_arguments, array_shardings, nbytes, shards_of
from kvjax.cache.state import KVCache
from kvjax.core.compat import jax_0_8_compiler_options, jax_0_8_program_text
from kvjax.core.target import JaxDevice, mosaic_capability, spec_of, target_of
from kvjax.core.topology import (
    DeviceChoice,
    TargetDescription,
    compiling_for,
    describe_target,
    is_target_device,
    resolve_device_or_mesh,
)
from kvjax.core.typing import Array, Tokens
from kvjax.core.validation import INT32_MAX, as_int
from kvjax.memory.hlo import bytes_moved, collectives
from kvjax.memory.planning import PREFILL_CHUNK
from kvjax.memory.sizes import (
    Plannable,
    abstract_cache,
    as_plannable,
    visible_tokens,
    weight_bytes,
    weight_bytes_read,
)
from kvjax.policies.presets import PolicyChoice


@dataclass(frozen=True)
class DevicePlan:
    """Memory and traffic of a model with a cache on a device, computed by the device's compiler.

    On a mesh all numbers are per device.

    Attributes:
      device: name of the device.
      memory: bytes of memory in the device's data sheet; None for unknown devices.
      bandwidth: memory bandwidth in the data sheet, in bytes per second; None for unknown devices.
      weights: bytes of the parameters.
      cache: bytes of the cache, by place.
      temporaries: bytes of temporaries of a decode step or of a prompt chunk, whichever needs more.
      code: approximate bytes of both programs, if the compiler reports them.
      bytes_moved: device memory traffic in bytes per step when every row is full, counted in the
        compiled program.
      min_bytes_moved: bytes that a step must read at least: the weights and the filled cache, once.
      layers: number of layers that were compiled. At most two of several identical layers are
        compiled, and the others count like the second.
      devices: number of devices of the mesh.
      collectives: number of collectives per step.
      bytes_sent: bytes that one device sends to others in the collectives of a step.

    Example:
      ```python
      device = jax.devices()[0]
      plan = kvjax.memory.plan_on(lm.architecture, device=device, max_len=128, prefill_chunk=64)
      print(plan.device, plan.fits, plan.seconds)
      ```
    """

    device: str
    memory: int | None
    bandwidth: float | None
    weights: int
    cache: dict[str, int]
    temporaries: int
    code: int
    bytes_moved: int
    min_bytes_moved: int
    layers: int
    devices: int = 1
    collectives: int = 0
    bytes_sent: int = 0

    @property
    def total(self) -> int:
        """Bytes that weights, cache, temporaries and code take in the device's memory."""
        return self.weights + self.cache.get("device", 0) + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Whether ``total`` fits in the device's memory; None if the memory is unknown."""
        return None if self.memory is None else self.total <= self.memory

    @property
    def seconds(self) -> float | None:
        """A lower bound of the seconds of a step: its traffic divided by the memory's bandwidth."""
        return None if self.bandwidth is None else self.bytes_moved / self.bandwidth


def plan_on(
    model: Plannable,
    policy: PolicyChoice | None = None,
    *,
    device: DeviceChoice,
    batch: int = 1,
    max_len: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> DevicePlan:
    """Plan a model with a cache for a device, with the device's own compiler. Nothing is allocated,
    and the device need not be attached.

    Args:
      model: an ``Architecture`` (``lm.architecture``), or a ``ModelShape``.
      policy, batch, max_len: the cache's policy, its number of rows and its tokens per row, as in
        ``init_cache``.
      device: a ``jax.Device``, a topology of ``jax.experimental.topologies``, or the name of a
        device type: ``"v5e"``, ``"v6e"``, ``"v5p"``, ``"v7x"``, ``"t4"``, ``"a100"``,
        ``"a100-40gb"``, ``"a10"``, ``"rtx3090"``, ``"l4"``, ``"rtx4090"``, ``"h100"``, ``"h200"``,
        ``"b200"``, ``"rtxpro6000"``. For a model that kvjax can run, it may also be a mesh, such as
        ``kvjax.make_mesh(tensor=4, devices="v5e")``.
      prefill_chunk: the number of prompt tokens per call.

    Raises:
      ValueError: for the same reasons as ``init_cache``, if the device is unknown, or if its
        compiler does not support caches on the host. If this process can compile kernels only for
        GPUs of another compute capability, a second process does the planning. The error is then
        also raised if the model can't be pickled for that process.
      MissingCompilerError: if the device's compiler is not installed.

    Example:
      ```python
      device = jax.devices()[0]
      plan = kvjax.memory.plan_on(lm.architecture, device=device, max_len=128, prefill_chunk=64)
      print(plan.total, plan.bytes_moved)
      ```
    """
    model = as_plannable(model)
    chip, mesh = resolve_device_or_mesh(device)
    if _needs_subprocess(chip):
        settings = {"batch": batch, "max_len": max_len, "prefill_chunk": prefill_chunk}
        target = describe_target(chip, mesh)
        return call_in_subprocess(_plan_on_target, model, policy, target, **settings)
    devices = 1 if mesh is None else mesh.size
    chunk = min(as_int("prefill_chunk", prefill_chunk, 1), as_int("max_len", max_len, 1, INT32_MAX))
    with compiling_for(chip):
        cache = abstract_cache(model.config, policy, batch=batch, max_len=max_len, mesh=mesh)
        groups = _group_layers(cache, getattr(model, "in_one_piece", False))
        compiled = functools.partial(compiled_call, model, cache, max_len, mesh)
        first = [members[0] for members in groups]
        step, prompt = compiled(first, chip, 1), compiled(first, chip, chunk)
        moved, *exchanged = base = _step_traffic(step, devices)
        memory: list[Any] = [program.memory_analysis() for program in (step, prompt)]
        code = sum(m.generated_code_size_in_bytes for m in memory)
        for group in groups:
            if len(group) > 1:
                # The cost of one more layer of the group is the difference of two programs.
                longer = compiled([*first, group[1]], chip, 1)
                others = len(group) - 1
                added = [
                    others * (x - y)
                    for x, y in zip(_step_traffic(longer, devices), base, strict=True)
                ]
                moved, *exchanged = map(sum, zip((moved, *exchanged), added, strict=True))
                analysis: Any = longer.memory_analysis()
                size = analysis.generated_code_size_in_bytes
                code += 2 * others * max(size - memory[0].generated_code_size_in_bytes, 0)
    spec, mesh_sharding, params = spec_of(chip), cache.mesh_sharding, model.abstract_params()
    rows = batch
    if mesh is not None and mesh_sharding is not None:
        params = _shard_shapes(params, model.param_shardings(mesh))
        rows = batch // mesh_sharding.rows
    length = min(max_len, cache.reach)
    shards = zip(cache.layers, shards_of(cache, mesh_sharding), strict=True)
    row_bytes = sum(visible_tokens(layer, length, shard)[1] for layer, shard in shards)
    return DevicePlan(
        chip.device_kind or chip.platform,
        None if spec is None else spec.memory,
        None if spec is None else spec.bandwidth,
        weight_bytes(model, mesh),
        nbytes(cache, mesh_sharding),
        max(int(m.temp_size_in_bytes) for m in memory),
        code,
        moved,
        round(weight_bytes_read(params, rows) + rows * row_bytes),
        len(first) + sum(len(group) > 1 for group in groups),
        devices,
        *exchanged,
    )


def _needs_subprocess(device: JaxDevice) -> bool:
    """Return whether a target device needs kernels for a compute capability that this process can't
    compile."""
    target = target_of(device)
    if not is_target_device(device) or "mosaic_gpu" not in kernels_for(target):
        return False
    return mosaic_capability() not in (None, target.capability)


def _plan_on_target(
    model: Plannable, policy: PolicyChoice | None, target: TargetDescription, **settings: int
) -> DevicePlan:
    return plan_on(model, policy, device=target.make(), **settings)


def _step_traffic(program: jax.stages.Compiled, devices: int) -> tuple[int, int, int]:
    """Return the bytes that a program moves, its number of collectives, and the bytes that a device
    sends."""
    text = jax_0_8_program_text(program)
    sends = [collective.sent for collective in collectives(text, devices)]
    return bytes_moved(text), len(sends), sum(sends)


def _shard_shapes(params: PyTree, shardings: PyTree) -> PyTree:
    """Return the shapes of the parameters' shards on one device of a mesh."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype),
        params,
        shardings,
    )


def _group_layers(cache: KVCache, in_one_piece: bool) -> list[list[int]]:
    """Group the indices of the model's layers by identical caches, which give identical programs.

    Every layer is a separate group if some layers read other layers' keys and values, or if the
    model can't be split into layers.
    """
    if cache.sources is not None or in_one_piece:
        return [[number] for number in range(len(cache.sources or cache.layers))]
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, layer in enumerate(cache.layers):
        key = layer.policy, layer.kv_heads, layer.head_dim, layer.window
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def compiled_call(
    model: Plannable,
    cache: KVCache,
    max_len: int,
    mesh: Mesh | None,
    layers: list[int],
    device: JaxDevice,
    new: int,
) -> jax.stages.Compiled:
    """Compile a call with ``new`` tokens of a model that has only some of the layers."""
    part = _with_layers(model, layers)
    sources = cache.sources or range(len(cache.layers))
    policies = [cache.layers[sources[number]].policy for number in layers]
    call: Callable[..., PyTree] = part.apply or part.forward

    def make() -> KVCache:
        return init_cache(part.config, policies, batch=cache.batch, max_len=max_len, mesh=mesh)

    def step(params: PyTree, tokens: Tokens, cache: KVCache) -> tuple[Array, KVCache]:
        logits, cache = call(params, tokens, cache, last_only=True)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    shapes = jax.eval_shape(make)
    weights: PyTree = SingleDeviceSharding(device)
    if mesh is not None:
        weights = part.param_shardings(mesh)
    shardings = array_shardings(shapes, device)
    program = jax.jit(
        step,
        donate_argnums=2,
        in_shardings=(weights, shardings.length, shardings),
        out_shardings=(shardings.length, shardings),
    )
    tokens = jax.ShapeDtypeStruct((cache.batch, new), jnp.int32)
    lowered = program.lower(part.abstract_params(), tokens, abstract_arguments(shapes, shardings))
    return lowered.compile(jax_0_8_compiler_options(device))


def _with_layers(model: Any, layers: list[int]) -> Any:
    """Return a model with only some of its layers."""
    config = model.config
    if len(layers) == config.num_hidden_layers:
        return model
    changes: dict[str, object] = {"num_hidden_layers": len(layers)}
    if getattr(config, "windows", None) is not None:
        changes["windows"] = tuple(config.windows[number] for number in layers)
    part = replace(config, **changes)
    return part if config is model else replace(model, config=part)


T = TypeVar("T")
_MAIN = "from kvjax.memory.device_plan import _main; _main()"


def call_in_subprocess(function: Callable[..., T], *args: object, **kwargs: object) -> T:
    """Call ``function(*args, **kwargs)`` in a new process that uses no GPU or TPU, and return the
    result.

    Raises:
      ValueError: if the function or an argument can't be pickled. Functions that are defined in a
        notebook or in the main script can't be pickled.
      RuntimeError: if the process ends without a result.
      Exception: any exception that the function raises.
    """
    try:
        sent = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_picklable(error) from error
    own = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.run(
        [sys.executable, "-c", _MAIN], input=sent, capture_output=True, env=os.environ | own
    )
    if process.returncode:
        stderr = process.stderr.decode()[-500:]
        raise RuntimeError(f"the subprocess ended without a result: {stderr}")
    result, error = pickle.loads(process.stdout)
    if isinstance(error, AttributeError | ImportError) and result == "not read":
        raise _not_picklable(error) from error
    if error is not None:
        raise error
    return result


def _not_picklable(error: Exception) -> ValueError:
    return ValueError(
        f"the call can't be sent to another process ({error}): start a new process yourself"
    )


def _main() -> None:
    """Run in the subprocess: read the call from stdin, and write ``(result, error)`` to stdout."""
    out = os.dup(1)
    os.dup2(2, 1)  # printed text must not mix with the result
    try:
        function, args, kwargs = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError) as error:
        result: tuple[object, object] = "not read", error
    else:
        try:
            result = function(*args, **kwargs), None
        except Exception as error:
            result = None, error
    try:
        sent = pickle.dumps(result)
    except Exception:  # the error itself can't be pickled
        sent = pickle.dumps((None, RuntimeError(f"{type(result[1]).__name__}: {result[1]}")))
    with os.fdopen(out, "wb") as file:
        file.write(sent)
