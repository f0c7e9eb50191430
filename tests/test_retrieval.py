"""Retrieval tasks, their scores on caches, and the benchmark that measures policies with them."""

import json
import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import kvjax
from benchmarks import retrieval
from benchmarks.decode import default_folder
from benchmarks.retrieval_report import AT_CHANCE, interval, markdown, summary
from benchmarks.retrieval_scores import (
    candidate_logprobs,
    extend,
    found_in,
    score_after_context,
    score_item,
)
from benchmarks.retrieval_tasks import DISTRACTORS, NOISE, TASKS, continuation, make_item
from kvjax import models
from kvjax.models import first_layers

PROSE = """A cache keeps what was computed before. Each step reads all of it, and then adds one
token. When a cache is full, the oldest tokens leave it. Some caches keep fewer bits of each number,
and others keep fewer tokens! Which of the two is better? That depends on the question, for some
questions are about the beginning of a text. A model that has lost the beginning can't answer them.
"""
LENGTH = 512


@pytest.fixture(scope="module")
def lm():
    return models.load(dtype="float32")


@pytest.fixture(scope="module")
def items(lm):
    return {
        name: make_item(name, lm.tokenizer, length=1024, seed=3, depth=0.5, prose=PROSE)
        for name in TASKS
    }


def test_an_item_is_always_the_same(lm, items):
    for name, item in items.items():
        again = make_item(name, lm.tokenizer, length=1024, seed=3, depth=0.5, prose=PROSE)
        other = make_item(name, lm.tokenizer, length=1024, seed=4, depth=0.5, prose=PROSE)
        assert again == item
        assert not set(other.answers) & set(item.answers)
        assert retrieval.fingerprint(again) == retrieval.fingerprint(item)
        assert retrieval.fingerprint(other) != retrieval.fingerprint(item)


@pytest.mark.parametrize("length", [700, 1500])
def test_prompts_fill_the_length(lm, length):
    for name in TASKS:
        item = make_item(name, lm.tokenizer, length=length, prose=PROSE)
        assert item.prompt_ids == tuple(lm.tokenizer.encode(item.context + item.question))
        used = len(item.prompt_ids) + item.new_tokens
        assert 0.99 * length - 5 < used <= length


def test_answers_are_in_the_haystack(items):
    for name, item in items.items():
        task = TASKS[name]
        expected = task.hops + 1 if task.values == "variables" else task.asked * task.per_key
        assert len(set(item.answers)) == len(item.answers) == expected
        text = item.context.split("\n\n")[-1]  # without the example
        for answer in item.answers:
            count = text.count(answer)
            if task.values == "variables":  # assigned once, and read once but for the last one
                assert text.count(f"VAR {answer} = ") == 1
                assert count == 1 + (answer != item.answers[-1])
            else:
                assert count == 1
            assert answer not in item.question


def test_distractors_are_not_answers(items):
    forms = {
        "numbers": r"\d{7}", "words": r"[a-z]+-[a-z]+", "variables": "[A-Z]{5}",
        "uuids": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    }  # fmt: skip
    for name, item in items.items():
        assert len(set(item.distractors)) == DISTRACTORS
        for value in item.distractors:
            assert not any(value in answer or answer in value for answer in item.answers)
        for value in (*item.answers, *item.distractors):
            assert re.fullmatch(forms[TASKS[name].values], value)
        there = [value in item.context for value in item.distractors]
        assert there == [n < item.present for n in range(DISTRACTORS)]
    assert items["multi-key"].present == 3 and items["variable tracking"].present == 5
    assert items["single, noise"].present == items["multi-query"].present == 0


def test_variables_follow_a_chain(items):
    """Every answer is reached from the number, and no distractor is."""
    item = items["variable tracking"]
    text = item.context.split("\n\n")[-1]
    value = re.search(r"assigned the value (\d+)", item.question)[1]
    reached = set()
    for variable, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", text):
        if source == value or source in reached:
            reached.add(variable)
    assert reached == set(item.answers)
    shown = item.context.split("\n\n")[0]
    assert not any(answer in shown for answer in (*item.answers, *item.distractors))


@pytest.mark.parametrize("name", ["single, noise", "single, numbers"])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_needles_are_at_their_depth(lm, name, depth):
    item = make_item(name, lm.tokenizer, length=1500, depth=depth, prose=PROSE)
    text = item.context.split("\n", 1)[1]
    needle = re.search(r"One of the special magic .*?: \S+\.", text)
    where = needle.start() / (len(text) - len(needle[0]))
    assert abs(where - depth) < 0.02
    assert abs(item.depths[0] - depth) < 0.02


def test_several_needles_are_spread(items):
    for name in ("multi-value", "multi-query", "variable tracking"):
        depths = items[name].depths
        assert max(depths) - min(depths) > 0.5
    assert list(items["multi-value"].depths) == sorted(items["multi-value"].depths)
    order = [items["multi-value"].context.index(x) for x in items["multi-value"].answers]
    assert order == sorted(order)


def test_haystacks_are_what_was_given(items):
    plain = re.sub(r" ?One of the special magic .*?: \S+\.", "", items["single, noise"].context)
    assert set(plain.split("\n")[1].split()) == set(NOISE.split())
    words = set(items["single, words"].context.split("\n")[1].split())
    assert len(words & set(PROSE.split())) > 0.9 * len(set(PROSE.split()))


def test_steps_are_the_answers(lm, items):
    for name, item in items.items():
        before = list(item.prompt_ids)
        for step, answer in zip(item.steps, item.answers, strict=True):
            before += step.lead
            values = [answer, *item.distractors]
            texts = [lm.decode([*before, *ids]) for ids in step.candidates]
            assert all(x.endswith(f" {v}") for x, v in zip(texts, values, strict=True))
        separator = " " if name == "variable tracking" else ", "
        whole = lm.decode([*before, *item.steps[-1].candidates[0]])
        assert whole.endswith(" " + separator.join(item.answers))


def test_conversations_are_rendered_by_the_template(lm):
    class Chat:
        templates = True

        def encode(self, text, *, add_special_tokens=True):
            assert not add_special_tokens
            return lm.tokenizer.encode(text, add_special_tokens=False)

        def render(self, messages, *, continue_final_message):
            assert continue_final_message
            user, assistant = messages
            return f"<user>{user['content']}</user><assistant>{assistant['content']}"

    item = make_item("multi-key", Chat(), length=LENGTH, prose=PROSE)
    whole = item.context + item.question
    assert whole.startswith("<user>A special magic number is hidden")
    assert item.messages[0]["content"] + "</user>" in whole
    assert whole.endswith("<assistant>" + item.messages[1]["content"])
    assert item.question.startswith("\nWhat is the special magic number for")
    assert len(item.prompt_ids) + item.new_tokens <= LENGTH


def test_what_is_too_short_is_refused(lm):
    with pytest.raises(ValueError, match="more than 40 tokens"):
        make_item("single, noise", lm.tokenizer, length=40)
    with pytest.raises(ValueError, match="needs prose"):
        make_item("multi-key", lm.tokenizer, length=1024)


def test_tokens_of_a_continuation():
    tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: text.split("-"))
    assert continuation(tokenizer, "a-b", "-c") == ["c"]
    assert continuation(tokenizer, "a-b", "c") == ["c"]  # merged with the text before it


def uncached(lm, rows, width):
    """Log-probabilities of the rows' answers, by one pass without a cache; rows: (ids, answer)."""
    tokens = np.zeros((len(rows), width), np.int32)
    for row, (ids, answer) in enumerate(rows):
        tokens[row, : len(ids) + len(answer)] = [*ids, *answer]
    logprobs = jax.jit(lambda params, x: jax.nn.log_softmax(lm.apply(params, x), axis=-1))
    found = np.asarray(logprobs(lm.params, tokens))
    return [
        found[row, len(ids) - 1 + np.arange(len(answer)), answer].sum()
        for row, (ids, answer) in enumerate(rows)
    ]


def test_candidates_are_scored_as_without_a_cache(lm):
    lm, item = first_layers(lm, 1), make_item("multi-key", lm.tokenizer, length=256, prose=PROSE)
    *before, last = item.prompt_ids
    cache = kvjax.init_cache(lm.config, batch=1, max_len=item.length)
    cache = extend(lm, cache, before, 256)
    candidates = item.steps[0].candidates
    expected = uncached(lm, [(item.prompt_ids, ids) for ids in candidates], item.length)
    np.testing.assert_allclose(candidate_logprobs(lm, cache, last, candidates), expected, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single, numbers", "multi-value", "variable tracking"])
def test_likelihood_equals_an_uncached_pass(lm, name):
    lm, item = first_layers(lm, 1), make_item(name, lm.tokenizer, length=768, prose=PROSE)
    score = score_item(lm, item, {"raw": kvjax.policy("static")})["raw"]
    rows, before = [], list(item.prompt_ids)
    for step in item.steps:
        before += step.lead
        rows += [(list(before), ids) for ids in step.candidates]
    expected = np.reshape(uncached(lm, rows, item.length), (len(item.steps), -1))
    np.testing.assert_allclose(score.logprobs, expected[:, 0], atol=1e-3)
    margins = expected[:, 0] - expected[:, 1:].max(axis=1)
    np.testing.assert_allclose(score.margins, margins, atol=2e-3)
    assert score.right == tuple(margin > 0 for margin in score.margins)
    assert score.found == found_in(score.text, item.answers)


@pytest.mark.slow
def test_the_text_is_that_of_the_whole_prompt(lm):
    item = make_item("single, numbers", lm.tokenizer, length=256, prose=PROSE)
    score = score_item(lm, item, {"raw": kvjax.policy("static")})["raw"]
    greedy = kvjax.generate(lm, [item.prompt_ids], max_new_tokens=item.new_tokens)
    assert score.text == greedy.text[0]


@pytest.mark.slow
def test_an_exact_prefill_is_that_of_the_policy(lm):
    """Converting a raw cache gives the scores of ``prefill="exact"`` in one call."""
    lm = first_layers(lm, 2)
    item = make_item("single, numbers", lm.tokenizer, length=LENGTH, prose=PROSE)
    policy = kvjax.policy(bits=2, prefill="exact")
    converted = score_item(lm, item, {"2": kvjax.policy(bits=2)})["2"]
    cache = kvjax.init_cache(lm.config, policy, batch=1, max_len=LENGTH)
    cache = extend(lm, cache, item.context_ids, len(item.context_ids))
    cache = kvjax.convert(cache, kvjax.policy(bits=2))
    assert score_after_context(lm, item, kvjax.fork(cache)).logprobs == pytest.approx(
        converted.logprobs, abs=1e-3
    )
    own = score_item(lm, item, {"2": kvjax.policy(bits=2)}, prefill="policy")["2"]
    assert own.logprobs != pytest.approx(converted.logprobs, abs=1e-3)


@pytest.mark.slow
def test_a_ring_loses_what_it_overwrote(lm):
    """The answer's likelihood falls if its needle left the ring, and not if it is in it."""
    ring = kvjax.policy("sliding_window", window=124, sinks=4)
    policies = {"raw": kvjax.policy("static"), "sinks": ring}
    changes = []
    for depth in (0.2, 1.0):
        item = make_item("single, words", lm.tokenizer, length=LENGTH, depth=depth, prose=PROSE)
        scores = score_item(lm, item, policies)
        changes.append(scores["sinks"].logprobs[0] - scores["raw"].logprobs[0])
    assert changes[0] < changes[1] - 1


def test_intervals():
    assert interval(0.5, 20) == pytest.approx((0.299, 0.701), abs=1e-3)
    assert interval(1.0, 3) == pytest.approx((0.439, 1.0), abs=1e-3)
    assert interval(0.0, 10)[0] == 0.0


def test_policies_of_the_command_line():
    assert retrieval.policy_of("raw") == kvjax.policy("static")
    assert retrieval.policy_of("3") == kvjax.policy(bits=3)
    assert retrieval.policy_of("sinks").layout.window == 508
    assert retrieval.policy_of("bits=4,recent=0") == kvjax.policy(bits=4, recent=0)
    depths = [retrieval.depth_of(n) for n in range(7)]
    assert depths[:3] == [0.5, 0.25, 0.75] and sorted(depths) == [n / 8 for n in range(1, 8)]


def test_cells_where_the_raw_cache_guesses_say_so():
    def score(right):
        return {"right": right, "logprobs": [-1.0] * len(right), "text": "", "found": 0.0}

    def cell(right):
        scores = {"raw": score(right), "4": score([True])}
        entry = {"scores": scores, "prompt_tokens": 99, "distractors": ["1"] * 8}
        return summary("multi-key", 1024, [entry] * 4, ["raw", "4"])

    results = {
        "model": "m", "device": "d", "versions": {}, "parameters": "p", "created": "today",
        "prefill": "exact", "policies": ["raw", "4", "hybrid"], "same_as_raw": ["hybrid"],
        "dtype": "float32", "lengths": [1024], "bytes": {"raw": [2.0], "4": [0.28]},
        "chat_template": False, "distractors": 8, "missing": 0,
        "cells": [cell([True, True])],
    }  # fmt: skip
    text = markdown(results)
    likelihood, greedy, _, size = text.split("\n## ")[1:]
    assert "| 4 | 28 % |" in size
    assert "| 100 % (51–100) | 100 % (51–100) | as raw |" in likelihood
    assert f"| 0 % (0–49) | {AT_CHANCE} | as raw |" in greedy
    results["cells"] = [cell([False, False])]
    assert f"| 0 % (0–49) | {AT_CHANCE} | as raw |" in markdown(results).split("\n## ")[1]


@pytest.mark.slow
def test_the_benchmark_continues_where_it_stopped(lm, tmp_path, capsys, monkeypatch):
    prose = tmp_path / "prose.txt"
    prose.write_text(PROSE, encoding="utf-8")
    small = first_layers(lm, 1)
    monkeypatch.setattr(retrieval.models, "load", lambda *_, **__: small)
    options = ["--tasks", "single, numbers; multi-value", "--lengths", "384", "--out"]
    options += [str(tmp_path / "out"), "--prose", str(prose), "--items"]
    assert retrieval.main([*options, "1", "--policies", "raw,4,hybrid"]) == 0
    first = json.loads((tmp_path / "out" / "retrieval.json").read_text(encoding="utf-8"))
    assert first["same_as_raw"] == ["hybrid"] and len(first["cells"]) == 2
    scored = []
    score = retrieval.score_item

    def counted(lm, item, policies, **settings):
        scored.append((item.task, *policies))
        return score(lm, item, policies, **settings)

    monkeypatch.setattr(retrieval, "score_item", counted)
    capsys.readouterr()
    assert retrieval.main([*options, "2", "--policies", "raw,4,sinks"]) == 0
    each = [("sinks",), ("raw", "4", "sinks")]
    assert scored == [(task, *x) for task in ("single, numbers", "multi-value") for x in each]
    second = json.loads((tmp_path / "out" / "retrieval.json").read_text(encoding="utf-8"))
    old, new = (found["cells"][0]["items"][0]["scores"]["4"] for found in (first, second))
    assert old == new
    assert "| multi-value | 384 | 2 | " in capsys.readouterr().out
    assert (tmp_path / "out" / "retrieval.png").read_bytes().startswith(b"\x89PNG")
    prose.write_text(PROSE.replace("cache", "store"), encoding="utf-8")
    with pytest.raises(ValueError, match="scores of other prompts"):
        retrieval.main([*options, "2", "--policies", "raw,4,sinks"])
    with pytest.raises(ValueError, match="other settings"):
        retrieval.main([*options, "2", "--policies", "raw", "--prefill", "policy"])


def test_results_are_in_a_folder_of_their_device():
    """The file of a model is in its name if a benchmark has measured one."""
    found = {"device": "AMD EPYC", "versions": {"jax": "0.12.0"}}
    assert default_folder(found).name == "amd-epyc-jax0.12.0"
    assert default_folder(found | {"file": "/x/Small.Q4_1.gguf"}).name == (
        "amd-epyc-jax0.12.0-small.q4_1"
    )
