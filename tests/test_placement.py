"""Where the bytes live: a body on the host gives what one on the device gives, and is moved a block
at a time."""

import dataclasses
import itertools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.codecs import Raw
from kvjax.core.pytree import tree_bytes
from kvjax.core.target import Target
from kvjax.layouts import Dense, Growing, Ring
from kvjax.memory.planning import plan
from kvjax.memory.sizes import memory_report
from tests import laws, transfers
from tests.alive import alive
from tests.copies import assert_no_copy
from tests.matrix import BLOCK, CODECS, tiny_config, tiny_model
from tests.test_copies import PROGRAMS

MODEL, PARAMS = tiny_model()
APPLY = laws.attention_outputs
TEXT = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (2, 60)).astype(np.int32)
CUTS = (0, 16, 32, 33, 34, 50, 51)


def policies(layout, keys, values, places=None):
    return [
        kvjax.CachePolicy(layout, keys, values, place, block=BLOCK)
        for place in places or (kvjax.Device(), kvjax.Host())
    ]


def fed(policy, cuts=CUTS, cache=None, lengths=None):
    """Logits of the text, cut so, and the cache."""
    if cache is None:
        cache = kvjax.init_cache(MODEL.config, policy, batch=2, max_len=128)
    found = []
    for start, stop in itertools.pairwise(cuts):
        real = None if lengths is None else np.clip(lengths - start, 0, stop - start)
        logits, cache = APPLY(TEXT[:, start:stop], cache, lengths=real)
        found.append(np.asarray(logits))
    kvjax.check(cache)
    return np.concatenate(found, axis=1), cache


def assert_on_host(cache):
    assert laws.memory_kinds(cache) == ({laws.ON_HOST}, {"device"})


@pytest.mark.rare
def test_the_order_of_accelerators():
    """There a choice whose outcome a compiler can't know keeps a layer from being fetched early: it
    changes no logit."""

    class Accelerator(kvjax.Host):
        def target(self):
            return Target("gpu")

    config, found = tiny_config(num_hidden_layers=3, windows=(None,) * 3), []
    for place in (Accelerator(0), Accelerator(1)):  # as it is traced for one, both times
        policy = kvjax.CachePolicy(Dense(), CODECS["int4"], CODECS["int4"], place, BLOCK)
        cache = kvjax.init_cache(config, policy, batch=2, max_len=128)
        _, cache = APPLY(TEXT[:, :40], cache)
        program = jax.make_jaxpr(APPLY.__wrapped__)(TEXT[:, 40:41], cache)
        found.append(APPLY(TEXT[:, 40:41], cache)[0])
    assert np.array_equal(*found)
    # The first two layers are fetched at once, the third when the second's keys are there.
    fetches = [
        equation
        for equation in program.jaxpr.eqns
        if equation.primitive.name == "cond" and "device_put" in str(equation)
    ]
    assert len(fetches) == 1


def test_shared_layers_stay_until_the_last_has_read_them():
    """Fetched once, for all that read them; with the logits of the device."""

    @dataclasses.dataclass(frozen=True)
    class Sharing:
        num_hidden_layers: int = 6
        num_key_value_heads: int = 2
        head_dim: int = 8
        dtype: str = "float32"
        cache_sources: tuple = (0, 1, 2, 0, 0, 2)

    codec, fetched = CODECS["int4"], []

    def run(placement):
        policy = kvjax.CachePolicy(Dense(), codec, codec, placement, block=BLOCK, recent=0)
        cache, mixed = kvjax.init_cache(Sharing(), policy, max_len=64), []
        for call in range(4):
            numbers = np.random.default_rng(call).normal(size=(2, 6, 1, 4, 11, 8))
            for layer in range(6):
                keys, queries = numbers[:, layer].astype(np.float32)
                if layer < 3:
                    cache = kvjax.append(cache, layer, keys[:, :2], keys[:, 2:])
                    if placement == kvjax.Host(1) and call == 3:
                        fetched.append([held.fetched is not None for held in cache.layers])
                mixed.append(kvjax.attend(queries, cache, layer))
            cache = kvjax.advance(cache, 11)
        return np.asarray(mixed)

    wanted = run(kvjax.Device())
    assert np.array_equal(run(kvjax.Host(1)), wanted)
    assert np.array_equal(run(kvjax.Host()), wanted)
    expected = [[True, True, False], [True, True, True], [True, False, True]]
    assert fetched == [[each and laws.FETCHES for each in layers] for layers in expected]


def test_outside_jit_layers_that_were_read_are_let_go():
    policy = kvjax.policy("offloaded_static", prefetch=1)
    cache = kvjax.init_cache(
        tiny_config(num_hidden_layers=4, windows=(None,) * 4), policy, max_len=512
    )
    numbers = jnp.ones((1, 2, 1, 8))
    for layer in range(4):
        cache = kvjax.append(cache, layer, numbers, numbers)
        fetched = [number for number, held in enumerate(cache.layers) if held.fetched is not None]
        assert fetched == [layer, layer + 1][: (4 - layer) * laws.FETCHES]
        assert kvjax.attend(jnp.ones((1, 4, 1, 8)), cache, layer).shape == (1, 4, 1, 8)
    assert not any(held.fetched for held in kvjax.advance(cache, 1).layers)


@pytest.mark.rare
def test_operations_leave_bodies_on_the_host():
    codec = CODECS["int4"]
    far = kvjax.CachePolicy(Growing(start=64), codec, codec, kvjax.Host(), block=BLOCK)
    _, cache = fed(far, (0, 16, 32, 48))
    caches = {
        "as it is": (kvjax.fork(cache), [0, 1]),
        "selected": (kvjax.select(cache, [1, 1, 0]), [1, 1, 0]),
        "repeated": (kvjax.repeat(cache, 2), [0, 0, 1, 1]),
        "joined": (kvjax.concatenate([kvjax.select(cache, [row]) for row in (1, 0)]), [1, 0]),
        "grown": (kvjax.grow(kvjax.fork(cache), 128), [0, 1]),
        "converted": (kvjax.convert(cache, far), [0, 1]),
    }
    wanted, _ = APPLY(TEXT[:, 48:52], cache)
    for name, (other, rows) in caches.items():
        assert_on_host(other)
        found, _ = APPLY(TEXT[rows, 48:52], other)
        assert np.abs(found - wanted[np.asarray(rows)]).max() <= 1e-5, name
    keys, _, positions = kvjax.read(cache, 0)
    assert keys.sharding.memory_kind == "device"
    assert sorted(positions[0].tolist())[-48:] == list(range(48))
    again = kvjax.rewind(cache, 5)
    again = APPLY(TEXT[:, 43:48], again)[1]
    assert np.abs(APPLY(TEXT[:, 48:52], again)[0] - wanted).max() <= 1e-5


@pytest.mark.rare
def test_there_and_back():
    """A hundred moves to the other place and back change nothing, and leak no memory."""
    near, far = policies(Dense(), CODECS["int4"], CODECS["int8"])
    _, cache = fed(near, (0, 16, 32, 48))
    wanted, _ = APPLY(TEXT[:, 48:52], cache)
    convert = jax.jit(lambda c, to: kvjax.convert(c, list(to)), static_argnums=1)
    live = {}
    for turn in range(100):
        cache = convert(cache, (far, near) if turn % 2 else (far, far))  # half of the layers too
        cache = convert(cache, (near, near))
        if turn in (1, 99):
            live[turn] = len(alive())
    assert live[99] <= live[1]
    found, _ = APPLY(TEXT[:, 48:52], cache)
    assert np.array_equal(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bits"),
    [("offloaded", 16), pytest.param("offloaded_static", 4, marks=pytest.mark.rare)],
)
def test_generation_with_a_cache_on_the_host(tiny_llama, caplog, name, bits):
    place = {"offloaded": "dynamic", "offloaded_static": "static"}[name]
    prompts = ["A cache of keys and values" * 6, "abc"]
    at = {"max_new_tokens": 90, "eos_token_ids": ()}
    wanted = kvjax.generate(tiny_llama, prompts, cache=kvjax.policy(place, bits=bits), **at)
    caplog.clear()
    with jax.log_compiles():
        found = kvjax.generate(tiny_llama, prompts, cache=kvjax.policy(name, bits=bits), **at)
    assert found.tokens == wanted.tokens
    assert_on_host(found.cache)
    assert set(found.stats.cache_bytes) == {"host", "device"}
    # Once each, and zeros of other shapes if no test before has made such.
    made = re.findall(r"Compiling jit\((prefill|choose_first|decode)\)", "\n".join(caplog.messages))
    assert sorted(made) == ["choose_first", "decode", "prefill"] and found.stats.compilations <= 8
    more = kvjax.generate(tiny_llama, [[65]] * 2, cache=found.cache, max_new_tokens=4)
    assert_on_host(more.cache)


COPIED = {
    "dense-raw": (Dense(), Raw(), Raw()),
    "dense-int4": (Dense(), CODECS["int4"], CODECS["int8"]),
    "ring-int4": (Ring(sinks=4), CODECS["int4"], CODECS["int8"]),
}


def compiled(name, max_len, form, prefetch=0, layers=2):
    config = tiny_config(num_hidden_layers=layers, windows=(None,) * layers, head_dim=16)
    layout, *codecs = COPIED[name]
    if name.startswith("ring"):
        layout = replace(layout, window=max_len // 2)
    policy = kvjax.CachePolicy(layout, *codecs, kvjax.Host(prefetch))
    cache = kvjax.init_cache(config, policy, batch=2, max_len=max_len)
    lowered = jax.jit(PROGRAMS[form], donate_argnums=1).lower(jnp.zeros(2), cache)
    return lowered.compile(), cache


@pytest.mark.slow(but=("dense-raw-step",))
@pytest.mark.parametrize(
    ("name", "form"),
    [
        pytest.param(name, form, marks=[pytest.mark.rare] * ((number + turn) % 2))
        for number, name in enumerate(COPIED)
        for turn, form in enumerate(("step", "while_loop"))
    ],
)
def test_a_body_on_the_host_is_aliased_and_never_copied(name, form):
    """Temporary device memory is one block, and does not depend on the capacity."""
    temporary = []
    for max_len in (32768, 131072):
        program, cache = compiled(name, max_len, form)
        bodies = [tree_bytes((layer.keys, layer.values)) for layer in cache.layers]
        assert_no_copy(program, sum(kvjax.nbytes(cache).values()), min(bodies))
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1] < 4_000_000


STEPPED = tiny_config(num_hidden_layers=2, windows=(None, None), head_dim=16)


def step_at(length, policy):
    """Run a decode step equation by equation after filling every row: the bytes moved, and the
    cache before the step."""
    cache = kvjax.init_cache(STEPPED, policy, batch=2, max_len=4096)
    held = jnp.full((2,), length, jnp.int32)
    cache = replace(cache, length=held, written=jnp.stack([held] * len(cache.layers), 1))
    args = jnp.zeros(2), cache
    _, moves = transfers.run(jax.make_jaxpr(PROGRAMS["step"])(*args), *args)
    return moves.to, cache


MOVES = pytest.mark.skipif(
    not laws.FETCHES, reason="before JAX 0.10.2 a CPU has one memory, and nothing moves"
)


@MOVES
@pytest.mark.rare
@pytest.mark.parametrize("codec", [CODECS["int4"], Raw()])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_every_block_comes_in_once(prefetch, codec):
    """A step after 3,450 of 4,096 tokens fetches filled blocks only, while attention reads them, or
    a prefetched layer whole, once. Nothing is moved to the host."""
    policy = kvjax.CachePolicy(Dense(), codec, codec, kvjax.Host(prefetch))
    moved, cache = step_at(3450, policy)
    bodies = [tree_bytes((layer.keys, layer.values)) for layer in cache.layers]
    assert moved["Host"] == []
    if prefetch:
        assert sum(moved["Device"]) == sum(bodies)
        return
    blocks = cache.layers[0].policy.stored_layout.slots
    filled = 3450 // policy.block - policy.recent
    assert sum(moved["Device"]) == sum(bodies) // blocks * filled
    coarse = 1024 // policy.block
    assert max(moved["Device"]) <= max(bodies) // 2 // blocks * coarse


@MOVES
@pytest.mark.rare
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_block_goes_out_when_it_is_left_behind(prefetch):
    """Of 65 steps one sends a block of each row, keys and values, and reads what it replaces."""
    policy = kvjax.CachePolicy(Dense(), Raw(), Raw(), kvjax.Host(prefetch))
    block = policy.block * STEPPED.num_key_value_heads * STEPPED.head_dim * 4
    sent = [step_at(length, policy)[0]["Host"] for length in (1023, 1024, 1025, 1087, 1088)]
    every = [block] * 2 * 2 * STEPPED.num_hidden_layers
    assert sent == [[], every, [], [], every]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prefetch", "form"),
    [
        pytest.param("dense-raw", 1, "step", marks=pytest.mark.rare),
        ("dense-raw", 2, "step"),
        pytest.param("dense-raw", 2, "while_loop", marks=pytest.mark.rare),
        pytest.param("dense-int4", 1, "step", marks=pytest.mark.rare),
        pytest.param("ring-int4", 1, "while_loop", marks=pytest.mark.rare),
    ],
)
def test_layers_fetched_ahead_are_few(name, prefetch, form):
    """No more than ``prefetch + 1`` of six bodies are on the device at a time."""
    program, cache = compiled(name, 32768, form, prefetch, layers=6)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(kvjax.nbytes(cache).values())
    body = max(tree_bytes((layer.keys, layer.values)) for layer in cache.layers)
    prefetch = prefetch if laws.FETCHES else 0
    assert prefetch * body < memory.temp_size_in_bytes < (prefetch + 1) * body + 2_000_000


@pytest.mark.rare
def test_layers_in_different_places():
    near, far = policies(Dense(), CODECS["int4"], CODECS["int8"])
    wanted, _ = fed(near)
    found, cache = fed([far, near])
    assert np.array_equal(found, wanted)
    assert [row["memory"] for row in memory_report(cache)] == [laws.ON_HOST, "device"]
    assert [row["place"] for row in memory_report(cache)] == ["host", "device"]


def test_a_plan_tells_places_apart():
    policy = kvjax.policy("offloaded_static")
    cache = kvjax.init_cache(MODEL.config, policy, batch=2, max_len=512)
    found = plan(MODEL, policy, batch=2, max_len=512)
    assert found.source == "estimated"
    assert found.cache == kvjax.nbytes(cache) and set(found.cache) == {"host", "device"}
    assert found.bytes_per_token == {"host": 2 * 2 * 2 * 8 * 4}
    assert found.device < found.weights + found.temporaries + sum(found.cache.values())


def test_a_policy_of_another_cache_asks_for_the_platform_again():
    """Fixed in a cache, the platform that computes is open in what another one is made by."""
    config = tiny_config()
    made = kvjax.init_cache(config, "static", max_len=8).layers[0].policy
    elsewhere = replace(made, placement=replace(made.placement, compute_target=Target("tpu")))
    again = kvjax.init_cache(config, elsewhere, max_len=8).layers[0].policy
    assert made == again and again.placement.platform() == "cpu"
