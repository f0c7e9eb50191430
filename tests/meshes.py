"""Meshes of simulated devices, and caches and parameters on them as shapes alone."""

import functools
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.cache.sizes import array_shardings
from tests.matrix import HEADS, MESHES, tiny_model

SHAPES = MESHES
ROWS, MAX_LEN = 8, 64


def mesh(name: str) -> Any:
    """A mesh by its name in ``SHAPES``."""
    data, tensor, sequence = SHAPES[name]
    return kvjax.make_mesh(data=data, tensor=tensor, sequence=sequence)


def abstract_cache(config: Any, policy: Any, batch: int, max_len: int, over: Any) -> Any:
    """An empty cache on a mesh, as shapes with their shardings."""
    cache = jax.eval_shape(
        lambda: kvjax.init_cache(config, policy, batch=batch, max_len=max_len, mesh=over)
    )
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        cache, array_shardings(cache),
    )  # fmt: skip


def abstract_params(model: Any, over: Any) -> Any:
    """A model's parameters on a mesh, as shapes with their shardings."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        model.abstract_params(), model.param_shardings(over),
    )  # fmt: skip


@functools.cache
def model_of(heads: str) -> Any:
    """A tiny model with such heads, and its parameters."""
    return tiny_model(num_attention_heads=8, num_key_value_heads=HEADS[heads])


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Assert that arrays are equal but for so much of the largest number."""
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)
