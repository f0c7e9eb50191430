"""Unusual but legal requests, wrong ones, and what must hold of the answer of every interface."""

import asyncio
import contextlib
import io
import json
import re
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import jax.numpy as jnp
import jsonschema
import ml_dtypes
import numpy as np
from hypothesis import event
from hypothesis import strategies as st

import kvjax
from kvjax import cli, models
from kvjax.memory import InferenceLimits
from kvjax.serve.app import make_app
from kvjax.serve.state import ServerSettings, ServerState
from tests.test_guided import sentence_pieces

LONGEST, CHUNK, MODEL = 160, 16, "unusual"
SHAPES: dict[str, Any] = {"max_len": LONGEST, "prefill_chunk": CHUNK}
SPECIAL = (
    "<s>", "</s>", "<|endoftext|>", "<unk>", "<|endof", "text|>", "<0x41>", "▁", "Ġ",
    "{{ bos_token }}", "{% raw %}", "%s", "\\", '"', "/", "\0", "\r\n",
    "\x7f", "\x85", "\u2028", "\ufeff", "\ufffd",
    "\u0301", "\u200d", "-", "[", "(?", "*", "{", " ", "  ", "\U0001f468\u200d\U0001f469", "ﬁ", "İ",
)  # fmt: skip
NAMELESS = SPECIAL[:4]
"""Tokens that have no text."""
ROOMS = (str(Path(kvjax.__file__).parent), str(Path(models.__file__).resolve().parent))


def of_plane(plane: int) -> st.SearchStrategy[str]:
    return st.integers(plane << 16, plane << 16 | 0xFFFF).filter(lambda x: x >> 11 != 27).map(chr)


PARTS = st.one_of(
    st.sampled_from(SPECIAL), st.integers(0, 16).flatmap(of_plane), st.text("abn ", max_size=4)
)


def texts(most: int = 4, least: int = 0) -> st.SearchStrategy[str]:
    found = st.lists(PARTS, min_size=least, max_size=most).map("".join)
    return found.filter(bool) if least else found


def whole(value: int) -> st.SearchStrategy[Any]:
    """A whole number as Python, NumPy or JAX have it."""
    kinds: list[Any] = [value, np.array(value)]
    kinds += [
        dtype(value)
        for dtype in (np.int8, np.int16, np.int64, np.uint8, np.uint64)
        if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    ]
    if abs(value) < 2**31:
        kinds += [jnp.int32(value), jnp.asarray(value)]
    return st.sampled_from(kinds)


def real(value: float) -> st.SearchStrategy[Any]:
    """A number that all of these have exactly."""
    each = np.float16, np.float32, np.float64, np.array, ml_dtypes.bfloat16, jnp.float32
    with np.errstate(over="ignore"):
        kinds = [kind(value) for kind in (*each, jnp.bfloat16, jnp.float16, jnp.asarray)]
    same: list[Any] = [value, *(kind for kind in kinds if float(kind) == value)]
    return st.sampled_from(same)


def number(*values: float) -> st.SearchStrategy[Any]:
    """One of some numbers, of any library."""
    return st.sampled_from(values).flatmap(lambda x: whole(x) if isinstance(x, int) else real(x))


WORDS = st.dictionaries(
    st.integers(0, 200), number(-100, -0.5, 0.0, 3.0, 100.0), min_size=1, max_size=3
)
FAMILIES: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "greedy": {"temperature": number(0, 0.0, -0.0, 1e-40), "logprobs": whole(2)},
    "drawn": {
        "temperature": number(1e-30, 0.5, 1, 1.5, 100.0, 1e30, 1e300),
        "top_k": number(1, 2, 100, 2**31, 2**63),
        "top_p": number(1e-30, 0.25, 0.96875),
        "min_p": number(1e-30, 0.015625, 1),
        "typical_p": number(1e-30, 0.25, 0.96875),
        "min_new_tokens": number(1, 2),
    },
    "penalized": {
        "temperature": number(0.5, 2.0),
        "repetition_penalty": number(1e-6, 0.5, 1.25, 1e6),
        "frequency_penalty": number(-2, -0.5, 0.25, 2.0),
        "presence_penalty": number(-2, 0, 0.5, 2.0),
        "no_repeat_ngram_size": number(1, 2, 3, 2**31, 2**40),
        "logit_bias": WORDS,
        "logprobs": whole(0),
    },
}
"""Settings that choose the same programs, whatever their values."""
SEEDS = st.sampled_from([0, 1, 7, 2**31 - 1, 2**32, 2**63, 2**64 - 1]).flatmap(whole)


@dataclass(frozen=True)
class Form:
    """What a text keeps to: a function of ``Guides``, its argument, and all texts that fit it, or
    a schema by which they are judged."""

    way: str
    given: Any
    pieces: tuple[tuple[str, int, int], ...] = ()

    def judge(self, text: str, ended: bool) -> None:
        """Raise where a text is not of this form, or, unless it has ended, no beginning of one."""
        if self.way == "choices":
            assert text in self.given if ended else any(begins(x, text) for x in self.given), text
        elif self.way == "regex":
            assert matches(self.pieces, text, ended), (self.pieces, text)
        elif ended:
            jsonschema.validate(json.loads(text), plain(self.given))


def begins(whole: str, text: str) -> bool:
    """Whether a text, whose last character may be incomplete, is the beginning of another."""
    return whole.startswith(text.rstrip("\ufffd")) or whole.startswith(text)


def matches(pieces: Sequence[tuple[str, int, int]], text: str, whole: bool) -> bool:
    """Whether a text is, or begins, so many of some characters, and then of others."""
    text = text if whole else text.rstrip("\ufffd")
    places = {0}
    for characters, least, most in pieces:
        after = set()
        for start in places:
            for count in range(most + 1):
                if not whole and start + count == len(text):
                    return True
                if count >= least:
                    after.add(start + count)
                if start + count >= len(text) or text[start + count] not in characters:
                    break
        places = after
    return len(text) in places


def plain(value: Any) -> Any:
    """A schema in Python's own numbers."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value.item() if hasattr(value, "item") else value


def in_rust(characters: str) -> str:
    return "".join(x if x.isascii() and x.isalnum() else f"\\x{{{ord(x):X}}}" for x in characters)


@st.composite
def regexes(draw: Any) -> Form:
    pieces, pattern = [], ""
    for _ in range(draw(st.integers(1, 3))):
        text = draw(texts(2, 1))
        if draw(st.booleans()):
            pieces += [(x, 1, 1) for x in text]
            pattern += in_rust(text)
        else:
            least = draw(st.integers(0, 2))
            pieces.append((text, least, most := least + draw(st.integers(0, 2))))
            pattern += f"[{in_rust(text)}]{{{least},{most}}}"
    return Form("regex", pattern, tuple(pieces))


VALUES = st.one_of(
    texts(2).map(lambda text: {"const": text}),
    st.lists(texts(2), min_size=1, max_size=3).map(lambda some: {"enum": some}),
    number(0, -3, 7, 127).map(lambda value: {"const": value}),
    st.just({"type": "boolean"}),
    number(0, 1, 3).map(lambda most: {"type": "string", "maxLength": most}),
    number(0, -2).map(lambda least: {"type": "integer", "minimum": least, "maximum": 9}),
    number(0, 1, 2).map(lambda n: {"type": "array", "items": {"type": "null"}, "maxItems": n}),
)
SCHEMAS = st.dictionaries(texts(2), VALUES, max_size=3).map(
    lambda parts: Form(
        "json_schema",
        {
            "type": "object", "properties": parts, "required": list(parts),
            "additionalProperties": False,
        },
    )
)  # fmt: skip
FORMS = st.one_of(
    st.lists(texts(3, 1), min_size=1, max_size=3).map(lambda some: Form("choices", some)),
    regexes(),
    SCHEMAS,
)


@dataclass(frozen=True)
class RequestCase:
    """A request that is legal."""

    prompt: str
    settings: dict[str, Any]
    stop: tuple[str, ...] = ()
    form: Form | None = None


MAYBE = st.none() | FORMS


def sized(parts: int) -> st.SearchStrategy[str]:
    """A prompt of one part at least, seldom of none."""
    return texts(parts, 1) if parts else st.just("")


@st.composite
def requests(
    draw: Any, families: Sequence[str] = tuple(FAMILIES), forms: Any = MAYBE
) -> RequestCase:
    """Legal requests."""
    family = FAMILIES[draw(st.sampled_from(families))]
    settings = {name: draw(values) for name, values in family.items()}
    settings["seed"] = draw(SEEDS)
    form = draw(forms)
    settings["max_new_tokens"] = draw(number(2, 3, 6, 9) if form is None else number(2, 20, 60))
    if form is not None:
        settings.pop("min_new_tokens", None)
    stop = draw(st.lists(texts(2, 1), max_size=3))
    prompt = draw(st.sampled_from([*range(5, 0, -1), 0, *range(1, 6)]).flatmap(sized))
    return RequestCase(prompt, settings, tuple(stop), form)


@dataclass
class Outcome:
    """An answer, or why there is none."""

    text: str = ""
    tokens: list[int] | None = None
    finish_reason: str = ""
    logprobs: Any = None
    refused: str | None = None
    more: dict[str, Any] = field(default_factory=dict)


def refusal(error: Exception) -> str:
    """The sentence of an error of kvjax's own; other errors are raised again."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    own = type(error) is ValueError or isinstance(error, kvjax.KvjaxError)
    if not own or not str(Path(last.filename).resolve()).startswith(ROOMS):
        raise error
    return one_sentence(str(error))


def one_sentence(message: str) -> str:
    """A message that can be read by whoever made the mistake."""
    assert message.strip() and len(message) < 1200 and "Traceback" not in message, message
    for raw in ("Tracer", "RESOURCE_EXHAUSTED", "object has no attribute", "<state>"):
        assert raw not in message, message
    return message


def of_result(found: Any) -> Outcome:
    scores = None if found.logprobs is None else found.logprobs[0]
    return Outcome(found.text[0], found.tokens[0], found.stats.finish_reasons[0], scores)


class World:
    """A model behind every interface, each with the same capacities."""

    def __init__(self, lm: Any) -> None:
        self.lm, self.guides = lm, kvjax.Guides(lm)
        limits = InferenceLimits(max_batch_size=2, max_seq_len=LONGEST)
        paged = kvjax.policy("paged", page_size=16)
        self.engine, served = (
            kvjax.Engine(lm, paged, limits, prefill_chunk=CHUNK, decode_steps=4) for _ in range(2)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.service = kvjax.engine.Service(served)
        self._wait(self.service.__aenter__())
        app = make_app(ServerState(lm, self.service, ServerSettings(name=MODEL)))
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://localhost"
        )

    def close(self) -> None:
        self._wait(self._client.aclose())
        self._wait(self.service.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def _settings(self, asked: RequestCase) -> dict[str, Any]:
        settings = {**asked.settings, "stop": asked.stop}
        if asked.form is not None:
            settings["guide"] = getattr(self.guides, asked.form.way)(asked.form.given)
        return settings

    def generate(self, asked: RequestCase, prompt: Any = None) -> Outcome:
        try:
            entry = asked.prompt if prompt is None else prompt
            found = kvjax.generate(self.lm, [entry], **SHAPES, **self._settings(asked))
        except Exception as error:
            return Outcome(refused=refusal(error))
        for guide in found.guides or ():
            assert guide.error is None, guide.error
        return of_result(found)

    def stream(self, asked: RequestCase) -> Outcome:
        try:
            running = kvjax.stream(self.lm, [asked.prompt], **SHAPES, **self._settings(asked))
        except Exception as error:
            return Outcome(refused=refusal(error))
        pieces = list(running)
        told = of_result(running.result)
        assert "".join(piece.text[0] for piece in pieces) == told.text
        assert [token for piece in pieces for token in piece.tokens[0]] == told.tokens
        if told.logprobs is not None:
            assert [x for piece in pieces for x in piece.logprobs[0]] == told.logprobs
        return told

    def submit(self, asked: RequestCase) -> Outcome:
        try:
            handle = self.engine.submit(asked.prompt, **self._settings(asked))
        except Exception as error:
            return Outcome(refused=refusal(error))
        text = ""
        while self.engine.step():
            text += handle.take().text
        assert text + handle.take().text == handle.text
        assert handle.error is None and sum(self.engine.stats().used_pages) == 0
        return Outcome(handle.text, list(handle.tokens), str(handle.finish_reason), handle.logprobs)

    def post(self, path: str, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        found = self._wait(self._client.post(f"/v1/{path}", content=content))
        assert found.status_code < 500, (found.status_code, found.text)
        return found

    def http(self, asked: RequestCase, stream: bool, chat: bool = False) -> Outcome:
        """By a server."""
        body = {name: plain(value) for name, value in asked.settings.items()}
        body["max_tokens"] = body.pop("max_new_tokens")
        body["min_tokens"] = body.pop("min_new_tokens", None)
        if "logit_bias" in body:
            body["logit_bias"] = {str(i): plain(x) for i, x in body["logit_bias"].items()}
        if chat and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        body |= {"stop": list(asked.stop), "stream": stream, "model": MODEL}
        if asked.form is not None:
            names = {"choices": "choice", "json_schema": "json"}
            given = {names.get(asked.form.way, asked.form.way): plain(asked.form.given)}
            body["structured_outputs"] = given
        if chat:
            found = self.post("chat/completions", body | {"messages": messages(asked)})
        else:
            found = self.post("completions", body | {"prompt": asked.prompt})
        if found.status_code != 200:
            return Outcome(refused=refused_by_http(found), more={"status": found.status_code})
        parts = events(found.text) if stream else [found.json()]
        choices = [choice for part in parts for choice in part["choices"]]
        return of_choices(choices, chat)

    def run(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """A command in this process: exit code, standard output, standard error."""
        out, err, code = _Words(), _Words(), None
        words = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
        with (
            tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder),
            mock.patch.object(sys, "argv", ["kvjax", *arguments]),
            mock.patch.object(sys, "stdin", words), mock.patch.object(sys, "stdout", out),
            mock.patch.object(sys, "stderr", err),
            mock.patch.object(models, "load", lambda *_, **__: self.lm),
        ):  # fmt: skip
            try:
                cli.main()
            except SystemExit as leaving:
                code = leaving.code
        assert code in (0, 2, 3), (code, arguments)
        return code, out.read(), err.read()

    def command(self, asked: RequestCase, as_json: bool) -> Outcome | None:
        """By ``kvjax generate``; None for what no command line can say."""
        settings = {name: plain(value) for name, value in asked.settings.items()}
        settings.pop("logprobs", None)
        words = [f"--prompt={asked.prompt}"]
        for token, bias in settings.pop("logit_bias", {}).items():
            words.append(f"--logit-bias={token}={float(bias)!r}")
        words += [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        words += [f"--stop={stop}" for stop in asked.stop]
        if (form := asked.form) is not None and form.way == "choices":
            words += [f"--choice={text}" for text in form.given]
        elif form is not None:
            given = form.given if form.way == "regex" else json.dumps(plain(form.given))
            words.append(f"--{form.way.replace('_', '-')}={given}")
        if asked.prompt == "-" or any("\0" in word for word in words):
            return None
        words += ["--max-len", str(LONGEST)] + ["--json"] * as_json
        code, out, err = self.run("generate", *words)
        if code:
            return Outcome(refused=refused_by_command(code, out, err))
        if not as_json:
            assert out.endswith("\n")
            return Outcome(out[:-1])
        found = json.loads(out)
        return Outcome(found["text"], found["tokens"], found["stats"]["finish_reasons"][0])


class _Words(io.TextIOWrapper):
    """Standard output that is kept."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", newline="", write_through=True)

    def read(self, *_: Any) -> str:
        return self.buffer.getvalue().decode()  # type: ignore[attr-defined]


def refused_by_http(found: httpx.Response) -> str:
    """The message of an error in OpenAI's form."""
    error = found.json()["error"]
    assert 400 <= found.status_code < 500 and set(error) == {"message", "type", "param", "code"}
    return one_sentence(error["message"])


def refused_by_command(code: int, out: str, err: str) -> str:
    """The one line on standard error."""
    assert code == 2 and out.strip() == "", (code, out, err)
    assert err.startswith("kvjax: error: ") and err.endswith("\n"), err
    assert len(err.splitlines()) == err.count("\n") == 1, err
    return one_sentence(err)


def events(text: str) -> list[Any]:
    lines = [line for line in re.split("\n", text) if line]
    assert lines[-1] == "data: [DONE]", lines[-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def of_choices(choices: Sequence[Any], chat: bool) -> Outcome:
    """An answer from its pieces, or from the one that is whole."""
    inner = [each.get("delta", each.get("message")) if chat else each for each in choices]
    text = "".join(each.get("content" if chat else "text") or "" for each in inner)
    told = Outcome(text, None, choices[-1]["finish_reason"])
    scored = [each["logprobs"] for each in choices if each["logprobs"]]
    if scored and not chat:
        keys = "tokens", "token_logprobs", "top_logprobs", "text_offset"
        told.more = {key: [x for each in scored for x in each[key]] for key in keys}
        told.logprobs = told.more["token_logprobs"]
        judge_offsets(told)
    elif scored:
        told.logprobs = [x["logprob"] for each in scored for x in each["content"]]
    return told


def judge_offsets(told: Outcome) -> None:
    """They point to where in the text each token is."""
    starts, names = told.more["text_offset"], told.more["tokens"]
    assert len({*map(len, told.more.values())}) == 1
    assert starts == sorted(starts) and all(0 <= x <= len(told.text) for x in starts), starts
    ends = [*starts[1:], len(told.text)][: len(starts)]
    for start, name, after in zip(starts, names, ends, strict=True):
        rest = told.text[start:]
        if name not in NAMELESS and "\ufffd" not in name and after < len(told.text):
            # A decoder of sentencepiece's kind spoils bytes beside a stray one.
            assert rest.startswith((name, "\ufffd")) or name.lstrip() == "", told


def write_pieces(folder: Path) -> None:
    """Put a tokenizer like sentencepiece's into the folder of a model."""
    sentence_pieces("BPE").backend.save(str(folder / "tokenizer.json"))
    config = folder / "tokenizer_config.json"
    words = json.loads(config.read_text("utf-8")) | {"bos_token": "<s>", "add_bos_token": True}
    config.write_text(json.dumps(words), "utf-8")


def messages(asked: RequestCase) -> list[dict[str, str]]:
    return [{"role": "system", "content": "x"}, {"role": "user", "content": asked.prompt}]


def judge(world: World, asked: RequestCase, place: tuple[int, int] | None = None) -> None:
    """What must hold of a request by every interface; ``place``: where in the text that it gives a
    stop string of so many characters is taken from."""
    if place is not None and (text := world.generate(replace(asked, stop=())).text):
        start = place[0] % len(text)
        asked = replace(asked, stop=(*asked.stop, text[start : start + place[1]]))
    told = world.generate(asked)
    others = {"stream": world.stream(asked), "engine": world.submit(asked)}
    for stream in (False, True):
        others[f"http {stream}"] = world.http(asked, stream)
    if (written := world.command(asked, as_json=len(asked.prompt) % 2 == 0)) is not None:
        others["command"] = written
    event(
        f"ended by {told.finish_reason}"
        if told.refused is None
        else f"refused: {told.refused[:60]}"
    )
    if told.refused is not None:
        empty = not asked.prompt and not world.lm.tokenizer.encode("")
        assert empty or "max_len" in told.refused or asked.form is not None, told.refused
        for name, other in others.items():
            assert other.refused is not None, (name, told, other)
        return
    for name, other in others.items():
        assert other.refused is None, (name, other.refused)
        assert other.text == told.text, (name, told.text, other.text)
        if other.tokens is not None:
            assert other.tokens == told.tokens, (name, told, other)
        reason = (
            {"eos": "stop"}.get(told.finish_reason, told.finish_reason)
            if "http" in name
            else told.finish_reason
        )
        assert other.finish_reason in ("", reason), (name, told.finish_reason, other.finish_reason)
        if told.logprobs is not None and other.logprobs is not None:
            near(told.logprobs, other.logprobs)
    judge_alone(world, asked, told)


def near(one: Any, other: Any) -> None:
    """Log-probabilities alike; a server leaves out that of a token that ends a text."""
    both = [[getattr(x, "logprob", x) for x in each] for each in (one, other)]
    assert len(both[0]) - len(both[1]) in (0, 1)
    mine, its = (np.maximum(each[: len(both[1])], -9999.0) for each in both)
    assert np.allclose(mine, its, rtol=1e-3, atol=1e-3), both


def judge_alone(world: World, asked: RequestCase, told: Outcome) -> None:
    """What a text and its tokens must be."""
    limit = int(asked.settings["max_new_tokens"])
    least = int(asked.settings.get("min_new_tokens", 0))
    tokens, ends = told.tokens or [], world.lm.generation.eos_token_ids
    assert len(tokens) <= limit and (told.logprobs is None or len(told.logprobs) == len(tokens))
    assert told.finish_reason in ("eos", "length", "stop")
    assert len(tokens) >= least and not any(token in ends for token in tokens[:-1])
    assert (told.finish_reason == "eos") == (bool(tokens) and tokens[-1] in ends)
    assert told.finish_reason != "length" or len(tokens) == limit
    free = world.generate(replace(asked, stop=())) if asked.stop else told
    start = cut(free.text, asked.stop, shown(world, asked, free, least))
    if start is None:
        assert (told.text, told.tokens, told.finish_reason) == (
            free.text,
            free.tokens,
            free.finish_reason,
        )
    else:
        assert (told.text, told.finish_reason) == (free.text[:start], "stop")
        assert tokens == (free.tokens or [])[: len(tokens)]
    if asked.form is not None:
        asked.form.judge(free.text, free.finish_reason == "eos")


def shown(world: World, asked: RequestCase, free: Outcome, least: int) -> int:
    """Characters of a text that its first ``least`` tokens have."""
    if len(free.tokens or []) <= least:
        return len(free.text)
    stream = world.lm.tokenizer.stream(world.lm.tokenizer.encode(asked.prompt))
    return sum(len(stream.push(token)) for token in (free.tokens or [])[:least])


def cut(text: str, stops: Sequence[str], least: int) -> int | None:
    """Where the stop string begins that is complete first, behind so many characters."""
    found = []
    for stop in stops:
        start = text.find(stop, max(0, least + 1 - len(stop)))
        if start >= 0:
            found.append((start + len(stop), start))
    return min(found)[1] if found else None


def judge_chat(world: World, asked: RequestCase) -> None:
    """A chat over HTTP is ``generate`` with the template's tokens."""
    try:
        prompt = world.lm.chat(messages(asked))
    except ValueError as error:
        refusal(error)
        prompt = None
    others = [world.http(asked, stream, chat=True) for stream in (False, True)]
    told = None if prompt is None else world.generate(asked, prompt)
    for other in others:
        if told is None or told.refused is not None:
            assert other.refused is not None, (told, other)
        else:
            assert other.refused is None and other.text == told.text, (told, other)
            assert other.finish_reason == {"eos": "stop"}.get(
                told.finish_reason, told.finish_reason
            )


def judge_batch(world: World, some: Sequence[RequestCase]) -> None:
    """Lines of ``kvjax batch`` are ``generate`` with each one's settings."""
    with tempfile.TemporaryDirectory() as folder:
        lines, out = Path(folder) / "lines", Path(folder) / "out"
        rows = []
        for at, asked in enumerate(some):
            row = {name: plain(x) for name, x in asked.settings.items()}
            row |= {"id": at, "prompt": asked.prompt, "stop": list(asked.stop)}
            rows.append(json.dumps(row, ensure_ascii=at % 2 == 0).encode())
        lines.write_bytes(b"\n".join(rows))
        code, _, err = world.run(
            "batch", str(lines), "--out", str(out), "--max-batch-size=2",
            f"--max-seq-len={LONGEST}", f"--prefill-chunk={CHUNK}", "--cache=paged,page_size=16",
        )  # fmt: skip
        assert code in (0, 3), err
        results = sorted(map(json.loads, out.read_text("utf-8").split("\n")[:-1]), key=_line)
    told = [world.generate(asked) for asked in some]
    results = [x for x in results if "id" in x]
    assert len(results) == len(some), (results, err)
    for each, result in zip(told, results, strict=True):
        assert ("error" in result) == (each.refused is not None), (each, result)
        if each.refused is None:
            assert (result["text"], result["tokens"]) == (each.text, each.tokens)


def _line(result: dict[str, Any]) -> int:
    return result.get("line", 0)


def judge_talk(world: World, lines: Sequence[str]) -> None:
    """``kvjax chat`` says what is wrong with a line in one, and goes on."""
    code, _, err = world.run(
        "chat", f"--max-len={LONGEST}", "--max-new-tokens=3",
        stdin="\n".join(lines).encode("utf-8", "surrogatepass"),
    )  # fmt: skip
    wrong = [line for line in err.split("\n") if line.startswith("kvjax: error: ")]
    assert code == (2 if wrong else 0), (code, err)
    for line in wrong:
        one_sentence(line)
    assert "Traceback" not in err


NOT_THEIRS: tuple[Any, ...] = (
    None, True, False, np.True_, np.array(False), float("nan"), float("inf"), -1, -0.5, 2**31,
    2**63, 2**64, 10**30, 1e308, "x", "", "\ud83d", b"x", (), [], [[]], {}, {"a": 1}, 1j, object(),
    range(3), np.array([1, 2]), np.array([]), np.array(["a"]), np.float32("nan"),
    np.datetime64("2020-01-01"),
    jnp.array([1.0, 2.0]), jnp.array(float("nan")), jnp.zeros((1, 1)), [None], [1, "x"], {5: None},
    {-1: 1.0}, {10**30: 1}, {"5": 1}, [10**30], [[1, 2], [3]], [1.5], ["a", None],
    ["a", ""], {1: 2}.keys(), [jnp.int32(1)], [np.uint8(5), jnp.array(7)],
)  # fmt: skip
"""Values of which most are wrong for any argument."""
SETTINGS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size",
    "logit_bias", "seed", "stop", "eos_token_ids", "logprobs", "guide", "draft", "num_beams", "n",
    "length_penalty", "early_stopping",
)  # fmt: skip
OF_GENERATE = (
    "best_of", "max_len", "prefill_chunk", "num_beam_groups", "diversity_penalty", "padded",
    "use_cache", "cache", "limits", "mesh", "prefix_cache", "logits_hook",
)  # fmt: skip
OF_ENGINE = ("priority", "deadline", "tenant")
OF_HTTP = (
    "prompt", "max_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "n", "best_of",
    "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram_size", "stop",
    "logit_bias", "seed", "logprobs", "min_tokens", "ignore_eos", "stream", "stream_options",
    "response_format", "structured_outputs", "echo", "suffix", "user", "model", "draft",
    "prompt_lookup",
    "use_beam_search", "beam_width", "length_penalty", "early_stopping", "messages", "tools",
    "tool_choice", "chat_template_kwargs", "top_logprobs", "max_completion_tokens", "name",
)  # fmt: skip
TEXTS = st.one_of(
    texts(3), st.sampled_from(["\ud83d", "a\udce9", "[", "(?<x", "{", "start: ", "\0"])
)
JSONS = st.recursive(
    st.one_of(
        st.none(), st.booleans(), TEXTS,
        st.sampled_from([0, 1, 2, -1, 0.5, 1e308, 2**31, 2**63, 2**64, -(2**63), 10**400, 1e-320]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.one_of(TEXTS, st.sampled_from(
            ["role", "content", "type", "text", "schema", "json_schema", "json", "regex", "choice",
             "grammar", "const", "enum", "anyOf", "$ref", "properties", "required", "self", "name",
             "messages", "template", "tools", "add_generation_prompt", "include_usage", "5", "0"],
        )), inner, max_size=3,
    ),
    max_leaves=6,
)  # fmt: skip
NAMES = {
    "stop": ("stop string",), "seed": ("seeds",), "eos_token_ids": ("guide ends",),
    "num_beams": ("beam",), "n": ("n is", "choices"), "tenant": ("tenant",),
    "prompt": ("token id", "the text is not valid Unicode"),
    "mesh": ("mesh",), "cache": ("policy",), "max_new_tokens": ("min_new_tokens",),
    "logit_bias": ("token id",),
}  # fmt: skip


def judge_wrong_setting(world: World, name: str, value: Any, engine: bool) -> None:
    """A value of one argument is taken, or refused in a sentence that names it."""
    prompt: Any = value if name == "prompt" else "ab"
    settings: Any = {"max_new_tokens": 2} | ({} if name == "prompt" else {name: value})
    try:
        if engine:
            handle = world.engine.submit(prompt, **settings)
            while world.engine.step():
                pass
            assert handle.error is None
        else:
            kvjax.generate(world.lm, prompt, **SHAPES | settings)
    except Exception as error:
        message = refusal(error)
        assert any(x in message for x in (name, *NAMES.get(name, ()))), (name, value, message)


def judge_wrong_body(world: World, path: str, name: str, value: Any) -> None:
    """A value of one field is taken, or refused with OpenAI's error."""
    body: dict[str, Any] = {"max_tokens": 2, "temperature": 0}
    body |= {"messages": messages(RequestCase("a", {}))} if "chat" in path else {"prompt": "ab"}
    found = world.post(path, body | {name: value})
    if found.status_code != 200:
        refused_by_http(found)


def judge_wrong_guide(world: World, way: str, value: Any) -> None:
    """An argument of ``Guides`` is taken, or refused in a sentence; what it makes can be copied,
    and says what may come."""
    try:
        guide = getattr(world.guides, way)(value)
    except Exception as error:
        refusal(error)
    else:
        assert guide.copy().allowed().any()


TALK = (
    "/edit ", "/edit 1 ", "/edit ٣ ", "/edit 99999 ", "/system ", "/save ", "/load ", "/undo",
    "/retry",
    "/show", "/stats", "/help", "//", "/", "/nothing ", "/edit " + "9" * 5000 + " ",
)  # fmt: skip
OPTIONS = (
    "--max-new-tokens", "--min-new-tokens", "--temperature", "--top-k", "--top-p", "--min-p",
    "--typical-p", "--repetition-penalty", "--frequency-penalty", "--no-repeat-ngram-size",
    "--logit-bias", "--seed", "--stop", "--json-schema", "--regex", "--choice", "--grammar",
    "--max-len", "--cache", "--kv-bits", "--key-bits", "--group-size", "--window", "--sinks",
    "--prefetch", "--cache-memory", "--mesh", "--logprobs", "--best-of", "--draft-layers", "--file",
    "--load-cache", "--prompt", "--dtype", "--shape", "--batch", "--max-batch-size", "--tokens",
    "--memory", "--prompts", "--length-penalty", "--revision", "--template", "--system", "--load",
)  # fmt: skip
WRITTEN = st.one_of(
    TEXTS, JSONS.map(lambda x: json.dumps(x, ensure_ascii=False)),
    st.sampled_from(
        ["-1", "0", "1", "2", "nan", "inf", "1e400", "1_0", "٣", "0x10", "9" * 30, "9" * 5000,
         "5=nan", "5=1", "=", "8GiB", "-8GiB", "infGB", "nanGB", "1e999GB", "bits=4",
         "static,bits=0",
         "paged,page_size=0", "sliding_window,window=-1", "static,bits=4,bits=8", "data=2,data=2",
         "/", ".", "/dev/null", "float8", "~", "~nobody/x", "a" * 5000]
    ),
)  # fmt: skip


def judge_wrong_option(world: World, command: str, option: str, value: str) -> None:
    """An option of a command is taken, or refused in a line with exit code 2."""
    words = [f"{option}={value}"]
    if any("\0" in word for word in words):
        return
    if command == "generate":
        words += ["--max-new-tokens=2"] * (option != "--max-new-tokens")
        words += (
            [] if option in ("--file", "--prompt", "--tokens", "--prompts") else ["--prompt=ab"]
        )
    code, out, err = world.run(command, *words)
    if code:
        refused_by_command(code, out, err)


LINES = st.lists(requests().filter(lambda asked: asked.form is None), min_size=1, max_size=4)
PLACES = st.none() | st.tuples(st.integers(0, 60), st.integers(1, 4))
TALKS = st.lists(st.one_of(TEXTS, st.tuples(st.sampled_from(TALK), TEXTS).map("".join)), max_size=4)
_EACH: tuple[tuple[int, st.SearchStrategy[Any]], ...] = (
    (8, st.tuples(st.just(judge), requests(), PLACES)),
    (2, st.tuples(st.just(judge_chat), requests())),
    (2, st.tuples(st.just(judge_batch), LINES)),
    (1, st.tuples(st.just(judge_talk), TALKS)),
    (3, st.tuples(
        st.just(judge_wrong_setting), st.sampled_from(("prompt", *SETTINGS, *OF_GENERATE)),
        st.sampled_from(NOT_THEIRS), st.just(False),
    )),
    (3, st.tuples(
        st.just(judge_wrong_setting), st.sampled_from(("prompt", *SETTINGS, *OF_ENGINE)),
        st.sampled_from(NOT_THEIRS), st.just(True),
    )),
    (3, st.tuples(
        st.just(judge_wrong_body), st.sampled_from(["completions", "chat/completions"]),
        st.sampled_from(OF_HTTP), JSONS,
    )),
    (2, st.tuples(
        st.just(judge_wrong_guide), st.sampled_from(["json_schema", "regex", "grammar", "choices"]),
        st.one_of(st.sampled_from(NOT_THEIRS), JSONS),
    )),
    (3, st.tuples(
        st.just(judge_wrong_option), st.sampled_from(["generate", "info", "plan", "batch", "chat"]),
        st.sampled_from(OPTIONS), WRITTEN,
    )),
)  # fmt: skip
EXAMPLES = st.sampled_from([each for often, each in _EACH for _ in range(often)]).flatmap(
    lambda x: x
)
"""A judge, and what it is given; requests more often than what is wrong."""
FEW = st.tuples(st.just(judge), requests(["drawn"], FORMS))
