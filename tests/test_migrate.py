"""Layers moved between devices and host, by hand and to stay within a memory budget."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.codecs import Raw
from kvjax.core.pytree import tree_bytes
from kvjax.layouts import Dense, Growing
from kvjax.memory.limits import InferenceLimits, available_memory
from kvjax.memory.planning import plan
from kvjax.memory.sizes import memory_report
from kvjax.placement.device import Budget, LayerBytes
from tests import laws
from tests.alive import alive
from tests.matrix import BLOCK, CODECS, LAYOUTS, tiny_config, tiny_model

MODEL, _ = tiny_model()
APPLY = laws.attention_outputs
TEXT = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (2, 60)).astype(np.int32)


def filled(layout, codec, tokens=48):
    policy = kvjax.CachePolicy(layout, codec, codec, block=BLOCK)
    cache = kvjax.init_cache(MODEL.config, policy, batch=2, max_len=128)
    for start in range(0, tokens, 16):
        cache = APPLY(TEXT[:, start : start + 16], cache)[1]
    return cache


def places(cache):
    return [layer.policy.placement.place for layer in cache.layers]


def memories(cache):
    return [row["memory"] for row in memory_report(cache)]


@pytest.mark.parametrize(
    ("layout", "codec"),
    [
        pytest.param("sinks", "raw", marks=pytest.mark.rare),
        pytest.param("dense", "int4", marks=pytest.mark.rare),
        pytest.param("dense", "raw", marks=pytest.mark.rare),
        pytest.param("ring", "int4", marks=pytest.mark.rare),
        pytest.param("ring", "raw", marks=pytest.mark.rare),
        pytest.param("sinks", "int4", marks=pytest.mark.rare),
    ],
)
def test_there_and_back(layout, codec):
    """A hundred moves, the last ones with half of the layers: no value changes, no array leaks, and
    generation continues unchanged."""
    codec = Raw() if codec == "raw" else CODECS[codec]
    cache = filled(LAYOUTS[layout][0], codec)
    wanted, held = APPLY(TEXT[:, 48:52], cache)
    held = jax.tree.map(np.asarray, held)
    sizes = {}
    for turn in range(100):
        half = [turn % 2] if turn >= 90 else None
        cache = kvjax.migrate(cache, kvjax.Host(prefetch=turn % 3), layers=half)
        assert places(cache) == ["host" if half in (None, [n]) else "device" for n in (0, 1)]
        expected = [laws.ON_HOST if half in (None, [n]) else "device" for n in (0, 1)]
        assert memories(cache) == expected
        cache = kvjax.migrate(cache, kvjax.Device(), layers=half)
        jax.block_until_ready(cache)
        if turn in (1, 99):
            sizes[turn] = [x.nbytes for x in alive()]
    assert len(sizes[99]) <= len(sizes[1]) and sum(sizes[99]) <= sum(sizes[1])
    assert memories(cache) == ["device"] * 2
    found, more = APPLY(TEXT[:, 48:52], cache)
    assert np.array_equal(found, wanted)
    if layout == "dense":  # a ring's oldest slots, which no query sees, don't come with it
        for a, b in zip(jax.tree.leaves(more), jax.tree.leaves(held), strict=True):
            assert np.array_equal(np.asarray(a), b)


@pytest.mark.parametrize("codec", [pytest.param("raw", marks=pytest.mark.rare), "int4"])
@pytest.mark.parametrize(
    "layers", [[0], *(pytest.param(x, marks=pytest.mark.rare) for x in (None, [1]))]
)
@pytest.mark.rare
def test_a_text_goes_on_from_the_host(layers, codec):
    codec = Raw() if codec == "raw" else CODECS[codec]
    cache = filled(Dense(), codec)
    wanted, _ = APPLY(TEXT[:, 48:52], cache)
    parked = kvjax.migrate(kvjax.fork(cache), kvjax.Host(1), layers)
    found, parked = APPLY(TEXT[:, 48:52], parked)
    kvjax.check(parked)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    if codec != Raw():
        assert np.array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["raw", pytest.param("int4", marks=pytest.mark.rare)])
def test_no_more_than_a_layer_is_held_twice(monkeypatch, codec):
    """The old arrays are deleted; those of a fork are not."""
    codec = Raw() if codec == "raw" else CODECS[codec]
    cache = filled(Dense(), codec)
    kept = kvjax.fork(cache)
    jax.block_until_ready((cache, kept))
    before = sum(x.nbytes for x in alive())
    # A raw layer has a tail only on the host.
    there = kvjax.init_cache(MODEL.config, kvjax.CachePolicy(
        Dense(), codec, codec, kvjax.Host(), block=BLOCK), batch=2, max_len=128)  # fmt: skip
    largest = max(tree_bytes(layer) for layer in there.layers)
    del there
    seen = []
    store = kvjax.Host.store

    def watched(self, body, orders):
        seen.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        found = store(self, body, orders)
        seen.append(sum(x.nbytes for x in jax.live_arrays()) - before)
        return found

    monkeypatch.setattr(kvjax.Host, "store", watched)
    moved = kvjax.migrate(cache, kvjax.Host())
    more = tree_bytes(moved.layers) - tree_bytes(kept.layers)  # the new tails
    assert len(seen) >= 4 and 0 < max(seen) <= largest + more
    assert all(x.is_deleted() for layer in cache.layers for x in jax.tree.leaves(layer.keys))
    assert not any(x.is_deleted() for x in jax.tree.leaves((moved, kept)))
    with pytest.raises(ValueError, match="was used up by an earlier call"):
        kvjax.migrate(cache, kvjax.Host())


def test_layers_stay_beside_their_cache():
    """On the cache's device, not the default. A CPU has one device, so check the context."""
    cache = filled(Growing(start=64), Raw())
    seen = []
    store = kvjax.Host.store

    class Watched(kvjax.Host):
        def store(self, body, orders):
            seen.append(jax.config.values["jax_default_device"])
            return store(self, body, orders)

    kvjax.migrate(cache, Watched())
    assert set(seen) == {jax.local_devices()[0]}


@pytest.mark.slow
def test_what_is_there_already_stays():
    cache = filled(Dense(), CODECS["int4"])
    again = kvjax.migrate(cache, kvjax.Device())
    leaves = jax.tree.leaves(cache.layers), jax.tree.leaves(again.layers)
    assert all(a is b for a, b in zip(*leaves, strict=True))
    parked = kvjax.migrate(again, kvjax.Host())
    ahead = kvjax.migrate(parked, kvjax.Host(prefetch=2), layers=[1])
    assert [layer.policy.placement.ahead for layer in ahead.layers] == [0, 2]
    assert not any(x.is_deleted() for x in jax.tree.leaves(ahead))


def test_wrong_moves_are_refused():
    cache = filled(Dense(), CODECS["int4"], 16)
    with pytest.raises(ValueError, match="layer 2: the cache has 2"):
        kvjax.migrate(cache, kvjax.Host(), layers=[2])
    for wrong in (kvjax.Host, "host", None):
        with pytest.raises(ValueError, match="is not a placement: give Device"):
            kvjax.migrate(cache, wrong)
    with pytest.raises(ValueError, match="layers must be a list of integers, got 0"):
        kvjax.migrate(cache, kvjax.Host(), layers=0)
    with pytest.raises(ValueError, match="takes a KVCache, see init_cache, not a str"):
        kvjax.make_room("x", 5)
    with pytest.raises(ValueError, match="can't run inside jit"):
        jax.jit(lambda c: kvjax.migrate(c, kvjax.Host()))(cache)
    with pytest.raises(ValueError, match="can't run inside jit"):
        jax.jit(lambda c: kvjax.make_room(c, 64)[0])(cache)


# Memory budgets.


def test_the_last_layers_go_first_and_come_back_late():
    budget, sizes = Budget(100), [LayerBytes(40, 5, 40)] * 3
    assert budget.offloaded(sizes[:2], ()) == frozenset()
    assert budget.offloaded(sizes, ()) == {2}
    # A layer returns only if a quarter stays free: with 45 of 100 bytes, but not with 80.
    assert budget.offloaded(sizes[:2], {0, 1}) == {1}
    assert budget.offloaded([LayerBytes(30, 5, 30)] * 2, {0, 1}) == frozenset()
    with pytest.raises(ValueError, match=r"may use 10 bytes of the device.* need 15"):
        Budget(10).offloaded(sizes, ())


def test_room_is_kept_for_a_layer_that_grows_or_moves():
    """Space for the largest layer that may grow or move; none for others."""
    sizes = [LayerBytes(40, 5, 40, True), LayerBytes(20, 5, 20, True), LayerBytes(30, 30, 30, True)]
    assert Budget(130).offloaded(sizes, ()) == frozenset()  # 90, and 40 of them twice
    assert Budget(129).offloaded(sizes, ()) == {1}  # 75, and 40
    assert Budget(114).offloaded(sizes, ()) == {0, 1}
    assert Budget(40).offloaded(sizes, ()) == {0, 1}
    with pytest.raises(ValueError, match="need 40"):
        Budget(39).offloaded(sizes, ())
    fixed = [size._replace(grows=False) for size in sizes]
    assert Budget(90).offloaded(fixed, ()) == frozenset()


def test_what_is_fetched_ahead_counts():
    sizes = [LayerBytes(40, 5, 40)] * 4
    assert Budget(100).offloaded(sizes, ()) == {2, 3}
    # Another layer on the host would not help: two fetched bodies and the rest are too large.
    assert Budget(100, kvjax.Host(prefetch=1)).offloaded(sizes, ()) == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="tokens and the prefetched layers need 100"):
        Budget(99, kvjax.Host(prefetch=1)).offloaded(sizes, ())


def stored(bits, layout, place=None):
    """Small blocks, because tails would dominate short sequences."""
    codec = Raw() if bits == 16 else CODECS["int4"]
    return kvjax.CachePolicy(layout, codec, codec, place or kvjax.Device(), block=16)


GROWING = Growing(start=64)


def sizes_of(lm, bits, tokens, batch=2):
    """Bytes on the device: of a layer there, and of a layer on the host."""
    each = [
        kvjax.memory.cache_nbytes(
            lm.config, stored(bits, Dense(), place), batch=batch, max_len=tokens
        )["device"]
        for place in (kvjax.Device(), kvjax.Host())
    ]
    return tuple(size // lm.config.num_hidden_layers for size in each)


def auto(lm, bits, layout=GROWING):
    """A budget for one of two layers when rows have 512 tokens."""
    layer, tail = sizes_of(lm, bits, 512)
    return kvjax.policies.Auto(stored(bits, layout), 2 * layer + tail)


PROMPTS = ["A cache of keys and values" * 9, "abc"]
AT = {"max_new_tokens": 40, "eos_token_ids": ()}
"""Rows have 256 tokens first, and 512 in the end."""


@pytest.mark.parametrize("bits", [pytest.param(bits, marks=pytest.mark.rare) for bits in (16, 4)])
def test_a_text_that_outgrows_the_memory(tiny_llama, bits):
    """Layers move out once each; results are those without a budget, which is not exceeded."""
    layers, policy = tiny_llama.config.num_hidden_layers, auto(tiny_llama, bits)
    wanted = kvjax.generate(tiny_llama, PROMPTS, cache=stored(bits, GROWING), **AT)
    found = kvjax.generate(tiny_llama, PROMPTS, cache=policy, **AT)
    moved = [move.layer for move in found.stats.moves]
    assert moved and len(set(moved)) == len(moved) and moved == sorted(moved, reverse=True)
    assert {move.place for move in found.stats.moves} == {"host"}
    assert all(move.bytes > 0 and move.tokens <= 512 for move in found.stats.moves)
    assert places(found.cache) == ["host" if n in moved else "device" for n in range(layers)]
    assert kvjax.nbytes(found.cache)["device"] <= policy.budget.memory
    assert found.tokens == wanted.tokens
    apply = jax.jit(tiny_llama.apply)
    tokens = np.asarray(found.pending_tokens, np.int32)
    ours, theirs = (apply(tiny_llama.params, tokens, r.cache)[0] for r in (found, wanted))
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()
    if bits == 4:
        assert np.array_equal(ours, theirs)


@pytest.mark.rare
def test_layers_come_back_when_there_is_room_again(tiny_llama):
    """Layers don't move back and forth: the same rows leave them where they are."""
    found = kvjax.generate(tiny_llama, PROMPTS, cache=auto(tiny_llama, 4), **AT)
    out = places(found.cache).count("host")
    assert out
    more = kvjax.generate(tiny_llama, found.pending_tokens, cache=found.cache, max_new_tokens=3)
    assert more.stats.moves == () and places(more.cache).count("host") == out
    one = kvjax.select(more.cache, [1])
    last = kvjax.generate(tiny_llama, [more.pending_tokens[1]], cache=one, max_new_tokens=3)
    assert {move.place for move in last.stats.moves} == {"device"}
    assert set(places(last.cache)) == {"device"}


@pytest.mark.rare
def test_layers_stay_away_where_the_text_will_need_the_room(tiny_llama):
    """Layers don't move back for a short time."""
    prompts, long = ["A cache of keys and values" * 6, "abc"], {**AT, "max_new_tokens": 300}
    short = {**AT, "max_new_tokens": 3}
    found = kvjax.generate(tiny_llama, prompts, cache=auto(tiny_llama, 4), **short)
    assert found.cache.max_len < 512 and set(places(found.cache)) == {"device"}
    parked = kvjax.migrate(found.cache, kvjax.Host())
    back = kvjax.generate(tiny_llama, found.pending_tokens, cache=kvjax.fork(parked), **short)
    assert [move.place for move in back.stats.moves] == ["device"] * 2
    assert kvjax.generate(tiny_llama, found.pending_tokens, cache=parked, **long).stats.moves == ()


@pytest.mark.rare
@pytest.mark.parametrize("layout", [GROWING, pytest.param(Dense(), marks=pytest.mark.rare)])
def test_more_rows_send_layers_away(tiny_llama, layout):
    """Layers move when rows continue, even if nothing grows."""
    policy, short = auto(tiny_llama, 16, layout), {**AT, "max_new_tokens": 3}
    found = kvjax.generate(tiny_llama, PROMPTS, cache=policy, max_len=512, **short)
    assert set(places(found.cache)) == {"device"}
    many = kvjax.repeat(found.cache, 4)
    rows = [row for row in found.pending_tokens for _ in range(4)]
    more = kvjax.generate(tiny_llama, rows, cache=many, **short)
    assert {move.place for move in more.stats.moves} == {"host"}
    assert kvjax.nbytes(more.cache)["device"] <= policy.budget.memory
    few = kvjax.generate(tiny_llama, found.pending_tokens, cache=found.cache, **short)
    assert more.tokens[::4] == few.tokens


@pytest.mark.rare
def test_a_memory_that_is_too_small_is_an_error_before_anything_is_made(tiny_llama):
    least = 2 * sizes_of(tiny_llama, 16, 512)[1]
    before = len(alive())
    small = kvjax.policies.Auto(stored(16, GROWING), least - 1)
    with pytest.raises(ValueError, match=r"the cache may use .* bytes of the device.* need"):
        kvjax.generate(tiny_llama, PROMPTS, cache=small, **AT)
    assert len(alive()) == before
    found = kvjax.generate(tiny_llama, PROMPTS, cache=replace(small, memory=least), **AT)
    assert set(places(found.cache)) == {"host"}
    four = kvjax.repeat(kvjax.select(found.cache, [0]), 4)
    with pytest.raises(ValueError, match=r"the cache may use .* bytes of the device"):
        kvjax.generate(tiny_llama, ["a" * 40] * 4, cache=four, max_new_tokens=100)
    assert not any(x.is_deleted() for x in jax.tree.leaves(four))


@pytest.mark.rare
def test_a_layer_that_can_not_leave(tiny_llama):
    """A ring smaller than a tail stays on the device, and other layers still move."""
    ring = kvjax.policy("sliding_window", window=8)
    choice, prompt = [stored(16, GROWING), ring], ["abc" * 78]
    away = [stored(16, Dense(), kvjax.Host()), ring]
    least = kvjax.memory.cache_nbytes(tiny_llama.config, away, batch=1, max_len=512)["device"]
    found = kvjax.generate(tiny_llama, prompt, cache=kvjax.policies.Auto(choice, least), **AT)
    assert places(found.cache) == ["host", "device"]
    assert found.tokens == kvjax.generate(tiny_llama, prompt, cache=choice, **AT).tokens
    with pytest.raises(ValueError, match="the cache may use"):
        kvjax.generate(tiny_llama, prompt, cache=kvjax.policies.Auto(choice, least - 1), **AT)


@pytest.mark.slow
def test_limits_give_auto_its_memory(tiny_llama):
    """``"auto"`` by name, and with a larger budget."""
    weights, total = tree_bytes(tiny_llama.params), 100_000_000
    names, at = ("static", "offloaded_static"), {**AT, "max_len": 512}
    whole, least = (
        kvjax.memory.cache_nbytes(tiny_llama.config, name, batch=2, max_len=512)["device"]
        for name in names
    )
    left = available_memory(tiny_llama, batch=2, capacity=512, memory=weights + total)
    wide, narrow, small = (
        InferenceLimits(cache_memory_ratio=share, device_memory=weights + total)
        for share in (1.0, (whole - 1) / left, (least - 1) / left)
    )
    found = kvjax.generate(tiny_llama, PROMPTS, cache="auto", limits=wide, **at)
    assert found.stats.moves == () and set(places(found.cache)) == {"device"}
    for cache in ("auto", kvjax.policy("auto", memory=10 * whole)):
        found = kvjax.generate(tiny_llama, PROMPTS, cache=cache, limits=narrow, **at)
        assert "host" in places(found.cache)
    with pytest.raises(ValueError, match=r"the cache may use .* bytes of the device"):
        kvjax.generate(tiny_llama, PROMPTS, cache="auto", limits=small, **at)
    with pytest.raises(ValueError, match="leave no device memory for the cache"):
        tiny = InferenceLimits(cache_memory_ratio=1.0, device_memory=1000)
        kvjax.generate(tiny_llama, PROMPTS, cache="auto", limits=tiny, **at)


def test_auto_without_a_memory(tiny_llama):
    """A CPU does not report its memory."""
    for choice in ("auto", kvjax.policy("auto")):
        with pytest.raises(ValueError, match="needs memory="):
            kvjax.init_cache(MODEL.config, choice, max_len=64)
    with pytest.raises(ValueError, match=r"without memory=.*does not report its memory"):
        kvjax.generate(tiny_llama, "abc", cache="auto")
    with pytest.raises(ValueError, match="'static' has no setting 'memory'"):
        kvjax.policy("static", memory=3)
    assert kvjax.policy("auto", memory="2 kB").budget == Budget(2000)


@pytest.mark.rare
def test_auto_chooses_when_a_cache_is_made():
    config = tiny_config(num_hidden_layers=4, windows=(None,) * 4)
    inner = kvjax.CachePolicy(Dense(), CODECS["int4"], CODECS["int8"], block=BLOCK)
    static = kvjax.init_cache(config, inner, batch=2, max_len=1024)
    layer = kvjax.nbytes(static)["device"] // 4
    policy = kvjax.policies.Auto(inner, 3 * layer)
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


@pytest.mark.slow
def test_make_room_grows_and_moves():
    config = tiny_config(num_hidden_layers=3, windows=(None,) * 3)
    inner = kvjax.CachePolicy(Growing(start=64), Raw(), Raw())
    small = kvjax.init_cache(config, inner, batch=1)
    whole = kvjax.nbytes(small)["device"]
    cache = kvjax.init_cache(config, kvjax.policies.Auto(inner, 20 * whole), batch=1)
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
