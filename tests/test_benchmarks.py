"""The benchmark runs, checks what it times, and writes what its README says. No times here."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks import (
    bandwidth,
    capacity,
    compiling,
    decode,
    devices,
    endless,
    guided,
    here,
    memory,
    paging,
    peers,
    placement,
    quantized,
    scaling,
    serving,
    speculation,
    stacks,
    tokens,
)
from benchmarks.checkpoint import TINY, Sizes, shapes, write_checkpoint
from benchmarks.decode import main, parse_cells
from benchmarks.process import Worker, WorkerError
from benchmarks.serving_ways import continuous, transformers, work_of
from kvjax import models
from tests import texts

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None or importlib.util.find_spec("transformers") is None,
    reason="needs torch and transformers (the extra `oracle`)",
)


@pytest.fixture(autouse=True)
def one_layer(monkeypatch):
    """Trial runs here are of one layer: every layer compiles anew."""
    small = dataclasses.replace(TINY, num_hidden_layers=1)
    for module in (capacity, decode, quantized, scaling):
        monkeypatch.setattr(module, "TINY", small)


def read_results(folder: Path) -> dict:
    for name in ("decode.png", "speedup.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")
    assert "| dtype |" in (folder / "decode.md").read_text()
    return json.loads((folder / "decode.json").read_text())


def check_engine(found: dict, repeats: int) -> None:
    for name in ("milliseconds_per_token", "tokens_per_second", "bytes_per_step"):
        assert found[name] > 0
    assert len(found["decode_seconds"]) == repeats
    assert len(found["prefill_seconds"]) == len(found["prefill_init_seconds"]) == 1
    assert found["decode_peak_bytes"] > 0
    assert found["prefill_peak_bytes"] > 0


@pytest.mark.rare
def test_quick_run_without_a_peer(tmp_path, capsys):
    arguments = ["--quick", "--peers", "none", "--cells", "2x150", "--dtypes", "float32,bfloat16"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    results = read_results(tmp_path)
    places = [(cell["dtype"], cell["batch"], cell["prompt"]) for cell in results["cells"]]
    assert places == [("float32", 2, 150), ("bfloat16", 2, 150)]
    assert results["bandwidth"]["bytes_per_second"] > 0
    assert set(results["versions"]) == {"python", "kvjax", "jax"}
    assert results["device"] and results["threads"] >= 1
    assert "--out" not in results["command"]
    for cell in results["cells"]:
        assert cell["check"]["passed"]
        assert set(cell["check"]["difference"]) == {"kvjax-uncached"}
        assert set(cell["engines"]) == {"kvjax"}
        check_engine(cell["engines"]["kvjax"], results["settings"]["repeats"])
        assert cell["engines"]["kvjax"]["uncached_seconds"]
    assert [found["dtype"] for found in results["capacity"]] == ["float32", "bfloat16"]
    for found in results["capacity"]:
        assert found["max_lens"] == [64, 256]
        assert [len(seconds) for seconds in found["seconds"]] == [2, 2]
    assert results["claims"] and not any(claim["required"] for claim in results["claims"])
    assert "kvjax without a cache" in " ".join(capsys.readouterr().out.split())


@pytest.mark.oracle
@needs_transformers
def test_quick_run_beside_transformers(tmp_path):
    command = ["-m", "benchmarks.decode", "--quick", "--cells", "2x150", "--repeats", "3"]
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, *command, "--out", str(tmp_path)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = read_results(tmp_path)
    assert {"torch", "transformers"} <= set(results["versions"])
    for cell in results["cells"]:
        assert list(cell["engines"]) == ["kvjax", *peers.TRANSFORMERS]
        assert set(cell["check"]["difference"]) == {
            "kvjax",
            "kvjax-uncached",
            *peers.TRANSFORMERS[:-1],
        }
        assert cell["check"]["passed"]
        for found in cell["engines"].values():
            check_engine(found, 3)
        weights = {found["bytes_per_step"] for found in cell["engines"].values()}
        assert len(weights) == 1, "all engines hold the same weights"
    assert all(results["cells"][0]["check"]["greedy_equal"].values())
    assert any(claim["claim"].startswith("a step against") for claim in results["claims"])


def test_checkpoint_is_the_same_every_time(tmp_path):
    write_checkpoint(tmp_path / "a", TINY, seed=3)
    write_checkpoint(tmp_path / "b", TINY, seed=3)
    one, two = (tmp_path / name / "model.safetensors" for name in "ab")
    assert one.read_bytes() == two.read_bytes()
    tensors = load_file(one)
    assert {name: x.shape for name, x in tensors.items()} == shapes(TINY)
    assert all(x.dtype == np.float32 for x in tensors.values())


def test_full_size_model_is_the_one_described():
    weights = sum(int(np.prod(shape)) for shape in shapes(Sizes()).values())
    assert weights == 134_515_008
    assert Sizes().cache_bytes_per_token(4) == 46_080


@pytest.mark.parametrize("text", ["64", "1x", "0x64", "1x64,", "1x64;2x3"])
def test_bad_cells_are_refused(text, capsys):
    with pytest.raises(ValueError, match="a cell is BATCHxPROMPT"):
        parse_cells(text)
    assert main(["--quick", "--peers", "none", "--cells", text]) == 2
    assert "a cell is BATCHxPROMPT" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtypes", "float8"], "unknown dtypes ['float8']"),
        (["--repeats", "0"], "repeats must be at least 1, got 0"),
        (["--pass-repeats", "0"], "pass_repeats must be at least 1, got 0"),
        (["--peers", "llama"], "unknown peers ['llama']"),
        (["--python", "openvino"], "--python takes NAME=PATH"),
    ],
)
def test_bad_options_are_refused(arguments, message, capsys):
    assert main(["--quick", "--peers", "none", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_that_fails_says_why(tmp_path):
    absent = Worker("kvjax", tmp_path / "absent", "float32", [sys.executable])
    with absent, pytest.raises(WorkerError, match="worker kvjax failed"):
        absent.ready()
    script = "import sys; print('out of luck', file=sys.stderr); sys.exit(7)"
    dead = Worker("kvjax", tmp_path, "float32", [sys.executable, "-c", script])
    with dead, pytest.raises(WorkerError, match="ended with code 7:\nout of luck"):
        dead.ready()


def test_peak_memory_sees_an_array_come_and_go():
    if not memory.mark_peak():
        pytest.skip("this system can't reset a process's high-water mark")
    before = memory.peak_bytes()
    np.ones(2**23).sum()
    assert memory.peak_bytes() - before > 2**25


def test_bandwidth_is_a_positive_number_for_every_method():
    found = bandwidth.cpu_bandwidth(2**22, repeats=1) | bandwidth.jax_bandwidth(2**22, repeats=1)
    assert len(found) == 4 and min(found.values()) > 0


@pytest.mark.rare
def test_a_ring_reads_on_beyond_its_window(monkeypatch):
    """`benchmarks.endless` on an eighth of the length: as good as fresh, with flat memory."""
    monkeypatch.setattr(endless, "read_parts", texts.parts)
    results = endless.run(times=8, last=400, sinks=4, context=256)
    assert results["tokens"] == 2048
    for name in ("ring, 4 sinks", "ring"):
        row = results["caches"][name]
        assert 0.9 < row["ratio"] < endless.LIMIT, name
        assert row["cache_bytes_first"] == row["cache_bytes_last"]
    sinks, dense = results["caches"]["ring, 4 sinks"], results["caches"]["dense"]
    assert sinks["cache_bytes_last"] * 4 < dense["cache_bytes_last"]


@pytest.mark.rare
def test_quantized_caches_are_timed_beside_a_raw_one(tmp_path, capsys):
    quantized.main(["--quick", "--dtypes", "float32", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "quantized.json").read_text())["dtypes"]["float32"]
    assert list(found) == list(quantized.POLICIES) and found["raw"]["ratio"] == 1
    # The tiny model's heads have 16 channels, so that a scale is shared by 16 numbers of a token.
    shares = [found[name]["of_bfloat16"] for name in ("raw", "bits=8", "bits=4", "bits=2")]
    assert shares == sorted(shares, reverse=True) and shares[:2] == [2.0, 0.5625]
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in found.values())
    table = (tmp_path / "quantized.md").read_text()
    assert table in capsys.readouterr().out and table.count("| float32 |") == len(found)


@pytest.mark.rare
def test_caches_on_the_host_are_timed_beside_one_on_the_device(tmp_path, capsys):
    placement.main(["--quick", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "placement.json").read_text())
    found = results["dtypes"]["float32"]
    assert list(found) == list(placement.POLICIES) and found["device"]["ratio"] == 1
    assert all(len(row["ms"]) == 2 and min(row["ms"]) > 0 for row in found.values())
    assert found["host"]["body_bytes"] == found["host, 2 ahead"]["body_bytes"]
    assert min(results["link"].values()) > 0
    assert "| float32 | host, 4 bits, 1 ahead |" in capsys.readouterr().out


@pytest.mark.rare
def test_a_large_cache_is_timed_beside_a_small_one(tmp_path, capsys, monkeypatch, full):
    if not full:
        kept = ("raw", "4 bits", "ring", "ring, 4 sinks", "on the host, 4 bits")
        every = capacity.policies
        few = lambda window: {name: every(window)[name] for name in kept}  # noqa: E731
        monkeypatch.setattr(capacity, "policies", few)
    assert capacity.main(["--quick", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "capacity.json").read_text())["dtypes"]["float32"]
    assert list(found["capacity"]) == list(capacity.policies(32))
    assert list(found["position"]) == ["ring", "ring, 4 sinks"]
    for kind, sizes in ("capacity", [64, 256]), ("position", [80, 300]):
        for row in found[kind].values():
            assert row["sizes"] == sizes and row["ratio"] > 0
            assert all(len(each) == 2 and min(each) > 0 for each in row["ms"])
    assert "| float32 | on the host, 4 bits |" in capsys.readouterr().out


@pytest.mark.rare
def test_pages_are_timed_beside_a_dense_cache(tmp_path, capsys):
    assert paging.main(["--quick", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "paging.json").read_text())
    found = {(x["codec"], x["cache"]): x for x in results["steps_of"]}
    assert [*found] == [
        ("raw", "dense"), ("raw", "16"), ("raw", "64"), ("8 bits", "dense"), ("8 bits", "64"),
        ("4 bits", "dense"), ("4 bits", "64"),
    ]  # fmt: skip
    assert all(x["ms"] > 0 and x["ratio"] > 0 for x in found.values())
    assert [x["pages"] for x in results["shared"]] == [[5, 7], [2, 4]]
    assert (tmp_path / "paging.png").read_bytes().startswith(b"\x89PNG")
    assert "| 8 bits | 2 | 64 |" in capsys.readouterr().out


@pytest.mark.rare
def test_masks_are_timed_beside_steps(tmp_path, capsys):
    assert guided.main(["--quick", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "guided.json").read_text())
    found = {x["guide"]: x for x in results["steps_of"]}
    assert list(found) == ["free", "everything", *guided.GUIDES] and results["vocabulary"] == 300
    assert all(x["ms"] > 0 and x["of free"] > 0 for x in found.values())
    assert all((x["host ms"] > 0) == (name in guided.GUIDES) for name, x in found.items())
    assert "| 1 | JSON schema |" in capsys.readouterr().out


@pytest.mark.rare
@pytest.mark.parametrize("engine", [False, True])
def test_drafts_are_timed_beside_none(tmp_path, capsys, engine):
    options = ["--engine"] if engine else []
    assert speculation.main(["--quick", "--out", str(tmp_path), *options]) == 0
    name = "speculation-engine" if engine else "speculation"
    cells = json.loads((tmp_path / f"{name}.json").read_text())["cells"]
    assert [x["draft"] for x in cells[::2]] == [
        "a model that agrees in 70%", "a random model",
        "lookup, a text that does not repeat itself", "lookup, a text that repeats itself",
    ]  # fmt: skip
    assert all(x["same"] for x in cells) and cells[-1]["accepted"] > 0
    slow = [x | {"speed": 0.5} for x in cells]
    assert len(speculation.failures(slow, full=True)) == 6
    assert "| lookup, a text that repeats itself | 1 | greedy |" in capsys.readouterr().out


@pytest.mark.rare
def test_layers_are_timed_in_a_scan_and_without_one(tmp_path, capsys):
    assert stacks.main(["--quick", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "stacks.json").read_text())
    assert [x["codec"] for x in results["steps_of"]] == ["raw", "8 bits", "4 bits"]
    assert all(min(x[form] for form in stacks.FORMS) > 0 for x in results["steps_of"])
    assert all(len(x["seconds"]) == 2 and min(x["seconds"]) > 0 for x in results["compiling"])
    assert "| 4 bits | stacked |" in capsys.readouterr().out


@pytest.mark.rare
def test_rows_are_timed_in_growing_batches(tmp_path, capsys):
    assert scaling.main(["--quick", "--peers", "none", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "scaling.json").read_text())
    assert [cell["batch"] for cell in results["cells"]] == [1, 2]
    assert all(cell["engines"]["kvjax"]["tokens_per_second"] > 0 for cell in results["cells"])
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")
    assert "| float32 | 2 | kvjax |" in capsys.readouterr().out
    assert scaling.main(["--quick", "--peers", "llama"]) == 2


@pytest.mark.rare
def test_programs_are_compiled_cold_and_read_warm(tmp_path, capsys):
    assert compiling.main(["--quick", "--depths", "1", "--out", str(tmp_path)]) == 0
    (cell,) = json.loads((tmp_path / "compiling.json").read_text())["cells"]
    assert (cell["layers"], cell["bits"]) == (1, 0)
    for state in ("cold", "warm"):
        (process,) = cell[state]
        assert all(process[name][s] > 0 for name in ("step", "prompt") for s in compiling.STAGES)
    assert "| 1 | raw | prompt |" in capsys.readouterr().out


def test_slow_compiling_is_said():
    quick, slow = ({"trace": 1.0, "lower": 0.1, "compile": s} for s in (1.0, 30.0))
    cell = {"layers": compiling.FULL_DEPTH, "bits": 0, "cold": [{"step": slow, "prompt": quick}]}
    found = compiling.slow({"cells": [cell | {"warm": [{"step": quick, "prompt": quick}]}]})
    assert found == [
        "30 layers, raw: step takes 31.1 s to compile, more than 20",
        "30 layers, raw: a warm start takes 4.2 s, more than 3",
    ]
    shallow = cell | {"layers": 4, "warm": [{"step": slow, "prompt": slow}]}
    assert not compiling.slow({"cells": [shallow]})


@pytest.mark.rare
def test_cells_on_the_device_that_is_here(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tokens, "transformers_tokens", lambda *_, **__: {"reason": "not here"})
    devices.main(["--here", "--out", str(tmp_path)])  # a trial run, on a CPU
    found = json.loads((tmp_path / "devices.json").read_text())
    assert [cell["form"] for cell in found["cells"]] == ["step", "while_loop", "512 tokens"]
    assert all(cell["whole"] and cell["milliseconds"] > 0 for cell in found["cells"])
    (agreement,) = found["logits"]
    assert agreement["policy"] == "raw" and agreement["error"] <= agreement["allowed"]
    caches = found["tokens"]["caches"]
    assert list(caches) == list(tokens.CACHES)
    assert all(x["tokens_per_second"] > 0 and x["share"] > 0 for x in caches.values())
    out = capsys.readouterr().out
    assert "| raw | agree, " in out and "| holds |" in out and "| not here |" in out
    assert str(tmp_path / "devices.json") in out


@pytest.mark.oracle
@needs_transformers
def test_transformers_is_timed_with_the_same_shape():
    found = tokens.transformers_tokens(tokens.QUICK, on_cpu=True)
    assert found["tokens_per_second"] > 0 and {"torch", "transformers"} == set(found["versions"])


def test_transformers_is_missed_with_a_reason(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = tokens.transformers_tokens(tokens.QUICK, on_cpu=True)
    assert found == {"reason": "not installed: torch, transformers"}


def measured(**caches):
    """Tokens per second as ``kvjax_tokens`` gives them."""
    return {
        "shape": dataclasses.asdict(tokens.QUICK.shape), "dtype": "float16", "batch": 2,
        "prompt": 256, "bandwidth": 320e9, "bandwidth_of": "the data sheet", "caches": caches,
    }  # fmt: skip


def test_what_differs_ends_with_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(here, "disagreement", lambda policy, device: {
        "policy": policy, "error": 1.0, "allowed": 1e-3, "agrees": False,
    })  # fmt: skip
    monkeypatch.setattr(here, "run_cells", lambda *_: [here.Run("4 bits", "8,192", "step")])
    monkeypatch.setattr(tokens, "transformers_tokens", lambda *_, **__: {"reason": "not here"})
    caches = {"raw": {"tokens_per_second": 1234.5, "share": 0.5}, "8 bits": {"failed": "no memory"}}
    monkeypatch.setattr(tokens, "kvjax_tokens", lambda *_: measured(**caches))
    with pytest.raises(SystemExit, match="not as they should be: raw, 4 bits, 8 bits"):
        here.main(["raw"], ["8,192"], tmp_path)
    out = capsys.readouterr().out
    assert "**differ**, 1.0e+00" in out and "| 1,234 | 50 % |" in out and "no memory" in out


def test_policies_are_left_out_when_time_is_up(monkeypatch):
    monkeypatch.setattr(tokens, "transformers_tokens", lambda *_, **__: {"reason": "not here"})
    monkeypatch.setattr(tokens, "kvjax_tokens", lambda *_: measured())
    found = here.results(["raw", "4 bits"], ["8,192"], tokens.FULL, minutes=0)
    assert found["left_out"] == ["raw", "4 bits"] and not here.wrong(found)
    assert "Left out when time was up: raw, 4 bits." in here.markdown(found)


@pytest.mark.rare
def test_an_engine_is_timed_beside_static_batches(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(serving, "transformers", lambda *args: None)
    assert serving.main(["--quick", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "serving.json").read_text())
    ways = ["engine", serving.FASTEST, "static batches", "static batches, sorted"]
    assert [*results["ways"]] == ways and all(x[0] > 0 for x in results["ways"].values())
    assert [*results["ratios"]] == [x for x in ways if x != serving.FASTEST]
    assert 0 < results["host"] < 1 and min(results["first"].values()) > 0
    assert "| static batches, sorted | " in capsys.readouterr().out


@pytest.mark.oracle
def test_transformers_own_batching_gives_the_same_texts(tmp_path):
    write_checkpoint(tmp_path, TINY)
    given = serving.parse(["--quick"])
    work = work_of(TINY, given)
    peer = transformers(str(tmp_path), work, given)
    assert peer is not None and peer["seconds"] > 0
    assert peer["tokens"] == continuous(models.load(str(tmp_path)), work, given, True)["tokens"]
