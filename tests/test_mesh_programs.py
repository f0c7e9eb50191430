"""What a device of a mesh computes: no copy, no cache that is gathered, its share of the bytes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

import kvjax
from benchmarks.programs import collectives, counted, operations
from kvjax.core.pytree import tree_bytes
from kvjax.layouts import Dense, Ring
from kvjax.memory.planning import plan
from kvjax.placement.mesh import shard_over
from tests.copies import assert_no_copy
from tests.matrix import CODECS, tiny_config, tiny_model
from tests.meshes import (
    HEADS,
    MAX_LEN,
    ROWS,
    SHAPES,
    abstract_cache,
    abstract_params,
    mesh,
    model_of,
)
from tests.test_beams import one_layer
from tests.test_copies import PROGRAMS

# Every collective of a step that is not of the model as a whole, by hand: see docs/sharding.md.
A_LAYER = {
    "8-1-1": {},
    "1-8-1": {"all-reduce": 2},  # after the output projections of attention and the MLP
    "1-1-8": {"all-reduce": 2},  # the highest score, and the sums
    "2-2-2": {"all-reduce": 4},
}


def step(model, params, token, cache):
    logits, cache = model.apply(params, token[:, None], cache)
    return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), cache


def compiled(shape, heads="multi-head", **changes):
    """A model's step."""
    model, _ = tiny_model(num_attention_heads=8, num_key_value_heads=HEADS[heads], **changes)
    over = mesh(shape)
    cache = abstract_cache(model.config, "static", ROWS, 8192, over)
    params = abstract_params(model, over)
    token = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=cache.length.sharding)
    program = jax.jit(functools.partial(step, model), donate_argnums=2)
    return program.lower(params, token, cache).compile(), cache


def block_policy(codec, layout=None, **more):
    return kvjax.CachePolicy(layout or Dense(), codec, codec, **more)


COPIED = {
    "dense": lambda size: kvjax.policy("static"),
    "ring-sinks": lambda size: kvjax.policy("sliding_window", window=size // 2, sinks=4),
    "int4": lambda size: block_policy(CODECS["int4"]),
    "int4-tensor": lambda size: block_policy(CODECS["int4-tensor"]),
    "ring-int8": lambda size: block_policy(CODECS["int8"], Ring(size // 2, sinks=4)),
}


LAW = [
    pytest.param(
        name, shape, ("step", "while_loop", "scan")[(number + 2 * turn) % 3],
        marks=[pytest.mark.rare] if (number + turn) % 3 else [],
    )
    for number, name in enumerate(COPIED)
    for turn, shape in enumerate(SHAPES)
]  # fmt: skip
"""Every policy on every mesh, on every third one in each run."""


@pytest.mark.slow(but=("dense-8-1-1-step", "dense-2-2-2-step"))
@pytest.mark.parametrize(("name", "shape", "form"), LAW)
def test_a_device_copies_nothing_and_gathers_nothing(name, shape, form):
    config = tiny_config(num_hidden_layers=1, windows=(None,), num_key_value_heads=8)
    temporary = []
    for size in (131072, 524288):
        cache = abstract_cache(config, COPIED[name](size), ROWS, size, mesh(shape))
        token = jax.ShapeDtypeStruct((ROWS,), jnp.float32, sharding=cache.length.sharding)
        program = jax.jit(PROGRAMS[form], donate_argnums=1).lower(token, cache).compile()
        assert_of_a_device(program, cache)
        temporary.append(program.memory_analysis().temp_size_in_bytes)
    assert temporary[0] == temporary[1]


def assert_of_a_device(program, cache):
    each = kvjax.nbytes(cache, cache.mesh_sharding)["device"]
    layer = each // len(cache.layers)
    assert_no_copy(program, each, layer)
    assert all(found.bytes <= layer // 20 for found in collectives(program))


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_collectives_of_a_layer(shape):
    """And a model's step on a mesh copies nothing either."""
    programs = [compiled(shape, num_hidden_layers=n, windows=(None,) * n) for n in (1, 2)]
    assert_of_a_device(*programs[1])
    one, two = (counted(program) for program, _ in programs)
    assert {kind: two[kind] - one[kind] for kind in two if two[kind] > one[kind]} == A_LAYER[shape]


def test_the_search_finds_a_cache_that_is_gathered():
    over = mesh("1-1-8")
    cache = kvjax.init_cache(model_of("grouped")[0].config, "static", max_len=MAX_LEN, mesh=over)
    keys = cache.layers[0].keys
    whole = shard_over(over, 2).sharding(jax.sharding.PartitionSpec())
    program = jax.jit(lambda x: 2 * x, out_shardings=whole).lower(keys).compile()
    assert max(found.bytes for found in collectives(program)) == tree_bytes(keys)


# Bytes.


@pytest.mark.parametrize(
    "heads", [pytest.param(x, marks=[pytest.mark.rare] * (x == "multi-head")) for x in HEADS]
)
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


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "tensor", "sequence"])
def test_bytes_and_operations_halve_as_devices_double(axis):
    # Of the cache, which is far larger than all else here.
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 1}
    model, _ = tiny_model(**sizes, windows=(None,))
    moved, made = [], []
    for count in (1, 2, 4, 8):
        over = kvjax.make_mesh(**{axis: count})
        cache = abstract_cache(model.config, "static", ROWS, 65536, over)
        token = jax.ShapeDtypeStruct((ROWS,), jnp.int32, sharding=cache.length.sharding)
        program = jax.jit(functools.partial(step, model), donate_argnums=2)
        found = program.lower(abstract_params(model, over), token, cache).compile()
        moved.append(found.memory_analysis().argument_size_in_bytes)
        made.append(operations(found))
    for sizes in (moved, made):
        for more, less in itertools.pairwise(sizes):
            assert less == pytest.approx(more / 2, rel=0.05)


@pytest.mark.slow
def test_rows_are_drawn_and_checked_where_they_are():
    """Even with all settings that depend on the tokens, devices exchange only scalars: which rows
    are done, and how many draft tokens were accepted."""
    made = kvjax.compile(
        one_layer().on(kvjax.make_mesh(data=2, devices=jax.devices()[:2])), batch=2, max_len=32,
        temperature=0.8, top_p=0.9, repetition_penalty=1.2, no_repeat_ngram_size=3,
        frequency_penalty=0.1, logit_bias={3: 1.0}, min_new_tokens=2, eos_token_ids=(3,),
        logprobs=True, draft="lookup",
    )  # fmt: skip
    found = collectives(made.executables["decode"])
    assert {each.kind for each in found} == {"all-reduce"} and max(x.bytes for x in found) <= 12
