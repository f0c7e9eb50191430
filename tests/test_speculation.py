"""Drafts: the text is what it is without them, whatever they say."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from tests.matrix import PATH_PAIRS, choice, held, path_cells, some
from tests.test_prefixes import small

KINDS = {"greedy": {}, "drawn": {"temperature": 0.8, "top_p": 0.9}}
NEW = 40


@functools.cache
def prompts():
    """Four rows, of which one repeats itself, of different lengths."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 61, count).tolist() for count in (11, 23, 5)]
    return [[7, 3, 9, 1] * 5, *rows]


@functools.cache
def unlike(scale):
    """The model with its weights changed a little, or much."""
    lm = small()
    rng = np.random.default_rng(1)
    noise = lambda x: x + scale * np.std(x) * rng.standard_normal(x.shape).astype(np.float32)  # noqa: E731
    return replace(lm, params=jax.tree.map(noise, lm.params), source="a draft")


def drafts(length):
    """A good one, a bad one, and what the text itself says."""
    return {
        "good": kvjax.DraftModel(unlike(0.05), length, adaptive=False),
        "bad": kvjax.DraftModel(unlike(3.0), length, adaptive=False),
        "lookup": kvjax.PromptLookup(length, shortest=1, adaptive=False),
    }


def near_ties(lm, texts, found, wanted, drawn):
    """How many rows differ from where two tokens are as likely, but for float noise; none may
    differ elsewhere."""
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
@pytest.mark.parametrize("cell", some(CELLS, *[*CELLS][:4]))
def test_the_text_is_what_it_is_without_them(cell, kind):
    cell, drawn, lm = CELLS[cell], KINDS[kind], small()
    policy = held(cell.codecs, cell.layout, "host" if "int2" in cell.codecs else "device").policy
    given = {
        "max_new_tokens": NEW, "cache": policy, "max_len": 128, "prefill_chunk": 8, "seed": 5,
        "logprobs": 2, **drawn,
    }  # fmt: skip
    wanted = kvjax.generate(lm, prompts(), **given)
    for name, draft in drafts(5).items():
        found = kvjax.generate(lm, prompts(), draft=draft, **given)
        ties = near_ties(lm, prompts(), found.tokens, wanted.tokens, drawn)
        stats = found.stats.speculation
        assert stats.proposed > stats.accepted, name
        assert ties or stats.passes + stats.saved == NEW - 1
        assert name == "bad" or stats.accepted > (0 if name == "lookup" else 20)
        assert np.array_equal(found.cache.length, wanted.cache.length) or ties
        if ties:
            continue
        for own, other in zip(found.logprobs, wanted.logprobs, strict=True):
            both = zip(own, other, strict=True)
            assert max(abs(a.logprob - b.logprob) for a, b in both) < 2e-4
