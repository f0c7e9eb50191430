"""Beam searches in an engine give the results of ``generate``, next to any other requests, and
leak no page. The best of several samples."""

import functools
import random
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.core.validation import NonFiniteError
from kvjax.generation.results import Timer
from tests.test_beams import one_layer
from tests.test_engine import engine_of, settings_of, settled, told, until
from tests.test_guided import Anything
from tests.test_prefixes import CHUNK, MOST, POLICIES

PROMPT = np.random.default_rng(1).integers(0, 61, 37).tolist()
WIDE = {
    "num_beams": 3, "n": 3, "max_new_tokens": 24, "eos_token_ids": [7, 12, 22], "logprobs": 3,
    "min_new_tokens": 4,
}  # fmt: skip
WAYS = (
    WIDE,
    WIDE | {"length_penalty": 0.3, "early_stopping": True, "eos_token_ids": [*range(12)]},
    WIDE | {"n": 1, "length_penalty": 1.5, "early_stopping": "never"},
    WIDE | {"max_new_tokens": 1, "min_new_tokens": 1},
)
RARE = [
    pytest.param(name, marks=pytest.mark.rare)
    for name in ("int8", "4 and 2 bits", "sinks", "sinks of 8 bits", "hybrid of slots", "host")
]


def engine(policy="raw", **more):
    return engine_of(policy, lm=one_layer(), **more)


@pytest.mark.parametrize("policy", ["raw", *RARE])
def test_results_match_generate(policy):
    mine = engine(policy, pages=40)
    for way in WAYS:
        given = {"cache": POLICIES[policy], "max_len": MOST, "prefill_chunk": CHUNK}
        wanted = kvjax.generate(one_layer(), [PROMPT], **given, **way)
        (handle,) = mine.run([PROMPT], **way)
        assert [found.tokens for found in handle.beam_results] == wanted.tokens
        scores = [found.score for found in handle.beam_results]
        np.testing.assert_allclose(scores, wanted.sequence_scores, atol=1e-4)
        assert [found.finish_reason for found in handle.beam_results] == list(
            wanted.stats.finish_reasons
        )
        assert (
            handle.tokens == wanted.tokens[0]
            and handle.finish_reason == handle.beam_results[0].finish_reason
        )
        for found, row in zip(handle.beam_results, wanted.logprobs, strict=True):
            for one, other in zip(found.logprobs, row, strict=True):
                assert [token for token, _ in one.top_logprobs] == [
                    x for x, _ in other.top_logprobs
                ]
                assert abs(one.logprob - other.logprob) < 1e-4
        assert settled(mine)


@pytest.mark.rare
@pytest.mark.parametrize("policy", ["raw", "int8", "sinks"])
def test_it_works_on_a_mesh(policy):
    mesh, found = kvjax.make_mesh(tensor=2, devices=jax.devices()[:2]), []
    for lm in (one_layer(), one_layer().on(mesh)):
        mine = engine_of(policy, lm=lm, pages=40)
        found.append(mine.run([PROMPT], **WIDE)[0].beam_results)
        assert settled(mine)
    assert [x.tokens for x in found[0]] == [x.tokens for x in found[1]]


@functools.cache
def ordinary():
    rng = np.random.default_rng(2)
    some = [(rng.integers(0, 61, int(rng.integers(20, 90))).tolist(), n) for n in range(12)]
    return [(prompt, settings_of(n, rng) | {"stop": None}) for prompt, n in some]


@pytest.mark.rare
def test_searches_and_other_requests_match_each_alone():
    searches = [WIDE, WIDE | {"num_beams": 2, "n": 2, "max_new_tokens": 40}]
    quiet = engine()
    alone = [told(quiet.run([prompt], **settings)[0]) for prompt, settings in ordinary()]
    found = [quiet.run([PROMPT], **search)[0].beam_results for search in searches]
    with (meter := Timer()).running():
        mine, rng = engine(), random.Random(0)
        handles, beams, left = [], [], list(range(12))
        while left or mine.busy:
            if left and rng.random() < 0.6:
                prompt, settings = ordinary()[number := left.pop()]
                handles.append((number, mine.submit(prompt, **settings)))
                which = number % 2
                beams.append((which, mine.submit(PROMPT, priority=1, **searches[which])))
                if number % 5 == 4:
                    mine.cancel(beams[-2][1])
            mine.step()
        assert settled(mine)
    assert meter.compilations == 0
    assert all(told(handle) == alone[number] for number, handle in handles)
    reasons = [handle.finish_reason for _, handle in beams]
    assert 0 < reasons.count("cancelled") < 5
    for which, handle in beams:
        assert handle.beam_results == ([] if handle.finish_reason == "cancelled" else found[which])


@pytest.mark.slow
def test_a_preempted_search_starts_over():
    mine, (prompt, settings) = engine(), ordinary()[2]
    wanted = mine.run([PROMPT], **WIDE)[0].beam_results
    other = mine.run([prompt], **settings | {"max_new_tokens": 192 - len(prompt)})[0]
    search = mine.submit(PROMPT, priority=1, **WIDE)
    until(mine, lambda: mine.stats().used_pages[0] > 5)
    handle = mine.submit(prompt, **settings | {"max_new_tokens": 192 - len(prompt)})
    until(mine, lambda: search.done and handle.done)
    assert search.preemptions and not handle.preemptions
    assert search.beam_results == wanted and told(handle) == told(other)
    assert settled(mine)


@pytest.mark.rare
def test_a_search_that_is_cancelled_or_fails():
    mine = engine()
    search = mine.submit(PROMPT, **WIDE)
    until(mine, lambda: mine.stats().used_pages[0] > 5)
    mine.cancel(search)
    late = mine.submit(PROMPT, deadline=1e-9, **WIDE)
    mine.step()
    assert (
        search.finish_reason == "cancelled" and late.finish_reason == "deadline" and settled(mine)
    )
    search = mine.submit(PROMPT, **WIDE)
    until(mine, lambda: mine.stats().used_pages[0] > 5)
    mine.update_params(jax.tree.map(lambda x: x * jnp.nan, one_layer().params))
    until(mine, lambda: search.done)
    assert search.beam_results == [] and search.finish_reason == "error" and settled(mine)
    with pytest.raises(NonFiniteError, match=r"after [1-9]"):
        list(mine.stream(search))


@pytest.mark.slow
def test_best_of_matches_generate():
    settings = {"n": 2, "seed": 3, "temperature": 0.8, "max_new_tokens": 8, "eos_token_ids": []}
    wanted = kvjax.generate(one_layer(), [PROMPT], best_of=4, **settings)
    found = engine().best_of(PROMPT, 4, **settings)
    assert [handle.tokens for handle in found] == wanted.tokens


BAD = {
    "several": ({"n": 2}, "n is 2, but num_beams is 1"),
    "rows": ({"num_beams": 5}, "num_beams is 5, but the engine has only 4 rows"),
    "ends": ({"num_beams": 5, "eos_token_ids": range(16)}, "at most 20, the number of candidates"),
    "penalty": ({"num_beams": 2, "presence_penalty": 1}, "presence_penalty does not work"),
    "temperature": ({"num_beams": 2, "temperature": 1}, "temperature is 1"),
    "stop": ({"num_beams": 2, "stop": "A"}, "stop strings"),
    "early": ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping is 'soon'"),
    "pages": ({"num_beams": 4, "max_new_tokens": 99}, "may need 30 pages of pool 0, which has 14"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_invalid_searches(name):
    settings, words = BAD[name]
    with pytest.raises(ValueError, match=words):
        engine_of(rows=5 if name == "ends" else 4, lm=one_layer()).submit(PROMPT, **settings)
    for given in ({"n": 3}, {"num_beams": 2}):
        with pytest.raises(ValueError, match=r">= 3, got 2|best_of draws samples"):
            engine().best_of(PROMPT, 2, **given)


class Thirds(Anything):
    """Allows a third of the tokens, depending on the last one, or a few; and the end token."""

    def allowed(self):
        last = self.tokens[-1] if self.tokens else 0
        every = np.arange(32 * self.words) % 3 == last % 3
        every[10 + last % 5 :] &= last % 4 > 0  # fewer than are reported
        every[7] = len(self.tokens) > 3
        return np.packbits(every, bitorder="little").view(np.uint32)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raw", *RARE])
def test_beams_keep_to_guides(policy):
    """As in ``generate``, next to other requests; the given guide accepts the best sequence."""
    mine = engine(policy, pages=40)
    given = {"cache": POLICIES[policy], "max_len": MOST, "prefill_chunk": CHUNK}
    some = {"eos_token_ids": [7], "max_new_tokens": 16}
    for way in ({"num_beams": 3, "n": 3}, {"num_beams": 2, "length_penalty": 0.2}):
        wanted = kvjax.generate(one_layer(), [PROMPT], guide=Thirds(), **given, **some, **way)
        guide = Thirds()
        handle = mine.submit(PROMPT, guide=guide, **some, **way)
        (other,) = mine.run([PROMPT], guide=Thirds(), **some)
        assert settled(mine)
        assert [found.tokens for found in handle.beam_results] == wanted.tokens
        scores = [found.score for found in handle.beam_results]
        np.testing.assert_allclose(scores, wanted.sequence_scores, atol=1e-4)
        assert guide.tokens == handle.tokens
        plain = kvjax.generate(one_layer(), [PROMPT], guide=Thirds(), **given, **some)
        assert other.tokens == plain.tokens[0]


def test_a_failing_guide_ends_its_search_only():
    class Failing(Thirds):
        def accept(self, token):
            super().accept(token)
            if len(self.tokens) == 3:
                raise RuntimeError("no further")

    mine = engine(pages=40)
    handle = mine.submit(PROMPT, guide=Failing(), num_beams=2, max_new_tokens=16)
    (other,) = mine.run([PROMPT], max_new_tokens=16)
    assert settled(mine) and handle.finish_reason == "error" and str(handle.error) == "no further"
    assert len(other.tokens) == 16
    with pytest.raises(ValueError, match=r"num_beams needs a guide with copy\(\)"):
        once = SimpleNamespace(allowed=None, accept=None)
        mine.submit(PROMPT, guide=once, num_beams=2)


def test_a_guide_that_ends_early_reports_it():
    """As ``GrammarGuide``: ``allowed`` notices the problem, and allows only the end."""

    class Short(Thirds):
        error = None

        def allowed(self):
            if len(self.tokens) < 2:
                return super().allowed()
            self.error = "no further"
            return np.array([1 << 7, 0], np.uint32)

    guide = Short()
    mine = engine(pages=40)
    given = {"num_beams": 3, "n": 2, "max_new_tokens": 16, "eos_token_ids": [7], "logprobs": 5}
    handle = mine.submit(PROMPT, guide=guide, **given)
    assert settled(mine) and guide.error == "no further" and len(guide.tokens) == 3
    assert [found.guide.error for found in handle.beam_results] == ["no further"] * 2
    last = handle.beam_results[0].logprobs[-1].top_logprobs
    assert [token for token, _ in last] == [7] and all(x > -np.inf for _, x in last)
