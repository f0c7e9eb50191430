"""What a device's own compiler says of a model with a cache, whether the device is here or not.

The programs of a decode step and of a chunk of the prompt are compiled for the device, from shapes
alone. Layers that are alike are compiled twice, not all of them: what the second adds, each of the
others does. Of a mesh all figures are those of one device.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from kvjax.attention.kernels.dispatch import kernels_for
from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import abstract_arguments, array_shardings, nbytes, shards_of
from kvjax.cache.state import KVCache
from kvjax.core.compat import jax_0_8_compiler_options, jax_0_8_program_text
from kvjax.core.subprocess_call import call_in_subprocess
from kvjax.core.target import mosaic_capability, spec_of, target_of
from kvjax.core.topology import (
    TargetDescription,
    compiling_for,
    describe_target,
    is_target_device,
    resolve_device_or_mesh,
)
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
    """What a model and a cache take on a device, or on each of a mesh, in bytes, by its compiler.

    ``weights``; ``cache``, by place; ``temporaries`` of the larger one of a decode step and of a
    chunk of the prompt; ``code`` of both, about, where the compiler says. ``moved``: what a step
    behind full rows reads and writes of the device's memory, counted in its program; ``ideal``:
    the weights, and the cache as its codecs store it, once. ``memory`` and ``bandwidth`` (bytes a
    second) of the device, as its maker says, None of one that is not known. ``device``: its name;
    ``layers``: how many of the model's were compiled. ``devices``: of the mesh; ``collectives`` of
    a step, and ``sent``, the bytes of them that a device gives to others.
    """

    device: str
    memory: int | None
    bandwidth: float | None
    weights: int
    cache: dict[str, int]
    temporaries: int
    code: int
    moved: int
    ideal: int
    layers: int
    devices: int = 1
    collectives: int = 0
    sent: int = 0

    @property
    def whole(self) -> int:
        """Bytes in the device's memory."""
        return self.weights + self.cache.get("device", 0) + self.temporaries + self.code

    @property
    def fits(self) -> bool | None:
        """Whether its memory has room for all that; None where it is not known."""
        return None if self.memory is None else self.whole <= self.memory

    @property
    def seconds(self) -> float | None:
        """The least that a step can take: what it moves, at the memory's bandwidth."""
        return None if self.bandwidth is None else self.moved / self.bandwidth


def plan_on(
    model: Plannable,
    choice: PolicyChoice | None = None,
    *,
    device: Any,
    batch: int = 1,
    max_len: int,
    prefill_chunk: int = PREFILL_CHUNK,
) -> DevicePlan:
    """What a model with a cache takes on a device, by the device's own compiler; nothing is
    allocated, and the device need not be here.

    Args:
      model: an ``Architecture`` (``lm.architecture``), or a ``ModelShape``.
      choice, batch, max_len: the cache's policy, rows and tokens a row, as in ``init_cache``.
      device: a ``jax.Device``, a topology of ``jax.experimental.topologies``, or a kind's name:
        ``"v5e"``, ``"v6e"``, ``"v5p"``, ``"v7x"``, ``"t4"``, ``"a100"``, ``"a100-40gb"``,
        ``"a10"``, ``"rtx3090"``, ``"l4"``, ``"rtx4090"``, ``"h100"``, ``"h200"``, ``"b200"``,
        ``"rtxpro6000"``. Or a mesh, as of ``kvjax.make_mesh(tensor=4, devices="v5e")``, of a model
        that kvjax runs.
      prefill_chunk: tokens of a prompt that a call takes.

    Raises:
      ValueError: as of ``init_cache``; if there is no such device, or it does not compile for
        bodies on the host; if this process compiles kernels for other GPUs, and the model can't be
        sent to another.
      MissingCompilerError: if the device's compiler is not installed.
    """
    model = as_plannable(model)
    device, mesh = resolve_device_or_mesh(device)
    if _is_for_another_process(device):
        settings: Any = {"batch": batch, "max_len": max_len, "prefill_chunk": prefill_chunk}
        there = describe_target(device, mesh)
        return call_in_subprocess(_plan_on_named, model, choice, there, **settings)
    devices = 1 if mesh is None else mesh.size
    chunk = min(
        as_int("prefill_chunk", prefill_chunk, 1),
        as_int("max_len", max_len, 1, INT32_MAX),
    )
    with compiling_for(device):
        cache = abstract_cache(model.config, choice, batch=batch, max_len=max_len, mesh=mesh)
        groups = _alike(cache, getattr(model, "in_one_piece", False))
        compiled = functools.partial(compiled_call, model, cache, max_len, mesh)
        first = [members[0] for members in groups]
        step, prompt = compiled(first, device, 1), compiled(first, device, chunk)
        moved, *exchanged = base = _of_step(step, devices)
        memory: list[Any] = [program.memory_analysis() for program in (step, prompt)]
        code = sum(m.generated_code_size_in_bytes for m in memory)
        for group in groups:
            if len(group) > 1:
                # What one layer more adds to a step.
                longer = compiled([*first, group[1]], device, 1)
                more = len(group) - 1
                added = [
                    more * (x - y) for x, y in zip(_of_step(longer, devices), base, strict=True)
                ]
                moved, *exchanged = map(sum, zip((moved, *exchanged), added, strict=True))
                found: Any = longer.memory_analysis()
                each = found.generated_code_size_in_bytes - memory[0].generated_code_size_in_bytes
                code += 2 * more * max(each, 0)
    kind, spread, params = spec_of(device), cache.spread, model.abstract_params()
    rows = batch
    if mesh is not None and spread is not None:
        params, rows = _own(params, model.param_shardings(mesh)), batch // spread.rows
    length = min(max_len, cache.reach)
    pairs = zip(cache.layers, shards_of(cache, spread), strict=True)
    of_row = sum(visible_tokens(layer, length, own)[1] for layer, own in pairs)
    return DevicePlan(
        device.device_kind or device.platform,
        None if kind is None else kind.memory,
        None if kind is None else kind.bandwidth,
        weight_bytes(model, mesh),
        nbytes(cache, spread),
        max(int(m.temp_size_in_bytes) for m in memory),
        code,
        moved,
        round(weight_bytes_read(params, rows) + rows * of_row),
        len(first) + sum(len(group) > 1 for group in groups),
        devices,
        *exchanged,
    )  # fmt: skip


def _is_for_another_process(device: Any) -> bool:
    """Whether a device that is not here has kernels of another kind than this process compiles."""
    target = target_of(device)
    if not is_target_device(device) or "mosaic_gpu" not in kernels_for(target):
        return False
    return mosaic_capability() not in (None, target.capability)


def _plan_on_named(
    model: Plannable, choice: PolicyChoice | None, there: TargetDescription, **settings: Any
) -> DevicePlan:
    return plan_on(model, choice, device=there.make(), **settings)


def _of_step(program: jax.stages.Compiled, devices: int) -> tuple[int, int, int]:
    """Bytes that it moves; how many collectives it has, and the bytes that a device sends."""
    text = jax_0_8_program_text(program)
    found = collectives(text, devices)
    return bytes_moved(text), len(found), sum(each.sent for each in found)


def _own(params: Any, shardings: Any) -> Any:
    """Parameters that a device of a mesh has, as shapes."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(place.shard_shape(x.shape), x.dtype),
        params, shardings,
    )  # fmt: skip


def _alike(cache: KVCache, in_one_piece: bool) -> list[list[int]]:
    """Numbers of the model's layers, together where caches, and so programs, are alike; each by
    itself where some read others' keys and values, or the model can't be taken apart."""
    if cache.sources is not None or in_one_piece:
        return [[number] for number in range(len(cache.sources or cache.layers))]
    found: dict[Any, list[int]] = {}
    for number, layer in enumerate(cache.layers):
        kind = layer.policy, layer.kv_heads, layer.head_dim, layer.window
        found.setdefault(kind, []).append(number)
    return list(found.values())


def compiled_call(
    model: Any, cache: KVCache, max_len: int, mesh: Mesh | None, layers: list[int], device: Any,
    new: int,
) -> jax.stages.Compiled:  # fmt: skip
    """The program of a call of ``new`` tokens of some of the layers."""
    part = _of_layers(model, layers)
    sources = cache.sources or range(len(cache.layers))
    policies = [cache.layers[sources[number]].policy for number in layers]
    call: Callable[..., Any] = part.apply or part.forward

    def make() -> KVCache:
        return init_cache(part.config, policies, batch=cache.batch, max_len=max_len, mesh=mesh)

    def step(params: Any, tokens: Any, cache: Any) -> Any:
        logits, cache = call(params, tokens, cache, last_only=True)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    held = jax.eval_shape(make)
    weights: Any = SingleDeviceSharding(device)
    if mesh is not None:
        weights = part.param_shardings(mesh)
    there = array_shardings(held, device)
    program = jax.jit(
        step, donate_argnums=2, in_shardings=(weights, there.length, there),
        out_shardings=(there.length, there),
    )  # fmt: skip
    tokens = jax.ShapeDtypeStruct((cache.batch, new), jnp.int32)
    return program.lower(part.abstract_params(), tokens, abstract_arguments(held, there)).compile(
        jax_0_8_compiler_options(device)
    )


def _of_layers(model: Any, layers: list[int]) -> Any:
    """A model of some of its layers."""
    config = model.config
    if len(layers) == config.num_hidden_layers:
        return model
    changes: dict[str, Any] = {"num_hidden_layers": len(layers)}
    if getattr(config, "windows", None) is not None:
        changes["windows"] = tuple(config.windows[number] for number in layers)
    part = replace(config, **changes)
    return part if config is model else replace(model, config=part)
