"""The model class of lm-evaluation-harness, without PyTorch; ``tests/oracle/test_lm_eval.py``
compares it with the harness's own classes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvjax
from kvjax import models
from tests import harness
from tests.checkpoints import write_llama
from tests.test_likelihoods import expected

pytest.importorskip("lm_eval", reason="needs lm_eval (the extra `lm-eval`)")

from kvjax.adapters import lm_eval as adapter

ROOT = Path(__file__).resolve().parents[1]
SHOTS = "An iterator returns its elements one at a time. " * 3
STOP = {"until": ["q"], "max_gen_toks": 8}


@pytest.fixture
def make(tiny_llama):
    """A harness model with few rows."""
    return lambda **options: adapter.KvjaxLM(tiny_llama, **{"batch_size": 3} | options)


def requests(*args):
    return [SimpleNamespace(args=each) for each in args]


def test_scores_are_those_of_the_texts_tokens(make):
    """Also of texts without a context, with spaces between, and longer than ``max_length``."""
    model = make(max_length=64)
    texts = [(SHOTS + "Is it?", " yes"), (SHOTS + "Is it?", " no"), ("", "a word"), ("a ", "b")]
    lm, encode = model.lm, model.tok_encode
    tokens = [(encode(a)[-(65 - len(b)) :], encode(b)) for a, b in texts[:2]]
    tokens += [([lm.tokenizer.bos_token_id], encode("a word")), (encode("a"), encode(" b"))]
    pairs = [(tuple(a), tuple(b)) for a, b in tokens]
    results = model.loglikelihood(requests(*texts), disable_tqdm=True)
    logprobs, greedy = expected(lm, pairs)
    np.testing.assert_allclose([logprob for logprob, _ in results], logprobs, atol=1e-4)
    assert [each for _, each in results] == greedy


@pytest.mark.slow
def test_a_long_text_is_scored_in_windows(make):
    model = make(max_length=32)
    text = SHOTS[:70]
    ids = model.tok_encode(text)
    windows = [((256,), ids[:32]), ((ids[31],), ids[32:64]), (ids[37:64], ids[64:])]
    logprobs, _ = expected(model.lm, [(tuple(a), tuple(b)) for a, b in windows])
    results = model.loglikelihood_rolling(requests((text,), ("",)), disable_tqdm=True)
    assert results == [pytest.approx(logprobs.sum(), abs=1e-3), 0]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["paged", "static", "sliding_window"])
def test_texts_end_before_their_stop_strings(make, cache):
    options = {"window": 512} if cache == "sliding_window" else {}
    model = make(cache=cache, max_length=60, **options)
    prompts = [SHOTS, "once", SHOTS + "a", "b"]
    settings = [STOP, STOP, STOP, STOP | {"max_gen_toks": 5}]
    texts = model.generate_until(requests(*zip(prompts, settings, strict=True)), disable_tqdm=True)
    for prompt, each, text in zip(prompts, settings, texts, strict=True):
        new = each["max_gen_toks"]
        ids = model.tok_encode(prompt)[-(60 - new) :]
        whole = kvjax.generate(model.lm, [ids], max_new_tokens=new).text[0]
        assert text == whole.split("q")[0]


@pytest.mark.slow
def test_special_tokens_end_texts_too(make):
    """As stop strings; a text never contains them."""
    model = make()
    free = kvjax.generate(model.lm, "once", max_new_tokens=1)
    (job,) = [model._job(0, "once", {"until": ["<s>", "x"], "max_tokens": 3})]
    assert job.settings["eos_token_ids"] == [256, 257] and job.until == ["<s>", "x"]
    biased = {"until": ["<s>"], "logit_bias": {256: 100}, "max_gen_toks": 4}
    assert free.text[0]
    assert model.generate_until(requests(("once", biased)), disable_tqdm=True) == [""]


@pytest.mark.slow
def test_draws_have_their_seeds(make):
    settings = {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": -1, "max_gen_toks": 6}
    asked = requests(*[("once", settings)] * 3)
    for cache in ("paged", "static"):
        model = make(cache=cache, seed=5)
        texts = model.generate_until(asked, disable_tqdm=True)
        alone = [
            kvjax.generate(
                model.lm, "once", max_new_tokens=6, temperature=0.8, top_p=0.9, seed=5 + number
            ).text[0]
            for number in range(3)
        ]
        assert texts == alone and len(set(texts)) > 1
    assert make()._job(0, "a", {"do_sample": True}).settings["temperature"] == 1
    assert not make()._job(0, "a", {}).settings.get("temperature")


def test_options(make, tiny_llama, tiny_llama_dir):
    model = make(kv_bits=4, group_size=16, batch_size="auto")
    assert model._policy == kvjax.policy("paged", bits=4, group_size=16)
    assert (model.batch_size, model.max_length, model.max_gen_toks) == (8, 512, 256)
    assert make(batch_size="auto:4", max_batch_size=2).batch_size == 2
    assert make(prefix_token_id=7).prefix_token_id == 7 and model.prefix_token_id == 256
    assert model.tok_encode("a") == [*make(add_bos_token=True).tok_encode("a")[1:]]
    assert make(add_bos_token=True).tok_encode("<s>a") == model.tok_encode("<s>a")
    assert model.tokenizer_name == str(tiny_llama_dir).replace("/", "__")
    assert model.get_model_info()["model_dtype"] == "float32"
    with pytest.raises(ValueError, match="bits is 8 in 'bits=8', but 4 was also given"):
        make(cache="bits=8", kv_bits=4)
    with pytest.raises(ValueError, match="cache is already a policy"):
        make(cache=kvjax.policy("static"), window=8)
    with pytest.raises(ValueError, match="max_gen_toks is 16, but max_length is 16"):
        make(max_length=16)._job(0, "a", {"max_gen_toks": 16})
    with pytest.raises(ValueError, match="5 tokens, but max_length is 4"):
        make(max_length=4)._truncated([1], [2] * 5)
    loaded = adapter.KvjaxLM(str(tiny_llama_dir), dtype="bfloat16", mesh="tensor=2")
    assert loaded.lm.mesh.size == 2 and loaded.lm.config.dtype == "bfloat16"
    with pytest.raises(ValueError, match="has no tokenizer"):
        adapter.KvjaxLM(dataclasses.replace(tiny_llama, tokenizer=None))


@pytest.mark.slow
def test_chat_templates(make, tmp_path):
    model = make()
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert model.chat_template(False) is None
    assert "bos_token" in model.chat_template(True)
    assert model.apply_chat_template(chat) == "<s>[system]Be brief.</s>[user]Hi</s>[assistant]"
    assert model.apply_chat_template(chat, False) == "<s>[system]Be brief.</s>[user]Hi"
    with pytest.raises(ValueError, match="no chat template 'other'"):
        model.chat_template("other")
    folder = write_llama(tmp_path / "strict")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0].content }}{{ enable_thinking }}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    strict = adapter.KvjaxLM(str(folder), enable_thinking=False, think_end_token="</think>")
    assert strict.apply_chat_template(chat) == "HiFalse"
    with pytest.raises(ValueError, match="no system"):
        strict.apply_chat_template(chat[:1])


@pytest.mark.slow
def test_the_command(tiny_llama_dir, tmp_path):
    """The harness's command, with this model among its own."""
    pytest.importorskip("datasets")
    harness.write_tasks(tmp_path, 6, texts=5, pages=1)
    settings = f"pretrained={tiny_llama_dir},cache=paged,kv_bits=8,max_length=300"
    command = [
        sys.executable, "-m", "kvjax.adapters.lm_eval", "run", "--model", "kvjax",
        "--model_args", settings, "--tasks", ",".join(harness.TASKS), "--include_path",
        str(tmp_path), "--batch_size", "4", "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(task in found.stdout for task in harness.TASKS)
    (written,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(written.read_text(encoding="utf-8"))
    assert results["config"]["model"] == "kvjax" and "Integer" in results["config"]["model_cache"]
    assert results["n-samples"]["own_choice"]["effective"] == 6


def test_the_harness_finds_the_model_and_its_own():
    from lm_eval.api.registry import get_model

    assert get_model("kvjax") is adapter.KvjaxLM
    assert get_model("dummy").__name__ == "DummyLM"


def test_the_embedded_model_is_the_default():
    assert adapter.KvjaxLM().lm.source == models.load().source
