"""Speculative decoding: with any drafts, results equal those without drafts."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.codecs import Int8
from kvjax.core.pytree import tree_bytes
from kvjax.engine.drafts import LookupTable
from kvjax.generation.drafts.acceptance import Acceptance, draft_cost
from kvjax.layouts import Dense
from kvjax.models import first_layers
from tests.copies import assert_no_copy
from tests.matrix import PATH_PAIRS, choice, path_cells, policy_case, some
from tests.test_prefixes import small

KINDS = {"greedy": {}, "drawn": {"temperature": 0.8, "top_p": 0.9}}
NEW = 40


@functools.cache
def prompts():
    """Four rows of different lengths, one of them repetitive."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 61, count).tolist() for count in (11, 23, 5)]
    return [[7, 3, 9, 1] * 5, *rows]


@functools.cache
def unlike(scale):
    """The model with slightly or strongly changed weights."""
    lm = small()
    rng = np.random.default_rng(1)
    noise = lambda x: x + scale * np.std(x) * rng.standard_normal(x.shape).astype(np.float32)  # noqa: E731
    return replace(lm, params=jax.tree.map(noise, lm.params), source="a draft")


def drafts(length):
    """A good draft model, a bad one, and prompt lookup."""
    return {
        "good": kvjax.DraftModel(unlike(0.05), length, adaptive=False),
        "bad": kvjax.DraftModel(unlike(3.0), length, adaptive=False),
        "lookup": kvjax.PromptLookup(length, min_ngram=1, adaptive=False),
    }


def near_ties(lm, texts, found, wanted, drawn):
    """The number of rows that differ from a tie of two tokens on. Other differences are errors."""
    count = 0
    for row, (own, other) in enumerate(zip(found, wanted, strict=True)):
        if own == other:
            continue
        at = next(n for n, (a, b) in enumerate(zip(own, other, strict=True)) if a != b)
        logits = lm.apply(lm.params, jnp.asarray([[*texts[row], *own[:at]]]))[0, -1:]
        assert not drawn, f"row {row} differs from its token {at} on"
        gap = abs(float(logits[0, own[at]] - logits[0, other[at]]))
        assert gap < 1e-4, f"row {row}, token {at}: {gap}"
        count += 1
    return count


CELLS = {cell.id: cell for cell in choice(path_cells(), PATH_PAIRS)}


@pytest.mark.parametrize("kind", some(KINDS, "drawn"))
@pytest.mark.parametrize("cell", some(CELLS, "ring-int1-int8-head"))
def test_the_text_is_what_it_is_without_them(cell, kind):
    cell, drawn, lm = CELLS[cell], KINDS[kind], small()
    policy = policy_case(
        cell.codecs, cell.layout, "host" if "int2" in cell.codecs else "device"
    ).policy
    given = {
        "max_new_tokens": NEW, "cache": policy, "max_len": 128, "prefill_chunk": 8, "seed": 5,
        "logprobs": 2, **drawn,
    }  # fmt: skip
    wanted = kvjax.generate(lm, prompts(), **given)
    for name, draft in drafts(5).items():
        found = kvjax.generate(lm, prompts(), draft=draft, **given)
        ties = near_ties(lm, prompts(), found.tokens, wanted.tokens, drawn)
        stats = found.stats.speculation
        assert stats.drafted_tokens > stats.accepted_tokens, name
        assert ties or stats.passes + stats.saved_passes == NEW - 1
        assert name == "bad" or stats.accepted_tokens > (0 if name == "lookup" else 20)
        assert np.array_equal(found.cache.length, wanted.cache.length) or ties
        if ties:
            continue
        for own, other in zip(found.logprobs, wanted.logprobs, strict=True):
            both = zip(own, other, strict=True)
            assert max(abs(a.logprob - b.logprob) for a, b in both) < 2e-4


@pytest.mark.slow
def test_rows_go_on_alone():
    """Other rows, dispatches, streams and samples change no result, and statistics add up."""
    lm, policy = small(), kvjax.CachePolicy(Dense(), block=8)
    given = {
        "max_new_tokens": NEW, "cache": policy, "max_len": 128, "prefill_chunk": 8,
        "temperature": 0.8, "top_p": 0.9,
    }  # fmt: skip
    draft = drafts(5)["good"]
    together = kvjax.generate(lm, prompts(), seed=[3, 4, 5, 6], draft=draft, **given)
    stream = kvjax.stream(lm, prompts(), seed=[3, 4, 5, 6], draft=draft, **given)
    rows = [[] for _ in prompts()]
    for piece in stream:
        for row, new in zip(rows, piece.tokens, strict=True):
            row += new
    assert rows == together.tokens == stream.result.tokens
    sampled = kvjax.generate(lm, [prompts()[0]] * 2, n=2, seed=[3, 7, 3, 7], draft=draft, **given)
    assert sampled.tokens[0] == sampled.tokens[2] == together.tokens[0]
    went_on = [
        kvjax.generate(lm, [new[-1:]], cache=kvjax.select(together.cache, [row]), **greedy())
        for row, new in enumerate(together.tokens[:2])
    ]
    plain = kvjax.generate(lm, prompts(), seed=[3, 4, 5, 6], **given)
    for row, found in enumerate(went_on):
        cache = kvjax.select(plain.cache, [row])
        again = kvjax.generate(lm, [plain.tokens[row][-1:]], cache=cache, **greedy())
        assert found.tokens == again.tokens


def greedy():
    return {"max_new_tokens": 6, "prefill_chunk": 8}


def looked_up(text, length):
    """What followed the last earlier occurrence of the row's last tokens, at most four."""
    for count in (4, 3, 2, 1):
        for end in range(len(text) - 1, count - 1, -1):
            if count < len(text) and text[end - count : end] == text[-count:]:
                period = text[end:]
                return [period[n % len(period)] for n in range(length)]
    return []


@pytest.mark.slow(but=("lookup",))
@pytest.mark.parametrize("kind", ["model", "lookup"])
def test_as_many_are_accepted_as_are_right(kind):
    """Compared with a draft model without a cache, and a search in plain Python."""
    lm, length, prompt = small(), 3, prompts()[0]
    other = unlike(0.3)
    draft = (
        kvjax.DraftModel(other, length, adaptive=False) if kind == "model"
        else kvjax.PromptLookup(length, min_ngram=1, adaptive=False)
    )  # fmt: skip
    given = {"max_new_tokens": NEW, "max_len": 128, "prefill_chunk": 8}
    found = kvjax.generate(lm, [prompt], draft=draft, **given)
    text = [*prompt, *found.tokens[0]]
    said = np.asarray(jnp.argmax(other.apply(other.params, jnp.asarray([text]))[0], axis=-1))
    at, accepted, proposed, passes = len(prompt) + 1, 0, 0, 0
    while at < len(text):
        most = min(length, len(text) - at - 1)
        guess = looked_up(text[:at], most)
        if kind == "model":
            guess = [said[at - 1 + n] for n in range(most)]
        right = 0
        while right < len(guess) and guess[right] == text[at + right]:
            right += 1
        accepted, proposed, passes = accepted + right, proposed + len(guess), passes + 1
        at += right + 1
    stats = found.stats.speculation
    assert (stats.accepted_tokens, stats.drafted_tokens, stats.passes) == (
        accepted,
        proposed,
        passes,
    )
    assert 3 < accepted < proposed


@pytest.mark.rare
def test_drafts_rest_where_they_are_worth_nothing():
    lm = small()
    given = {"max_new_tokens": 90, "max_len": 128, "prefill_chunk": 8, "temperature": 0.8}
    found = kvjax.generate(lm, [[7, 3, 9]], draft=kvjax.DraftModel(unlike(3.0), 5), **given)
    wanted = kvjax.generate(lm, [[7, 3, 9]], **given)
    assert found.tokens == wanted.tokens
    # A draft model of the target's size can't save anything.
    assert found.stats.speculation.drafted_tokens == 0 and found.stats.speculation.passes == 89


def test_a_round_is_priced():
    """Acceptance decides how many tokens are drafted next, if any."""
    price, rows = draft_cost("cpu", 1, 7, 0.02), jnp.asarray([True])
    full = jnp.asarray([7])
    start = jax.tree.map(jnp.asarray, Acceptance.new(1))
    assert start.draft_lengths(full, price, rows)[0] == 7
    good = bad = start
    rested = 0
    for _ in range(6):
        good = good.updated(full, jnp.asarray([5]), 7, price, rows)
        if bad.draft_lengths(full, price, rows)[0]:
            bad = bad.updated(full, jnp.asarray([0]), 7, price, rows)
        else:
            bad, rested = bad.without_draft(), rested + 1
    assert good.draft_lengths(full, price, rows)[0] == 7 and rested >= 1
    assert int(bad.cooldown) + rested == 16 and int(bad.next_cooldown) == 32
    # Without a match nothing is drafted. Expensive drafts are shorter.
    assert good.draft_lengths(jnp.asarray([0]), price, rows)[0] == 0
    assert good.draft_lengths(full, replace(price, token=0.4), rows)[0] < 7


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("prompt", "draft is 'prompt'"),
        (Int8(), "draft is Integer"),
        (lambda: kvjax.PromptLookup(99), "num_draft_tokens is 99"),
        (lambda: kvjax.PromptLookup(min_ngram=3, max_ngram=2), "max_ngram"),
        (
            lambda: small(vocab_size=62),
            "the draft's vocabulary has 62 tokens, but the target model's has 61",
        ),
        (lambda: kvjax.DraftModel(small(), cache=kvjax.policy("auto")), "policy\\('auto'\\)"),
    ],
)
def test_what_is_no_draft(draft, words):
    with pytest.raises(ValueError, match=words):
        draft = draft() if callable(draft) else draft
        kvjax.generate(small(), [[1, 2]], max_new_tokens=2, draft=draft)


def test_what_does_not_go_with_drafts():
    for more, words in (
        ({"use_cache": False}, "use_cache=False"),
        ({"num_beams": 2}, "a draft was given together with num_beams"),
    ):
        with pytest.raises(ValueError, match=words):
            kvjax.generate(small(), [[1, 2]], max_new_tokens=2, draft="lookup", **more)


@pytest.mark.slow
def test_first_layers():
    lm = small()
    first = first_layers(lm, 1)
    assert first.config.num_hidden_layers == 1 and first.config.windows == (None,)
    own, its = lm.params["model"], first.params["model"]
    assert its["layers"].keys() == {"0"} and its["norm"]["weight"] is own["norm"]["weight"]
    given = {"max_new_tokens": 12, "max_len": 128, "prefill_chunk": 8}
    draft = kvjax.DraftModel(first, 3, adaptive=False)
    found = kvjax.generate(lm, prompts()[:1], draft=draft, **given)
    assert found.tokens == kvjax.generate(lm, prompts()[:1], **given).tokens
    assert found.stats.speculation.drafted_tokens > 0
    with pytest.raises(ValueError, match=r"layers is 2, and must be less than the model.s 2"):
        first_layers(lm, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "bits", "long"),
    [
        ("lookup", "static", 4096),
        pytest.param("good", "static", 4096, marks=pytest.mark.rare),
        pytest.param("good", "8 bits", 32768, marks=pytest.mark.rare),
    ],
)
def test_the_loop_copies_no_cache(kind, bits, long):
    """As compiled here. For TPUs and GPUs see ``test_devices.py``."""
    lm, policy = small(), kvjax.policy("static" if bits == "static" else "quantized")
    given = {"max_len": long, "draft": drafts(5)[kind], "temperature": 1.0}
    made = kvjax.compile(lm, policy, batch=2, **given)
    program = made.executables["decode"]
    cache = jax.eval_shape(
        functools.partial(kvjax.init_cache, lm.config, policy, batch=2, max_len=long)
    )
    assert_no_copy(program, kvjax.nbytes(cache)["device"], tree_bytes(cache.layers[0]))
    result = kvjax.generate(lm, prompts()[:2], cache=policy, max_new_tokens=9, **given)
    assert result.stats.compilations == 0


def test_lookups_of_the_host_are_those_of_the_device():
    rng = np.random.default_rng(5)
    for _ in range(20):
        text = rng.integers(0, 4, int(rng.integers(1, 40))).tolist()
        lookups = LookupTable(kvjax.PromptLookup(min_ngram=1), text[:1])
        lookups.push(text[1:])
        assert lookups.propose(7) == looked_up(text, 7)
