"""Bytes of caches and of parameters, from shapes alone."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kvjax.cache.checks import check_cache
from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import nbytes, shards_of
from kvjax.cache.state import KVCache, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.placement.device import ahead_bytes
from kvjax.placement.mesh import MeshSharding
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import CacheShape, model_dtype, position_limit
from kvjax.policies.presets import Auto, PolicyChoice, budget_of, per_layer

_LONG = 2**24
"""Tokens of a text that is longer than every window."""


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
    """``init_cache`` as shapes, as large as it may become: what grows has grown. Figures go by
    layers, so they are one by one but where programs are compiled for it."""
    policies = per_layer(CachePolicy() if choice is None else choice, config)
    grown = [replace(each, layout=each.layout.starting_at(max_len)) for each in policies]
    budget = budget_of(choice)
    policies = grown if budget is None else Auto(grown, budget.memory, budget.placement)
    make = functools.partial(
        init_cache, config, policies, batch=batch, max_len=max_len, mesh=mesh, stacked=stacked,
        rotary_len=rotary_len,
    )  # fmt: skip
    return jax.eval_shape(make)


def cache_nbytes(
    config: CacheShape, choice: PolicyChoice | None = None, *, batch: int = 1, max_len: int
) -> dict[str, int]:
    """Bytes of a cache, by place, without allocating it: all of them, where it grows."""
    return nbytes(abstract_cache(config, choice, batch=batch, max_len=max_len))


def prefetch_bytes(cache: KVCache, spread: MeshSharding | None) -> int:
    """Bytes of the device, or of each device of a mesh, that layers on the host take when they are
    fetched ahead, at most; those of stacks are not."""
    return ahead_bytes(
        [
            (tree_bytes((layer.keys, layer.values)), layer.policy.placement)
            for layer in shards_of(cache, spread)
            if layer.stack is None
        ]
    )


def bytes_per_token(config: CacheShape, choice: PolicyChoice | None) -> dict[str, float]:
    """Bytes that a token more takes in a cache of a policy, by place: tails, and what else does not
    grow with the text, do not count."""
    limit = position_limit(config)
    totals: dict[str, float] = {}
    for layer in abstract_cache(config, choice, max_len=limit or _LONG).layers:
        place = layer.policy.placement.place
        grows = layer.policy.layout.limit is not None
        token = token_bytes(layer, (layer.keys, layer.values)) if grows else 0
        totals[place] = totals.get(place, 0) + token
    return totals


def memory_report(cache: KVCache) -> list[dict[str, Any]]:
    """What is where, a row a layer: its layout, its codecs, its place, the kind of memory that the
    arrays are in, bytes of body and tail, and how many tokens fit.

    Raises:
      ValueError: if it is no cache.
    """
    check_cache("kvjax.memory.memory_report", cache)
    rows = []
    for number, layer in enumerate(cache.layers):
        leaves = jax.tree.leaves((layer.keys, layer.values))
        arrays = [x for x in leaves if getattr(x, "sharding", None) is not None]
        held = layer.policy
        rows.append(
            {
                "layer": number,
                "layout": repr(held.layout),
                "keys": repr(held.keys),
                "values": repr(held.values),
                "place": held.placement.place,
                "memory": "/".join(sorted({str(x.sharding.memory_kind) for x in arrays})),
                "body": tree_bytes((layer.keys, layer.values)),
                "tail": tree_bytes((layer.tail, layer.strip)),
                "tokens": held.layout.slots,
            }
        )
    return rows


def device_bytes(
    config: Any, choice: PolicyChoice | None, batch: int, max_len: int, mesh: Mesh | None = None
) -> int:
    """Bytes of the device, or of each device of a mesh, that a cache takes, layers that are fetched
    ahead among them."""
    cache = abstract_cache(config, choice, batch=batch, max_len=max_len, mesh=mesh)
    return nbytes(cache, cache.spread).get("device", 0) + prefetch_bytes(cache, cache.spread)


def cache_bytes_read(
    config: CacheShape, choice: PolicyChoice | None, *, batch: int, max_len: int, length: int
) -> int:
    """Bytes of a cache that the query behind ``length`` tokens, itself among them, sees in every
    row, as its codecs store them."""
    cache = abstract_cache(config, choice, batch=batch, max_len=max_len)
    return round(batch * sum(visible_tokens(layer, length)[1] for layer in cache.layers))


def visible_tokens(
    layer: LayerCache, length: int, own: LayerCache | None = None
) -> tuple[int, float]:
    """Tokens that the query behind ``length`` of them sees, and their bytes, of one row; with
    ``own`` those of them that a device of a mesh has (``shard_of``)."""
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


def token_bytes(layer: LayerCache, arrays: Any) -> float:
    """Bytes of a token of a row, or a page, in these arrays of a layer's body."""
    rows, page_group = jax.tree.leaves(arrays)[0].shape[0], layer.policy.page_group
    units = layer.policy.stored_layout.slots if page_group is None else page_group.layout.page_size
    return tree_bytes(arrays) / (units * layer.policy.unit) / rows


_LOOKUPS = {"embed_tokens", "wte", "embed_in"}
_POSITIONS = {"wpe"}
_HEADS = {"lm_head", "embed_out"}


class Plannable(Protocol):
    """What can be planned for: an ``Architecture``, or a ``kvjax.memory.shapes.ModelShape``.

    ``apply`` is None, and ``param_shardings`` raises ``ValueError``, where kvjax does not run it.
    """

    @property
    def config(self) -> Any: ...
    @property
    def apply(self) -> Callable[..., Any] | None: ...
    def abstract_params(self) -> Any: ...
    def param_shardings(self, mesh: Mesh | AbstractMesh, /) -> Any: ...


def as_plannable(model: Any) -> Plannable:
    """What can be planned for, of that or of a loaded model.

    Raises:
      ValueError: if it is neither.
    """
    found: Any = getattr(model, "architecture", model)
    for part in ("config", "apply", "abstract_params"):
        if not hasattr(found, part):
            raise ValueError(
                f"a model is needed, loaded, its architecture or a ModelShape, not a "
                f"{type(found).__name__}: it has no {part}"
            )
    if has_encoder(found):
        raise ValueError(
            "plans are of models without an encoder: what one reads has a length of its own"
        )
    return found  # type: ignore[no-any-return]


def has_encoder(model: Any) -> bool:
    """Whether a model, loaded or its architecture alone, has an encoder."""
    return bool(getattr(getattr(model, "architecture", model), "encodes", False))


class LoadedModel(Protocol):
    """A model with its parameters, on one device or a mesh."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def mesh(self) -> Mesh | None: ...


def weight_bytes(model: Plannable, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Bytes of a model's parameters, as its config says that they are stored; on a device of a
    mesh, those that it has.

    Raises:
      ValueError: if kvjax does not run the model, and so divides it among no devices.
    """
    dtype = jnp.dtype(model_dtype(model.config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.abstract_params())]
    if mesh is not None:
        shardings = jax.tree.leaves(model.param_shardings(mesh))
        shapes = [each.shard_shape(shape) for each, shape in zip(shardings, shapes, strict=True)]
    return sum(math.prod(shape) * dtype.itemsize for shape in shapes)


def weight_bytes_read(params: Any, batch: int) -> int:
    """Bytes of a model's parameters that a step reads: every one once, but of positions, and of an
    embedding that is not the head as well, only as many rows as there are texts."""
    total = 0
    for leaf, looked_up in _tables(params):
        size = leaf.size * leaf.dtype.itemsize
        total += min(batch, leaf.shape[0]) * size // leaf.shape[0] if looked_up else size
    return total


def matmul_parameters(params: Any) -> int:
    """Parameters that a token is multiplied by: matrices, but not tables that are looked up in."""
    return sum(x.size for x, looked_up in _tables(params) if x.ndim > 1 and not looked_up)


def _tables(params: Any) -> list[tuple[Any, bool]]:
    """All arrays, and whether a token looks up a row of it."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append(({str(getattr(key, "key", key)) for key in path}, leaf))
    has_head = any(names & _HEADS for names, _ in leaves)
    tables = _POSITIONS | _LOOKUPS if has_head else _POSITIONS
    return [(leaf, bool(names & tables)) for names, leaf in leaves]
