"""What changes logits, and what is drawn from, beside Transformers' processors and warpers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models
from kvjax.sampling.history import TokenHistory
from kvjax.sampling.params import prepare_sampling
from kvjax.sampling.sampler import filter_logits, sample
from tests.oracle.test_logits import SMALL

ROWS, VOCAB, ROOM = 4, 400, 48


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    return (2 * np.random.default_rng(0).standard_normal((ROWS, VOCAB))).astype(np.float32)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    """Of few tokens, so that they come again."""
    return np.random.default_rng(1).integers(0, 4, (ROWS, 40)).astype(np.int32)


def ours(logits: np.ndarray, text: np.ndarray, **given: Any) -> np.ndarray:
    filters, numbers = prepare_sampling(seeds=range(ROWS), **given)
    tokens = np.pad(text, ((0, 0), (0, ROOM - text.shape[1])))
    length = np.full(ROWS, text.shape[1], np.int32)
    seen = np.zeros((ROWS, VOCAB), bool)
    np.put_along_axis(seen, text, True, axis=1)
    run = jax.jit(filter_logits, static_argnums=1)
    past = TokenHistory(jnp.asarray(seen), jnp.asarray(tokens), jnp.asarray(length))
    return np.asarray(run(logits, filters, numbers, count=np.zeros(ROWS, np.int32), past=past))


@pytest.mark.parametrize("length", [1, 2, 17, 40])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 41])
def test_ngrams(
    n: int, length: int, logits: np.ndarray, text: np.ndarray, torch: Any, transformers: Any
) -> None:
    theirs = transformers.NoRepeatNGramLogitsProcessor(n)
    expected = theirs(torch.LongTensor(text[:, :length]), torch.from_numpy(logits.copy()))
    got = ours(logits, text[:, :length], no_repeat_ngram_size=n)
    np.testing.assert_array_equal(got, expected.numpy())


@pytest.mark.parametrize("scale", [0.05, 1.0, 4.0])
@pytest.mark.parametrize("p", [0.05, 0.3, 0.71, 0.95])
def test_typical_p(
    p: float, scale: float, logits: np.ndarray, text: np.ndarray, torch: Any, transformers: Any
) -> None:
    """With numbers of ``p`` that no sum of probabilities comes to within what float32 rounds."""
    theirs = transformers.TypicalLogitsWarper(p)
    expected = theirs(torch.LongTensor(text), torch.from_numpy(scale * logits)).softmax(-1)
    got = ours(scale * logits, text, temperature=1.0, typical_p=p)
    np.testing.assert_allclose(jax.nn.softmax(got), expected.numpy(), rtol=2e-5, atol=1e-9)


def test_all_of_them_in_their_order(
    logits: np.ndarray, text: np.ndarray, torch: Any, transformers: Any
) -> None:
    """As a distribution, and as 20,000 draws from it."""
    theirs = transformers.LogitsProcessorList(
        [
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
            transformers.NoRepeatNGramLogitsProcessor(3),
            transformers.TemperatureLogitsWarper(0.8),
            transformers.TopKLogitsWarper(60),
            transformers.TopPLogitsWarper(0.95),
            transformers.MinPLogitsWarper(0.01),
            transformers.TypicalLogitsWarper(0.6),
        ]
    )
    expected = theirs(torch.LongTensor(text), torch.from_numpy(logits.copy())).softmax(-1).numpy()
    given: dict[str, Any] = {
        "temperature": 0.8, "top_k": 60, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.6,
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 3,
    }  # fmt: skip
    got = np.asarray(jax.nn.softmax(ours(logits, text, **given)))
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-9)
    draws = 20_000
    filters, numbers = prepare_sampling(seeds=range(draws), **given)
    seen = np.zeros((1, VOCAB), bool)
    seen[0, text[0]] = True
    past = TokenHistory(
        *(np.repeat(x, draws, axis=0) for x in (seen, text[:1], np.array([40], np.int32)))
    )
    tokens, finite = jax.jit(sample, static_argnums=1)(
        np.repeat(logits[:1], draws, axis=0), filters, numbers,
        count=np.zeros(draws, np.int32), past=past,
    )  # fmt: skip
    assert finite.all()
    observed, wanted = np.bincount(tokens, minlength=VOCAB), draws * expected[0].astype(np.float64)
    assert not observed[wanted == 0].any()
    there = wanted > 0
    statistic = ((observed - wanted)[there] ** 2 / wanted[there]).sum()
    freedom = there.sum() - 1
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize(("n", "penalty"), [(2, 1.0), (3, 1.2), (1, 1.0)])
def test_greedy_texts(
    n: int, penalty: float, make_reference: Callable, torch: Any, transformers: Any
) -> None:
    """Whole texts, of prompts of two lengths and beside one another."""
    reference = make_reference("llama", **SMALL)
    lm = models.load(reference.folder, dtype="float32")
    prompts = [reference.tokens[0, :12].tolist() * 2, reference.tokens[1, :5].tolist()]
    found = kvjax.generate(
        lm, prompts, max_new_tokens=40, no_repeat_ngram_size=n, repetition_penalty=penalty,
        eos_token_ids=(),
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_pretrained(
        reference.folder, dtype=torch.float32
    ).eval()
    for prompt, tokens in zip(prompts, found.tokens, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=40, do_sample=False, no_repeat_ngram_size=n, eos_token_id=None,
            repetition_penalty=penalty, pad_token_id=0,
        )  # fmt: skip
        assert theirs[0, len(prompt) :].tolist() == tokens
