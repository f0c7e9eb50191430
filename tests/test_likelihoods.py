"""Log-likelihoods of many continuations: the same as one pass each, and computed once."""

import jax
import numpy as np
import pytest

import kvjax
from kvjax.generation import likelihoods as module
from kvjax.generation.likelihoods import MIN_SHARED, likelihoods

RNG = np.random.default_rng(0)


def ids(count: int) -> tuple[int, ...]:
    return tuple(RNG.integers(1, 256, count).tolist())


SHOTS, NESTED = ids(100), ids(70)
ALIKE = [SHOTS + ids(n) for n in (3, 9, 20, 1, 14, 6, 11)]
"""Contexts after the same examples."""
DEEPER = [SHOTS + NESTED + ids(n) for n in (5, 2, 8, 4, 7)]
OTHERS = [ids(n) for n in (1, 5, 40, 90)]
ENDS = [ids(n) for n in (1, 1, 2, 5, 9)]
PAIRS = [(context, end) for context in (*ALIKE, *DEEPER, *OTHERS) for end in ENDS]
PAIRS += [(OTHERS[0], ids(150)), PAIRS[3], (SHOTS, NESTED[:4])]

FEW = [(context, end) for context in ALIKE[:4] for end in ENDS[1:4]]
"""Without deeper prefixes, so that few programs are compiled."""


def expected(lm, pairs):
    """One pass without a cache for each pair."""
    longest = max(len(context) + len(end) for context, end in pairs)
    run = jax.jit(lambda tokens: jax.nn.log_softmax(lm.apply(lm.params, tokens)[0]))
    logprobs, greedy = [], []
    for context, end in pairs:
        tokens = np.zeros((1, longest), np.int32)
        tokens[0, : len(context) + len(end)] = context + end
        scores = np.asarray(run(tokens))[len(context) - 1 :][: len(end)]
        logprobs.append(scores[range(len(end)), end].sum())
        greedy.append(bool((scores.argmax(-1) == end).all()))
    return np.array(logprobs), greedy


def assert_expected(lm, pairs, results, atol=1e-4):
    logprobs, greedy = expected(lm, pairs)
    np.testing.assert_allclose([each.logprob for each in results], logprobs, atol=atol)
    assert [each.greedy for each in results] == greedy


def with_greedy_ends(lm, pairs):
    """Further pairs, whose continuations are what the model generates."""
    contexts = list(dict.fromkeys(context for context, _ in pairs))[::4]
    texts = kvjax.generate(
        lm, [list(each) for each in contexts], max_new_tokens=4, eos_token_ids=()
    )
    return [*pairs, *((each, tuple(new)) for each, new in zip(contexts, texts.tokens, strict=True))]


@pytest.mark.slow(but=("few",))
@pytest.mark.parametrize(
    ("policy", "rows", "pairs"),
    [
        pytest.param("static", 3, FEW, id="few"),
        pytest.param("paged", 3, PAIRS, id="paged"),
        pytest.param("dynamic", 1, PAIRS, id="dynamic"),
        pytest.param("offloaded", 64, PAIRS, id="offloaded"),
    ],
)
def test_they_are_those_of_one_pass_each(tiny_llama, policy, rows, pairs):
    pairs = with_greedy_ends(tiny_llama, pairs)
    counts = []
    results = likelihoods(
        tiny_llama, pairs, cache=policy, rows=rows, prefill_chunk=32, callback=counts.append
    )
    assert_expected(tiny_llama, pairs, results)
    assert sum(counts) == len(set(pairs))
    assert any(each.greedy for each in results) and not all(each.greedy for each in results)


@pytest.mark.slow
def test_a_common_prefix_is_computed_once(tiny_llama, monkeypatch):
    read = []
    for name in ("_donating_append", "_keeping_append", "_donating_tails", "_keeping_tails"):
        call = getattr(module, name)

        def counted(*args, call=call):
            read.append(int(args[-1].sum()))
            return call(*args)

        monkeypatch.setattr(module, name, counted)
    likelihoods(tiny_llama, PAIRS, rows=2)
    contexts, tails = {context for context, _ in PAIRS}, sum(len(end) - 1 for _, end in set(PAIRS))
    alone = sum(map(len, contexts))
    assert MIN_SHARED < len(NESTED) < len(SHOTS)
    shared = (len(ALIKE) + len(DEEPER) - 1) * len(SHOTS) + (len(DEEPER) - 1) * len(NESTED)
    assert abs(sum(read) - (alone + tails - shared)) < len(SHOTS)


@pytest.mark.slow
def test_few_logits_at_a_time(tiny_llama, monkeypatch):
    monkeypatch.setattr(module, "MAX_LOGITS", 4 * 258 * 16)
    assert_expected(tiny_llama, PAIRS, likelihoods(tiny_llama, PAIRS, rows=4))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("policy", ["static", "paged"])
def test_on_a_mesh(tiny_llama, policy, sizes):
    lm = tiny_llama.on(kvjax.make_mesh(**sizes))
    results = likelihoods(lm, PAIRS, cache=policy, rows=3)
    assert_expected(tiny_llama, PAIRS, results)


@pytest.mark.slow
def test_a_lossy_policy_gives_what_score_gives(tiny_llama):
    policy = kvjax.policy("paged", bits=4, block=16, page_size=32)
    results = likelihoods(tiny_llama, PAIRS, cache=policy, rows=3)
    for (context, end), result in list(zip(PAIRS, results, strict=True))[::7]:
        scored = kvjax.score(tiny_llama, [list(context)], [list(end)], cache=policy)
        assert result.logprob == pytest.approx(float(scored.totals[0]), abs=1e-3)
    exact, _ = expected(tiny_llama, PAIRS)
    assert max(abs(exact - [each.logprob for each in results])) > 1e-3


def test_what_is_refused(tiny_llama):
    for pairs, message in (
        ([((), (1,))], "the context of pair 0 is empty"),
        ([((1,), (2,)), ((1,), ())], "the continuation of pair 1 is empty"),
        ([((1,), (258,))], "258 is out of range"),
    ):
        with pytest.raises(ValueError, match=message):
            likelihoods(tiny_llama, pairs)
    with pytest.raises(ValueError, match="rows must be"):
        likelihoods(tiny_llama, [((1,), (2,))], rows=0)
    broken = jax.tree.map(lambda x: x * np.nan, tiny_llama.params)
    with pytest.raises(kvjax.NonFiniteError):
        likelihoods(tiny_llama.with_params(broken), [((1,), (2, 3))])
