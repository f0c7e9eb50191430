"""Layouts by themselves: slots, growth, bytes, and what each refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvjax
from kvjax.cache.checks import LOST, OVERFLOW
from kvjax.layouts import UNLIMITED, Dense, Growing, Paged, Ring
from kvjax.operations import capacity
from tests import laws
from tests.alive import alive
from tests.matrix import tiny_config, tiny_model
from tests.scripted import scripted

CONFIG = tiny_config(windows=(None, None))


def held_by(layout, length, written):
    """Positions by slot, one row."""
    slots = jnp.arange(layout.slots)
    return np.asarray(layout.positions(jnp.array([length]), jnp.array([written]), slots))[0]


@pytest.mark.slow
@given(
    st.integers(1, 9), st.integers(0, 4), st.integers(0, 6), st.integers(0, 60), st.integers(0, 60)
)
def test_a_ring_holds_its_window_and_its_sinks(window, sinks, slack, length, more):
    """Slot by slot, against a list that is written token by token."""
    layout = Ring(window, sinks, slack).resolve(None, None)
    assert layout.slots == window + sinks + slack
    written = length + more
    plain = [-1] * layout.slots
    for position in range(written):
        slot = position if position < sinks else sinks + (position - sinks) % (window + slack)
        plain[slot] = position
        assert int(layout.slot_of(jnp.array([[position]]))[0, 0]) == slot
    assert held_by(layout, length, written).tolist() == [p if p < length else -1 for p in plain]


@given(st.data())
def test_a_ring_writes_each_token_once_and_where_it_belongs(data):
    window, sinks = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 4))
    slack, length = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 40))
    layout = Ring(window, sinks, slack).resolve(None, None)
    new = data.draw(st.integers(1, layout.chunk))
    for token in range(new):
        found = [
            int(run.start[0]) + token
            for run in layout.runs(jnp.array([length]), new)
            if run.low <= int(run.start[0]) + token < run.high
            and token >= int(jnp.broadcast_to(run.skip, (1,))[0])
        ]
        assert found == [int(layout.slot_of(jnp.array([[length + token]]))[0, 0])]


@pytest.mark.parametrize("length", [0, 3, 11, 12, 13, 40])
@pytest.mark.parametrize("size", [1, 4, 12])
def test_bounds_are_never_narrower_than_the_truth(length, size):
    layout = Ring(7, 2, 3).resolve(None, None)
    held = held_by(layout, length, length)
    for start in range(0, layout.slots, size):
        inside = [p for p in held[start : start + size] if p >= 0]
        low, high = layout.bounds(jnp.array([length]), start, size)
        if inside:
            assert int(low) <= min(inside) and max(inside) <= int(high)
        assert int(layout.occupied(jnp.array([length]))) >= (np.flatnonzero(held >= 0) + 1).max(
            initial=0
        )


def test_slack_and_capacity_by_default():
    assert Ring(4096).resolve(None, None).slack == 512
    assert Ring(40).resolve(None, None).slack == 16
    shorter = Ring(4096).resolve(1000, None)
    assert (shorter.slots, shorter.limit, shorter.chunk) == (1000, 1000, None)
    assert Ring().resolve(None, 9).window == 9
    cache = kvjax.init_cache(CONFIG, kvjax.policy("sliding_window", window=8), batch=1)
    assert cache.max_len == UNLIMITED


@pytest.mark.parametrize(
    ("name", "settings", "slots"),
    [
        ("static", {}, (500, 500)),
        ("dynamic", {}, (256, 256)),
        ("sliding_window", {"window": 64}, (80, 80)),
        ("sliding_window", {"window": 64, "sinks": 4, "slack": 7}, (75, 71)),  # 9 is seen whole
        ("hybrid", {}, (500, 9 + 16)),
    ],
)
def test_bytes_are_those_of_the_formula(name, settings, slots):
    config = tiny_config()  # windows None, 9
    cache = kvjax.init_cache(config, kvjax.policy(name, **settings), batch=3, max_len=500)
    per_slot = 2 * 3 * config.num_key_value_heads * config.head_dim * 4
    assert [layer.keys.shape[2] for layer in cache.layers] == list(slots)
    assert kvjax.nbytes(cache) == {"device": per_slot * sum(slots)}


def fill(cache, tokens, start=0):
    shape = (cache.batch, 2, tokens, 8)
    rng = np.random.default_rng([start, tokens])
    return appended(cache, [rng.normal(size=shape).astype(np.float32) for _ in cache.layers])


@jax.jit
def appended(cache, every):
    for layer, keys in enumerate(every):
        cache = kvjax.append(cache, layer, keys, 2 * keys)
    return kvjax.advance(cache, every[0].shape[2])


READ = jax.jit(kvjax.read, static_argnums=1)


def content(cache, layer, row=0):
    """What a layer holds of a row, by position."""
    keys, values, positions = (np.asarray(x) for x in READ(cache, layer))
    return {
        int(p): (keys[row, :, slot].tolist(), values[row, :, slot].tolist())
        for slot, p in enumerate(positions[row])
        if p >= 0
    }


@pytest.mark.slow
@pytest.mark.parametrize("inner", [lambda ring: ring, lambda ring: Paged(32, ring)])
def test_sinks_open_no_window_that_forgets_nothing(inner):
    """A layer keeps its own window as it was trained, where the ring's is not narrower."""
    model, params = tiny_model(num_hidden_layers=2, windows=(None, 24))
    ids = np.random.default_rng(0).integers(1, 60, (1, 90)).astype(np.int32)
    wanted = model.apply(params, ids)

    def logits(window, max_len=128):
        policy = kvjax.CachePolicy(inner(Ring(window, sinks=4, slack=16)))
        cache = kvjax.init_cache(model.config, policy, batch=1, max_len=max_len)
        kept = [layer.policy.layout.sinks for layer in cache.layers]
        found = []
        for start in range(0, ids.shape[1], 15):
            some, cache = model.apply(params, ids[:, start : start + 15], cache)
            found.append(some)
        return kept, np.concatenate(found, axis=1)

    for window in (100, 200):  # nothing is forgotten
        kept, found = logits(window)
        assert kept == [4, 0]
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert logits(24)[0] == [4, 0]
    assert logits(23)[0] == [4, 4]  # it forgets what the second layer sees
    assert Ring(sinks=4).resolve(None, 24).sinks == 4  # asked for by name


@pytest.mark.rare
def test_growing_holds_one_layer_twice_at_most(monkeypatch):
    cache = fill(kvjax.init_cache(CONFIG, "dynamic", batch=2), 200)
    before, old = content(cache, 1), cache

    def held():
        return sum(x.nbytes for x in alive() if x.ndim == 4)

    sizes = [x.nbytes for x in jax.tree.leaves(cache.layers)]
    base = held() - sum(sizes)
    seen, mark = [], capacity.grown_mark

    def watched(*layer):  # the one before has grown, and this one is there twice
        seen.append(held() - base)
        return mark(*layer)

    monkeypatch.setattr(capacity, "grown_mark", watched)
    cache = kvjax.grow(cache, 512)
    layer = sum(sizes) // len(seen)
    assert seen == [sum(sizes) + (n + 2) * layer for n in range(len(cache.layers))]
    assert held() - base == 2 * sum(sizes)
    assert all(x.is_deleted() for x in jax.tree.leaves(old.layers))
    assert cache.max_len == 512 and content(cache, 1) == before
    with pytest.raises(
        ValueError, match="can't grow to 100 tokens a row: the capacity is already 512"
    ):
        kvjax.grow(cache, 100)
    with pytest.raises(ValueError, match="a ring can't grow"):
        kvjax.grow(kvjax.init_cache(CONFIG, kvjax.policy("sliding_window", window=4)), 8)
    small = kvjax.init_cache(CONFIG, "dynamic", max_len=300)
    with pytest.raises(ValueError, match="may grow to 300 tokens a row, not to 512"):
        kvjax.grow(small, 512)


def test_a_full_growing_cache_says_so():
    cache = fill(kvjax.init_cache(CONFIG, kvjax.CachePolicy(Growing(4))), 4)
    with pytest.raises(kvjax.CacheOverflowError, match=r"holds 4 tokens .* kvjax\.grow it before"):
        kvjax.check(fill(cache, 1))


def test_dense_becomes_a_ring_whose_window_is_longer_than_its_rows():
    dense = fill(kvjax.init_cache(CONFIG, batch=2, max_len=40), 30)
    ring = kvjax.convert(dense, kvjax.CachePolicy(Ring(64, sinks=2)), max_len=40)
    assert ring.layers[1].policy.layout.slots == 40
    assert content(ring, 1) == content(dense, 1)
    assert np.asarray(kvjax.rewindable(ring)).tolist() == [30, 30]
    lossy = kvjax.convert(fill(dense, 1), kvjax.CachePolicy(Ring(8, sinks=2, slack=3)))
    with pytest.raises(ValueError, match="lost tokens of row 0"):
        kvjax.convert(lossy, kvjax.CachePolicy(Ring(64, sinks=2)), max_len=40)


@pytest.mark.rare
def test_dense_becomes_a_ring_and_a_ring_a_dense_that_it_can_be():
    dense = fill(kvjax.init_cache(CONFIG, batch=2, max_len=40), 30)
    ring = kvjax.convert(dense, kvjax.CachePolicy(Ring(8, sinks=2, slack=3)))
    whole = content(dense, 1)
    assert content(ring, 1) == {p: whole[p] for p in [0, 1, *range(19, 30)]}
    assert np.asarray(kvjax.rewindable(ring)).tolist() == [3, 3]
    with pytest.raises(ValueError, match="layer 0 has lost tokens of row 0 that Dense"):
        kvjax.convert(ring, kvjax.policy("static"), max_len=40)
    traced = jax.jit(lambda c: kvjax.convert(c, kvjax.policy("static"), max_len=40))(ring)
    assert traced.status.tolist() == [LOST, LOST]
    # A ring that was rewound, or has less slack, lacks its oldest slots only: these count as empty.
    back = kvjax.rewind(ring, 2)
    same = kvjax.convert(back, kvjax.CachePolicy(Ring(8, sinks=2, slack=3)))
    assert content(same, 1) == content(back, 1) == {p: whole[p] for p in [0, 1, *range(19, 28)]}
    assert np.asarray(kvjax.rewindable(same)).tolist() == [1, 1]
    wider = kvjax.convert(ring, kvjax.CachePolicy(Ring(8, sinks=2, slack=9)))
    assert content(wider, 1) == content(ring, 1)
    assert np.asarray(kvjax.rewindable(wider)).tolist() == [3, 3]
    with pytest.raises(ValueError, match="lost tokens of row 0"):
        kvjax.convert(ring, kvjax.CachePolicy(Ring(12, sinks=2)))
    grown = kvjax.convert(dense, kvjax.CachePolicy(Growing(start=12)))
    assert grown.max_len == 48 and grown.grows_to == UNLIMITED and content(grown, 1) == whole
    assert kvjax.convert(dense, "dynamic").max_len == 256
    assert kvjax.convert(dense, "hybrid").max_len == 40
    short = fill(kvjax.init_cache(CONFIG, kvjax.policy("sliding_window", window=8), batch=1), 9)
    back = kvjax.convert(short, kvjax.policy("static", dtype="float16"), max_len=40)
    assert sorted(content(back, 0)) == list(range(9)) and back.layers[0].policy.keys.dtype
    with pytest.raises(ValueError, match=r"row 0 has 30 tokens, Dense.* holds 16"):
        kvjax.convert(dense, kvjax.policy("static"), max_len=16)


@pytest.mark.slow
def test_rows_of_different_capacities_are_joined():
    small = fill(kvjax.init_cache(CONFIG, batch=1, max_len=8), 5)
    large = fill(kvjax.init_cache(CONFIG, batch=2, max_len=20), 11)
    joined = kvjax.concatenate([small, large])
    assert joined.max_len == 20 and joined.length.tolist() == [5, 11, 11]
    assert content(joined, 1, 0) == content(small, 1) and content(joined, 1, 2) == content(
        large, 1, 1
    )
    policy = kvjax.policy("sliding_window", window=20, slack=60)
    rings = [
        fill(kvjax.init_cache(CONFIG, policy, max_len=max_len), tokens)
        for max_len, tokens in ((9, 8), (14, 13), (100, 30))
    ]
    wrapped = kvjax.concatenate(rings[1:])
    assert wrapped.max_len == UNLIMITED and content(wrapped, 0) == content(rings[1], 0)
    assert kvjax.concatenate(rings[:2]).max_len == 14
    other = kvjax.init_cache(CONFIG, kvjax.policy("static", dtype="bfloat16"), max_len=20)
    with pytest.raises(ValueError, match="convert the caches to one policy first"):
        kvjax.concatenate([large, other])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: kvjax.select(c, [0, 2]), "row 2 is out of range: the cache has 2"),
        (lambda c: kvjax.select(c, []), "rows must be a list of integers"),
        (lambda c: kvjax.repeat(c, 0), "times must be an integer >= 1, got 0"),
        (lambda c: kvjax.reset(c, np.array([True])), r"rows must be bool\[batch=2\]"),
        (lambda c: fill(c, 6), "6 tokens in a call, but the ring has slack for 5"),
        (lambda c: kvjax.init_cache(CONFIG, "static"), "a dense cache needs max_len"),
        (lambda c: kvjax.init_cache(CONFIG, "sliding_window"), "a ring needs a window"),
        (lambda c: kvjax.policy("static", window=3), "'static' has no setting 'window'"),
        (lambda c: kvjax.policy("vast"), "unknown cache policy 'vast': this version has 'static'"),
        (lambda c: Ring(0), "window must be an integer >= 1, got 0"),
    ],
)
def test_what_is_refused(call, message):
    cache = kvjax.init_cache(CONFIG, kvjax.policy("sliding_window", window=6, slack=4), batch=2)
    with pytest.raises(ValueError, match=message):
        call(cache)


def test_a_long_text_far_out_has_the_logits_of_the_same_text_at_the_beginning():
    """At position 1,000,000 float32 angles would be off by hundredths of a radian."""
    policy = kvjax.policy("sliding_window", window=6)
    tokens = np.random.default_rng(0).integers(0, 61, (1, 40)).astype(np.int32)
    logits = []
    for start in (0, 1_000_000):
        cache = kvjax.init_cache(CONFIG, policy, batch=1)
        at = jnp.full(1, start, jnp.int32)
        cache = dataclasses.replace(cache, length=at, written=jnp.full((1, 2), start, jnp.int32))
        for token in tokens.T:
            found, cache = laws.attention_outputs(token[:, None], cache)
            logits.append(np.asarray(found)[0, 0])
    near, far = np.array(logits[:40]), np.array(logits[40:])
    # The first tokens' windows reach before the beginning, where the far text holds nothing real.
    assert np.abs(far - near)[12:].max() <= 1e-5 * np.abs(near).max()


def feed(cache, numbers):
    """Append tokens whose keys and values are their numbers, in every layer."""
    x = np.broadcast_to(np.asarray(numbers, np.float32)[:, None], (1, 2, len(numbers), 8))
    return appended(cache, [x for _ in cache.layers])


def seen(cache, layer):
    """What the newest token sees, in the order of positions, as numbers."""
    window = cache.layers[layer].policy.layout.window
    held = content(cache, layer)
    first = 0 if window is None else max(0, int(cache.length[0]) - window)
    for keys, values in held.values():  # values are appended twice as large
        assert np.ptp(keys) == 0 and np.array_equal(values, 2 * np.array(keys))
    return [held[p][0][0][0] for p in sorted(held) if p >= first]


@pytest.mark.slow
def test_the_traces_of_the_tests_of_transformers():
    """Static, sliding and hybrid caches, token by token, as their peers' tests have them."""
    static = feed(kvjax.init_cache(CONFIG, max_len=4), [1, 2])
    assert static.layers[0].keys[0, 0, :, 0].tolist() == [1, 2, 0, 0]
    static = feed(static, [3])
    assert static.layers[0].keys[0, 0, :, 0].tolist() == [1, 2, 3, 0]

    window = kvjax.policy("sliding_window", window=4)
    ring = feed(kvjax.init_cache(CONFIG, window), [1, 2, 3, 4])
    assert seen(ring, 0) == [1, 2, 3, 4]
    assert seen(feed(ring, [5]), 0) == [2, 3, 4, 5]
    assert seen(feed(feed(ring, [5]), [6]), 0) == [3, 4, 5, 6]
    assert seen(feed(kvjax.init_cache(CONFIG, window), [1, 2, 3, 4, 5, 6]), 0) == [3, 4, 5, 6]

    hybrid = kvjax.init_cache(tiny_config(windows=(2, None)), "hybrid", max_len=8)
    for new, sliding, full in (
        ([1, 2, 3], [2, 3], [1, 2, 3]),
        ([4], [3, 4], [1, 2, 3, 4]),
        ([5, 6], [5, 6], [1, 2, 3, 4, 5, 6]),
    ):
        hybrid = feed(hybrid, new)
        assert (seen(hybrid, 0), seen(hybrid, 1)) == (sliding, full)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["dynamic", "hybrid", "sliding_window"])
def test_generation_under_every_layout(tiny_llama, policy):
    """Greedy tokens equal the static cache's if the layout forgets nothing that queries see."""
    given = kvjax.policy(policy, window=40) if policy == "sliding_window" else policy
    prompts = [list(range(1, 30)), [5, 6]]
    wanted = kvjax.generate(tiny_llama, prompts, max_new_tokens=10, eos_token_ids=())
    found = kvjax.generate(tiny_llama, prompts, max_new_tokens=10, eos_token_ids=(), cache=given)
    assert found.tokens == wanted.tokens


@pytest.mark.slow
def test_generation_grows_with_the_text(tiny_llama):
    policy = kvjax.CachePolicy(Growing(start=16))
    whole = kvjax.generate(tiny_llama, ["abcdef" * 5], max_new_tokens=200, eos_token_ids=())
    grown = kvjax.generate(
        tiny_llama, ["abcdef" * 5], max_new_tokens=200, eos_token_ids=(), cache=policy
    )
    assert grown.tokens == whole.tokens
    assert 229 <= grown.cache.max_len <= 256
    more = kvjax.generate(
        tiny_llama, grown.pending_tokens, max_new_tokens=4, eos_token_ids=(), cache=grown.cache
    )
    assert more.cache.length.tolist() == [233]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param("dynamic", marks=pytest.mark.rare),
        pytest.param(kvjax.policy("sliding_window", window=64), marks=pytest.mark.rare),
        pytest.param(kvjax.policy("sliding_window", window=200, sinks=3), marks=pytest.mark.rare),
        pytest.param(
            [
                kvjax.CachePolicy(Growing(16)),
                kvjax.CachePolicy(Ring(300)),
            ],
            marks=pytest.mark.rare,
        ),
    ],
    ids=str,
)
def test_a_conversation_goes_on_in_what_generation_made(tiny_llama, policy):
    """Three turns, far beyond what the first one had room for; as in one cache made for all."""
    large = kvjax.init_cache(
        tiny_llama.config, "static" if policy == "dynamic" else policy, max_len=512
    )
    caches, prompts = [policy, large], [[list(range(1, 20))]] * 2
    for turn in range(3):
        results = [
            kvjax.generate(tiny_llama, p, max_new_tokens=40, eos_token_ids=(), cache=c)
            for p, c in zip(prompts, caches, strict=True)
        ]
        assert results[0].tokens == results[1].tokens
        if not turn:
            slots = [layer.keys.shape[2] for layer in results[0].cache.layers]
            assert max(slots) <= 256
        caches = [result.cache for result in results]
        prompts = [[[*result.pending_tokens[0], 7, 8, 9]] for result in results]
    assert caches[0].length.tolist() == caches[1].length.tolist() == [18 + 3 * 40 + 2 * 3]


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [
    (Growing(), Dense()), (Growing(), Ring(1024)),
    (Growing(16), Growing(128)),
], ids=str)  # fmt: skip
def test_generation_with_a_growing_layer_beside_others(tiny_llama, layouts):
    prompts = [list(range(1, 50))]
    options = {"max_new_tokens": 250, "eos_token_ids": ()}
    whole = kvjax.generate(tiny_llama, prompts, **options)
    found = kvjax.generate(
        tiny_llama, prompts, cache=[kvjax.CachePolicy(each) for each in layouts], **options
    )
    assert found.tokens == whole.tokens


@pytest.mark.parametrize("slack", [0, 1, 4, 16])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_is_taken_back_from_a_ring(byte_tokenizer, slack, streamed):
    """However long the text before it, and however fast its dispatches become."""
    text = "".join(chr(97 + i * i % 26) for i in range(170)) + "#?!" + "z" * 60
    lm = scripted(text, tokenizer=byte_tokenizer)
    policy = kvjax.policy("sliding_window", window=12, slack=slack)
    # The model of this test does not cut its calls as others do.
    options = {"max_new_tokens": 200, "cache": policy, "prefill_chunk": 1}
    for stop in ("#", "#?!"):
        if streamed:
            running = kvjax.stream(lm, text[:1], stop=stop, **options)
            list(running)
            result = running.result
        else:
            result = kvjax.generate(lm, text[:1], stop=stop, **options)
        assert result.text == [text[1:170]] and result.pending_tokens == [[]]
        if len(stop) - 1 <= slack:
            assert result.cache.length.tolist() == [170]
            kvjax.check(result.cache)
        else:
            with pytest.raises(ValueError, match=r"row\(s\) 0 were to forget more"):
                kvjax.check(result.cache)


@pytest.mark.slow
def test_generation_goes_on_for_ever_in_a_ring(tiny_llama):
    policy = kvjax.policy("sliding_window", window=16, sinks=2)
    result = kvjax.generate(tiny_llama, ["abc"], max_new_tokens=150, eos_token_ids=(), cache=policy)
    assert len(result.tokens[0]) == 150 and result.cache.length.tolist() == [152]
    assert result.cache.layers[0].keys.shape[2] == 2 + 16 + 16
    assert result.stats.cache_bytes == kvjax.nbytes(result.cache)


def test_a_gemma_3_shape_at_32k_takes_a_sixth_of_the_dense_memory():
    """Gemma 3 1B: 26 layers, one in six sees everything, the others 512 tokens."""
    windows = tuple(None if layer % 6 == 5 else 512 for layer in range(26))
    config = tiny_config(
        num_hidden_layers=26, num_key_value_heads=1, head_dim=256, windows=windows, dtype="bfloat16"
    )

    def size(policy):
        cache = jax.eval_shape(lambda: kvjax.init_cache(config, policy, max_len=32_768))
        return kvjax.nbytes(cache)["device"]

    token = 2 * 256 * 2
    assert size("static") == 26 * 32_768 * token == 872_415_232
    assert size("hybrid") == (4 * 32_768 + 22 * (512 + 64)) * token == 147_193_856


def test_a_long_call_that_does_not_fit_is_dropped_whole():
    """A long prompt is cut into chunks; if one does not fit, no later one may be written."""
    model, params = tiny_model(windows=(None, 6))
    apply = jax.jit(model.apply)
    cache = kvjax.init_cache(model.config, kvjax.policy("hybrid", slack=2), batch=2, max_len=10)
    tokens = np.arange(16, dtype=np.int32).reshape(2, 8)
    _, cache = apply(params, tokens[:, :5], cache)
    before = [np.asarray(leaf)[0] for leaf in jax.tree.leaves(cache.layers)]
    _, cache = apply(params, tokens, cache, lengths=np.array([8, 5], np.int32))
    assert cache.length.tolist() == [5, 10] and cache.status.tolist() == [OVERFLOW, 0]
    for old, leaf in zip(before, jax.tree.leaves(cache.layers), strict=True):
        assert np.array_equal(old, np.asarray(leaf)[0])
