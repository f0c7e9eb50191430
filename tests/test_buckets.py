"""The path ``buckets``, with small sizes, so that short sequences have many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import blocks
from tests.matrix import BLOCK, CODECS, LAYOUTS, PATH_PAIRS, RAW, cells, path_cells
from tests.test_kernels import DIM, HEADS, KV, SETTINGS, agree, filled, random


@pytest.fixture(autouse=True, scope="module")
def small():
    """For the whole file, because the traces of layers are cached and depend on the sizes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MIN_SIZE", 16), ("TILE", 8), ("CHUNK", 16)):
            patch.setattr(blocks, name, value)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.mark.parametrize("cell", cells(path_cells(), PATH_PAIRS))
def test_buckets(cell):
    codecs = [RAW.get(name) or CODECS[name] for name in cell.codecs]
    layout = LAYOUTS[cell.layout][0]
    tolerance = 1e-5 if cell.codecs[0] not in ("bfloat16", "float16") else 1e-2
    cache = filled(kvjax.CachePolicy(layout, codecs[0], codecs[-1], block=BLOCK))
    agree("buckets", cache, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_buckets_and_settings(settings):
    agree("buckets", filled(kvjax.policy("static")), new=5, **settings)


def test_gradients_through_buckets():
    cache = filled(kvjax.policy("static"), (5, 61), spoil=False)
    queries = random(2, HEADS, 3, DIM)

    @functools.partial(jax.jit, static_argnums=2)
    @functools.partial(jax.grad, argnums=(0, 1))
    def slope(queries, new, path):
        held = kvjax.append(cache, 0, new, new)
        return jnp.sum(jnp.sin(kvjax.attend(queries, held, 0, path=path)))

    found, wanted = (slope(queries, random(2, KV, 3, DIM), p) for p in ("buckets", "reference"))
    for a, b in zip(found, wanted, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, atol=1e-5)
