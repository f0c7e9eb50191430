"""Layers with a tail: what is raw, what is encoded, and what may be done with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import kvjax
from kvjax.cache.checks import BAD_NUMBERS
from kvjax.codecs import Centered, Codebook, Int2, Int4, Int8, Raw, Rotated, Unrotated
from kvjax.layouts import Dense, Growing, Ring, Split
from tests import laws
from tests.matrix import BLOCK, CODECS, LAYOUTS, tiny_config

CONFIG = tiny_config(windows=(None, None))
BATCH, KV, DIM, MAX_LEN = 2, 2, 8, 80
TEXT = np.random.default_rng(0).integers(0, 61, (BATCH, MAX_LEN))
INT4 = kvjax.CachePolicy(Dense(), CODECS["int4"], CODECS["int2"], block=BLOCK)
APPLY = laws.attention_outputs
CONVERT = jax.jit(kvjax.convert, static_argnums=1)
READ = jax.jit(kvjax.read, static_argnums=1)


def fed(policy, tokens, *, max_len=MAX_LEN, cache=None, start=0):
    if cache is None:
        cache = kvjax.init_cache(CONFIG, policy, batch=BATCH, max_len=max_len)
    return APPLY(TEXT[:, start : start + tokens].astype(np.int32), cache)


def close(a, b, tolerance=1e-5):
    a, b = np.asarray(a), np.asarray(b)
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("recent", [0, 1, 3])
@pytest.mark.parametrize("block", [8, 64])
def test_the_rule_of_sight_in_numbers(block, recent):
    split = Split(Dense(1000), block, recent)
    for position in range(0, 999, 7):
        raw_from = int(split.raw_from(jnp.int32(position)))
        assert raw_from == max(position // block - recent, 0) * block
        # Exactly the older blocks are in the body when the query comes.
        assert split.flushed(jnp.array([position + 1])).tolist() == [raw_from // block]
    assert split.tail.slots == (recent + 2) * block
    assert split.body.slots == 999 // block - recent


@pytest.mark.parametrize("layout", [Dense(), Growing()], ids=str)
def test_the_first_tokens_stay_raw(layout):
    coded = kvjax.CachePolicy(layout, CODECS["int2"], CODECS["int2"], block=BLOCK, sinks=3)
    found = []
    for policy in (kvjax.CachePolicy(layout), coded):
        cache = kvjax.init_cache(CONFIG, policy, batch=BATCH, max_len=MAX_LEN)
        for start in range(0, 48, 16):
            _, cache = fed(None, 16, cache=cache, start=start)
        keys, values, at = map(np.asarray, READ(cache, 0))
        order = np.array([[row.tolist().index(position) for position in range(48)] for row in at])
        found.append([np.take_along_axis(x, order[:, None, :, None], 2) for x in (keys, values)])
    for exact, stored in zip(*found, strict=True):
        same = (exact == stored).all((0, 1, 3))
        assert same[:3].all() and same[-2 * BLOCK :].all()
        assert not same[3 : -2 * BLOCK].any()


def test_a_ring_has_its_own_sinks():
    for sinks in (0, 2):
        policy = kvjax.CachePolicy(Ring(20, sinks=sinks), CODECS["int2"], block=BLOCK, sinks=3)
        cache = kvjax.init_cache(CONFIG, policy, batch=BATCH)
        assert cache.layers[0].policy.split.tail.sinks == sinks
    with pytest.raises(ValueError, match="sinks must be an integer >= 0, got -1"):
        kvjax.CachePolicy(sinks=-1)


def test_concatenated_caches_have_equally_many_raw_sinks():
    caches = [
        kvjax.init_cache(CONFIG, kvjax.CachePolicy(keys=Int8(), sinks=sinks), max_len=MAX_LEN)
        for sinks in (0, 4)
    ]
    with pytest.raises(ValueError, match="store or show different tokens"):
        kvjax.concatenate(caches)
    kvjax.concatenate([kvjax.convert(caches[0], caches[1].layers[0].policy), caches[1]])


def calls(start, stop, size):
    """The start and the number of tokens of calls: ``size`` at once, then one by one, because each
    size compiles."""
    whole = start + (stop - start) // size * size
    yield from ((at, size) for at in range(start, whole, size))
    yield from ((at, 1) for at in range(whole, stop))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(x, marks=[pytest.mark.rare] * (x != "dense")) for x in LAYOUTS],
)
def test_a_block_can_always_be_taken_back(layout):
    """A row can always forget ``max_rewind`` tokens and continue as if they were never written."""
    made, _ = LAYOUTS[layout]
    policy = kvjax.CachePolicy(made, CODECS["int4"], CODECS["int8"], block=BLOCK)
    rewind = jax.jit(kvjax.rewind)
    for tokens in (30, 41, 48, 49, 63):
        cache = kvjax.init_cache(CONFIG, policy, batch=BATCH, max_len=MAX_LEN)
        for start, new in calls(0, tokens, 16):
            _, cache = fed(None, new, cache=cache, start=start)
        assert cache.max_rewind is not None and cache.max_rewind <= int(
            kvjax.rewindable(cache).min()
        )
        back = min(int(kvjax.rewindable(cache).min()), tokens)
        assert back >= BLOCK
        again = rewind(cache, back)
        kvjax.check(again)
        for start, new in calls(tokens - back, tokens, 5):
            _, again = fed(None, new, cache=again, start=start)
        # Which pages these are may differ.
        found = (laws.out_of_pages(x) if x.pools else x for x in (cache, again))
        for a, b in zip(*map(jax.tree.leaves, found), strict=True):
            close(a, b) if a.dtype == jnp.float32 else np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="forget more tokens than"):
        kvjax.check(kvjax.rewind(cache, int(kvjax.rewindable(cache).max()) + 1))


@pytest.mark.rare
def test_grown_selected_repeated_and_joined_caches_go_on_alike():
    codecs = CODECS["int4"], CODECS["int2"]
    growing = kvjax.CachePolicy(Growing(start=24), *codecs, block=BLOCK)
    cache = kvjax.init_cache(CONFIG, growing, batch=BATCH, max_len=MAX_LEN)
    _, cache = fed(None, 20, cache=cache)
    cache = kvjax.grow(cache, 60)
    _, cache = fed(None, 30, cache=cache, start=20)
    _, straight = fed(INT4, 50)
    parts = [kvjax.select(straight, [row]) for row in (1, 0)]
    others = {
        "grown": (cache, [0, 1]),
        "joined": (kvjax.concatenate(parts), [1, 0]),
        "selected": (kvjax.select(straight, [1, 1]), [1, 1]),
        "repeated": (kvjax.repeat(parts[0], 2), [1, 1]),
        "forked": (kvjax.fork(straight), [0, 1]),
    }
    for _, (other, rows) in others.items():
        tokens = TEXT[rows, 50:55].astype(np.int32)
        found, _ = APPLY(tokens, other)
        wanted, _ = APPLY(tokens, kvjax.select(straight, rows))
        close(found, wanted)


@pytest.mark.rare
def test_saved_and_restored_it_goes_on_alike(tmp_path):
    """Codes are saved as they are: nothing is encoded a second time."""
    _, cache = fed(INT4, 50)
    leaves, structure = jax.tree.flatten(cache)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "cache", leaves)
        saver.wait_until_finished()
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, leaves)
        restored = jax.tree.unflatten(structure, saver.restore(tmp_path / "cache", like))
    for a, b in zip(leaves, jax.tree.leaves(restored), strict=True):
        assert a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
    tokens = TEXT[:, 50:55].astype(np.int32)
    wanted, found = (APPLY(tokens, x)[0] for x in (cache, restored))
    assert np.array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.rare
def test_rows_begin_anew_after_a_reset():
    _, cache = fed(INT4, 60)
    cache = kvjax.reset(cache, np.array([True, False]))
    text = np.concatenate([TEXT[:1, :20], TEXT[1:, 60:80]]).astype(np.int32)
    found, _ = APPLY(text, cache)
    fresh, _ = fed(INT4, 20)
    _, whole = fed(INT4, 60)
    wanted, _ = APPLY(TEXT[:, 60:80].astype(np.int32), whole)
    close(found[0], fresh[0])
    close(found[1], wanted[1])


@pytest.mark.rare
def test_converted_to_another_policy():
    """Raw to codec is what the codec would have made of the text; codec to raw is what it gives."""
    _, raw = fed("static", 50)
    _, coded = fed(INT4, 50)
    made = CONVERT(raw, INT4)
    # Of the first layer: what comes to the second depends on what its queries saw of the first.
    for a, b in zip(*map(jax.tree.leaves, (made.layers[0], coded.layers[0])), strict=True):
        np.testing.assert_array_equal(a, b)
    back = CONVERT(coded, "static")
    *both, positions = READ(coded, 0)
    order = np.argsort(np.asarray(positions[0]))[-50:]
    in_tail = 50 - 3 * BLOCK  # from here on the tail has them raw, whether seen so or not
    exact = READ(raw, 0)
    for found, wanted, true in zip(READ(back, 0), both, exact, strict=False):
        seen = np.asarray(wanted)[0][:, order]
        np.testing.assert_array_equal(found[0, :, :in_tail], seen[:, :in_tail])
        np.testing.assert_array_equal(found[0, :, in_tail:50], true[0, :, in_tail:50])
    found, _ = fed(None, 5, cache=back, start=50)
    assert np.isfinite(np.asarray(found)).all()


@pytest.mark.rare
def test_converted_between_rings_a_row_keeps_its_window():
    ring = functools.partial(Ring, 20)
    small = kvjax.CachePolicy(ring(slack=10))
    cache = kvjax.init_cache(CONFIG, small, batch=BATCH)
    for start in range(0, 60, 10):
        _, cache = fed(None, 10, cache=cache, start=start)
    coded = CONVERT(cache, kvjax.CachePolicy(ring(slack=40), CODECS["int8"], block=BLOCK))
    found, _ = fed(None, 6, cache=coded, start=60)
    wanted, _ = fed(None, 6, cache=cache, start=60)
    close(found, wanted, 0.05)
    assert int(kvjax.rewindable(coded).max()) <= 11
    with pytest.raises(ValueError, match="lost tokens of row 0"):
        kvjax.convert(coded, INT4, max_len=MAX_LEN)


@pytest.mark.slow
def test_keys_without_positions_are_not_converted():
    unrotated = kvjax.CachePolicy(Dense(), Unrotated(Int8()), block=BLOCK)
    _, cache = fed(unrotated, 30)
    with pytest.raises(ValueError, match="layer 0: can't convert between rotated keys"):
        kvjax.convert(cache, "static")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_sets_the_status(bad):
    cache = kvjax.init_cache(CONFIG, INT4, batch=BATCH, max_len=MAX_LEN)
    x = np.ones((BATCH, KV, 3, DIM), np.float32)
    x[1, 0, 2, 3] = bad
    past = kvjax.append(cache, 0, x, x, lengths=np.array([3, 2], np.int32))
    assert past.status.tolist() == [0, 0]  # padding after the row's real tokens
    for keys, values in ((x, np.ones_like(x)), (np.ones_like(x), x)):
        wrong = kvjax.append(cache, 0, keys, values)
        assert wrong.status.tolist() == [0, BAD_NUMBERS]
        with pytest.raises(kvjax.NonFiniteError, match=r"keys or values of row\(s\) 1"):
            kvjax.check(wrong)


@pytest.mark.rare
def test_exact_prefill_sees_its_own_call_raw():
    exact = kvjax.CachePolicy(Dense(), CODECS["int2"], CODECS["int2"], block=BLOCK, prefill="exact")
    found, cache = fed(exact, 60)
    wanted, _ = fed("static", 60)
    close(found, wanted)
    rule, _ = fed(INT4, 60)
    assert np.abs(np.asarray(rule) - np.asarray(wanted)).max() > 0.01
    # It leaves the same cache as other calls, which the next call sees.
    same = kvjax.CachePolicy(Dense(), CODECS["int2"], CODECS["int2"], block=BLOCK)
    _, other = fed(same, 60)
    for a, b in zip(*map(jax.tree.leaves, (cache.layers[0], other.layers[0])), strict=True):
        np.testing.assert_array_equal(a, b)
    last = np.asarray(fed("static", 61)[0])[:, -1]
    assert np.abs(np.asarray(fed(None, 1, cache=cache, start=60)[0])[:, 0] - last).max() > 0.01


def test_policies_by_name_and_by_layer():
    quantized = kvjax.policy("quantized")
    assert quantized == kvjax.policy("static", bits=4) == kvjax.policy(key_bits=4, value_bits=4)
    mixed = kvjax.policy("sliding_window", window=64, key_bits=8, value_bits=16, recent=2, block=16)
    assert mixed.keys.bits == 8 and mixed.values == Raw() and mixed.recent == 2
    hybrid = kvjax.policy("hybrid", bits=2, group_size=32)
    assert hybrid.full.keys == Rotated(Centered(Codebook(2, group_size=32)))
    assert hybrid.sliding.values == Rotated(Int2(group_size=32, zero_point=True))
    assert (hybrid.full.sinks, hybrid.sliding.sinks, quantized.sinks, mixed.sinks) == (4, 0, 4, 0)
    assert kvjax.policy(bits=8, sinks=0) == kvjax.CachePolicy(keys=Int8(), values=Int8())
    edges = kvjax.policies.Edges(kvjax.policy(bits=2), "quantized", first=1, last=2)
    config = tiny_config(num_hidden_layers=5, windows=(None,) * 5)
    keys = {2: kvjax.policy(bits=2).keys, 4: Rotated(Int4("channel", zero_point=True))}
    wanted = [keys[bits] for bits in (4, 2, 2, 4, 4)]
    assert [p.keys for p in edges.per_layer(config)] == wanted
    for arguments, message in (
        ({"bits": 5}, "5 bits for keys: choose from 1, 2, 3, 4, 8 and 16"),
        ({"group_size": 32}, "group_size=32 applies to quantized caches only: give bits="),
        (
            {"sinks": 2},
            "sinks=2 applies to sliding_window and to quantized caches only: give bits=",
        ),
        ({"name": "quantized", "window": 3}, "'quantized' has no setting 'window'"),
        ({"name": "static", "page_size": 16}, "'static' has no setting 'page_size'"),
    ):
        with pytest.raises(ValueError, match=message):
            kvjax.policy(**arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("dynamic", marks=pytest.mark.rare),
        "quantized",
        pytest.param("sliding_window", marks=pytest.mark.rare),
        pytest.param("static", marks=pytest.mark.rare),
        pytest.param("hybrid", marks=pytest.mark.rare),
    ],
)
def test_generation_in_a_quantized_cache(name, tiny_llama):
    settings = {"window": 24} if name == "sliding_window" else {}
    policy = kvjax.policy(name, bits=8, block=8, **settings)
    prompts = [[1, 5, 9] * 15, [7]]
    result = kvjax.generate(tiny_llama, prompts, max_new_tokens=30, cache=policy)
    assert [len(row) for row in result.tokens] == [30, 30]
    kvjax.check(result.cache)
    more = kvjax.generate(
        tiny_llama,
        [[*row, 3] for row in result.pending_tokens],
        max_new_tokens=5,
        cache=result.cache,
    )
    assert [len(row) for row in more.tokens] == [5, 5]


@pytest.mark.slow
def test_a_stop_string_is_taken_back_from_a_tail(tiny_llama):
    """A row ends at its stop, regardless of the number of steps per dispatch."""
    policy = kvjax.policy("quantized", bits=8, block=8)
    free = kvjax.generate(tiny_llama, [[1, 5, 9]], max_new_tokens=60, cache=policy)
    stop = free.text[0][20:24]
    found = kvjax.generate(tiny_llama, [[1, 5, 9]], max_new_tokens=60, cache=policy, stop=[stop])
    assert stop and found.text[0] == free.text[0][: free.text[0].index(stop)]
    kvjax.check(found.cache)


@pytest.mark.slow
def test_a_ring_can_take_back_a_block_unless_it_was_given_less_slack():
    for slack, wanted in ((None, 64), (8, 8)):
        policy = kvjax.policy("sliding_window", window=128, slack=slack, bits=4)
        cache = kvjax.init_cache(CONFIG, policy, batch=BATCH)
        assert cache.max_rewind == wanted
        for _ in range(40):
            _, cache = fed(None, 8, cache=cache)
        assert kvjax.rewindable(cache).tolist() == [wanted] * BATCH


@jax.jit
def appended(cache, part):
    for layer in range(2):
        cache = kvjax.append(cache, layer, part, part)
    return kvjax.advance(cache, part.shape[2])


def partly_converted():
    """A raw ring whose first block of the window is not whole, under a policy with a tail, and the
    same text that had that policy from the beginning."""
    ring = Ring(20, slack=3)
    policy = kvjax.CachePolicy(
        ring,
        Raw(),
        Int2("channel", zero_point=True),
        block=BLOCK,
        recent=0,
    )
    caches = [kvjax.init_cache(CONFIG, each, batch=1) for each in (kvjax.CachePolicy(ring), policy)]
    values = 100 + np.random.default_rng(0).normal(size=(1, KV, 40, DIM)).astype(np.float32)
    for at in range(0, 40, 4):
        part = jnp.asarray(values[:, :, at : at + 4])
        for i, cache in enumerate(caches):
            caches[i] = appended(cache, part)
    return CONVERT(caches[0], policy), caches[1], values


def test_what_a_conversion_had_not_is_not_read():
    converted, always, values = partly_converted()
    for cache in (converted, always):
        _, found, positions = READ(cache, 0)
        held = np.flatnonzero(np.asarray(positions[0]) >= 0)
        assert len(held) >= 20
        wanted = values[0][:, np.asarray(positions[0])[held]]
        assert np.abs(np.asarray(found[0])[:, held] - wanted).max() < 2


def test_a_block_that_lacks_tokens_is_encoded_as_well_as_a_whole_one():
    converted, always, values = partly_converted()
    worst = []
    for cache in (converted, always):
        _, found, positions = READ(cache, 0)
        at = np.asarray(positions[0])
        seen = np.flatnonzero(at >= 20)  # what the next query sees
        worst.append(np.abs(np.asarray(found[0])[:, seen] - values[0][:, at[seen]]).max())
    assert worst[0] <= 1.05 * worst[1]
