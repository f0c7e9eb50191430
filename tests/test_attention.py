"""The settings of attention, each against a computation on a list of tokens."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.attention import blocks
from kvjax.attention.blocks import COARSE_BLOCK, FINE_BLOCK, block_sizes
from tests import naive
from tests.matrix import tiny_config

HEADS, KV, DIM = 6, 2, 8
PATHS = ("blocks", "reference")


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@jax.jit
def filled(cache, keys, values):
    return kvjax.advance(kvjax.append(cache, 0, keys, values), keys.shape[2])


def held(length, max_len, seed=1, dim=DIM):
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=KV, head_dim=dim)
    cache = kvjax.init_cache(config, batch=1, max_len=max_len)
    keys, values = random(1, KV, length, dim, seed=seed), random(1, KV, length, dim, seed=seed + 1)
    if length > 1:
        cache = filled(cache, keys[:, :, :-1], values[:, :, :-1])
    cache = kvjax.append(cache, 0, keys[:, :, -1:], values[:, :, -1:])
    return cache, keys[0].astype(float), values[0].astype(float)


SETTINGS: list[dict[str, Any]] = [
    {}, {"window": 1}, {"window": 200}, {"window": 50, "sinks": 4}, {"soft_cap": 2.0},
    {"scale": 0.7},
]  # fmt: skip


@pytest.mark.slow(but=("1-1",))
@pytest.mark.parametrize("length,max_len", [(1, 1), (9, 9), (130, 131), (700, 4096), (4500, 4700)])
def test_settings(length, max_len):
    """Both paths in one program."""
    cache, keys, values = held(length, max_len)
    queries = random(1, HEADS, 1, DIM, seed=5)

    @jax.jit
    def call(cache):
        return [
            [kvjax.attend(queries, cache, 0, path=path, **settings) for path in PATHS]
            for settings in SETTINGS
        ]

    for settings, found in zip(SETTINGS, call(cache), strict=True):
        for head in range(HEADS):
            kv = head // (HEADS // KV)
            wanted = naive.attention(
                queries[0, head, 0].astype(float), list(keys[kv]), list(values[kv]), **settings
            )
            for path, mixed in zip(PATHS, found, strict=True):
                np.testing.assert_allclose(
                    mixed[0, head, 0], wanted, atol=1e-5, err_msg=f"{path}, {settings}"
                )


@pytest.mark.parametrize("path", PATHS)
def test_bias_by_position(path):
    """ALiBi (arXiv:2108.12409): the slope of a head times the distance."""
    slopes = np.asarray([2.0**-h for h in range(1, HEADS + 1)], np.float32)

    def alibi(queries, keys):
        distance = queries[:, None, :, None] - keys[:, None, None, :]
        return -slopes[:, None, None] * distance

    cache, keys, values = held(40, 64)
    queries = random(1, HEADS, 1, DIM, seed=5)
    call = jax.jit(lambda cache: kvjax.attend(queries, cache, 0, bias=alibi, path=path))
    found = np.asarray(call(cache))
    for head in range(HEADS):
        kv = head // (HEADS // KV)
        scores = keys[kv] @ queries[0, head, 0] / DIM**0.5 - slopes[head] * np.arange(39, -1, -1)
        weights = np.exp(scores - scores.max())
        wanted = weights / weights.sum() @ values[kv]
        np.testing.assert_allclose(found[0, head, 0], wanted, atol=1e-5)


@pytest.mark.parametrize("new", [7, 1100])
@pytest.mark.parametrize("settings", [{}, {"window": 30}, {"window": 30, "sinks": 3}], ids=str)
def test_self_attention(new, settings):
    queries, keys, values = (random(1, h, new, DIM, seed=h) for h in (HEADS, KV, KV))
    call = jax.jit(lambda *text: kvjax.self_attend(*text, **settings))
    found = np.asarray(call(queries, keys, values))
    for at in {0, 3, new // 2, new - 1}:
        wanted = naive.attention(
            queries[0, 4, at].astype(float), list(keys[0, 1, : at + 1].astype(float)),
            list(values[0, 1, : at + 1].astype(float)), **settings,
        )  # fmt: skip
        np.testing.assert_allclose(found[0, 4, at], wanted, atol=1e-5)


def test_empty_rows_get_zeros():
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=KV)
    cache = kvjax.init_cache(config, batch=1, max_len=8)
    one = random(1, KV, 1, DIM)
    none = jnp.zeros(1, jnp.int32)
    cache = kvjax.append(cache, 0, one, one, lengths=none)
    for path in PATHS:
        queries = random(1, HEADS, 1, DIM)
        assert not kvjax.attend(queries, cache, 0, lengths=none, path=path).any()


@pytest.mark.parametrize("slots", [1, 5, 128, 300, 511, 512, 1000, 4096, 5000, 32768])
def test_block_sizes(slots):
    fine, coarse = block_sizes(slots)
    assert fine == min(FINE_BLOCK, slots) and fine <= coarse <= COARSE_BLOCK
    assert 4 * (coarse - fine) < slots
    assert coarse % fine == 0


@pytest.mark.slow
@pytest.mark.parametrize("policy", [{}, {"bits": 8}], ids=str)
@pytest.mark.parametrize("heads", [KV, 24 * KV])  # few rows, that round raw blocks up, and many
def test_blocks_cover_every_length(heads, policy):
    """For any number of filled tokens in the last coarse block."""
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=KV, head_dim=DIM)
    cache = kvjax.init_cache(config, kvjax.policy("static", **policy), batch=1, max_len=2500)
    keys, values = random(1, KV, 2400, DIM, seed=1), random(1, KV, 2400, DIM, seed=2)
    cache = filled(cache, keys, values)
    fine, coarse = block_sizes(2500 // 64, 64, KV * DIM)
    assert 1 < fine < coarse
    queries = random(1, heads, 1, DIM, seed=3)

    @jax.jit
    def both(length):
        short = replace(cache, length=length[None])
        return [kvjax.attend(queries, short, 0, causal=False, path=p) for p in PATHS]

    for block in range(0, 2400 // 64, fine):
        found, wanted = both(jnp.int32(block * 64 + 65))
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture
def walked(monkeypatch):
    """The layers that are walked block by block, without jit."""
    calls = []
    walk = blocks._by_blocks

    def recorded(*call):
        calls.append(call)
        return walk(*call)

    monkeypatch.setattr(blocks, "_by_blocks", recorded)
    with jax.disable_jit():
        yield calls


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="layers in one piece are for CPUs")
@pytest.mark.parametrize(
    ("heads", "dtype"),  # one row of queries, and three
    [
        (HEADS, "bfloat16"),
        *(pytest.param(*cell, marks=pytest.mark.rare)
          for cell in ((HEADS, "float16"), (HEADS, "float32"),
                       *((KV, dtype) for dtype in ("float32", "bfloat16", "float16")))),
    ],
)  # fmt: skip
def test_mostly_filled_sections_are_multiplied_in_one_piece(walked, dtype, heads):
    config = tiny_config(
        num_hidden_layers=1, windows=(None,), num_key_value_heads=KV, head_dim=64, dtype=dtype
    )
    cache = kvjax.init_cache(config, batch=2, max_len=300)
    lengths = jnp.asarray([250, 190], jnp.int32)
    keys, values = (jnp.asarray(random(2, KV, 250, 64, seed=n), dtype) for n in (1, 2))
    cache = kvjax.append(cache, 0, keys, values, lengths=lengths)
    before = kvjax.rewind(kvjax.advance(cache, 250, lengths), 1)
    one = jnp.asarray(random(2, KV, 1, 64, seed=3), dtype)
    queries = jnp.asarray(random(2, heads, 1, 64, seed=5), dtype)
    cache = kvjax.append(before, 0, one, one)
    walked.clear()
    found = kvjax.attend(queries, cache, 0, path="blocks")
    # In float16, or with 16-bit numbers stored as integers, the section would first be copied.
    as_it_is = dtype != "float16" and not cache.layers[0].policy.keys.as_bits
    assert len(walked) == (0 if as_it_is else 1)
    wanted = kvjax.attend(queries, cache, 0, path="reference")
    tolerance = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    np.testing.assert_allclose(*(np.asarray(x, float) for x in (found, wanted)), atol=tolerance)

    # NaN in a slot that no query sees.
    layer = cache.layers[0]
    codec = layer.policy.values
    stale = codec.encode(codec.decode(layer.values).at[:, :, 270].set(jnp.nan))
    cache = replace(cache, layers=(replace(layer, values=stale),))
    walked.clear()
    found = kvjax.attend(queries, cache, 0, path="blocks")
    assert len(walked) == 1
    np.testing.assert_allclose(*(np.asarray(x, float) for x in (found, wanted)), atol=tolerance)

    walked.clear()
    short = kvjax.append(kvjax.rewind(before, 100), 0, one, one)
    kvjax.attend(queries, short, 0, path="blocks")
    assert len(walked) == 1


@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="layers in one piece are for CPUs")
@pytest.mark.parametrize(
    ("settings", "whole"),
    [({}, True), ({"window": 250}, True), ({"window": 30}, False), ({"chunk": 64}, False)],
    ids=str,
)
def test_mostly_invisible_sections_are_walked(walked, settings, whole):
    cache, _, _ = held(280, 300, dim=64)
    queries = random(1, KV, 1, 64, seed=5)
    found = kvjax.attend(queries, cache, 0, path="blocks", **settings)
    assert len(walked) == (0 if whole else 1)
    wanted = kvjax.attend(queries, cache, 0, path="reference", **settings)
    np.testing.assert_allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("low", [-1e30, -9e37])
def test_very_low_scores_count(low):
    cache, _, _ = held(40, 64)
    queries = random(1, HEADS, 1, DIM, seed=5)

    def bias(queries, keys):
        return jnp.where(keys[:, None, None] % 2 == 0, low, 2 * low)

    attend = jax.jit(
        lambda c: [kvjax.attend(queries, c, 0, bias=bias, path=p) for p in (*PATHS, "buckets")]
    )
    found = attend(cache)
    assert jnp.abs(found[0]).max() > 0.1
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, atol=1e-5)


def test_a_bias_in_float64():
    cache, _, _ = held(40, 64)
    queries = random(1, HEADS, 1, DIM, seed=5)
    slopes = np.linspace(0.1, 1, HEADS)

    def bias(queries, keys):
        distance = queries[:, None, :, None] - keys[:, None, None, :]
        return -slopes[:, None, None] * distance

    wanted = kvjax.attend(queries, cache, 0, bias=bias)
    # JAX 0.7 has it only in `jax.experimental`, where newer versions deprecate it.
    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True):
        assert bias(jnp.zeros((1, 1)), jnp.zeros((1, 1))).dtype == jnp.float64
        found = kvjax.attend(queries, cache, 0, bias=bias)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
