"""``kvjax batch``: interrupted and failed runs, invalid lines, and files of other runs."""

import errno
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

import kvjax
from kvjax import cli
from kvjax.cli import batch_files
from kvjax.cli import common as cli_common
from kvjax.cli.batch_command import MAX_REPORTED, BatchRun
from kvjax.cli.batch_files import ResultsFile, input_key, number_lines
from kvjax.memory import InferenceLimits

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files are not locked there")
SETTINGS = {"max_new_tokens": 6, "temperature": 0.9, "seed": 3}
PROMPTS = [b'{"prompt": "one", "id": 1}', b"", b"[", b'{"prompt": "f\xc3\xbcr", "seed": 5}',
           b'{"prompt": "speed", "speed": 2}', b'{"tokens": [3, 4, 5]}',
           b'{"prompt": "a longer one than the others are", "logprobs": 1}']  # fmt: skip
LINES_WITH_RESULTS = [1, 3, 4, 5, 6, 7]
"""The lines that have a result: all except the empty one."""


class FakeHandle(SimpleNamespace):
    """A handle with identity semantics."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


class FakeEngine:
    """An engine that finishes requests in random order; a text depends only on its request."""

    def __init__(self, seed=0):
        self.order, self.waiting, self.most = random.Random(seed), [], 0

    def submit(self, prompt, *, callback, **settings):
        given = json.dumps([prompt, settings], sort_keys=True)
        text = hashlib.sha256(given.encode()).hexdigest()[:4] + "ü\u2028"
        handle = FakeHandle(
            done=False, error=None, text=text, tokens=[1, 2], finish_reason="length", logprobs=None,
            request=SimpleNamespace(tokens=[0]),
        )  # fmt: skip
        self.waiting.append((handle, callback))
        self.most = max(self.most, len(self.waiting))
        return handle

    def step(self):
        handle, callback = self.waiting.pop(self.order.randrange(len(self.waiting)))
        handle.done = True
        callback(handle)


def run_batch(results, engine, lm=None, lines=PROMPTS, settings=None, most=3, say=lambda _: None):
    """Check and run lines, as the command does."""
    settings = SETTINGS if settings is None else settings
    run = BatchRun(
        engine, lm, results, settings, key=json.dumps(settings), chat=False, max_requests=most,
        print_line=say,
    )  # fmt: skip
    try:
        total = run.check(number_lines(lines))
        results.prepare()
        return run.run(number_lines(lines), total)
    finally:
        results.close()


def sorted_lines(path):
    """The results of a file, sorted by line number; the last one must be complete."""
    data = path.read_bytes()
    assert data.endswith(b"\n")
    return sorted(data.split(b"\n")[:-1], key=lambda line: json.loads(line)["line"])


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command in this process: exit code, standard output, standard error."""

    def run_command(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["kvjax", "batch", *map(str, arguments)])
        if stdin is not None:
            read, write = os.pipe()
            os.write(write, stdin)
            os.close(write)
            monkeypatch.setattr(sys, "stdin", os.fdopen(read))
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capfd.readouterr()
        return leaving.value.code, out, err

    return run_command


def test_results_file_cut_at_any_byte_is_completed(tmp_path, monkeypatch):
    """The file is cut after each of its bytes."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    path = tmp_path / "results.jsonl"
    run_batch(ResultsFile(path), FakeEngine())
    expected, data = sorted_lines(path), path.read_bytes()
    assert [json.loads(line)["line"] for line in expected] == LINES_WITH_RESULTS
    for end in range(len(data) + 1):
        path.write_bytes(data[:end])
        counts = run_batch(ResultsFile(path), FakeEngine(end))
        assert sorted_lines(path) == expected
        assert counts.skipped == data[:end].count(b"\n")
        assert counts.skipped + counts.done + counts.failed == len(LINES_WITH_RESULTS)


def test_run_on_a_full_disk_is_completed_later(tmp_path, monkeypatch):
    """The disk is full repeatedly, after different numbers of bytes."""
    path, write = tmp_path / "results.jsonl", os.write
    run_batch(ResultsFile(path), FakeEngine())
    expected = sorted_lines(path)
    monkeypatch.setattr(os, "fsync", lambda file: None)

    def until(most):
        def full(file, data):
            if not (free := most - os.fstat(file).st_size):
                raise OSError(errno.ENOSPC, "full")
            return write(file, data[:free])

        return full

    for room in range(1, 120):
        path.unlink()
        for attempt in range(100):
            results = ResultsFile(path)
            monkeypatch.setattr(os, "write", until(path.stat().st_size + room + 17 * attempt))
            try:
                run_batch(results, FakeEngine(attempt))
                break
            except OSError:
                pass
            finally:
                monkeypatch.setattr(os, "write", write)
        assert sorted_lines(path) == expected


def test_partial_result_after_a_power_failure_is_cut_off(tmp_path):
    path = tmp_path / "results.jsonl"
    run_batch(ResultsFile(path), FakeEngine())
    expected, data = sorted_lines(path), path.read_bytes()
    last = data.rindex(b"\n", 0, -1) + 1
    for tail in (b"\0" * 40, data[last:-9] + b"\0" * 9, data[last:-9] + b"\n", data[last:-1]):
        path.write_bytes(data[:last] + tail)
        run_batch(ResultsFile(path), FakeEngine(5))
        assert sorted_lines(path) == expected


def test_other_files_are_rejected_and_unchanged(tmp_path):
    path = tmp_path / "notes.txt"
    good = b'{"line": 1, "input": "00000000000000aa", "id": null, "error": "x"}\n'
    for data, words in (
        (b"notes", "is not a file of results: its line 1 was not written by kvjax batch"),
        (b"notes\n", "its line 1 was not"), (b"{}\n", "its line 1 was not"),
        (b"\n", "its line 1 was not"),
        (good + b"[1]\n", "its line 2 was not"), (b'{"line": \n' + good, "its line 1 was not"),
        (b'{"line": 0, "input": "aa"}\n' + good, "its line 1 was not"),
        (good.replace(b"aa", b"zz") + good, "its line 1 was not"),
        (good.replace(b"1", b"99999999999999999999", 1) + good, "its line 1 was not"),
        (good + good, "has two results for line 1"),
    ):  # fmt: skip
        path.write_bytes(data)
        with pytest.raises(ValueError, match=words):
            ResultsFile(path)
        assert path.read_bytes() == data
    with pytest.raises(ValueError, match="is not a file"):
        ResultsFile(tmp_path)


def test_results_of_other_lines_or_settings_are_rejected(tmp_path):
    path, other = tmp_path / "results.jsonl", [*PROMPTS]
    run_batch(ResultsFile(path), FakeEngine())
    data = path.read_bytes()
    other[3] = b'{"prompt": "another", "seed": 5}'
    for lines, settings, number in (
        (other, SETTINGS, 4), ([b"", *PROMPTS], SETTINGS, 1), (PROMPTS[:5], SETTINGS, 7),
        (PROMPTS, SETTINGS | {"seed": 4}, 1), (PROMPTS, SETTINGS | {"top_k": 2}, 1),
    ):  # fmt: skip
        engine = FakeEngine()
        with pytest.raises(
            ValueError, match=f"of other settings, first at line {number}: give another"
        ):
            run_batch(ResultsFile(path), engine, lines=lines, settings=settings)
        assert path.read_bytes() == data and not engine.most
    # Whitespace around lines, and additional lines, are allowed.
    counts = run_batch(
        ResultsFile(path), FakeEngine(), lines=[b" " + each + b"\r\n" for each in PROMPTS]
    )
    assert counts.skipped == len(LINES_WITH_RESULTS) and path.read_bytes() == data
    assert (
        run_batch(ResultsFile(path), FakeEngine(), lines=[*PROMPTS, b'{"tokens": [1]}']).done == 1
    )


def test_two_processes_with_one_results_file(tmp_path):
    path = tmp_path / "results.jsonl"
    first = ResultsFile(path)
    with pytest.raises(ValueError, match="another process is writing its results there"):
        ResultsFile(path)
    run_batch(first, FakeEngine())
    again = ResultsFile(path, retry_errors=True)
    again.prepare()  # replaces the file by a new one, which is locked too
    with pytest.raises(ValueError, match="another process is writing its results there"):
        ResultsFile(path)
    again.close()
    assert len(ResultsFile(path)) == 4


def test_retry_errors(tmp_path, monkeypatch):
    path, mended = tmp_path / "results.jsonl", [*PROMPTS]
    run_batch(ResultsFile(path), FakeEngine())
    before = path.read_bytes()
    assert run_batch(ResultsFile(path, retry_errors=True), FakeEngine()).failed == 2
    assert sorted_lines(path) == sorted(
        before.split(b"\n")[:-1], key=lambda x: json.loads(x)["line"]
    )
    mended[2] = b'{"prompt": "mended"}'

    def killed(*_):
        raise KeyboardInterrupt

    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run_batch(ResultsFile(path, retry_errors=True), FakeEngine(), lines=mended)
    assert path.read_bytes() == before
    counts = run_batch(ResultsFile(path, retry_errors=True), FakeEngine(), lines=mended)
    assert (counts.skipped, counts.done, counts.failed) == (4, 1, 1)
    assert [json.loads(line)["line"] for line in sorted_lines(path)] == LINES_WITH_RESULTS
    assert list(tmp_path.iterdir()) == [path]
    # A process that is killed during the replacement loses only the errors.
    path.write_bytes(b"".join(x + b"\n" for x in before.split(b"\n")[:-1] if b'"error"' not in x))
    assert run_batch(ResultsFile(path), FakeEngine()).failed == 2


def test_lines_are_read_only_as_needed(tmp_path):
    """The engine has at most ``max_requests``, and lines are read when it has room."""
    engine, ahead = FakeEngine(), []

    def lines():
        for number in range(300):
            ahead.append(number - (path.read_bytes().count(b"\n") if path.exists() else 0))
            yield b'{"tokens": [%d]}' % number

    path = tmp_path / "results.jsonl"
    results = ResultsFile(path)
    run = BatchRun(
        engine, None, results, SETTINGS, key="", chat=False, max_requests=5,
        print_line=lambda _: None,
    )  # fmt: skip
    assert run.run(number_lines(lines())).done == 300
    assert engine.most == 5 and max(ahead) <= 5
    results.close()


def test_only_the_first_errors_are_printed(tmp_path):
    printed_lines = []
    lines = [b"[1]"] * 40
    counts = run_batch(
        ResultsFile(tmp_path / "results.jsonl"), FakeEngine(), lines=lines, say=printed_lines.append
    )
    assert counts.failed == 40 and len(printed_lines) == MAX_REPORTED + 1
    assert printed_lines[0] == "kvjax: line 1: not a JSON object"
    assert printed_lines[-1] == "kvjax: more lines have errors; see their results"


def test_error_of_a_handle_is_the_result(tmp_path):
    engine, path = FakeEngine(), tmp_path / "results.jsonl"
    submit = engine.submit

    def failing(prompt, **more):
        handle = submit(prompt, **more)
        handle.error = kvjax.NonFiniteError("the logits are\nnot finite")
        return handle

    engine.submit = failing
    assert run_batch(ResultsFile(path), engine, lines=PROMPTS[:1]).failed == 1
    assert json.loads(path.read_bytes())["error"] == "the logits are not finite"


def test_message_on_interrupt(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    for code, words in ((cli_common.INTERRUPTED, "go on so\n"), (2, "")):
        with pytest.raises(SystemExit), cli_common.message_on_interrupt(lambda: "go on so"):
            cli_common.exit_now(code)
        assert capfd.readouterr().err == words
    with pytest.raises(SystemExit):
        cli_common.exit_now(cli_common.INTERRUPTED)
    assert capfd.readouterr().err == ""


VALID_LINES = [
    {"id": "text", "prompt": "Once"},
    {"id": 7, "tokens": [65, 66, 67], "temperature": 0, "logprobs": 2},
    {"messages": [{"role": "user", "content": "hi"}], "max_new_tokens": 3, "priority": -1},
    {"prompt": "für", "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "stop": ["x", "y"],
     "repetition_penalty": 1.2, "min_new_tokens": 2, "logit_bias": {"70": 3.5}, "id": None,
     "typical_p": 0.9, "frequency_penalty": 1, "presence_penalty": 0.5, "no_repeat_ngram_size": 3},
    {"prompt": "Once", "max_new_tokens": 9},
]  # fmt: skip
INVALID_LINES = {
    "": None,
    '{"prompt": "a"': "not JSON, at character 15: Expecting ',' delimiter",
    "[1, 2]": "not a JSON object",
    "[" * 10**4: "nested too deeply",
    "{}": "the line has no prompt: give one of prompt, tokens, messages",
    '{"prompt": null}': "the line has no prompt",
    '{"prompt": "a", "tokens": [1]}': "the line has prompt and tokens: give one of",
    '{"prompt": "a", "speed": 1, "id": "s"}': "unknown field 'speed': did you mean 'seed'?",
    '{"prompt": "a", "id": [1]}': "id must be a string or an integer",
    '{"prompt": 5}': "prompt must be a string",
    '{"prompt": ""}': "is empty",
    '{"tokens": "abc"}': "tokens must be a list of token ids",
    '{"tokens": []}': "is empty",
    '{"tokens": [300]}': "token id 300 is out of range",
    '{"tokens": [1.5]}': "must be a string or a list of token ids",
    '{"messages": "hi"}': "messages must be a list of messages",
    '{"messages": []}': "messages must be a list of at least one message",
    '{"messages": ["hi"]}': "a message must be a dict with a role",
    '{"messages": [], "continue_final_message": 1}': "continue_final_message must be true or false",
    '{"prompt": "a", "continue_final_message": true}': "continue_final_message needs messages",
    '{"prompt": "a\\ud800"}': "unpaired surrogate '\\ud800'",
    '{"prompt": "a", "temperature": "hot"}': "temperature must be a finite number",
    '{"prompt": "a", "temperature": NaN}': "temperature must be a finite number",
    '{"prompt": "a", "max_new_tokens": 2.5}': "max_new_tokens must be an integer",
    '{"prompt": "a", "max_new_tokens": 500}': "but the engine's max_seq_len is 128",
    '{"prompt": "a", "stop": 5}': "stop must be a string or a list of strings",
    '{"prompt": "a", "stop": [5]}': "a stop string must have at least one character",
    '{"prompt": "a", "logit_bias": [1]}': "logit_bias must be an object",
    '{"prompt": "a", "logit_bias": {"x": 1}}': "logit_bias has 'x', which is not a token id",
    '{"prompt": "a", "logit_bias": {"1": "x"}}': "logit_bias must be numbers",
    '{"prompt": "a", "logprobs": 500}': "logprobs must be at most 20",
    '{"prompt": "a", "seed": -1}': "seed must be an integer from 0",
    '{"prompt": "a", "priority": 0.5}': "priority must be an integer, got 0.5",
}
"""Invalid lines and their errors; None for a line that is skipped."""


@pytest.fixture
def common(tiny_llama_dir):
    """The options of a small engine."""
    return ("--model", tiny_llama_dir, "--dtype", "float32", "--max-seq-len", 128,
            "--max-batch-size", 2, "--prefill-chunk", 16, "--max-new-tokens", 5,
            "--temperature", 0.9, "--seed", 100)  # fmt: skip


@pytest.mark.slow
def test_results_match_separate_requests(run, common, tiny_llama, tmp_path):
    """In any order and company; errors are printed, and the exit code is 3."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    lines = [json.dumps(each, ensure_ascii=False) for each in VALID_LINES]
    prompts.write_text("\n".join([*lines, *INVALID_LINES]), encoding="utf-8")
    code, printed, err = run(prompts, "--out", out, *common)
    assert (code, printed) == (3, "")
    bad = [words for words in INVALID_LINES.values() if words is not None]
    *printed_lines, more, last = err.splitlines()
    assert len(printed_lines) == MAX_REPORTED and more.endswith("see their results")
    assert last.startswith(f"{len(VALID_LINES)} lines done · {len(bad)} failed, see {out} · ")
    results = [json.loads(line) for line in sorted_lines(out)]
    assert [each["line"] for each in results[: len(VALID_LINES)]] == [1, 2, 3, 4, 5]
    errors = {each["line"]: each for each in results[len(VALID_LINES) :]}
    assert [each["id"] for each in errors.values()].count("s") == 1
    for number, (_, words) in enumerate(INVALID_LINES.items(), len(VALID_LINES) + 1):
        if words is None:
            assert number not in errors
        else:
            assert words in errors.pop(number)["error"]
    assert not errors
    limits = InferenceLimits(max_batch_size=2, max_seq_len=128)
    engine = kvjax.Engine(tiny_llama, limits=limits, prefill_chunk=16)
    for number, (line, found) in enumerate(zip(VALID_LINES, results, strict=False), 1):
        settings = {
            k: v for k, v in line.items() if k not in ("id", "prompt", "tokens", "messages")
        }
        if "logit_bias" in settings:
            settings["logit_bias"] = {70: 3.5}
        settings = {"max_new_tokens": 5, "temperature": 0.9, "seed": 100 + number} | settings
        messages = line.get("messages")
        prompt = tiny_llama.chat(messages) if messages else line.get("prompt", line.get("tokens"))
        (alone,) = engine.run([prompt], **settings)
        assert found.get("id") == line.get("id")
        assert (found["text"], found["tokens"]) == (alone.text, alone.tokens)
        assert found["finish_reason"] == alone.finish_reason
        used = {"prompt_tokens": len(alone.request.tokens), "new_tokens": len(alone.tokens)}
        assert found["usage"] == used
        scores = alone.logprobs and [each.logprob for each in alone.logprobs]
        assert [each["logprob"] for each in found.get("logprobs", [])] == (scores or [])
    assert len(results[1]["logprobs"][0]["top_logprobs"]) == 2
    # Interrupted in the third result, and continued with more rows; then run from a pipe.
    data = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(data[:2]) + data[2][:30])
    more = "--max-batch-size", 3, "--json", "--prompt-lookup"
    code, printed, _ = run(prompts, "--out", out, *common, *more)
    assert code == 3 and sorted_lines(out) == sorted(
        (line[:-1] for line in data), key=lambda line: json.loads(line)["line"]
    )
    figures = json.loads(printed)
    assert (figures["already_done"], figures["done"] + figures["failed"]) == (2, len(data) - 2)
    assert figures["drafted_tokens"] >= figures["accepted_tokens"]
    before = out.read_bytes()
    refused = run("-", "--out", out, *common, stdin=prompts.read_bytes())
    assert refused[0] == 2 and "only a run over a file can be continued" in refused[2]
    assert out.read_bytes() == before
    out.unlink()
    assert run("-", "--out", out, *common, stdin=prompts.read_bytes())[0] == 3
    assert sorted_lines(out) == sorted(
        (line[:-1] for line in data), key=lambda line: json.loads(line)["line"]
    )


def test_rerun_reports_earlier_errors(run, common, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    lines = ['{"prompt": "a"}', '{"prompt": "b", "temprature": 1}', "no JSON", '{"tokens": [1]}']
    prompts.write_text("\n".join(lines))
    code, _, err = run(prompts, "--out", out, *common)
    assert code == 3 and "2 lines done · 2 failed, see " in err
    assert "unknown field 'temprature': did you mean 'temperature'?" in err
    code, _, err = run(prompts, "--out", out, *common)
    assert (
        code == 3
        and "0 lines done · 4 skipped, 2 of them with errors: --retry-errors · 0 failed" in err
    )
    figures = json.loads(run(prompts, "--out", out, *common, "--json")[1])
    assert (figures["already_done"], figures["failed_before"], figures["failed"]) == (4, 2, 0)


def test_duplicate_ids(run, common, tmp_path):
    """A file is checked before the first line runs; from a pipe, the second line is an error."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"id": "a", "prompt": "x"}\nno JSON\n{"prompt": "y", "id": "a"}\n')
    code, _, err = run(prompts, "--out", out, *common)
    assert code == 2 and err.endswith("kvjax: error: line 3: line 1 has the same id 'a'\n")
    assert not out.read_bytes()
    prompts.write_text(prompts.read_text() + '{"prompt": "z", "xyzzy": 1}')
    code, _, err = run("-", "--out", out, *common, stdin=prompts.read_bytes())
    assert code == 3 and "line 1 has the same id 'a'" in err
    assert "unknown field 'xyzzy': use id, prompt, tokens" in err
    assert [json.loads(line)["line"] for line in sorted_lines(out)] == [1, 2, 3, 4]


def test_invalid_arguments_are_one_line(run, common, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    for arguments, words in (
        ((prompts, "--out", prompts), "is the input, and can't be --out too"),
        ((prompts,), "--out"),
        ((tmp_path / "none.jsonl", "--out", out), "none.jsonl"),
        ((tmp_path, "--out", out), str(tmp_path)),
        ((prompts, "--out", tmp_path), "is not a file"),
        ((prompts, "--out", tmp_path / "no" / "results"), "results"),
        ((prompts, "--out", out, "--temperature", -1), "temperature must be a finite number"),
        ((prompts, "--out", out, "--max-new-tokens", 500), "the engine's max_seq_len is 128"),
        ((prompts, "--out", out, "--cache", "static"), "no layer is paged"),
        ((prompts, "--out", out, "--cache-memory", "much"), "'much' is not a size"),
        ((prompts, "--out", out, "--max-batch-size", 0), "--max-batch-size"),
    ):  # fmt: skip
        code, printed, err = run(*arguments[:1], *common, *arguments[1:])
        assert (code, printed) == (2, "") and words in err, err
        assert err.startswith("kvjax: error: ") and err.count("\n") == 1
        assert prompts.read_text() == '{"prompt": "a"}\n'
        assert not out.exists() or not out.read_bytes()


def command(prompts, out):
    """A process with the embedded model that receives interrupts."""
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvjax.cli import main; main()"
    )
    return [sys.executable, "-c", program, "batch", str(prompts), "--out", str(out),
            "--max-batch-size", "4", "--prefill-chunk", "16", "--max-seq-len", "64",
            "--max-new-tokens", "24", "--temperature", "0.8"]  # fmt: skip


@pytest.mark.rare
def test_killed_runs_lose_and_repeat_no_line(tmp_path):
    """Killed at random times: during loading, between results, and while writing one."""
    prompts, out, once = (tmp_path / name for name in ("prompts.jsonl", "out.jsonl", "once.jsonl"))
    lines = [{"prompt": f"The module number {n}", "id": n, "logprobs": 20} for n in range(120)]
    text = "".join(json.dumps(each) + "\n" for each in lines) + '{"prompt": 3}\n'
    prompts.write_text(text)
    subprocess.run(command(prompts, once), check=True, capture_output=True)
    expected = sorted_lines(once)
    assert len(expected) == 121
    size, moments = once.stat().st_size, random.Random()

    def written():
        return out.stat().st_size if out.exists() else 0

    for kill in range(10):
        enough = written() + moments.randrange(1, size // 16)
        running = subprocess.Popen(command(prompts, out), stderr=subprocess.DEVNULL)
        if kill % 5:
            while running.poll() is None and written() < enough:
                time.sleep(0.001)
            time.sleep(0.05 * moments.random())
        else:  # during loading, or a little later
            time.sleep(2 * moments.random())
        running.kill()
        assert running.wait() == -signal.SIGKILL, "it finished before it was killed"
        data = out.read_bytes() if out.exists() else b""
        found = [json.loads(line)["line"] for line in data.split(b"\n")[:-1]]
        assert len(set(found)) == len(found)
    ended = subprocess.run(command(prompts, out), check=True, capture_output=True, text=True)
    assert sorted_lines(out) == expected and "skipped" in ended.stderr


@pytest.mark.rare
def test_interrupt_leaves_whole_lines(tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "The module"}\n' * 2000)
    running = subprocess.Popen(command(prompts, out), stderr=subprocess.PIPE, text=True)
    while not out.exists() or not out.stat().st_size:
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate()
    assert running.returncode == 130
    assert err.startswith("kvjax: stopped with ") and err.endswith("the same command continues\n")
    assert len(sorted_lines(out)) == int(err.split()[3].replace(",", ""))


def test_input_key():
    keys = {input_key(line, settings) for line in (b"a", b"b") for settings in ("", "a", "b")}
    assert len(keys) == 6 and all(len(key) == 16 for key in keys)
    assert json.dumps({"line": 1}).encode().startswith(batch_files.RESULT_START)
