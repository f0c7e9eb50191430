"""Caches that operations accept or reject: within a call, stacked, from a file, of other policies;
and calls in the wrong order."""

import copy
import functools
import itertools
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache.checks import NO_SUCH_TOKEN, OUT_OF_STEP
from kvjax.layouts import Dense, Growing, Ring
from tests import laws
from tests.matrix import CODECS, tiny_config, tiny_model

WINDOW, MAX_LEN = 12, 64
MODEL, PARAMS = tiny_model(windows=(None, WINDOW))
TOKENS = np.random.default_rng(0).integers(0, 50, (2, 40)).astype(np.int32)
CODEC = CODECS["int4"]

POLICIES = {
    "static": "static",
    "dynamic": kvjax.CachePolicy(Growing(start=48)),
    "ring": kvjax.policy("sliding_window", window=WINDOW),
    "sinks": kvjax.policy("sliding_window", window=WINDOW, sinks=3),
    "quantized": kvjax.CachePolicy(Dense(), CODEC, CODEC, block=8),
    "host": kvjax.CachePolicy(Dense(), placement=kvjax.Host(), block=8),
    "hybrid": kvjax.policy("hybrid"),
}
"""Policies for a model whose second layer has a window."""

JOINED = [{"static", "dynamic", "host", "hybrid"}]
"""Groups that store the same numbers and show the same tokens."""


@jax.jit
def step(tokens, cache, lengths=None):
    return MODEL.apply(PARAMS, tokens, cache, lengths=lengths, last_only=True)


@functools.cache
def one_row(name, row):
    """A cache with more tokens than a window, and its next logits."""
    cache, tokens = kvjax.init_cache(MODEL.config, POLICIES[name], max_len=MAX_LEN), TOKENS[[row]]
    for start, count in ((0, 15), (15, 14 + row)):
        _, cache = step(tokens[:, start : start + 15], cache, np.array([count], np.int32))
    return cache, np.asarray(after(cache, row))


def after(cache, *rows):
    """The logits of one more token of these rows, by the program that filled them."""
    lengths = np.ones(len(rows), np.int32)
    logits, cache = step(TOKENS[list(rows), -15:], cache, lengths)
    kvjax.check(cache)
    return logits


@pytest.mark.slow(but=("hybrid-static", "dynamic-sinks"))
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(pair, id="-".join(pair), marks=[pytest.mark.rare] * (pair[0] > pair[1]))
        for pair in itertools.permutations(POLICIES, 2)
    ],
)
def test_rows_of_two_policies_in_one_cache(names):
    """Joined rows continue exactly as alone, or an error is raised."""
    (first, wanted), (second, others) = (one_row(name, row) for row, name in enumerate(names))
    if not any(set(names) <= alike for alike in JOINED):
        with pytest.raises(ValueError, match=r"show different tokens: kvjax\.convert"):
            kvjax.concatenate([first, second])
        return
    joined = jax.jit(lambda *caches: kvjax.concatenate(caches))(first, second)
    assert joined.length.tolist() == [29, 30]
    for found, right in zip(np.asarray(after(joined, 0, 1)), (wanted, others), strict=True):
        assert np.abs(found - right).max() <= 1e-5 * np.abs(right).max()


@pytest.mark.parametrize("first", ["short", "long"])
def test_rings_of_other_slack_and_length_in_one_cache(first):
    """The largest ring can hold the rows of all caches."""
    short = kvjax.policy("hybrid", slack=10)
    caches = {
        "short": kvjax.init_cache(MODEL.config, short, max_len=16),
        "long": kvjax.init_cache(MODEL.config, POLICIES["hybrid"], max_len=MAX_LEN),
    }
    for name, counts in {"short": (10,), "long": (15, 15)}.items():
        for start, count in zip((0, 15), counts, strict=False):
            _, caches[name] = step(TOKENS[:1, start : start + 15], caches[name], np.array([count]))
    wanted = {name: np.asarray(after(cache, 0)) for name, cache in caches.items()}
    names = [first, *(name for name in caches if name != first)]
    joined = jax.jit(lambda *x: kvjax.concatenate(x))(*(caches[name] for name in names))
    for name, found in zip(names, np.asarray(after(joined, 0, 0)), strict=True):
        assert np.abs(found - wanted[name]).max() <= 1e-5 * np.abs(found).max()


def test_a_cache_that_a_program_holds_is_joined_to_one_that_it_is_given():
    cache, _ = one_row("static", 0)
    joined = jax.jit(lambda c: kvjax.concatenate([c, cache]))(cache)
    assert joined.length.tolist() == [29, 29]
    with pytest.raises(ValueError, match="caches must be a list of caches, got a list with a str"):
        kvjax.concatenate({"a": cache})


def test_a_generator_of_caches():
    cache, _ = one_row("static", 0)
    assert kvjax.concatenate(each for each in (cache, cache)).batch == 2
    with pytest.raises(ValueError, match="caches must not be empty"):
        kvjax.concatenate([])


# Within a call.


KEYS, VALUES = np.random.default_rng(1).normal(size=(2, 2, 2, 40, 8)).astype(np.float32)
QUERIES = np.random.default_rng(2).normal(size=(2, 4, 20, 8)).astype(np.float32)
ONE = tiny_config(num_hidden_layers=1, windows=(None,))
HALF = np.array([20, 11], np.int32)
"""Real tokens of a call of 20."""


@pytest.mark.slow(but=("static-20", "sinks-20"))
@pytest.mark.parametrize("new", [pytest.param(5, marks=pytest.mark.rare), 20])
@pytest.mark.parametrize(
    "policy",
    [
        "static",
        kvjax.policy("sliding_window", window=18, sinks=2, slack=20),
        kvjax.CachePolicy(Dense(), CODEC, CODEC, block=8),
        kvjax.CachePolicy(Dense(), CODEC, CODEC, block=8, prefill="exact"),
        kvjax.CachePolicy(Dense(), placement=kvjax.Host(), block=8),
        kvjax.CachePolicy(Ring(18, sinks=2, slack=20), CODEC, CODEC, block=8),
        kvjax.CachePolicy(Ring(18, sinks=2, slack=20), placement=kvjax.Host(), block=8),
    ],
    ids=["static", "sinks", "quantized", "exact", "host", "quantized-sinks", "host-sinks"],
)
def test_read_shows_what_the_newest_query_of_a_call_sees(policy, new):
    @jax.jit
    def call(cache):
        for start in (0, 20):
            count = 20 if start == 0 else new
            lengths = HALF.clip(0, count)
            part = (x[:, :, start : start + count] for x in (KEYS, VALUES))
            cache = kvjax.append(cache, 0, *part, lengths=lengths)
            if start == 0:
                cache = kvjax.advance(cache, count)
        return kvjax.attend(QUERIES[:, :, :new], cache, 0), kvjax.read(cache, 0)

    mixed, (keys, values, at) = call(kvjax.init_cache(ONE, policy, batch=2, max_len=40))
    held = HALF + HALF.clip(0, new)
    for row in range(2):
        last = HALF.clip(0, new)[row] - 1
        there = np.asarray(at[row]) >= 0
        assert at[row].max() == held[row] - 1
        if policy != "static" and isinstance(policy.layout, Ring):
            there &= (at[row] > held[row] - 1 - 18) | (at[row] < 2)
        for head in range(4):
            scores = np.asarray(keys[row, head // 2]) @ QUERIES[row, head, last] / 8**0.5
            weights = np.where(there, np.exp(scores - scores.max()), 0)
            wanted = weights / weights.sum() @ np.asarray(values[row, head // 2])
            np.testing.assert_allclose(mixed[row, head, last], wanted, atol=2e-6)


def test_a_call_goes_by_the_lengths_of_its_first_append():
    """Lengths need not be given again; different ones set the status."""

    @functools.partial(jax.jit, static_argnames="again")
    def call(cache, lengths, other, again):
        for layer in range(2):
            given = other if again == "append" and layer else lengths if layer == 0 else None
            cache = kvjax.append(cache, layer, KEYS, VALUES, lengths=given)
        return kvjax.advance(cache, 40, lengths=other if again == "advance" else None)

    lengths, other = np.array([40, 7]), np.array([40, 8])
    empty = kvjax.init_cache(MODEL.config, batch=2, max_len=40)
    plain = call(empty, lengths, lengths, "nowhere")
    assert plain.length.tolist() == [40, 7] and not plain.status.any()
    for again in ("append", "advance"):
        same, late = (call(empty, lengths, x, again) for x in (lengths, other))
        assert not same.status.any()
        assert late.length.tolist() == [40, 7] and late.status.tolist() == [0, OUT_OF_STEP]
        with pytest.raises(ValueError, match=r"other lengths of row\(s\) 1 than the first append"):
            kvjax.check(late)


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [pytest.param(0, marks=pytest.mark.rare), 1])
def test_layers_may_come_in_any_order(prefetch):
    codec = kvjax.CachePolicy(Dense(), CODEC, CODEC, kvjax.Host(prefetch), block=8)
    config = tiny_config(num_hidden_layers=3, windows=(None,) * 3)

    @functools.partial(jax.jit, static_argnames="order")
    def call(cache, order):
        found = {}
        for layer in order:
            numbers = KEYS[:, :, layer : layer + 20], VALUES[:, :, layer : layer + 20]
            cache = kvjax.append(cache, layer, *numbers)
            found[layer] = kvjax.attend(QUERIES, cache, layer)
        return kvjax.advance(cache, 20), [found[layer] for layer in range(3)]

    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        cache = kvjax.init_cache(config, codec, batch=2, max_len=40)
        for _ in range(2):
            cache, mixed = call(cache, order)
        results.append(mixed)
    for a, b in zip(*results, strict=True):
        assert np.array_equal(a, b)


IN_A_CALL = {
    "rewind": lambda c: kvjax.rewind(c, 1),
    "rewindable": kvjax.rewindable,
    "reset": kvjax.reset,
    "concatenate": lambda c: kvjax.concatenate([c, c]),
    "convert": lambda c: kvjax.convert(c, "static"),
    "grow": lambda c: kvjax.grow(c, 100),
    "migrate": lambda c: kvjax.migrate(c, kvjax.Host()),
    "make_room": lambda c: kvjax.make_room(c, 100),
    "apply": lambda c: MODEL.apply(PARAMS, TOKENS[:, :1], c),
}


def test_what_a_call_must_end_before():
    cache = kvjax.init_cache(MODEL.config, "dynamic", batch=2)
    cache = kvjax.append(cache, 0, KEYS[:, :, :3], VALUES[:, :, :3])
    for name, operation in IN_A_CALL.items():
        with pytest.raises(ValueError, match=rf"{name}: a call has begun, and its 3 token\(s\)"):
            operation(cache)
    # Rows can be selected, each with its part of the call.
    for rows in (kvjax.fork, lambda c: kvjax.select(c, [0, 1]), lambda c: kvjax.repeat(c, 1)):
        other = kvjax.append(rows(cache), 1, KEYS[:, :, :3], VALUES[:, :, :3])
        assert kvjax.advance(other, 3).length.tolist() == [3, 3]


# Values that are no cache, or an incomplete one.


def test_shapes_are_copied_as_they_are():
    shapes = jax.eval_shape(lambda: kvjax.init_cache(MODEL.config, "static", batch=2, max_len=8))
    assert copy.deepcopy(shapes) == pickle.loads(pickle.dumps(shapes)) == shapes
    with pytest.raises(
        ValueError, match=r"of shapes only: use jax\.eval_shape\(kvjax\.fork, \.\.\.\)"
    ):
        kvjax.fork(shapes)
    lists = jax.tree.map(lambda x: x.tolist(), kvjax.init_cache(MODEL.config, max_len=8))
    with pytest.raises(ValueError, match=r"the cache has a (int|float) in place of an array"):
        kvjax.fork(lists)


def test_stacked_caches_are_for_vmap():
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=8)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), cache)
    rows = np.array([1, 0])
    found = jax.vmap(lambda c: kvjax.select(c, rows))(stacked)
    assert found.layers[0].keys.shape == (2, 2, 2, 8, 8)
    kvjax.check(stacked)
    for name, operation in IN_A_CALL.items():
        with pytest.raises(ValueError, match=rf"{name}: length is \[2, 2\], not \[batch\]"):
            operation(stacked)
    with pytest.raises(ValueError, match=r"lm\.apply: length is \[\], not \[batch\]"):
        jax.vmap(lambda c: MODEL.apply(PARAMS, TOKENS[:1, :1], c))(cache)


def test_arrays_that_are_not_those_of_the_policy():
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=8)
    short = replace(cache.layers[1], values=cache.layers[1].values[:, :, :4])
    broken = replace(cache, layers=(cache.layers[0], short))
    with pytest.raises(ValueError, match=r"values of layer 1 are float32\[2, 2, 4, 8\], but its"):
        kvjax.select(broken, [0])
    halves = jax.tree.map(lambda x: x.astype("bfloat16") if x.ndim == 4 else x, cache)
    with pytest.raises(ValueError, match=r"keys of layer 0 are bfloat16.*policy needs float32"):
        kvjax.append(halves, 0, KEYS[:, :, :1], VALUES[:, :, :1])
    for wrong in (None, MODEL, cache.layers[0]):
        with pytest.raises(ValueError, match=r"kvjax\.fork takes a KVCache, see init_cache"):
            kvjax.fork(wrong)


@pytest.mark.slow(but=("pickled-quantized", "deeply-static", "fetched-host"))
@pytest.mark.parametrize("name", ["static", "quantized", "host"])
@pytest.mark.parametrize(
    "way",
    [lambda c: pickle.loads(pickle.dumps(c)), copy.copy, copy.deepcopy, jax.device_get],
    ids=["pickled", "copied", "deeply", "fetched"],
)
def test_a_cache_that_was_saved_goes_on(name, way):
    cache, wanted = one_row(name, 0)
    back = way(cache)
    if way is jax.device_get:
        assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(back))
        back = kvjax.fork(back)  # works outside jit
    kinds = [[x.sharding.memory_kind for x in jax.tree.leaves(c)] for c in (cache, back)]
    assert kinds[0] == kinds[1]
    assert np.array_equal(after(back, 0), wanted)


@pytest.mark.skipif(not laws.FETCHES, reason="before JAX 0.10.2 a CPU has one memory")
def test_a_cache_in_another_memory_is_not_taken_inside_jit():
    cache, _ = one_row("host", 0)
    near = jax.device_put(cache, jax.memory.Space.Device)
    with pytest.raises(
        ValueError, match=r"some arrays .* not in the kind of memory .* kvjax\.fork\(cache\)"
    ):
        after(near, 0)


def test_a_cache_on_a_mesh_is_no_pickle():
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=8, mesh=kvjax.make_mesh(data=2))
    assert copy.deepcopy(cache).mesh_sharding == cache.mesh_sharding
    with pytest.raises(ValueError, match=r"can't be pickled.*kvjax\.migrate\(cache, mesh=None\)"):
        pickle.dumps(cache)


# Tokens outside the vocabulary.


def test_tokens_of_narrow_dtypes_are_compared_as_numbers():
    model, params = tiny_model(vocab_size=256)
    tokens = np.full((2, 3), 255, np.uint8)
    cache = kvjax.init_cache(model.config, batch=2, max_len=8)
    logits, cache = jax.jit(model.apply)(params, tokens, cache)
    kvjax.check(cache)
    wanted = jax.jit(model.apply)(params, tokens)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)


@pytest.mark.rare
def test_unknown_tokens_are_told():
    size = MODEL.config.vocab_size
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=8)
    wrong = np.array([[1, 2], [3, size]], np.int32)
    for tokens, value in ((wrong, size), (wrong - 4, -3)):
        with pytest.raises(ValueError, match=rf"token id {value} in row .: the vocabulary has"):
            MODEL.apply(PARAMS, tokens, cache)
    # Padding may have any value.
    fine, _ = MODEL.apply(PARAMS, wrong, cache, lengths=np.array([2, 1]))
    assert np.isfinite(fine).all()
    traced = jax.jit(MODEL.apply)
    _, after = traced(PARAMS, wrong, cache)
    assert after.status.tolist() == [0, NO_SUCH_TOKEN]
    with pytest.raises(
        ValueError, match=r"row\(s\) 1 were given a token id that is not in the voc"
    ):
        kvjax.check(after)
    _, after = traced(PARAMS, wrong, cache, lengths=np.array([2, 1]))
    assert not after.status.any()
    logits = traced(PARAMS, wrong)
    assert np.isfinite(logits[0]).all() and np.isfinite(logits[1, 0]).all()
    assert np.isnan(logits[1, 1]).all()
    real = np.array([2, 1])
    last = jax.jit(lambda t: MODEL.apply(PARAMS, t, lengths=real, last_only=True))(wrong)
    assert np.isfinite(last).all()
