"""Chats: each token is prefilled once; edits, files and stopped answers."""

import json
import signal
from dataclasses import replace
from string import ascii_letters
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
import kvjax.models
from kvjax.chats.rendering import TokenizedText
from kvjax.core.reporting import progress_callback
from kvjax.generation import programs, streaming
from kvjax.policies.presets import parse_policy
from tests.conftest import ROOT
from tests.scripted import scripted
from tests.threads import together

SHARED = {"max_len": 256, "max_new_tokens": 8, "prefill_chunk": 16, "eos_token_ids": []}
"""One capacity and one prompt width, so that few programs are compiled."""
SHORT = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
"""One token before and after each text."""
RING = "sliding_window,window=24,sinks=2"
OTHERS = ["dynamic", "offloaded,bits=8", "paged,page_size=16", "paged,bits=2", "auto,memory=1MB"]
RARE = [pytest.param(each, marks=pytest.mark.rare) for each in OTHERS]
ALL = ["static", "bits=4", pytest.param(RING, marks=pytest.mark.rare), *RARE]


def begun(lm: Any, policy: str = "static", **more: Any) -> kvjax.Chat:
    return kvjax.Chat(lm, cache=parse_policy(policy), **{**SHARED, "template": SHORT, **more})


def said(answer: Any) -> str:
    """The text of an answer, which must equal the chat's."""
    text = "".join(piece.text[0] for piece in answer)
    assert text == answer.text == answer.result.text[0] and answer.tokens == answer.result.tokens[0]
    return text


def held(chat: kvjax.Chat) -> Any:
    return chat._conversation.cached


def assert_sees_its_text(chat: kvjax.Chat, tolerance: float = 1e-5) -> None:
    """The next logits equal those after prefilling the same tokens into a new cache."""
    cache, tokens = held(chat).cache, list(held(chat).tokens)
    assert cache.length.tolist() == [len(tokens)]
    more, settings = [7], {"prefill_chunk": 16}
    _, found = kvjax.prefill(chat.lm, [more], cache=kvjax.fork(cache), **settings)
    fresh = {"cache": chat._conversation.policy, "max_len": SHARED["max_len"]}
    _, wanted = kvjax.prefill(chat.lm, [tokens + more], **fresh, **settings)
    np.testing.assert_allclose(found, wanted, atol=tolerance)


@pytest.fixture(scope="module")
def spoken(tiny_llama):
    """A model that generates letters only: each token is one character."""
    params = dict(tiny_llama.params, model=dict(tiny_llama.params["model"]))
    weight = params["model"]["embed_tokens"]["weight"]
    letters = np.isin(np.arange(len(weight)), tiny_llama.tokenizer.encode(ascii_letters))
    params["model"]["embed_tokens"] = {"weight": weight * letters[:, None].astype(weight.dtype)}
    return tiny_llama.with_params(params)


@pytest.fixture
def fed(monkeypatch):
    """Counts the tokens given to prefill programs."""
    counted, prefill = [], programs.prefill

    def counting(*args: Any) -> Any:
        counted.append(int(args[5].sum()))
        return prefill(*args)

    monkeypatch.setattr(programs, "prefill", counting)
    return counted


@pytest.mark.slow(but=("static",))
@pytest.mark.parametrize("policy", ALL)
def test_ten_turns_read_each_token_once(tiny_llama, policy, fed):
    chat = begun(tiny_llama, policy)
    for turn in range(10):
        said(chat.send(f"the turn {turn:5}"))
    stats, length = chat.stats, len(held(chat).tokens)
    written = sum(
        len(turn.tokens) - 1 for turn in chat.turns
    )  # the newest token is fed with the next message
    assert stats.prefill_tokens == sum(fed) == length - written
    assert (stats.recomputed_tokens, stats.new_tokens, stats.turns) == (0, 80, 10)
    # Bytes that are not valid text are kept as they were sampled.
    encode = tiny_llama.tokenizer.encode
    whole = [[*encode(turn.user), 257, *turn.tokens, 257] for turn in chat.turns]
    assert list(held(chat).tokens) == [token for turn in whole for token in turn][:-2]
    assert_sees_its_text(chat)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL)
def test_an_edited_chat_is_one_that_was_so_from_the_beginning(tiny_llama, policy):
    chat, other = begun(tiny_llama, policy), begun(tiny_llama, policy)
    for text in ("one", "two" * 20, "three" * 22):
        said(chat.send(text))
    said(other.send("one"))
    assert said(chat.edit(1, "2")) == said(other.send("2"))
    assert said(chat.send("four")) == said(other.send("four"))
    assert chat.turns == other.turns and held(chat).tokens == held(other).tokens
    assert_sees_its_text(chat)
    # Tokens that could not be rewound were prefilled again, and counted.
    assert chat.stats.recomputed_tokens == (13 if "bits" in policy or "window" in policy else 0)
    assert chat.stats.prefill_tokens >= other.stats.prefill_tokens + chat.stats.recomputed_tokens
    before = chat.turns
    taken = chat.undo()
    assert (taken, chat.turns) == (before[-1], before[:-1])
    said(chat.send("four"))
    assert chat.turns == before
    said(chat.retry())
    assert chat.turns == (*before[:-1], replace(before[-1], attempt=1))  # without sampling
    assert_sees_its_text(chat)


def test_seeds_are_those_of_turns(tiny_llama, tmp_path):
    """Regardless of edits, retries and saving. Penalties see the whole conversation."""
    drawn = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 3}
    chat = begun(tiny_llama, **drawn)
    first, second = said(chat.send("ab")), said(chat.send("cd"))
    alone = kvjax.generate(tiny_llama, [tiny_llama.tokenizer.encode("ab</s>")], **drawn, **SHARED)
    assert alone.text == [first]
    again = said(chat.retry())
    assert again != second and chat.turns[1].attempt == 1
    chat.save(tmp_path / "chat")
    other = kvjax.Chat.load(tiny_llama, tmp_path / "chat")
    assert other.settings == chat.settings and other.stats == chat.stats
    assert said(other.retry()) == said(chat.retry())
    assert said(other.edit(1, "cd")) == said(chat.edit(1, "cd")) == second
    # A chat that prefills everything again continues in the same way.
    other._conversation.cached = None
    assert said(other.send("ef")) == said(chat.send("ef"))
    assert other.turns == chat.turns and other.stats.prefill_tokens > chat.stats.prefill_tokens
    assert said(begun(tiny_llama, **drawn | {"seed": 4}).send("ab")) != first


def test_penalties_see_earlier_turns(tiny_llama):
    chat = begun(tiny_llama, repetition_penalty=1e6)
    said(chat.send("ab"))
    said(chat.send("cd"))
    first, second = (set(turn.tokens) for turn in chat.turns)
    assert first and second and not first & second


@pytest.mark.slow
def test_drafts_change_no_answer(tiny_llama, tmp_path):
    """Nor the prefilled tokens. A saved chat needs its draft model given again."""
    drafts = {
        "none": None, "model": kvjax.DraftModel(tiny_llama, 3), "lookup": "lookup",
        "settings": kvjax.PromptLookup(),
    }  # fmt: skip
    chats = [begun(tiny_llama, draft=draft) for draft in drafts.values()]
    for text in ("ab", "abab", "cd"):
        assert len({said(chat.send(text)) for chat in chats}) == 1
    assert len({(chat.turns, str(held(chat).tokens)) for chat in chats}) == 1
    assert len({(chat.stats.prefill_tokens, chat.stats.recomputed_tokens) for chat in chats}) == 1
    for chat, (name, draft) in zip(chats, drafts.items(), strict=True):
        chat.save(tmp_path / name)
        if name != "model":
            assert kvjax.Chat.load(tiny_llama, tmp_path / name).settings["draft"] == draft
    with pytest.raises(ValueError, match="draft could not be saved; give it again"):
        kvjax.Chat.load(tiny_llama, tmp_path / "model")


@pytest.mark.parametrize("policy", ["static", "bits=4", RING, *RARE])
def test_an_answer_that_is_closed_stays_as_far_as_it_came(spoken, policy, monkeypatch):
    """Tokens in flight are rewound, or kept if the cache can't rewind them."""
    monkeypatch.setattr(streaming, "_FAST_SECONDS", 1e9)  # steps double each time
    chat = begun(spoken, policy, max_new_tokens=120)
    answer, shown = chat.send("a"), ""
    for _ in range(7):
        shown += next(answer).text[0]
    running = len(answer.tokens)
    assert running == len(shown) == 33 and chat.turns[-1].answer == shown  # 32 are in flight
    answer.close()
    (turn,) = chat.turns
    assert (
        turn.finish_reason == "stopped"
        and turn.answer == answer.text
        and turn.answer.startswith(shown)
    )
    more = len(turn.tokens) - running
    assert more == (32 if "window" in policy else 0)
    assert list(answer) == [] and answer.result.tokens == [list(turn.tokens)]
    answer.close()
    assert_sees_its_text(chat)
    # The next message stops an unfinished answer, which may be empty.
    next(chat.send("b"))
    chat.send("c")
    chat.settings["max_new_tokens"] = 8
    said(chat.send("d"))
    assert [len(turn.tokens) for turn in chat.turns[1:]] == [1, 0, 8]
    assert [turn.finish_reason for turn in chat.turns] == ["stopped"] * 3 + ["length"]
    assert chat.stats.recomputed_tokens == 0
    assert_sees_its_text(chat)


def test_an_interrupt_is_heard_and_the_chat_goes_on(spoken):
    """During prefill, between pieces, and repeatedly."""

    def interrupt(what: str, done: int, total: int) -> None:
        if what == at[0] and done >= at[1]:
            signal.raise_signal(signal.SIGINT)

    usual = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        chat = begun(spoken)
        said(chat.send("first"))
        at = "reading the prompt", 2
        answer = chat.send("s" * 60)
        with progress_callback(interrupt), pytest.raises(KeyboardInterrupt):
            next(answer)
        answer.close()
        # Two chunks were prefilled, and are not prefilled again.
        assert chat.turns[-1].answer == "" and len(held(chat).tokens) == 13 + 32
        said(chat.send("second"))
        assert chat.stats.recomputed_tokens == 0
        assert_sees_its_text(chat)
        at = "generating", 3
        answer = chat.retry()
        with progress_callback(interrupt), pytest.raises(KeyboardInterrupt):
            list(answer)
        said(chat.send("third"))
        assert 0 < len(chat.turns[-2].tokens) < 8 and chat.stats.recomputed_tokens == 0
        assert_sees_its_text(chat)

        def twice(*words: Any) -> None:
            interrupt(*words)
            interrupt(*words)

        # A second interrupt ends it at once. The cache is lost, and prefilled again.
        answer = chat.send("fourth")
        with progress_callback(twice), pytest.raises(KeyboardInterrupt):
            list(answer)
        assert chat.turns[-1].finish_reason == "stopped" and held(chat) is None
        with pytest.raises(RuntimeError, match="iterate to the end"):
            answer.result  # noqa: B018
        said(chat.send("fifth"))
        assert chat.stats.recomputed_tokens > 100
        assert_sees_its_text(chat)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)


def test_threads_share_a_chat(tiny_llama):
    """An answer ends when another thread sends a message. No turn is lost or broken."""
    chat = begun(tiny_llama)
    answers = {}

    def ask(number):
        text = ascii_letters[number]
        for attempt in range(2):
            answers[text, attempt] = chat.send(text)
            for _ in answers[text, attempt]:
                pass

    together(4, ask)
    chat.close()
    turns = chat.turns
    assert sorted(turn.user for turn in turns) == sorted(2 * ascii_letters[:4])
    assert sorted(turn.answer for turn in turns) == sorted(each.text for each in answers.values())
    assert all(turn.finish_reason in ("stopped", "length") for turn in turns)
    said(chat.send("x"))
    assert_sees_its_text(chat)


def test_errors_keep_the_chat(byte_tokenizer):
    text = "a</s>first</s>" + "b" * 40
    lm: Any = scripted(text, tokenizer=byte_tokenizer, eos=[257], scale={(0, 24): np.nan})
    chat = kvjax.Chat(lm, template=SHORT, max_len=64, prefill_chunk=16)
    assert said(chat.send("a")) == "first"
    with pytest.raises(kvjax.NonFiniteError):
        list(chat.send("c" * 14))
    assert [turn.answer for turn in chat.turns] == ["first", "b"]
    assert (chat.turns[1].finish_reason, held(chat)) == ("stopped", None)
    assert chat.undo().user == "c" * 14
    chat.settings["max_new_tokens"] = 3
    assert said(chat.send("d")) == "bbb"
    assert chat.stats.recomputed_tokens == 8 and chat.turns[0].answer == "first"


def test_stopped_streams(byte_tokenizer, monkeypatch):
    """With several rows, with partial stop strings, and before the first step."""
    monkeypatch.setattr(streaming, "_FAST_SECONDS", 1e9)
    text = "ab\N{EURO SIGN}xSTOxxxxxx"
    lm = scripted("abcdefghijklm", text, tokenizer=byte_tokenizer)
    settings = {"max_new_tokens": 12, "stop": "STOP"}
    running = kvjax.stream(lm, ["a", "a"], **settings)
    pieces = [next(running) for _ in range(4)]
    running.stop()
    pieces += running
    result = running.result
    joined = ["".join(piece.text[row] for piece in pieces) for row in range(2)]
    assert result.text == joined == ["bcdefghi", "b\N{EURO SIGN}x"]
    assert result.stats.finish_reasons == ("stopped", "stopped")
    assert result.cache.length.tolist() == [8, 6] and result.pending_tokens == [
        result.tokens[0][-1:],
        [],
    ]
    kvjax.check(result.cache)
    running = kvjax.stream(lm, ["abc", "a"], **settings)
    with pytest.raises(RuntimeError, match="iterate to the end"):
        running.result  # noqa: B018
    running.stop()
    assert [piece.text for piece in running] == [["", ""]]
    assert running.result.pending_tokens == [byte_tokenizer.encode("abc"), [64]]
    assert running.result.cache.length.tolist() == [0, 0]
    whole = kvjax.generate(lm, ["a", "a"], **settings)
    running = kvjax.stream(lm, ["a", "a"], **settings)
    list(running)
    running.stop()
    assert running.result.text == whole.text and list(running) == []


STORIES = ROOT.parent / "shared" / "models" / "stories260K"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["embedded", "stories260K"])
def test_models_that_continue_texts(embedded, name, tmp_path):
    """Trained base models, whose tokenizers merge letters: texts are concatenated, and sampled
    tokens are kept."""
    lm = embedded
    if name == "stories260K":
        if not STORIES.is_dir():
            pytest.skip(f"needs the checkpoint {STORIES}")
        lm = kvjax.models.load(str(STORIES), dtype="float32")
    settings = {"max_len": 256, "max_new_tokens": 20, "prefill_chunk": 16, "system": "Once more."}
    chat, other = kvjax.Chat(lm, **settings), kvjax.Chat(lm, **settings)
    assert chat.plain
    for text in ("One day", "The next day", "Then they", "In the end"):
        said(chat.send(text))
    assert (
        chat.stats.prefill_tokens == len(held(chat).tokens) - 4 * 19
        and not chat.stats.recomputed_tokens
    )
    whole = "Once more.\n\n" + "\n\n".join(turn.user + turn.answer for turn in chat.turns)
    assert whole.startswith(lm.decode(held(chat).tokens))
    assert_sees_its_text(chat)
    said(other.send("One day"))
    assert said(chat.edit(1, "Later")) == said(other.send("Later"))
    assert chat.turns == other.turns
    chat.save(tmp_path)
    again = kvjax.Chat.load(lm, tmp_path)
    assert said(again.send("Now")) == said(chat.send("Now")) == said(other.send("Now"))


@pytest.mark.rare
@pytest.mark.parametrize("policy", ["static", "bits=4"])
def test_a_chat_on_a_mesh_and_elsewhere(tiny_llama, policy, tmp_path):
    """It answers as on one device, and continues there after it was saved on a mesh."""
    mesh = kvjax.make_mesh(tensor=2, sequence=2, devices=jax.devices()[:4])
    chat, there = begun(tiny_llama, policy), begun(tiny_llama.on(mesh), policy)
    for text in ("a" * 40, "b" * 90, "c"):
        assert said(chat.send(text)) == said(there.send(text))
    assert said(chat.edit(1, "d" * 9)) == said(there.edit(1, "d" * 9))
    there.save(tmp_path)
    here = kvjax.Chat.load(tiny_llama, tmp_path)
    again = kvjax.Chat.load(tiny_llama.on(mesh), tmp_path)
    assert here.turns == again.turns == chat.turns
    assert said(here.send("e")) == said(again.send("e")) == said(chat.send("e"))
    assert (
        here.stats.recomputed_tokens
        == again.stats.recomputed_tokens
        == chat.stats.recomputed_tokens
    )
    assert_sees_its_text(here)


def test_a_full_chat(tiny_llama):
    chat = begun(tiny_llama, max_new_tokens=64)
    assert said(chat.send("a" * 174)) and chat.stats.remaining_tokens == 256 - 175 - 64
    with pytest.raises(ValueError, match="the chat has 260 tokens, but can hold 256"):
        chat.send("b" * 19)
    assert (
        said(chat.send("b" * 5))
        and len(chat.turns[-1].tokens) == 257 - 246
        and not chat.stats.remaining_tokens
    )
    with pytest.raises(ValueError, match=r"on_full='drop'"):
        chat.send("c")
    assert len(chat.turns) == 2
    dropping = begun(tiny_llama, max_new_tokens=64, on_full="drop", system="sys")
    for number in range(9):
        said(dropping.send(f"{number}" * 20))
    turns = dropping.turns
    assert [turn.first for turn in turns] == sorted(turn.first for turn in turns)
    assert dropping.stats.dropped_turns == turns[-1].first > 5
    assert all(len(turn.tokens) >= 48 for turn in turns)
    text = tiny_llama.decode(held(dropping).tokens, skip_special_tokens=False)
    assert text.startswith("sys</s>" + f"{turns[-1].first}" * 20)
    assert_sees_its_text(dropping)
    with pytest.raises(ValueError, match="all older turns have been dropped already"):
        dropping.send("d" * 260)
    assert dropping.turns == turns


def test_what_is_refused(tiny_llama, byte_tokenizer, tmp_path):
    for settings, message in (
        ({"on_full": "grow"}, "on_full must be 'stop' or 'drop', got 'grow'"),
        ({"temperature": -1.0}, "temperature must be a finite number"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer >= 1"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"system": 3}, "system must be a string, got 3"),
        ({"template": ""}, "template must be Jinja text or 'plain'"),
        ({"template": "plain", "template_options": {"x": 1}}, "need a template, but"),
        ({"template_options": 3}, "template_options must map names to values"),
        ({"max_len": 0}, "max_len must be an integer >= 1"),
        ({"cache": kvjax.init_cache(tiny_llama.config, max_len=8)}, "makes its own cache"),
        ({"stop": ""}, "at least one character"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            kvjax.Chat(tiny_llama, **settings)
    for name in "n", "num_beams":
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            kvjax.Chat(tiny_llama, **{name: 2})
        chat = begun(tiny_llama)
        chat.settings[name] = 2
        with pytest.raises(ValueError, match=f"'{name}' is not a setting of a chat's answers"):
            chat.send("ab")
    with pytest.raises(ValueError, match="has no tokenizer"):
        kvjax.Chat(replace(tiny_llama, tokenizer=None))
    mesh = kvjax.make_mesh(data=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="splits rows over 2 devices, but a chat has one row"):
        kvjax.Chat(replace(tiny_llama, mesh=mesh))
    chat = begun(tiny_llama)
    for call in (chat.retry, chat.undo, lambda: chat.edit(0, "x")):
        with pytest.raises(ValueError, match="the chat has 0, counted from 0"):
            call()
    with pytest.raises(ValueError, match="a text that is sent must be a string, got 5"):
        chat.send(5)
    refusing = begun(tiny_llama, template="{{ raise_exception('no ' + messages[0].role) }}")
    with pytest.raises(ValueError, match="refuses these messages: no user"):
        refusing.send("x")
    plain = kvjax.Chat(tiny_llama, template="plain", **SHARED)
    with pytest.raises(ValueError, match="the text is empty"):
        plain.send("")


def test_files_that_are_no_chat(tiny_llama, tmp_path):
    chat = begun(tiny_llama, logits_hook=_unchanged, logit_bias={5: -3.0}, stop=["zz"])
    chat.save(tmp_path)
    with pytest.raises(ValueError, match="logits_hook could not be saved; give it again"):
        kvjax.Chat.load(tiny_llama, tmp_path)
    empty = kvjax.Chat.load(tiny_llama, tmp_path, logits_hook=_unchanged, temperature=0.5)
    assert empty.settings == chat.settings | {"temperature": 0.5}
    assert empty.turns == ()
    with pytest.raises(ValueError, match="has its cache"):
        kvjax.Chat.load(tiny_llama, tmp_path, cache="static")
    said(begun(tiny_llama).send("x"))
    other = tiny_llama.with_params(jax.tree.map(lambda x: x + 1, tiny_llama.params))
    with pytest.raises(kvjax.CheckpointError, match="which can't use its tokens and cache"):
        kvjax.Chat.load(other, tmp_path)
    with pytest.raises(kvjax.CheckpointError, match="no chat was saved there"):
        kvjax.Chat.load(tiny_llama, tmp_path / "nowhere")
    file = tmp_path / "chat.json"
    words = json.loads(file.read_text())
    for wrong, message in (
        ("{", "is damaged"),
        (json.dumps(words | {"form": 9}), "has format 9, but this version of kvjax reads 1"),
        (json.dumps(words | {"turns": [{}]}), "is not in this version's format"),
        (json.dumps(words | {"known": 3}), "is not in this version's format"),
    ):
        file.write_text(wrong)
        with pytest.raises(kvjax.CheckpointError, match=message):
            kvjax.Chat.load(tiny_llama, tmp_path, logits_hook=_unchanged)
    (tmp_path / "mine").write_text("")
    with pytest.raises(kvjax.CheckpointError, match="is not a chat, so it is not overwritten"):
        chat.save(tmp_path)


def _unchanged(logits: Any, tokens: Any, length: Any) -> Any:
    return logits


def test_the_token_that_ends_an_answer_is_the_templates(byte_tokenizer, tmp_path):
    """Also with stop strings that end inside a token."""
    text = "a</s>hey</s>b</s>you</s>c</s>no!STOP"
    lm: Any = scripted(text, tokenizer=byte_tokenizer, eos=[257])
    settings = {"template": SHORT, "max_len": 64, "prefill_chunk": 16, "stop": ["!STOP"]}
    chat = kvjax.Chat(lm, **settings)
    assert [said(chat.send(each)) for each in "abc"] == ["hey", "you", "no"]
    assert [turn.finish_reason for turn in chat.turns] == ["eos", "eos", "stop"]
    assert list(held(chat).tokens) == byte_tokenizer.encode("a</s>hey</s>b</s>you</s>c</s>no")
    assert (
        chat.stats.prefill_tokens == 2 + 3 + 3
    )  # a sampled end token is fed with the next message
    # A ring that can't be rewound so far is prefilled again.
    ring = kvjax.policy("sliding_window", window=8, slack=0)
    chat = kvjax.Chat(lm, cache=ring, **settings | {"prefill_chunk": 1})
    assert [said(chat.send(each)) for each in "abc"] == ["hey", "you", "no"]
    assert held(chat) is None
    chat.settings["max_new_tokens"] = 1
    assert said(chat.edit(2, "c")) == "n" and chat.stats.recomputed_tokens == 14
    with pytest.raises(ValueError, match="has no tokenizer"):
        kvjax.Chat(scripted([1], tokenizer=None, vocab_size=9), **settings)


def test_texts_are_cut_where_their_tokens_are_known():
    encode = {"ab": [1], "abc": [9], "c": [3], "abxc": [1, 7, 3]}
    known = TokenizedText().with_answer(0, "ab", [1], "x", [7])

    def tokens(text: str, begins: bool) -> list[int]:
        assert begins == text.startswith("ab")
        return encode[text]

    assert known.tokenize("abxc", tokens) == [1, 7, 3] and known.tokenize("abx", tokens) == [1, 7]
    assert known.tokenize("abc", tokens) == [9]
    assert known.with_cuts_before(0).tokenize("abxc", tokens) == [1, 7, 3]
    again = known.with_answer(1, "abxc", [1, 7, 3], "y", [8])
    assert again.cuts == ((0, 3, 2), (1, 5, 4)) and again.with_common_cuts("abxq").cuts == (
        (0, 3, 2),
    )
