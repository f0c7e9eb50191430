"""Sequences of operations on mixed, short, wrapped and rewound caches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.checks import NO_SUCH_ROW, OVERFLOW
from kvjax.codecs import Raw
from kvjax.core.transfer import commit
from kvjax.layouts import UNLIMITED, Dense, Growing, Ring
from kvjax.models.architecture import Architecture
from kvjax.models.config import GPT2Config, RopeConfig
from tests import laws
from tests.matrix import tiny_config, tiny_model

CONFIG = tiny_config(windows=(None, None))
ONE = tiny_config(num_hidden_layers=1, windows=(None,))
TOKENS = np.random.default_rng(3).integers(0, 61, (2, 900)).astype(np.int32)


def of(*layouts):
    return [kvjax.CachePolicy(layout) for layout in layouts]


@functools.cache
def stepping(model):
    return jax.jit(model.apply)


def feed(model, params, cache, start, stop, *, rows=1, size=20):
    """Append tokens in chunks; return the last logits and the cache."""
    step = laws.attention_outputs if params is None else functools.partial(stepping(model), params)
    logits = None
    while start < stop:
        logits, cache = step(TOKENS[:rows, start : min(start + size, stop)], cache)
        start += size
    return np.asarray(logits)[:, -1], cache


def close(found, wanted, tolerance=1e-5):
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


READ = jax.jit(kvjax.read, static_argnums=1)


def positions(cache, layer, row=0):
    return sorted(p for p in np.asarray(READ(cache, layer)[2])[row].tolist() if p >= 0)


@pytest.fixture(scope="module")
def windowed():
    """A model that only uses a cache."""
    return tiny_model(windows=(8, 64))[0], None


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param("host", "static", marks=pytest.mark.rare),
        pytest.param("int8", "host", marks=pytest.mark.rare),
        pytest.param("static", "int8", marks=pytest.mark.rare),
    ],
)
def test_a_converted_cache_stays_on_its_device(old, new):
    """Even on another device than the default; arrays are where ``init_cache`` puts them."""
    policies = {
        "static": kvjax.policy("static"),
        "int8": kvjax.policy(bits=8, block=8),
        "host": kvjax.policy("offloaded_static", block=8),
    }
    with jax.default_device(jax.devices()[1]):
        cache, wanted = (
            kvjax.init_cache(CONFIG, policies[name], batch=2, max_len=64) for name in (old, new)
        )
        _, cache = feed(None, None, cache, 0, 30, rows=2)
    cache = commit(cache)  # otherwise JAX would move it to the default device
    there = [leaf.sharding for leaf in jax.tree.leaves(wanted)]
    for convert in (kvjax.convert, jax.jit(kvjax.convert, static_argnums=1)):
        other = convert(cache, policies[new])
        for leaf, sharding in zip(jax.tree.leaves(other), there, strict=True):
            assert leaf.committed and leaf.sharding == sharding
        feed(None, None, other, 30, 40, rows=2)


@pytest.mark.parametrize(
    "slacks", [pytest.param(x, marks=pytest.mark.rare) for x in ((20, 2), (2, 20), (4, 30))]
)
def test_converting_to_more_slack_hides_nothing_that_is_seen(windowed, slacks):
    """Each layer lacks only the tokens beyond its old ring's slack."""
    model, params = windowed
    cache = kvjax.init_cache(model.config, kvjax.policy("hybrid", slack=2), batch=2)
    _, cache = feed(model, params, cache, 0, 200, rows=2, size=3)
    wide = kvjax.convert(cache, of(Ring(slack=slacks[0]), Ring(slack=slacks[1])))
    assert positions(wide, 0) == list(range(190, 200))
    assert positions(wide, 1) == list(range(134, 200))
    assert kvjax.rewindable(wide).tolist() == [2, 2]
    wanted, _ = feed(model, params, cache, 200, 206, rows=2, size=3)
    found, wide = feed(model, params, wide, 200, 206, rows=2, size=3)
    close(found, wanted)
    assert kvjax.rewindable(wide).tolist() == [min(8, *slacks)] * 2
    with pytest.raises(ValueError, match="layer 0 has lost tokens of row 0"):
        kvjax.convert(wide, "static", max_len=400)


@pytest.mark.slow
def test_a_converted_ring_that_is_shorter_than_its_window_is_rewound_no_further(windowed):
    model, params = windowed
    model = Architecture(dataclasses.replace(model.config, windows=(8, 8)))
    cache = kvjax.init_cache(model.config, kvjax.policy("hybrid", slack=3))
    _, cache = feed(model, params, cache, 0, 12, size=4)
    cache = kvjax.rewind(cache, 3)
    assert kvjax.rewindable(cache).tolist() == [0]
    short = kvjax.convert(cache, of(Ring(slack=9), Ring(slack=9)), max_len=12)
    assert short.layers[0].policy.layout.max_len == 12
    true = kvjax.init_cache(model.config, "static", max_len=40)
    _, true = feed(model, params, true, 0, 9)
    for other in (short, kvjax.grow(kvjax.fork(short), 100)):
        there = int(kvjax.rewindable(other)[0])
        assert positions(other, 0) == positions(cache, 0)
        kvjax.check(kvjax.rewind(other, there))
        for back in range(there + 1):
            found, _ = feed(model, params, kvjax.rewind(other, back), 9 - back, 12)
            wanted, _ = feed(model, params, kvjax.rewind(true, back), 9 - back, 12)
            close(found, wanted)


def test_sinks_that_fill_more_than_a_coarse_block_are_all_seen():
    cache = kvjax.init_cache(ONE, kvjax.CachePolicy(Ring(100, sinks=1100, slack=63)))
    rng = np.random.default_rng(0)
    feed_one = jax.jit(lambda c, x: kvjax.advance(kvjax.append(c, 0, x, x[..., ::-1]), 50))
    for _ in range(30):
        cache = feed_one(cache, rng.normal(size=(1, 2, 50, 8)).astype(np.float32))
    x = rng.normal(size=(1, 2, 1, 8)).astype(np.float32)
    cache = kvjax.append(cache, 0, x, x)
    queries = rng.normal(size=(1, 4, 1, 8)).astype(np.float32)
    close(kvjax.attend(queries, cache, 0), kvjax.attend(queries, cache, 0, path="reference"))


@pytest.fixture(scope="module")
def stretched():
    """Rotary frequencies that depend on the length."""
    rope = RopeConfig("dynamic", 10000.0, 1.0, (("factor", 4.0),))
    return tiny_model(windows=(None, None), max_position_embeddings=16, rope=rope)


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(kvjax.CachePolicy(Growing(8)), marks=pytest.mark.rare),
        kvjax.CachePolicy(Dense()),
    ],
)
def test_frequencies_stay_while_a_cache_grows(stretched, policy):
    model, params = stretched
    growing = isinstance(policy.layout, Growing)
    cache = kvjax.init_cache(model.config, policy, max_len=64 if growing else 30)
    for start in range(0, 60, 4):
        if start + 4 > cache.max_len:
            cache = kvjax.grow(cache, 2 * cache.max_len if growing else 64)
        logits, cache = feed(model, params, cache, start, start + 4)
    whole = model.apply(params, TOKENS[:1, :60], max_len=64 if growing else 30)
    close(logits, np.asarray(whole)[:, -1])
    again = kvjax.convert(cache, "static", max_len=80)
    close(*(feed(model, params, each, 60, 64)[0] for each in (again, cache)))


@pytest.mark.slow
def test_frequencies_that_depend_on_the_length_need_one(stretched):
    model, _ = stretched
    with pytest.raises(ValueError, match="a cache without a limit needs max_len"):
        kvjax.init_cache(model.config, "dynamic")
    caches = [kvjax.init_cache(model.config, max_len=size) for size in (20, 40)]
    with pytest.raises(ValueError, match="lengths 20 and 40 can't be concatenated"):
        kvjax.concatenate(caches)
    short = [kvjax.init_cache(model.config, max_len=size) for size in (12, 16)]
    assert kvjax.concatenate(short).max_len == 16


@pytest.mark.parametrize("policy", ["static", kvjax.policy("sliding_window", window=9, sinks=2)])
@pytest.mark.parametrize("path", ["blocks", "reference"])
def test_what_is_no_number_goes_with_its_text(policy, path):
    """Slots that no longer count may hold NaN, which a weight of 0 would not hide."""
    cache = kvjax.init_cache(CONFIG, policy, batch=2, max_len=64)
    good = np.random.default_rng(0).normal(size=(2, 2, 4, 8)).astype(np.float32)
    queries = np.random.default_rng(1).normal(size=(2, 4, 1, 8)).astype(np.float32)

    @jax.jit
    def fill(cache, x):
        for layer in range(2):
            cache = kvjax.append(cache, layer, x, x)
        return kvjax.advance(cache, x.shape[2])

    @jax.jit
    def mixed(cache):
        cache = kvjax.append(cache, 0, good[:, :, :1], good[:, :, :1])
        return kvjax.attend(queries, cache, 0, path=path)

    wanted = mixed(fill(cache, good))
    broken = fill(fill(cache, good), np.full_like(good, np.nan))
    for mended in (kvjax.rewind(broken, 4), fill(kvjax.reset(broken), good)):
        close(mixed(mended), wanted)


def test_sinks_that_a_ring_does_not_keep_are_refused():
    cache = kvjax.init_cache(CONFIG, kvjax.policy("sliding_window", window=4, sinks=1), batch=1)
    queries = np.zeros((1, 4, 1, 8), np.float32)
    cache = kvjax.append(cache, 0, queries[:, :2], queries[:, :2])
    kvjax.attend(queries, cache, 0, sinks=1)
    with pytest.raises(ValueError, match="sinks=2, but the layer's ring keeps only 1"):
        kvjax.attend(queries, cache, 0, sinks=2)


def test_cross_attention_to_a_ring_sees_its_window_whatever_the_slack():
    rng = np.random.default_rng(0)
    keys, queries = (rng.normal(size=(1, h, 5, 8)).astype(np.float32) for h in (2, 4))
    found = []
    for slack, size in ((0, 1), (8, 5)):
        cache = kvjax.init_cache(ONE, kvjax.CachePolicy(Ring(4, sinks=1, slack=slack)))
        for _ in range(4):
            for start in range(0, 5, size):
                part = keys[:, :, start : start + size]
                cache = kvjax.advance(kvjax.append(cache, 0, part, part), size)
        found.append(kvjax.attend(queries, cache, 0, causal=False))
        one = kvjax.attend(queries, cache, 0, causal=False, window=1)
        assert not np.allclose(one, found[-1])
    close(*found)


def test_a_bias_sees_sinks_from_where_queries_look_at_them():
    cache = kvjax.init_cache(ONE, kvjax.policy("sliding_window", window=4, sinks=2, slack=2))
    seen = []

    def bias(queries, keys):
        distance = queries[:, :, None] - keys[:, None, :]
        jax.debug.callback(lambda d, k: seen.append((d, k)), distance, keys)
        return jnp.zeros((1, 1, *distance.shape[1:]))

    x = np.ones((1, 2, 3, 8), np.float32)
    for _ in range(10):
        cache = kvjax.advance(kvjax.append(cache, 0, x, x), 3)
    x = x[:, :, :1]
    cache = kvjax.append(cache, 0, x, x)
    kvjax.attend(np.ones((1, 4, 1, 8), np.float32), cache, 0, bias=bias)
    jax.effects_barrier()
    sinks = [d[0, 0, k[0] == 0] for d, k in seen if (k == 0).any()]
    assert [d.tolist() for d in sinks] == [[5]]


@pytest.fixture(scope="module")
def learned():
    config = GPT2Config(
        model_type="gpt2", vocab_size=61, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        max_position_embeddings=32, layer_norm_epsilon=1e-5, activation="gelu_new",
        tie_word_embeddings=True, scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
    )  # fmt: skip
    model = Architecture(config)
    return model, model.init_params(0)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["ring", "grown", "converted", "dynamic"])
def test_no_cache_passes_a_model_s_learned_positions(learned, way):
    model, params = learned
    ring = kvjax.policy("sliding_window", window=4, slack=4)
    if way == "grown":
        cache = kvjax.init_cache(model.config, "static", max_len=16)
        with pytest.raises(ValueError, match="grow to 64: the model has only 32 positions"):
            kvjax.grow(cache, 64)
        cache = kvjax.grow(cache, 32)
    elif way == "converted":
        cache = kvjax.init_cache(model.config, "static", max_len=16)
        with pytest.raises(ValueError, match="max_len is 64, but the model has only 32"):
            kvjax.convert(cache, "dynamic", max_len=64)
        cache = kvjax.convert(cache, "dynamic")
        assert cache.grows_to == 32
        cache = kvjax.grow(cache, 32)
    else:
        cache = kvjax.init_cache(model.config, ring if way == "ring" else "dynamic")
    assert cache.max_len == 32
    _, cache = feed(model, params, cache, 0, 32, size=4)
    kvjax.check(cache)
    _, cache = feed(model, params, cache, 32, 33)
    assert cache.length.tolist() == [32] and cache.status.tolist() == [OVERFLOW]


@pytest.mark.parametrize(
    ("layouts", "max_len", "to", "slots"),
    [
        ((Growing(16), Dense()), 100, 32, (32, 100)),
        ((Growing(16), Growing(64)), None, 32, (32, 64)),
        ((Growing(16), Ring(64)), 70, 32, (32, 70)),
        ((Growing(16), Ring(5, slack=2)), None, 32, (32, 7)),
        ((Dense(8), Dense(16)), None, 12, (12, 16)),
    ],
)
def test_layers_that_have_room_stay_when_others_grow(layouts, max_len, to, slots):
    cache = kvjax.init_cache(CONFIG, of(*layouts), max_len=max_len)
    grown = kvjax.grow(cache, to)
    assert tuple(layer.keys.shape[2] for layer in grown.layers) == slots
    assert grown.max_len == to
    with pytest.raises(ValueError, match=f"to {to - 1} tokens a row: the capacity is already {to}"):
        kvjax.grow(grown, to - 1)


def test_growing_caches_of_different_limits_are_joined():
    ends = [kvjax.init_cache(CONFIG, "dynamic", max_len=size) for size in (300, 600)]
    both = kvjax.concatenate(ends)
    assert (both.max_len, both.grows_to, both.batch) == (256, 600, 2)
    small, large = (kvjax.init_cache(CONFIG, of(*[Growing(16)] * 2), max_len=n) for n in (30, 60))
    both = kvjax.concatenate([small, kvjax.grow(large, 40)])
    assert (both.max_len, both.grows_to) == (40, 60)
    mixed = kvjax.concatenate([kvjax.init_cache(CONFIG, max_len=20), small])
    assert (mixed.max_len, mixed.grows_to) == (20, 30)
    ring = kvjax.policy("sliding_window", window=8, slack=2)
    rings = [kvjax.init_cache(CONFIG, ring, max_len=size) for size in (5, 7)]
    assert kvjax.concatenate(rings).max_len == 7
    rings.append(kvjax.init_cache(CONFIG, ring))
    assert kvjax.concatenate(rings).max_len == UNLIMITED


def test_caches_of_different_models_are_not_joined():
    one = kvjax.init_cache(CONFIG, max_len=8)
    for other in (tiny_config(windows=(None, 9)), tiny_config(head_dim=4, windows=(None, None))):
        with pytest.raises(ValueError, match="the caches are of different models"):
            kvjax.concatenate([one, kvjax.init_cache(other, max_len=8)])
    with pytest.raises(ValueError, match=r"layer 0 has .*float32.*float16.*: kvjax.convert"):
        kvjax.concatenate([one, kvjax.init_cache(CONFIG, kvjax.policy(dtype="float16"), max_len=8)])


def test_conversion_goes_by_the_layers_of_the_model():
    """Also if layers share caches: the list has one policy per layer, as for ``init_cache``."""
    config = dataclasses.make_dataclass("Shape", [
        "num_hidden_layers", "num_key_value_heads", "head_dim", "dtype", "windows",
        "cache_sources"])(4, 2, 8, "float32", (None, 6, None, 6), (0, 1, 0, 1))  # fmt: skip
    cache = kvjax.init_cache(config, "hybrid", max_len=32)
    found = kvjax.convert(cache, of(Dense(), Ring(7), Dense(), Ring(7)))
    assert [layer.policy.layout.window for layer in found.layers] == [None, 7]
    assert kvjax.convert(cache, "hybrid").sources == (0, 1, 0, 1)
    with pytest.raises(ValueError, match="2 policies for a model of 4 layers"):
        kvjax.convert(cache, of(Dense(), Dense()))


def test_conversion_keeps_the_dtypes_of_keys_and_of_values():
    raw = kvjax.CachePolicy(Dense(), Raw("bfloat16"), Raw("float32"))
    found = kvjax.convert(kvjax.init_cache(CONFIG, raw, max_len=8), "static").layers[0].policy
    assert (found.keys.dtype, found.values.dtype) == ("bfloat16", "float32")


def test_an_overflow_that_was_dealt_with_is_cleared():
    cache = kvjax.init_cache(ONE, kvjax.CachePolicy(Growing(4)), max_len=8)
    x = np.zeros((1, 2, 5, 8), np.float32)
    full = kvjax.advance(kvjax.append(cache, 0, x, x), 5)
    with pytest.raises(kvjax.CacheOverflowError, match=r"holds 4 tokens.*kvjax.grow it before"):
        kvjax.check(full)
    full = kvjax.grow(full, 8)
    with pytest.raises(kvjax.CacheOverflowError, match=r"start with a larger max_len"):
        kvjax.check(full)
    kvjax.check(kvjax.clear_status(full))


def test_a_row_that_is_not_there_is_not_chosen_in_silence():
    cache = kvjax.init_cache(CONFIG, batch=2, max_len=8)
    found = jax.jit(kvjax.select)(cache, jnp.array([1, 7, -1]))
    assert found.status.tolist() == [0, NO_SUCH_ROW, NO_SUCH_ROW]
    with pytest.raises(
        ValueError, match=r"row\(s\) 1, 2 were selected by numbers of rows that do not"
    ):
        kvjax.check(found)


def test_what_must_look_at_numbers_says_so_inside_jit():
    cache = kvjax.init_cache(CONFIG, "dynamic")
    for call, name in ((lambda c: kvjax.grow(c, 512), "grow"), (kvjax.check, "check")):
        with pytest.raises(ValueError, match=rf"kvjax\.{name} can't run inside jit"):
            jax.jit(call)(cache)
