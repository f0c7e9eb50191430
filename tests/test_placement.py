"""Where the bytes live: a body on the host gives what one on the device gives, and is moved a block
at a time."""

import collections
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from copies import assert_no_copy
from matrix import BLOCK, CODECS, LAYOUTS, tiny_config, tiny_model

import kvjax
from kvjax._tree import tree_bytes
from kvjax.memory import memory_report, plan
from kvjax.models.architecture import Architecture

MODEL, PARAMS = tiny_model()
APPLY = jax.jit(MODEL.apply, donate_argnums=2)
TEXT = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (2, 60)).astype(np.int32)
CUTS = (0, 16, 32, 33, 34, 50, 51)
NOT_GROWING = [name for name in LAYOUTS if name != "growing"]
CODED = [*((name, ("int8", "int4")) for name in NOT_GROWING), ("sinks", ("int2", "rotated"))]


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
        logits, cache = APPLY(PARAMS, TEXT[:, start:stop], cache, lengths=real)
        found.append(np.asarray(logits))
    kvjax.check(cache)
    return np.concatenate(found, axis=1), cache


def kinds(cache):
    """Kinds of memory of bodies, and of all else."""
    bodies = [x for layer in cache.layers for x in jax.tree.leaves((layer.keys, layer.values))]
    rest = [x for layer in cache.layers for x in jax.tree.leaves(layer.tail)]
    rest += [cache.length, cache.written, cache.status]
    return tuple({x.sharding.memory_kind for x in some} for some in (bodies, rest))


def assert_on_host(cache):
    assert kinds(cache) == ({"pinned_host"}, {"device"})


@pytest.mark.parametrize(("layout", "codecs"), CODED)
def test_the_same_codec_gives_the_same_logits_from_the_host(layout, codecs):
    """Exactly, in rows of different lengths."""
    keys, values = (CODECS[name] for name in codecs)
    near, far = policies(LAYOUTS[layout][0], keys, values)
    wanted, held = fed(near, lengths=np.array([51, 41]))
    found, cache = fed(far, lengths=np.array([51, 41]))
    assert np.array_equal(found, wanted)
    assert_on_host(cache)
    for a, b in zip(jax.tree.leaves(cache), jax.tree.leaves(held), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("layout", NOT_GROWING)
def test_raw_keys_and_values_from_the_host(layout):
    """A raw cache has no tail on the device, and is walked in other blocks."""
    near, far = policies(LAYOUTS[layout][0], kvjax.Raw(), kvjax.Raw())
    wanted, _ = fed(near)
    found, cache = fed(far)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert_on_host(cache)


def test_operations_leave_bodies_on_the_host():
    codec = CODECS["int4"]
    far = kvjax.CachePolicy(kvjax.Growing(start=64), codec, codec, kvjax.Host(), block=BLOCK)
    _, cache = fed(far, (0, 16, 32, 48))
    caches = {
        "as it is": (kvjax.fork(cache), [0, 1]),
        "selected": (kvjax.select(cache, [1, 1, 0]), [1, 1, 0]),
        "repeated": (kvjax.repeat(cache, 2), [0, 0, 1, 1]),
        "joined": (kvjax.concatenate([kvjax.select(cache, [row]) for row in (1, 0)]), [1, 0]),
        "grown": (kvjax.grow(kvjax.fork(cache), 128), [0, 1]),
        "converted": (kvjax.convert(cache, far), [0, 1]),
    }
    wanted, _ = MODEL.apply(PARAMS, TEXT[:, 48:52], cache)
    for name, (other, rows) in caches.items():
        assert_on_host(other)
        found, _ = MODEL.apply(PARAMS, TEXT[rows, 48:52], other)
        assert np.abs(found - wanted[np.asarray(rows)]).max() <= 1e-5, name
    keys, _, positions = kvjax.read(cache, 0)
    assert keys.sharding.memory_kind == "device"
    assert sorted(positions[0].tolist())[-48:] == list(range(48))
    again = kvjax.rewind(cache, 5)
    again = MODEL.apply(PARAMS, TEXT[:, 43:48], again)[1]
    assert np.abs(MODEL.apply(PARAMS, TEXT[:, 48:52], again)[0] - wanted).max() <= 1e-5


def test_there_and_back():
    """To the other place and back, a hundred times: nothing drifts, and nothing is left behind."""
    near, far = policies(kvjax.Dense(), CODECS["int4"], CODECS["int8"])
    _, cache = fed(near, (0, 16, 32, 48))
    wanted, _ = MODEL.apply(PARAMS, TEXT[:, 48:52], cache)
    live = None
    for turn in range(100):
        cache = kvjax.convert(cache, [far, near] if turn % 2 else far)  # half of the layers too
        cache = kvjax.convert(cache, near)
        count = len(jax.live_arrays())
        assert live is None or count <= live
        live = count if turn == 1 else live
    found, _ = MODEL.apply(PARAMS, TEXT[:, 48:52], cache)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("name", ["offloaded", "offloaded_static"])
@pytest.mark.parametrize("bits", [16, 4])
def test_generation_with_a_cache_on_the_host(tiny_llama, name, bits):
    place = {"offloaded": "dynamic", "offloaded_static": "static"}[name]
    prompts = ["A cache of keys and values" * 6, "abc"]
    at = {"max_new_tokens": 90, "eos_token_ids": ()}
    wanted = kvjax.generate(tiny_llama, prompts, cache=kvjax.policy(place, bits=bits), **at)
    found = kvjax.generate(tiny_llama, prompts, cache=kvjax.policy(name, bits=bits), **at)
    assert found.tokens == wanted.tokens
    assert_on_host(found.cache)
    assert set(found.stats.cache_bytes) == {"host", "device"}
    assert found.stats.compilations <= 6
    more = kvjax.generate(tiny_llama, [[65]] * 2, cache=found.cache, max_new_tokens=4)
    assert_on_host(more.cache)


CONFIG = tiny_config(num_hidden_layers=2, windows=(None, None), head_dim=16)
COPIED = {
    "dense-raw": (kvjax.Dense(), kvjax.Raw(), kvjax.Raw()),
    "dense-int4": (kvjax.Dense(), CODECS["int4"], CODECS["int8"]),
    "ring-int4": (kvjax.Ring(sinks=4), CODECS["int4"], CODECS["int8"]),
}


def compiled(name, max_len, form):
    model = Architecture(CONFIG)
    layout, *codecs = COPIED[name]
    if name.startswith("ring"):
        layout = replace(layout, window=max_len // 2)
    policy = kvjax.CachePolicy(layout, *codecs, kvjax.Host())
    cache = kvjax.init_cache(CONFIG, policy, batch=2, max_len=max_len)

    def step(params, token, cache):
        logits, cache = model.apply(params, token[:, None], cache)
        return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), cache

    def loop(params, token, cache):
        def go_on(carry):
            return jnp.all(carry[1].length < 20)

        return jax.lax.while_loop(go_on, lambda carry: step(params, *carry), (token, cache))

    token = jnp.zeros(2, jnp.int32)
    run = {"step": step, "while_loop": loop}[form]
    lowered = jax.jit(run, donate_argnums=2).lower(model.abstract_params(), token, cache)
    return lowered.compile(), cache


@pytest.mark.parametrize("form", ["step", "while_loop"])
@pytest.mark.parametrize("name", COPIED)
def test_a_body_on_the_host_is_aliased_and_never_copied(name, form):
    """And what is on the device beside it does not depend on how long the text may be: a block."""
    temporary = []
    for max_len in (32768, 131072):
        program, cache = compiled(name, max_len, form)
        bodies = [tree_bytes((layer.keys, layer.values)) for layer in cache.layers]
        assert_no_copy(program, sum(kvjax.nbytes(cache).values()), min(bodies))
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1] < 4_000_000


def transfers(jaxpr, found=None):
    """Bytes of every move between memories in a program, to the host and to the device."""
    found = collections.Counter() if found is None else found
    for equation in jaxpr.eqns:
        if equation.primitive.name == "device_put":
            for before, after in zip(equation.invars, equation.outvars, strict=True):
                spaces = before.aval.memory_space, after.aval.memory_space
                if spaces[0] != spaces[1]:
                    size = math.prod(after.aval.shape) * after.aval.dtype.itemsize
                    found[spaces[1].name, size] += 1
        for value in equation.params.values():
            for inner in jax.tree.leaves(value, is_leaf=lambda x: hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    transfers(inner, found)
    return found


def test_every_move_is_of_a_block():
    """Of a step: keys and values of a block to the host, for each layer; what attention fetches are
    blocks too, each program's once for coarse blocks and once for fine ones."""
    policy = kvjax.CachePolicy(kvjax.Dense(), kvjax.Raw(), kvjax.Raw(), kvjax.Host())
    cache = kvjax.init_cache(CONFIG, policy, batch=2, max_len=32768)
    model = Architecture(CONFIG)
    token = jnp.zeros((2, 1), jnp.int32)
    program = jax.make_jaxpr(model.apply)(model.abstract_params(), token, cache)
    found = transfers(program.jaxpr)
    block = policy.block * CONFIG.num_key_value_heads * CONFIG.head_dim * 4
    to_host = {size: count for (place, size), count in found.items() if place == "Host"}
    assert to_host == {block: 2 * 2}  # one row's, keys and values of two layers
    fetched = {size // block for (place, size) in found if place == "Device"}
    assert max(fetched) * policy.block <= 2 * 1024  # two rows of a coarse block of tokens


def test_layers_in_different_places():
    near, far = policies(kvjax.Dense(), CODECS["int4"], CODECS["int8"])
    wanted, _ = fed(near)
    found, cache = fed([far, near])
    assert np.array_equal(found, wanted)
    assert [row["memory"] for row in memory_report(cache)] == ["pinned_host", "device"]
    assert [row["place"] for row in memory_report(cache)] == ["host", "device"]


def test_a_plan_tells_places_apart():
    policy = kvjax.policy("offloaded_static")
    cache = kvjax.init_cache(MODEL.config, policy, batch=2, max_len=512)
    found = plan(MODEL, policy, batch=2, max_len=512)
    assert found.source == "estimated"
    assert found.cache == kvjax.nbytes(cache) and set(found.cache) == {"host", "device"}
    assert found.token == {"host": 2 * 2 * 2 * 8 * 4}
    assert found.device < found.weights + found.temporaries + sum(found.cache.values())
