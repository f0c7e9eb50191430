"""What is promised of a run, and the engines kvjax is compared with. No times here."""

import importlib.util
import sys

import numpy as np
import pytest

from benchmarks import peers, report
from benchmarks.agreement import check_greedy, difference
from benchmarks.claims import all_claims, paired_ratio
from benchmarks.decode import main
from tests.test_benchmarks import check_engine, needs_transformers, read_results

needs_llama_cpp = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llama_cpp", "gguf")),
    reason="needs llama-cpp-python and gguf (benchmarks/results/README.md)",
)


def results_of(difference: float, ratio: float, jax: str = "0.12.0.1") -> dict:
    def engine(seconds: float) -> dict:
        return {
            "decode_seconds": [seconds, 2 * seconds],
            "milliseconds_per_token": 1500.0 * seconds,
            "prefill_seconds": [30.0],
            "prefill_init_seconds": [0.0],
            "uncached_seconds": [30.0],
        }

    cell = {
        "dtype": "float32",
        "batch": 1,
        "prompt": 2048,
        "engines": {
            "kvjax": engine(ratio),
            "transformers-dynamic-eager": engine(1.5),
            "transformers-dynamic-sdpa": engine(1.0),
        },
        "check": {"tolerance": 1e-4, "difference": {"kvjax": difference}, "reference": "peer"},
    }
    settings = {"full_size": True}
    return {"cells": [cell], "capacity": [], "settings": settings, "versions": {"jax": jax}}


def claims_by_name(results: dict) -> dict:
    return {claim["claim"]: claim for claim in all_claims(results)}


def test_claims_hold_kvjax_against_the_faster_of_each_kind():
    results = results_of(0.0, 0.95)
    engines = results["cells"][0]["engines"]
    for name, part in (("transformers-static-compile", 0.5), ("llama_cpp-f16", 0.9)):
        engines[name] = {
            **engines["transformers-dynamic-eager"], "decode_seconds": [part, 2 * part]
        }  # fmt: skip
    found = claims_by_name(results)
    assert all(claim["required"] for claim in found.values())
    eager = found["a step against transformers-dynamic-sdpa's (kvjax / peer)"]
    assert eager["measured"] == pytest.approx(0.95) and eager["passed"]
    assert not found["a step against transformers-static-compile's (kvjax / peer)"]["passed"]
    assert found["a step against llama_cpp-f16's (kvjax / peer)"]["passed"]
    middle = found["the faster Transformers' step / ours, the median of all cells"]
    assert middle["measured"] == pytest.approx(1 / 0.95) and not middle["passed"]
    prompt = found["a prompt's tokens a second against transformers-dynamic-eager's (kvjax / peer)"]
    assert prompt["measured"] == 1 and prompt["limit"] == 1
    assert found["a step without the cache / with it"]["measured"] == pytest.approx(30 / 1.425)
    assert found["a step without the cache / our prefill"]["measured"] == 1


def test_how_fast_the_cache_is_read_goes_by_the_slope():
    results = results_of(0.0, 0.9)
    short, long = results["cells"][0], results_of(0.0, 1.0)["cells"][0]
    long["prompt"] = 8192
    # 0.1 s a group longer in the first of the two, 0.15 in the median; sdpa takes no longer.
    short["cache_bytes_filled"], long["cache_bytes_filled"] = 10**9, 4 * 10**9
    results["cells"] = [long, short]
    results["settings"]["steps"] = 10
    found = claims_by_name(results)
    rate = found["GB/s of the cache that a step reads"]
    assert rate["cell"] == "1x2048-1x8192" and rate["passed"]
    assert rate["measured"] == pytest.approx(3 / 0.015)
    sdpa = found["the cache is read faster than by transformers-dynamic-sdpa (kvjax / peer)"]
    assert sdpa["measured"] == 0 and not sdpa["passed"]


def test_an_older_jax_promises_less():
    found = claims_by_name(results_of(0.0, 1.0, jax="0.10.2"))
    required = {name for name, claim in found.items() if claim["required"]}
    assert required == {
        "a step against transformers-dynamic-sdpa's (kvjax / peer)",
        "a step without the cache / with it",
        "a step without the cache / our prefill",
    }
    assert all(found[name]["passed"] for name in required)
    equal = claims_by_name(results_of(0.0, 1.0))
    assert not equal["a step against transformers-dynamic-sdpa's (kvjax / peer)"]["passed"]


def test_other_tokens_are_forgiven_only_at_a_near_tie(tmp_path):
    class Reference:
        def ask(self, op, tokens, logits):
            assert op == "force" and np.load(tokens).tolist() == [[5], [1]]
            np.save(logits, np.array([[[0, 4.0, 1, 0]], [[0, 0, 3.0, 2.9]]]))

    for other, gap, passed in ([[1, 3]], 0.025, True), ([[2, 3]], 0.75, False):
        check = {"reference": "peer", "tolerance": 0.02, "tolerances": {}, "passed": True}
        made = {"kvjax": other, "peer": [[1, 2]]}
        check_greedy({"peer": Reference()}, check, [5], made, tmp_path)  # pyright: ignore[reportArgumentType]
        assert check["greedy_equal"] == {"kvjax": False, "peer": True}
        assert check["greedy_gap"]["kvjax"] == pytest.approx(gap) and check["passed"] is passed


def test_peers_that_cannot_run_are_left_out_with_a_reason(capsys):
    assert peers.chosen("all") == peers.ENGINES
    assert peers.chosen("mlx,transformers-static-sdpa") == ("transformers-static-sdpa", "mlx")
    assert "No module named 'absent'" in peers.missing(sys.executable, "import absent")
    assert "can't be started" in peers.missing("/absent/python", "")
    assert peers.missing(sys.executable, "pass") == ""
    assert not peers.in_cell("transformers-static-compile", 8, 64)
    words = ["--quick", "--python", "a=/x", "--out", "y", "--peer-python=/z", "--steps", "3"]
    assert peers.without_paths(words) == ["--quick", "--steps", "3"]
    assert peers.without_paths(["--gguf", "folder/model.gguf"]) == ["--gguf", "model.gguf"]


@needs_llama_cpp
def test_llama_cpp_computes_the_same(tmp_path):
    arguments = ["--quick", "--cells", "2x150", "--dtypes", "float32,bfloat16"]
    chosen = ["--peers", "llama_cpp-f16,llama_cpp-f16-plain,llama_cpp-q8_0"]
    assert main([*arguments, *chosen, "--out", str(tmp_path)]) == 0
    results = read_results(tmp_path)
    assert "groups of 32 don't divide 16 channels" in results["left_out"][0]
    for cell in results["cells"]:
        check = cell["check"]
        assert check["reference"] == "kvjax" and check["passed"]
        assert set(check["difference"]) == {
            "kvjax-uncached", "llama_cpp-f16", "llama_cpp-f16-plain",
        }  # fmt: skip
        for found in cell["engines"].values():
            check_engine(found, results["settings"]["repeats"])
        ours, theirs = (
            cell["engines"][name]["bytes_per_step"] for name in ("kvjax", "llama_cpp-f16")
        )
        assert theirs < ours if cell["dtype"] == "float32" else theirs == pytest.approx(ours, 0.01)


@pytest.mark.oracle
@needs_transformers
def test_a_compiled_step_computes_the_same(tmp_path):
    name = "transformers-static-compile"
    reason = peers.missing(sys.executable, peers.NEEDS[name])
    if reason:
        pytest.skip(f"torch.compile does not work here: {reason}")
    command = ["--quick", "--cells", "1x16", "--peers", f"transformers-static-sdpa,{name}"]
    assert main([*command, "--out", str(tmp_path)]) == 0
    (cell,) = read_results(tmp_path)["cells"]
    assert cell["engines"][name]["compile_seconds"] > 0
    assert cell["check"]["passed"] and cell["check"]["reference"] == "transformers-static-sdpa"
    assert f"{name}: the decode step by torch.compile" in (tmp_path / "decode.md").read_text()


def test_mismatches_are_named():
    assert report.mismatches(results_of(1e-5, 1.0)) == []
    (sentence,) = report.mismatches(results_of(1e-3, 1.0))
    assert "float32 1x2048: the logits of kvjax differ from peer's by 1.0e-03" in sentence
    assert difference(np.array([np.nan]), np.array([1.0])) == float("inf")
    assert difference(np.array([1.0, 2.5]), np.array([1.0, 2.0])) == 0.25


def test_a_near_tie_is_told_of_those_that_had_one():
    results = results_of(1e-5, 1.0)
    check = results["cells"][0]["check"]
    check["greedy_gap"] = {"kvjax": check["tolerance"], "other": 1.1}
    (near,) = report._greedy_notes(results)
    assert "greedy tokens of kvjax left" in near and "other" not in near and "1.1e+00" not in near
    (far,) = report.mismatches(results)
    assert "greedy tokens of other left" in far and "1.1e+00" in far


def test_ratio_is_the_median_of_pairs():
    assert paired_ratio([1.0, 10.0, 3.0], [1.0, 5.0, 1.0]) == 2.0
