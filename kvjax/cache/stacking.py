"""One layer of a stack: layers that are alike, in one set of arrays [layers, ...]."""

from dataclasses import replace
from typing import TypeVar

import jax
from jax import lax

from kvjax.cache.layer import LayerCache
from kvjax.core.typing import Array

_T = TypeVar("_T")


def opened(held: LayerCache, index: Array) -> LayerCache:
    """A layer of a stack, int32[], whose arrays stay among those of the others.

    Not as rows one behind the other: where a stack or a batch is of one, a compiler might take that
    for another order of axes, or write what is read and what is kept each on its own, and copy all
    of it.
    """
    return replace(held, low=one_of(held.low, index), stack=None)


def one_of(arrays: _T, index: Array | None) -> _T:
    """Arrays [layers, ...] of one layer, sliced out; without an index they are of one."""
    if index is None:
        return arrays
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), arrays)


def with_one(arrays: _T, new: _T, index: Array | None) -> _T:
    """With new ones of a layer, in place."""
    if index is None:
        return new
    return jax.tree.map(lambda x, y: lax.dynamic_update_index_in_dim(x, y, index, 0), arrays, new)
