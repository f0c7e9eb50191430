"""The recompute law: cached in any chunks, a text has the logits of one uncached pass."""

import functools
import itertools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import BLOCK, CELLS, CODECS, CODED, FULL, LAYOUTS, cells, tiny_config, tiny_model

import kvjax
from kvjax.models import architecture

MODEL, PARAMS = tiny_model()
LENGTHS = (44, 31, 1)
TEXTS = [
    np.random.default_rng(row).integers(0, MODEL.config.vocab_size, n).tolist()
    for row, n in enumerate(LENGTHS)
]
APPLY = jax.jit(MODEL.apply, donate_argnums=2)
CHUNKS = (1, 5, 16)
"""Sizes that calls are padded to, so that the drawn chunkings share compiled programs."""
FEWER = CHUNKS if FULL else (1, 16)
"""The same through codecs, where each takes long to compile; rows may still take 0 to 16 tokens."""


@functools.cache
def truth(name):
    """Logits by plain numpy, one text at a time: of a cell's own sight."""
    cell = CELLS[name]
    sight = {"store": cell.store, "sight": cell.sight, "coded": cell.coded}
    return [naive.logits(PARAMS, MODEL.config, text, **sight) for text in TEXTS]


def close(found, wanted, tolerance):
    assert np.all(np.isfinite(found))
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def test_the_training_pass_is_the_naive_model():
    for text, wanted in zip(TEXTS, truth("dense-raw-device"), strict=True):
        found = MODEL.apply(PARAMS, jnp.asarray([text]))
        close(np.asarray(found)[0], wanted, 1e-5)


@pytest.mark.parametrize("name", [name for name in CELLS if name not in CODED])
@given(data=st.data())
def test_any_chunking_gives_the_uncached_logits(name, data):
    check_a_chunking(name, data, [max(LENGTHS), 1024], CHUNKS)


# Seven pairs of codecs on five layouts, one after the other: every third has each of both.
@pytest.mark.parametrize("name", cells(CODED, one_in=3))
@settings(max_examples=max(settings.default.max_examples // 4, 1))
@given(data=st.data())
def test_any_chunking_gives_the_uncached_logits_through_codecs(name, data):
    # One capacity a cell, so that it compiles half as many programs; the cells have both.
    check_a_chunking(name, data, [(max(LENGTHS), 1024)[list(CODED).index(name) % 2]], FEWER)


def check_a_chunking(name, data, capacities, chunks):
    """Each call takes a drawn number of each row's next tokens, none for some rows."""
    cell = CELLS[name]
    max_len = data.draw(st.sampled_from(capacities), label="max_len")
    cache = kvjax.init_cache(MODEL.config, cell.policy, batch=len(TEXTS), max_len=max_len)
    found: list[list[np.ndarray]] = [[] for _ in TEXTS]
    while any(len(got) < len(text) for got, text in zip(found, TEXTS, strict=True)):
        left = [len(text) - len(got) for got, text in zip(found, TEXTS, strict=True)]
        size = data.draw(st.sampled_from(chunks), label="chunk")
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
    for got, wanted in zip(found, truth(name), strict=True):
        close(np.asarray(got), wanted, cell.tolerance)


EVERY = {name: cell.policy for name, cell in CELLS.items() if name not in CODED} | {
    f"{layout}-every-codec": [
        kvjax.CachePolicy(made, codec, codec, block=BLOCK, recent=number % 3)
        for number, codec in enumerate(CODECS.values())
    ]
    for layout, (made, _) in LAYOUTS.items()
}


@pytest.mark.parametrize("name", EVERY)
def test_the_same_text_leaves_identical_arrays(name):
    """What a cache holds does not depend on how the text was cut, where a row's products don't."""
    policy, tokens = EVERY[name], 48
    layers = len(policy) if isinstance(policy, list) else 2
    config = tiny_config(num_hidden_layers=layers, windows=(None, 9) * (layers // 2))
    keys = np.random.default_rng(0).normal(size=(1, 2, tokens, 8)).astype(np.float32)

    @jax.jit
    def step(cache, part):
        for layer in range(layers):
            cache = kvjax.append(cache, layer, part, part * 2)
        return kvjax.advance(cache, part.shape[2])

    def fill(cuts):
        cache = kvjax.init_cache(config, policy, batch=1, max_len=64)
        for start, stop in itertools.pairwise(cuts):
            cache = step(cache, keys[:, :, start:stop])
        return cache

    size = kvjax.init_cache(config, policy, batch=1, max_len=64).chunk or tokens
    whole, cut = fill([*range(0, tokens, size), tokens]), fill(range(tokens + 1))
    # Few sizes, for each is compiled; they begin and end everywhere in a block.
    pieces = itertools.cycle(min(n, size) for n in (3, 16, 1, 3, 16, 3, 1, 3, 1, 1))
    ends = itertools.takewhile(lambda n: n < tokens, itertools.accumulate(pieces))
    uneven = fill([0, *ends, tokens])
    for a, b, c in zip(*map(jax.tree.leaves, (whole, cut, uneven)), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
        assert np.array_equal(np.asarray(a), np.asarray(c))


def test_last_only_is_each_rows_last_real_token():
    tokens, lengths = np.asarray([TEXTS[0][:9], TEXTS[1][:9]], np.int32), np.asarray([9, 4])
    cache = kvjax.init_cache(MODEL.config, batch=2, max_len=16)
    every, _ = MODEL.apply(PARAMS, tokens, cache, lengths=lengths)
    last, _ = MODEL.apply(PARAMS, tokens, cache, lengths=lengths, last_only=True)
    assert last.shape == (2, 1, MODEL.config.vocab_size)
    close(np.asarray(last)[:, 0], np.asarray(every)[[0, 1], [8, 3]], 1e-5)


@pytest.mark.parametrize("new", [600, 1025, 1700])
def test_a_long_text_in_pieces_and_at_once(new):
    """Lengths at which blocks of every size take part, with and without a cache."""
    tokens = jax.random.randint(jax.random.key(0), (1, new), 0, MODEL.config.vocab_size)
    cache = kvjax.init_cache(MODEL.config, batch=1, max_len=4100)
    wanted = MODEL.apply(PARAMS, tokens)
    for start in range(0, new, 400):
        logits, cache = APPLY(PARAMS, tokens[:, start : start + 400], cache)
        piece = wanted[:, start : start + 400]
        assert jnp.abs(logits - piece).max() <= 1e-5 * jnp.abs(wanted).max()


@pytest.mark.parametrize("bits", [None, 8])
def test_a_long_prompt_is_fed_in_parts(monkeypatch, bits):
    """Where only the last logits are wanted; rows end in different parts, one has none."""
    monkeypatch.setattr(architecture, "PIECE", 16)
    tokens = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (4, 50), np.int32)
    lengths = np.asarray([50, 33, 5, 0])
    cache = kvjax.init_cache(MODEL.config, kvjax.policy(bits=bits), batch=4, max_len=64)
    last, cut = MODEL.apply(PARAMS, tokens, cache, lengths=lengths, last_only=True)
    every, whole = MODEL.apply(PARAMS, tokens, cache, lengths=lengths)
    for row, length in enumerate(lengths[:3]):
        close(np.asarray(last)[row, 0], np.asarray(every)[row, length - 1], 1e-5)
    assert cut.length.tolist() == whole.length.tolist() == lengths.tolist()
    one = np.asarray([[1]] * 4, np.int32)
    (a, _), (b, _) = (MODEL.apply(PARAMS, one, held) for held in (cut, whole))
    close(np.asarray(a), np.asarray(b), 1e-5)


def test_a_call_that_sees_its_own_tokens_raw_is_not_fed_in_parts(monkeypatch):
    tokens = np.random.default_rng(0).integers(0, MODEL.config.vocab_size, (1, 300), np.int32)
    policy = kvjax.policy(bits=2, prefill="exact")

    def last():
        cache = kvjax.init_cache(MODEL.config, policy, batch=1, max_len=320)
        return np.asarray(MODEL.apply(PARAMS, tokens, cache, last_only=True)[0])

    at_once = last()
    monkeypatch.setattr(architecture, "PIECE", 16)
    assert np.array_equal(last(), at_once)
