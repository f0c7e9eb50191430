"""Layers that share a cache, cross-attention and chunked attention."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.policies import model_config as shape
from tests import naive
from tests.matrix import tiny_config

CONFIG = tiny_config(num_hidden_layers=3, windows=(None, None, None))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Sharing:
    """Four layers, of which the last two read what the first and the second wrote."""

    num_hidden_layers: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 8
    dtype: str = "float32"
    windows: tuple = (None, 6, None, 6)
    cache_sources: tuple = (0, 1, 0, 1)


def test_layers_share_a_cache():
    cache = kvjax.init_cache(Sharing(), "hybrid", batch=1, max_len=64)
    assert len(cache.layers) == 2
    assert [layer.keys.shape[2] for layer in cache.layers] == [64, 6 + 16]
    keys = [random(1, 2, 5, 8, seed=layer) for layer in range(2)]
    for layer in range(2):
        cache = kvjax.append(cache, layer, keys[layer], 2 * keys[layer])
    queries = random(1, 4, 5, 8, seed=9)
    for layer, source in ((2, 0), (3, 1)):
        mine = kvjax.attend(queries, cache, layer)
        assert np.array_equal(mine, kvjax.attend(queries, cache, source))
    for layer in (2, 3):
        with pytest.raises(ValueError, match=f"layer {layer} reads the keys and values of an earl"):
            kvjax.append(cache, layer, keys[0], keys[0])
    with pytest.raises(ValueError, match="layer 4: the cache has 4 layers, counted from 0"):
        kvjax.attend(queries, cache, 4)
    cache = kvjax.rewind(kvjax.advance(cache, 5), 2)
    joined = kvjax.concatenate([cache, kvjax.select(cache, [0])])
    assert joined.sources == cache.sources and joined.length.tolist() == [3, 3]


def peers(**more):
    """A config with the names that Transformers uses."""
    shape = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "dtype": "float32"}
    return types.SimpleNamespace(**shape | more)


@pytest.mark.parametrize(
    ("special", "windows", "sources"),
    [
        ({}, (None,) * 4, None),
        ({"sliding_window": 6}, (6,) * 4, None),
        ({"sliding_window": 6, "use_sliding_window": False}, (None,) * 4, None),
        ({"attention_chunk_size": 5}, (5,) * 4, None),
        (  # Llama 4
            {
                "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
                "attention_chunk_size": 5,
            },
            (5, 5, 5, None),
            None,
        ),
        (  # Gemma 3n
            {
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": 6,
                "num_kv_shared_layers": 2,
            },
            (6, None, 6, None),
            (0, 1, 0, 1),
        ),
        ({"num_kv_shared_layers": 1}, (None,) * 4, (0, 1, 2, 2)),
        ({"num_kv_shared_layers": 0}, (None,) * 4, None),
    ],
)
def test_configs_with_the_names_of_transformers(special, windows, sources):
    config = peers(**special)
    assert shape.layer_windows(config) == windows
    assert shape.layer_sources(config) == sources
    cache = kvjax.init_cache(config, kvjax.policy("hybrid", slack=0), max_len=64)
    slots = [cache.layer(number).keys.shape[2] for number in range(4)]
    assert slots == [window or 64 for window in windows]
    assert len(cache.layers) == len(set(sources or range(4)))


@pytest.mark.parametrize(
    ("special", "message"),
    [
        ({"windows": (3, None)}, "describes 2 layers, but has 4"),
        ({"layer_types": ["linear_attention"] * 4}, "'linear_attention': a cache holds layers of"),
        (
            {"layer_types": ["chunked_attention"] * 4},
            "does not set the size of its window",
        ),
        ({"num_kv_shared_layers": 4}, "layer 0 has no layer of its kind before layer 0"),
        ({"cache_sources": (0, 0, 1, 3)}, "each of 4 layers needs itself or an earlier"),
        ({"cache_sources": (0, 1, 9, 3)}, "each of 4 layers needs itself or an earlier"),
        ({"cache_sources": (0, 0)}, "each of 4 layers needs itself or an earlier"),
        ({"v_head_dim": 4}, "keys and values have different head dimensions"),
        ({"kv_lora_rank": 4}, "keys and values have different head dimensions"),
        ({"head_dim": None}, "has neither head_dim nor hidden_size"),
        ({"num_key_value_heads": None}, "neither num_key_value_heads nor num_attention_heads"),
        ({"num_key_value_heads": 2.5}, "num_key_value_heads must be an integer"),
    ],
)
def test_configs_that_say_nothing_sensible(special, message):
    with pytest.raises(ValueError, match=message):
        kvjax.init_cache(peers(**special), "hybrid", max_len=64)


@pytest.mark.parametrize(
    ("special", "heads"),
    [
        ({"head_dim": None, "hidden_size": 48, "num_attention_heads": 4}, (2, 12)),
        ({"num_key_value_heads": None, "num_attention_heads": 4}, (4, 8)),
        ({"num_key_value_heads": None, "multi_query": True}, (1, 8)),
        ({"num_key_value_heads": None, "multi_query": True, "new_decoder_architecture": True,
          "num_kv_heads": 4}, (4, 8)),
    ],
)  # fmt: skip
def test_heads_by_the_names_of_transformers(special, heads):
    cache = kvjax.init_cache(peers(**special), max_len=64)
    assert {(layer.kv_heads, layer.head_dim) for layer in cache.layers} == {heads}


@pytest.mark.slow
def test_layers_of_other_heads():
    """As of Gemma 4, alone and divided over a mesh, where each layer's heads must be divided."""
    own = [peers(head_dim=8 * (n % 2 + 1), num_key_value_heads=4 - n % 2 * 2) for n in range(4)]
    config = peers(per_layer_config=own, num_key_value_heads=None, head_dim=None)
    for mesh in (None, kvjax.make_mesh(tensor=4)):
        cache = kvjax.init_cache(config, max_len=64, mesh=mesh)
        for n, layer in enumerate(cache.layers):
            assert layer.keys.shape == (1, 4 - n % 2 * 2, 64, 8 * (n % 2 + 1))
            numbers = random(1, 4 - n % 2 * 2, 3, 8 * (n % 2 + 1))
            cache = kvjax.append(cache, n, numbers, numbers)
            mixed = kvjax.attend(random(1, 4, 3, 8 * (n % 2 + 1), seed=1), cache, n)
            if mesh is None:
                own[n].mixed = np.asarray(mixed)
            np.testing.assert_allclose(mixed, own[n].mixed, rtol=1e-5, atol=1e-6)
    there = kvjax.migrate(kvjax.advance(cache, 3), mesh=None)
    back = kvjax.migrate(kvjax.fork(there), mesh=kvjax.make_mesh(tensor=4))
    assert back.mesh_sharding == cache.mesh_sharding
    for n in range(4):
        assert np.array_equal(kvjax.read(there, n)[0], kvjax.read(back, n)[0])


@pytest.mark.parametrize("path", ["blocks", "reference"])
def test_cross_attention_sees_all_that_was_written(path):
    """Rows of different lengths, written once, read by queries at any position, twice."""
    lengths, new = np.array([7, 3, 0], np.int32), 300
    keys, values = random(3, 2, 7, 8), random(3, 2, 7, 8, seed=1)
    memory = kvjax.init_cache(CONFIG, batch=3, max_len=7)
    for layer in range(3):
        numbers = (keys, values) if layer else (values, keys)
        memory = kvjax.append(memory, layer, *numbers, lengths=lengths)
    memory = kvjax.advance(memory, 7)
    queries = random(3, 4, new, 8, seed=2)
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(memory)]
    attend = jax.jit(lambda m: kvjax.attend(queries, m, 1, causal=False, path=path))
    for _ in range(2):
        found = np.asarray(attend(memory))
        for row in range(2):
            for token in (0, 1, new - 1):
                for head in range(4):
                    wanted = naive.attention(
                        queries[row, head, token].astype(float),
                        list(keys[row, head // 2, : lengths[row]].astype(float)),
                        list(values[row, head // 2, : lengths[row]].astype(float)),
                    )
                    np.testing.assert_allclose(found[row, head, token], wanted, atol=1e-5)
        assert not found[2].any()
    for old, leaf in zip(before, jax.tree.leaves(memory), strict=True):
        assert np.array_equal(old, leaf)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", kvjax.policy("hybrid", slack=3)])
def test_chunked_attention_begins_anew(policy):
    """A query sees its own chunk of six positions only; a ring of six holds enough for that."""
    config = peers(attention_chunk_size=6, num_hidden_layers=1)
    cache = kvjax.init_cache(config, policy, batch=1, max_len=40)
    keys, values, queries = random(1, 2, 20, 8), random(1, 2, 20, 8, seed=1), random(1, 4, 20, 8)

    @jax.jit
    def step(cache, keys, values, queries):
        cache = kvjax.append(cache, 0, keys, values)
        paths = ("blocks", "reference")
        found = [kvjax.attend(queries, cache, 0, chunk=6, path=path) for path in paths]
        return kvjax.advance(cache, keys.shape[2]), found

    for start, new in ((0, 4), (4, 4), (8, 1), (9, 3), (12, 4), (16, 4)):
        part = slice(start, start + new)
        cache, mixed = step(cache, *(x[:, :, part] for x in (keys, values, queries)))
        for found in mixed:
            for token in range(start, start + new):
                first = token // 6 * 6
                wanted = naive.attention(
                    queries[0, 3, token].astype(float),
                    list(keys[0, 1, first : token + 1].astype(float)),
                    list(values[0, 1, first : token + 1].astype(float)),
                )
                np.testing.assert_allclose(found[0, 3, token - start], wanted, atol=1e-5)
    whole = kvjax.self_attend(queries, keys, values, chunk=6)
    assert jnp.abs(whole[:, :, 16:] - found).max() < 1e-5
    with pytest.raises(ValueError, match="chunk must be an integer >= 1, got 0"):
        kvjax.attend(queries[:, :, :1], cache, 0, chunk=0, causal=False)
