"""The command line: output, standard error, and one line and exit code 2 for a user's error."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from typing import ClassVar

import jax
import pytest
import rich.progress

import kvjax
from kvjax import cli, models
from kvjax.cli import output
from kvjax.cli.chat_command import ChatLoop
from kvjax.cli.options import GrammarOptions
from kvjax.codecs import Raw
from kvjax.core import compat
from kvjax.core.reporting import progress_callback
from kvjax.core.target import Target
from kvjax.memory.device_plan import DevicePlan

STATS = {
    "cached_tokens",
    "speculation",
    "moves",
    "finish_reasons",
    "beyond_context",
    "prompt_tokens",
    "new_tokens",
    "compile_seconds",
    "prefill_seconds",
    "decode_seconds",
    "decode_tokens_per_second",
    "cache_bytes",
    "compilations",
}


@pytest.fixture
def run(monkeypatch, capfd):
    """Run a command in this process; returns the exit code, standard output and standard error."""

    def run_command(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["kvjax", *map(str, arguments)])
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


def assert_one_line_error(outcome, *words):
    code, out, err = outcome
    assert code == 2
    assert out == ""
    assert err.startswith("kvjax: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert all(word in err for word in words), err


def test_text_and_statistics(run, tiny_llama_dir, tiny_llama):
    code, out, err = run("generate", "Once", "--model", tiny_llama_dir, "--max-new-tokens", 12)
    expected = kvjax.generate(tiny_llama, ["Once"], max_new_tokens=12)
    assert code == 0
    assert out == expected.text[0] + "\n"
    assert "4 prompt + 12 new tokens" in err and "tokens/s" in err and err.count("\n") == 1


@pytest.mark.rare
def test_save_and_load_cache(run, tiny_llama_dir, tmp_path):
    """The text continues as if it had never been saved, although the cache must grow."""
    model, folder = ("--model", tiny_llama_dir, "--kv-bits", 8), tmp_path / "text"
    code, first, _ = run("generate", "Once", *model, "--max-new-tokens", 40, "--save-cache", folder)
    assert code == 0
    go_on = ("generate", "", *model[:2], "--load-cache", folder, "--save-cache", folder)
    for _ in range(2):
        code, more, err = run(*go_on, "--max-new-tokens", 30)
        assert code == 0 and "1 prompt + 30 new tokens" in err
        first = first[:-1] + more
    _, whole, _ = run("generate", "Once", *model, "--max-new-tokens", 100)
    assert first == whole
    code, _, err = run("generate", " upon", *go_on[2:6], "--max-new-tokens", 3)
    assert code == 0 and "6 prompt + 3 new tokens" in err
    for words, message in (
        (("--cache", "dynamic"), "omit --cache"), (("--no-cache",), "--no-cache leaves no cache"),
        (("--chat",), "--chat starts a conversation"), (("--max-len", 50), "max_len is 50, but"),
    ):  # fmt: skip
        assert_one_line_error(run(*go_on, *words), message)
    elsewhere = ("generate", "", *model[:2], "--load-cache", tmp_path)
    assert_one_line_error(run(*elsewhere), "has no saved data")
    embedded = ("generate", "", "--load-cache", folder)
    assert_one_line_error(run(*embedded), "works only with the model")


def test_json_is_one_object(run, tiny_llama_dir, tiny_llama):
    arguments = ("--max-new-tokens", 7, "--temperature", 0.8, "--top-k", 50, "--top-p", 0.9)
    arguments += ("--min-p", 0.01, "--seed", 5, "--repetition-penalty", 1.1, "--max-len", 64)
    arguments += ("--typical-p", 0.9, "--frequency-penalty", 0.5, "--presence-penalty", -0.5)
    arguments += ("--no-repeat-ngram-size", 3)
    code, out, err = run("generate", "Once", "--model", tiny_llama_dir, "--json", *arguments)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert set(result) == {"text", "tokens", "stats"} and set(result["stats"]) == STATS
    expected = kvjax.generate(
        tiny_llama,
        ["Once"],
        max_new_tokens=7,
        temperature=0.8,
        top_k=50,
        top_p=0.9,
        min_p=0.01,
        seed=5,
        repetition_penalty=1.1,
        typical_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        no_repeat_ngram_size=3,
        max_len=64,
    )
    assert result["text"] == expected.text[0] and result["tokens"] == expected.tokens[0]
    assert result["stats"]["prompt_tokens"] == 4 and result["stats"]["new_tokens"] == 7
    assert result["stats"]["cache_bytes"] == expected.stats.cache_bytes
    assert result["stats"]["finish_reasons"] == ["length"]
    assert set(result["stats"]["cache_bytes"]) == {"device"}


def test_grammars(run, tiny_llama_dir, tmp_path):
    model = ("generate", "a", "--model", tiny_llama_dir, "--max-new-tokens", 30)
    schema, lark = tmp_path / "schema.json", tmp_path / "form.lark"
    schema.write_text('{"enum": [17, "é"]}', encoding="utf-8")
    lark.write_text('start: "q" /[0-9]/', encoding="utf-8")
    for words, expected_texts in (
        (("--json-schema", schema), {"17", '"é"'}),
        (("--json-schema", '{"const": [1, null]}', "--json"), {"[1,null]"}),
        (("--regex", "yes|no"), {"yes", "no"}),
        (("--choice", "y", "--choice", 'n"'), {"y", 'n"'}),
        (("--grammar", lark), {f"q{digit}" for digit in range(10)}),
    ):
        code, out, _ = run(*model, *words)
        text = json.loads(out)["text"] if "--json" in words else out[:-1]
        assert code == 0 and text in expected_texts
    for words, message in (
        (("--regex", "a", "--choice", "b"), "--regex and --choice exclude each other"),
        (("--regex", "("), "the regex can't be used"),
        (("--grammar", tmp_path / "none"), "no such file"),
        (("--json-schema", "point"), "no such file: 'point'"),
        (("--json-schema", "{"), "the schema can't be used"),
        (("--choice", ""), "choices must be one or more strings"),
        (("--regex", "a", "--min-new-tokens", 1), "min_new_tokens is 1, but a guide"),
    ):  # fmt: skip
        assert_one_line_error(run(*model, *words), message)
    lark.write_text('start: s\ns: "a" s | s "b" s')
    for words in (), ("--n", 2, "--temperature", 1):
        code, _, err = run(*model, "--grammar", lark, *words)
        assert code == 2 and "its grammar failed: parser error" in err and "state>" not in err


@pytest.mark.slow
def test_several_texts(run, tiny_llama_dir, tiny_llama):
    """A beam search, and the best of several samples."""
    common = ("generate", "Once", "--model", tiny_llama_dir, "--max-new-tokens", 5, "--n", 2)
    code, out, _ = run(*common, "--num-beams", 3, "--length-penalty", 0.5)
    settings = {"max_new_tokens": 5, "n": 2, "num_beams": 3, "length_penalty": 0.5}
    result = kvjax.generate(tiny_llama, ["Once"], **settings)
    parts = [f"--- {n + 1} ({result.sequence_scores[n]:.4f})\n{result.text[n]}" for n in range(2)]
    assert code == 0 and out == "\n".join(parts) + "\n"
    drawn = ("--temperature", 0.9, "--best-of", 3, "--json")
    best = kvjax.generate(tiny_llama, ["Once"], max_new_tokens=5, n=2, best_of=3, temperature=0.9)
    report = json.loads(run(*common, *drawn)[1])
    each = [report, *report["others"]]
    assert [x["tokens"] for x in each] == best.tokens and [x["text"] for x in each] == best.text
    assert [x["sequence_score"] for x in each] == best.sequence_scores


def test_logprobs_and_logit_bias(run, tiny_llama_dir, tiny_llama):
    arguments = ("--max-new-tokens", 3, "--logprobs", 2, "--logit-bias", "70=1000", "--json")
    code, out, err = run("generate", "Once", "--model", tiny_llama_dir, *arguments)
    assert (code, err) == (0, "")
    result = json.loads(out)
    settings = {"max_new_tokens": 3, "logprobs": 2, "logit_bias": {70: 1000}}
    expected = kvjax.generate(tiny_llama, ["Once"], **settings).logprobs
    assert result["tokens"] == [70] * 3 and expected is not None
    assert result["logprobs"] == [
        {"logprob": score.logprob, "top_logprobs": [list(pair) for pair in score.top_logprobs]}
        for score in expected[0]
    ]


@pytest.mark.rare
def test_warning_beyond_the_trained_length(run, tiny_llama_dir, tiny_llama):
    """One line of warning, and a field of the statistics."""
    context = tiny_llama.config.context
    warning = "kvjax: warning: the text is 3 tokens longer than the model was trained for"
    for more in ((), ("--json",)):
        arguments = ("--model", tiny_llama_dir, "--dtype", "float32", "--max-new-tokens", 4, *more)
        code, out, err = run("generate", "a" * (context - 1), *arguments)
        assert code == 0 and err.count(warning) == 1
    assert json.loads(out)["stats"]["beyond_context"] == 3
    ring = (*arguments, "--cache", "sliding_window", "--window", 16)
    code, out, err = run("generate", "a" * (context - 1), *ring)
    assert (code, err) == (0, "") and json.loads(out)["stats"]["beyond_context"] == 0
    shape = ("plan", "--shape", "llama-135m", "--estimate", "--json", "--max-len")
    code, out, err = run(*shape, 8195)
    assert code == 0 and err.startswith(warning) and err.count("\n") == 1
    assert json.loads(out)["plan"]["beyond_context"] == 3
    assert run(*shape, 8192)[2] == ""


def test_home_folder_after_an_equals_sign(run, tmp_path, monkeypatch):
    """Shells do not expand ``~`` in ``--config=~/config.json``; every path option does."""
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", **small}))
    assert run("plan", "--config=~/config.json", "--max-len=8", "--estimate", "--json")[0] == 0
    assert GrammarOptions(json_schema="~/config.json").read()[1].startswith("{")
    assert_one_line_error(run("plan", "--config=~no-such-user/config.json"), "~no-such-user")
    assert_one_line_error(run("info", "--model=~no-such-user/model"), "~no-such-user")
    assert_one_line_error(run("generate", "--file=~/none"), str(tmp_path / "none"))
    assert_one_line_error(run("batch", "~/none", "--out=~/results"), str(tmp_path / "none"))


def test_sources_of_the_prompt(run, tiny_llama_dir, tmp_path):
    (tmp_path / "prompt.txt").write_text("Wörter\n", encoding="utf-8")
    common = ("--model", tiny_llama_dir, "--max-new-tokens", 5, "--json")
    result = [
        run("generate", "--prompt", "Wörter", *common),
        run("generate", "--file", tmp_path / "prompt.txt", *common),
        run("generate", "-", *common, stdin="Wörter\n".encode()),
        run("generate", *common, stdin="Wörter\n".encode()),
    ]
    tokens = [json.loads(out)["tokens"] for _, out, _ in result]
    assert tokens == [tokens[0]] * 4
    assert all(json.loads(out)["stats"]["prompt_tokens"] == 7 for _, out, _ in result)


def test_no_cache(run, tiny_llama_dir):
    common = ("generate", "Once", "--model", tiny_llama_dir, "--max-new-tokens", 6, "--json")
    cached, uncached = (json.loads(run(*common, *more)[1]) for more in ((), ("--no-cache",)))
    assert cached["tokens"] == uncached["tokens"]
    assert uncached["stats"]["cache_bytes"] == {}


def test_chat_template(run, tiny_llama_dir, tiny_llama):
    common = ("--model", tiny_llama_dir, "--max-new-tokens", 4, "--json")
    result = json.loads(run("generate", "hi", "--chat", *common)[1])
    ids = tiny_llama.chat([{"role": "user", "content": "hi"}])
    assert result["stats"]["prompt_tokens"] == len(ids)
    assert result["tokens"] == kvjax.generate(tiny_llama, [ids], max_new_tokens=4).tokens[0]


def test_stop_string(run, tiny_llama_dir, tiny_llama):
    whole = kvjax.generate(tiny_llama, ["Once"], max_new_tokens=12).text[0]
    stop = whole[5:7]
    common = ("--model", tiny_llama_dir, "--max-new-tokens", 12, "--stop", stop)
    assert run("generate", "Once", *common)[1] == whole[: whole.index(stop)] + "\n"


def test_dtype(run, tiny_llama_dir):
    common = ("--model", tiny_llama_dir, "--max-new-tokens", 3, "--json")
    wide, narrow = (
        json.loads(run("generate", "Once", "--dtype", dtype, *common)[1])["stats"]["cache_bytes"]
        for dtype in ("float32", "bfloat16")
    )
    assert wide["device"] > 1.5 * narrow["device"]


@pytest.mark.rare
def test_automatic_cache(run, tiny_llama_dir):
    """The statistics list the moved layers."""
    common = ("generate", "x" * 200, "--model", tiny_llama_dir, "--max-new-tokens", 70)
    whole = json.loads(run(*common, "--cache", "dynamic", "--json")[1])["stats"]
    assert whole["moves"] == []
    most = whole["cache_bytes"]["device"] - 1
    result = run(*common, "--cache", "auto", "--cache-memory", f"{most}B", "--json")[1]
    stats = json.loads(result)["stats"]
    assert stats["cache_bytes"]["device"] <= most and stats["cache_bytes"]["host"] > 0
    assert [move["place"] for move in stats["moves"]] == ["host"] * len(stats["moves"]) != []
    err = run(*common, "--cache", "auto", "--cache-memory", f"{most}B")[2]
    assert f"{len(stats['moves'])} layer" in err and "moved" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-new-tokens", 0), ("max_new_tokens", "0")),
        (("--max-new-tokens", "many"), ("--max-new-tokens", "valid int")),
        (("--temperature", -1), ("temperature", "-1")),
        (("--top-p", 1.5), ("top_p", "1.5")),
        (("--cache", "turbo"), ("turbo", "static")),
        (("--dtype", "float8"), ("float8", "float32")),
        (("--max-len", 8), ("8", "131")),
        (("--model", "nowhere/at/all"), ("nowhere/at/all",)),
        (("--prompt", "twice"), ("prompt", "once")),
        (("--file", "twice.txt"), ("prompt", "once")),
        (("--speed", 3), ("--speed",)),
        (("--cache", "auto"), ("auto", "memory")),
        (("--cache", "auto", "--cache-memory", "much"), ("much", "GiB")),
        (("--cache", "auto", "--cache-memory", "100B"), ("100 bytes of the device",)),
        (("--cache-memory", "1GB"), ("static", "memory")),
        (("--prefetch", 1), ("static", "prefetch")),
        (("--logprobs", 1), ("--logprobs", "--json")),
        (("--logprobs", 21, "--json"), ("logprobs", "21", "20")),
        (("--logit-bias", "70"), ("--logit-bias", "TOKEN=NUMBER", "70")),
    ],
)
def test_bad_option_is_one_line(run, tiny_llama_dir, arguments, words):
    model = () if "--model" in arguments else ("--model", tiny_llama_dir)
    assert_one_line_error(run("generate", "Once", *model, *arguments), *words)


def test_bad_prompt_is_one_line(run, tiny_llama_dir, tmp_path):
    common = ("generate", "--model", tiny_llama_dir)
    assert_one_line_error(run(*common, ""), "empty")
    assert_one_line_error(run(*common, stdin=b""), "empty")
    assert_one_line_error(run(*common, "-", stdin=b"\xff\xfe"), "standard input", "UTF-8")
    assert_one_line_error(run(*common, "--file", tmp_path / "none.txt"), "none.txt")
    assert_one_line_error(run(*common, "--file", tmp_path), str(tmp_path))
    assert_one_line_error(run(*common, "x" * 60, "--max-len", 64), "60", "128", "64")


def test_bad_checkpoint_is_one_line(run, tiny_llama_dir, tmp_path):
    assert_one_line_error(run("info", "--model", tmp_path), "config.json")
    for file in tiny_llama_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert_one_line_error(run("generate", "Once", "--model", tmp_path), "model.safetensors")


def test_no_prompt_at_a_terminal_is_one_line(run, monkeypatch):
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert_one_line_error(run("generate"), "no prompt")
    # How Python represents a byte that is not UTF-8 in an argument.
    assert_one_line_error(
        run("generate", "caf\udce9"), "the text is not valid Unicode: character 3"
    )


def test_unknown_command_is_one_line(run):
    assert_one_line_error(run("degenerate"), "degenerate")


def test_debug_variable_keeps_the_exception(monkeypatch, tiny_llama_dir):
    monkeypatch.setenv("KVJAX_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["kvjax", "generate", "", "--model", str(tiny_llama_dir)])
    with pytest.raises(ValueError, match="empty"):
        cli.main()


def test_bugs_keep_their_exception(monkeypatch, tiny_llama_dir):
    def broken(*_, **__):
        raise TypeError("a bug")

    monkeypatch.setattr(kvjax, "stream", broken)
    monkeypatch.setattr(sys, "argv", ["kvjax", "generate", "a", "--model", str(tiny_llama_dir)])
    with pytest.raises(TypeError, match="a bug"):
        cli.main()


def test_out_of_memory_is_one_line(run, monkeypatch, tiny_llama_dir):
    def full(*_, **__):
        return jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(2**42))())

    monkeypatch.setattr(kvjax, "stream", full)
    words = "RESOURCE_EXHAUSTED", "17592186044416 bytes"
    assert_one_line_error(run("generate", "a", "--model", tiny_llama_dir), *words)


@pytest.mark.slow
def test_quantized_cache(run, tiny_llama_dir, tiny_llama):
    arguments = ("generate", "Once", "--model", tiny_llama_dir, "--max-new-tokens", 5, "--json")
    code, out, _ = run(*arguments, "--key-bits", 8, "--value-bits", 4, "--group-size", 16)
    policy = kvjax.policy(key_bits=8, value_bits=4, group_size=16)
    expected = kvjax.generate(tiny_llama, ["Once"], max_new_tokens=5, cache=policy)
    assert code == 0 and json.loads(out)["tokens"] == expected.tokens[0]
    assert_one_line_error(
        run(*arguments, "--kv-bits", 5), "5 bits for keys: choose from 1, 2, 3, 4, 8"
    )
    assert_one_line_error(run(*arguments, "--kv-bits", 4, "--group-size", 48), "does not divide")
    code, out, _ = run("info", "--model", tiny_llama_dir, "--kv-bits", 8, "--json")
    assert json.loads(out)["cache_bytes_a_token"] == {"device": 2 * 2 * 2 * (16 + 2)}


@pytest.mark.slow
def test_all_commands_parse_policies_alike(run, tiny_llama_dir):
    words = ("--cache", "sliding_window,window=20,sinks=2,bits=8")
    options = ("--cache", "sliding_window", "--window", 20, "--sinks", 2, "--kv-bits", 8)
    for command in (
        ("generate", "x" * 40, "--max-new-tokens", 2),
        ("info",),
        ("plan", "--max-len", 64, "--estimate"),
    ):
        result = []
        for given in (words, options):
            code, out, _ = run(*command, "--model", tiny_llama_dir, *given, "--json")
            assert code == 0
            report = json.loads(out)
            result.append([report.get(name) for name in ("text", "cache_bytes_a_token", "plan")])
        assert result[0] == result[1]
    assert_one_line_error(
        run("info", *words, "--window", 9), "window is 20 in 'sliding_window,window=20"
    )
    assert_one_line_error(
        run("generate", "x", "--cache", "static", "--window", 9), "no setting 'window'"
    )


@pytest.mark.rare
def test_eval(run, tiny_llama_dir, tmp_path):
    text, plot = tmp_path / "text.txt", tmp_path / "plot.svg"
    text.write_text("Once upon a time there was a cache. " * 20, encoding="utf-8")
    arguments = ("eval", "--model", tiny_llama_dir, "--file", text, "--context", 200)
    # Two names for the same policy share their programs.
    named = "static,key_bits=8,value_bits=8"
    arguments = (*arguments, "--policy", "bits=8", "--policy", named)
    code, out, err = run(*arguments, "--plot", plot, "--time-steps", 2)
    assert (code, err) == (0, "")
    heading, full, first, second, *_ = out.splitlines()
    assert heading.startswith("policy") and "mean KL" in heading
    assert full.startswith("full precision")
    assert first.startswith("bits=8") and second.startswith(named)
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    code, out, _ = run(*arguments, "--json")
    assert code == 0 and set(json.loads(out)) == {"bits=8", named}
    assert_one_line_error(run("eval", "--model", tiny_llama_dir), "no text: give a --file")
    assert_one_line_error(run(*arguments, "--policy", "bits=9"), "9 bits for keys")


@pytest.mark.rare
def test_eval_recall(run):
    code, out, err = run("eval", "--recall", "--policy", "bits=4")
    assert (code, err) == (0, "")
    heading, row = out.splitlines()
    assert heading.split()[:4] == ["policy", "of", "bfloat16", "right"] and row[:6] == "bits=4"
    code, out, _ = run("eval", "--recall", "--policy", "bits=4", "--json")
    assert code == 0 and json.loads(out)["bits=4"]["share"] > 0.98
    refused = "--context does not apply to --recall, which has its own model"
    assert_one_line_error(run("eval", "--recall", "--context", 100), refused)


def test_plan(run, tiny_llama_dir, tmp_path):
    code, out, err = run("plan", "--model", tiny_llama_dir, "--max-len", 128, "--memory", "10MB")
    assert (code, err) == (0, "")
    assert "compiled for" in out and "largest batch" in out and "2 bits" in out
    arguments = ("--max-len", 128, "--estimate", "--json", "--kv-bits", 8, "--memory", "10MB")
    code, out, _ = run("plan", "--model", tiny_llama_dir, *arguments)
    result = json.loads(out)
    assert code == 0 and result["plan"]["source"] == "estimated"
    assert [fit["name"] for fit in result["fits"]] == ["this one"]
    assert result["plan"]["bytes_per_token"] == {"device": 2 * 2 * 2 * (16 + 2)}
    code, out, _ = run("plan", "--shape", "gpt2", "--json")
    assert code == 0 and json.loads(out)["plan"]["max_len"] == 1024
    config = tmp_path / "config.json"
    # A model is planned in the dtype in which it is loaded here; a config in its own.
    whole = json.loads((tiny_llama_dir / "config.json").read_text(encoding="utf-8"))
    del whole["hidden_act"], whole["torch_dtype"]
    config.write_text(json.dumps(whole | {"dtype": "bfloat16"}), encoding="utf-8")
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(models.load(tiny_llama_dir).params))
    for given, size in (("--model", tiny_llama_dir), weights), (("--config", config), weights / 2):
        code, out, _ = run("plan", *given, "--max-len", 128, "--estimate", "--json")
        assert code == 0 and json.loads(out)["plan"]["weights"] == size
    # The text part of a multimodal config.
    config.write_text(json.dumps({"model_type": "llava", "text_config": whole}), encoding="utf-8")
    code, out, _ = run("plan", "--config", config, "--dtype", "float32", "--estimate", "--json")
    assert code == 0 and json.loads(out)["plan"]["weights"] == weights
    small = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024, "vocab_size": 300}
    config.write_text(json.dumps({"model_type": "gpt2", **small}), encoding="utf-8")
    arguments = ("--config", config, "--batch", 64, "--cache", "auto", "--memory", "140MB")
    result = json.loads(run("plan", *arguments, "--json")[1])
    assert set(result["plan"]["cache"]) == {"device", "host"}
    assert result["plan"]["cache"]["device"] <= result["fits"][0]["allowed"]
    assert len(result["fits"]) > 1
    assert result["plan"]["weights"] + result["fits"][0]["allowed"] < 1.4e8
    config.write_text('{"hidden_size": 8}', encoding="utf-8")
    for refused, message in {
        ("--config", config): "the config has no num_attention_heads or n_head",
        ("--config", config, "--shape", "gpt2"): "give one of --model",
        ("--shape", "gpt2", "--max-len", 0): "max_len must be an integer >= 1, got 0",
        ("--shape", "gpt5"): "unknown shape 'gpt5': give one of gpt2, ",
        ("--shape", "gpt2", "--device", "v9"): "unknown device 'v9': choose one of v5e, v6e, v5p",
        ("--device", "v5e", "--memory", "16GB"): "--device has its own memory and compiler",
        ("--device", "v5e", "--memory-fraction", "0.5"): "omit --memory, --memory-fraction",
        ("--device", "v5e", "--cache", "auto"): "give one of the policies that it chooses from",
        ("--device", "v5e", "--mesh", "auto"): "--mesh auto depends on local devices",
        ("--shape", "gpt2", "--tokens", 9): "No such option: --tokens: did you mean --max-len?",
        (
            "--shape",
            "gpt2",
            "--cache",
            "bits=8,bits=4",
        ): "has bits twice: give one policy at a time",
        ("--shape", "gpt2", "--cache", "static,hybrid"): "has two names, static and hybrid: give",
        ("--shape", "gpt2", "--devices", 2): "--devices and --memory-fraction need --memory",
        ("--shape", "gpt2", "--memory", "lots"): "'lots' is not a size",
        ("--shape", "gpt2", "--memory", 80): "'80' has no unit: give 80GB",
        ("--shape", "gpt2", "--cache", "auto"): "--cache auto needs the memory of the device: give",
        ("--shape", "gpt2", "--dtype", "int8"): "dtype is 'int8'",
        ("--shape", "gpt2", "--max-len", 2000): "max_len is 2000, but the model has only 1024",
    }.items():
        assert_one_line_error(run("plan", *refused), message)
    config.write_text("{", encoding="utf-8")
    assert_one_line_error(run("plan", "--config", config), "not valid JSON")


def test_plan_for_a_device_explains_what_does_not_fit(run, monkeypatch):
    weights = []

    def plan_on(model, choice, *, device, batch, max_len):
        cache = {"device": int(1.05e9 if choice.keys == Raw() else 1e8)}
        numbers = dict(
            temporaries=10**7, code=0, bytes_moved=10**9, min_bytes_moved=10**9, layers=2
        )
        return DevicePlan("TPU v5 lite", 16 * 10**9, 8e11, weights[-1], cache, **numbers)

    monkeypatch.setattr("kvjax.memory.device_plan.plan_on", plan_on)
    command = "plan", "--shape", "gpt2", "--device", "v5e", "--max-len", 64
    sentences = [
        (
            15e9,
            "Too large: static. The memory of the device is 16 GB; the weights take 15 GB, which "
            "leaves 1 GB for the cache",
        ),
        (
            15.9e9,
            "Too large: all of these. The memory of the device is 16 GB; the weights take 15.9 GB",
        ),
        (
            17e9,
            "Too large: all of these. The memory of the device is 16 GB, less than the weights (17 "
            "GB): divide them among devices (--mesh, with --model or --config)",
        ),
        (1e9, ""),
    ]
    for taken, sentence in sentences:
        weights.append(int(taken))
        code, out, _ = run(*command)
        assert code == 0
        assert "compiled ahead of time for TPU v5 lite with 16 GB; nothing was executed" in out
        assert sentence in out and ("Too large" in out) == bool(sentence)
        assert "sends" not in out
    result = json.loads(run(*command, "--json")[1])
    static = result["plans"]["static"]
    assert result["mesh"] is None and static["bytes_moved"] == 10**9
    assert static["fits"] is True and static["total"] > 10**9 and static["seconds"] > 0


def test_plan_for_a_device_names_missing_packages(run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for device, words in {"v6e": "needs libtpu", "h200": "needs jax-cuda12-plugin and"}.items():
        given = "plan", "--shape", "gpt2", "--device", device, "--max-len", 64
        assert_one_line_error(run(*given), words)


def test_info(run, tiny_llama_dir):
    code, out, err = run("info", "--model", tiny_llama_dir, "--json")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["type"] == "llama" and result["layers"] == 2 and result["vocabulary"] == 258
    # Keys and values, 2 layers, 2 heads of 16 channels, 4 bytes each.
    assert result["cache_bytes_a_token"] == {"device": 2 * 2 * 2 * 16 * 4}
    assert result["devices"] and result["versions"]["kvjax"] == kvjax.__version__
    code, out, err = run("info", "--model", tiny_llama_dir)
    assert (code, err) == (0, "") and "cache bytes a token  512 B device" in out


@pytest.mark.parametrize(
    ("version", "target", "words"),
    [
        ((0, 7, 2), Target("gpu", (8, 9)), "JAX 0.12"),
        ((0, 10, 2), Target("gpu", (9, 0)), "attention by the Mosaic GPU kernel"),
        ((0, 12, 0), Target("gpu", (9, 0)), None),
        ((0, 7, 2), Target("gpu", (7, 5)), None),  # a T4 has no kernel with any JAX
        ((0, 7, 2), Target("gpu"), None),
        ((0, 7, 2), Target("tpu"), "JAX 0.8"),
        ((0, 10, 2), Target("tpu"), None),
        ((0, 7, 2), Target("cpu"), None),
    ],
)
def test_info_shows_what_a_newer_jax_adds(run, tiny_llama_dir, monkeypatch, version, target, words):
    monkeypatch.setattr(compat, "JAX", version)
    monkeypatch.setattr("kvjax.cli.info_command.current_target", lambda: target)
    result = json.loads(run("info", "--model", tiny_llama_dir, "--json")[1])["upgrade"]
    assert result is None if words is None else words in result and len(result) < 120
    out = run("info", "--model", tiny_llama_dir)[1]
    assert (f"upgrade {result}" in " ".join(out.split())) == (words is not None)


def test_info_of_the_embedded_model(run):
    code, out, _ = run("info", "--json")
    assert code == 0
    assert json.loads(out)["context"] >= 1024


def test_help_and_version(run):
    for arguments in (
        (),
        ("--help",),
        ("generate", "--help"),
        ("info", "--help"),
        ("eval", "--help"),
    ):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "") and "Usage" in out
    assert run("--version") == (0, f"kvjax {kvjax.__version__}\n", "")


def test_help_loads_neither_flax_nor_tokenizers():
    program = (
        "import sys; sys.argv = ['kvjax', '--help']\n"
        "from kvjax.cli import main\n"
        "try: main()\n"
        "except SystemExit: print({'flax', 'tokenizers', 'matplotlib'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.endswith("set()\n"), result.stdout + result.stderr


@pytest.mark.rare
def test_compilation_cache_of_the_module(tiny_llama_dir, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    environment["LOCALAPPDATA"] = str(tmp_path)
    for name in list(environment):
        if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")):
            del environment[name]
    command = [sys.executable, "-m", "kvjax", "generate", "Once", "--model", str(tiny_llama_dir)]
    command += ["--max-new-tokens", "3"]

    def run_once():
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result, {str(p) for p in tmp_path.rglob("*-cache")}

    first, kept = run_once()
    second, kept_later = run_once()
    assert kept and kept == kept_later
    assert first.stdout == second.stdout
    assert second.stderr.count("\n") == 1  # only the statistics


@pytest.mark.slow
def test_closed_pipe_leaves_no_traceback(tiny_llama_dir):
    command = f"{sys.executable} -m kvjax info --model {tiny_llama_dir} | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    # JAX's GPU plugin prints these without a GPU.
    other = re.compile(r"WARNING: All log messages before absl|I\d+ .* cudart_stub\.cc:")
    assert [line for line in result.stderr.splitlines() if not other.match(line)] == []


@contextlib.contextmanager
def encoded_streams(monkeypatch, encoding, stdin=b""):
    """Replace the standard streams by streams of this encoding; yields what is written."""
    out, err = io.BytesIO(), io.BytesIO()
    for name, stream in (("stdin", io.BytesIO(stdin)), ("stdout", out), ("stderr", err)):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(stream, encoding=encoding))
    yield out, err


@pytest.mark.slow(but=("utf-8", "ascii"))
@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_characters_that_the_console_lacks(monkeypatch, encoding, tiny_llama_dir, tmp_path):
    """Characters that the console lacks are escaped; input from a pipe is UTF-8."""
    word, model = "é😀ж", tmp_path / "ж😀"
    model.symlink_to(tiny_llama_dir)
    # typer writes UTF-8 to an ASCII stream.
    shown = word if encoding != "cp1252" else "é\\U0001f600\\u0436"
    written_as = "utf-8" if encoding == "ascii" else encoding

    def printed(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["kvjax", *map(str, arguments)])
        with encoded_streams(monkeypatch, encoding, stdin) as (out, err):
            with pytest.raises(SystemExit) as leaving:
                cli.main()
            return leaving.value.code, *(x.getvalue().decode(written_as) for x in (out, err))

    said = ("generate", "a", "--model", model, "--choice", word, "--max-new-tokens", 30)
    code, out, err = printed(*said)
    assert (code, out) == (0, f"{shown}\n") and "new tokens" in err
    code, out, _ = printed(*said, "--json")
    assert code == 0 and json.loads(out)["text"] == word
    code, out, _ = printed("info", "--model", model)
    assert code == 0 and str(tmp_path) in out
    code, out, _ = printed("info", "--model", model, "--json")
    assert code == 0 and json.loads(out)["model"] == str(model)
    code, out, err = printed("info", "--model", tmp_path / "no😀")
    assert code == 2 and out == "" and err.startswith("kvjax: error: ")
    lines = f"/system {word}\n/nope{word}\n".encode()
    code, out, err = printed("chat", "--model", tiny_llama_dir, stdin=lines)
    assert (code, out) == (2, f"{shown}\n") and f"no command /nope{shown}" in err
    prompts, results = tmp_path / "prompts", tmp_path / "results"
    prompts.write_text(json.dumps({"id": word, "prompt": "a"}, ensure_ascii=False), "utf-8")
    batch = ("--model", model, "--max-new-tokens", 1, "--max-seq-len", 64, "--max-batch-size", 1)
    code, out, err = printed("batch", prompts, "--out", results, *batch)
    assert (code, out) == (0, "") and json.loads(results.read_text("utf-8"))["id"] == word


def test_closed_streams(monkeypatch, tiny_llama_dir):
    """No traceback if a stream is closed at the start or by its reader."""
    arguments = ["--model", str(tiny_llama_dir), "--max-new-tokens", "3"]
    monkeypatch.setattr(sys, "argv", ["kvjax", "generate", "Once", *arguments])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 0
    monkeypatch.setattr(sys, "argv", ["kvjax", "chat", *arguments[:2]])
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 0
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "argv", ["kvjax", "generate", "Once", *arguments])
    with encoded_streams(monkeypatch, "utf-8") as (_, err):
        monkeypatch.setattr(sys, "stdout", stdout := os.fdopen(write, "w"))
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        assert leaving.value.code == 1 and err.getvalue() == b""
    with contextlib.suppress(BrokenPipeError):
        stdout.close()


@pytest.mark.slow
def test_mesh(run, tiny_llama_dir, tiny_llama, full):
    arguments = ("--model", tiny_llama_dir, "--dtype", "float32", "--max-new-tokens", 12)
    expected = kvjax.generate(tiny_llama, "abc", max_new_tokens=12).text[0]
    # tests/test_mesh_generate.py tests the computation on meshes.
    more = ("tensor=4", "data=2,sequence=2") if full else ()
    for mesh in ("auto", "data=2, tensor=2,sequence=2", *more):
        code, out, _ = run("generate", "abc", *arguments, "--mesh", mesh)
        assert (code, out) == (0, expected + "\n")
    for wrong, message in {
        "tensor": "a mesh must be auto, or sizes of axes such as data=2,tensor=4",
        "model=2": "the mesh has an axis 'model': kvjax supports data, tensor, sequence",
        "stage=2": "has no pipeline parallelism",
        "tensor=64": "tensor=64 x sequence=1 needs 64 devices, but there are 8 (XLA_FLAGS=",
    }.items():
        assert_one_line_error(run("generate", "abc", *arguments, "--mesh", wrong), message)


def test_plan_for_a_mesh(run, tiny_llama_dir):
    plan = ("plan", "--model", tiny_llama_dir, "--max-len", 128, "--batch", 4)
    code, out, err = run(*plan, "--mesh", "tensor=2,data=2")
    assert (code, err) == (0, "")
    assert "4 x 128 tokens, on each of 4 devices (tensor=2,data=2)" in out
    one, many = (
        json.loads(run(*plan, "--estimate", "--json", *more)[1])["plan"]
        for more in ((), ("--mesh", "tensor=2,data=2"))
    )
    # The plan may have more devices than this machine; every device has whole norms.
    assert json.loads(run(*plan, "--json", "--mesh", "sequence=128")[1])["plan"]["devices"] == 128
    assert (one["devices"], many["devices"]) == (1, 4)
    assert many["cache"]["device"] == one["cache"]["device"] / 4
    assert one["weights"] / 2 < many["weights"] < 0.51 * one["weights"]
    assert_one_line_error(run(*plan, "--mesh", "data=3"), "4 rows can't be divided among data=3")
    assert_one_line_error(run(*plan, "--mesh", "data=2", "--memory", "1GB"), "omit --memory")
    assert_one_line_error(run(*plan, "--mesh", "auto"), "give a size, such as tensor=4")
    assert one["temporaries"] / 5 < many["temporaries"] < one["temporaries"] / 3
    assert_one_line_error(
        run("plan", "--shape", "gpt2", "--mesh", "tensor=2"), "plans for a mesh need a model"
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_progress_and_interrupt_on_a_terminal(tiny_llama_dir, tmp_path):
    """Long work shows progress on standard error; an interrupt ends it with exit code 130."""
    import pty  # not on every system

    ours, theirs = pty.openpty()
    # The process that started the tests may ignore interrupts, which is inherited.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from kvjax.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "eval", "--model", str(tiny_llama_dir)]
    (tmp_path / "text").write_text("a long text " * 5000)
    command += ["--file", str(tmp_path / "text"), "--policy", "static", "--context", "64"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    seen = b""
    while b"evaluating" not in seen or b"%" not in seen:
        more = os.read(ours, 4096)
        assert more, seen
        seen += more
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate()
    with contextlib.suppress(OSError):  # the closed terminal's last output
        while more := os.read(ours, 4096):
            seen += more
    os.close(ours)
    assert (running.returncode, out) == (130, "")
    shown, hidden = seen.rindex(b"\x1b[?25h"), seen.rindex(b"\x1b[?25l")
    assert shown > hidden and b"Traceback" not in seen


class ImmediateTimer:
    """A timer that fires at once; ``delays``: the requested delays."""

    delays: ClassVar[list[float]] = []

    def __init__(self, seconds, call):
        self.delays.append(seconds)
        self.start = call

    def cancel(self):
        pass

    join = cancel


@pytest.fixture
def terminal(monkeypatch):
    """Both output streams as one terminal, where progress is shown at once."""
    monkeypatch.setattr(output.threading, "Timer", ImmediateTimer)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    drawn = rich.progress.Progress.update

    def at_once(display, *args, **fields):
        drawn(display, *args, **fields)
        if display.live.is_started:
            display.refresh()

    def begin():
        seen = io.StringIO()
        seen.isatty = lambda: True
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, seen)
        return seen

    monkeypatch.setattr(rich.progress.Progress, "update", at_once)
    return begin


def test_chat_shows_progress_until_the_answer(terminal, tiny_llama):
    """Prefill and compilation are shown, and removed when the answer starts."""
    # No other test has this length, so it compiles.
    chat = kvjax.Chat(tiny_llama, max_len=77, max_new_tokens=6, eos_token_ids=[])
    talk = ChatLoop(chat, interactive=True)
    for warm in (False, True):
        seen = terminal()
        ImmediateTimer.delays.clear()
        talk._answer(chat.send("ab"))
        assert set(ImmediateTimer.delays) == {output.SHORT_DELAY}
        seen, answer = seen.getvalue(), chat.turns[-1].answer
        assert "reading the prompt" in seen and "generating" in seen
        for what in ("reading the prompt", "generating"):
            assert (f"{what}: compiling (once)" in seen) != warm
        # The whole answer follows the last progress line, on its own line.
        *_, line = seen.partition(answer)[0].rpartition("\x1b[2K")
        assert line == "" and seen.partition(answer)[2].startswith("\n")


def test_first_piece_without_a_terminal(capfd):
    taken = []
    pieces = (taken.append(n) or n for n in range(4))
    assert output.first_pieces(pieces, "reading") == [0] and taken == [0]
    assert output.first_pieces(iter(()), "reading") == []
    assert capfd.readouterr() == ("", "")


def run_eval(monkeypatch, tiny_llama_dir, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a cache. " * 20, encoding="utf-8")
    arguments = ["--model", str(tiny_llama_dir), "--file", str(text), "--context", "200"]
    arguments += ["-p", "static", "--time-steps", "2"]
    monkeypatch.setattr(sys, "argv", ["kvjax", "eval", *arguments])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert leaving.value.code == 0


def test_eval_shows_progress(monkeypatch, terminal, tiny_llama_dir, tmp_path):
    """The policy, the window and the percentage."""
    seen = terminal()
    run_eval(monkeypatch, tiny_llama_dir, tmp_path)
    seen, _, table = seen.getvalue().rpartition("policy ")
    assert "full precision" in table and "window" not in table
    shown = re.findall(r"evaluating (full precision|static), window (\d) of (\d)", seen)
    count = int(shown[0][2])
    assert count > 1
    names = ("full precision", "static")
    order = [(name, str(n + 1), str(count)) for n in range(count) for name in names]
    assert list(dict.fromkeys(shown)) == order
    percentages = [int(each) for each in re.findall(r"evaluating .*?(\d+)%", seen)]
    assert percentages == sorted(percentages) and percentages[0] == 0 and percentages[-1] == 100
    assert "timing steps of static" in seen and "reading the text" in seen


def test_eval_prints_lines_of_progress_without_a_terminal(
    monkeypatch, capfd, tiny_llama_dir, tmp_path
):
    monkeypatch.setattr(output, "LINE_INTERVAL", 0.0)
    run_eval(monkeypatch, tiny_llama_dir, tmp_path)
    out, err = capfd.readouterr()
    assert "window" not in out and out.startswith("policy")
    first, *_, last = (line for line in err.splitlines() if line.startswith("kvjax: "))
    assert first == "kvjax: evaluating full precision, window 1 of 3 (0%)"
    assert last == "kvjax: timing steps of static (50%)"


def test_progress_callback_receives_ordered_events(tiny_llama_dir):
    events = []
    with progress_callback(lambda *event: events.append(event)):
        lm = models.load(str(tiny_llama_dir), dtype="float32")
        settings = {"prefill_chunk": 16, "max_new_tokens": 3, "eos_token_ids": ()}
        kvjax.generate(lm, ["a" * 40], **settings)
    kvjax.generate(lm, ["a" * 40], **settings)
    assert [event for event in events if event[0] == "reading the prompt"] == [
        ("reading the prompt", n, 3) for n in (1, 2, 3)
    ]
    loading = [event[1:] for event in events if event[0] == "loading"]
    assert loading == [(n, len(loading)) for n in range(len(loading))]
    assert events[-1] == ("generating", 3, 3)
