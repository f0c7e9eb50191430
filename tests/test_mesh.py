"""A mesh of devices gives what one gives: caches of one layer, and whole models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from kvjax.codecs import Raw
from kvjax.layouts import Dense, Ring
from tests import laws
from tests.matrix import BLOCK, CODECS, HEADS, MESH_PAIRS, cells, mesh_cells, policy_case, some
from tests.meshes import MAX_LEN, ROWS, SHAPES, close, mesh, model_of

LENGTHS = (0, 1, 5, 9, 16, 17, 23, 24)
"""Tokens of each row's prompt."""
TAKE = np.array([8, 1, 0, 5, 8, 7, 3, 2])
"""Tokens of each row's next call."""
CHUNK = 8


@functools.cache
def alone(codecs, layout, heads):
    """The cache of one device, filled."""
    cache = laws.empty(policy_case(codecs, layout), MAX_LEN, ROWS, HEADS[heads])
    return run(cache, heads)[1]


def run(cache, heads):
    """The outputs of calls that end before, in and after a block, and the cache."""
    text, begins, found = laws.texts(ROWS, 8, HEADS[heads]), np.zeros(ROWS, int), []
    for take in (*(take for _, take in laws.in_chunks(LENGTHS, CHUNK)), TAKE):
        mixed, cache = laws.step(cache, begins, take, CHUNK, text)
        found.append((mixed, begins, take))
        begins = begins + take
    kvjax.check(cache)
    return found, cache


@pytest.mark.parametrize("cell", cells(mesh_cells(), MESH_PAIRS))
def test_a_cache_on_a_mesh_is_its_text(cell):
    check(cell)


def check(cell):
    """The law of a cell: the mixtures of plain numpy, the arrays of one device, where they were."""
    one, kv = policy_case(cell.codecs, cell.layout, cell.placement), HEADS[cell.heads]
    cache = laws.empty(one, MAX_LEN, ROWS, kv, mesh=mesh(cell.mesh))
    shardings = [leaf.sharding for leaf in jax.tree.leaves(cache)]
    found, cache = run(cache, cell.heads)
    assert [leaf.sharding for leaf in jax.tree.leaves(cache)] == shardings
    true = laws.reference_outputs(cell.codecs, cell.layout, ROWS, 8, kv)
    for mixed, begins, take in found:
        laws.close(mixed, laws.expected_outputs(true, begins, take, CHUNK), one.tolerance)
    other = alone(cell.codecs, cell.layout, cell.heads)
    assert np.array_equal(cache.length, other.length)
    if one.coded is not None:  # raw bodies have a tail in one place, and none in another
        assert_same_blocks(cache, other)


def assert_same_blocks(cache, other):
    """What codecs of blocks have stored of the same block is the same, bit by bit: the numbers
    came to them alike. Slots are rounded up on a mesh, so a ring may still have older blocks."""
    (mine, numbers), (theirs, others) = stored(cache), stored(other)
    newest = min(numbers.shape[1], others.shape[1])
    there = (numbers[:, -newest:] >= 0) & (others[:, -newest:] >= 0)
    assert there.any() and (numbers[:, -newest:] == others[:, -newest:])[there].all()
    for a, b in zip(mine, theirs, strict=True):
        another = (a[:, :, -newest:] != b[:, :, -newest:]).reshape(*b.shape[:2], newest, -1)
        assert not (another & there[:, None, :, None]).any()


def stored(cache):
    """What a layer's codecs of blocks have stored, [batch, heads, blocks, ...] each, and the
    numbers of the blocks, int[batch, blocks], the newest last: in one order for every layout."""
    layer, split = laws.out_of_pages(cache).layers[0], cache.layers[0].policy.split
    length, written = (split.flushed(np.asarray(x)) for x in (cache.length, cache.written[:, 0]))
    slots = jnp.arange(split.body.slots)
    numbers = np.asarray(jax.jit(split.body.positions)(length, written, slots))
    order = np.argsort(numbers, axis=1)

    def sorted_(leaf):
        at = order.reshape(ROWS, 1, -1, *[1] * (leaf.ndim - 3))
        return np.take_along_axis(np.asarray(leaf), at, axis=2)

    both = (layer.policy.keys, layer.keys), (layer.policy.values, layer.values)
    leaves = [sorted_(leaf) for leaf in jax.tree.leaves([store for _, store in both])]
    return leaves, np.take_along_axis(numbers, order, axis=1)


# Whole models.


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def step(model, params, tokens, cache, lengths):
    return model.apply(params, tokens, cache, lengths=lengths)


def logits_of(model, params, cache):
    """The logits of prompts in two uneven calls, and of one more token; real tokens only."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 61, (ROWS, max(LENGTHS) + 13)).astype(np.int32)
    found, at, lengths = [], np.zeros(ROWS, int), np.asarray(LENGTHS)
    for take in (np.minimum(lengths, 11), lengths - np.minimum(lengths, 11), TAKE):
        part = np.zeros((ROWS, 13), np.int32)
        for row, n in enumerate(take):
            part[row, :n] = tokens[row, at[row] : at[row] + n]
        logits, cache = step(model, params, part, cache, take.astype(np.int32))
        real = np.arange(13) < take[:, None]
        found.append(np.where(real[..., None], np.asarray(logits), 0))
        at += take
    kvjax.check(cache)
    return found


HYBRID = kvjax.policies.Hybrid(
    kvjax.CachePolicy(Dense(), Raw(), CODECS["int8"], block=BLOCK),
    kvjax.CachePolicy(Ring(slack=15), CODECS["int8"], Raw(), block=BLOCK),
)
MODELS = {
    "8-1-1": ("multi-query", "static", 1e-5),
    "1-8-1": ("multi-head", HYBRID, 1e-3),
    "1-1-8": ("grouped", kvjax.policy("hybrid", slack=16), 1e-5),
    "2-2-2": ("grouped", "static", 1e-5),
}
"""A model a mesh, of each kind of heads."""


@functools.cache
def truth(heads, policy):
    model, params = model_of(heads)
    cache = kvjax.init_cache(model.config, policy, batch=ROWS, max_len=MAX_LEN)
    return logits_of(model, params, cache)


@pytest.mark.parametrize("shape", some(SHAPES, "2-2-2"))
def test_logits_are_those_of_one_device(shape):
    heads, policy, tolerance = MODELS[shape]
    model, params = model_of(heads)
    over = mesh(shape)
    cache = kvjax.init_cache(model.config, policy, batch=ROWS, max_len=MAX_LEN, mesh=over)
    placed = jax.device_put(params, model.param_shardings(over))
    close(logits_of(model, placed, cache), truth(heads, policy), tolerance)


def meshes():
    """Of any axes, in any order."""
    devices, explicit = np.array(jax.devices()), (jax.sharding.AxisType.Explicit,) * 2
    return {
        "tensor": Mesh(devices[:2], ("tensor",)),
        "sequence-data": Mesh(devices[4:8].reshape(2, 2), ("sequence", "data")),
        # With explicit axes, as jax.make_mesh gives them by itself on newer versions.
        "explicit": jax.make_mesh((2, 2), ("tensor", "data"), axis_types=explicit),
        "one": kvjax.make_mesh(),
    }


@pytest.mark.slow(but=("one", "sequence-data"))
@pytest.mark.parametrize("name", ["tensor", "sequence-data", "explicit", "one"])
def test_any_axes_in_any_order_serve(name):
    model, params = model_of("grouped")
    over, wanted = meshes()[name], truth("grouped", "static")
    cache = kvjax.init_cache(model.config, "static", batch=ROWS, max_len=MAX_LEN, mesh=over)
    placed = jax.device_put(params, model.param_shardings(over))
    close(logits_of(model, placed, cache), wanted)
