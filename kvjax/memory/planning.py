"""Knowing beforehand what fits: bytes, operations and limits from a model's shape alone.

No weights are read and nothing is allocated: caches and parameters are traced as shapes. What a
step needs besides them is taken from the compiler, for the device at hand, or estimated from the
shapes; figures say which.
"""

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kvjax.attention.blocks import COARSE_BLOCK, MAX_KEY_NUMBERS, QUERY_CHUNK
from kvjax.cache.sizes import nbytes, shards_of
from kvjax.cache.state import KVCache
from kvjax.core.validation import INT32_MAX, as_int
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
"""Tokens of a prompt that a call takes, where nothing else is said."""


@dataclass(frozen=True)
class Plan:
    """What a model and a cache take.

    Bytes: ``weights``; ``cache``, by place; ``token``, what one more token of a row takes there;
    ``temporaries``, what a step needs besides, the larger one of a decode step and of a chunk of
    the prompt, and ``source``, where that is from. For a new token of every row, behind ``length``
    tokens: ``operations``, multiplications and additions, and ``moved``, bytes that are read (the
    weights, and the cache as far as it is filled), each with a cache and without one, where the
    text is computed anew (weights once; what is kept between layers is not counted).
    ``beyond_context``: tokens of ``max_len`` beyond the length that the model was trained for.

    All of it is a device's part, where ``devices`` share the work.
    """

    batch: int
    max_len: int
    length: int
    devices: int
    weights: int
    cache: dict[str, int]
    token: dict[str, float]
    temporaries: int
    source: str
    operations: float
    operations_uncached: float
    moved: float
    moved_uncached: float
    beyond_context: int = 0

    @property
    def device(self) -> int:
        """Bytes in the device's memory."""
        return self.weights + self.temporaries + self.cache.get("device", 0)


def plan(
    model: Plannable,
    choice: PolicyChoice | None = None,
    *,
    batch: int = 1,
    max_len: int,
    length: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    compiled: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> Plan:
    """What a model with a cache takes, before anything is allocated.

    Args:
      model: a loaded model, its ``Architecture``, or a ``ModelShape``.
      choice, batch, max_len: the cache's policy, rows and tokens a row, as in ``init_cache``.
      length: tokens that a row holds when the token comes that operations and bytes are counted
        for; by default ``max_len``.
      prefill_chunk: tokens of a prompt that a call takes.
      compiled: take temporaries from the compiler, for this device; False estimates them, as is
        always done for a ``ModelShape``, for caches on the host and for a mesh.
      mesh: devices that share the work; ``jax.sharding.AbstractMesh`` plans for devices that are
        not here.

    Raises:
      ValueError: as of ``init_cache``; if ``length`` is more than ``max_len``, or the model's
        config has no ``num_attention_heads`` or ``hidden_size``.
    """
    max_len = as_int("max_len", max_len, 1, INT32_MAX)
    length = as_int("length", max_len if length is None else length, 1)
    chunk = min(as_int("prefill_chunk", prefill_chunk, 1), max_len)
    if length > max_len:
        raise ValueError(f"length is {length}, but max_len only {max_len}")
    model = as_plannable(model)
    for name in ("num_attention_heads", "hidden_size"):
        if not hasattr(model.config, name):
            raise ValueError(f"the model's config has no {name}, which a plan goes by")
    cache = abstract_cache(model.config, choice, batch=batch, max_len=max_len)
    spread = None if mesh is None else shard_over(mesh, common_heads(model.config))
    if spread is not None:
        spread.check_rows(batch)
    temporaries = estimated_temporaries(model.config, batch, chunk, spread)
    temporaries, source = temporaries + prefetch_bytes(cache, spread), "estimated"
    # JAX compiles for arrays on the host only where it has them, and none are made here.
    on_device = not any(layer.policy.placement.needs_tail for layer in cache.layers)
    if spread is None and compiled and on_device and model.apply is not None:
        fed = abstract_cache(model.config, choice, batch=batch, max_len=max_len, stacked=None)
        leaves, structure = jax.tree.flatten(fed)
        found: list[Any] = [_compiled(model, structure, tuple(leaves), new) for new in {1, chunk}]
        if None not in found:
            temporaries = max(found)
            source = f"compiled for {jax.default_backend()}, JAX {jax.__version__}"
    params, weights = model.abstract_params(), weight_bytes(model, mesh)
    share = weights / weight_bytes(model)  # of a device, where a mesh divides them
    pairs = zip(cache.layers, shards_of(cache, spread), strict=True)
    held = [visible_tokens(layer, length, own) for layer, own in pairs]
    matrices = 2 * share * matmul_parameters(params)
    head_dims = [head_dim for _, head_dim in layer_heads(model.config)]
    scores = 4 * model.config.num_attention_heads
    # A layer that reads another's has queries of its own.
    read = cache.sources if cache.sources is not None else range(len(cache.layers))
    tokens = [held[source][0] for source in read]
    attended = sum(map(operator.mul, head_dims, tokens))
    uncached = sum(
        head_dim * (n * (n + 1) / 2 + (length - n) * n)
        for head_dim, n in zip(head_dims, tokens, strict=True)
    )
    rows, parts, shares, devices = cache.batch, 1.0, 1.0, 1
    token = bytes_per_token(model.config, choice)
    if spread is not None:
        rows, devices = cache.batch // spread.rows, spread.devices
        parts = spread.parts * spread.heads
        shares = parts * (spread.copies if spread.divides(model.config.num_attention_heads) else 1)
        token = {place: size / parts for place, size in token.items()}
    return Plan(
        cache.batch, max_len, length, devices, weights, nbytes(cache, spread), token,
        temporaries, source,
        operations=rows * (matrices + scores * attended / shares),
        operations_uncached=rows * (matrices * length + scores * uncached / shares),
        moved=share * weight_bytes_read(params, rows) + rows * sum(n for _, n in held),
        moved_uncached=share * weight_bytes_read(params, rows * length),
        beyond_context=beyond_context(model.config, min(max_len, cache.reach)),
    )  # fmt: skip


def estimated_temporaries(
    config: Any, batch: int, new: int, spread: MeshSharding | None = None
) -> int:
    """Bytes that a call of ``new`` tokens needs besides weights and cache, from shapes alone: what
    the widest part of a layer keeps, a block of attention, and the logits of the last token; with
    ``spread`` those of one device."""
    size = jnp.dtype(model_dtype(config)).itemsize
    heads, kv_heads = config.num_attention_heads, max(own for own, _ in layer_heads(config))
    head_dim = max(own for _, own in layer_heads(config))
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    vocabulary = config.vocab_size
    if spread is not None:
        batch, tensor = batch // spread.rows, spread.heads * spread.copies
        wide, vocabulary = -(-wide // tensor), -(-vocabulary // tensor)
        heads //= tensor if spread.divides(heads) else spread.heads
        kv_heads //= spread.heads
    attended = (heads + 2 * kv_heads) * head_dim
    activations = batch * new * (2 * config.hidden_size + max(3 * wide, 2 * attended)) * size
    block = min(COARSE_BLOCK, MAX_KEY_NUMBERS // (batch * kv_heads * head_dim) or 1)
    scores = batch * heads * min(new, QUERY_CHUNK) * block * 4 * 2
    blocks = batch * kv_heads * block * head_dim * 4 * 2
    return activations + scores + blocks + batch * vocabulary * 4


@functools.lru_cache(maxsize=64)
def _compiled(model: Any, structure: Any, leaves: tuple[Any, ...], new: int) -> int | None:
    """Temporary bytes of a call of ``new`` tokens, of the program that is compiled for it here;
    None where the compiler does not say. The cache comes in parts that have a hash."""
    cache: KVCache = jax.tree.unflatten(structure, leaves)
    tokens = jax.ShapeDtypeStruct((cache.batch, new), jnp.int32)

    def step(params: Any, tokens: Any, cache: Any) -> Any:
        logits, cache = model.apply(params, tokens, cache, last_only=True)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    params = model.abstract_params()
    program = jax.jit(step, donate_argnums=2).lower(params, tokens, cache).compile()
    found = program.memory_analysis()
    return None if found is None else int(found.temp_size_in_bytes)
