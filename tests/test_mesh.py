"""A mesh of devices: the same logits as on one, no copy, no cache that is gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import kvjax
from kvjax._tree import tree_bytes
from kvjax.limits import auto_mesh
from kvjax.memory import plan
from kvjax.mesh import parse_mesh, spread_over
from tests.copies import assert_no_copy
from tests.matrix import CELLS, CODECS, FULL, tiny_model
from tests.meshes import (
    SHAPES,
    abstract_cache,
    abstract_params,
    collectives,
    counted,
    mesh,
)

HEADS = {"multi-head": 8, "grouped": 2, "multi-query": 1}
"""Key-value heads of a model with 8 heads of queries."""
ROWS, MAX_LEN = 8, 64
LENGTHS = (0, 1, 5, 9, 16, 17, 23, 24)
"""Tokens of each row's prompt."""
STEPS = 12


@functools.cache
def model_of(heads):
    return tiny_model(num_attention_heads=8, num_key_value_heads=HEADS[heads])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def run(model, params, tokens, cache, lengths):
    return model.apply(params, tokens, cache, lengths=lengths)


def texts():
    rng = np.random.default_rng(5)
    return rng.integers(0, 61, (ROWS, max(LENGTHS) + STEPS)).astype(np.int32)


def logits_of(model, params, cache):
    """Those of prompts in two uneven calls, and of steps after them, real tokens alone."""
    tokens, found, at = texts(), [], np.zeros(ROWS, int)
    lengths = np.asarray(LENGTHS)
    for take in (np.minimum(lengths, 11), None, *[np.ones(ROWS, int)] * STEPS):
        take = lengths - at if take is None else take
        width = 13 if len(found) < 2 else 1
        part = np.zeros((ROWS, width), np.int32)
        for row, n in enumerate(take):
            part[row, :n] = tokens[row, at[row] : at[row] + n]
        logits, cache = run(model, params, part, cache, take.astype(np.int32))
        real = np.arange(width) < take[:, None]
        found.append(np.where(real[..., None], np.asarray(logits), 0))
        at += take
    kvjax.check(cache)
    return found, cache


@functools.cache
def truth(name, heads):
    model, params = model_of(heads)
    cache = kvjax.init_cache(model.config, CELLS[name].policy, batch=ROWS, max_len=MAX_LEN)
    return logits_of(model, params, cache)[0]


def close(found, wanted, tolerance=1e-5):
    for a, b in zip(found, wanted, strict=True):
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)


def matrix():
    """Every policy on every mesh with every kind of heads; a plain run has each policy once, and
    every second one, on the newest JAX the others."""
    newest = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 11)
    left = pytest.mark.skip(reason="one of the cells of a full run (KVJAX_FULL=1, .ci/run --full)")
    for number, name in enumerate(CELLS):
        for turn, shape in enumerate(SHAPES):
            for kind, heads in enumerate(HEADS):
                taken = (number // 2 + turn) % 4 == 0 and (number // 8 + kind) % 3 == 0
                taken &= number % 2 == newest
                marks = () if FULL or taken else (left,)
                yield pytest.param(name, shape, heads, marks=marks)


@pytest.mark.parametrize(("name", "shape", "heads"), matrix())
def test_logits_are_those_of_one_device(name, shape, heads):
    model, params = model_of(heads)
    over = mesh(shape)
    cache = kvjax.init_cache(
        model.config, CELLS[name].policy, batch=ROWS, max_len=MAX_LEN, mesh=over
    )
    placed = jax.device_put(params, model.param_shardings(over))
    shardings = [leaf.sharding for leaf in jax.tree.leaves(cache)]
    found, cache = logits_of(model, placed, cache)
    # float32 noise may flip a code, as it does between chunkings: the law's own tolerance.
    close(found, truth(name, heads), max(1e-5, CELLS[name].tolerance))
    assert [leaf.sharding for leaf in jax.tree.leaves(cache)] == shardings


# Every collective of a step that is not of the model as a whole, by hand: see docs/sharding.md.
A_LAYER = {
    "8-1-1": {},
    "1-8-1": {"all-reduce": 2},  # behind attention's and the feed-forward layer's second matrix
    "1-1-8": {"all-reduce": 2},  # the highest score, and the sums
    "2-2-2": {"all-reduce": 4},
}


def step(model, params, token, cache):
    logits, cache = model.apply(params, token[:, None], cache)
    return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), cache


def loop(model, params, token, cache):
    def one(carry):
        number, token, cache = carry
        return number + 1, *step(model, params, token, cache)

    return jax.lax.while_loop(lambda carry: carry[0] < 5, one, (0, token, cache))[1:]


def scan(model, params, token, cache):
    def one(carry, _):
        return step(model, params, *carry), None

    return jax.lax.scan(one, (token, cache), length=5)[0]


FORMS = {"step": step, "while_loop": loop, "scan": scan}


def compiled(policy, shape, *, form="step", max_len=8192, heads="multi-head", **changes):
    model, _ = tiny_model(num_attention_heads=8, num_key_value_heads=HEADS[heads], **changes)
    over = mesh(shape)
    cache = abstract_cache(model.config, policy, ROWS, max_len, over)
    params = abstract_params(model, over)
    token = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=cache.length.sharding)
    program = jax.jit(functools.partial(FORMS[form], model), donate_argnums=2)
    return program.lower(params, token, cache).compile(), cache


def block_policy(codec, layout=None, **more):
    return kvjax.CachePolicy(layout or kvjax.Dense(), codec, codec, **more)


COPIED = {
    "dense": lambda size: kvjax.policy("static"),
    "ring-sinks": lambda size: kvjax.policy("sliding_window", window=size // 2, sinks=4),
    "int4": lambda size: block_policy(CODECS["int4"]),
    "int4-tensor": lambda size: block_policy(CODECS["int4-tensor"]),
    "ring-int8": lambda size: block_policy(CODECS["int8"], kvjax.Ring(size // 2, sinks=4)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "form"),
    [*((name, "step") for name in COPIED), ("dense", "while_loop"), ("int4", "scan")],
)
def test_a_device_copies_nothing_and_gathers_nothing(name, form, shape):
    temporary = []
    for size in (131072, 524288) if "int" in name else (32768, 131072):
        program, cache = compiled(COPIED[name](size), shape, form=form, max_len=size)
        each = kvjax.nbytes(cache, cache.spread)["device"]
        layer = each // len(cache.layers)
        assert_no_copy(program, each, layer)
        assert all(found.bytes <= layer // 100 for found in collectives(program))
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_collectives_of_a_layer(shape):
    two, four = (
        counted(compiled(kvjax.policy("static"), shape, num_hidden_layers=n, windows=(None,) * n)[0])
        for n in (2, 4)
    )
    assert {kind: (four[kind] - two[kind]) / 2 for kind in four if four[kind] > two[kind]} == (
        A_LAYER[shape]
    )


def test_the_search_finds_a_cache_that_is_gathered():
    over = mesh("1-1-8")
    cache = kvjax.init_cache(model_of("grouped")[0].config, "static", max_len=MAX_LEN, mesh=over)
    keys = cache.layers[0].keys
    whole = spread_over(over, 2).sharding(jax.sharding.PartitionSpec())
    program = jax.jit(lambda x: 2 * x, out_shardings=whole).lower(keys).compile()
    assert max(found.bytes for found in collectives(program)) == tree_bytes(keys)


# Bytes.


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", [None, 4])
def test_bytes_of_a_device_are_as_planned(shape, heads, bits):
    (model, params), over = model_of(heads), mesh(shape)
    policy = kvjax.policy("static", bits=bits, block=8) if bits else kvjax.policy("static")
    cache = kvjax.init_cache(model.config, policy, batch=ROWS, max_len=1024, mesh=over)
    found = plan(model, policy, batch=ROWS, max_len=1024, mesh=over)
    sizes = AbstractMesh(SHAPES[shape], ("data", "tensor", "sequence"))
    assert found == plan(model, policy, batch=ROWS, max_len=1024, mesh=sizes)

    def held(tree, device):
        shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards)
        return sum(s.data.nbytes for s in shards if s.device == device)

    placed = jax.device_put(params, model.param_shardings(over))
    for device in over.devices.flat:
        assert held((cache.layers), device) == pytest.approx(found.cache["device"], rel=0.05)
        assert held(placed, device) == found.weights
    assert found.devices == 8


@pytest.mark.parametrize("axis", ["data", "tensor", "sequence"])
def test_bytes_and_operations_halve_as_devices_double(axis):
    # Of the cache, which is far larger than all else here.
    model, _ = tiny_model(num_attention_heads=8, num_key_value_heads=8)
    moved, flops = [], []
    for count in (1, 2, 4, 8):
        over = kvjax.make_mesh(**{axis: count})
        cache = abstract_cache(model.config, "static", ROWS, 65536, over)
        token = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=cache.length.sharding)
        program = jax.jit(functools.partial(step, model), donate_argnums=2)
        cost = program.lower(abstract_params(model, over), token, cache).compile().cost_analysis()
        moved.append(kvjax.nbytes(cache, cache.spread)["device"])
        flops.append(cost["flops"])
    for sizes, slack in ((moved, 1.0), (flops, 1.25)):
        for more, less in zip(sizes, sizes[1:], strict=False):
            assert less <= slack * more / 2
