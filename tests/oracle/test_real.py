"""A trained model, SmolLM2-135M-Instruct from a GGUF file: Transformers' logits and tokens, and the
same tokens from every cache, the engine, the server, chats, drafts and saved caches."""

from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from benchmarks.real import QUESTIONS, REASON, real_model_file
from kvjax import models
from kvjax.memory import InferenceLimits
from kvjax.policies.presets import parse_policy

FILE = real_model_file()
pytestmark = pytest.mark.skipif(FILE is None, reason=REASON)

NEW = 24
FEW = 6
"""Questions that each way of generating answers."""
TOLERANCE = 1e-5
"""Of logits, relative to the largest."""


@pytest.fixture(scope="module")
def lm() -> models.LanguageModel:
    return models.load(FILE, dtype="float32")


@pytest.fixture(scope="module")
def theirs(transformers: Any, torch: Any) -> Any:
    """Transformers' model from the same file."""
    assert FILE is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(
        FILE.parent, gguf_file=FILE.name, dtype=torch.float32
    )
    return model.eval()


@pytest.fixture(scope="module")
def prompts(lm: models.LanguageModel) -> list[list[int]]:
    return [lm.tokenizer.chat([{"role": "user", "content": text}]) for text in QUESTIONS]


@pytest.fixture(scope="module")
def answers(lm: models.LanguageModel, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy tokens of every prompt with the plainest cache, in one batch."""
    result = kvjax.generate(lm, prompts, max_new_tokens=NEW)
    return [tokens.tolist() for tokens in map(np.asarray, result.tokens)]


def logits_of(theirs: Any, torch: Any, tokens: list[int]) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0].float().numpy()


def test_logits(lm: models.LanguageModel, theirs: Any, torch: Any, text: list[int]) -> None:
    wanted = logits_of(theirs, torch, text[:256])
    logits = lm.apply(lm.params, jnp.asarray([text[:256]]))[0]
    atol = TOLERANCE * np.abs(wanted).max()
    np.testing.assert_allclose(logits, wanted, rtol=0, atol=atol)


@pytest.fixture(scope="module")
def text(lm: models.LanguageModel) -> list[int]:
    """512 tokens of prose: this project's own pages."""
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    return lm.tokenizer.encode("\n".join(page.read_text("utf-8") for page in pages))[:512]


def test_fifty_chat_prompts(
    theirs: Any, torch: Any, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    """Each token is the most likely one that Transformers predicts after the tokens before it, so
    both generate the same texts."""
    assert len(prompts) == len({tuple(prompt) for prompt in prompts}) == 50
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer
        logits = logits_of(theirs, torch, prompt + answer)
        likely = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert likely == answer


LOSSLESS = ("static", "dynamic", "sliding_window,window=512", "hybrid", "offloaded", "paged")
LOSSY = {"bits=8": 1e-3, "bits=4": 1e-2, "bits=3": 5e-2, "bits=2": 0.6}
"""Bounds of the mean divergence from full precision, in nats."""


@pytest.mark.part
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_caches(
    name: str, lm: models.LanguageModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    policy = parse_policy(name)
    result = kvjax.generate(lm, prompts[:FEW], max_new_tokens=NEW, cache=policy)
    assert [np.asarray(tokens).tolist() for tokens in result.tokens] == answers[:FEW]


@pytest.mark.part
def test_quantized_caches(lm: models.LanguageModel, text: list[int]) -> None:
    policies = {name: parse_policy(name) for name in LOSSY}
    quality = kvjax.evaluate(lm, text, policies)
    divergence = {name: each.overall.mean_kl for name, each in quality.items()}
    assert all(0 < divergence[name] < bound for name, bound in LOSSY.items()), divergence


@pytest.fixture(scope="module")
def engine(lm: models.LanguageModel) -> kvjax.Engine:
    return kvjax.Engine(lm, limits=InferenceLimits(max_batch_size=FEW, max_seq_len=256))


@pytest.mark.part
def test_engine(engine: kvjax.Engine, prompts: list[list[int]], answers: list[list[int]]) -> None:
    handles = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts[:FEW]]
    while not all(handle.done for handle in handles):
        engine.step()
    assert [handle.tokens for handle in handles] == answers[:FEW]


@pytest.mark.part
def test_server(lm: models.LanguageModel, answers: list[list[int]]) -> None:
    """Chat completions over HTTP have the same texts."""
    from tests.test_serve import RunningServer

    with RunningServer(lm) as server:
        for question, answer in zip(QUESTIONS[:FEW], answers, strict=False):
            message = {"role": "user", "content": question}
            body = {"model": "tiny", "messages": [message], "max_tokens": NEW, "temperature": 0}
            response: httpx.Response = server.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 200, response.text
            wanted = lm.tokenizer.decode(answer)
            assert response.json()["choices"][0]["message"]["content"] == wanted


@pytest.mark.part
def test_chat(lm: models.LanguageModel, answers: list[list[int]]) -> None:
    """A chat answers as ``generate`` does, and a second turn as a new chat of both turns would."""
    chat = kvjax.Chat(lm, max_new_tokens=NEW, max_len=512)
    first = "".join(piece.text[0] for piece in chat.send(QUESTIONS[0]))
    assert first == lm.tokenizer.decode(answers[0])
    second = "".join(piece.text[0] for piece in chat.send(QUESTIONS[1]))
    turns = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": first},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    result = kvjax.generate(lm, [lm.tokenizer.chat(turns)], max_new_tokens=NEW)
    assert second == result.text[0]
    assert chat.stats.cached_tokens > 0


@pytest.mark.part
def test_beams(lm: models.LanguageModel, theirs: Any, torch: Any, prompts: list[list[int]]) -> None:
    prompt = prompts[4]
    ends = list(lm.generation.eos_token_ids)
    result = kvjax.generate(lm, [prompt], max_new_tokens=12, num_beams=4)
    found = theirs.generate(
        torch.tensor([prompt]), do_sample=False, num_beams=4, max_new_tokens=12,
        eos_token_id=ends, pad_token_id=2, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    wanted = [t for t in found.sequences[0, len(prompt) :].tolist() if t not in ends]
    assert [t for t in np.asarray(result.tokens[0]).tolist() if t not in ends] == wanted
    np.testing.assert_allclose(result.sequence_scores, found.sequences_scores, rtol=1e-4)


@pytest.mark.part
@pytest.mark.parametrize("draft", ["lookup", "first layers"])
def test_drafts(
    draft: str, lm: models.LanguageModel, prompts: list[list[int]], answers: list[list[int]]
) -> None:
    chosen = models.first_layers(lm, 6) if draft == "first layers" else draft
    result = kvjax.generate(lm, prompts[:FEW], max_new_tokens=NEW, draft=chosen)
    assert [np.asarray(tokens).tolist() for tokens in result.tokens] == answers[:FEW]


@pytest.mark.part
def test_saved_caches(
    lm: models.LanguageModel, prompts: list[list[int]], answers: list[list[int]], tmp_path: Path
) -> None:
    """A cache that was saved after a few tokens continues with the same ones."""
    prompt, answer = prompts[2], answers[2]
    result = kvjax.generate(lm, [prompt], max_new_tokens=8)
    tokens = [prompt + np.asarray(result.tokens[0]).tolist()]
    kvjax.save_cache(tmp_path / "cache", result.cache, model=lm, tokens=tokens)
    cache, stored = kvjax.load_cache(tmp_path / "cache", model=lm, max_len=256)
    assert stored is not None
    left = [row[int(cache.length[0]) :] for row in stored]  # the newest token is not in the cache
    rest = kvjax.generate(lm, left, cache=cache, max_new_tokens=NEW - 8)
    assert np.asarray(rest.tokens[0]).tolist() == answer[8:]


@pytest.mark.part
def test_saved_checkpoint(
    lm: models.LanguageModel, transformers: Any, prompts: list[list[int]], tmp_path: Path
) -> None:
    """A model from a GGUF file is saved in the format of Transformers, tokenizer and all."""
    lm.save(tmp_path / "saved")
    again = models.load(tmp_path / "saved", dtype="float32")
    assert again.config == lm.config and again.generation == lm.generation
    tokens = jnp.asarray([prompts[0]])
    np.testing.assert_array_equal(again.apply(again.params, tokens), lm.apply(lm.params, tokens))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert rendered["input_ids"] == prompts[0]
