"""A real trained checkpoint: logits, tokenizer and 200 greedy tokens equal Transformers'."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import models

PROMPTS = [
    "Once upon a time, there was a little girl named Lily",
    "Tim and his dog went to the park. They saw",
    "One day",
]
CHUNKS = (4, 3, 1, 1, 2, 1)
NEW = 200


@pytest.fixture(scope="module")
def lm(stories: Path) -> models.LanguageModel:
    return models.load(stories, dtype="float32")


@pytest.fixture(scope="module")
def theirs(stories: Path, torch: Any, transformers: Any) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(stories, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(stories)


def logits_of(theirs: tuple[Any, Any], torch: Any, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return theirs[0](torch.tensor([ids])).logits[0].numpy()


def test_tokenizer(lm: models.LanguageModel, theirs: tuple[Any, Any]) -> None:
    assert lm.tokenizer is not None
    for text in [*PROMPTS, "", " two  spaces", "naïve — “quoted” 😀\n", "a <s> b</s>"]:
        ids = theirs[1](text)["input_ids"]
        assert lm.tokenizer.encode(text) == ids
        assert lm.decode(ids) == theirs[1].decode(ids, skip_special_tokens=True)


def test_logits(lm: models.LanguageModel, theirs: tuple[Any, Any], torch: Any) -> None:
    """A ragged batch, without a cache and through one in uneven chunks."""
    tokens, lengths = lm.encode(PROMPTS)
    rows = [theirs[1](text)["input_ids"] for text in PROMPTS]
    assert [list(map(int, t[:n])) for t, n in zip(tokens, lengths, strict=True)] == rows
    expected = [logits_of(theirs, torch, row) for row in rows]
    cache = kvjax.init_cache(lm.config, batch=3, max_len=64)
    step = jax.jit(lm.apply)
    whole = np.asarray(step(lm.params, tokens))
    parts, start = [], 0
    for size in (*CHUNKS, *[1] * 64):
        if start >= tokens.shape[1]:
            break
        size = min(size, tokens.shape[1] - start)
        real = jnp.clip(lengths - start, 0, size)
        part, cache = step(lm.params, tokens[:, start : start + size], cache, lengths=real)
        parts.append(np.asarray(part))
        start += size
    kvjax.check(cache)
    chunked = np.concatenate(parts, axis=1)
    for row, reference in enumerate(expected):
        largest = np.max(np.abs(reference))
        for ours in (whole[row, : len(reference)], chunked[row, : len(reference)]):
            assert np.max(np.abs(ours - reference)) <= 1e-5 * largest


def test_greedy_text(lm: models.LanguageModel, theirs: tuple[Any, Any], torch: Any) -> None:
    """200 greedy tokens, token by token, through a donated and jitted decode step."""
    ids = theirs[1](PROMPTS[0])["input_ids"]
    with torch.no_grad():
        reference = (
            theirs[0]
            .generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)[
                0, len(ids) :
            ]
            .tolist()
        )

    @jax.jit
    def decode_step(params: Any, token: jax.Array, cache: kvjax.KVCache) -> Any:
        logits, cache = lm.apply(params, token[:, None], cache)
        return jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32), cache

    cache = kvjax.init_cache(lm.config, batch=1, max_len=len(ids) + NEW)
    logits, cache = lm.apply(lm.params, jnp.asarray([ids]), cache, last_only=True)
    token = jnp.argmax(logits[:, -1], axis=-1).astype(jnp.int32)
    ours = [int(token[0])]
    while len(ours) < NEW:
        token, cache = decode_step(lm.params, token, cache)
        ours.append(int(token[0]))
    kvjax.check(cache)
    assert ours == reference
    assert len(ours) == NEW
