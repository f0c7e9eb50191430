"""The recompute law: cached in any chunks, a text gets what one uncached pass gives it; and what is
done with a cache on the way changes nothing of that. On caches of one layer, and on models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.codecs import Raw
from kvjax.generation import model as generation_model
from kvjax.layouts import Dense, Ring
from tests import laws, naive
from tests.laws import LENGTHS, WIDTH, close, texts
from tests.matrix import (
    BLOCK,
    CACHE_PAIRS,
    CODECS,
    FULL,
    LAYOUTS,
    OPERATION_PAIRS,
    PLACEMENTS,
    RAW,
    SHARD,
    PolicyCase,
    cache_cells,
    cells,
    choice,
    codes,
    policy_case,
    smallest_set,
    tiny_model,
)


@functools.cache
def filled(codecs, layout, placement, max_len, stacked):
    """A cell's policy, the truth, its empty cache, and that filled in full calls."""
    one = policy_case(codecs, layout, placement)
    true = laws.reference_outputs(codecs, layout)
    chunks = laws.in_chunks(LENGTHS, WIDTH)
    cache = laws.empty(one, max_len, stacked=stacked)
    return one, true, cache, laws.fill(cache, chunks, texts(), LENGTHS, true, one.tolerance)


AMONG = choice(cache_cells(), CACHE_PAIRS + OPERATION_PAIRS)
"""The laws of caches share these: each is made and filled once."""


@pytest.mark.parametrize("cell", cells(cache_cells(), CACHE_PAIRS, AMONG))
@settings(max_examples=max(settings.default.max_examples // 8, 1))
@given(data=st.data())
def test_a_cache_is_its_text(cell, data):
    """In any chunks, with the same arrays however they were cut, and wherever these are."""
    check_chunks(cell, data)


def check_chunks(cell, data):
    """The law of a cell, on a drawn chunking."""
    one, true, empty, cache = filled(*cell.made_by)
    left, drawn = np.array(LENGTHS), []
    widths = (1, 5, WIDTH) if FULL or SHARD else (1, WIDTH) if cell.singly else (WIDTH,)
    while left.any():
        width = data.draw(st.sampled_from(widths), label="width")
        take = [data.draw(st.integers(0, min(width, n)), label="tokens") for n in left]
        take = np.array(take if any(take) else np.minimum(left, width))
        drawn.append((width, take))
        left = left - take
    again = laws.fill(empty, drawn, texts(), LENGTHS, true, one.tolerance)
    laws.same_arrays(again, cache)


@pytest.mark.parametrize("cell", cells(cache_cells(), OPERATION_PAIRS, AMONG))
def test_a_text_goes_on_after_operations(cell):
    check_operations(cell)


def check_operations(cell):
    """The law of a cell."""
    one, true, _, cache = filled(*cell.made_by)
    laws.check_reading(cache, one.policy.keys.resolve("float32", "cpu").dtype)
    for name in cell.operations:
        laws.check_operation(name, kvjax.fork(cache), true, one.tolerance)


def away():
    """Every codec, layout and place in one of them at least; each takes another place's program.
    The README's command runs those that the other laws make."""
    found, among, first = (
        [cell for cell in some if cell.placement not in ("device", "host")[: 1 + is_raw(cell)]]
        for some in (cache_cells(), AMONG, smallest_set(AMONG))
    )
    kinds = [(name, name) for name in ("codecs", "layout", "placement")]
    return cells(found, kinds, among, first)


def is_raw(cell):
    return cell.codecs[0] in RAW


def test_every_part_is_away():
    names = [param.values[0] for param in away()]
    assert {codec for cell in names for codec in cell.codecs} == {*CODECS, *RAW}
    assert {cell.layout for cell in names} == {*LAYOUTS}
    assert {cell.placement for cell in names} == {*PLACEMENTS} - {"device"}


@pytest.mark.parametrize("cell", away())
def test_a_body_elsewhere_is_the_body_on_the_device(cell):
    check_place(cell)


def check_place(cell):
    """Exactly. Raw caches have no tail on the device, and are walked in other blocks there: these
    are what they are without anything fetched ahead."""
    *_, there = filled(*cell.made_by)
    assert laws.memory_kinds(there) == ({laws.ON_HOST}, {"device"})
    place = "host" if is_raw(cell) else "device"
    *_, here = filled(*cell._replace(placement=place).made_by)
    assert here is not there
    laws.same_arrays(there, here)
    begins, take = np.array(LENGTHS), np.array([WIDTH, 9, 3])
    found, other = (laws.step(x, begins, take, WIDTH, texts()) for x in (there, here))
    assert np.array_equal(found[0], other[0])
    laws.same_arrays(found[1], other[1])


MODEL, PARAMS = tiny_model()
TEXTS = [
    np.random.default_rng(row).integers(0, MODEL.config.vocab_size, n).tolist()
    for row, n in enumerate(LENGTHS)
]
APPLY = jax.jit(MODEL.apply, donate_argnums=2)
BOTH = [(Raw(), CODECS["int4"]), (CODECS["int4"], Raw())]


def coded(keys, values):
    return naive.Coded(BLOCK, 1, codes(keys), codes(values), False)


MODELS = {
    "dense": (kvjax.policy("static"), [PolicyCase(None)] * 2),
    "hybrid": (kvjax.policy("hybrid", slack=5), [PolicyCase(None), PolicyCase(None, sight=(9, 0))]),
    "ring-without-slack": (
        kvjax.policy("sliding_window", window=5, slack=0), [PolicyCase(None, sight=(5, 0))] * 2,
    ),
    "listed": (
        [kvjax.CachePolicy(Ring(6, sinks=2)), kvjax.CachePolicy(Dense())],
        [PolicyCase(None, sight=(6, 2)), PolicyCase(None)],
    ),
    "hybrid-raw-and-int4": (
        kvjax.policies.Hybrid(
            kvjax.CachePolicy(Dense(), *BOTH[0], block=BLOCK),
            kvjax.CachePolicy(Ring(slack=15), *BOTH[1], block=BLOCK),
        ),
        [
            PolicyCase(None, tolerance=1e-3, coded=coded(*BOTH[0])),
            PolicyCase(None, tolerance=1e-3, sight=(9, 0), coded=coded(*BOTH[1])),
        ],
    ),
}  # fmt: skip
"""Policies of a model's two layers, of which one has a window: what cells of one layer are not."""


@functools.cache
def truth(name):
    """Logits by plain numpy, one text at a time: of a policy's own sight."""
    layers = MODELS[name][1]
    sight = {"sight": lambda n: layers[n].sight, "coded": lambda n: layers[n].coded}
    return [naive.logits(PARAMS, MODEL.config, text, **sight) for text in TEXTS]


def test_the_training_pass_is_the_naive_model():
    apply = jax.jit(MODEL.apply)
    for text, true in zip(TEXTS, truth("dense"), strict=True):
        padded = np.zeros((1, max(LENGTHS)), np.int32)
        padded[0, : len(text)] = text
        close(np.asarray(apply(PARAMS, padded))[0, : len(text)], true, 1e-5)


@pytest.mark.slow(but=("dense",))
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=max(settings.default.max_examples // 5, 1))
@given(data=st.data())
def test_any_chunking_gives_the_uncached_logits(name, data):
    """Each call takes a drawn number of each row's next tokens, none for some rows."""
    policy, layers = MODELS[name]
    cache = kvjax.init_cache(MODEL.config, policy, batch=len(TEXTS), max_len=64)
    found: list[list[np.ndarray]] = [[] for _ in TEXTS]
    while any(len(got) < len(text) for got, text in zip(found, TEXTS, strict=True)):
        left = [len(text) - len(got) for got, text in zip(found, TEXTS, strict=True)]
        size = data.draw(st.sampled_from((1, WIDTH)), label="chunk")
        take = [data.draw(st.integers(0, min(size, n)), label="tokens") for n in left]
        if not any(take):
            take = [min(size, n) for n in left]
        tokens = np.full((len(TEXTS), size), 7, np.int32)
        for row, n in enumerate(take):
            start = len(found[row])
            tokens[row, :n] = TEXTS[row][start : start + n]
        logits, cache = APPLY(PARAMS, tokens, cache, lengths=np.asarray(take, np.int32))
        for row, n in enumerate(take):
            found[row].extend(np.asarray(logits)[row, :n])
    kvjax.check(cache)
    assert np.asarray(cache.length).tolist() == list(LENGTHS)
    for got, true in zip(found, truth(name), strict=True):
        close(np.asarray(got), true, layers[0].tolerance)


def test_last_only_is_each_rows_last_real_token():
    tokens, lengths = np.asarray([TEXTS[0][:9], TEXTS[1][:9]], np.int32), np.asarray([9, 4])
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=16)
    apply = jax.jit(MODEL.apply, static_argnames="last_only")
    every, _ = apply(PARAMS, jnp.asarray(tokens), cache, lengths=lengths)
    last, _ = apply(PARAMS, jnp.asarray(tokens), cache, lengths=lengths, last_only=True)
    assert last.shape == (2, 1, MODEL.config.vocab_size)
    close(np.asarray(last)[:, 0], np.asarray(every)[[0, 1], [8, 3]], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "new",
    [pytest.param(600, marks=pytest.mark.rare), pytest.param(1025, marks=pytest.mark.rare), 1700],
)
def test_a_long_text_in_pieces_and_at_once(new):
    """Lengths at which blocks of every size take part, with and without a cache."""
    tokens = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (1, new), np.int32)
    cache = kvjax.init_cache(MODEL.config, batch=1, max_len=4100)
    true, found = np.asarray(jax.jit(MODEL.apply)(PARAMS, tokens)), []
    for start in range(0, new, 400):
        logits, cache = APPLY(PARAMS, tokens[:, start : start + 400], cache)
        found.append(np.asarray(logits))
    close(np.concatenate(found, axis=1), true, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [None, pytest.param(8, marks=pytest.mark.rare)])
def test_a_long_prompt_is_fed_in_parts(monkeypatch, bits):
    """Where only the last logits are wanted; rows end in different parts, one has none."""
    monkeypatch.setattr(generation_model, "MAX_CHUNK", 16)
    tokens = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (4, 50), np.int32)
    lengths = np.asarray([50, 33, 5, 0])
    cache = kvjax.init_cache(MODEL.config, kvjax.policy(bits=bits), batch=4, max_len=64)
    apply = jax.jit(MODEL.apply, static_argnames="last_only")
    last, cut = apply(PARAMS, tokens, cache, lengths=lengths, last_only=True)
    every, whole = apply(PARAMS, tokens, cache, lengths=lengths)
    for row, length in enumerate(lengths[:3]):
        close(np.asarray(last)[row, 0], np.asarray(every)[row, length - 1], 1e-5)
    assert cut.length.tolist() == whole.length.tolist() == lengths.tolist()
    one = np.asarray([[1]] * 4, np.int32)
    (a, _), (b, _) = (apply(PARAMS, one, held) for held in (cut, whole))
    close(np.asarray(a), np.asarray(b), 1e-5)


@pytest.mark.slow
def test_a_call_that_sees_its_own_tokens_raw_is_not_fed_in_parts(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (1, 100), np.int32)
    policy = kvjax.policy(bits=2, prefill="exact", block=BLOCK, group_size=8)

    def last():
        cache = kvjax.init_cache(MODEL.config, policy, batch=1, max_len=128)
        apply = jax.jit(functools.partial(MODEL.apply, last_only=True))
        return np.asarray(apply(PARAMS, tokens, cache)[0])

    at_once = last()
    monkeypatch.setattr(generation_model, "MAX_CHUNK", 16)
    assert np.array_equal(last(), at_once)
    policy = kvjax.policy(bits=2, block=BLOCK, group_size=8)  # which must have been cut
    assert not np.array_equal(last(), at_once)
