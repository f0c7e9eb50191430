"""Bytes of caches and of parameters, from shapes alone."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypedDict

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from kvjax.cache.checks import check_cache
from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import nbytes, shards_of
from kvjax.cache.state import KVCache, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.validation import ArgumentError
from kvjax.placement.device import ahead_bytes
from kvjax.placement.mesh import MeshSharding
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import CacheShape, model_dtype, position_limit
from kvjax.policies.presets import Auto, PolicyChoice, budget_of, per_layer

_LONG = 2**24
"""A length that exceeds every window."""


def abstract_cache(
    config: CacheShape,
    choice: PolicyChoice | None = None,
    *,
    batch: int = 1,
    max_len: int,
    mesh: Mesh | None = None,
    stacked: bool | None = False,
    rotary_len: int | None = None,
) -> KVCache:
    """Return the shapes of the cache that ``init_cache`` creates, with growing layers at full size.

    By default layers are not stacked, because sizes are computed per layer.
    """
    policies = per_layer(CachePolicy() if choice is None else choice, config)
    grown = [replace(x, layout=x.layout.starting_at(max_len)) for x in policies]
    budget = budget_of(choice)
    policies = grown if budget is None else Auto(grown, budget.memory, budget.placement)
    make = functools.partial(
        init_cache,
        config,
        policies,
        batch=batch,
        max_len=max_len,
        mesh=mesh,
        stacked=stacked,
        rotary_len=rotary_len,
    )
    return jax.eval_shape(make)


def cache_nbytes(
    config: CacheShape, policy: PolicyChoice | None = None, *, batch: int = 1, max_len: int
) -> dict[str, int]:
    """Compute the bytes of a cache by place (``"device"`` and ``"host"``), without allocating it.
    Growing layers count at full size.

    Example:
      ```python
      print(kvjax.memory.cache_nbytes(lm.config, kvjax.policy(bits=4), batch=8, max_len=1024))
      ```
    """
    return nbytes(abstract_cache(config, policy, batch=batch, max_len=max_len))


def prefetch_bytes(cache: KVCache, mesh_sharding: MeshSharding | None) -> int:
    """Return the maximum bytes that prefetched layers need on the device, or on each device of a
    mesh.

    Layers of stacks are not prefetched.
    """
    return ahead_bytes(
        [
            (tree_bytes((layer.keys, layer.values)), layer.policy.placement)
            for layer in shards_of(cache, mesh_sharding)
            if layer.stack is None
        ]
    )


def bytes_per_token(config: CacheShape, choice: PolicyChoice | None) -> dict[str, float]:
    """Return the bytes that one more token needs in a cache, by place.

    Tails and layers with a window do not grow with the sequence, so they do not count.
    """
    limit = position_limit(config)
    totals: dict[str, float] = {}
    for layer in abstract_cache(config, choice, max_len=limit or _LONG).layers:
        place = layer.policy.placement.place
        grows = layer.policy.layout.limit is not None
        size = token_bytes(layer, (layer.keys, layer.values)) if grows else 0
        totals[place] = totals.get(place, 0) + size
    return totals


class LayerReport(TypedDict):
    """The report on a layer: its layout, codecs and placement, JAX's name of its kind of memory,
    the bytes of its body and tail, and its capacity in tokens."""

    layer: int
    layout: str
    keys: str
    values: str
    place: str
    memory: str
    body: int
    tail: int
    tokens: int | None


def memory_report(cache: KVCache) -> list[LayerReport]:
    """Return one dict per layer: its layout, codecs and placement, JAX's name of its kind of
    memory, the bytes of its body and tail, and its capacity in tokens.

    Raises:
      ValueError: if ``cache`` is not a cache.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy(bits=4), max_len=256)
      for layer in kvjax.memory.memory_report(cache):
          print(layer)
      ```
    """
    check_cache("kvjax.memory.memory_report", cache)
    rows: list[LayerReport] = []
    for number, layer in enumerate(cache.layers):
        leaves = jax.tree.leaves((layer.keys, layer.values))
        arrays = [x for x in leaves if getattr(x, "sharding", None) is not None]
        policy = layer.policy
        rows.append(
            {
                "layer": number,
                "layout": repr(policy.layout),
                "keys": repr(policy.keys),
                "values": repr(policy.values),
                "place": policy.placement.place,
                "memory": "/".join(sorted({str(x.sharding.memory_kind) for x in arrays})),
                "body": tree_bytes((layer.keys, layer.values)),
                "tail": tree_bytes((layer.tail, layer.strip)),
                "tokens": policy.layout.slots,
            }
        )
    return rows


def device_bytes(
    config: Any, choice: PolicyChoice | None, batch: int, max_len: int, mesh: Mesh | None = None
) -> int:
    """Return the bytes that a cache takes on the device, or on each device of a mesh, including
    prefetched layers."""
    cache = abstract_cache(config, choice, batch=batch, max_len=max_len, mesh=mesh)
    return nbytes(cache, cache.mesh_sharding).get("device", 0) + prefetch_bytes(
        cache, cache.mesh_sharding
    )


def cache_bytes_read(
    config: CacheShape, choice: PolicyChoice | None, *, batch: int, max_len: int, length: int
) -> int:
    """Return the bytes of a stored cache that a decode step reads, if every row has ``length``
    tokens.

    ``length`` includes the token of the step.
    """
    cache = abstract_cache(config, choice, batch=batch, max_len=max_len)
    return round(batch * sum(visible_tokens(layer, length)[1] for layer in cache.layers))


def visible_tokens(
    layer: LayerCache, length: int, own: LayerCache | None = None
) -> tuple[int, float]:
    """Return the number of tokens that a row's query at position ``length - 1`` sees, and their
    bytes.

    ``own`` is the layer's shard on one device of a mesh (``shards_of``). If it is given, only its
    bytes count.
    """
    own = layer if own is None else own
    layout, stored = layer.policy.layout, token_bytes(layer, (own.keys, own.values))
    window = min((w for w in (layout.window, layer.window) if w is not None), default=length)
    tokens = min(length, window + layout.sinks)
    if layer.tail is None:
        return tokens, tokens * stored
    raw = min(tokens, layer.policy.block * (layer.policy.recent + 1))
    rows = jax.tree.leaves(own.tail)[0].shape[0]
    tail = tree_bytes(own.tail) / rows / layer.policy.split.tail.slots
    return tokens, raw * tail + (tokens - raw) * stored


def token_bytes(layer: LayerCache, arrays: PyTree) -> float:
    """Return the bytes per token in some arrays of a layer's body."""
    rows, page_group = jax.tree.leaves(arrays)[0].shape[0], layer.policy.page_group
    units = layer.policy.stored_layout.slots if page_group is None else page_group.layout.page_size
    return tree_bytes(arrays) / (units * layer.policy.unit) / rows


_LOOKUPS = {"embed_tokens", "wte", "embed_in"}
_POSITIONS = {"wpe"}
_HEADS = {"lm_head", "embed_out"}


class Plannable(Protocol):
    """A model to plan for: an ``Architecture``, or a ``kvjax.memory.shapes.ModelShape``.

    For models that kvjax can't run, ``apply`` is None and ``param_shardings`` raises
    ``ValueError``.
    """

    @property
    def config(self) -> Any: ...
    @property
    def apply(self) -> Callable[..., PyTree] | None: ...
    def abstract_params(self) -> PyTree: ...
    def param_shardings(self, mesh: Mesh | AbstractMesh, /) -> PyTree: ...


def as_plannable(model: object) -> Plannable:
    """Return the architecture of a loaded model. An architecture or a ``ModelShape`` is returned
    unchanged.

    Raises:
      ValueError: if ``model`` is none of these, or has an encoder.
    """
    architecture = getattr(model, "architecture", model)
    for part in ("config", "apply", "abstract_params"):
        if not hasattr(architecture, part):
            raise ArgumentError(
                "model must be a loaded model, its architecture or a ModelShape, got a "
                f"{type(architecture).__name__}, which has no {part}",
                param="model",
            )
    if has_encoder(architecture):
        raise ValueError(
            "models with an encoder can't be planned for: the encoder's input has its own length"
        )
    return architecture  # type: ignore[no-any-return]


def has_encoder(model: object) -> bool:
    """Return whether a loaded model or an architecture has an encoder."""
    return bool(getattr(getattr(model, "architecture", model), "encodes", False))


class LoadedModel(Protocol):
    """A model with its parameters, on one device or a mesh."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> PyTree: ...
    @property
    def mesh(self) -> Mesh | None: ...


def weight_bytes(model: Plannable, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Return the bytes of a model's parameters in the dtype of its config. On a mesh they are bytes
    per device.

    Raises:
      ValueError: if a mesh is given for a model that kvjax can't run.
    """
    dtype = jnp.dtype(model_dtype(model.config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.abstract_params())]
    if mesh is not None:
        shardings = jax.tree.leaves(model.param_shardings(mesh))
        shapes = [x.shard_shape(shape) for x, shape in zip(shardings, shapes, strict=True)]
    return sum(math.prod(shape) * dtype.itemsize for shape in shapes)


def weight_bytes_read(params: PyTree, batch: int) -> int:
    """Return the bytes of parameters that a decode step of ``batch`` rows reads.

    Every parameter counts once. Of position embeddings, and of token embeddings that are not also
    the output head, only ``batch`` rows count.

    Example:
      ```python
      print(kvjax.bench.weight_bytes_read(lm.params, batch=1))
      ```
    """
    total = 0
    for leaf, looked_up in _tables(params):
        size = leaf.size * leaf.dtype.itemsize
        total += min(batch, leaf.shape[0]) * size // leaf.shape[0] if looked_up else size
    return total


def matmul_parameters(params: PyTree) -> int:
    """Return the number of parameters in matrix products, which are all matrices except lookup
    tables."""
    return sum(x.size for x, looked_up in _tables(params) if x.ndim > 1 and not looked_up)


def _tables(params: PyTree) -> list[tuple[jax.ShapeDtypeStruct | jax.Array, bool]]:
    """Return all arrays, each with whether it is only a lookup table."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append(({str(getattr(key, "key", key)) for key in path}, leaf))
    has_head = any(names & _HEADS for names, _ in leaves)
    tables = _POSITIONS | _LOOKUPS if has_head else _POSITIONS
    return [(leaf, bool(names & tables)) for names, leaf in leaves]
