"""The server: what OpenAI's clients ask it, what it refuses, and who gets its pages back."""

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
LONG = {"prompt": "once", "max_tokens": 480, "ignore_eos": True}
"""A request of many steps."""
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [0, 1]}, "name": {"enum": ["a", "bé"]}},
    "required": ["x", "name"],
    "additionalProperties": False,
}
MODEL = "tiny"


class Running:
    """A server in a thread: its ``url``, and an engine whose steps can be counted out."""

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
        self.let(10**6)
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

    def hold(self):
        """No step is done, but those that ``let`` counts."""
        self.steps = threading.Semaphore(0)

    def let(self, count):
        if self.steps is not None:
            self.steps.release(count)

    def go_on(self):
        self.let(10**6)

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def post(self, path="completions", /, headers=None, **body):
        return self.http.post(f"/v1/{path}", json=body, headers=headers)

    def until(self, condition):
        """Wait until something holds, for as long as a test may take."""
        for _ in range(3000):
            if condition():
                return
            time.sleep(0.01)
        raise AssertionError("it never holds")

    def idle(self):
        self.until(lambda: not self.engine.busy and not self.server.state.active_requests)
        assert sum(self.engine.stats().used) == 0
        assert self.server.state.queue.in_use == 0
        assert not self.server.state.handles

    def ended(self, reason):
        """How many choices have ended so."""
        name = f'request_success_total{{finished_reason="{reason}"}} '
        text = self.server.state.metrics.exposition().decode()
        return sum(int(float(x.removeprefix(name))) for x in text.splitlines() if name in x)


@pytest.fixture(scope="module")
def running(tiny_llama):
    with Running(tiny_llama) as running:
        yield running


@pytest.fixture
def own(tiny_llama):
    """Servers of a test's own, with settings of its own."""
    with contextlib.ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Running(tiny_llama, **settings))


def alone(running, prompt, **settings):
    """What an engine gives that nobody else asks."""
    engine = kvjax.Engine(
        running.lm, kvjax.policy("paged", page_size=16),
        InferenceLimits(max_batch_size=ROWS, max_seq_len=LONGEST), prefill_chunk=16,
    )  # fmt: skip
    return engine.run([prompt], **settings)[0]


def events(text):
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(each) for each in found[:-1]]


def test_a_completion_is_what_the_engine_gives(running):
    wanted = alone(running, "import", max_new_tokens=12, temperature=0.9, seed=5)
    settings = {"model": MODEL, "prompt": "import", "max_tokens": 12, "temperature": 0.9, "seed": 5}
    whole = running.client().completions.create(**settings)
    assert whole.choices[0].text == wanted.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.object == "text_completion" and whole.model == MODEL
    assert whole.usage.prompt_tokens == 6 and whole.usage.completion_tokens == 12
    pieces = list(
        running.client().completions.create(
            **settings, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(x.choices[0].text for x in pieces[:-1]) == wanted.text
    assert pieces[-2].choices[0].finish_reason == "length"
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == 12
    assert len({x.id for x in pieces}) == 1


def test_a_chat_is_what_the_engine_gives(running):
    messages = [{"role": "developer", "content": "short"}, {"role": "user", "content": "hé"}]
    tokens = running.lm.chat([{"role": "system", "content": "short"}, messages[1]])
    wanted = alone(running, tokens, max_new_tokens=9, temperature=1.0, seed=3)
    settings = {"model": MODEL, "messages": messages, "max_completion_tokens": 9, "seed": 3}
    whole = running.client().chat.completions.create(**settings)
    assert whole.choices[0].message.content == wanted.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(tokens)
    pieces = list(running.client().chat.completions.create(**settings, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(x.choices[0].delta.content or "" for x in pieces) == wanted.text
    assert pieces[-1].choices[0].finish_reason == "length"
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "é"}]
    settings["messages"] = [messages[0], {"role": "user", "content": parts}]
    again = running.client().chat.completions.create(**settings)
    assert again.choices[0].message.content == wanted.text


@pytest.mark.parametrize("stream", [False, True])
def test_choices_draw_with_seeds_one_after_the_other(running, stream):
    prompts = ["ab", [100, 101]]
    body = {"prompt": prompts, "n": 2, "seed": 2**64 - 1, "max_tokens": 8, "stream": stream}
    answer = running.post(**body)
    texts = [""] * 4
    for part in events(answer.text) if stream else [answer.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    for at, text in enumerate(texts):
        seed = (2**64 - 1 + at % 2) % 2**64
        wanted = alone(running, prompts[at // 2], max_new_tokens=8, temperature=1.0, seed=seed)
        assert text == wanted.text


@pytest.mark.slow
@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_of_several_samples_are_those_of_generate(running, logprobs):
    prompts, settings = ["ab", "import"], {"n": 2, "best_of": 4, "seed": 5, "temperature": 0.8}
    seeds = {"seed": [5, 6, 7, 8] * 2}
    wanted = kvjax.generate(running.lm, prompts, max_new_tokens=8, **settings | seeds)
    answer = running.post(prompt=prompts, max_tokens=8, logprobs=logprobs, **settings).json()
    assert [choice["text"] for choice in answer["choices"]] == wanted.text
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all((x["logprobs"] is None) == (logprobs is None) for x in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == wanted.stats.new_tokens
    running.idle()


def test_a_beam_search_is_that_of_the_engine(running):
    search = {"n": 2, "length_penalty": 0.5, "early_stopping": True}
    handle = alone(running, "import", max_new_tokens=8, num_beams=3, logprobs=1, **search)
    wanted = handle.beam_results
    body = {"prompt": ["import", "import"], "max_tokens": 8, "logprobs": 1, **search}
    answer = running.post(use_beam_search=True, beam_width=3, **body).json()
    assert [choice["text"] for choice in answer["choices"]] == 2 * [x.text for x in wanted]
    for choice, found in zip(answer["choices"], wanted, strict=False):
        told = choice["logprobs"]["token_logprobs"]
        assert told == [x.logprob for x in found.logprobs or ()][: len(told)] and len(told) > 6
        assert choice["finish_reason"] == {"eos": "stop"}.get(found.reason, found.reason)
    assert answer["usage"]["completion_tokens"] == 2 * sum(len(x.tokens) for x in wanted)
    body = {"messages": MESSAGE, "max_tokens": 4, "best_of": 2}
    answer = running.post("chat/completions", use_beam_search=True, **body).json()
    tokens = running.lm.chat(MESSAGE)
    (found,) = alone(running, tokens, max_new_tokens=4, num_beams=2).beam_results
    assert answer["choices"][0]["message"]["content"] == found.text
    running.idle()


def test_seeds_are_random_where_none_is_given(running):
    texts = {running.post(prompt="x", max_tokens=24).text for _ in range(2)}
    assert len({json.loads(text)["choices"][0]["text"] for text in texts}) == 2


def test_a_text_ends_before_a_stop_string(running):
    whole = alone(running, "x", max_new_tokens=30, seed=0).text
    stop = next(whole[at : at + 2] for at in range(6, 28) if whole[at : at + 2].isprintable())
    found = running.post(prompt="x", max_tokens=30, temperature=0, stop=["never!", stop]).json()
    assert found["choices"][0]["text"] == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"


def test_a_bias_chooses(running):
    found = running.post(prompt="x", max_tokens=3, logit_bias={"65": 100}, temperature=0).json()
    letter = running.lm.decode([65])
    assert found["choices"][0]["text"] == 3 * letter


def assert_offsets(choice):
    """Each is where its token begins in the text; parts of a character begin where it does."""
    text, whole = choice["text"], choice["logprobs"]
    assert whole["text_offset"] == sorted(whole["text_offset"]) and len(whole["tokens"]) > 1
    for token, offset in zip(whole["tokens"], whole["text_offset"], strict=True):
        assert 0 <= offset <= len(text)
        if "\N{REPLACEMENT CHARACTER}" not in token:
            assert text.startswith(token, offset)


def test_offsets_of_characters_of_several_tokens(running):
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


def test_logprobs_are_the_models_own(running):
    lm = running.lm
    settings = {"max_tokens": 8, "temperature": 0.7, "seed": 1, "min_tokens": 8}
    choice = running.post(prompt="hello", **settings, logprobs=3).json()["choices"][0]
    whole = choice["logprobs"]
    tokens = alone(
        running, "hello", max_new_tokens=8, min_new_tokens=8, temperature=0.7, seed=1
    ).tokens
    ids = [*lm.tokenizer.encode("hello"), *tokens]
    logits = lm.apply(lm.params, np.array([ids], np.int32))[0, 4:-1]
    wanted = np.asarray(jax.nn.log_softmax(logits))
    chosen = wanted[np.arange(8), tokens]
    np.testing.assert_allclose(whole["token_logprobs"], chosen, atol=1e-4)
    texts = TokenTexts(lm.tokenizer)
    assert whole["tokens"] == [texts.lookup(token)[0] for token in tokens]
    assert_offsets(choice)
    each = zip(wanted, whole["tokens"], whole["token_logprobs"], whole["top_logprobs"], strict=True)
    for row, text, mine, likeliest in each:
        # Tokens that are parts of characters may have the same text.
        best = texts.lookup(int(row.argmax()))[0]
        assert likeliest[text] >= mine and 1 <= len(likeliest) <= 4
        assert likeliest[best] == max(likeliest.values()) == pytest.approx(row.max(), abs=1e-4)
    pieces = events(running.post(prompt="hello", **settings, logprobs=3, stream=True).text)
    streamed = [x["choices"][0]["logprobs"] for x in pieces]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [each for part in streamed for each in part[name]] == whole[name]


def by_harness(choice, context):
    """What lm-evaluation-harness makes of an answer, ``parse_logprobs`` of its completions: the
    log-probability of a prompt behind so many tokens, and whether each of them is the likeliest."""
    found = choice["logprobs"]
    told, likeliest = (found[name][context:-1] for name in ("token_logprobs", "top_logprobs"))
    return sum(told), all(
        mine == max(each.values()) for mine, each in zip(told, likeliest, strict=True)
    )


@pytest.mark.slow
def test_prompts_are_scored_as_a_harness_asks(running):
    """With what ``kvjax.score`` gives, though the beginning is known: by ids and by text, where a
    character has several tokens, and where the new token ends the text."""
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
            found = choice["logprobs"]
            assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
            assert len(found["tokens"]) == len(ids) + 1 == len(found["text_offset"])
            np.testing.assert_allclose(found["token_logprobs"][1:-1], scored, atol=1e-4)
            np.testing.assert_allclose(
                [max(each.values()) for each in found["top_logprobs"][1:-1]], every[:-1].max(-1),
                atol=1e-4,
            )  # fmt: skip
            assert choice["text"].startswith(text)
            logprob, is_greedy = by_harness(choice, context)
            assert logprob == pytest.approx(float(scored[context - 1 :].sum()), abs=1e-3)
            assert is_greedy == greedy
            if choice["finish_reason"] == "stop":  # this token has no text
                end = {name: each.pop() for name, each in found.items()}
                assert end["text_offset"] == len(text) == len(choice["text"])
            assert_offsets(choice)
    assert [each["finish_reason"] for each in answer["choices"]] == ["stop"] * 2
    best = [*ids, *alone(running, ids, max_new_tokens=6).tokens[:5]]
    assert by_harness(running.post(prompt=best, **body).json()["choices"][0], len(ids))[1]


@pytest.mark.slow
def test_an_echo_alone(running):
    """Nothing but the prompt, which may have all positions."""
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
    running.idle()


@pytest.mark.parametrize("more", [{"max_tokens": 0}, {"max_tokens": 5, "n": 2}], ids=str)
def test_echoes_that_are_streamed(running, more):
    body = {"prompt": ["hé", [104, 105]], "echo": True, "logprobs": 2, "temperature": 0, **more}
    whole = running.post(**body).json()
    found = {each["index"]: [] for each in whole["choices"]}
    for event in events(running.post(**body, stream=True).text):
        found[event["choices"][0]["index"]].append(event["choices"][0])
    for choice in whole["choices"]:
        mine = found[choice["index"]]
        assert "".join(each["text"] for each in mine) == choice["text"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        for name, wanted in choice["logprobs"].items():
            assert [x for each in mine for x in each["logprobs"][name]] == wanted
        assert_offsets(choice)
    plain = events(running.post(**body | {"logprobs": None}, stream=True).text)
    assert all(each["choices"][0]["logprobs"] is None for each in plain)


def test_the_best_texts_behind_an_echo(running):
    for more in ({"best_of": 3}, {"use_beam_search": True, "beam_width": 3, "temperature": 0}):
        body = {"prompt": "import", "max_tokens": 6, "n": 2, "seed": 1, "logprobs": 1, **more}
        plain = running.post(**body).json()["choices"]
        for choice, without in zip(
            running.post(**body, echo=True).json()["choices"], plain, strict=True
        ):
            assert choice["text"] == "import" + without["text"]
            told, offsets = (choice["logprobs"][name] for name in ("tokens", "text_offset"))
            assert told[6:][: len(without["logprobs"]["tokens"])] == without["logprobs"]["tokens"]
            assert offsets[:6] == [*range(6)] and len(offsets) >= 12


def test_the_last_message_is_continued(running):
    messages = [*MESSAGE, {"role": "assistant", "content": "The answer is "}]
    lm, body = running.lm, {"messages": messages, "max_tokens": 6, "temperature": 0}
    tokens = lm.chat(messages, continue_final_message=True)
    assert lm.decode(tokens).endswith("[assistant]The answer is ")
    line = {"messages": messages, "continue_final_message": True}
    assert parse_prompt(line, lm, False) == (tokens, {})
    wanted = alone(running, tokens, max_new_tokens=6).text
    for more in ({}, {"add_generation_prompt": False}):
        found = running.post("chat/completions", **body, continue_final_message=True, **more)
        assert found.json()["choices"][0]["message"]["content"] == wanted
        assert found.json()["usage"]["prompt_tokens"] == len(tokens)
    ended = lm.chat(messages, add_generation_prompt=False)
    found = running.post("chat/completions", **body, add_generation_prompt=False)
    assert found.json()["usage"]["prompt_tokens"] == len(ended) == len(tokens) + 1


def test_logprobs_of_a_chat(running):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5, "temperature": 0}
    found = running.post("chat/completions", **body, logprobs=True, top_logprobs=2).json()
    content = found["choices"][0]["logprobs"]["content"]
    assert len(content) == 5 or found["choices"][0]["finish_reason"] == "stop"
    for each in content:
        assert each["top_logprobs"][0]["logprob"] == each["logprob"]
        assert len(each["top_logprobs"]) == 2 and len(each["bytes"]) == 1


def test_bytes_of_tokens_make_the_text(running):
    texts = TokenTexts(running.lm.tokenizer)
    for text in ("é €", "plain", "a\n\t\0\x7f­"):
        ids = running.lm.tokenizer.encode(text)
        assert bytes(byte for i in ids for byte in texts.lookup(i)[1] or ()).decode() == text
    assert texts.lookup(257) == ("</s>", list(b"</s>"))


@pytest.mark.slow
def test_drafts_change_no_text(running):
    body, texts, drafted = {"prompt": "abc" * 6, "max_tokens": 16, "temperature": 0}, [], []
    for more in ({}, {"lookup": True}, {"draft": False}, {"lookup": False, "draft": True}):
        texts.append(running.post(**body, **more).json()["choices"][0]["text"])
        drafted.append(running.engine.stats().drafted_tokens)
    assert len(set(texts)) == 1
    assert drafted[0] < drafted[1] == drafted[3]


@pytest.mark.rare
def test_what_a_server_drafts_with(own, tiny_llama):
    """By default what it was started with."""
    running = own(draft=kvjax.DraftModel(tiny_llama, adaptive=False))
    body, texts, drafted = {"prompt": "abc", "max_tokens": 16, "temperature": 0}, [], []
    for more in ({}, {"draft": False}, {"draft": True}):
        texts.append(running.post(**body, **more).json()["choices"][0]["text"])
        drafted.append(running.engine.stats().drafted_tokens)
    assert len(set(texts)) == 1
    assert 0 < drafted[0] == drafted[1] < drafted[2]


def test_usage_counts_what_was_cached(running):
    prompt = list(range(1, 81))
    body = {"prompt": prompt, "max_tokens": 2}
    first, second = (running.post(**body).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] == 64
    assert second["prompt_tokens"] == 80 and second["total_tokens"] == 82


def test_a_schema_is_kept_to(running):
    for seed in range(4):
        found = running.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "a point"}], seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}},
        ).choices[0]  # fmt: skip
        assert found.finish_reason == "stop"
        value = json.loads(found.message.content)
        assert set(value) == {"x", "name"} and value["x"] in (0, 1)
        assert value["name"] in ("a", "bé")


def test_a_schema_is_kept_to_piece_by_piece_beside_others(running):
    form = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        plain = [pool.submit(running.post, prompt="a", max_tokens=64, seed=n) for n in range(3)]
        body = {"prompt": "p", "max_tokens": 64, "response_format": form, "stream": True, "n": 2}
        texts = ["", ""]
        for part in events(running.post(**body).text):
            texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
        for number, each in enumerate(plain):
            wanted = alone(running, "a", max_new_tokens=64, temperature=1.0, seed=number)
            assert each.result().json()["choices"][0]["text"] == wanted.text
    assert all(json.loads(text)["x"] in (0, 1) for text in texts)


def test_other_guides(running):
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
    found = running.post(
        prompt="a", max_tokens=400, response_format={"type": "json_object"}, temperature=0.2
    ).json()["choices"][0]
    assert found["text"].startswith("{")
    assert found["finish_reason"] == "length" or isinstance(json.loads(found["text"]), dict)


def test_a_guide_that_has_ended_allows_ends_alone(tiny_llama):
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
WRONG = [
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
    ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias"),
    ({"prompt": "a", "seed": 2**64}, "seed"),
    ({"prompt": "a", "stop": [""]}, "stop"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop"),
    ({"prompt": "a", "stop": 0}, "stop"),
    ({"prompt": "a", "stop": "x" * 257}, "stop"),
    ({"prompt": "a", "n": 0}, "n"),
    ({"prompt": "a", "stream": 1}, "stream"),
    ({"prompt": "a", "stream_options": {}}, "stream_options"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"prompt": "a", "structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {}}, "structured_outputs"),
    ({"prompt": "a", "structured_outputs": {"choice": ["a"]}, "ignore_eos": True},
     "structured_outputs"),
    ({"prompt": "a", "wibble": 1}, "wibble"),
    ({"prompt": ""}, None),
    ({"prompt": []}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [99999]}, None),
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
    ({"messages": MESSAGE, "max_tokens": 2, "max_completion_tokens": 3}, "max_tokens"),
    ({"messages": MESSAGE, "reasoning_effort": "high"}, "reasoning_effort"),
    ({"messages": MESSAGE, "chat_template_kwargs": {"name": "x"}}, "chat_template_kwargs"),
]  # fmt: skip


def test_what_is_wrong_is_refused_by_its_name(running):
    for body, param in WRONG:
        path = "chat/completions" if "messages" in body else "completions"
        answer = running.http.post(f"/v1/{path}", content=json.dumps(body))
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()["error"]
        assert error["param"] == param, (body, error)
        assert error["type"] == "invalid_request_error" and error["message"]
    for raw in (b"", b"[]", b"{", b'{"prompt": NaN}', b"\xff", b"[" * 100_000):
        answer = running.http.post("/v1/completions", content=raw)
        assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]
    running.idle()


@pytest.mark.slow
def test_what_asks_for_nothing_is_passed_over(running):
    body = {
        "model": MODEL, "messages": MESSAGE, "max_tokens": 2, "user": "me", "metadata": {"a": "b"},
        "presence_penalty": 0, "frequency_penalty": 0.0, "tools": [], "tool_choice": "none",
        "logit_bias": None, "stop": None, "response_format": {"type": "text"}, "store": False,
        "top_k": -1, "top_p": 1, "chat_template_kwargs": {"mood": "fine"},
    }  # fmt: skip
    assert running.post("chat/completions", **body).status_code == 200
    body = {"prompt": "a", "echo": False, "suffix": None, "best_of": 1, "max_tokens": 2}
    assert running.post(**body).status_code == 200


def test_limits_have_their_statuses(own):
    running = own(max_sequences=ROWS + 1, max_body=4096)
    client = running.client()
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.APIStatusError, match="larger than 4096") as found:
        client.completions.create(model=MODEL, prompt="a" * 5000)
    assert found.value.status_code == 413

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
    running.hold()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        some = [pool.submit(running.post, prompt="a", max_tokens=2) for _ in range(ROWS)]
        running.until(lambda: len(running.server.state.handles) == ROWS)
        with pytest.raises(openai.RateLimitError) as found:
            client.completions.create(model=MODEL, prompt="a", n=2)
        assert int(found.value.response.headers["retry-after"]) >= 1
        some.append(pool.submit(running.post, prompt="a", max_tokens=2))
        running.until(lambda: len(running.server.state.handles) == ROWS + 1)
        assert running.post(prompt="a").status_code == 429
        running.go_on()
        assert [each.result().status_code for each in some] == [200] * (ROWS + 1)
    running.idle()


def test_keys_and_tenants(own):
    running = own(api_keys=("first", "second"))
    for key in ("", "wrong", "first second", "fi"):
        with pytest.raises(openai.AuthenticationError, match="API key"):
            running.client(key or "x").completions.create(model=MODEL, prompt="a")
    assert running.post(prompt="a").status_code == 401
    assert running.post(prompt="a", headers={"Authorization": "Basic first"}).status_code == 401
    assert running.http.get("/health").status_code == running.http.get("/").status_code == 200
    for path in ("/metrics", "/stats", "/v1/models", "/nothing"):
        assert running.http.get(path).status_code == 401

    def cached(running, key):
        found = running.client(key).completions.create(
            model=MODEL, prompt=list(range(1, 81)), max_tokens=1
        )
        return found.usage.prompt_tokens_details.cached_tokens

    keys = ("first", "second", "first", "second")
    assert [cached(running, key) for key in keys] == [0, 0, 64, 64]
    shared = own(api_keys=("first", "second"), share_prefixes=True)
    assert [cached(shared, key) for key in keys] == [0, 64, 64, 64]


def test_pages_of_other_sites_are_refused(running, own):
    for origin, status in ((running.url, 200), ("http://other.example", 403), ("null", 403)):
        headers = {"Origin": origin}
        assert running.post(prompt="a", max_tokens=1, headers=headers).status_code == status
    assert running.http.get("/stats", headers={"Origin": "http://["}).status_code == 403
    # A name that its owner has let mean this machine, and a proxy's.
    renamed = {"Origin": "http://other.example", "Host": "other.example"}
    assert running.post(prompt="a", headers=renamed).status_code == 403
    allowing = own(allowed_origins=("http://other.example",))
    for headers in (renamed, {"Origin": "http://other.example"}):
        assert allowing.post(prompt="a", max_tokens=1, headers=headers).status_code == 200


def test_pages_of_an_allowed_site_may_read_what_they_are_sent(own):
    """CORS, as a browser asks for it: before a request, with it, and in streams and errors."""
    site, other = "http://other.example", "http://third.example"
    allowing = own(allowed_origins=(site,), api_keys=("mine",))
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
        found = allowing.post(prompt="a", max_tokens=1, **more, headers={"Origin": site, **key})
        assert found.status_code == status
        assert found.headers["access-control-allow-origin"] == site
    assert allowing.post(prompt="a", headers={"Origin": other, **key}).status_code == 403
    assert allowing.post(prompt="a", headers={"Origin": site}).status_code == 401
    anyone = own(allowed_origins=("*",))
    found = anyone.post(prompt="a", max_tokens=1, headers={"Origin": other})
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "*")


def test_a_prompt_that_is_too_long_is_the_requests_own_fault(running):
    for path, body in (
        ("completions", {"prompt": "a" * 5000}),
        ("completions", {"prompt": "a", "max_tokens": 10**9}),
        ("chat/completions", {"messages": [{"role": "user", "content": "a" * 5000}]}),
    ):
        found = running.post(path, **body)
        assert found.status_code == 400
        assert found.json()["error"]["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="room for"):
        running.client().completions.create(model=MODEL, prompt="a" * 5000)


def test_what_asks_for_nothing_is_no_error(running):
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    found = running.post("chat/completions", **body, logprobs=False, top_logprobs=0)
    assert found.status_code == 200 and found.json()["choices"][0]["logprobs"] is None


def test_ends_of_lines_that_json_leaves_as_they_are(running):
    """Clients that split a stream's lines as Unicode does are given whole events."""
    text = "a\u2028b\u2029c\x85d"
    body = {"prompt": "x", "max_tokens": 24, "structured_outputs": {"choice": [text]}}
    found = running.post(**body)
    assert found.json()["choices"][0]["text"] == text and len(found.text.splitlines()) == 1
    stream = running.post(**body, stream=True).text
    lines = [line for line in stream.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    parts = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert "".join(part["choices"][0]["text"] for part in parts) == text


def test_a_client_that_leaves_frees_its_pages(own):
    running = own()
    running.hold()
    with running.http.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 3}) as x:
        running.let(3)
        assert next(x.iter_lines()).startswith("data: ")
    running.until(lambda: not running.server.state.active_requests)
    running.go_on()
    running.until(lambda: running.ended("cancelled") == 3)
    running.idle()


def test_a_client_that_leaves_while_it_waits_frees_its_pages(own):
    running = own()
    running.hold()
    body = json.dumps(LONG).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    some = [socket.create_connection(running.address) for _ in range(ROWS + 2)]
    for each in some:
        each.sendall(head + body)
    running.until(lambda: len(running.server.state.handles) == ROWS + 2)
    running.let(2)
    for each in some:
        each.close()
    running.until(lambda: not running.server.state.active_requests)
    assert running.ended("length") == 0
    running.go_on()
    running.until(lambda: running.ended("cancelled") == ROWS + 2)
    running.idle()


def test_clients_that_come_and_go(own):
    running = own()
    rng = np.random.default_rng(0)

    def one(seed, patience):
        body = {"prompt": [int(seed)] * 20, "max_tokens": 64, "stream": True, "n": 1 + seed % 2}
        with (
            httpx.Client(base_url=running.url, timeout=60) as http,
            http.stream("POST", "/v1/completions", json=body) as found,
        ):
            for number, _ in enumerate(found.iter_raw()):
                if number == patience:
                    return

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        all_of_them = pool.map(one, range(1, 25), rng.integers(0, 12, 24))
        for path in 10 * ["/stats", "/metrics"]:
            assert running.http.get(path).status_code == 200
        list(all_of_them)
    running.idle()


def test_bodies_that_do_not_come_take_no_place(own):
    running = own(max_sequences=2, patience=60.0)
    silent = [socket.create_connection(running.address) for _ in range(9)]
    for each in silent:
        each.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
    assert running.post(prompt="a", n=2, max_tokens=2).status_code == 200
    for each in silent:
        each.close()
    running.idle()


def test_half_open_and_slow_clients_are_cut_off(own):
    running = own(patience=0.5)
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
    running.idle()


def test_who_reads_slowly_holds_up_nobody(own):
    running = own(patience=1.0, buffer=4096)
    body = json.dumps(LONG | {"stream": True, "logprobs": 20, "n": 8}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(running.address)
    slow.sendall(head + body)
    running.until(lambda: running.ended("length") or running.engine.stats().running)
    assert running.post(prompt="b", max_tokens=4).status_code == 200
    # There is more to read than what lies between can hold, and nobody reads it.
    running.until(lambda: not running.server.state.active_requests)
    running.idle()
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := slow.recv(65536):
            found += part
    assert b"data: " in found and b"[DONE]" not in found
    slow.close()


def test_an_engine_that_fails_says_so(tiny_llama):
    running = Running(tiny_llama)

    def fails():
        raise RuntimeError("planted")

    running.engine.step = fails
    found = []

    async def run():
        running.loop = asyncio.get_running_loop()
        try:
            await running.server.run(running.listener, running._ready.set)
        except RuntimeError as error:
            found.append(error)

    running._run = run
    hook, threading.excepthook = threading.excepthook, lambda _: None
    try:
        with running, contextlib.suppress(httpx.HTTPError):
            assert running.post(prompt="a").status_code == 503
            running._thread.join(60)
    finally:
        threading.excepthook = hook
    assert "planted" in str(found[0])


def test_those_who_were_accepted_are_answered_at_the_end(own):
    running = own()
    running.hold()
    keep = httpx.Client(base_url=running.url, timeout=60)
    assert keep.get("/health").json() == {"status": "ok"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        some = [pool.submit(running.post, prompt="a", max_tokens=40, seed=n) for n in range(6)]
        running.until(lambda: len(running.server.state.handles) == 6)
        running.stop()
        running.until(lambda: running.server.state.draining)
        assert keep.get("/health").status_code == 503
        answer = keep.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
        running.go_on()
        assert [each.result().status_code for each in some] == [200] * 6
    running._thread.join(60)
    assert not running._thread.is_alive()


def test_those_who_take_too_long_at_the_end_are_told(own):
    running, told = own(grace=0.1), threading.Event()
    state = running.server.state
    cancel_all, state.cancel_all = state.cancel_all, lambda: (cancel_all(), told.set())
    running.hold()
    with running.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        running.let(3)
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        running.stop()
        assert told.wait(60)
        running.go_on()
        rest = [line for line in lines if line]
    assert "too long" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    running._thread.join(60)
    assert not running._thread.is_alive()


def test_what_is_known_of_the_server(running):
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
    assert {"used", "cached", "running", "waiting", "usage", "tokens_per_second"} <= set(stats)


def test_the_page_stands_alone(running):
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
"""How many of the page's squares have which color."""


@pytest.mark.rare
def test_the_page_in_a_browser(own, monkeypatch, tmp_path):
    if os.name == "nt" or browser.found() is None:
        pytest.skip("needs a Chromium")
    running = own(api_keys=("first",))
    prompt = running.lm.chat([{"role": "user", "content": "hello"}])
    settings = {"max_new_tokens": 24, "temperature": 0.0}
    answer, more = (alone(running, each, **settings).text for each in (prompt, "world"))
    with browser.Browser(browser.found(), tmp_path) as tab:
        size = {"height": 800, "deviceScaleFactor": 1, "mobile": False}
        tab.ask("Emulation.setDeviceMetricsOverride", width=1200, **size)
        tab.ask("Page.navigate", url=running.url)
        # It asks for a key until it has one that is known.
        tab.until("document.querySelector('dialog')?.open")
        tab.type("second")
        tab.until("$('ask-key').open && $('why').textContent.includes('does not know')")
        tab.type("first")
        tab.until("$('state').textContent === 'running' && chat && model")
        # Both kinds of requests, and a model of which the page is told late that it has no chat.
        tab.run("$('temperature').value = 0; $('tokens').value = 24; $('words').focus()")
        said = "document.querySelector('#talk > :last-child .said').textContent"
        for words, wanted, chat in (("hello", answer, True), ("world", more, False)):
            tab.type(words)
            tab.until("!running && document.querySelector('#talk > :last-child .foot')")
            assert tab.run(said) == wanted and tab.run("chat") is chat
            monkeypatch.setattr(running.lm.tokenizer, "templates", ChatTemplates({}, {}, ""))
        tab.run("$('clear').click()")
        assert tab.run("$('talk').children.length") == 1
        # One under way: its pages are drawn, and it can be stopped.
        running.hold()
        tab.run("$('tokens').value = 400")
        tab.type("import")
        running.let(8)
        tab.until(f"newest.used[0] > 0 && {said}.length > 6")
        stats = running.engine.stats()
        (used,), (cached,), (free,) = stats.used, stats.cached, stats.free
        tab.until(f"newest.used[0] === {used} && newest.cached[0] === {cached}")
        assert tab.run(SQUARES) == [used, cached, free] and used > 0
        assert tab.run("$('send').textContent") == "Stop"
        tab.click("#send")
        tab.until("$('send').textContent === 'Send'")
        assert tab.run("document.querySelector('.foot').textContent") == "stopped"
        running.go_on()
        running.until(lambda: running.ended("cancelled") == 1)
        # A server's refusal is shown, and what was asked comes back.
        tab.run("$('tokens').value = 5000")
        tab.type("import")
        tab.until("document.querySelector('.wrong')")
        assert "room for" in tab.run("document.querySelector('.wrong').textContent")
        assert tab.run("$('words').value") == "import"
        for width in (1200, 768, 400):
            tab.ask("Emulation.setDeviceMetricsOverride", width=width, **size)
            assert tab.run("document.documentElement.scrollWidth - innerWidth") <= 0
        assert [x for x in tab.events if x["method"] == "Runtime.exceptionThrown"] == []
    running.idle()


def _section(title):
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    return re.split(rf"\n##+ {title}\n", text)[1].split("\n## ")[0].split("\n### ")[0]


def test_the_pages_examples_run(running):
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    lines = re.findall(r"^curl .*$", text, re.MULTILINE)
    assert len(lines) >= 9
    for line in lines:
        command = line.replace("http://127.0.0.1:8000", running.url)
        found = subprocess.run(
            ["bash", "-c", command.replace("curl", "curl -sS --fail-with-body", 1)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert found.returncode == 0, (line, found.stdout, found.stderr)
    code = re.search(r"^```python\n(from openai .*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    code = code.replace("http://127.0.0.1:8000", running.url).replace("kvjax-tiny", MODEL)
    exec(compile(code, "serving.md", "exec"), {})


@pytest.mark.rare
def test_the_pages_engine_runs(tiny_llama, capsys):
    code = "".join(re.findall(r"^```python\n(.*?)^```", _section("In a script"), re.M | re.S))
    found = {"kvjax": kvjax, "lm": tiny_llama}
    exec(compile(code, "serving.md", "exec"), found)
    assert found["handle"].done and [len(each.tokens) for each in found["handles"]] == [32, 32]
    assert capsys.readouterr().out.startswith(found["handle"].text)
    assert not found["engine"].busy
    (lines,) = re.findall(r"^```text\n(.*?)^```", _section("A file of prompts"), re.M | re.S)
    asked = [
        parse_prompt(parse_line(line.encode()), tiny_llama, False) for line in lines.splitlines()
    ]
    assert [prompt for prompt, _ in asked] == ["The json module", "An iterator"]


def test_what_is_not_installed_is_named(monkeypatch):
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
        {"grace": 0.0},
    ):
        with pytest.raises(ValueError):
            ServerSettings(name="a", **wrong)


class Process:
    """``kvjax serve`` as a process of its own."""

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


def asked(url, seed, body):
    """The status of an answer that is whole; None where there was no connection."""
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
def test_a_signal_under_load_loses_nothing(tiny_llama_dir):
    body = LONG | {"stream": True, "stream_options": {"include_usage": True}}
    with (
        Process(tiny_llama_dir, "--draft-layers", 1) as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        some = [pool.submit(asked, server.url, n, body) for n in range(8)]
        while not httpx.get(f"{server.url}/stats").json()["running"]:
            pass
        server.process.send_signal(signal.SIGTERM)
        more = [pool.submit(asked, server.url, n, body) for n in range(8)]
        assert server.process.wait(60) == 0
        found = [each.result() for each in some]
        assert 200 in found and set(found) <= {200, 503, None}
        assert {each.result() for each in more} <= {200, 503, None}
        assert server.process.stderr.read() == ""


def test_options_that_cannot_be_are_one_line(monkeypatch, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, word in (
            (["--port", port], port),
            (["--port", port, "--kv-bits", "8", "--group-size", "32"], port),
            (["--api-key", "a b"], "API key"),
            (["--lookup", "--draft-layers", "1"], "exclude each other"),
        ):  # fmt: skip
            monkeypatch.setattr(sys, "argv", ["kvjax", "serve", *options])
            with pytest.raises(SystemExit) as leaving:
                cli.main()
            words = capfd.readouterr().err
            assert leaving.value.code == 2 and words.count("\n") == 1 and word in words


@pytest.mark.rare
def test_two_hundred_at_once(tiny_llama_dir):
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
