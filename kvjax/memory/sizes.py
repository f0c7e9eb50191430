"""What a cache takes, from its policy and a model's shape alone."""

import functools
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from kvjax.cache.checks import check_cache
from kvjax.cache.creation import init_cache
from kvjax.cache.sizes import nbytes, shares_of
from kvjax.cache.state import KVCache, LayerCache
from kvjax.core.pytree import tree_bytes
from kvjax.layouts import Growing, paged
from kvjax.placement.device import ahead_bytes
from kvjax.placement.mesh import Spread
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import CacheShape, position_limit
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
    grown = [replace(each, layout=_grown(each.layout, max_len)) for each in policies]
    budget = budget_of(choice)
    policies = grown if budget is None else Auto(grown, budget.memory, budget.placement)
    make = functools.partial(
        init_cache, config, policies, batch=batch, max_len=max_len, mesh=mesh, stacked=stacked,
        rotary_len=rotary_len,
    )  # fmt: skip
    return jax.eval_shape(make)


def _grown(layout: Any, max_len: int) -> Any:
    """A layout as large as it may become."""
    if pages := paged(layout):
        return replace(pages, inner=_grown(pages.inner, max_len))
    return Growing(start=max_len) if isinstance(layout, Growing) else layout


def cache_nbytes(
    config: CacheShape, choice: PolicyChoice | None = None, *, batch: int = 1, max_len: int
) -> dict[str, int]:
    """Bytes of a cache, by place, without allocating it: all of them, where it grows."""
    return nbytes(abstract_cache(config, choice, batch=batch, max_len=max_len))


def bytes_ahead(cache: KVCache, spread: Spread | None) -> int:
    """Bytes of the device, or of each device of a mesh, that layers on the host take when they are
    fetched ahead, at most; those of stacks are not."""
    return ahead_bytes(
        [
            (tree_bytes((layer.keys, layer.values)), layer.policy.placement)
            for layer in shares_of(cache, spread)
            if layer.stack is None
        ]
    )


def bytes_a_token(config: CacheShape, choice: PolicyChoice | None) -> dict[str, float]:
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
    return nbytes(cache, cache.spread).get("device", 0) + bytes_ahead(cache, cache.spread)


def bytes_read(
    config: CacheShape, choice: PolicyChoice | None, *, batch: int, max_len: int, length: int
) -> int:
    """Bytes of a cache that the query behind ``length`` tokens, itself among them, sees in every
    row, as its codecs store them."""
    cache = abstract_cache(config, choice, batch=batch, max_len=max_len)
    return round(batch * sum(seen(layer, length)[1] for layer in cache.layers))


def seen(layer: LayerCache, length: int, own: LayerCache | None = None) -> tuple[int, float]:
    """Tokens that the query behind ``length`` of them sees, and their bytes, of one row; with
    ``own`` those of them that a device of a mesh has (``share_of``)."""
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
    rows, paging = jax.tree.leaves(arrays)[0].shape[0], layer.policy.paging
    units = layer.policy.stored.slots if paging is None else paging.layout.page_size
    return tree_bytes(arrays) / (units * layer.policy.unit) / rows
