"""Rows of very different lengths: the paths ``even`` and ``pages`` against the reference."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import paths
from kvjax.attention.blocks import blockwise
from kvjax.attention.paths import PATHS, ragged_batches, select_path
from tests.copies import copies
from tests.matrix import tiny_config

ROWS, HEADS, KV, DIM, LONGEST, PAGE = 12, 4, 2, 32, 208, 16
SETTINGS = [{}, {"soft_cap": 2.0, "scale": 0.3}, {"window": 20}]
POLICIES = {
    "paged": kvjax.policy("paged", page_size=PAGE),
    "int8": kvjax.policy("paged", page_size=PAGE, bits=8, block=PAGE),
    "window": kvjax.policy("paged", page_size=PAGE),
    "static": kvjax.policy("static"),
}


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def held(policy, lengths, window=None, mesh=None):
    """A cache of one layer after many calls, with the token of another call appended."""
    config = tiny_config(
        num_hidden_layers=1, windows=(window,), num_key_value_heads=KV, head_dim=DIM
    )
    cache = kvjax.init_cache(config, policy, batch=len(lengths), max_len=LONGEST, mesh=mesh)
    keys, values = (random(len(lengths), KV, LONGEST, DIM, seed=seed) for seed in (1, 2))

    def append(cache, first, count, lengths):
        some = (slice(None), slice(None), slice(first, first + count))
        return kvjax.append(cache, 0, keys[some], values[some], lengths=lengths)

    before = np.asarray(lengths) - 1
    size = LONGEST if window is None else PAGE
    for first in range(0, LONGEST, size):
        part = np.clip(before - first, 0, size)
        if part.any():
            cache = kvjax.advance(append(cache, first, size, part), size)
    return append(cache, LONGEST - 1, 1, np.ones_like(before))


def in_shards(*cell):
    return pytest.param(*cell, marks=pytest.mark.rare)


def lengths(rows=ROWS, low=1, high=LONGEST, seed=3):
    return np.random.default_rng(seed).integers(low, high + 1, rows)


@pytest.mark.slow(but=("static-12",))
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("paged", 3),
        *((name, ROWS) for name in POLICIES if name not in ("paged", "window", "int8")),
        *(in_shards(name, ROWS) for name in ("window", "int8")),
        in_shards("paged", ROWS),
        in_shards("int8", 7),
    ],
)
def test_paths_agree(name, rows):
    # For a pool that is mostly full.
    window = 24 if name == "window" else None
    cache = held(POLICIES[name], lengths(rows, low=140), window)
    queries = random(rows, HEADS, 1, DIM, seed=5)

    @jax.jit
    def call(cache):
        return [
            [kvjax.attend(queries, cache, 0, path=p, **settings) for settings in SETTINGS]
            for p in ("reference", "even", "pages")
        ]

    wanted, *others = call(cache)
    for found in others:
        for one, other, settings in zip(wanted, found, SETTINGS, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5, err_msg=str(settings))


@pytest.fixture
def walked(monkeypatch):
    """Return NaN if pages are not multiplied in place."""
    monkeypatch.setattr(paths, "evenly", lambda call: jnp.full_like(call.queries, jnp.nan))
    # A new function, for which no trace is cached.
    monkeypatch.setitem(PATHS, "pages", lambda call: paths.over_pages(call))


def in_pages(cache, path="pages", **settings):
    queries = random(cache.batch, HEADS, 1, DIM, seed=5)
    return np.asarray(kvjax.attend(queries, cache, 0, path=path, **settings))


@pytest.mark.slow
def test_a_full_pool_is_multiplied_in_place(walked):
    cache = held(POLICIES["paged"], lengths(low=140))
    assert np.isfinite(in_pages(cache)).all() and np.isfinite(in_pages(cache, window=9)).all()


@pytest.mark.slow
def test_a_mostly_empty_pool_is_not_multiplied_in_place(walked):
    assert np.isnan(in_pages(held(POLICIES["paged"], lengths(high=90)))).all()


def test_shared_pages_are_not_multiplied_in_place(walked):
    cache = held(POLICIES["paged"], lengths(low=140))
    (pool,) = cache.pools
    table = np.array(pool.table)
    table[1, 0] = table[0, 0]
    cache = dataclasses.replace(cache, pools=(dataclasses.replace(pool, table=table),))
    assert np.isnan(in_pages(cache)).all()


@pytest.mark.slow
def test_tails_and_many_queries_are_not_multiplied_in_place(walked):
    assert np.isnan(in_pages(held(POLICIES["int8"], lengths(low=140)))).all()
    cache = held(POLICIES["paged"], lengths(low=140))
    many, new = (random(ROWS, *shape, DIM) for shape in ((5 * KV, 1), (HEADS, 2)))
    assert np.isnan(kvjax.attend(many, cache, 0, path="pages")).all()
    cache = kvjax.append(kvjax.advance(cache, 1), 0, new[:, :KV], new[:, :KV])
    assert np.isnan(kvjax.attend(new, cache, 0, path="pages")).all()


def test_nan_in_empty_slots_of_pages():
    """NaN of an earlier sequence."""
    cache = held(POLICIES["paged"], lengths(low=140))
    layer, (pool,) = cache.layers[0], cache.pools
    wanted = in_pages(cache)
    keys, values = np.array(layer.keys), np.array(layer.values)
    for row, count in enumerate(lengths(low=140)):
        last = pool.table[row, (count - 1) // PAGE]
        keys[last, :, (count - 1) % PAGE + 1 :] = np.nan
        values[last, :, (count - 1) % PAGE + 1 :] = np.nan
    layer = dataclasses.replace(layer, keys=jnp.asarray(keys), values=jnp.asarray(values))
    found = in_pages(dataclasses.replace(cache, layers=(layer,)))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.rare
def test_short_rows_are_grouped(monkeypatch):
    """No group walks as far as the longest row of another group."""
    seen = []

    def noted(call, *, even):
        assert even
        seen.append(np.asarray(call.length).tolist())
        return blockwise(call, even=even)

    monkeypatch.setattr(paths, "blockwise", noted)
    many = lengths(10)
    cache = held(POLICIES["paged"], many)
    with jax.disable_jit():
        kvjax.attend(random(10, HEADS, 1, DIM), cache, 0, path="even")
    each = sorted(many.tolist())
    assert [*itertools.chain(*seen)] == [*each, each[-1], each[-1]]
    assert {len(each) for each in seen} == {4}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["even", "pages"])
def test_derivatives_equal_those_of_blocks(path):
    cache = held(POLICIES["paged"], lengths(low=140))
    queries = random(ROWS, HEADS, 1, DIM, seed=5)

    def loss(queries, slope, path, biased):
        bias = (lambda at, keys: slope * keys[:, None, None]) if biased else None
        return jnp.sum(jnp.sin(kvjax.attend(queries, cache, 0, path=path, bias=bias)))

    for biased in (False, True):
        ways = [jax.grad(loss, (0, 1))(queries, 0.01, p, biased) for p in ("blocks", path)]
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-5, 1e-5), *ways)


@pytest.mark.parametrize(
    ("axis", "name"),
    [
        in_shards("tensor", "int8"),
        *(in_shards("data", n) for n in POLICIES),
        in_shards("tensor", "paged"),
    ],
)
def test_on_a_mesh(axis, name):
    mesh = kvjax.make_mesh(**{axis: 2}, devices=jax.devices()[:2])
    queries = random(ROWS, HEADS, 1, DIM, seed=5)
    cache = held(POLICIES[name], lengths(low=140), mesh=mesh)

    @jax.jit
    def call(cache):
        return [kvjax.attend(queries, cache, 0, path=p) for p in ("blocks", "even", "pages")]

    wanted, *others = call(cache)
    for found in others:
        np.testing.assert_allclose(wanted, found, atol=1e-5)


def test_default_paths_of_ragged_batches():
    policy = POLICIES["static"]
    names = {}
    for exact in (True, False):
        with ragged_batches(exact=exact):
            names[exact] = select_path(None, policy, 1)
    assert names == {True: paths.evenly, False: paths.over_pages}
    assert select_path(None, policy, 1) is blockwise


def test_pages_are_not_copied():
    cache = held(POLICIES["paged"], lengths(low=140))
    queries = random(ROWS, HEADS, 1, DIM)
    program = jax.jit(lambda cache: kvjax.attend(queries, cache, 0, path="pages"))
    text = program.lower(cache).compile()
    # For each page: the queries of its owner, and their outputs.
    assert copies(text, cache.layers[0].keys.nbytes // 2) == []
    assert text.as_text().count("conditional(") >= 2
