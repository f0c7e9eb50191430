"""The operations of a cache, against lists of tokens."""

import functools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from matrix import CELLS, tiny_config

import kvjax
from kvjax.cache import REWOUND_TOO_FAR
from kvjax.rotary import rotary_table

CONFIG = tiny_config(num_hidden_layers=2)
BATCH, KV, DIM, MAX_LEN = 3, 2, 8, 20
TABLE = rotary_table(1.0 / 10000.0 ** (np.arange(0, DIM, 2) / DIM), MAX_LEN)


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(policy=None, tokens=5, max_len=MAX_LEN, batch=BATCH):
    cache = kvjax.init_cache(CONFIG, policy, batch=batch, max_len=max_len)
    for layer in range(2):
        keys = random(batch, KV, tokens, DIM, seed=layer)
        cache = kvjax.append(cache, layer, keys, keys + 1, rotary=TABLE)
    return kvjax.advance(cache, tokens)


@functools.partial(jax.jit, donate_argnums=0)
def one_call(cache, keys, values, queries, rows):
    settings = {"rotary": TABLE, "lengths": rows}
    for layer in range(2):
        cache = kvjax.append(cache, layer, keys, values, **settings)
    found = kvjax.attend(queries, cache, 1, window=6, **settings)
    plain = kvjax.attend(queries, cache, 1, window=6, path="reference", **settings)
    return kvjax.advance(cache, keys.shape[2], rows), found, plain


class CacheMachine(RuleBasedStateMachine):
    """Random sequences of operations; each row of the model is a list of (key, value) pairs."""

    def __init__(self):
        super().__init__()
        self.cache = kvjax.init_cache(CONFIG, batch=BATCH, max_len=MAX_LEN)
        self.rows = [[] for _ in range(BATCH)]
        self.seed = 0
        self.overflowed = [False] * BATCH

    @rule(new=st.sampled_from([1, 4, 9, 24]), data=st.data())
    def append(self, new, data):
        lengths = [data.draw(st.integers(0, new)) for _ in range(BATCH)]
        self.seed += 1
        keys = random(BATCH, KV, new, DIM, seed=self.seed)
        values = random(BATCH, KV, new, DIM, seed=1000 + self.seed)
        queries = random(BATCH, 2 * KV, new, DIM, seed=2000 + self.seed)
        rows = np.asarray(lengths, np.int32)
        self.cache, found, plain = one_call(self.cache, keys, values, queries, rows)
        found, plain = np.asarray(found), np.asarray(plain)
        for row, count in enumerate(lengths):
            if len(self.rows[row]) + count > MAX_LEN:
                self.overflowed[row] = True
                continue
            for token in range(count):
                at = len(self.rows[row])
                key = [naive.rotate(k.astype(float), at) for k in keys[row, :, token]]
                self.rows[row].append((np.array(key), values[row, :, token].astype(float)))
                for head in range(2 * KV):
                    wanted = naive.attention(
                        naive.rotate(queries[row, head, token].astype(float), at),
                        [k[head // 2] for k, _ in self.rows[row]],
                        [v[head // 2] for _, v in self.rows[row]],
                        window=6,
                    )
                    np.testing.assert_allclose(found[row, head, token], wanted, atol=1e-5)
                    np.testing.assert_allclose(plain[row, head, token], wanted, atol=1e-5)

    @rule(data=st.data())
    def rewind(self, data):
        back = [data.draw(st.integers(0, len(row))) for row in self.rows]
        self.cache = jax.jit(kvjax.rewind)(self.cache, np.asarray(back, np.int32))
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, back, strict=True)]

    @precondition(lambda self: not any(self.overflowed))
    @rule()
    def go_on_with_a_fork(self):
        other = kvjax.fork(self.cache)
        jax.tree.map(lambda leaf: leaf.delete(), self.cache)
        self.cache = other

    @invariant()
    def holds_what_the_lists_hold(self):
        keys, values, positions = (np.asarray(x) for x in kvjax.read(self.cache, 0))
        for row, tokens in enumerate(self.rows):
            slots = np.flatnonzero(positions[row] >= 0)
            assert positions[row][slots].tolist() == list(range(len(tokens)))
            for slot, (key, value) in zip(slots, tokens, strict=True):
                np.testing.assert_allclose(keys[row, :, slot], key, atol=1e-5)
                np.testing.assert_array_equal(values[row, :, slot], value)
        assert np.asarray(self.cache.length).tolist() == [len(row) for row in self.rows]
        assert (np.asarray(self.cache.status) & 1).astype(bool).tolist() == self.overflowed


TestCacheMachine = CacheMachine.TestCase


def test_bytes_are_those_of_the_arrays():
    for name, size in (
        ("dense-raw-device", 4), ("dense-bfloat16-device", 2), ("dense-float16-device", 2),
    ):  # fmt: skip
        cache = kvjax.init_cache(CONFIG, CELLS[name].policy, batch=3, max_len=100)
        assert kvjax.nbytes(cache) == {"device": 2 * 2 * 3 * KV * 100 * DIM * size}


@pytest.mark.parametrize("name", CELLS)
def test_users_see_the_real_shape_and_dtype(name):
    cache = filled(CELLS[name].policy)
    keys, values, positions = kvjax.read(cache, 0)
    assert keys.shape == values.shape == (BATCH, KV, MAX_LEN, DIM)
    assert keys.dtype == jnp.dtype(cache.layers[0].policy.keys.dtype)
    assert positions.tolist() == [[*range(5), *[-1] * 15]] * BATCH


def test_every_leaf_is_committed():
    cache = kvjax.init_cache(CONFIG, batch=2, max_len=8)
    assert all(leaf.committed for leaf in jax.tree.leaves(cache))


def test_overflow_in_a_users_own_loop_is_recorded_and_raised():
    cache = filled(tokens=5, max_len=6, batch=2)

    @jax.jit
    def step(cache):
        for layer in range(2):
            one = jnp.full((2, KV, 1, DIM), 9.0)
            cache = kvjax.append(cache, layer, one, one)
        return kvjax.advance(cache, 1)

    kvjax.check(cache)
    cache = step(cache)
    kvjax.check(cache)
    full = [np.asarray(leaf) for leaf in jax.tree.leaves(cache.layers)]
    cache = step(step(cache))
    assert cache.length.tolist() == [6, 6]
    for before, after in zip(full, jax.tree.leaves(cache.layers), strict=True):
        assert np.array_equal(before, np.asarray(after))
    with pytest.raises(kvjax.CacheOverflowError, match=r"holds 6 tokens .* row\(s\) 0, 1"):
        kvjax.check(cache)


def test_a_padded_chunk_at_the_end_keeps_what_is_there():
    """Padding that reaches past the capacity must not move real tokens down."""
    cache = filled(tokens=5, max_len=8, batch=1)
    before = np.asarray(cache.layers[0].keys)
    chunk = random(1, KV, 8, DIM, seed=9)
    cache = kvjax.append(cache, 0, chunk, chunk, lengths=jnp.asarray([3], jnp.int32))
    after = np.asarray(cache.layers[0].keys)
    assert np.array_equal(after[:, :, :5], before[:, :, :5])
    assert np.array_equal(after[:, :, 5:8], chunk[:, :, :3])


def test_rewinding_past_the_beginning():
    cache = filled()
    with pytest.raises(ValueError, match="-1 is negative"):
        kvjax.rewind(cache, -1)
    cache = kvjax.rewind(cache, jnp.asarray([2, 5, 6], jnp.int32))
    assert cache.length.tolist() == [3, 0, 0]
    assert cache.written.tolist() == [5, 5, 5]
    assert cache.status.tolist() == [0, 0, REWOUND_TOO_FAR]
    with pytest.raises(kvjax.CacheOverflowError, match=r"row\(s\) 2 were rewound"):
        kvjax.check(cache)


def test_a_fork_survives_the_donation_of_the_first():
    cache = filled()
    copy = kvjax.fork(cache)
    jax.jit(lambda c: kvjax.rewind(c, 1), donate_argnums=0)(cache)
    assert copy.length.tolist() == [5, 5, 5]
    assert np.isfinite(np.asarray(copy.layers[0].keys)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_len": 0}, "max_len must be a whole number, at least 1, got 0"),
        ({"max_len": 4, "batch": 0}, "batch must be a whole number, at least 1, got 0"),
        ({"max_len": 4, "policy": [kvjax.policy()]}, "1 policies for a model of 2 layers"),
        (
            {"max_len": 4, "policy": kvjax.CachePolicy(kvjax.Dense(8))},
            "the layout holds 8 positions, max_len asks 4",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kvjax.init_cache(CONFIG, **arguments)


def test_unknown_policies_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="unknown cache policy 'paged': this version has 'static'"):
        kvjax.policy("paged")
    with pytest.raises(ValueError, match="floating-point numbers, got dtype 'int8'"):
        kvjax.policy("static", dtype="int8")


def test_shapes_that_do_not_fit_are_refused():
    cache = filled()
    with pytest.raises(ValueError, match=r"keys must be \[batch=3"):
        kvjax.append(cache, 0, random(2, KV, 1, DIM), random(2, KV, 1, DIM))
    with pytest.raises(ValueError, match=r"do not fit keys"):
        kvjax.attend(random(3, 3, 1, DIM), cache, 0)
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        kvjax.attend(random(3, 4, 1, DIM), cache, 0, window=0)
    with pytest.raises(ValueError, match="unknown attention path 'fast'"):
        kvjax.attend(random(3, 4, 1, DIM), cache, 0, path="fast")


def test_a_cache_shows_itself_in_a_line():
    shown = repr(filled())
    assert shown.startswith("KVCache(2 layers of CachePolicy(layout=Dense(max_len=20), keys=Raw(")
    assert shown.endswith("length=[5 5 5])") and "\n" not in shown
