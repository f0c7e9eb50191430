"""``kvjax bench``: what it counts, what it asks, and what it leaves out; never how fast."""

import dataclasses
import json
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax import bench, cli, models
from kvjax.bench import measuring, timing
from kvjax.bench.measuring import decode_rows, part_rows
from kvjax.cli import bench_command
from kvjax.layouts import Growing
from kvjax.memory import shapes as model_shape
from kvjax.memory.sizes import weight_bytes
from tests.checkpoints import write_llama

BANDWIDTH = bench.Bandwidth(1e9, 5e8, {}, 4096)
QUICK: dict[str, Any] = {"steps": 3, "repeats": 2, "bandwidth": BANDWIDTH}


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    """A model of one layer, for each is one more to compile in every program."""
    folder = tmp_path_factory.mktemp("shallow") / "llama"
    return models.load(str(write_llama(folder, num_hidden_layers=1)), dtype="float32")


@pytest.fixture(scope="module")
def found(shallow):
    policies = {
        "static": "static",
        "ring": kvjax.policy("sliding_window", window=16, slack=2),
        "8 bits": kvjax.policy(bits=8, block=16, group_size=16),
        "dynamic": kvjax.CachePolicy(Growing(start=16)),
    }
    return bench.measure(shallow, policies, prompts=(5, 90), batches=(2,), **QUICK)


def test_a_cell_for_every_prompt_and_policy(found):
    names = ("static", "ring", "8 bits", "dynamic")
    wanted = [(2, p, name) for p in (5, 90) for name in names]
    assert [(c.batch, c.prompt, c.policy) for c in found.cells] == wanted
    for cell in found.cells:
        assert cell.steps == 2  # the ring can take back no more
        assert len(cell.ms_per_run) == 2 and min(cell.ms_per_run) <= cell.ms <= max(cell.ms_per_run)
        read = cell.weight_bytes + cell.cache_bytes
        assert cell.bandwidth * cell.ms / 1000 == pytest.approx(read)
        assert cell.bandwidth_fraction == pytest.approx(cell.bandwidth / 1e9)
        assert cell.tokens_per_second * cell.ms == pytest.approx(1000 * cell.batch)
        assert cell.prefill_tokens_per_second * cell.prefill_ms == pytest.approx(
            1000 * cell.batch * cell.prompt
        )
        assert cell.split.weights > 0
    assert found.skipped == () and found.bandwidth == BANDWIDTH and found.dtype == "float32"
    assert found.peak_bytes is None or found.peak_bytes > 0


def test_bytes_are_those_that_are_stored(found, shallow):
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(shallow.params))
    token = 2 * 1 * 2 * 16 * 4  # keys and values, layers, heads, channels, bytes
    for cell in found.cells:
        assert cell.weight_bytes == weights  # the embedding is the head
        tokens = cell.prompt + 1  # that the first of two steps sees, itself among them
        held = {
            "static": tokens * token,
            "dynamic": tokens * token,
            "ring": min(tokens, 16) * token,
            # Two blocks raw, the rest in 16 codes of a byte and a scale of two.
            "8 bits": min(tokens, 32) * token + max(tokens - 32, 0) * 2 * 1 * 2 * (16 + 2),
        }
        assert cell.cache_bytes == cell.batch * held[cell.policy]
        assert set(cell.allocated) == {"device"}
    raw = {c.policy: c for c in found.cells if c.prompt == 90}
    assert raw["static"].capacity == raw["dynamic"].capacity == 96
    assert raw["static"].allocated["device"] == raw["dynamic"].allocated["device"]
    assert raw["static"].allocated["device"] == 2 * 96 * token


def test_rows_that_are_looked_up(tmp_path):
    """Of an embedding that is not the head, and of learned positions, one row a text."""
    lm = models.load(str(write_llama(tmp_path / "untied", tie_word_embeddings=False)))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params))
    table = lm.params["model"]["embed_tokens"]["weight"]
    row = table.nbytes // len(table)
    assert bench.weight_bytes_read(lm.params, 3) == weights - table.nbytes + 3 * row
    assert bench.weight_bytes_read(lm.params, 1000) == weights
    learned = {"wte": {"weight": np.zeros((10, 4))}, "wpe": {"weight": np.zeros((8, 4))}}
    assert bench.weight_bytes_read(learned, 2) == 8 * (10 * 4 + 2 * 4)


def test_a_difference_below_nothing_is_shown_beyond_the_noise():
    assert timing.difference([3.0, 5.0, 4.0], [1.0, 1.0, 1.0]) == 3000
    assert timing.difference([1.0, 1.4, 1.0], [1.2, 1.2, 1.2]) == 0
    assert timing.difference([1.0, 1.1, 1.0], [2.0, 2.0, 2.0]) == -1000


@pytest.mark.slow
def test_without_prefill_and_with_a_sampler(tiny_llama):
    sampling: dict[str, Any] = {"temperature": 0.8, "top_k": 4, "top_p": 0.9, "min_p": 0.01}
    told: list[str] = []
    found = bench.measure(
        tiny_llama, {"a": "static"}, prompts=[62, 62], prefill=False, callback=told.append,
        **sampling, **QUICK,
    )  # fmt: skip
    (cell,) = found.cells
    assert (cell.prefill_ms, cell.prefill_tokens_per_second, cell.steps) == (None, None, 3)
    assert told == ["1 x 62 tokens"]
    assert [row[-3:-1] for row in part_rows(found)] == [["prefill ms", "tokens/s"], ["-", "-"]]
    assert len(decode_rows(found)) == 2
    split = dataclasses.replace(cell.split, attention=-0.2)
    noisy = dataclasses.replace(found, cells=(dataclasses.replace(cell, split=split),))
    assert part_rows(noisy)[1][3] == "–"


def test_prompts_that_the_model_is_not_made_for(tiny_llama):
    found = bench.measure(tiny_llama, {"a": "static"}, prompts=(600, 8), **QUICK)
    assert [cell.prompt for cell in found.cells] == [8]
    assert found.skipped == (
        "a prompt of 600 tokens is left out: the model was trained for 512 tokens",
    )
    learned = SimpleNamespace(position_limit=64)
    kept, left_out = measuring._fitting(learned, [60, 61, 62], 3)
    assert kept == [60, 61]
    assert "62 tokens is left out: with 3 steps it exceeds the model's 64" in left_out[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policies": {}}, "no policies"),
        ({"prompts": ()}, "no prompts"),
        ({"prompts": (0,)}, "prompts must be an integer >= 1, got 0"),
        ({"batches": (1.5,)}, "batches must be an integer"),
        ({"steps": 0}, "steps must be"),
        ({"steps": 129}, "at most 128"),
        ({"repeats": 0}, "repeats must be"),
        ({"prompts": (600,)}, "nothing to measure: a prompt of 600 tokens is left out"),
        ({"temperature": -1.0}, "temperature must be"),
        ({"policies": {"a": kvjax.policy("sliding_window", window=4, slack=0)}}, "without slack"),
    ],
)
def test_wrong_arguments_are_refused(tiny_llama, changes, message):
    given: dict[str, Any] = {"policies": {"a": "static"}, "prompts": (5,)} | QUICK | changes
    with pytest.raises(ValueError, match=message):
        bench.measure(tiny_llama, given.pop("policies"), **given)


def test_logits_that_are_no_numbers_are_told(tiny_llama):
    broken = dataclasses.replace(
        tiny_llama, params=jax.tree.map(lambda x: x * np.nan, tiny_llama.params)
    )
    with pytest.raises(kvjax.NonFiniteError):
        bench.measure(broken, {"a": "static"}, prompts=(5,), **QUICK)


def test_bandwidth_is_the_best_of_its_methods():
    found = bench.measure_bandwidth(2**16, repeats=1)
    copies = {name: speed for name, speed in found.methods.items() if name in COPIES}
    reads = {name: speed for name, speed in found.methods.items() if name not in COPIES}
    assert set(copies) == COPIES and {"jax sum", "jax max"} <= set(reads)
    assert found.read == max(reads.values()) and found.copy == max(copies.values())
    assert found.array_bytes == 2**16 and min(found.methods.values()) > 0
    with pytest.raises(ValueError, match="array_bytes must be"):
        bench.measure_bandwidth(10)


COPIES = {"jax copy", "jax add"}


@pytest.fixture
def run(monkeypatch, capfd):
    """Run ``kvjax bench`` in this process: exit code, standard output, standard error."""
    monkeypatch.setattr(measuring, "measure_bandwidth", lambda: BANDWIDTH)

    def run_bench(*arguments):
        arguments = (*arguments, "--steps", 2, "--repeats", 1)
        monkeypatch.setattr(sys, "argv", ["kvjax", "bench", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capfd.readouterr()
        return leaving.value.code, out, err

    return run_bench


@pytest.mark.rare
def test_the_command(run, tiny_llama_dir, tmp_path):
    plot = tmp_path / "plot.svg"
    arguments = ("--model", tiny_llama_dir, "--batch", "1,2", "--prompt", "6,12,600")
    arguments += ("--cache", "static,bits=8,group_size=16,block=16", "--plot", plot)
    code, out, err = run(*arguments, "--json")
    assert code == 0 and err.splitlines() == [
        f"{batch} x {prompt} tokens" for batch in (1, 2) for prompt in (6, 12)
    ]
    found = json.loads(out)
    assert len(found["cells"]) == 4 and len(found["skipped"]) == 1
    fields = {field.name for field in dataclasses.fields(bench.Cell)}
    assert set(found["cells"][0]) == fields
    assert set(found["cells"][0]["split"]) == {"weights", "attention", "sampling", "overhead"}
    assert found["bandwidth"]["read"] == 1e9 and found["jax"] == jax.__version__
    drawn = plot.read_text(encoding="utf-8")
    assert drawn.startswith("<?xml")
    code, out, _ = run(*arguments, "--no-prefill")
    lines = out.splitlines()
    assert code == 0 and sum(line.startswith("1 x 6 ") for line in lines) == 2
    assert "ms a step" in out and "attention" in out and "this device reads 1 GB/s" in out
    assert lines[-1] == found["skipped"][0]


@pytest.mark.rare
def test_a_shape_with_random_weights(run, monkeypatch):
    small = model_shape.ModelShape(2, 64, 96, 4, 2, 16, 300, context=128)
    monkeypatch.setitem(model_shape.SHAPES, "small", small)
    code, out, _ = run("--shape", "small", "--prompt", "9", "--dtype", "float32", "--json")
    assert code == 0
    (cell,) = json.loads(out)["cells"]
    layer = 64 * (64 + 2 * 32 + 64) + 3 * 64 * 96 + 2 * 64
    # The embedding is not the head, so of it there is one row.
    assert cell["weight_bytes"] == 4 * (2 * layer + 64 + 300 * 64 + 64)
    monkeypatch.setattr(bench_command, "_memory", lambda: 10**5)
    assert "but the memory has only 100 kB" in run("--shape", "small")[2]


def test_shapes_of_models_of_today():
    """Their weights are as many as their cards say, and windows are where they have them."""
    billions = {
        "llama-135m": 0.1345, "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen3-0.6b": 0.596,
        "qwen3-8b": 8.19, "gemma-3-1b": 1.0, "gemma-3-4b": 3.88, "mistral-7b": 7.25,
    }  # fmt: skip
    for name, count in billions.items():
        shape = model_shape.SHAPES[name]
        assert weight_bytes(shape) / 2e9 == pytest.approx(count, rel=0.005), name
    windows = model_shape.SHAPES["gemma-3-4b"].windows
    assert windows.count(1024) == 29 and windows.count(None) == 5


def test_policies_in_words():
    assert bench_command._split_policies(None) == ["static"]
    words = ["static,quantized", "bits=2", "sliding_window,window=128,bits=8,dynamic"]
    assert bench_command._split_policies(words) == [
        "static", "quantized", "bits=2", "sliding_window,window=128,bits=8", "dynamic",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "many"), "--batch is 'many': give integers separated by commas"),
        (("--prompt", "0"), "prompts must be an integer >= 1, got 0"),
        (("--cache", "turbo"), "unknown cache policy 'turbo'"),
        (("--cache", "static,speed=9"), "settings are"),
        (("--kv-bits", "5"), "5 bits for keys"),
        (("--xtc-threshold", "0.6"), "xtc_threshold must be from 0 to 0.5, got 0.6"),
        (("--shape", "gpt5"), "unknown shape 'gpt5': give one of gpt2, "),
        (("--shape", "gpt-neox-20b"), "can't make gpt-neox-20b with random weights"),
        (("--shape", "gpt2"), "can't make gpt2 with random weights"),
        (("--shape", "gpt2", "--dtype", "int8"), "dtype is 'int8'"),
        (("--shape", "gpt2", "--model", "here"), "give either --model"),
    ],
)
def test_what_a_user_can_mend_is_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("kvjax: error: ") and message in err


@pytest.mark.rare
def test_programs_are_compiled_in_the_first_round_alone(tiny_llama):
    """What follows finds them: new prompts of a bucket, and a second time."""
    jax.clear_caches()  # so this test is the last
    first, second = (
        bench.measure(tiny_llama, {"a": "static"}, prompts=(20, 30), **QUICK) for _ in range(2)
    )
    assert [cell.compilations > 0 for cell in first.cells] == [True, False]
    assert first.cells[0].compile_seconds > 0
    assert [cell.compilations for cell in second.cells] == [0, 0]
