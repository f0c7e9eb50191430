"""Sampling against naive numpy, Transformers, and the distributions that it promises."""

import dataclasses
import functools
import pickle
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.sampling.filters as ways
from kvjax.core.validation import ArgumentError
from kvjax.sampling import sampler as sampling
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import (
    NEUTRAL,
    NO_TOKEN,
    PARAMS,
    Filters,
    PenaltyKeywords,
    SamplingArrays,
    SamplingKeywords,
    SamplingParams,
    prepare_sampling,
)

VOCAB = 500

# As generation runs them, and one program for all numbers.
exclude_top_choices = jax.jit(ways.exclude_top_choices)
keep_top_k, keep_top_p, keep_min_p, keep_typical, keep_new_ngrams, penalize = map(
    jax.jit,
    (ways.keep_top_k, ways.keep_top_p, ways.keep_min_p, ways.keep_typical, ways.keep_new_ngrams,
     ways.penalize),
)  # fmt: skip
sample, filter_logits = (
    jax.jit(function, static_argnums=1) for function in (sampling.sample, sampling.filter_logits)
)


def some_logits(rows=4, vocab=VOCAB, seed=0, scale=3.0):
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((rows, vocab))).astype(np.float32)


def softmax(x):
    weights = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def naive_top_k(logits, k):
    kept = np.full_like(logits, -np.inf)
    for row, out in zip(logits, kept, strict=True):
        best = np.argsort(-row, kind="stable")[:k]
        out[best] = row[best]
    return kept


def naive_top_p(logits, p):
    kept = np.full_like(logits, -np.inf)
    for row, probabilities, out in zip(logits, softmax(logits), kept, strict=True):
        mass = 0.0
        for i in np.argsort(-row, kind="stable"):
            if mass >= p:
                break
            out[i] = row[i]
            mass += probabilities[i]
    return kept


def naive_min_p(logits, min_p):
    probabilities = softmax(logits)
    return np.where(probabilities >= min_p * probabilities.max(-1, keepdims=True), logits, -np.inf)


def naive_typical(logits, p):
    kept = np.full_like(logits, -np.inf)
    for row, probabilities, out in zip(logits, softmax(logits), kept, strict=True):
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(probabilities)
            far = abs(surprise - np.nansum(probabilities * surprise))
        mass = 0.0
        for i in np.argsort(far, kind="stable"):
            if mass >= p:
                break
            out[i] = row[i]
            mass += probabilities[i]
    return kept


def naive_xtc(logits, threshold, kept=()):
    """Without the tokens above the threshold, except the least likely of them and ``kept``."""
    out = logits.copy()
    for row, probabilities in zip(out, softmax(logits), strict=True):
        top = [token for token in np.argsort(probabilities) if probabilities[token] > threshold]
        row[[token for token in top[1:] if token not in kept]] = -np.inf
    return out


def naive_ngrams(logits, texts, sizes):
    """Without what would end a run of a row's own size that its text has already."""
    out = logits.copy()
    for row, text, n in zip(out, texts, sizes, strict=True):
        for end in range(n - 1, len(text)) if n else ():
            if text[end - n + 1 : end] == text[len(text) - n + 1 :]:
                row[text[end]] = -np.inf
    return out


def naive_penalty(logits, seen, penalty):
    out = logits.copy()
    for row, token in zip(*np.nonzero(seen), strict=True):
        value = logits[row, token]
        out[row, token] = value * penalty if value < 0 else value / penalty
    return out


@pytest.mark.parametrize("k", [1, 2, 7, 64, 499, 500, 100_000])
def test_top_k_is_the_naive_one(k):
    logits = some_logits()
    np.testing.assert_array_equal(keep_top_k(jnp.asarray(logits), k), naive_top_k(logits, k))


@pytest.mark.parametrize("p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_top_p_is_the_naive_one(p, scale):
    logits = some_logits(scale=scale)
    np.testing.assert_array_equal(keep_top_p(jnp.asarray(logits), p), naive_top_p(logits, p))


@pytest.mark.parametrize("min_p", [0.0, 0.01, 0.3, 1.0])
def test_min_p_is_the_naive_one(min_p):
    logits = some_logits()
    np.testing.assert_array_equal(
        keep_min_p(jnp.asarray(logits), min_p), naive_min_p(logits, min_p)
    )


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.1, 0.5])
def test_xtc_is_the_naive_one(threshold):
    logits, kept = some_logits(), jnp.asarray([[7, NO_TOKEN]] * 4)
    likeliest = int(np.argmax(logits[1]))
    for tokens in ([7], [likeliest]):
        kept = jnp.asarray([[*tokens, NO_TOKEN]] * 4)
        got = exclude_top_choices(jnp.asarray(logits), threshold, jnp.ones(4, bool), kept)
        np.testing.assert_array_equal(got, naive_xtc(logits, threshold, tokens))
    some = jnp.asarray([True, False, False, True])
    got = exclude_top_choices(jnp.asarray(logits), threshold, some, kept)
    np.testing.assert_array_equal(got[1:3], logits[1:3])
    assert not np.array_equal(got, logits) or threshold == 0.5


@pytest.mark.parametrize("p", [1e-6, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("scale", [0.1, 3.0])
def test_typical_p_is_the_naive_one(p, scale):
    logits = some_logits(scale=scale)
    np.testing.assert_array_equal(keep_typical(jnp.asarray(logits), p), naive_typical(logits, p))


@pytest.mark.parametrize("sizes", [(0, 1, 2, 3), (2, 2, 5, 30), (7, 8, 9, 2**31 - 1)], ids=str)
def test_no_ngram_comes_twice_as_in_the_naive_one(sizes):
    """Of rows of different lengths, whose buffers hold something behind them."""
    rng = np.random.default_rng(3)
    logits, tokens = some_logits(), rng.integers(0, 3, (4, 40)).astype(np.int32)
    lengths = np.array([40, 9, 24, 8], np.int32)
    texts = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    got = keep_new_ngrams(jnp.asarray(logits), tokens, lengths, np.array(sizes, np.int32))
    np.testing.assert_array_equal(got, naive_ngrams(logits, texts, sizes))


def test_a_ban_of_ngrams_gives_way_where_nothing_is_left():
    """To a guide, and to a vocabulary that has come whole."""
    logits = np.full((3, VOCAB), -np.inf, np.float32)
    logits[:, [4, 9]] = 2.0, 1.0
    tokens = np.array([[4, 9, 5], [4, 4, 0], [9, 0, 0]], np.int32)
    got = keep_new_ngrams(jnp.asarray(logits), tokens, np.array([3, 2, 0], np.int32), 1)
    assert [np.flatnonzero(np.isfinite(row)).tolist() for row in got] == [[4, 9], [9], [4, 9]]


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_penalty_is_the_naive_one(penalty):
    logits, seen = some_logits(), np.random.default_rng(1).random((4, VOCAB)) < 0.3
    penalized = penalize(jnp.asarray(logits), jnp.asarray(seen), penalty)
    np.testing.assert_allclose(penalized, naive_penalty(logits, seen, penalty), rtol=1e-6)


def test_ties_at_the_threshold_are_all_kept():
    logits = jnp.asarray([[1.0, 2.0, 2.0, 2.0, 0.0, -0.0]], jnp.float32)
    kept = np.isfinite(keep_top_k(logits, 2))[0]
    np.testing.assert_array_equal(kept, [False, True, True, True, False, False])
    np.testing.assert_array_equal(np.isfinite(keep_top_k(logits, 5))[0], [True] * 6)
    assert np.isfinite(keep_top_p(logits, 0.3)).sum() == 3


def test_filters_pass_over_what_is_masked_already():
    logits = some_logits()
    logits[:, ::2] = -np.inf
    x = jnp.asarray(logits)
    every = keep_top_k(x, 300), keep_top_p(x, 0.999), keep_min_p(x, 1e-9), keep_typical(x, 0.999)
    for kept in every:
        assert not np.isfinite(kept)[:, ::2].any()
        assert not np.isnan(kept).any()


def chosen(logits, *, count=0, seen=None, seeds=None, **settings):
    rows = logits.shape[0]
    filters, numbers = prepare_sampling(seeds=range(rows) if seeds is None else seeds, **settings)
    token, finite = sample(
        jnp.asarray(logits),
        filters,
        jax.device_put(numbers),
        count=jnp.full(rows, count, jnp.int32),
        past=None if seen is None else TokenHistory(jnp.asarray(seen)),
    )
    return np.asarray(token), np.asarray(finite)


def test_all_filters_in_the_order_of_transformers():
    """The penalties that Transformers has not come behind the one that it has; of a row's last two
    tokens, which are new, the second is the first again, or another one."""
    logits, seen = some_logits(), np.random.default_rng(1).random((4, VOCAB)) < 0.3
    logits[:, 9] = 9.0
    filters, settings = prepare_sampling(
        seeds=range(4), temperature=0.7, top_k=40, top_p=0.8, min_p=0.05, repetition_penalty=1.5,
        min_new_tokens=3, eos_token_ids=(int(logits[0].argmax()), 7), typical_p=0.7,
        frequency_penalty=0.5, presence_penalty=-0.2, no_repeat_ngram_size=2,
        xtc_probability=1, xtc_threshold=0.2,
    )  # fmt: skip
    tokens = np.random.default_rng(2).integers(0, VOCAB, (4, 30)).astype(np.int32)
    lengths = np.array([20, 30, 2, 7], np.int32)
    expected, texts = naive_penalty(logits, seen, 1.5), []
    for row, (ids, length) in enumerate(zip(tokens, lengths, strict=True)):
        ids[length - 2 : length] = (9, 9) if row % 2 else (9, 11)
        texts.append(ids[:length].tolist())
        for token in ids[length - 2 : length]:
            expected[row, token] -= 0.5
        expected[row, list({*ids[length - 2 : length]})] += 0.2
    expected = naive_ngrams(expected, texts, [2] * 4)
    expected[:, [int(logits[0].argmax()), 7]] = -np.inf
    expected = (expected - expected.max(-1, keepdims=True)) / np.float32(0.7)
    expected = naive_min_p(naive_top_p(naive_top_k(expected, 40), 0.8), 0.05)
    expected = naive_xtc(naive_typical(expected, 0.7), 0.2)
    got = filter_logits(
        jnp.asarray(logits),
        filters,
        jax.device_put(settings),
        count=jnp.full(4, 2, jnp.int32),
        past=TokenHistory(jnp.asarray(seen), jnp.asarray(tokens), jnp.asarray(lengths)),
    )
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(expected))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.oracle
def test_filters_give_the_distribution_of_transformers():
    import torch
    from transformers import LogitsProcessorList
    from transformers.generation import logits_process as theirs

    logits = some_logits()
    prompt = np.random.default_rng(2).integers(0, VOCAB, (4, 60))
    seen = np.zeros((4, VOCAB), bool)
    np.put_along_axis(seen, prompt, True, axis=1)
    processors = LogitsProcessorList(
        [
            theirs.RepetitionPenaltyLogitsProcessor(1.4),
            theirs.MinNewTokensLengthLogitsProcessor(60, 3, [5, 6], device="cpu"),
            theirs.TemperatureLogitsWarper(0.8),
            theirs.TopKLogitsWarper(50),
            theirs.TopPLogitsWarper(0.85),
            theirs.MinPLogitsWarper(0.03),
        ]
    )
    expected = processors(torch.LongTensor(prompt), torch.from_numpy(logits)).softmax(-1)
    filters, settings = prepare_sampling(
        seeds=range(4), temperature=0.8, top_k=50, top_p=0.85, min_p=0.03,
        repetition_penalty=1.4, min_new_tokens=3, eos_token_ids=(5, 6),
    )  # fmt: skip
    got = filter_logits(
        jnp.asarray(logits),
        filters,
        jax.device_put(settings),
        count=jnp.zeros(4, jnp.int32),
        past=TokenHistory(jnp.asarray(seen)),
    )
    np.testing.assert_allclose(jax.nn.softmax(got), expected.numpy(), rtol=1e-5, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 2.5},
        {"temperature": 0.4},
        {"typical_p": 0.6},
        {"xtc_probability": 1.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.3, "top_k": 5},
    ],
    ids=str,
)
def test_draws_follow_the_distribution(settings):
    """A chi-squared test over 20,000 draws: at 1e-4, and the draws are the same every time."""
    settings = {"temperature": 1.0} | settings
    draws, vocab = 20_000, 12
    row = some_logits(1, vocab, scale=1.5)
    filters, numbers = prepare_sampling(seeds=range(draws), **settings)
    count = jnp.zeros(draws, jnp.int32)
    tiled = jnp.asarray(np.tile(row, (draws, 1)))
    tokens, _ = sample(tiled, filters, numbers, count=count)
    filtered = filter_logits(
        tiled[:1],
        filters,
        jax.device_put(prepare_sampling(seeds=[0], **settings)[1]),
        count=count[:1],
    )
    expected = draws * softmax(np.asarray(filtered))[0]
    observed = np.bincount(np.asarray(tokens), minlength=vocab)
    possible = expected > 0
    assert not observed[~possible].any()
    statistic = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < 40  # chi-squared, 11 degrees of freedom: 40 is passed once in 30,000


def test_xtc_never_excludes_end_tokens():
    row = some_logits(1, 12, scale=1.5)
    end = int(row.argmax())
    filters, numbers = prepare_sampling(
        seeds=[0], temperature=1.0, xtc_probability=1, eos_token_ids=(end,)
    )
    arrays = jax.device_put(numbers)
    got = filter_logits(jnp.asarray(row), filters, arrays, count=jnp.zeros(1, jnp.int32))
    expected = naive_xtc(row - row.max(), 0.1, (end,))
    assert np.isfinite(expected[0, end]) and np.isneginf(expected).any()
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_xtc_excludes_at_its_probability_whatever_is_drawn():
    """The draws follow a mixture: whether a draw excludes does not depend on its noise."""
    draws, vocab, probability = 20_000, 12, 0.4
    row = some_logits(1, vocab, scale=1.5)
    filters, numbers = prepare_sampling(
        seeds=range(draws), temperature=1.0, xtc_probability=probability
    )
    count = jnp.zeros(draws, jnp.int32)
    tokens, _ = sample(jnp.asarray(np.tile(row, (draws, 1))), filters, numbers, count=count)
    plain, excluded = softmax(row)[0], softmax(naive_xtc(row, 0.1))[0]
    expected = draws * ((1 - probability) * plain + probability * excluded)
    observed = np.bincount(np.asarray(tokens), minlength=vocab)
    assert ((observed - expected) ** 2 / expected).sum() < 40  # as above


def test_draws_of_one_seed_follow_the_distribution_over_the_tokens_of_a_text():
    draws = 20_000
    row = np.log(np.array([[0.5, 0.3, 0.15, 0.05]], np.float32))
    filters, settings = prepare_sampling(seeds=[7] * draws, temperature=1.0)
    tiled = jnp.asarray(np.tile(row, (draws, 1)))
    count = jnp.arange(draws, dtype=jnp.int32)
    tokens, _ = sample(tiled, filters, settings, count=count)
    shares = np.bincount(np.asarray(tokens), minlength=4) / draws
    np.testing.assert_allclose(shares, np.exp(row[0]), atol=0.012)


def test_a_row_draws_the_same_in_any_batch():
    logits = some_logits(6)
    together, _ = chosen(logits, temperature=1.0, seeds=[3, 1, 4, 1, 5, 9], count=11)
    for row, seed in enumerate([3, 1, 4, 1, 5, 9]):
        alone, _ = chosen(logits[row : row + 1], temperature=1.0, seeds=[seed], count=11)
        assert alone[0] == together[row]


def test_seeds_differ_in_every_bit():
    logits = np.zeros((67, 4096), np.float32)
    seeds = [0, 2**64 - 1, 12345, *(1 << bit for bit in range(64))]
    tokens, _ = chosen(logits, temperature=1.0, seeds=seeds)
    assert len(set(tokens.tolist())) > 60
    later, _ = chosen(logits, temperature=1.0, seeds=seeds, count=1)
    assert (later != tokens).mean() > 0.9


def test_greedy_is_the_largest_whatever_else_is_asked():
    logits = some_logits()
    cases: list[dict[str, Any]] = [{}, {"top_k": 3, "top_p": 0.1}, {"temperature": 1e-60}]
    for settings in cases:
        np.testing.assert_array_equal(chosen(logits, **settings)[0], logits.argmax(-1))
    assert prepare_sampling(seeds=[0], temperature=1e-60)[0] == Filters()


@pytest.mark.parametrize("temperature", [1e-38, 2e-38, 1e-10, 1e30, 3e38, 1e39])
def test_extreme_temperatures_neither_overflow_nor_draw_what_is_masked(temperature):
    logits = some_logits(scale=1e6)
    tokens, finite = chosen(logits, temperature=temperature, top_k=3)
    best = np.argsort(-logits, axis=-1)[:, :3]
    assert finite.all()
    assert all(token in row for token, row in zip(tokens, best, strict=True))
    np.testing.assert_array_equal(
        chosen(logits, temperature=1.0, top_p=1e-60)[0], logits.argmax(-1)
    )
    if temperature < 1:
        np.testing.assert_array_equal(tokens, logits.argmax(-1))


def test_no_end_of_text_before_min_new_tokens():
    logits = np.zeros((2, 20), np.float32)
    logits[:, 3], logits[:, 4], logits[:, 5] = 9, 8, 7
    settings: dict[str, Any] = {"min_new_tokens": 2, "eos_token_ids": (3, 4)}
    assert chosen(logits, count=1, **settings)[0].tolist() == [5, 5]
    assert chosen(logits, count=2, **settings)[0].tolist() == [3, 3]
    many = {"min_new_tokens": 2, "eos_token_ids": [3, *range(6, 20)]}
    assert chosen(logits, count=0, **many)[0].tolist() == [4, 4]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_told(bad, temperature):
    logits = some_logits()
    logits[2, 17] = bad
    _, finite = chosen(logits, temperature=temperature)
    assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize("settings", [{"top_k": 50}, {"top_p": 0.9, "typical_p": 0.9}])
def test_nothing_is_sorted(settings):
    filters, numbers = prepare_sampling(seeds=[0, 1], temperature=1.0, **settings)
    logits: Any = jax.ShapeDtypeStruct((2, VOCAB), jnp.float32)
    count: Any = jax.ShapeDtypeStruct((2,), jnp.int32)
    program = sample.lower(logits, filters, numbers, count=count)
    assert not re.search(r"\bsort\(|TopK", program.compile().as_text() or "")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be .* at least 0, got -0\.1"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": float("inf")}, "temperature must be a finite number"),
        ({"top_k": float("inf")}, "top_k must be an integer"),
        ({"seeds": [10**400]}, "seed must be an integer"),
        ({"top_k": 0}, "top_k must be an integer >= 1, got 0"),
        ({"top_k": 1.5}, "top_k must be an integer"),
        ({"top_p": 0.0}, r"top_p must be above 0 and at most 1, got 0\.0"),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"min_p": 2}, "min_p must be from 0 to 1, got 2"),
        ({"xtc_probability": 1.5}, "xtc_probability must be from 0 to 1"),
        ({"xtc_threshold": 0.51}, r"xtc_threshold must be from 0 to 0\.5, got 0\.51"),
        ({"typical_p": 0.0}, r"typical_p must be above 0 and at most 1, got 0\.0"),
        ({"frequency_penalty": 2.1}, r"frequency_penalty must be from -2 to 2, got 2\.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be from -2 to 2, got nan"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size must be an integer >= 0"),
        ({"no_repeat_ngram_size": 2.5}, "no_repeat_ngram_size must be an integer"),
        ({"no_repeat_ngram_size": "2"}, "no_repeat_ngram_size must be an integer"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be from 1e-6 to 1e6"),
        ({"seeds": [-1]}, r"seed must be .* from 0 to 2\*\*64 - 1, got -1"),
        ({"seeds": [2**64]}, "seed must be"),
        ({"seeds": [1.5]}, "seed must be an integer"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ArgumentError, match=message) as error:
        prepare_sampling(**{"seeds": [0], **settings})
    assert error.value.param == next(iter(settings)).replace("seeds", "seed")
    assert pickle.loads(pickle.dumps(error.value)).param == error.value.param


def test_every_parameter_is_declared_in_all_places():
    names = {each.name for each in dataclasses.fields(SamplingParams)}
    keywords = SamplingKeywords.__annotations__ | PenaltyKeywords.__annotations__
    assert names - {"logits_hook"} == keywords.keys() == PARAMS.keys() | {"logit_bias"}
    arrays = {each.name for each in dataclasses.fields(SamplingArrays)}
    assert arrays == NEUTRAL.keys() | {"seeds", "eos", "bias"}
    steps = {param.step for param in PARAMS.values() if param.step}
    flags = {each.name for each in dataclasses.fields(Filters)}
    assert flags == steps | {"greedy", "bias", "mesh", "hook"}
    filters, neutral = prepare_sampling(seeds=[0])
    traced = {name: bool(value) for name, value in vars(neutral.filters).items()}
    assert filters == Filters() and traced == vars(filters) | {"hook": False}
    for name, value in NEUTRAL.items():
        assert getattr(neutral, name).dtype == value.dtype
        assert np.all(getattr(neutral, name) == value), name
    for name, param in PARAMS.items():
        assert f"  {name}: {param.help[:20]}" in (SamplingParams.__doc__ or "") and param.range
        assert param.allowed(param.example) and param.array_value(param.example) != param.neutral


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 4, "top_p": 0.7}, {"min_p": 0.1, "typical_p": 0.7},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                {"top_k": 3}, {"top_p": 0.9, "typical_p": 0.8}, {"top_p": 0.6},
                {"typical_p": 0.6}, {"top_p": 0.8, "min_p": 0.1},
                {"top_k": 5, "min_p": 0.2}, {"top_k": 6, "typical_p": 0.7},
            )
        ),
    ],
)  # fmt: skip
def test_what_is_looked_up_is_what_a_search_finds(settings):
    """Each row by itself, so that some are looked up, and some searched for; also where filters are
    taken as the program runs."""
    rows, vocab = 400, 24
    logits = np.random.default_rng(0).integers(-3, 4, (rows, 1, vocab)).astype(np.float32)
    filters, found = prepare_sampling(seeds=range(rows), temperature=1.3, **settings)
    numbers = jax.tree.map(lambda x: jnp.asarray(x)[:, None], found)
    none = jnp.zeros(1, jnp.int32)
    past = TokenHistory(jnp.zeros((1, vocab), bool), jnp.zeros((1, 8), jnp.int32), none)

    def drawn(logits, numbers, traced=False, **changes):
        steps = dataclasses.replace(numbers.filters if traced else filters, **changes)
        return sampling.sample(logits, steps, numbers, count=none, past=past)[0]

    wanted = jax.vmap(functools.partial(drawn, mesh=True))(logits, numbers)
    for traced in (False, True):
        looked = jax.vmap(functools.partial(drawn, traced=traced))(logits, numbers)
        assert np.array_equal(looked, wanted)
    # Of the filters that keep all, some other token would have been drawn.
    free = dataclasses.replace(filters, top_k=False, top_p=False, min_p=False, typical_p=False)
    every = jax.vmap(lambda x, s: sampling.sample(x, free, s, count=none)[0])
    assert 0.1 < np.mean(np.asarray(every(logits, numbers)) != np.asarray(wanted)) < 0.9
