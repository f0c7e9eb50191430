"""The operations of a cache, against lists of tokens."""

import copy
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvjax
from kvjax.cache.checks import OVERFLOW, REWOUND_TOO_FAR
from kvjax.core.rotary import rotary_table
from kvjax.layouts import Dense, Growing, Ring
from tests import naive
from tests.matrix import BLOCK, CODECS, FULL, LAYOUTS, RAW, codes, policy_case, teams, tiny_config

CONFIG = tiny_config(num_hidden_layers=2)
BATCH, KV, DIM, MAX_LEN = 3, 2, 8, 20
TABLE = rotary_table(1.0 / 10000.0 ** (np.arange(0, DIM, 2) / DIM))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def filled(policy=None, tokens=5, max_len=MAX_LEN, batch=BATCH):
    cache = kvjax.init_cache(CONFIG, policy, batch=batch, max_len=max_len)
    every = [random(batch, KV, tokens, DIM, seed=layer) for layer in range(2)]
    size = min(tokens, cache.chunk or tokens)
    for start in range(0, tokens, size):
        cache = appended(cache, [keys[:, :, start : start + size] for keys in every])
    return cache


@jax.jit
def appended(cache, parts):
    for layer, part in enumerate(parts):
        cache = kvjax.append(cache, layer, part, part + 1, rotary=TABLE)
    return kvjax.advance(cache, parts[0].shape[2])


@functools.partial(jax.jit, donate_argnums=0, static_argnums=5)
def one_call(cache, keys, values, queries, rows, window):
    settings = {"rotary": TABLE, "lengths": rows}
    for layer in range(2):
        cache = kvjax.append(cache, layer, keys, values, **settings)
    found = kvjax.attend(queries, cache, 1, window=window, **settings)
    plain = kvjax.attend(queries, cache, 1, window=window, path="reference", **settings)
    return kvjax.advance(cache, keys.shape[2], rows), found, plain


# Each operation is one program, where eager ones are dozens.
REWIND, RESET, SELECT, REWINDABLE = map(
    jax.jit, (kvjax.rewind, kvjax.reset, kvjax.select, kvjax.rewindable)
)
CONCATENATE = jax.jit(lambda parts: kvjax.concatenate(parts))
REPEAT = jax.jit(kvjax.repeat, static_argnums=1)
READ = jax.jit(kvjax.read, static_argnums=1)
CONVERT = jax.jit(
    lambda cache, policies, max_len=None: kvjax.convert(cache, list(policies), max_len=max_len),
    static_argnums=(1, 2),
)


def widths(*few, full):
    """Of calls, each a program: a full run has more."""
    return (*few, *(full if FULL else ()))


class CacheMachine(RuleBasedStateMachine):
    """Random sequences of operations; each row of the model is a list of (key, value) pairs, the
    keys turned to their positions, and ``most``, the longest that the list has ever been. Calls
    are of few ``sizes``, for each is a program; rows take any part of them."""

    policy: Any = kvjax.policy("static")
    sizes = widths(1, 24, full=(4, 9))
    limit = MAX_LEN
    window, sinks, slack, near = None, 0, MAX_LEN, 6
    known = ("most", "overflowed", "refused")

    def __init__(self):
        super().__init__()
        self.cache = kvjax.init_cache(CONFIG, self.policy, batch=BATCH, max_len=self.limit)
        self.rows = [[] for _ in range(BATCH)]
        self.most = [0] * BATCH
        self.seed = 0
        self.overflowed, self.refused = [False] * BATCH, [False] * BATCH

    def rewindable(self, row):
        """What a row can forget: a ring that was filled keeps its slack."""
        slots = None if self.window is None else self.window + self.sinks + self.slack
        least = self.most[row] - self.slack if slots and self.most[row] > slots else 0
        return len(self.rows[row]) - least

    @rule(data=st.data())
    def append(self, data):
        new = data.draw(st.sampled_from(self.sizes))
        lengths = [data.draw(st.integers(0, new)) for _ in range(BATCH)]
        self.seed += 1
        keys = random(BATCH, KV, new, DIM, seed=self.seed)
        values = random(BATCH, KV, new, DIM, seed=1000 + self.seed)
        queries = random(BATCH, 2 * KV, new, DIM, seed=2000 + self.seed)
        rows = np.asarray(lengths, np.int32)
        self.cache, found, plain = one_call(self.cache, keys, values, queries, rows, self.near)
        found, plain = np.asarray(found), np.asarray(plain)
        for row, count in enumerate(lengths):
            if self.limit is not None and len(self.rows[row]) + count > self.limit:
                self.overflowed[row] = True
                continue
            for token in range(count):
                at = len(self.rows[row])
                key = [naive.rotate(k.astype(float), at) for k in keys[row, :, token]]
                self.rows[row].append((np.array(key), values[row, :, token].astype(float)))
                for head in range(2 * KV):
                    wanted = self.mixed(row, head, queries[row, head, token].astype(float))
                    np.testing.assert_allclose(found[row, head, token], wanted, atol=1e-5)
                    np.testing.assert_allclose(plain[row, head, token], wanted, atol=1e-5)
            self.most[row] = max(self.most[row], len(self.rows[row]))

    def mixed(self, row, head, query):
        """What the newest token of a row gets."""
        at, near = len(self.rows[row]) - 1, None
        windows = [w for w in (self.window, self.near) if w is not None]
        if self.window is not None:
            near = naive.rotate(query, min(at, self.sinks + min(windows) - 1))
        seen = self.seen(row)
        return naive.attention(
            naive.rotate(query, at),
            [k[head // 2] for k, _ in seen],
            [v[head // 2] for _, v in seen],
            window=min(windows, default=None),
            sinks=self.sinks,
            sink_query=near,
        )

    def seen(self, row):
        """Keys and values of a row as its newest token sees them."""
        return self.rows[row]

    @rule(data=st.data())
    def rewind(self, data):
        back = [data.draw(st.integers(0, self.rewindable(row))) for row in range(BATCH)]
        self.cache = REWIND(self.cache, np.asarray(back, np.int32))
        self.rows = [row[: len(row) - n] for row, n in zip(self.rows, back, strict=True)]

    @rule(row=st.integers(0, BATCH - 1), more=st.integers(1, 5))
    def rewind_too_far(self, row, more):
        back = np.zeros(BATCH, np.int32)
        back[row] = self.rewindable(row) + more
        self.cache = REWIND(self.cache, back)
        self.refused[row] = True

    @rule(rows=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def select(self, rows):
        self.cache = SELECT(self.cache, np.asarray(rows))
        self.pick(rows)

    def pick(self, rows):
        """The lists of some rows, and all that is known of them."""
        self.rows = [list(self.rows[row]) for row in rows]
        for name in self.known:
            setattr(self, name, [copy.copy(getattr(self, name)[row]) for row in rows])

    @rule(row=st.integers(0, BATCH - 1))
    def repeat_a_row(self, row):
        self.cache = REPEAT(SELECT(self.cache, np.asarray([row])), BATCH)
        self.pick([row] * BATCH)

    @rule(cut=st.integers(1, BATCH - 1))
    def cut_and_join(self, cut):
        order = [*range(cut, BATCH), *range(cut)]
        parts = (
            SELECT(self.cache, np.asarray(order[: BATCH - cut])),
            SELECT(self.cache, np.asarray(order[BATCH - cut :])),
        )
        self.cache = CONCATENATE(parts)
        self.pick(order)

    @rule(row=st.integers(0, BATCH - 1))
    def reset_a_row(self, row):
        self.cache = RESET(self.cache, np.arange(BATCH) == row)
        self.rows[row], self.most[row] = [], 0
        self.overflowed[row] = self.refused[row] = False

    @rule()
    def go_on_with_a_fork(self):
        other = kvjax.fork(self.cache)
        jax.tree.map(lambda leaf: leaf.delete(), self.cache)
        self.cache = other

    def held(self, layer, row):
        """The positions of a row that a layer holds, each once, with the tokens of the list."""
        keys, values, positions = (np.asarray(x)[row] for x in READ(self.cache, layer))
        slots, seen = np.flatnonzero(positions >= 0), self.seen(row)
        for slot in slots:
            key, value = seen[positions[slot]]
            np.testing.assert_allclose(keys[:, slot], key, atol=1e-5)
            np.testing.assert_array_equal(values[:, slot], value)
        assert len(set(positions[slots])) == len(slots)
        return set(positions[slots].tolist())

    @invariant()
    def holds_what_the_lists_hold(self):
        for row, tokens in enumerate(self.rows):
            held = self.held(1, row)
            nearest = 0 if self.window is None else max(0, len(tokens) - self.window + 1)
            wanted = {*range(min(self.sinks, len(tokens))), *range(nearest, len(tokens))}
            assert wanted <= held <= set(range(len(tokens)))
        assert np.asarray(self.cache.length).tolist() == [len(row) for row in self.rows]
        status = np.asarray(self.cache.status)
        assert (status & OVERFLOW).astype(bool).tolist() == self.overflowed
        assert (status & REWOUND_TOO_FAR).astype(bool).tolist() == self.refused
        can = np.asarray(REWINDABLE(self.cache)).tolist()
        assert can == [self.rewindable(row) for row in range(BATCH)]


class RingMachine(CacheMachine):
    policy = kvjax.policy("sliding_window", window=5, slack=4)
    sizes, limit, window, slack = widths(1, 5, full=(3,)), None, 5, 4


class SinksMachine(CacheMachine):
    policy = kvjax.policy("sliding_window", window=4, sinks=2, slack=7)
    sizes, limit, window, sinks, slack = widths(8, full=(1, 3)), None, 4, 2, 7


class GrowingMachine(CacheMachine):
    """Grown before every call that would overflow, up to its limit."""

    policy = kvjax.CachePolicy(Growing(start=3))
    sizes = widths(4, full=(1, 9, 24))

    @rule()
    def grow(self):
        if self.cache.max_len < MAX_LEN:
            self.cache = kvjax.grow(self.cache, min(2 * self.cache.max_len, MAX_LEN))

    def __init__(self):
        super().__init__()
        self.limit = 3

    @precondition(lambda self: True)
    @invariant()
    def holds_as_much_as_it_was_grown_to(self):
        self.limit = self.cache.max_len


class ConvertingMachine(CacheMachine):
    """Two rings that keep different tokens, converted to other slacks; ``low``: of each row, the
    first position after the sinks that each layer still holds."""

    sights = ((6, 0), (4, 2))
    policy = [kvjax.CachePolicy(Ring(w, s, k)) for (w, s), k in zip(sights, (3, 5))]  # noqa: B905, RUF012
    sizes, limit, window, sinks = widths(3, full=(1,)), None, 4, 2
    known = (*CacheMachine.known, "low")

    def __init__(self):
        super().__init__()
        self.slacks = (3, 5)
        self.low = [[0, 2] for _ in range(BATCH)]

    def rewindable(self, row):
        sights = zip(self.low[row], self.sights, strict=True)
        least = max(low + window if low > sinks else 0 for low, (window, sinks) in sights)
        return max(len(self.rows[row]) - least, 0)

    @rule(data=st.data())
    def append(self, data):
        super().append(data)
        self.forget()

    def forget(self):
        for row in range(BATCH):
            for layer, (window, _) in enumerate(self.sights):
                last = self.most[row] - window - self.slacks[layer]
                self.low[row][layer] = max(self.low[row][layer], last)

    @rule(row=st.integers(0, BATCH - 1))
    def reset_a_row(self, row):
        super().reset_a_row(row)
        self.low[row] = [0, 2]

    @rule(slacks=st.sampled_from([(2, 7), (7, 2), (3, 5), (9, 12)][: None if FULL else 3]))
    def convert(self, slacks):
        rings = [Ring(w, s, k) for (w, s), k in zip(self.sights, slacks, strict=True)]
        self.cache = CONVERT(self.cache, tuple(kvjax.CachePolicy(ring) for ring in rings))
        self.slacks, self.most = slacks, [len(row) for row in self.rows]
        self.forget()

    @invariant()
    def every_layer_holds_its_own(self):
        for row, tokens in enumerate(self.rows):
            for layer, (_, sinks) in enumerate(self.sights):
                wanted = {*range(sinks), *range(self.low[row][layer], len(tokens))}
                assert self.held(layer, row) == wanted & set(range(len(tokens)))


class CodedMachine(CacheMachine):
    """A tail, and a body of blocks that were encoded once. A row's list holds what the codec makes
    of the tokens that are in the block now."""

    codecs = CODECS["int4"], CODECS["int2"]
    recent = 1
    policy = kvjax.CachePolicy(Dense(), *codecs, block=BLOCK, recent=recent)
    sizes, limit, near = widths(1, 20, full=(5, 8)), 70, None

    def __init__(self):
        super().__init__()
        self.codes = [codes(codec) for codec in self.codecs]

    def rewindable(self, row):
        """The tail still holds everything that the next token sees raw, and one block more."""
        kept = self.most[row] - (self.recent + 2) * BLOCK
        least = (-(-kept // BLOCK) + self.recent) * BLOCK + 1 if kept > 0 else 0
        return max(min(len(self.rows[row]) - least, super().rewindable(row)), 0)

    def seen(self, row):
        tokens = list(self.rows[row])
        old = max((len(tokens) - 1) // BLOCK - self.recent, 0) * BLOCK
        for start in range(0, old, BLOCK):
            block = tokens[start : start + BLOCK]
            both = (np.array([token[i] for token in block]).swapaxes(0, 1) for i in (0, 1))
            k, v = (code(x).swapaxes(0, 1) for code, x in zip(self.codes, both, strict=True))
            tokens[start : start + BLOCK] = zip(k.astype(float), v.astype(float), strict=True)
        return self.rows[row][: self.sinks] + tokens[self.sinks :]

    @rule()
    def convert_to_the_same(self):
        """Nothing is encoded twice."""
        before = self.stored()
        self.cache = CONVERT(self.cache, (self.policy,) * 2, self.limit)
        self.most = [len(row) for row in self.rows]
        for row, tokens in enumerate(self.rows):
            full = max((len(tokens) - 1) // BLOCK - self.recent, 0)
            for a, b in zip(before, self.stored(), strict=True):
                assert np.array_equal(a[row, :, :full], b[row, :, :full])

    def stored(self):
        stores = [store for layer in self.cache.layers for store in (layer.keys, layer.values)]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(stores)]


class CodedRingMachine(CodedMachine):
    policy = kvjax.CachePolicy(
        Ring(20, sinks=3, slack=15), *CodedMachine.codecs, block=BLOCK, recent=0
    )
    sizes, limit, recent = widths(16, full=(1, 5)), None, 0
    window, sinks, slack = 20, 3, 15

    convert_to_the_same = None  # pyright: ignore[reportAssignmentType]


# What takes longest to compile or to run has half of the examples, but in a full run.
FEWER = settings(max_examples=settings.default.max_examples // (1 if FULL else 2))
TestCacheMachine = CacheMachine.TestCase
TestCodedMachine = pytest.mark.rare(CodedMachine.TestCase)
TestCodedMachine.settings = FEWER
TestCodedRingMachine = CodedRingMachine.TestCase
TestCodedRingMachine.settings = FEWER
TestCodedRingMachine = pytest.mark.rare(TestCodedRingMachine)
TestConvertingMachine = ConvertingMachine.TestCase
TestConvertingMachine.settings = FEWER
TestConvertingMachine = pytest.mark.rare(TestConvertingMachine)
TestRingMachine = RingMachine.TestCase
TestSinksMachine = SinksMachine.TestCase
TestSinksMachine.settings = FEWER
TestGrowingMachine = pytest.mark.slow(GrowingMachine.TestCase)
TestGrowingMachine.settings = FEWER


@pytest.mark.parametrize("dtype", RAW)
def test_bytes_are_those_of_the_arrays(dtype):
    policy = kvjax.policy("static", dtype=dtype)
    cache = kvjax.init_cache(CONFIG, policy, batch=3, max_len=100)
    size = jnp.dtype(dtype).itemsize
    assert kvjax.nbytes(cache) == {"device": 2 * 2 * 3 * KV * 100 * DIM * size}


@pytest.mark.parametrize(
    "policy",
    [
        kvjax.policy("static", dtype="bfloat16"),
        kvjax.policy("sliding_window", window=6, sinks=2, slack=4),
        kvjax.CachePolicy(Dense(), CODECS["int8"], CODECS["float8"], block=BLOCK),
        kvjax.CachePolicy(Ring(16, slack=15), CODECS["int4"], block=BLOCK, recent=0),
    ],
    ids=str,
)
def test_users_see_the_real_shape_and_dtype(policy):
    cache = filled(policy)
    keys, values, positions = READ(cache, 0)
    held = cache.layers[0].policy
    slots = held.layout.slots
    if held.has_tail:
        slots = held.split.tail.slots + held.split.body.slots * held.block
    assert keys.shape == values.shape == (BATCH, KV, slots, DIM)
    assert keys.dtype == values.dtype == jnp.dtype(held.keys.dtype)
    for row in np.asarray(positions):
        assert sorted(row.tolist()) == [*[-1] * (slots - 5), *range(5)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_users_see_the_dtype_that_they_asked_for(dtype):
    """The dtype of the numbers. The stored bits may have another one, which is private."""
    cache = kvjax.init_cache(tiny_config(), kvjax.policy("static", dtype=dtype), max_len=8)
    assert {x.dtype.name for x in kvjax.read(cache, 0)[:2]} == {dtype}
    assert "LayerCache" not in kvjax.__all__


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "narrow"])
@pytest.mark.parametrize("codecs", teams()[::3], ids="-".join)
def test_arrays_are_committed_where_a_device_a_mesh_or_a_memory_is_named(layout, codecs):
    """Arrays are uncommitted otherwise, as with `jnp.zeros`."""

    def committed(**settings):
        cache = kvjax.init_cache(
            CONFIG, policy_case(codecs, layout, **place).policy, **sizes, **settings
        )
        return {leaf.committed for leaf in jax.tree.leaves(cache)}

    sizes, place = {"batch": 2, "max_len": 64}, {}
    assert committed() == {False}
    assert committed(mesh=kvjax.make_mesh(data=2)) == {True}
    with jax.default_device(jax.devices()[1]):
        cache = kvjax.init_cache(CONFIG, policy_case(codecs, layout).policy, **sizes)
    assert {leaf.committed for leaf in jax.tree.leaves(cache)} == {False}
    assert {x for leaf in jax.tree.leaves(cache) for x in leaf.devices()} == {jax.devices()[1]}
    place = {"placement": "host"}
    assert committed() == {True}


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
    with pytest.raises(ValueError, match="tokens must be >= 0, got -1"):
        kvjax.rewind(cache, -1)
    cache = kvjax.rewind(cache, jnp.asarray([2, 5, 6], jnp.int32))
    assert cache.length.tolist() == [3, 0, 5]
    assert cache.written.tolist() == [[5, 5]] * 3
    assert cache.status.tolist() == [0, 0, REWOUND_TOO_FAR]
    with pytest.raises(ValueError, match=r"row\(s\) 2 were to forget more"):
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
        ({"max_len": 0}, "max_len must be an integer >= 1, got 0"),
        ({"max_len": 4, "batch": 0}, "batch must be an integer >= 1, got 0"),
        ({"max_len": 4, "policy": [kvjax.policy()]}, "1 policies for a model of 2 layers"),
        (
            {"max_len": 4, "policy": kvjax.CachePolicy(Dense(8))},
            "the layout holds 8 positions, but max_len is 4",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        kvjax.init_cache(CONFIG, **arguments)


def test_unknown_policies_and_dtypes_are_refused():
    with pytest.raises(ValueError, match="unknown cache policy 'page': this version has 'static'"):
        kvjax.policy("page")
    with pytest.raises(ValueError, match="floating-point numbers, got dtype 'int8'"):
        kvjax.policy("static", dtype="int8")


def test_shapes_that_do_not_fit_are_refused():
    cache = filled()
    with pytest.raises(ValueError, match=r"keys must be \[batch=3"):
        kvjax.append(cache, 0, random(2, KV, 1, DIM), random(2, KV, 1, DIM))
    with pytest.raises(ValueError, match=r"do not fit keys"):
        kvjax.attend(random(3, 3, 1, DIM), cache, 0)
    with pytest.raises(ValueError, match="window must be an integer >= 1, got 0"):
        kvjax.attend(random(3, 4, 1, DIM), cache, 0, window=0, causal=False)
    with pytest.raises(ValueError, match="unknown attention path 'fast'"):
        kvjax.attend(random(3, 4, 1, DIM), cache, 0, path="fast")


def test_a_cache_shows_itself_in_a_line():
    shown = repr(filled())
    assert shown.startswith(
        "KVCache(2 layers of CachePolicy(layout=Dense(max_len=20, grows_to=None), "
    )
    assert shown.endswith("length=[5 5 5])") and "\n" not in shown
