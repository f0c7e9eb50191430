"""Drafts in an engine, looked up or by a model with rows of its own: no request's text changes."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

import kvjax
from kvjax.core.trees import tree_bytes
from kvjax.engine.drafts import Drafting, Drafts
from kvjax.generation.drafts.acceptance import price_of
from kvjax.generation.statistics import Meter
from tests.copies import assert_no_copy
from tests.test_beams import one_layer
from tests.test_engine import engine_of, settled, told, until
from tests.test_guided import Text
from tests.test_prefixes import MOST, POLICIES

ROWS, NEW = 3, 40
LOOKUP = kvjax.PromptLookup(shortest=1)
SETTINGS = (
    {"logprobs": 2}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.3},
    {"repetition_penalty": 1.3}, {"logprobs": 2, "temperature": 0.2},
)  # fmt: skip


@functools.cache
def prompts():
    """Of different lengths, the first and the last repeat themselves."""
    rng = np.random.default_rng(3)
    some = [rng.integers(0, 61, count).tolist() for count in (11, 23, 3)]
    return [[7, 3, 9, 1] * 5, *some, [7, 3, 9, 1] * 5 + rng.integers(0, 61, 3).tolist()]


@functools.cache
def lm():
    return one_layer()


@functools.cache
def alike(noise=0.05):
    """The model with its weights changed a little."""
    rng = np.random.default_rng(1)
    changed = lambda x: x + noise * np.std(x) * rng.standard_normal(x.shape).astype(np.float32)  # noqa: E731
    return replace(lm(), params=jax.tree.map(changed, lm().params), source="a draft")


def engine(policy="raw", draft=None, together=1, **more):
    """``together``: rows that are checked in a program; on a CPU it would be one."""
    found = engine_of(policy, lm=lm(), rows=ROWS, draft=draft, **more)
    found._checks.together = together
    return found


def asked(mine, draft, texts=None):
    texts = prompts() if texts is None else texts
    handles = [
        mine.submit(text, max_new_tokens=NEW, seed=n, draft=draft, **each)
        for n, (text, each) in enumerate(zip(texts, SETTINGS, strict=False))
    ]
    assert settled(mine)
    assert [handle.reason for handle in handles] == ["length"] * len(texts)
    return handles


RARE = [
    pytest.param(name, *more, marks=pytest.mark.rare)
    for name in POLICIES if name != "raw"
    for more in (("model", 1), ("lookup", ROWS))
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "by", "together"),
    [("int8", "lookup", 1), ("raw", "model", 1), ("raw", "model", ROWS), *RARE],
)
def test_texts_are_what_they_are_without_drafts(policy, by, together):
    """Beside others, drawn and greedy, in rows that others had before; pages are few, so requests
    give them away. Nothing is compiled on the way."""
    draft = kvjax.DraftModel(alike(), cache=POLICIES[policy]) if by == "model" else LOOKUP
    mine = engine(policy, draft, together)
    assert mine.compile().programs == 5 + 2 * (by == "model")
    meter = Meter()
    with meter.running():
        plain, before = asked(mine, None), mine.stats()
        drafted = asked(mine, "engine")
    assert meter.compilations == 0
    assert [handle.tokens for handle in drafted] == [handle.tokens for handle in plain]
    for one, other in zip(drafted, plain, strict=True):
        if one.logprobs is not None:
            both = zip(one.logprobs, other.logprobs, strict=True)
            assert max(abs(a.logprob - b.logprob) for a, b in both) < 2e-4
    assert before.drafted_tokens == before.accepted_tokens == 0
    after = mine.stats()
    assert 20 < after.accepted_tokens < after.drafted_tokens
