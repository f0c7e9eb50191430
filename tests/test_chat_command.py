"""``kvjax chat``: from a pipe and on a terminal."""

import functools
import json
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax import cli
from kvjax.cli.chat_command import ChatLoop

SHARED = {"max_len": 256, "max_new_tokens": 8}
OPTIONS = ("--max-len", "256", "--max-new-tokens", "8")


@pytest.fixture
def run_chat(monkeypatch, capfd, tiny_llama_dir):
    """Run the command on lines: exit code, standard output, standard error."""

    def run(*lines: str, options=OPTIONS, raw: bytes | None = None):
        read, write = os.pipe()
        os.write(write, "\n".join([*lines, ""]).encode() if raw is None else raw)
        os.close(write)
        arguments = ["kvjax", "chat", "--model", str(tiny_llama_dir), *map(str, options)]
        monkeypatch.setattr(sys, "argv", arguments)
        with os.fdopen(read, encoding="utf-8") as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with pytest.raises(SystemExit) as leaving:
                cli.main()
        out, err = capfd.readouterr()
        return leaving.value.code, out, err

    return run


def test_every_command(run_chat, tiny_llama, tmp_path):
    """Each command does the same as the method of ``Chat``."""
    chat = kvjax.Chat(tiny_llama, system="sys", **SHARED)

    def answer_of(answer):
        list(answer)
        return chat.turns[-1].answer + "\n"

    expected = answer_of(chat.send("ab")) + answer_of(chat.send("/c"))
    expected += answer_of(chat.edit(0, "d  e"))
    expected += answer_of(chat.edit(0, "fg")) + answer_of(chat.retry()) + "none\n"
    chat.system = "none"
    expected += answer_of(chat.send("h")) + "none\n"
    chat.undo()
    lines = ["ab", "//c", "/edit 1 d  e", "/edit fg", "/retry", "/system none", "", "h"]
    lines += ["/system", "/undo", f"/save {tmp_path / 'x'}", "/show", f"/load {tmp_path / 'x'}"]
    options = ("--system", "sys", "--draft-layers", 1, *OPTIONS)  # /load keeps the draft
    code, out, err = run_chat(*lines, "/system -", "/exit", "ignored", options=options)
    shown = f"system: none\n1 > fg\n{chat.turns[0].answer}\n(no system prompt)\n"
    assert (code, out) == (0, expected + shown)
    for words in ("(removed: h)", "(saved in ", "(1 turn from "):
        assert words in err
    code, out, err = run_chat("/help", "/stats", "/show", "/system")
    assert code == 0 and out.count("\n") == 11 + 12 + 2 and not err
    assert all(f"/{name}" in out for name in ("edit [N] TEXT", "save FOLDER", "exit"))
    assert "prefill tokens     0" in out and "remaining tokens   256" in out


def test_errors_do_not_end_the_chat(run_chat, tiny_llama, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    wrong = {
        "/nope": "no command /nope: use /help, ",
        "/retry": "the chat has 0",
        "/undo": "the chat has 0",
        "/edit x": "turn 0 does not exist: the chat has 0",
        "/save": "/save takes a folder",
        f"/save {tmp_path / 'mine'}": "so it is not overwritten",
        f"/load {tmp_path}": "no chat was saved there",
        "/exit now": "/exit takes no argument",
        "a" * 300: "but can hold 256",
    }
    code, out, err = run_chat(*wrong, "ab", "/edit 1", "/edit 3 x")
    lines = err.splitlines()
    assert code == 2 and len(lines) == len(wrong) + 3
    for line, words in zip(
        lines, [*wrong.values(), "(cut off", "/edit takes", "turn 3 does not exist"], strict=True
    ):
        assert words in line and (line.startswith("kvjax: error: ") or words == "(cut off")
    chat = kvjax.Chat(tiny_llama, **SHARED)
    list(chat.send("ab"))
    assert out == chat.turns[0].answer + "\n"
    code, out, err = run_chat(raw=b"a\xffb\nab\n")
    assert code == 2 and "is not UTF-8" in err
    for options, words in (
        (("--temperature", -1), "temperature must be"),
        (("--load", tmp_path / "mine"), "no chat was saved there"),
        (("--load", tmp_path, "--kv-bits", 4), "omit --cache"),
        (("--template", tmp_path / "none"), "No such file"),
        (("--on-full", "grow"), "on_full must be 'stop' or 'drop', got 'grow'"),
    ):
        code, out, err = run_chat("ab", options=options)
        assert code == 2 and out == "" and words in err and err.count("\n") == 1


def test_templates_and_full_chats(run_chat, tiny_llama, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    drop = {"on_full": "drop", "template": template.read_text()}
    chat = kvjax.Chat(tiny_llama, **SHARED, **drop)
    texts = [letter * 60 for letter in "abcdef"]
    expected = ""
    for text in texts:
        list(chat.send(text))
        expected += chat.turns[-1].answer + "\n"
    options = ("--template", template, "--on-full", "drop", *OPTIONS)
    code, out, _ = run_chat(*texts, "/show", options=options)
    assert code == 0 and out.startswith(expected) and chat.stats.dropped_turns > 1
    assert (
        f"{chat.stats.dropped_turns} (dropped) > " in out
        and f"\n{chat.stats.dropped_turns + 1} > " in out
    )
    code, out, err = run_chat("ab", options=("--template", "plain", *OPTIONS))
    assert code == 0 and "the model has no chat template" in err
    # Without a template, the answer is what kvjax.generate returns.
    alone = kvjax.generate(tiny_llama, ["ab"], max_new_tokens=8, max_len=256)
    assert out == alone.text[0] + "\n"


def _fail(error: Exception) -> None:
    raise error


def test_interrupts_and_bugs_do_not_end_the_chat(tiny_llama, monkeypatch, capfd):
    """Only the end of the input does."""
    chat = kvjax.Chat(tiny_llama, **SHARED)
    typed = iter([KeyboardInterrupt(), "ab", RuntimeError("odd"), "/show", EOFError()])

    def input_(prompt: str) -> str:
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, RuntimeError):
            monkeypatch.setattr(chat, "retry", functools.partial(_fail, line))
            return "/retry"
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", input_)
    ChatLoop(chat, interactive=True).run()
    out, err = capfd.readouterr()
    answer = chat.turns[0].answer
    assert out == f"\n{answer}\n1 > ab\n{answer}\n\n" and len(chat.turns) == 1
    assert "(Ctrl-D or /exit leaves the chat" in err and "RuntimeError: odd" in err


@pytest.mark.rare
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_chat_on_a_terminal(tiny_llama, tiny_llama_dir, tmp_path):
    """A loaded chat continues exactly; an interrupt stops the answer, not the chat."""
    import pty  # not on every system

    shared = {"prefill_chunk": 16, "eos_token_ids": []}
    chat = kvjax.Chat(tiny_llama, cache=kvjax.policy(bits=4), **SHARED, **shared)
    for text in ("x" * 90, "y" * 50):
        list(chat.send(text))
    chat.save(tmp_path / "one")
    endless = kvjax.policy("sliding_window", window=24, sinks=2)
    (letter,) = tiny_llama.tokenizer.encode("z")
    shared |= {"logit_bias": {letter: 1000.0}, "max_new_tokens": 10**7}
    kvjax.Chat(tiny_llama, cache=endless, **shared).save(tmp_path / "endless")

    ours, theirs = pty.openpty()
    # The process that started the tests may ignore interrupts, which is inherited.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvjax.cli import main; main()"
    )
    command = [
        sys.executable,
        "-c",
        program,
        "chat",
        "--model",
        str(tiny_llama_dir),
        "--load",
        "one",
    ]
    running = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path)
    os.close(theirs)
    seen = b""

    def await_(words: bytes) -> None:
        nonlocal seen
        while words not in seen:
            part = os.read(ours, 4096)
            assert part, seen
            seen += part
        seen = seen.split(words, 1)[1]

    def type_(line: str) -> None:
        os.write(ours, line.encode() + b"\n")

    await_(b"Ctrl-D leaves the chat")
    await_(b"> ")
    type_("after")
    await_(b"(cut off")
    await_(b"> ")
    type_("/save two")
    await_(b"(saved in two)")
    await_(b"> ")
    type_("/load endless")
    await_(b"(0 turns from endless)")
    await_(b"> ")
    type_("go")
    await_(b"z" * 60)
    running.send_signal(signal.SIGINT)
    await_(b"(stopped)")
    await_(b"> ")
    type_("/save three")
    await_(b"(saved in three)")
    await_(b"> ")
    type_("/exit")
    assert running.wait() == 0
    os.close(ours)

    list(chat.send("after"))
    there = kvjax.Chat.load(tiny_llama, tmp_path / "two")
    assert there.turns == chat.turns and there.stats.prefill_tokens == chat.stats.prefill_tokens
    assert not there.stats.recomputed_tokens
    both = [jax.tree.leaves(each._conversation.cached.cache) for each in (there, chat)]
    for one, other in zip(*both, strict=True):
        np.testing.assert_array_equal(one, other)
    stopped = kvjax.Chat.load(tiny_llama, tmp_path / "three")
    (turn,) = stopped.turns
    assert (turn.user, turn.finish_reason) == ("go", "stopped") and len(turn.tokens) >= 60
    saved = json.loads((tmp_path / "three" / "chat.json").read_text())["turns"][0]["answer"]
    assert saved == turn.answer == "z" * len(turn.tokens)
    stopped.settings["max_new_tokens"] = 4
    assert list(stopped.send("and")) and stopped.stats.recomputed_tokens == 0
