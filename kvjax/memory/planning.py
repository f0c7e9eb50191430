"""Knowing beforehand what fits: bytes, operations and limits from a model's shape alone.

No weights are read and nothing is allocated: caches and parameters are traced as shapes. What a
step needs besides them is taken from the compiler, for the device at hand, or estimated from the
shapes; figures say which.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import nbytes, share_of
from kvjax.cache.state import KVCache, LayerCache
from kvjax.core.checks import whole_number
from kvjax.core.trees import tree_bytes
from kvjax.layouts import Growing
from kvjax.placement.budget import ahead_bytes
from kvjax.placement.spread import Spread, spread_over
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import CacheShape
from kvjax.policies.presets import Auto, PolicyChoice, budget_of, per_layer

PREFILL = 512
"""Tokens of a prompt that a call takes, where nothing else is said."""

_LONG = 2**24
"""Tokens of a text that is longer than every window."""
_LOOKUPS = {"embed_tokens", "wte", "embed_in"}
_POSITIONS = {"wpe"}
_HEADS = {"lm_head", "embed_out"}


class Plannable(Protocol):
    """What can be planned for: an ``Architecture``, or a ``kvjax.memory.shapes.ModelShape``."""

    @property
    def config(self) -> Any: ...
    def abstract_params(self) -> Any: ...


@dataclass(frozen=True)
class Plan:
    """What a model and a cache take.

    Bytes: ``weights``; ``cache``, by place; ``token``, what one more token of a row takes there;
    ``temporaries``, what a step needs besides, the larger one of a decode step and of a chunk of
    the prompt, and ``source``, where that is from. For a new token of every row, behind ``length``
    tokens: ``operations``, multiplications and additions, and ``moved``, bytes that are read (the
    weights, and the cache as far as it is filled), each with a cache and without one, where the
    text is computed anew (weights once; what is kept between layers is not counted).

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
    prefill_chunk: int = PREFILL,
    compiled: bool = True,
    mesh: Mesh | AbstractMesh | None = None,
) -> Plan:
    """What a model with a cache takes, before anything is allocated.

    Args:
      model: an ``Architecture`` (``lm.architecture``), or a ``ModelShape``.
      choice: the cache's policy, as in ``init_cache``.
      batch: rows.
      max_len: tokens a row can hold.
      length: tokens that a row holds when the token comes that operations and bytes are counted
        for; by default ``max_len``.
      prefill_chunk: tokens of a prompt that a call takes.
      compiled: take temporaries from the compiler, for this device; False estimates them, as is
        always done for a ``ModelShape``, for caches on the host and for a mesh.
      mesh: devices that share the work; ``jax.sharding.AbstractMesh`` plans for devices that are
        not here.

    Raises:
      ValueError: as of ``init_cache``; if ``length`` is more than ``max_len``.
    """
    max_len = whole_number("max_len", max_len, 1)
    length = whole_number("length", max_len if length is None else length, 1)
    chunk = min(whole_number("prefill_chunk", prefill_chunk, 1), max_len)
    if length > max_len:
        raise ValueError(f"length is {length}, but max_len only {max_len}")
    cache = abstract_cache(model.config, choice, batch=batch, max_len=max_len)
    temporaries = estimated_temporaries(model.config, batch, chunk) + bytes_ahead(cache)
    source = "estimated"
    # JAX compiles for arrays on the host only where it has them, and none are made here.
    on_device = not any(layer.policy.placement.behind_tail for layer in cache.layers)
    spread = None if mesh is None else spread_over(mesh, model.config.num_key_value_heads)
    if spread is not None:
        spread.check_rows(batch)
        temporaries = estimated_temporaries(model.config, batch // spread.rows, chunk, spread)
        temporaries += bytes_ahead(cache, spread)
    elif compiled and on_device and hasattr(model, "apply"):
        found = [_compiled(model, cache, new) for new in {1, chunk}]
        known = [size for size in found if size is not None]
        if len(known) == len(found):
            temporaries = max(known)
            source = f"compiled for {jax.default_backend()}, JAX {jax.__version__}"
    weights = weight_bytes(model, mesh)
    held = [_held(layer, length) for layer in cache.layers]
    matrices = 2 * _multiplied(model)
    scores = 4 * model.config.num_attention_heads * model.config.head_dim
    # A layer that reads another's has queries of its own.
    read = cache.sources if cache.sources is not None else range(len(cache.layers))
    seen = [held[source][0] for source in read]
    uncached = sum(n * (n + 1) / 2 + (length - n) * n for n in seen)
    rows, parts, shares, devices = cache.batch, 1.0, 1.0, 1
    token = bytes_a_token(model.config, choice)
    if spread is not None:
        rows, devices = cache.batch // spread.rows, spread.devices
        parts = spread.parts * spread.heads
        shares = parts * (spread.copies if spread.divides(model.config.num_attention_heads) else 1)
        token = {place: size / parts for place, size in token.items()}
        matrices = matrices * weights / weight_bytes(model)
    return Plan(
        cache.batch, max_len, length, devices, weights, nbytes(cache, spread), token,
        temporaries, source,
        operations=rows * (matrices + scores * sum(seen) / shares),
        operations_uncached=rows * (matrices * length + scores * uncached / shares),
        moved=weights + rows * sum(size for _, size in held) / parts,
        moved_uncached=weights,
    )  # fmt: skip


def weight_bytes(model: Plannable, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Bytes of a model's parameters, as its config says that they are stored; on a device of a
    mesh, those that it has.

    Raises:
      ValueError: if kvjax does not run the model, and so divides it among no devices.
    """
    dtype = jnp.dtype(model.config.dtype)
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.abstract_params())]
    if mesh is not None:
        if not hasattr(model, "param_shardings"):
            raise ValueError("a mesh is planned for a model that kvjax runs, not for a shape alone")
        shardings = jax.tree.leaves(cast(Any, model).param_shardings(mesh))
        shapes = [each.shard_shape(shape) for each, shape in zip(shardings, shapes, strict=True)]
    return sum(math.prod(shape) * dtype.itemsize for shape in shapes)


def cache_nbytes(
    config: CacheShape, choice: PolicyChoice | None = None, *, batch: int = 1, max_len: int
) -> dict[str, int]:
    """Bytes of a cache, by place, without allocating it: all of them, where it grows."""
    return nbytes(abstract_cache(config, choice, batch=batch, max_len=max_len))


def bytes_ahead(cache: KVCache, spread: Spread | None = None) -> int:
    """Bytes of the device, or of each device of a mesh, that layers on the host take when they are
    fetched ahead, at most. ``spread``: by default the cache's."""
    own, spread = cache.layers, spread or cache.spread
    if spread is not None:
        own = [share_of(layer, spread) for layer in cache.layers]
    return ahead_bytes(
        [(tree_bytes((layer.keys, layer.values)), layer.policy.placement) for layer in own]
    )


def bytes_a_token(config: CacheShape, choice: PolicyChoice | None) -> dict[str, float]:
    """Bytes that a token more takes in a cache of a policy, by place: tails, and what else does not
    grow with the text, do not count."""
    limit = getattr(config, "position_limit", None)
    totals: dict[str, float] = {}
    for layer in abstract_cache(config, choice, max_len=limit or _LONG).layers:
        place = layer.policy.placement.place
        grows = layer.policy.layout.limit is not None
        totals[place] = totals.get(place, 0) + (_unit_bytes(layer) if grows else 0)
    return totals


def memory_report(cache: KVCache) -> list[dict[str, Any]]:
    """What is where, a row a layer: its layout, its codecs, its place, the kind of memory that the
    arrays are in, bytes of body and tail, and how many tokens fit."""
    rows = []
    for number, layer in enumerate(cache.layers):
        arrays = [x for x in jax.tree.leaves((layer.keys, layer.values)) if hasattr(x, "sharding")]
        kinds = {str(x.sharding.memory_kind) for x in arrays}
        held = layer.policy
        rows.append(
            {
                "layer": number,
                "layout": repr(held.layout),
                "keys": repr(held.keys),
                "values": repr(held.values),
                "place": held.placement.place,
                "memory": "/".join(sorted(kinds)),
                "body": tree_bytes((layer.keys, layer.values)),
                "tail": tree_bytes((layer.tail, layer.strip)),
                "tokens": held.layout.slots,
            }
        )
    return rows


def estimated_temporaries(config: Any, batch: int, new: int, spread: Spread | None = None) -> int:
    """Bytes that a call of ``new`` tokens needs besides weights and cache, from shapes alone: what
    the widest part of a layer keeps, a block of attention, and the logits of the last token; with
    ``spread`` those of one device, ``batch`` being its rows."""
    size = jnp.dtype(config.dtype).itemsize
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    wide = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    vocabulary = config.vocab_size
    if spread is not None:
        tensor = spread.heads * spread.copies
        wide, vocabulary = -(-wide // tensor), -(-vocabulary // tensor)
        heads //= tensor if spread.divides(heads) else spread.heads
        kv_heads //= spread.heads
    attended = (heads + 2 * kv_heads) * config.head_dim
    activations = batch * new * (2 * config.hidden_size + max(3 * wide, 2 * attended)) * size
    block = min(1024, 3 * 2**17 // (batch * kv_heads * config.head_dim) or 1)
    scores = batch * heads * min(new, 256) * block * 4 * 2
    blocks = batch * kv_heads * block * config.head_dim * 4 * 2
    return activations + scores + blocks + batch * vocabulary * 4


def abstract_cache(
    config: CacheShape,
    choice: PolicyChoice | None = None,
    *,
    batch: int = 1,
    max_len: int,
    mesh: Mesh | None = None,
) -> KVCache:
    """``init_cache`` as shapes, as large as it may become: what grows has grown."""
    policies = per_layer(CachePolicy() if choice is None else choice, config)
    grown = [
        replace(each, layout=Growing(start=max_len)) if isinstance(each.layout, Growing) else each
        for each in policies
    ]
    budget = budget_of(choice)
    policies = grown if budget is None else Auto(grown, budget.memory, budget.placement)
    make = functools.partial(init_cache, config, policies, batch=batch, max_len=max_len, mesh=mesh)
    return jax.eval_shape(make)


def _unit_bytes(layer: LayerCache) -> float:
    """Bytes of a token of a row, as the codecs store it."""
    stored = layer.policy.stored.slots * (layer.policy.block if layer.tail is not None else 1)
    batch = jax.tree.leaves(layer.keys)[0].shape[0]
    return tree_bytes((layer.keys, layer.values)) / stored / batch


def _held(layer: LayerCache, length: int) -> tuple[int, float]:
    """Tokens that the query behind ``length`` of them sees, and their bytes, of one row."""
    layout, window = layer.policy.layout, layer.window
    window = min((w for w in (layout.window, window) if w is not None), default=length)
    seen = min(length, window + layout.sinks)
    batch = jax.tree.leaves(layer.keys)[0].shape[0]
    if layer.tail is None:
        return seen, seen * _unit_bytes(layer)
    raw = min(seen, layer.policy.block * (layer.policy.recent + 1))
    tail = tree_bytes(layer.tail) / batch / layer.policy.split.tail.slots
    return seen, raw * tail + (seen - raw) * _unit_bytes(layer)


def _multiplied(model: Plannable) -> int:
    """Parameters that a token is multiplied by: matrices, but not tables that are looked up in."""
    total, table, has_head = 0, 0, False
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.abstract_params()):
        names = {str(getattr(key, "key", key)) for key in path}
        if len(leaf.shape) < 2 or names & _POSITIONS:
            continue
        total += math.prod(leaf.shape)
        has_head = has_head or bool(names & _HEADS)
        table += math.prod(leaf.shape) if names & _LOOKUPS else 0
    return total - table if has_head else total


def _compiled(model: Any, cache: KVCache, new: int) -> int | None:
    """Temporary bytes of a call of ``new`` tokens, of the program that is compiled for it here;
    None where the compiler does not say."""
    return _temporaries(model, jax.tree.structure(cache), tuple(_shapes(cache)), new)


def _shapes(cache: KVCache) -> list[Any]:
    return [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(cache)]


@functools.lru_cache(maxsize=64)
def _temporaries(model: Any, structure: Any, shapes: Any, new: int) -> int | None:
    leaves = [jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for shape, dtype in shapes]
    cache: KVCache = jax.tree.unflatten(structure, leaves)
    tokens = jax.ShapeDtypeStruct((cache.batch, new), jnp.int32)

    def step(params: Any, tokens: Any, cache: Any) -> Any:
        logits, cache = model.apply(params, tokens, cache, last_only=True)
        return jnp.argmax(logits[:, -1], axis=-1), cache

    params = model.abstract_params()
    program = jax.jit(step, donate_argnums=2).lower(params, tokens, cache).compile()
    found = program.memory_analysis()
    return None if found is None else int(found.temp_size_in_bytes)
