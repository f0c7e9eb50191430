"""One layer of a stack: layers that are alike, in one set of arrays [layers, ...]."""

from dataclasses import replace
from typing import TypeVar

import jax
from jax import lax

from kvjax.cache.layer import LayerCache
from kvjax.core.checks import is_traced
from kvjax.core.device import fetch
from kvjax.core.typing import Array

_T = TypeVar("_T")


def opened(held: LayerCache, index: Array) -> LayerCache:
    """A layer of a stack, int32[], whose arrays stay among those of the others.

    Not as rows one behind the other: where a stack or a batch is of one, a compiler might take that
    for another order of axes, or write what is read and what is kept each on its own, and copy all
    of it.
    """
    return replace(held, low=one_of(held.low, index), stack=None)


def strip_is_there(held: LayerCache, index: Array, new: int) -> Array | None:
    """Whether what queries of a call of ``new`` tokens see raw is of this layer of a stack, bool[]:
    the stack has that of the last one appended to. None for a call that is not so long.

    Raises:
      ValueError: if it is seen not to be.
    """
    if held.tail is None or new <= held.policy.split.block:
        return None
    same = None if held.strip_of is None else held.strip_of == index
    if same is None or not (is_traced(same) or bool(fetch(same))):
        raise ValueError(
            f"a call of {new} tokens, more than a block: a stack has what is seen raw of it for "
            "its last layer alone, so attend to a layer, or read it, right behind its own append "
            "(call.attend of kvjax.step does both, once)"
        )
    return same


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
