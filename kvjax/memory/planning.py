"""Bytes and operations of a model with a cache, from its shape alone.

No weights are read and nothing is allocated, because caches and parameters are traced as shapes.
The compiler for the current device reports the temporaries of a step, or they are estimated.
``Plan.source`` says which.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from kvjax.attention.blocks import COARSE_BLOCK, MAX_KEY_NUMBERS, QUERY_CHUNK
from kvjax.cache.sizes import nbytes, shards_of
from kvjax.cache.state import KVCache
from kvjax.core.typing import Array, Tokens
from kvjax.core.validation import INT32_MAX, ArgumentError, as_int
from kvjax.memory.sizes import (
    Plannable,
    abstract_cache,
    as_plannable,
    bytes_per_token,
    matmul_parameters,
    prefetch_bytes,
    visible_tokens,
    weight_bytes,
    weight_bytes_read,
)
from kvjax.placement.mesh import MeshSharding, shard_over
from kvjax.policies.model_config import beyond_context, common_heads, layer_heads, model_dtype
from kvjax.policies.presets import PolicyChoice

PREFILL_CHUNK = 512
"""The default number of prompt tokens per call."""


@dataclass(frozen=True)
class Plan:
    """Memory and operations of a model with a cache.

    If devices share the work, all numbers are per device.

    Attributes:
      batch: the number of rows of the cache.
      max_len: the cache's capacity in tokens per row.
      length: the number of tokens in each row at the decode step whose operations and bytes are
        counted.
      devices: number of devices that share the work.
      weights: bytes of the parameters.
      cache: bytes of the cache in each kind of memory, device and host.
      bytes_per_token: bytes that one more token of a row needs in each kind of memory.
      temporaries: bytes of temporaries of a decode step or of a prompt chunk, whichever needs more.
      source: where ``temporaries`` comes from: the compiler, or an estimate.
      flops: number of additions and multiplications of a decode step.
      flops_uncached: ``flops`` without a cache, where every step computes the whole sequence.
      bytes_read: bytes that a decode step reads: the weights and the filled part of the cache.
      bytes_read_uncached: ``bytes_read`` without a cache: the weights, once, and no activations.
      beyond_context: by how many tokens ``max_len`` exceeds the model's training length.

    Example:
      ```python
      plan = kvjax.plan(lm, max_len=1024, compiled=False)
      print(plan.device, plan.flops, plan.bytes_read)
      ```
    """

    batch: int
    max_len: int
    length: int
    devices: int
    weights: int
    cache: dict[str, int]
    bytes_per_token: dict[str, float]
    temporaries: int
    source: str
    flops: float
    flops_uncached: float
    bytes_read: float
    bytes_read_uncached: float
    beyond_context: int = 0

    @property
    def device(self) -> int:
        """Bytes that weights, temporaries and cache take in the device's memory."""
        return self.weights + self.temporaries + self.cache.get("device", 0)


def plan(
    model: Plannable,
    policy: PolicyChoice | None = None,
    *,
    batch: int = 1,
    max_len: int,
    length: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    compiled: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> Plan:
    """Compute the memory and operations of a model with a cache, without allocating anything.

    Args:
      model: a loaded model, its ``Architecture``, or a ``ModelShape``.
      policy, batch, max_len: the cache's policy, its number of rows and its tokens per row, as in
        ``init_cache``.
      length: the number of tokens in each row at the decode step whose operations and bytes are
        counted; by default ``max_len``.
      prefill_chunk: the number of prompt tokens per call.
      compiled: True to compile the programs for the default device and read the size of temporaries
        from them; False to estimate this size. It is always estimated for a ``ModelShape``, for
        caches on the host and for a mesh.
      mesh: the mesh whose devices share the work. An ``AbstractMesh`` needs no devices.

    Raises:
      ValueError: for the same reasons as ``init_cache``, if ``length`` is more than ``max_len``, or
        if the model's config has no ``num_attention_heads`` or ``hidden_size``.

    Example:
      ```python
      plan = kvjax.plan(lm, kvjax.policy(bits=8), batch=4, max_len=1024, compiled=False)
      print(plan.weights, plan.cache, plan.bytes_per_token)
      ```
    """
    max_len = as_int("max_len", max_len, 1, INT32_MAX)
    length = as_int("length", max_len if length is None else length, 1)
    chunk = min(as_int("prefill_chunk", prefill_chunk, 1), max_len)
    if length > max_len:
        raise ArgumentError(
            f"length must be at most max_len={max_len}, got {length}", param="length"
        )
    model = as_plannable(model)
    for name in ("num_attention_heads", "hidden_size"):
        if not hasattr(model.config, name):
            raise ValueError(f"the model's config has no {name}, which plans need")
    cache = abstract_cache(model.config, policy, batch=batch, max_len=max_len)
    mesh_sharding = None if mesh is None else shard_over(mesh, common_heads(model.config))
    if mesh_sharding is not None:
        mesh_sharding.check_rows(batch)
    temporaries = estimated_temporaries(model.config, batch, chunk, mesh_sharding)
    temporaries, source = temporaries + prefetch_bytes(cache, mesh_sharding), "estimated"
    # JAX compiles programs with arrays in host memory only for real arrays.
    on_device = not any(layer.policy.placement.needs_tail for layer in cache.layers)
    if mesh_sharding is None and compiled and on_device and model.apply is not None:
        stacked = abstract_cache(model.config, policy, batch=batch, max_len=max_len, stacked=None)
        leaves, structure = jax.tree.flatten(stacked)
        sizes = [_compiled_temporaries(model, structure, tuple(leaves), n) for n in {1, chunk}]
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes):
            temporaries = max(known)
            source = f"compiled for {jax.default_backend()}, JAX {jax.__version__}"
    params, weights = model.abstract_params(), weight_bytes(model, mesh)
    share = weights / weight_bytes(model)  # the fraction of the weights on a device
    shards = zip(cache.layers, shards_of(cache, mesh_sharding), strict=True)
    visible = [visible_tokens(layer, length, shard) for layer, shard in shards]
    matrices = 2 * share * matmul_parameters(params)
    head_dims = [head_dim for _, head_dim in layer_heads(model.config)]
    scores = 4 * model.config.num_attention_heads
    # A layer that reads another layer's keys still has its own queries.
    sources = cache.sources if cache.sources is not None else range(len(cache.layers))
    tokens = [visible[entry][0] for entry in sources]
    attended = sum(map(operator.mul, head_dims, tokens))
    uncached = sum(
        head_dim * (n * (n + 1) / 2 + (length - n) * n)
        for head_dim, n in zip(head_dims, tokens, strict=True)
    )
    rows, parts, shares, devices = cache.batch, 1.0, 1.0, 1
    token = bytes_per_token(model.config, policy)
    if mesh_sharding is not None:
        rows, devices = cache.batch // mesh_sharding.rows, mesh_sharding.devices
        parts = mesh_sharding.parts * mesh_sharding.heads
        shares = parts * (
            mesh_sharding.copies if mesh_sharding.divides(model.config.num_attention_heads) else 1
        )
        token = {place: size / parts for place, size in token.items()}
    return Plan(
        cache.batch,
        max_len,
        length,
        devices,
        weights,
        nbytes(cache, mesh_sharding),
        token,
        temporaries,
        source,
        flops=rows * (matrices + scores * attended / shares),
        flops_uncached=rows * (matrices * length + scores * uncached / shares),
        bytes_read=share * weight_bytes_read(params, rows)
        + rows * sum(size for _, size in visible),
        bytes_read_uncached=share * weight_bytes_read(params, rows * length),
        beyond_context=beyond_context(model.config, min(max_len, cache.reach)),
    )


def estimated_temporaries(
    config: Any, batch: int, new: int, mesh_sharding: MeshSharding | None = None
) -> int:
    """Estimate the bytes of temporaries of a call with ``new`` tokens. On a mesh they are per
    device.

    They are the activations of the widest part of a layer, one block of attention, and the logits
    of the last token.
    """
    size = jnp.dtype(model_dtype(config)).itemsize
    heads, kv_heads = config.num_attention_heads, max(own for own, _ in layer_heads(config))
    head_dim = max(own for _, own in layer_heads(config))
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    vocabulary = config.vocab_size
    if mesh_sharding is not None:
        batch, tensor = batch // mesh_sharding.rows, mesh_sharding.heads * mesh_sharding.copies
        wide, vocabulary = -(-wide // tensor), -(-vocabulary // tensor)
        heads //= tensor if mesh_sharding.divides(heads) else mesh_sharding.heads
        kv_heads //= mesh_sharding.heads
    attended = (heads + 2 * kv_heads) * head_dim
    activations = batch * new * (2 * config.hidden_size + max(3 * wide, 2 * attended)) * size
    block = min(COARSE_BLOCK, MAX_KEY_NUMBERS // (batch * kv_heads * head_dim) or 1)
    scores = batch * heads * min(new, QUERY_CHUNK) * block * 4 * 2
    blocks = batch * kv_heads * block * head_dim * 4 * 2
    return activations + scores + blocks + batch * vocabulary * 4


@functools.lru_cache(maxsize=64)
def _compiled_temporaries(
    model: Any, structure: object, leaves: tuple[jax.ShapeDtypeStruct, ...], new: int
) -> int | None:
    """Compile a call with ``new`` tokens, and return its bytes of temporaries; None if JAX doesn't
    report them.

    The cache is passed as a tree structure and leaves, which are hashable.
    """
    cache: KVCache = jax.tree.unflatten(structure, leaves)
    tokens = jax.ShapeDtypeStruct((cache.batch, new), jnp.int32)

    def step(params: PyTree, tokens: Tokens, cache: KVCache) -> tuple[Array, KVCache]:
        logits, cache = model.apply(params, tokens, cache, last_only=True)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    params = model.abstract_params()
    program = jax.jit(step, donate_argnums=2).lower(params, tokens, cache).compile()
    analysis = program.memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)
