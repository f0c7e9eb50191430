"""The laws of a cell: a cache of one layer, filled in any chunks, against plain numpy."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np

import kvjax
from kvjax.cache.sections import LayerView, sections
from kvjax.core.compat import jax_0_10_2_host_memory
from kvjax.core.rotary import rotary_table
from tests import matrix, naive
from tests.matrix import OPERATIONS, PolicyCase, tiny_config

KV, GROUP, DIM, WIDTH, TOKENS = 2, 2, 8, 16, 60
LENGTHS = (44, 31, 1)
"""Tokens of the rows, before the last call of a test."""
ON_HOST = "pinned_host" if jax_0_10_2_host_memory("cpu") else "device"
"""The kind of memory that a CPU keeps bodies on the host in: before JAX 0.10.2 its own, and nothing
is fetched from there."""
FETCHES = ON_HOST == "pinned_host"
TABLE = rotary_table(1.0 / 10000.0 ** (np.arange(0, DIM, 2) / DIM))


@functools.cache
def texts(rows: int = 3, heads: int = KV * GROUP, kv: int = KV) -> tuple[np.ndarray, ...]:
    """Queries, keys and values of each row's text, float32[rows, heads, tokens, head_dim]."""
    rng = np.random.default_rng(0)
    shapes = ((rows, count, TOKENS, DIM) for count in (heads, kv, kv))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


@functools.cache
def reference_outputs(codecs: tuple[str, ...], layout: str, *of: int) -> np.ndarray:
    """What each token of each text gets, wherever a cell's cache is: [rows, heads, tokens,
    head_dim]."""
    held = matrix.policy_case(codecs, layout)
    window, sinks = held.sight
    cap = None if window is None else sinks + window - 1
    rows = [
        naive.attended(
            *(x.astype(np.float64).swapaxes(0, 1) for x in row), store=held.store, cap=cap,
            window=window, sinks=sinks, coded=held.coded,
        )
        for row in zip(*texts(*of), strict=True)
    ]  # fmt: skip
    found = np.array(rows).swapaxes(1, 2)
    found.setflags(write=False)
    return found


@jax.jit
def call(cache: Any, queries: Any, keys: Any, values: Any, lengths: Any) -> Any:
    """A step of a model of one layer, or of a stack of two: its mixture, and the cache."""
    if cache.stacks is not None:
        return _over_layers(cache, queries, keys, values, lengths)
    cache = kvjax.append(cache, 0, keys, values, rotary=TABLE, lengths=lengths)
    mixed = kvjax.attend(queries, cache, 0, rotary=TABLE, lengths=lengths)
    return mixed, kvjax.advance(cache, keys.shape[2], lengths)


def _over_layers(cache: Any, queries: Any, keys: Any, values: Any, lengths: Any) -> Any:
    """``call`` of a stack whose second layer has the heads of the first the other way round, so
    that it is told from it, and mixes the same."""

    def turned(x: Any, number: Any) -> Any:
        return jax.numpy.where(number > 0, x[:, ::-1], x)

    def one(call: Any, number: Any) -> Any:
        given = (turned(x, number) for x in (queries, keys, values))
        mixed, call = call.attend(number, *given, rotary=TABLE)
        return call, turned(mixed, number)

    begun = kvjax.step(cache, keys.shape[2], lengths=lengths)
    call, mixed = jax.lax.scan(one, begun, jax.numpy.arange(len(cache.stacks)))
    # Where the layers differ it is no number.
    apart = jax.numpy.abs(mixed - mixed[:1]).max() > 1e-5 * jax.numpy.abs(mixed).max()
    return jax.numpy.where(apart, jax.numpy.nan, mixed[0]), call.done()


def empty(
    held: PolicyCase, max_len: int, rows: int = 3, kv: int = KV, stacked: bool = False, **more: Any
) -> Any:
    """A cache for texts."""
    layers, given = 1 + stacked, {"batch": rows, "max_len": max_len, "stacked": stacked, **more}
    config = tiny_config(num_hidden_layers=layers, windows=(None,) * layers, num_key_value_heads=kv)
    return kvjax.init_cache(config, held.policy, **given)


def step(cache: Any, begins: Any, take: Any, width: int, text: Any, of: Any = None) -> Any:
    """Append ``take`` tokens to each row, from position ``begins`` on, padded to a width; their
    outputs, with zeros for the padding. ``of``: the text of each row, if it is another row's."""
    order = np.arange(len(begins)) if of is None else np.asarray(of)
    at = np.minimum(np.asarray(begins)[:, None] + np.arange(width), TOKENS - 1)
    parts = (np.take_along_axis(x[order], at[:, None, :, None], axis=2) for x in text)
    mixed, cache = call(cache, *parts, np.asarray(take, np.int32))
    real = np.arange(width) < np.asarray(take)[:, None]
    return np.where(real[:, None, :, None], np.asarray(mixed), 0), cache


def expected_outputs(
    true: np.ndarray, begins: Any, take: Any, width: int, of: Any = None
) -> np.ndarray:
    """The same of the truth."""
    order = np.arange(len(begins)) if of is None else np.asarray(of)
    at = np.minimum(np.asarray(begins)[:, None] + np.arange(width), TOKENS - 1)
    real = np.arange(width) < np.asarray(take)[:, None]
    mixed = np.take_along_axis(true[order], at[:, None, :, None], axis=2)
    return np.where(real[:, None, :, None], mixed, 0)


_TOKENS = np.random.default_rng(3).normal(size=(61, KV * (GROUP + 2), DIM)).astype(np.float32)
"""Of each token, its queries, keys and values."""


@jax.jit
def attention_outputs(tokens: Any, cache: Any, lengths: Any = None) -> Any:
    """A model of nothing but a cache, of any layers: what the tokens int[rows, new] get in each
    layer, [rows, new, channels], and the cache. It compiles in a part of a model's time."""
    numbers = jax.numpy.asarray(_TOKENS)[tokens].swapaxes(1, 2)
    queries, keys, values = jax.numpy.split(numbers, (KV * GROUP, KV * (GROUP + 1)), axis=1)
    found = []
    for layer, held in enumerate(cache.layers):
        settings = {"rotary": TABLE, "lengths": lengths}
        cache = kvjax.append(cache, layer, keys + layer, values - layer, **settings)
        found.append(kvjax.attend(queries, cache, layer, window=held.window, **settings))
    mixed = jax.numpy.concatenate(found, axis=1).swapaxes(1, 2)
    return mixed.reshape(*mixed.shape[:2], -1), kvjax.advance(cache, keys.shape[2], lengths)


def close(found: Any, true: Any, tolerance: float) -> None:
    """Finite, and equal but for so much of the largest number."""
    found, true = np.asarray(found), np.asarray(true)
    assert np.all(np.isfinite(found))
    assert np.abs(found - true).max() <= tolerance * max(np.abs(true).max(), 1e-30)


def fill(cache: Any, sizes: Any, text: Any, lengths: Any, true: Any, tolerance: float) -> Any:
    """Feed the texts in calls of ``sizes``, (width, tokens of each row); what every token gets is
    the truth, and then the cache holds the texts."""
    begins = np.zeros(len(lengths), int)
    for width, take in sizes:
        found, cache = step(cache, begins, take, width, text)
        close(found, expected_outputs(true, begins, take, width), tolerance)
        begins += take
    kvjax.check(cache)
    assert np.asarray(cache.length).tolist() == begins.tolist() == list(lengths)
    assert len({x.committed for x in jax.tree.leaves(cache)}) == 1
    return cache


def in_chunks(lengths: Any, width: int) -> list[tuple[int, np.ndarray]]:
    """Full calls, each row's rest in its last one."""
    lengths, starts = np.asarray(lengths), range(0, max(lengths), width)
    return [(width, np.clip(lengths - start, 0, width)) for start in starts]


def memory_kinds(cache: Any) -> tuple[set[str], set[str]]:
    """Kinds of memory of bodies, and of all else."""
    bodies = [x for layer in cache.layers for x in jax.tree.leaves((layer.keys, layer.values))]
    rest = [x for layer in cache.layers for x in jax.tree.leaves(layer.tail)]
    rest += [cache.length, cache.written, cache.status]
    in_body, beside = ({x.sharding.memory_kind for x in some} for some in (bodies, rest))
    return in_body, beside


def check_operation(name: str, cache: Any, true: Any, tolerance: float) -> None:
    """After an operation the texts go on as if their rows had always been there."""
    operation = OPERATIONS[name]
    begins = [
        0 if back is None else LENGTHS[row] - back
        for row, back in zip(operation.rows, operation.back, strict=True)
    ]
    kinds, dtypes = memory_kinds(cache), {x.dtype for x in jax.tree.leaves(cache)}
    changed = operation.change(cache)
    kvjax.check(changed)
    assert {x.dtype for x in jax.tree.leaves(changed)} == dtypes, name
    assert memory_kinds(changed) == kinds, name
    # As `jnp.zeros` is, unless a memory was named.
    away = any(layer.policy.placement.place == "host" for layer in changed.layers)
    named = away or name == "migrate"
    assert {x.committed for x in jax.tree.leaves(changed)} == {named}, name
    assert np.asarray(changed.length).tolist() == begins, name
    take = np.array([WIDTH, 9, 3])
    found, changed = step(changed, begins, take, WIDTH, texts(), operation.rows)
    kvjax.check(changed)
    assert {x.committed for x in jax.tree.leaves(changed)} == {named}, name
    close(found, expected_outputs(true, begins, take, WIDTH, operation.rows), tolerance)


def same_arrays(a: Any, b: Any) -> None:
    """Bit by bit; of pages, what rows have in them."""
    a, b = (kvjax.unstack(x) if getattr(x, "stacks", None) else x for x in (a, b))
    a, b = (out_of_pages(x) if getattr(x, "pools", ()) else x for x in (a, b))
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(np.asarray(one), np.asarray(other), equal_nan=True)


@jax.jit
def out_of_pages(cache: Any) -> Any:
    """A cache's bodies, each row's in the order of its slots, with 0 where they hold nothing."""
    layers = []
    for entry, held in enumerate(cache.layers):
        marks = cache.written[:, entry]
        view = LayerView(
            held, cache.length, cache.length, marks, pages=cache.table(entry, whole=True)
        )
        body = sections(view, together=True)[0]
        units = jax.numpy.arange(body.size)
        there = body.positions(units, 0).reshape(cache.batch, body.size, body.unit)[..., 0] >= 0

        def known(x: Any, there: Any = there) -> Any:
            mask = there.reshape(there.shape[0], 1, -1, *[1] * (x.ndim - 3))
            return jax.numpy.where(mask, x, jax.numpy.zeros_like(x))

        keys, values = jax.tree.map(known, body.stores())
        layers.append(dataclasses.replace(held, keys=keys, values=values))
    return dataclasses.replace(cache, layers=tuple(layers), pools=())


READ = jax.jit(lambda cache: kvjax.read(cache, 0))


def check_reading(cache: Any, dtype: Any) -> None:
    """Users see real numbers, at the positions that a row may see."""
    keys, values, positions = READ(cache)
    assert keys.shape == values.shape == (*keys.shape[:2], positions.shape[1], DIM)
    assert keys.dtype == values.dtype == np.dtype(dtype)
    layout = cache.layers[0].policy.layout
    for row, length in zip(np.asarray(positions), np.asarray(cache.length), strict=True):
        there = row[row >= 0].tolist()
        first = 0 if layout.window is None else max(0, length - layout.window)
        assert len({*there}) == len(there)
        assert {*range(min(layout.sinks, length)), *range(first, length)} <= {*there}
        assert {*there} <= {*range(length)}
