"""The recompute law: cached in any chunks, a text has the logits of one uncached pass."""

import itertools

import jax
import jax.numpy as jnp
import naive
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix import CELLS, tiny_model

import kvjax

MODEL, PARAMS = tiny_model()
LENGTHS = (44, 31, 1)
TEXTS = [
    np.random.default_rng(row).integers(0, MODEL.config.vocab_size, n).tolist()
    for row, n in enumerate(LENGTHS)
]
APPLY = jax.jit(MODEL.apply, donate_argnums=2)
CHUNKS = (1, 5, 16)
"""Sizes that calls are padded to, so that the drawn chunkings share compiled programs."""


@pytest.fixture(scope="module")
def truth():
    """Logits by plain numpy, one text at a time: of each cell's own sight."""
    return {
        name: [
            naive.logits(PARAMS, MODEL.config, text, store=cell.store, sight=cell.sight)
            for text in TEXTS
        ]
        for name, cell in CELLS.items()
    }


def close(found, wanted, tolerance):
    assert np.all(np.isfinite(found))
    assert np.abs(found - wanted).max() <= tolerance * np.abs(wanted).max()


def test_the_training_pass_is_the_naive_model(truth):
    for text, wanted in zip(TEXTS, truth["dense-raw-device"], strict=True):
        found = MODEL.apply(PARAMS, jnp.asarray([text]))
        close(np.asarray(found)[0], wanted, 1e-5)


@pytest.mark.parametrize("name", CELLS)
@given(data=st.data())
def test_any_chunking_gives_the_uncached_logits(name, truth, data):
    """Each call takes a drawn number of each row's next tokens, none for some rows."""
    cell = CELLS[name]
    max_len = data.draw(st.sampled_from([max(LENGTHS), 1024]), label="max_len")
    cache = kvjax.init_cache(MODEL.config, cell.policy, batch=len(TEXTS), max_len=max_len)
    found: list[list[np.ndarray]] = [[] for _ in TEXTS]
    while any(len(got) < len(text) for got, text in zip(found, TEXTS, strict=True)):
        left = [len(text) - len(got) for got, text in zip(found, TEXTS, strict=True)]
        size = data.draw(st.sampled_from(CHUNKS), label="chunk")
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
    for got, wanted in zip(found, truth[name], strict=True):
        close(np.asarray(got), wanted, cell.tolerance)


@pytest.mark.parametrize("name", CELLS)
def test_the_same_text_leaves_identical_arrays(name):
    """What a cache holds does not depend on how the text was cut, where a row's products don't."""
    cell, text = CELLS[name], np.asarray(TEXTS[0], np.int32)
    keys = np.random.default_rng(0).normal(size=(1, 2, len(text), 8)).astype(np.float32)

    def fill(cuts):
        cache = kvjax.init_cache(MODEL.config, cell.policy, batch=1, max_len=64)
        for start, stop in itertools.pairwise(cuts):
            for layer in range(MODEL.config.num_hidden_layers):
                part = keys[:, :, start:stop]
                cache = kvjax.append(cache, layer, part, part * 2)
            cache = kvjax.advance(cache, stop - start)
        return cache

    size = kvjax.init_cache(MODEL.config, cell.policy, batch=1, max_len=64).chunk or len(text)
    whole, cut = fill([*range(0, len(text), size), len(text)]), fill(range(len(text) + 1))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


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
