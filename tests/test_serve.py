"""The HTTP server: OpenAI's clients, invalid requests, disconnects and shutdown."""

import asyncio
import concurrent.futures
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import jax
import numpy as np
import openai
import pytest

import kvjax
from kvjax import cli
from kvjax.cli.batch_files import parse_line, parse_prompt
from kvjax.cli.serve_command import check_installed
from kvjax.generation.guides.grammars import Guides
from kvjax.memory import InferenceLimits
from kvjax.models.chat import ChatTemplates
from kvjax.serve.logprobs import TokenTexts
from kvjax.serve.server import Server, bind, url_of
from kvjax.serve.state import ServerSettings
from tests import browser

ROOT = Path(__file__).resolve().parents[1]
ROWS, LONGEST = 4, 512
LONG_REQUEST = {"prompt": "once", "max_tokens": 480, "ignore_eos": True}
"""A request with many steps."""
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [0, 1]}, "name": {"enum": ["a", "bé"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
MODEL = "tiny"


class RunningServer:
    """A server in a thread, with an engine that can be paused and stepped."""

    def __init__(self, lm, buffer=None, draft=None, **settings):
        self.lm, self.steps, self.buffer = lm, None, buffer
        self.engine = kvjax.Engine(
            lm, kvjax.policy("paged", page_size=16),
            InferenceLimits(max_batch_size=ROWS, max_seq_len=LONGEST), prefill_chunk=16,
            draft=draft,
        )  # fmt: skip
        self._step, self.engine.step = self.engine.step, self._counted
        self.server = Server(self.engine, lm, ServerSettings(name=MODEL, **settings))
        self._ready = threading.Event()

    def __enter__(self):
        self.listener = bind("127.0.0.1", 0)
        if self.buffer is not None:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer)
        self.url = url_of(self.listener)
        self.address = self.listener.getsockname()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(30)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        return self

    def __exit__(self, *_):
        self.allow_steps(10**6)
        self.http.close()
        self.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self):
        self.loop = asyncio.get_running_loop()
        await self.server.run(self.listener, self._ready.set)

    def stop(self):
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.server.stop)

    def _counted(self):
        if self.steps is not None:
            self.steps.acquire()
        return self._step()

    def pause(self):
        """Stop the engine; ``allow_steps`` lets it run a number of steps."""
        self.steps = threading.Semaphore(0)

    def allow_steps(self, count):
        if self.steps is not None:
            self.steps.release(count)

    def resume(self):
        self.allow_steps(10**6)

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path="completions", /, headers=None, **body):
        return self.http.post(f"/v1/{path}", json=body, headers=headers)

    def until(self, condition):
        """Wait until a condition holds, 30 seconds at most."""
        for _ in range(3000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("the condition never held")

    def assert_idle(self):
        self.until(lambda: not self.engine.busy and not self.server.state.active_requests)
        assert sum(self.engine.stats().used_pages) == 0
        assert self.server.state.queue.in_use == 0
        assert not self.server.state.handles

    def count_ended(self, reason):
        """The number of sequences that ended for this reason."""
        name = f'request_success_total{{finished_reason="{reason}"}} '
        text = self.server.state.metrics.exposition().decode()
        return sum(int(float(x.removeprefix(name))) for x in text.splitlines() if name in x)


@pytest.fixture(scope="module")
def running(tiny_llama):
    with RunningServer(tiny_llama) as running:
        yield running


@pytest.fixture
def make_server(tiny_llama):
    """Starts servers for a single test, with its own settings."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(RunningServer(tiny_llama, **settings))


def run_alone(running, prompt, **settings):
    """The handle of the same request in an engine without other requests."""
    engine = kvjax.Engine(
        running.lm, kvjax.policy("paged", page_size=16),
        InferenceLimits(max_batch_size=ROWS, max_seq_len=LONGEST), prefill_chunk=16,
    )  # fmt: skip
    return engine.run([prompt], **settings)[0]


def events(text):
    result = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert result[-1] == "[DONE]"
    return [json.loads(each) for each in result[:-1]]


def test_completion_matches_the_engine(running):
    expected = run_alone(running, "import", max_new_tokens=12, temperature=0.9, seed=5)
    settings = {"model": MODEL, "prompt": "import", "max_tokens": 12, "temperature": 0.9, "seed": 5}
    whole = running.client().completions.create(**settings)
    assert whole.choices[0].text == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.object == "text_completion" and whole.model == MODEL
    assert whole.usage.prompt_tokens == 6 and whole.usage.completion_tokens == 12
    pieces = list(
        running.client().completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(x.choices[0].text for x in pieces[:-1]) == expected.text
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == 12
    assert len({x.id for x in pieces}) == 1


def test_chat_completion_matches_the_engine(running):
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": "hé"}]
    tokens = running.lm.chat([{"role": "system", "content": "short"}, messages[1]])
    expected = run_alone(running, tokens, max_new_tokens=9, temperature=1.0, seed=3)
    settings = {"model": MODEL, "messages": messages, "max_completion_tokens": 9, "seed": 3}
    whole = running.client().chat.completions.create(**settings)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(tokens)
    pieces = list(running.client().chat.completions.create(**settings, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(x.choices[0].delta.content or "" for x in pieces) == expected.text
    assert pieces[-1].choices[0].finish_reason == "length"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "é"}]
    settings["messages"] = [messages[0], {"role": "user", "content": parts}]
    again = running.client().chat.completions.create(**settings)
    assert again.choices[0].message.content == expected.text


@pytest.mark.parametrize("stream", [False, True])
def test_choices_use_consecutive_seeds(running, stream):
    prompts = ["ab", [100, 101]]
    body = {"prompt": prompts, "n": 2, "seed": 2**64 - 1, "max_tokens": 8, "stream": stream}
    answer = running.post(**body)
    texts = [""] * 4
    for part in events(answer.text) if stream else [answer.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    for at, text in enumerate(texts):
        seed = (2**64 - 1 + at % 2) % 2**64
        expected = run_alone(
            running, prompts[at // 2], max_new_tokens=8, temperature=1.0, seed=seed
        )
        assert text == expected.text


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [None, 1])
def test_best_of_matches_generate(running, logprobs):
    prompts, settings = ["ab", "import"], {"n": 2, "best_of": 4, "seed": 5, "temperature": 0.8}
    seeds = {"seed": [5, 6, 7, 8] * 2}
    expected = kvjax.generate(running.lm, prompts, max_new_tokens=8, **settings | seeds)
    answer = running.post(prompt=prompts, max_tokens=8, logprobs=logprobs, **settings).json()
    assert [choice["text"] for choice in answer["choices"]] == expected.text
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all((x["logprobs"] is None) == (logprobs is None) for x in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == expected.stats.new_tokens
    running.assert_idle()


def test_beam_search_matches_the_engine(running):
    search = {"n": 2, "length_penalty": 0.5, "early_stopping": True}
    handle = run_alone(running, "import", max_new_tokens=8, num_beams=3, logprobs=1, **search)
    expected = handle.beam_results
    body = {"prompt": ["import", "import"], "max_tokens": 8, "logprobs": 1, **search}
    answer = running.post(use_beam_search=True, beam_width=3, **body).json()
    assert [choice["text"] for choice in answer["choices"]] == 2 * [x.text for x in expected]
    for choice, result in zip(answer["choices"], expected, strict=False):
        logprobs = choice["logprobs"]["token_logprobs"]
        assert len(logprobs) > 6
        assert logprobs == [x.logprob for x in result.logprobs or ()][: len(logprobs)]
        assert choice["finish_reason"] == {"eos": "stop"}.get(
            result.finish_reason, result.finish_reason
        )
    assert answer["usage"]["completion_tokens"] == 2 * sum(len(x.tokens) for x in expected)
    body = {"messages": MESSAGE, "max_tokens": 4, "best_of": 2}
    answer = running.post("chat/completions", use_beam_search=True, **body).json()
    tokens = running.lm.chat(MESSAGE)
    (result,) = run_alone(running, tokens, max_new_tokens=4, num_beams=2).beam_results
    assert answer["choices"][0]["message"]["content"] == result.text
    running.assert_idle()


def test_default_seed_is_random(running):
    texts = {running.post(prompt="x", max_tokens=24).text for _ in range(2)}
    assert len({json.loads(text)["choices"][0]["text"] for text in texts}) == 2


def test_text_ends_before_a_stop_string(running):
    whole = run_alone(running, "x", max_new_tokens=30, seed=0).text
    stop = next(whole[at : at + 2] for at in range(6, 28) if whole[at : at + 2].isprintable())
    result = running.post(prompt="x", max_tokens=30, temperature=0, stop=["never!", stop]).json()
    assert result["choices"][0]["text"] == whole[: whole.index(stop)]
    assert result["choices"][0]["finish_reason"] == "stop"


def test_logit_bias(running):
    result = running.post(prompt="x", max_tokens=3, logit_bias={"65": 100}, temperature=0).json()
    letter = running.lm.decode([65])
    assert result["choices"][0]["text"] == 3 * letter


def assert_offsets(choice):
    """Each offset is the start of its token; all parts of a character have the same offset."""
    text, whole = choice["text"], choice["logprobs"]
    assert whole["text_offset"] == sorted(whole["text_offset"]) and len(whole["tokens"]) > 1
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert 0 <= offset <= len(text)
        if "\N{REPLACEMENT CHARACTER}" not in token:
            assert text.startswith(token, offset)


def test_offsets_of_characters_with_several_tokens(running):
    body = {"prompt": "x", "max_tokens": 24, "temperature": 0, "logprobs": 1, "n": 2}
    body["structured_outputs"] = {"choice": ["é😀é a"]}
    for more in ({}, {"best_of": 3}, {"use_beam_search": True, "n": 1, "beam_width": 2}):
        for choice in running.post(**body | more).json()["choices"]:
            assert choice["text"] == "é😀é a"
            assert choice["logprobs"]["text_offset"] == [0, 0, 1, 1, 1, 1, 2, 2, 3, 4]
            assert_offsets(choice)
    pieces = events(running.post(**body | {"n": 1}, stream=True).text)
    streamed = [x["choices"][0]["logprobs"]["text_offset"] for x in pieces]
    assert [each for part in streamed for each in part] == [0, 0, 1, 1, 1, 1, 2, 2, 3, 4]


def test_logprobs_match_the_model(running):
    lm = running.lm
    settings = {"max_tokens": 8, "temperature": 0.7, "seed": 1, "min_tokens": 8}
    choice = running.post(prompt="hello", **settings, logprobs=3).json()["choices"][0]
    whole = choice["logprobs"]
    tokens = run_alone(
        running, "hello", max_new_tokens=8, min_new_tokens=8, temperature=0.7, seed=1
    ).tokens
    ids = [*lm.tokenizer.encode("hello"), *tokens]
    logits = lm.apply(lm.params, np.array([ids], np.int32))[0, 4:-1]
    expected = np.asarray(jax.nn.log_softmax(logits))
    chosen = expected[np.arange(8), tokens]
    np.testing.assert_allclose(whole["token_logprobs"], chosen, atol=1e-4)
    texts = TokenTexts(lm.tokenizer)
    assert whole["tokens"] == [texts.lookup(token)[0] for token in tokens]
    assert_offsets(choice)
    each = zip(
        expected, whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True
    )
    for row, text, mine, likeliest in each:
        # Partial characters have the same text.
        best = texts.lookup(int(row.argmax()))[0]
        assert likeliest[text] >= mine and 1 <= len(likeliest) <= 4
        assert likeliest[best] == max(likeliest.values()) == pytest.approx(row.max(), abs=1e-4)
    pieces = events(running.post(prompt="hello", **settings, logprobs=3, stream=True).text)
    streamed = [x["choices"][0]["logprobs"] for x in pieces]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [each for part in streamed for each in part[name]] == whole[name]


def harness_score(choice, context):
    """The score and the greedy flag that lm-evaluation-harness's ``parse_logprobs`` returns.

    That is the log-probability of the prompt after ``context`` tokens, and whether each of these
    tokens is the likeliest.
    """
    result = choice["logprobs"]
    logprobs, likeliest = (result[name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(logprobs), all(
        mine == max(each.values()) for mine, each in zip(logprobs, likeliest, strict=True)
    )


@pytest.mark.slow
def test_prompt_scores_for_lm_evaluation_harness(running):
    """The scores match ``kvjax.score``, also if the start of the prompt is cached.

    Prompts are ids and texts, with characters of several tokens; one new token ends its text.
    """
    lm, text = running.lm, "a prompt of more than two chunks, with é😀é in it"
    ids, context = lm.tokenizer.encode(text), 20
    running.post(prompt=text, max_tokens=1)
    scored = kvjax.score(lm, [ids[:1]], [ids[1:]]).logprobs[0]
    every = jax.nn.log_softmax(lm.apply(lm.params, np.array([ids], np.int32))[0])
    greedy = bool((every[context - 1 : -1].argmax(-1) == np.array(ids[context:])).all())
    body = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    for prompt, more in ((ids, {}), (text, {}), ([ids, text], {"logit_bias": {"257": 100}})):
        answer = running.post(prompt=prompt, **body | more).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for choice in answer["choices"]:
            result = choice["logprobs"]
            assert result["token_logprobs"][0] is None and result["top_logprobs"][0] is None
            assert len(result["tokens"]) == len(ids) + 1 == len(result["text_offset"])
            np.testing.assert_allclose(result["token_logprobs"][1:-1], scored, atol=1e-4)
            np.testing.assert_allclose(
                [max(each.values()) for each in result["top_logprobs"][1:-1]], every[:-1].max(-1),
                atol=1e-4,
            )  # fmt: skip
            assert choice["text"].startswith(text)
            logprob, is_greedy = harness_score(choice, context)
            assert logprob == pytest.approx(float(scored[context - 1 :].sum()), abs=1e-3)
            assert is_greedy == greedy
            if choice["finish_reason"] == "stop":  # the end token has no text
                end = {name: each.pop() for name, each in result.items()}
                assert end["text_offset"] == len(text) == len(choice["text"])
            assert_offsets(choice)
    assert [each["finish_reason"] for each in answer["choices"]] == ["stop"] * 2
    best = [*ids, *run_alone(running, ids, max_new_tokens=6).tokens[:5]]
    assert harness_score(running.post(prompt=best, **body).json()["choices"][0], len(ids))[1]


@pytest.mark.slow
def test_echo_without_new_tokens(running):
    """Only the prompt is returned, and it may fill all positions."""
    body = {"echo": True, "max_tokens": 0, "temperature": 0}
    full = "xyz é " * 73 + "ab"
    assert len(running.lm.tokenizer.encode(full)) == LONGEST + 1
    prompts = ["once", [256, *range(97, 103)], full[:-1]]
    plain = running.post(prompt=prompts, **body).json()
    scored = running.post(prompt=prompts, n=2, logprobs=0, **body).json()
    texts = ["once", running.lm.decode(prompts[1], skip_special_tokens=False), prompts[2]]
    assert [each["text"] for each in plain["choices"]] == texts
    assert [each["text"] for each in scored["choices"]] == [x for x in texts for _ in "12"]
    for answer in (plain, scored):
        assert {each["finish_reason"] for each in answer["choices"]} == {"length"}
        usage = answer["usage"]
        assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]
    assert all(each["logprobs"] is None for each in plain["choices"])
    for choice in scored["choices"]:
        assert_offsets(choice)
        assert choice["logprobs"]["token_logprobs"].count(None) == 1
    assert running.post(prompt=full, **body).status_code == 400
    refused = running.post(prompt="a", max_tokens=0)
    assert refused.status_code == 400 and "echo: true" in refused.json()["error"]["message"]
    running.assert_idle()


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"max_tokens": 5, "n": 2}], ids=str)
def test_streamed_echo(running, more):
    body = {"prompt": ["hé", [104, 105]], "echo": True, "logprobs": 2, "temperature": 0, **more}
    whole = running.post(**body).json()
    result = {each["index"]: [] for each in whole["choices"]}
    for event in events(running.post(**body, stream=True).text):
        result[event["choices"][0]["index"]].append(event["choices"][0])
    for choice in whole["choices"]:
        mine = result[choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name, expected in choice["logprobs"].items():
            assert [x for each in mine for x in each["logprobs"][name]] == expected
        assert_offsets(choice)
    plain = events(running.post(**body | {"logprobs": None}, stream=True).text)
    assert all(each["choices"][0]["logprobs"] is None for each in plain)


def test_best_texts_after_an_echo(running):
    for more in ({"best_of": 3}, {"use_beam_search": True, "beam_width": 3, "temperature": 0}):
        body = {"prompt": "import", "max_tokens": 6, "n": 2, "seed": 1, "logprobs": 1, **more}
        plain = running.post(**body).json()["choices"]
        for choice, without in zip(
            running.post(**body, echo=True).json()["choices"], plain, strict=True
        ):
            assert choice["text"] == "import" + without["text"]
            tokens, offsets = (choice["logprobs"][name] for name in ("tokens", "text_offset"))
            new_tokens = without["logprobs"]["tokens"]
            assert tokens[6:][: len(new_tokens)] == new_tokens
            assert offsets[:6] == [*range(6)] and len(offsets) >= 12


def test_last_message_is_continued(running):
    messages = [*MESSAGE, {"role": "assistant", "content": "The answer is "}]
    lm, body = running.lm, {"messages": messages, "max_tokens": 6, "temperature": 0}
    tokens = lm.chat(messages, continue_final_message=True)
    assert lm.decode(tokens).endswith("[assistant]The answer is ")
    line = {"messages": messages, "continue_final_message": True}
    assert parse_prompt(line, lm, False) == (tokens, {})
    expected = run_alone(running, tokens, max_new_tokens=6).text
    for more in ({}, {"add_generation_prompt": False}):
        result = running.post("chat/completions", **body, continue_final_message=True, **more)
        assert result.json()["choices"][0]["message"]["content"] == expected
        assert result.json()["usage"]["prompt_tokens"] == len(tokens)
    ended = lm.chat(messages, add_generation_prompt=False)
    result = running.post("chat/completions", **body, add_generation_prompt=False)
    assert result.json()["usage"]["prompt_tokens"] == len(ended) == len(tokens) + 1


def test_logprobs_of_a_chat(running):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "temperature": 0}
    result = running.post("chat/completions", **body, logprobs=True, top_logprobs=2).json()
    content = result["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 or result["choices"][0]["finish_reason"] == "stop"
    for each in content:
        assert each["top_logprobs"][0]["logprob"] == each["logprob"]
        assert len(each["top_logprobs"]) == 2 and len(each["bytes"]) == 1


def test_token_bytes_join_to_the_text(running):
    texts = TokenTexts(running.lm.tokenizer)
    for text in ("é €", "plain", "a\n\t\0\x7f­"):
        ids = running.lm.tokenizer.encode(text)
        assert bytes(byte for i in ids for byte in texts.lookup(i)[1] or ()).decode() == text
    assert texts.lookup(257) == ("</s>", list(b"</s>"))


@pytest.mark.slow
def test_drafts_do_not_change_the_text(running):
    body, texts, drafted = {"prompt": "abc" * 6, "max_tokens": 16, "temperature": 0}, [], []
    for more in (
        {},
        {"prompt_lookup": True},
        {"draft": False},
        {"prompt_lookup": False, "draft": True},
    ):
        texts.append(running.post(**body, **more).json()["choices"][0]["text"])
        drafted.append(running.engine.stats().drafted_tokens)
    assert len(set(texts)) == 1
    assert drafted[0] < drafted[1] == drafted[3]


@pytest.mark.rare
def test_draft_model_of_the_server(make_server, tiny_llama):
    """Requests use the server's draft model by default."""
    running = make_server(draft=kvjax.DraftModel(tiny_llama, adaptive=False))
    body, texts, drafted = {"prompt": "abc", "max_tokens": 16, "temperature": 0}, [], []
    for more in ({}, {"draft": False}, {"draft": True}):
        texts.append(running.post(**body, **more).json()["choices"][0]["text"])
        drafted.append(running.engine.stats().drafted_tokens)
    assert len(set(texts)) == 1
    assert 0 < drafted[0] == drafted[1] < drafted[2]


def test_usage_counts_cached_tokens(running):
    prompt = list(range(1, 81))
    body = {"prompt": prompt, "max_tokens": 2}
    first, second = (running.post(**body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 64
    assert second["prompt_tokens"] == 80 and second["total_tokens"] == 82


def test_text_follows_a_json_schema(running):
    for seed in range(4):
        result = running.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a point"}], seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}},
        ).choices[0]  # fmt: skip
        assert result.finish_reason == "stop"
        value = json.loads(result.message.content)
        assert set(value) == {"x", "name"} and value["x"] in (0, 1)
        assert value["name"] in ("a", "bé")


def test_streamed_text_follows_a_json_schema_among_other_requests(running):
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        plain = [pool.submit(running.post, prompt="a", max_tokens=64, seed=n) for n in range(3)]
        body = {"prompt": "p", "max_tokens": 64, "response_format": form, "stream": True, "n": 2}
        texts = ["", ""]
        for part in events(running.post(**body).text):
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        for number, each in enumerate(plain):
            expected = run_alone(running, "a", max_new_tokens=64, temperature=1.0, seed=number)
            assert each.result().json()["choices"][0]["text"] == expected.text
    assert all(json.loads(text)["x"] in (0, 1) for text in texts)


def test_other_grammars(running):
    for kind, value, pattern in (
        ("regex", "[ab]{3}c", "[ab]{3}c"),
        ("choice", ['yes "x"', "no|\\"], r'yes "x"|no\|\\'),
        ("grammar", 'start: "q" /[0-9]/ "w"', "q[0-9]w"),
        ("json", POINT, r"\{.*\}"),
    ):
        body = {"prompt": "a", "max_tokens": 64, "structured_outputs": {kind: value}}
        choice = running.post(**body).json()["choices"][0]
        assert re.fullmatch(pattern, choice["text"]), choice
        assert choice["finish_reason"] == "stop"
    result = running.post(
        prompt="a", max_tokens=400, response_format={"type": "json_object"}, temperature=0.2
    ).json()["choices"][0]
    assert result["text"].startswith("{")
    assert result["finish_reason"] == "length" or isinstance(json.loads(result["text"]), dict)


def test_finished_guide_allows_only_end_tokens(tiny_llama):
    guide = Guides(tiny_llama).choices(["ab"])
    words = -(-tiny_llama.config.vocab_size // 32)

    def allowed():
        bits = np.unpackbits(guide.allowed().view(np.uint8), bitorder="little")
        assert bits.size == 32 * words
        return np.flatnonzero(bits).tolist()

    a, b = tiny_llama.tokenizer.encode("ab")
    assert allowed() == [a]
    guide.accept(a)
    assert allowed() == [b]
    guide.accept(b)
    assert allowed() == [257]
    guide.accept(257)
    assert allowed() == [257] and guide.error is None
    lost = Guides(tiny_llama).choices(["ab"])
    lost.accept(b)
    assert lost.error and lost.allowed().tolist() == guide.allowed().tolist()


MESSAGE = [{"role": "user", "content": "a"}]
INVALID_REQUESTS = [
    ({"prompt": "a", "echo": 1}, "echo"),
    ({"prompt": [2**70], "echo": True}, "prompt"),
    ({"prompt": "a" * 513, "echo": True, "max_tokens": 0}, "prompt"),
    ({"prompt": "a", "echo": True, "max_tokens": 0, "min_tokens": 1}, "min_tokens"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
    ({"prompt": "a", "n": 2, "use_beam_search": True, "stream": True}, "use_beam_search"),
    ({"prompt": "a", "use_beam_search": True}, "beam_width"),
    ({"prompt": "a", "use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width"),
    ({"prompt": "a", "use_beam_search": True, "beam_width": 5}, "beam_width"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "temperature": 1}, "temperature"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "stop": "x"}, "stop"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "prompt_lookup": True}, "prompt_lookup"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "logit_bias": {"1": 1}}, "logit_bias"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "length_penalty": 8}, "length_penalty"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "early_stopping": 1}, "early_stopping"),
    ({"prompt": "a", "length_penalty": 2}, "length_penalty"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty"),
    ({"prompt": "a", "frequency_penalty": -2.5}, "frequency_penalty"),
    ({"prompt": "a", "no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
    ({"prompt": "a", "typical_p": 0}, "typical_p"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    ({"prompt": "a", "temperature": "hot"}, "temperature"),
    ({"prompt": "a", "temperature": -1}, "temperature"),
    ({"prompt": "a", "temperature": 10**400}, "temperature"),
    ({"prompt": "a", "top_p": 0}, "top_p"),
    ({"prompt": "a", "top_k": 2.5}, "top_k"),
    ({"prompt": "a", "min_p": 2}, "min_p"),
    ({"prompt": "a", "xtc_threshold": 0.6}, "xtc_threshold"),
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": 0}, "stop"),
    ({"prompt": "a", "stop": "\ud800"}, "stop"),
    ({"prompt": "a", "stop": "x" * 257}, "stop"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "stream": 1}, "stream"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"json": 1}}, "structured_outputs.json"),
    ({"prompt": "a", "structured_outputs": {"choice": ["a"]}, "ignore_eos": True},
     "structured_outputs"),
    ({"prompt": "a", "wibble": 1}, "wibble"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [99999]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({}, "prompt"),
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{"role": "poet", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
     "messages[0].content[0].type"),
    ({"messages": MESSAGE, "tools": [{"type": "function"}]}, "tools"),
    ({"messages": MESSAGE, "top_logprobs": 2}, "top_logprobs"),
    ({"messages": MESSAGE, "logprobs": 2}, "logprobs"),
    ({"messages": MESSAGE, "echo": True}, "echo"),
    ({"messages": MESSAGE, "continue_final_message": 1}, "continue_final_message"),
    ({"messages": MESSAGE, "add_generation_prompt": "no"}, "add_generation_prompt"),
    ({"messages": MESSAGE, "continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message"),
    ({"messages": MESSAGE, "max_tokens": 513}, "messages"),
    ({"messages": MESSAGE, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"messages": MESSAGE, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": MESSAGE, "chat_template_kwargs": {"name": "x"}}, "chat_template_kwargs"),
]  # fmt: skip


def test_invalid_requests_name_the_field(running):
    for body, param in INVALID_REQUESTS:
        path = "chat/completions" if "messages" in body else "completions"
        answer = running.http.post(f"/v1/{path}", content=json.dumps(body))
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error" and error["message"]
    for raw in (b"", b"[]", b"{", b'{"prompt": NaN}', b"\xff", b"[" * 100_000):
        answer = running.http.post("/v1/completions", content=raw)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    running.assert_idle()


@pytest.mark.slow
def test_neutral_values_are_ignored(running):
    body = {
        "model": MODEL, "messages": MESSAGE, "max_tokens": 2, "user": "me", "metadata": {"a": "b"},
        "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "tool_choice": "none",
        "logit_bias": None, "stop": None, "response_format": {"type": "text"}, "store": False,
        "top_k": -1, "top_p": 1, "chat_template_kwargs": {"mood": "fine"},
    }  # fmt: skip
    assert running.post("chat/completions", **body).status_code == 200
    body = {"prompt": "a", "echo": False, "suffix": None, "best_of": 1, "max_tokens": 2}
    assert running.post(**body).status_code == 200


def test_statuses_of_exceeded_limits(make_server):
    running = make_server(max_sequences=ROWS + 1, max_body=4096)
    client = running.client()
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.APIStatusError, match="larger than 4096") as result:
        client.completions.create(model=MODEL, prompt="a" * 5000)
    assert result.value.status_code == 413

    def endless():
        for _ in range(1000):
            yield b" " * 1000

    assert running.http.post("/v1/completions", content=endless()).status_code == 413
    for body in (
        {"prompt": [1] * LONGEST, "max_tokens": 2},
        {"prompt": [1] * (LONGEST + 1)},
        {"prompt": "a", "max_tokens": LONGEST + 1},
        {"prompt": "a", "n": ROWS + 2},
        {"prompt": ["a"] * (ROWS + 2)},
    ):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, **body)
    running.pause()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        responses = [pool.submit(running.post, prompt="a", max_tokens=2) for _ in range(ROWS)]
        running.until(lambda: len(running.server.state.handles) == ROWS)
        with pytest.raises(openai.RateLimitError) as result:
            client.completions.create(model=MODEL, prompt="a", n=2)
        assert int(result.value.response.headers["retry-after"]) >= 1
        responses.append(pool.submit(running.post, prompt="a", max_tokens=2))
        running.until(lambda: len(running.server.state.handles) == ROWS + 1)
        assert running.post(prompt="a").status_code == 429
        running.resume()
        assert [each.result().status_code for each in responses] == [200] * (ROWS + 1)
    running.assert_idle()


def test_api_keys_and_tenants(make_server):
    running = make_server(api_keys=("first", "second"))
    for key in ("", "wrong", "first second", "fi"):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            running.client(key or "x").completions.create(model=MODEL, prompt="a")
    assert running.post(prompt="a").status_code == 401
    assert running.post(prompt="a", headers={"Authorization": "Basic first"}).status_code == 401
    assert running.http.get("/health").status_code == running.http.get("/").status_code == 200
    for path in ("/metrics", "/stats", "/v1/models", "/nothing"):
        assert running.http.get(path).status_code == 401

    def cached(running, key):
        result = running.client(key).completions.create(
            model=MODEL, prompt=list(range(1, 81)), max_tokens=1
        )
        return result.usage.prompt_tokens_details.cached_tokens

    keys = ("first", "second", "first", "second")
    assert [cached(running, key) for key in keys] == [0, 0, 64, 64]
    shared = make_server(api_keys=("first", "second"), share_prefixes=True)
    assert [cached(shared, key) for key in keys] == [0, 64, 64, 64]


def test_other_sites_are_rejected(running, make_server):
    for origin, status in ((running.url, 200), ("http://other.example", 403), ("null", 403)):
        headers = {"Origin": origin}
        assert running.post(prompt="a", max_tokens=1, headers=headers).status_code == status
    assert running.http.get("/stats", headers={"Origin": "http://["}).status_code == 403
    # DNS rebinding: a foreign name that resolves to this machine.
    renamed = {"Origin": "http://other.example", "Host": "other.example"}
    assert running.post(prompt="a", headers=renamed).status_code == 403
    allowing = make_server(allowed_origins=("http://other.example",))
    for headers in (renamed, {"Origin": "http://other.example"}):
        assert allowing.post(prompt="a", max_tokens=1, headers=headers).status_code == 200


def test_cors_for_an_allowed_site(make_server):
    """Preflight requests, requests, streams and errors."""
    site, other = "http://other.example", "http://third.example"
    allowing = make_server(allowed_origins=(site,), api_keys=("mine",))
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-os",
    }
    before = allowing.http.options("/v1/chat/completions", headers={"Origin": site, **ask})
    assert before.status_code == 200
    assert before.headers["access-control-allow-origin"] == site
    assert "POST" in before.headers["access-control-allow-methods"]
    assert "authorization" in before.headers["access-control-allow-headers"].lower()
    refused = allowing.http.options("/v1/completions", headers={"Origin": other, **ask})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers
    key = {"Authorization": "Bearer mine"}
    for more, status in (({}, 200), ({"stream": True}, 200), ({"n": "x"}, 400)):
        result = allowing.post(prompt="a", max_tokens=1, **more, headers={"Origin": site, **key})
        assert result.status_code == status
        assert result.headers["access-control-allow-origin"] == site
    assert allowing.post(prompt="a", headers={"Origin": other, **key}).status_code == 403
    assert allowing.post(prompt="a", headers={"Origin": site}).status_code == 401
    anyone = make_server(allowed_origins=("*",))
    result = anyone.post(prompt="a", max_tokens=1, headers={"Origin": other})
    assert (result.status_code, result.headers["access-control-allow-origin"]) == (200, "*")


def test_too_long_prompt_is_a_bad_request(running):
    for path, body in (
        ("completions", {"prompt": "a" * 5000}),
        ("completions", {"prompt": "a", "max_tokens": 10**9}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}),
    ):
        result = running.post(path, **body)
        assert result.status_code == 400
        assert result.json()["error"]["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="this server allows"):
        running.client().completions.create(model=MODEL, prompt="a" * 5000)


def test_top_logprobs_zero_without_logprobs(running):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    result = running.post("chat/completions", **body, logprobs=False, top_logprobs=0)
    assert result.status_code == 200 and result.json()["choices"][0]["logprobs"] is None


def test_unicode_line_separators_are_escaped(running):
    """Clients that split lines at Unicode separators still receive whole events."""
    text = "a\u2028b\u2029c\x85d"
    body = {"prompt": "x", "max_tokens": 24, "structured_outputs": {"choice": [text]}}
    result = running.post(**body)
    assert result.json()["choices"][0]["text"] == text and len(result.text.splitlines()) == 1
    stream = running.post(**body, stream=True).text
    lines = [line for line in stream.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(part["choices"][0]["text"] for part in parts) == text


def test_disconnect_frees_pages(make_server):
    running = make_server()
    running.pause()
    with running.http.stream(
        "POST", "/v1/completions", json=LONG_REQUEST | {"stream": True, "n": 3}
    ) as x:
        running.allow_steps(3)
        assert next(x.iter_lines()).startswith("data: ")
    running.until(lambda: not running.server.state.active_requests)
    running.resume()
    running.until(lambda: running.count_ended("cancelled") == 3)
    running.assert_idle()


def test_disconnect_of_a_waiting_request_frees_pages(make_server):
    running = make_server()
    running.pause()
    body = json.dumps(LONG_REQUEST).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    responses = [socket.create_connection(running.address) for _ in range(ROWS + 2)]
    for each in responses:
        each.sendall(head + body)
    running.until(lambda: len(running.server.state.handles) == ROWS + 2)
    running.allow_steps(2)
    for each in responses:
        each.close()
    running.until(lambda: not running.server.state.active_requests)
    assert running.count_ended("length") == 0
    running.resume()
    running.until(lambda: running.count_ended("cancelled") == ROWS + 2)
    running.assert_idle()


def test_many_disconnects(make_server):
    running = make_server()
    rng = np.random.default_rng(0)

    def one(seed, patience):
        body = {"prompt": [int(seed)] * 20, "max_tokens": 64, "stream": True, "n": 1 + seed % 2}
        with (
            httpx.Client(base_url=running.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as result,
        ):
            for number, _ in enumerate(result.iter_raw()):
                if number == patience:
                    return

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        all_of_them = pool.map(one, range(1, 25), rng.integers(0, 12, 24))
        for path in 10 * ["/stats", "/metrics"]:
            assert running.http.get(path).status_code == 200
        list(all_of_them)
    running.assert_idle()


def test_missing_bodies_take_no_place_in_the_queue(make_server):
    running = make_server(max_sequences=2, client_timeout=60.0)
    silent = [socket.create_connection(running.address) for _ in range(9)]
    for each in silent:
        each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
    assert running.post(prompt="a", n=2, max_tokens=2).status_code == 200
    for each in silent:
        each.close()
    running.assert_idle()


def test_half_open_and_slow_clients_time_out(make_server):
    running = make_server(client_timeout=0.5)
    silent, half = (socket.create_connection(running.address) for _ in range(2))
    slow = socket.create_connection(running.address)
    half.sendall(b"POST /v1/completions HTTP/1.1\r\nHost")
    slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
    assert running.post(prompt="a", max_tokens=2).status_code == 200
    for each in (silent, half):
        each.settimeout(60)
        with contextlib.suppress(ConnectionResetError):
            assert each.recv(100) == b""
    slow.settimeout(60)
    assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")
    for each in (silent, half, slow):
        each.close()
    running.assert_idle()


def test_slow_reader_does_not_block_others(make_server):
    running = make_server(client_timeout=1.0, buffer=4096)
    body = json.dumps(LONG_REQUEST | {"stream": True, "logprobs": 20, "n": 8}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(running.address)
    slow.sendall(head + body)
    running.until(lambda: running.count_ended("length") or running.engine.stats().running)
    assert running.post(prompt="b", max_tokens=4).status_code == 200
    # The response does not fit the socket buffers, and nobody reads it.
    running.until(lambda: not running.server.state.active_requests)
    running.assert_idle()
    result = b""
    with contextlib.suppress(ConnectionResetError):
        while part := slow.recv(65536):
            result += part
    assert b"data: " in result and b"[DONE]" not in result
    slow.close()


def test_engine_failure_is_reported(tiny_llama):
    running = RunningServer(tiny_llama)

    def fails():
        raise RuntimeError("injected")

    running.engine.step = fails
    result = []

    async def run():
        running.loop = asyncio.get_running_loop()
        try:
            await running.server.run(running.listener, running._ready.set)
        except RuntimeError as error:
            result.append(error)

    running._run = run
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with running, contextlib.suppress(httpx.HTTPError):
            assert running.post(prompt="a").status_code == 503
            running._thread.join(60)
    finally:
        threading.excepthook = hook
    assert "injected" in str(result[0])


def test_shutdown_finishes_accepted_requests(make_server):
    running = make_server()
    running.pause()
    keep = httpx.Client(base_url=running.url, timeout=60)
    assert keep.get("/health").json() == {"status": "ok"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        responses = [pool.submit(running.post, prompt="a", max_tokens=40, seed=n) for n in range(6)]
        running.until(lambda: len(running.server.state.handles) == 6)
        running.stop()
        running.until(lambda: running.server.state.draining)
        assert keep.get("/health").status_code == 503
        answer = keep.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
        running.resume()
        assert [each.result().status_code for each in responses] == [200] * 6
    running._thread.join(60)
    assert not running._thread.is_alive()


def test_shutdown_cancels_requests_after_the_grace_period(make_server):
    running, cancelled = make_server(shutdown_timeout=0.1), threading.Event()
    state = running.server.state
    cancel_all, state.cancel_all = state.cancel_all, lambda: (cancel_all(), cancelled.set())
    running.pause()
    with running.http.stream(
        "POST", "/v1/completions", json=LONG_REQUEST | {"stream": True}
    ) as answer:
        running.allow_steps(3)
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        running.stop()
        assert cancelled.wait(60)
        running.resume()
        rest = [line for line in lines if line]
    assert "too long" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    running._thread.join(60)
    assert not running._thread.is_alive()


def test_monitoring_endpoints(running):
    models = running.client().models.list().data
    assert [each.id for each in models] == [MODEL]
    assert running.client().models.retrieve(MODEL).id == MODEL
    assert running.http.get("/v1/models/other").status_code == 404
    assert running.http.get("/nothing").json()["error"]["message"] == "no such path: /nothing"
    assert running.http.get("/v1/completions").status_code == 405
    running.post(prompt="a", max_tokens=4)
    text = running.http.get("/metrics").text
    samples = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
    assert samples >= {
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
        "time_to_first_token_seconds_count", "inter_token_latency_seconds_bucket",
    }  # fmt: skip
    rows = re.findall(r"^\| (`.*?) \|", _section("Metrics"), re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert len(documented) >= 10
    ends = ("", "_bucket")
    assert all(any(name + end in samples for end in ends) for name in documented), documented
    stats = running.http.get("/stats").json()
    assert stats["pages"] == [ROWS * LONGEST // 16] and stats["model"] == MODEL
    assert stats.keys() >= {
        "used_pages", "cached_pages", "running", "waiting", "usage", "tokens_per_second",
    }  # fmt: skip


def test_page_loads_nothing_else(running):
    answer = running.http.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    addresses = re.findall(r"https?://[^\s'\"]+", answer.text)
    assert set(addresses) == {"http://www.w3.org/2000/svg"}
    for path in re.findall(r'"(/[a-z][a-z0-9/]*)"', answer.text):
        assert running.http.get(path).status_code in (200, 405), path


SQUARES = """
(() => {
  const canvas = document.querySelector(".pool canvas"), pen = canvas.getContext("2d");
  const pages = newest.pages[0], columns = Math.floor((canvas.clientWidth + 2) / 17), found = {};
  for (let at = 0; at < pages; at++) {
    const x = 17 * (at % columns) + 7, y = 17 * Math.floor(at / columns) + 7;
    const color = "#" + [...pen.getImageData(x, y, 1, 1).data].slice(0, 3)
      .map((each) => each.toString(16).padStart(2, "0")).join("");
    found[color] = (found[color] ?? 0) + 1;
  }
  return ["used", "cached", "free"].map((name) => found[color(name)] ?? 0);
})()
"""
"""Counts the page's squares by color."""


@pytest.mark.rare
def test_page_in_a_browser(make_server, monkeypatch, tmp_path):
    if os.name == "nt" or browser.find_chromium() is None:
        pytest.skip("needs a Chromium")
    running = make_server(api_keys=("first",))
    prompt = running.lm.chat([{"role": "user", "content": "hello"}])
    settings = {"max_new_tokens": 24, "temperature": 0.0}
    answer, more = (run_alone(running, each, **settings).text for each in (prompt, "world"))
    with browser.Browser(browser.find_chromium(), tmp_path) as tab:
        size = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
        tab.send("Emulation.setDeviceMetricsOverride", width=1200, **size)
        tab.send("Page.navigate", url=running.url)
        # The page asks for a key until it has a valid one.
        tab.until("document.querySelector('dialog')?.open")
        tab.type("second")
        tab.until("$('ask-key').open && $('why').textContent.includes('does not know')")
        tab.type("first")
        tab.until("$('state').textContent === 'running' && chat && model")
        # Chat and completion; the page learns from an error that there is no chat template.
        tab.run("$('temperature').value = 0; $('tokens').value = 24; $('words').focus()")
        said = "document.querySelector('#talk > :last-child .said').textContent"
        for words, expected, chat in (("hello", answer, True), ("world", more, False)):
            tab.type(words)
            tab.until("!running && document.querySelector('#talk > :last-child .foot')")
            assert tab.run(said) == expected and tab.run("chat") is chat
            monkeypatch.setattr(running.lm.tokenizer, "templates", ChatTemplates({}, {}, ""))
        tab.run("$('clear').click()")
        assert tab.run("$('talk').children.length") == 1
        # A running request: its pages are drawn, and it can be stopped.
        running.pause()
        tab.run("$('tokens').value = 400")
        tab.type("import")
        running.allow_steps(8)
        tab.until(f"newest.used_pages[0] > 0 && {said}.length > 6")
        stats = running.engine.stats()
        (used,), (cached,), (free,) = stats.used_pages, stats.cached_pages, stats.free_pages
        tab.until(f"newest.used_pages[0] === {used} && newest.cached_pages[0] === {cached}")
        assert tab.run(SQUARES) == [used, cached, free] and used > 0
        assert tab.run("$('send').textContent") == "Stop"
        tab.click("#send")
        tab.until("$('send').textContent === 'Send'")
        assert tab.run("document.querySelector('.foot').textContent") == "stopped"
        running.resume()
        running.until(lambda: running.count_ended("cancelled") == 1)
        # An error of the server is shown, and the message returns to the input.
        tab.run("$('tokens').value = 5000")
        tab.type("import")
        tab.until("document.querySelector('.wrong')")
        assert "this server allows" in tab.run("document.querySelector('.wrong').textContent")
        assert tab.run("$('words').value") == "import"
        for width in (1200, 768, 400):
            tab.send("Emulation.setDeviceMetricsOverride", width=width, **size)
            assert tab.run("document.documentElement.scrollWidth - innerWidth") <= 0
        assert [x for x in tab.events if x["method"] == "Runtime.exceptionThrown"] == []
    running.assert_idle()


def _section(title):
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.split(rf"\n##+ {title}\n", text)[1].split("\n## ")[0].split("\n### ")[0]


def test_examples_of_the_docs_page(running):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = re.findall(r"^curl .*$", text, re.MULTILINE)
    assert len(lines) >= 9
    for line in lines:
        command = line.replace("http://127.0.0.1:8000", running.url)
        result = subprocess.run(
            ["bash", "-c", command.replace("curl", "curl -sS --fail-with-body", 1)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert result.returncode == 0, (line, result.stdout, result.stderr)
    code = re.search(r"^```python\n(from openai .*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    code = code.replace("http://127.0.0.1:8000", running.url).replace("kvjax-tiny", MODEL)
    exec(compile(code, "serving.md", "exec"), {})


@pytest.mark.rare
def test_engine_example_of_the_docs_page(tiny_llama, capsys):
    code = "".join(re.findall(r"^```python\n(.*?)^```", _section("In a script"), re.M | re.S))
    namespace = {"kvjax": kvjax, "lm": tiny_llama}
    exec(compile(code, "serving.md", "exec"), namespace)
    assert namespace["handle"].done and [len(each.tokens) for each in namespace["handles"]] == [
        32,
        32,
    ]
    assert capsys.readouterr().out.startswith(namespace["handle"].text)
    assert not namespace["engine"].busy
    (lines,) = re.findall(r"^```text\n(.*?)^```", _section("A file of prompts"), re.M | re.S)
    parsed = [
        parse_prompt(parse_line(line.encode()), tiny_llama, False) for line in lines.splitlines()
    ]
    assert [prompt for prompt, _ in parsed] == ["The json module", "An iterator"]


def test_missing_package_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    with pytest.raises(ValueError, match=r"needs uvicorn: pip install \"kvjax\[serve\]\""):
        check_installed()


def test_settings_are_checked():
    for wrong in (
        {"api_keys": ("",)},
        {"api_keys": ("a b",)},
        {"max_sequences": 0},
        {"shutdown_timeout": 0.0},
    ):
        with pytest.raises(ValueError):
            ServerSettings(name="a", **wrong)


class Process:
    """``kvjax serve`` in its own process."""

    def __init__(self, folder, *options):
        command = [sys.executable, "-m", "kvjax", "serve", "--model", folder, "--port", "0"]
        command += ["--max-seq-len", LONGEST, "--max-batch-size", ROWS, "--prefill-chunk", "16"]
        command += ["--cache", "paged,page_size=16", *options]
        self.process = subprocess.Popen(
            [str(each) for each in command], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    def __enter__(self):
        line = self.process.stderr.readline()
        assert line.startswith("kvjax: serving "), line + self.process.stderr.read()
        self.url = line.split()[-1]
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stderr.close()


def status_of(url, seed, body):
    """The status of a complete response; None without a connection."""
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body | {"seed": seed}, timeout=60)
    except (httpx.ConnectError, httpx.ConnectTimeout):
        return None
    if answer.status_code == 200 and body.get("stream"):
        usage = events(answer.text)[-1]["usage"]
        assert usage["completion_tokens"] == body["max_tokens"]
    elif answer.status_code == 200:
        assert answer.json()["usage"]["completion_tokens"] == body["max_tokens"]
    return answer.status_code


@pytest.mark.rare
def test_signal_under_load_loses_no_request(tiny_llama_dir):
    body = LONG_REQUEST | {"stream": True, "stream_options": {"include_usage": True}}
    with (
        Process(tiny_llama_dir, "--draft-layers", 1) as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        responses = [pool.submit(status_of, server.url, n, body) for n in range(8)]
        while not httpx.get(f"{server.url}/stats").json()["running"]:
            pass
        server.process.send_signal(signal.SIGTERM)
        more = [pool.submit(status_of, server.url, n, body) for n in range(8)]
        assert server.process.wait(60) == 0
        result = [each.result() for each in responses]
        assert 200 in result and set(result) <= {200, 503, None}
        assert {each.result() for each in more} <= {200, 503, None}
        assert server.process.stderr.read() == ""


def test_invalid_options_are_one_line(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, word in (
            (["--port", port], port),
            (["--port", port, "--kv-bits", "8", "--group-size", "32"], port),
            (["--api-key", "a b"], "API key"),
            (["--prompt-lookup", "--draft-layers", "1"], "exclude each other"),
        ):  # fmt: skip
            monkeypatch.setattr(sys, "argv", ["kvjax", "serve", *options])
            with pytest.raises(SystemExit) as leaving:
                cli.main()
            words = capfd.readouterr().err
            assert leaving.value.code == 2 and words.count("\n") == 1 and word in words


@pytest.mark.rare
def test_two_hundred_concurrent_requests(tiny_llama_dir):
    body = {"prompt": "hello", "max_tokens": 32, "ignore_eos": True}
    options = ("--max-queue", 400, "--api-key", "k")
    with Process(tiny_llama_dir, *options) as server:

        async def all_at_once():
            limits = httpx.Limits(max_connections=None)
            headers = {"Authorization": "Bearer k"}
            async with httpx.AsyncClient(timeout=300, limits=limits, headers=headers) as http:
                sent = [
                    http.post(f"{server.url}/v1/completions", json=body | {"seed": n % 10})
                    for n in range(200)
                ]
                return [
                    answer.json()["choices"][0]["text"] for answer in await asyncio.gather(*sent)
                ]

        texts = asyncio.run(all_at_once())
        assert all(text == texts[n % 10] for n, text in enumerate(texts))
        assert len(set(texts)) == 10
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
