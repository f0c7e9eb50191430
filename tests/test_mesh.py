"""A mesh of devices gives the logits of one: the law matrix."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvjax
from tests.matrix import CELLS, CODED, FULL
from tests.meshes import (
    HEADS,
    MAX_LEN,
    ROWS,
    SHAPES,
    close,
    mesh,
    model_of,
)


@pytest.fixture(autouse=True)
def forget_each():
    """Forget a test's programs: a mesh has many times the memory maps of one device."""
    yield
    jax.clear_caches()


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


def held(cache, layer):
    """What a layer has, by row and position, in one order for every layout."""
    numbers = kvjax.read(cache, layer)
    order = np.argsort(np.asarray(numbers[2]), axis=1)[:, None, :, None]
    count = int((np.asarray(numbers[2]) >= 0).sum(axis=1).max())
    keys, values = (
        np.take_along_axis(np.asarray(x, np.float32), order, axis=2)[:, :, -count:]
        for x in numbers[:2]
    )
    there = np.sort(np.asarray(numbers[2]), axis=1)[:, None, -count:, None] >= 0
    return np.where(there, keys, 0), np.where(there, values, 0)


def close_but_for_codes(found, wanted, cache, other, tolerance):
    """As ``close``; but where sums in another order have made another code of a number at the edge
    between two, at most one in a thousand, a row's logits may differ as much as ten times."""
    flips, count, rows = 0, 0, np.zeros(ROWS, bool)
    for layer in range(len(cache.layers)):
        for a, b in zip(held(cache, layer), held(other, layer), strict=True):
            other_code = np.abs(a - b) > 1e-4 * np.abs(b).max()
            flips, count = flips + other_code.sum(), count + b.size
            rows |= other_code.any(axis=(1, 2, 3))
    assert flips <= count / 1000
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
