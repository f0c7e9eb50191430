"""Attention's settings, one by one, against a list of tokens."""

import jax.numpy as jnp
import naive
import numpy as np
import pytest
from matrix import tiny_config

import kvjax
from kvjax._walk import COARSE, FINE, _block_sizes

HEADS, KV, DIM = 6, 2, 8


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def held(length, max_len, seed=1):
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=KV)
    cache = kvjax.init_cache(config, batch=1, max_len=max_len)
    keys, values = random(1, KV, length, DIM, seed=seed), random(1, KV, length, DIM, seed=seed + 1)
    cache = kvjax.advance(kvjax.append(cache, 0, keys, values), length - 1)
    return cache, keys[0].astype(float), values[0].astype(float)


@pytest.mark.parametrize("path", ["blocks", "reference"])
@pytest.mark.parametrize("length,max_len", [(1, 1), (9, 9), (130, 131), (700, 4096), (4500, 4700)])
@pytest.mark.parametrize(
    "settings",
    [
        {}, {"window": 1}, {"window": 200}, {"window": 50, "sinks": 4}, {"soft_cap": 2.0},
        {"scale": 0.7},
    ],
    ids=str,
)  # fmt: skip
def test_settings(path, length, max_len, settings):
    cache, keys, values = held(length, max_len)
    queries = random(1, HEADS, 1, DIM, seed=5)
    found = np.asarray(kvjax.attend(queries, cache, 0, path=path, **settings))
    for head in range(HEADS):
        kv = head // (HEADS // KV)
        wanted = naive.attention(
            queries[0, head, 0].astype(float), list(keys[kv]), list(values[kv]), **settings
        )
        np.testing.assert_allclose(found[0, head, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("path", ["blocks", "reference"])
def test_bias_by_position(path):
    """ALiBi (arXiv:2108.12409): a head's slope times the distance."""
    slopes = np.asarray([2.0**-h for h in range(1, HEADS + 1)], np.float32)

    def alibi(queries, keys):
        distance = queries[:, None, :, None] - keys[:, None, None, :]
        return -slopes[:, None, None] * distance

    cache, keys, values = held(40, 64)
    queries = random(1, HEADS, 1, DIM, seed=5)
    found = np.asarray(kvjax.attend(queries, cache, 0, bias=alibi, path=path))
    for head in range(HEADS):
        kv = head // (HEADS // KV)
        scores = keys[kv] @ queries[0, head, 0] / DIM**0.5 - slopes[head] * np.arange(39, -1, -1)
        weights = np.exp(scores - scores.max())
        wanted = weights / weights.sum() @ values[kv]
        np.testing.assert_allclose(found[0, head, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("new", [7, 1100])
@pytest.mark.parametrize("settings", [{}, {"window": 30}, {"window": 30, "sinks": 3}], ids=str)
def test_a_text_without_a_cache(new, settings):
    queries, keys, values = (random(1, h, new, DIM, seed=h) for h in (HEADS, KV, KV))
    found = np.asarray(kvjax.self_attend(queries, keys, values, **settings))
    for at in {0, 3, new // 2, new - 1}:
        wanted = naive.attention(
            queries[0, 4, at].astype(float), list(keys[0, 1, : at + 1].astype(float)),
            list(values[0, 1, : at + 1].astype(float)), **settings,
        )  # fmt: skip
        np.testing.assert_allclose(found[0, 4, at], wanted, atol=1e-5)


def test_a_row_that_holds_nothing_gets_zeros():
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=KV)
    cache = kvjax.init_cache(config, batch=1, max_len=8)
    one = random(1, KV, 1, DIM)
    none = jnp.zeros(1, jnp.int32)
    cache = kvjax.append(cache, 0, one, one, lengths=none)
    for path in ("blocks", "reference"):
        queries = random(1, HEADS, 1, DIM)
        assert not kvjax.attend(queries, cache, 0, lengths=none, path=path).any()


@pytest.mark.parametrize("slots", [1, 5, 128, 300, 511, 512, 1000, 4096, 5000, 32768])
def test_blocks_cover_a_layer_and_are_small_parts_of_it(slots):
    fine, coarse = _block_sizes(slots)
    assert fine == min(FINE, slots) and fine <= coarse <= COARSE
    assert coarse == fine or 4 * coarse <= slots
    assert coarse % fine == 0
