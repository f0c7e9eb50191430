"""A mesh of devices gives the logits of one: the law matrix."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from tests.matrix import BLOCK, CELLS, CODED, FULL
from tests.meshes import HEADS, MAX_LEN, ROWS, SHAPES, close, mesh, model_of

LENGTHS = (0, 1, 5, 9, 16, 17, 23, 24)
"""Tokens of each row's prompt."""
STEPS = 12


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
    return logits_of(model, params, cache)


def stored(cache, place):
    """What a layer's codecs of blocks have stored, [batch, heads, blocks, ...] each, and the
    numbers of the blocks, int[batch, blocks], the newest last: in one order for every layout."""
    layer, split = cache.layers[place], cache.layers[place].policy.split
    length, written = (split.flushed(x) for x in (cache.length, cache.written[:, place]))
    numbers = np.asarray(split.body.positions(length, written, np.arange(split.body.slots)))
    order = np.argsort(numbers, axis=1)

    def sorted_(leaf):
        at = order.reshape(ROWS, 1, -1, *[1] * (leaf.ndim - 3))
        return np.take_along_axis(np.asarray(leaf), at, axis=2)

    both = (layer.policy.keys, layer.keys), (layer.policy.values, layer.values)
    coded = [store for codec, store in both if codec.blockwise]
    leaves = [sorted_(leaf) for leaf in jax.tree.leaves(coded)]
    return leaves, np.take_along_axis(numbers, order, axis=1)


def close_but_for_codes(found, wanted, cache, other, tolerance):
    """As ``close``; but where sums in another order have made another code, or another scale, of
    numbers at the edge between two, at most one in a thousand, a row's logits may differ as much as
    ten times."""
    flips, count, rows = 0, 0, np.zeros(ROWS, bool)
    for place in range(len(cache.layers)):
        (mine, numbers), (theirs, others) = stored(cache, place), stored(other, place)
        # Slots are rounded up on a mesh, so a ring may still have older blocks.
        newest = min(numbers.shape[1], others.shape[1])
        there = (numbers[:, -newest:] >= 0) & (others[:, -newest:] >= 0)
        assert (numbers[:, -newest:] == others[:, -newest:])[there].all()
        for a, b in zip(mine, theirs, strict=True):
            another = (a[:, :, -newest:] != b[:, :, -newest:]).reshape(*b.shape[:2], newest, -1)
            another &= there[:, None, :, None]
            flips, rows = flips + another.sum(), rows | another.any(axis=(1, 2, 3))
        count += there.sum() * cache.layers[place].kv_heads * BLOCK * 8
    assert flips <= 1 + count / 1000  # these texts have few of them
    for a, b in zip(found, wanted, strict=True):
        limit = tolerance * np.where(rows, 10, 1) * max(np.abs(b).max(), 1e-30)
        assert (np.abs(a - b).max(axis=(1, 2)) <= limit).all()


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


@pytest.mark.parametrize(("name", "shape", "heads"), list(matrix()))
def test_logits_are_those_of_one_device(name, shape, heads):
    model, params = model_of(heads)
    over = mesh(shape)
    cache = kvjax.init_cache(
        model.config, CELLS[name].policy, batch=ROWS, max_len=MAX_LEN, mesh=over
    )
    placed = jax.device_put(params, model.param_shardings(over))
    shardings = [leaf.sharding for leaf in jax.tree.leaves(cache)]
    found, cache = logits_of(model, placed, cache)
    assert [leaf.sharding for leaf in jax.tree.leaves(cache)] == shardings
    wanted, other = truth(name, heads)
    if name in CODED:
        close_but_for_codes(found, wanted, cache, other, CELLS[name].tolerance)
    else:
        close(found, wanted, max(1e-5, CELLS[name].tolerance))


def test_any_axes_in_any_order_serve():
    model, params = model_of("grouped")
    devices = np.array(jax.devices())
    wanted, _ = truth("dense-raw-device", "grouped")
    meshes = [
        Mesh(devices[:2], ("tensor",)),
        Mesh(devices[4:8].reshape(2, 2), ("sequence", "data")),
        # With explicit axes, as jax.make_mesh gives them by itself on newer versions.
        jax.make_mesh((2, 2), ("tensor", "data"), axis_types=(jax.sharding.AxisType.Explicit,) * 2),
        kvjax.make_mesh(),
    ]
    for over in meshes:
        cache = kvjax.init_cache(model.config, "static", batch=ROWS, max_len=MAX_LEN, mesh=over)
        placed = jax.device_put(params, model.param_shardings(over))
        close(logits_of(model, placed, cache)[0], wanted)
