"""What new tokens are told by the text before them: penalties, and runs that may not come twice."""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from tests.test_engine import CHUNK, engine_of, lettered, settled
from tests.test_prefixes import small
from tests.test_sampling import naive_ngrams

PROMPTS = [[5, 6, 7, 5, 6], [9] * 11]
CONTROLS: dict[str, Any] = {
    "frequency_penalty": 0.3, "presence_penalty": 0.4, "no_repeat_ngram_size": 2,
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=0)
def uncached(model, params, tokens):
    return model.apply(params, tokens)


def wanted(logits, text, new, controls):
    """A row's logits by the definitions: ``new`` tokens at the end of its text are its own."""
    counts = np.bincount(text[len(text) - new :], minlength=logits.size).astype(np.float32)
    logits = logits - np.float32(controls.get("frequency_penalty", 0)) * counts
    logits = logits - np.float32(controls.get("presence_penalty", 0)) * (counts > 0)
    return naive_ngrams(logits[None], [text], [controls.get("no_repeat_ngram_size", 0)])[0]


@pytest.mark.slow
@pytest.mark.parametrize("controls", [CONTROLS, {"frequency_penalty": -0.5}], ids=str)
def test_each_token_is_the_likeliest_by_the_definitions(controls):
    """Of two rows, three times each, which all are the same: nothing is drawn."""
    lm = small()
    found = kvjax.generate(lm, PROMPTS, n=2, max_new_tokens=20, **controls)
    assert found.tokens[::2] == found.tokens[1::2]
    for prompt, tokens in zip(PROMPTS, found.tokens[::2], strict=True):
        text = np.zeros((1, 32), np.int32)
        text[0, : len(prompt) + 20] = prompt + tokens
        logits = np.asarray(uncached(lm.architecture, lm.params, text))[0]
        for new, token in enumerate(tokens):
            so_far = prompt + tokens[:new]
            left = wanted(logits[len(so_far) - 1], so_far, new, controls)
            assert left[token] >= left.max() - 1e-5, (so_far, token)
    if "no_repeat_ngram_size" in controls:
        for prompt, tokens in zip(PROMPTS, found.tokens[::2], strict=True):
            text = prompt + tokens
            pairs = list(itertools.pairwise(text))
            own = pairs[len(prompt) - 1 :]
            assert len(set(own)) == len(own) and not set(own) & set(pairs[: len(prompt) - 1])
    else:  # what was said is said again
        assert all(len(set(tokens)) < 8 for tokens in found.tokens)


@pytest.mark.slow
@pytest.mark.parametrize("host", ["1GiB", 0])
def test_an_engine_gives_what_generate_does(host):
    """With rows of every kind at once, some of which are parked, or forgotten, and come back."""
    controls = [CONTROLS, {}, {"presence_penalty": 1.5}, {"no_repeat_ngram_size": 1},
                {"temperature": 0.8, "typical_p": 0.7, "frequency_penalty": 0.5}]  # fmt: skip
    engine = engine_of(pages=9, host_memory=host)
    prompts = [[1 + n, *range(n, 30 + n)] for n in range(len(controls))]
    handles = [
        engine.submit(prompt, max_new_tokens=60, seed=n, **each)
        for n, (prompt, each) in enumerate(zip(prompts, controls, strict=True))
    ]
    assert settled(engine) and engine.stats().preemptions > 0
    for n, (handle, prompt, each) in enumerate(zip(handles, prompts, controls, strict=True)):
        alone = kvjax.generate(
            lettered(), [prompt], max_new_tokens=60, seed=n, prefill_chunk=CHUNK, **each
        )
        assert handle.tokens == alone.tokens[0], each
