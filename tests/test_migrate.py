"""Layers in other places: moved there and back, and moved to keep to a memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matrix import BLOCK, CODECS, LAYOUTS, tiny_config, tiny_model

import kvjax
from kvjax._tree import tree_bytes
from kvjax.budget import Budget
from kvjax.limits import InferenceLimits, memory_left
from kvjax.memory import memory_report, plan

MODEL, PARAMS = tiny_model()
APPLY = jax.jit(MODEL.apply)
TEXT = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (2, 60)).astype(np.int32)


def filled(layout, codec, tokens=48):
    policy = kvjax.CachePolicy(layout, codec, codec, block=BLOCK)
    cache = kvjax.init_cache(MODEL.config, policy, batch=2, max_len=128)
    for start in range(0, tokens, 16):
        cache = APPLY(PARAMS, TEXT[:, start : start + 16], cache)[1]
    return cache


def places(cache):
    return [layer.policy.placement.place for layer in cache.layers]


def memories(cache):
    return [row["memory"] for row in memory_report(cache)]


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("layout", ["dense", "ring", "sinks"])
def test_there_and_back(layout, codec):
    """A hundred times, at last with half of the layers: nothing drifts, nothing is left behind, and
    the text goes on as it would have."""
    codec = kvjax.Raw() if codec == "raw" else CODECS[codec]
    cache = filled(LAYOUTS[layout][0], codec)
    wanted, held = APPLY(PARAMS, TEXT[:, 48:52], cache)
    held = jax.tree.map(np.asarray, held)
    live = size = -1
    for turn in range(100):
        half = [turn % 2] if turn >= 90 else None
        cache = kvjax.migrate(cache, kvjax.Host(prefetch=turn % 3), layers=half)
        assert places(cache) == ["host" if half in (None, [n]) else "device" for n in (0, 1)]
        expected = ["pinned_host" if half in (None, [n]) else "device" for n in (0, 1)]
        assert memories(cache) == expected
        cache = kvjax.migrate(cache, kvjax.Device(), layers=half)
        jax.block_until_ready(cache)
        here = len(jax.live_arrays()), sum(x.nbytes for x in jax.live_arrays())
        assert live < 0 or (here[0] <= live and here[1] <= size)
        live, size = here if turn == 1 else (live, size)
    assert memories(cache) == ["device"] * 2
    found, more = APPLY(PARAMS, TEXT[:, 48:52], cache)
    assert np.array_equal(found, wanted)
    if layout == "dense":  # a ring's oldest slots, which no query sees, don't come with it
        for a, b in zip(jax.tree.leaves(more), jax.tree.leaves(held), strict=True):
            assert np.array_equal(np.asarray(a), b)


@pytest.mark.parametrize("codec", ["raw", "int4"])
@pytest.mark.parametrize("layers", [None, [0], [1]])
def test_a_text_goes_on_from_the_host(layers, codec):
    codec = kvjax.Raw() if codec == "raw" else CODECS[codec]
    cache = filled(kvjax.Dense(), codec)
    wanted, _ = APPLY(PARAMS, TEXT[:, 48:52], cache)
    parked = kvjax.migrate(kvjax.fork(cache), kvjax.Host(1), layers)
    found, parked = APPLY(PARAMS, TEXT[:, 48:52], parked)
    kvjax.check(parked)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    if codec != kvjax.Raw():
        assert np.array_equal(found, wanted)


def test_no_more_than_a_layer_is_held_twice(monkeypatch):
    """And what has moved is deleted; a fork of it is not."""
    cache = filled(kvjax.Dense(), CODECS["int4"])
    kept = kvjax.fork(cache)
    jax.block_until_ready((cache, kept))
    before = sum(x.nbytes for x in jax.live_arrays())
    largest = max(tree_bytes(layer) for layer in cache.layers)
    seen = []
    store = kvjax.Host.store

    def watched(self, body):
        found = store(self, body)
        seen.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return found

    monkeypatch.setattr(kvjax.Host, "store", watched)
    moved = kvjax.migrate(cache, kvjax.Host())
    assert len(seen) == 2 and 0 < max(seen) <= largest
    assert all(x.is_deleted() for layer in cache.layers for x in jax.tree.leaves(layer.keys))
    assert not any(x.is_deleted() for x in jax.tree.leaves((moved, kept)))


def test_what_is_there_already_stays():
    cache = filled(kvjax.Dense(), CODECS["int4"])
    again = kvjax.migrate(cache, kvjax.Device())
    leaves = jax.tree.leaves(cache.layers), jax.tree.leaves(again.layers)
    assert all(a is b for a, b in zip(*leaves, strict=True))
    parked = kvjax.migrate(again, kvjax.Host())
    ahead = kvjax.migrate(parked, kvjax.Host(prefetch=2), layers=[1])
    assert [layer.policy.placement.ahead for layer in ahead.layers] == [0, 2]
    assert not any(x.is_deleted() for x in jax.tree.leaves(ahead))


def test_wrong_moves_are_refused():
    cache = filled(kvjax.Dense(), CODECS["int4"], 16)
    with pytest.raises(ValueError, match="layer 2: the cache has 2"):
        kvjax.migrate(cache, kvjax.Host(), layers=[2])
    with pytest.raises(ValueError, match="is no placement: give Device"):
        kvjax.migrate(cache, kvjax.Host)
    with pytest.raises(ValueError, match="can't stand inside jit"):
        jax.jit(lambda c: kvjax.migrate(c, kvjax.Host()))(cache)
    with pytest.raises(ValueError, match="can't stand inside jit"):
        jax.jit(lambda c: kvjax.make_room(c, 64)[0])(cache)


# Keeping to a memory.


def test_the_last_layers_go_first_and_come_back_late():
    budget, sizes = Budget(100), [(40, 5, 40)] * 3
    assert budget.away(sizes[:2], frozenset()) == frozenset()
    assert budget.away(sizes, frozenset()) == {2}
    assert budget.away(sizes, frozenset(), twice=20) == {1, 2}
    # Back only where a quarter stays free: 45 of 100 bytes, but not 80.
    assert budget.away([(40, 5, 40)] * 2, frozenset({0, 1})) == {1}
    assert budget.away([(30, 5, 30)] * 2, frozenset({0, 1})) == frozenset()
    with pytest.raises(ValueError, match=r"may take 10 bytes of the device.*would take 15"):
        Budget(10).away(sizes, frozenset())


def test_what_is_fetched_ahead_counts():
    sizes = [(40, 5, 40)] * 4
    assert Budget(100).away(sizes, frozenset()) == {2, 3}
    # One more on the host would not help: two bodies are fetched, and what is left is too much.
    assert Budget(100, kvjax.Host(prefetch=1)).away(sizes, frozenset()) == {0, 1, 2, 3}


def auto(memory, bits=16):
    return kvjax.policy("auto", memory=memory, bits=bits)


def sizes_of(lm, bits, tokens):
    """Bytes of the device: of a whole cache, and of one whose layers are all on the host."""
    whole = kvjax.cache_nbytes(lm.config, kvjax.policy(bits=bits), batch=2, max_len=tokens)
    away = kvjax.policy("offloaded_static", bits=bits)
    return whole["device"], kvjax.cache_nbytes(lm.config, away, batch=2, max_len=tokens)["device"]


PROMPTS = ["A cache of keys and values" * 6, "abc"]
AT = {"max_new_tokens": 300, "eos_token_ids": ()}


@pytest.mark.parametrize("bits", [16, 4])
def test_a_text_that_outgrows_the_memory(tiny_llama, bits):
    """It moves layers out, each once, goes on as without a limit, and never holds more."""
    whole, least = sizes_of(tiny_llama, bits, 512)
    layers = tiny_llama.config.num_hidden_layers
    memory = (whole + least) // 2
    wanted = kvjax.generate(tiny_llama, PROMPTS, cache=kvjax.policy("dynamic", bits=bits), **AT)
    found = kvjax.generate(tiny_llama, PROMPTS, cache=auto(memory, bits), **AT)
    moved = [move.layer for move in found.stats.moves]
    assert moved and len(set(moved)) == len(moved) and moved == sorted(moved, reverse=True)
    assert {move.place for move in found.stats.moves} == {"host"}
    assert all(move.bytes > 0 and move.tokens <= 512 for move in found.stats.moves)
    assert places(found.cache) == ["host" if n in moved else "device" for n in range(layers)]
    assert kvjax.nbytes(found.cache)["device"] <= memory
    assert found.tokens == wanted.tokens
    apply = jax.jit(tiny_llama.apply)
    tokens = np.asarray(found.unfed, np.int32)
    ours, theirs = (apply(tiny_llama.params, tokens, r.cache)[0] for r in (found, wanted))
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    if bits == 4:
        assert np.array_equal(ours, theirs)


def test_layers_come_back_when_there_is_room_again(tiny_llama):
    """Not to and fro: the same rows leave them where they are."""
    whole, least = sizes_of(tiny_llama, 4, 512)
    found = kvjax.generate(tiny_llama, PROMPTS, cache=auto((whole + least) // 2, 4), **AT)
    out = places(found.cache).count("host")
    assert out
    more = kvjax.generate(tiny_llama, found.unfed, cache=found.cache, max_new_tokens=3)
    assert more.stats.moves == () and places(more.cache).count("host") == out
    one = kvjax.select(more.cache, [1])
    last = kvjax.generate(tiny_llama, [more.unfed[1]], cache=one, max_new_tokens=3)
    assert {move.place for move in last.stats.moves} == {"device"}
    assert set(places(last.cache)) == {"device"}


def test_a_memory_that_is_too_small_is_an_error_before_anything_is_made(tiny_llama):
    _, least = sizes_of(tiny_llama, 16, 512)
    before = len(jax.live_arrays())
    with pytest.raises(ValueError, match=r"the cache may take .* bytes of the device.* would take"):
        kvjax.generate(tiny_llama, PROMPTS, cache=auto(least - 1), **AT)
    assert len(jax.live_arrays()) == before
    found = kvjax.generate(tiny_llama, PROMPTS, cache=auto(least), **AT)
    assert set(places(found.cache)) == {"host"}
    one = kvjax.select(found.cache, [0])
    with pytest.raises(ValueError, match=r"the cache may take .* bytes of the device"):
        kvjax.generate(tiny_llama, ["a" * 40] * 4, cache=kvjax.repeat(one, 4), max_new_tokens=100)


def test_limits_give_auto_its_memory(tiny_llama):
    weights = tree_bytes(tiny_llama.params)
    whole, least = sizes_of(tiny_llama, 16, 512)
    left = memory_left(tiny_llama, batch=2, capacity=512, memory=weights + 100_000_000)
    some = {
        share: InferenceLimits(cache_memory_ratio=share, device_memory=weights + 100_000_000)
        for share in (1.0, (whole - 1) / left, (least - 1) / left)
    }
    wide, narrow, small = some.values()
    found = kvjax.generate(tiny_llama, PROMPTS, cache="auto", limits=wide, **AT)
    assert found.stats.moves == () and set(places(found.cache)) == {"device"}
    for cache in ("auto", auto(10 * whole)):
        found = kvjax.generate(tiny_llama, PROMPTS, cache=cache, limits=narrow, **AT)
        assert "host" in places(found.cache)
    with pytest.raises(ValueError, match=r"the cache may take .* bytes of the device"):
        kvjax.generate(tiny_llama, PROMPTS, cache="auto", limits=small, **AT)
    with pytest.raises(ValueError, match=r"leave nothing of the device to the cache"):
        tiny = InferenceLimits(cache_memory_ratio=1.0, device_memory=1000)
        kvjax.generate(tiny_llama, PROMPTS, cache="auto", limits=tiny, **AT)


def test_auto_without_a_memory(tiny_llama):
    """A CPU does not say how much it has."""
    with pytest.raises(ValueError, match="give memory="):
        kvjax.init_cache(MODEL.config, kvjax.policy("auto"), max_len=64)
    with pytest.raises(ValueError, match=r"without memory=.*does not say how much memory it has"):
        kvjax.generate(tiny_llama, "abc", cache="auto")
    with pytest.raises(ValueError, match="'static' has no setting 'memory'"):
        kvjax.policy("static", memory=3)
    assert kvjax.policy("auto", memory="2 kB").budget == Budget(2000)


def test_auto_chooses_when_a_cache_is_made():
    config = tiny_config(num_hidden_layers=4, windows=(None,) * 4)
    inner = kvjax.CachePolicy(kvjax.Dense(), CODECS["int4"], CODECS["int8"], block=BLOCK)
    static = kvjax.init_cache(config, inner, batch=2, max_len=1024)
    layer = kvjax.nbytes(static)["device"] // 4
    policy = kvjax.Auto(inner, 3 * layer)
    cache = kvjax.init_cache(config, policy, batch=2, max_len=1024)
    assert places(cache) == ["device", "device", "host", "host"]
    assert kvjax.nbytes(cache)["device"] <= 3 * layer
    converted = kvjax.convert(static, policy)
    assert places(converted) == places(cache) and converted.budget == cache.budget
    assert kvjax.convert(cache, inner).budget is None
    model = kvjax.models.Architecture(config)
    assert plan(model, policy, batch=2, max_len=1024).cache == kvjax.nbytes(cache)
    same, moves = kvjax.make_room(cache, 1024)
    assert moves == [] and same is cache


def test_make_room_grows_and_moves():
    config = tiny_config(num_hidden_layers=3, windows=(None,) * 3)
    inner = kvjax.CachePolicy(kvjax.Growing(start=64), kvjax.Raw(), kvjax.Raw())
    small = kvjax.init_cache(config, inner, batch=1)
    whole = kvjax.nbytes(small)["device"]
    cache = kvjax.init_cache(config, kvjax.Auto(inner, 20 * whole), batch=1)
    step = jax.jit(kvjax.models.Architecture(config).apply, donate_argnums=2)
    params = kvjax.models.Architecture(config).init_params(0)
    cache = step(params, jnp.asarray(TEXT[:1, :40]), cache)[1]
    every = []
    for tokens in (128, 256, 512, 1024, 2048, 4096):
        cache, moves = kvjax.make_room(cache, tokens)
        every += [move.layer for move in moves]
        assert kvjax.nbytes(cache)["device"] <= 20 * whole and cache.max_len == tokens
        assert int(cache.length[0]) == 40
    assert every == [2, 1, 0]
    plain, moves = kvjax.make_room(small, 100)
    assert moves == [] and plain.max_len == 100
