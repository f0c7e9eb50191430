"""Products of a few rows with weights, in the forms that are fast on CPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.codecs.codec import FEW_ROWS, SINGLE_ROWS, plain_scores
from kvjax.core.array_ops import FEW, contract_last


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (3, 1), (2, 8), (1, FEW), (1, FEW + 1)])
def test_every_form_equals_the_product(shape, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(*shape, 24)), dtype)
    weight = jnp.asarray(rng.normal(size=(40, 24)), dtype)
    found = jax.jit(contract_last)(x, weight)
    assert found.dtype == jnp.float32 and found.shape == (*shape, 40)
    wanted = np.asarray(x, float) @ np.asarray(weight, float).T
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_gradients_are_those_of_the_product(rows):
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.normal(size=(n, 24)), jnp.float32) for n in (rows, 40))
    found = jax.grad(lambda x, w: jnp.sum(jnp.sin(contract_last(x, w))), (0, 1))(x, weight)
    wanted = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w.T)), (0, 1))(x, weight)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the forms are for CPUs")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_no_copy_of_the_weights_is_made(rows, dtype):
    x = jax.ShapeDtypeStruct((rows, 256), dtype)
    weight = jax.ShapeDtypeStruct((4096, 256), dtype)
    memory = jax.jit(contract_last).lower(x, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.size * weight.dtype.itemsize // 4


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, SINGLE_ROWS, SINGLE_ROWS + 1, FEW_ROWS - 1, FEW_ROWS])
def test_scores_in_every_form(batch, rows):
    """Few float32 queries, with operands in the order that is fast on CPUs."""
    rng = np.random.default_rng(0)
    queries, keys = (rng.normal(size=(batch, 3, n, 16)).astype(np.float32) for n in (rows, 40))
    found = jax.jit(plain_scores)(queries, keys)
    np.testing.assert_allclose(found, np.einsum("bhqd,bhkd->bhqk", queries, keys), atol=1e-5)
    slope = jax.grad(lambda q, k: jnp.sum(jnp.sin(plain_scores(q, k))), (0, 1))(queries, keys)
    along = np.cos(np.einsum("bhqd,bhkd->bhqk", queries, keys))
    np.testing.assert_allclose(slope[0], np.einsum("bhqk,bhkd->bhqd", along, keys), atol=1e-4)
    np.testing.assert_allclose(slope[1], np.einsum("bhqk,bhqd->bhkd", along, queries), atol=1e-4)
