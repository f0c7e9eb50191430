"""Stacked caches: identical layers whose arrays have a leading layer axis."""

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
    """Stack the arrays of identical layers into arrays [layers, batch, kv_heads, max_len,
    head_dim].

    Models that loop over their layers with ``lax.scan`` need a stacked cache. All arrays are
    copied. ``init_cache(..., stacked=True)`` creates a stacked cache directly.

    Layers are identical if they have the same policy, number of heads, head dimension and window.
    If all layers form one stack, a layer index may be traced. If there are several stacks, a traced
    layer is given as a pair: the index of the stack, and the index in this stack. A scan over
    layers carries the result of ``kvjax.step`` and must visit every layer once.

    Raises:
      ValueError: if a layer reads another layer's keys, the policy is ``policy("auto")``, or
        identical layers have different tokens, for example after converting one of them. If lengths
        are traced, different tokens give the status ``LOST`` instead.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      stacked = kvjax.stack(cache)
      print(stacked.layers[0].keys.shape)  # [layers, batch, kv_heads, max_len, head_dim]
      ```
    """
    cache = validated("kvjax.stack", cache)
    if cache.stacks is not None:
        return cache
    check_stacks(len(cache.layers), cache.sources, cache.budget)
    specs = [(x.policy, x.kv_heads, x.head_dim, x.window) for x in cache.layers]
    stacks, layers, marks, status = stacks_of(specs), [], [], cache.status
    for spec in dict.fromkeys(specs):
        entries = [n for n, other in enumerate(specs) if other == spec]
        layers.append(_stack_layers([cache.layers[n] for n in entries]))
        written = cache.written[:, jnp.array(entries)]
        marks.append(jnp.max(written, axis=1))
        differ = jnp.any(written != written[:, :1], axis=1)
        if not is_traced(differ) and np.any(fetch(differ)):
            raise ValueError(
                f"layers {entries} hold different tokens of row {int(np.argmax(fetch(differ)))}: "
                "call kvjax.convert on the whole cache first"
            )
        status = status | flag_where(differ, LOST)
    return with_rows(
        replace(cache, stacks=stacks, sources=None),
        layers=tuple(layers),
        written=jnp.stack(marks, axis=1),
        status=status,
    )


@automatic_axes
def unstack(cache: KVCache) -> KVCache:
    """Undo ``stack``, so that every layer has its own arrays. All arrays are copied.

    Example:
      ```python
      stacked = kvjax.init_cache(lm.config, max_len=64, stacked=True)
      cache = kvjax.unstack(stacked)
      ```
    """
    cache = validated("kvjax.unstack", cache)
    if cache.stacks is None:
        return cache
    layers = tuple(_unstack_layer(cache.layers[entry], index) for entry, index in cache.stacks)
    written = cache.written[:, jnp.array([entry for entry, _ in cache.stacks])]
    return with_rows(replace(cache, stacks=None), layers=layers, written=written)


def layer_by_layer(
    operation: Callable[Concatenate[KVCache, _P], _T],
) -> Callable[Concatenate[KVCache, _P], _T]:
    """Extend an operation to stacked caches. The operation must be one that copies its cache.

    A stacked cache is unstacked first. The result is stacked again if it is a cache, or a tuple
    that begins with a cache. This needs two more copies, and the argument's arrays are not deleted.
    """

    @functools.wraps(operation)
    def wrapped(cache: KVCache, *args: _P.args, **settings: _P.kwargs) -> Any:
        if not isinstance(cache, KVCache) or cache.stacks is None:
            return operation(cache, *args, **settings)
        result = operation(unstack(cache), *args, **settings)
        if isinstance(result, tuple):
            return stack(result[0]), *result[1:]
        return stack(result) if isinstance(result, KVCache) else result

    return wrapped


def _stack_layers(layers: list[LayerCache]) -> LayerCache:
    near = [replace(layer.near(), fetched=None, stack=len(layers)) for layer in layers]
    return _to_placement(jax.tree.map(lambda *x: jnp.stack(x), *near))


def _unstack_layer(layer: LayerCache, index: int) -> LayerCache:
    near = replace(layer.near(), stack=None)
    return _to_placement(jax.tree.map(lambda x: x[index], near))


def _to_placement(near: LayerCache) -> LayerCache:
    """Move the body of a layer or a stack to the memory that its policy chooses."""
    placement = near.policy.placement
    if placement.mesh_sharding is not None or not is_traced(jax.tree.leaves(near)[0]):
        return near.placed()
    return replace(near, keys=placement.far(near.keys), values=placement.far(near.values))
