"""Layers that are alike, as one set of arrays and alone again."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import LOST, validated
from kvjax.cache.creation import check_stacks, stacks_of
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache, with_rows
from kvjax.core.array_ops import flag_where
from kvjax.core.transfer import fetch
from kvjax.core.validation import is_traced

_P = ParamSpec("_P")
_T = TypeVar("_T")


@automatic_axes
def stack(cache: KVCache) -> KVCache:
    """The same with the arrays of layers that are alike in one, [layers, batch, kv_heads, max_len,
    head_dim] of each, for a model that goes through its layers by ``lax.scan``. All is copied;
    ``init_cache(..., stacked=True)`` begins so.

    Layers are alike that have a policy, heads and channels in common, and a window of their own. A
    layer's number may be traced then, where they are one stack; of several it is given as (stack,
    number of its layer). A scan over layers carries what ``kvjax.step`` gives, and goes over every
    layer once.

    Raises:
      ValueError: if a layer reads another's keys, the cache is one of ``policy("auto")``, or layers
        that are alike have marks that differ, as where one of them was converted (where traced: the
        status ``LOST``).
    """
    cache = validated("kvjax.stack", cache)
    if cache.stacks is not None:
        return cache
    check_stacks(len(cache.layers), cache.sources, cache.budget)
    kinds = [(x.policy, x.kv_heads, x.head_dim, x.window) for x in cache.layers]
    stacks, layers, marks, status = stacks_of(kinds), [], [], cache.status
    for kind in dict.fromkeys(kinds):
        entries = [n for n, other in enumerate(kinds) if other == kind]
        layers.append(_together([cache.layers[n] for n in entries]))
        every = cache.written[:, jnp.array(entries)]
        marks.append(jnp.max(every, axis=1))
        other = jnp.any(every != every[:, :1], axis=1)
        if not is_traced(other) and np.any(fetch(other)):
            raise ValueError(
                f"layers {entries} hold different tokens of row {int(np.argmax(fetch(other)))}: "
                "kvjax.convert lays them out anew, all of them"
            )
        status = status | flag_where(other, LOST)
    return with_rows(
        replace(cache, stacks=stacks, sources=None),
        layers=tuple(layers), written=jnp.stack(marks, axis=1), status=status,
    )  # fmt: skip


@automatic_axes
def unstack(cache: KVCache) -> KVCache:
    """The same with every layer's arrays its own. All of it is copied."""
    cache = validated("kvjax.unstack", cache)
    if cache.stacks is None:
        return cache
    layers = tuple(_alone(cache.layers[entry], index) for entry, index in cache.stacks)
    written = cache.written[:, jnp.array([entry for entry, _ in cache.stacks])]
    return with_rows(replace(cache, stacks=None), layers=layers, written=written)


def layer_by_layer(
    change: Callable[Concatenate[KVCache, _P], _T],
) -> Callable[Concatenate[KVCache, _P], _T]:
    """An operation of a cache, which copies what it is of in any case, done to one that is stacked
    by its layers; a result that is a cache, or begins with one, is stacked again. A stack is copied
    twice more for it, and is not used up."""

    @functools.wraps(change)
    def changed(cache: KVCache, *args: _P.args, **settings: _P.kwargs) -> Any:
        if not isinstance(cache, KVCache) or cache.stacks is None:
            return change(cache, *args, **settings)
        found = change(unstack(cache), *args, **settings)
        if isinstance(found, tuple):
            return stack(found[0]), *found[1:]
        return stack(found) if isinstance(found, KVCache) else found

    return changed


def _together(layers: list[LayerCache]) -> LayerCache:
    near = [replace(held.near(), fetched=None, stack=len(layers)) for held in layers]
    return _kept(jax.tree.map(lambda *x: jnp.stack(x), *near))


def _alone(held: LayerCache, index: int) -> LayerCache:
    near = replace(held.near(), stack=None)
    return _kept(jax.tree.map(lambda x: x[index], near))


def _kept(near: LayerCache) -> LayerCache:
    """A layer or a stack with its body where its policy says."""
    placement = near.policy.placement
    if placement.spread is not None or not is_traced(jax.tree.leaves(near)[0]):
        return near.placed()
    return replace(near, keys=placement.far(near.keys), values=placement.far(near.values))
