"""Whether engines that were fed the same tokens computed the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint import Sizes
from benchmarks.process import Worker

# Largest difference of logits, as a part of the largest |logit|, before two engines that were fed
# the same tokens count as computing different things.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}
# llama.cpp's caches are float16 or smaller even where its weights are float32.
OWN_TOLERANCE = {
    "llama_cpp-f16": {"float32": 2e-2, "bfloat16": 5e-2},
    "llama_cpp-f16-plain": {"float32": 2e-2, "bfloat16": 5e-2},
    "llama_cpp-q8_0": {"float32": 5e-2, "bfloat16": 5e-2},
}
# With the quantized weights of a file, llama.cpp also rounds activations to 8 bits.
FILE_TOLERANCE = 2e-1
# What others are held against: the first of these that runs, or else kvjax.
REFERENCES = (
    "transformers-dynamic-sdpa",
    "transformers-static-sdpa",
    "transformers-dynamic-eager",
    "transformers-static-eager",
)


def tolerance_of(engine: str, dtype: str, from_file: bool = False) -> float:
    """The largest difference that an engine may have. ``from_file``: the model is a GGUF file."""
    if from_file and engine.startswith("llama_cpp"):
        return FILE_TOLERANCE
    return OWN_TOLERANCE.get(engine, TOLERANCE)[dtype]


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as a part of the largest |expected|; NaN anywhere gives infinity."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def reference_of(engines: Mapping[str, Any]) -> str:
    """The engine that the others are held against."""
    return next((name for name in REFERENCES if name in engines), next(iter(engines)))


def _forced(worker: Worker, tokens: np.ndarray, folder: Path) -> np.ndarray:
    """Feed int32[steps, batch] behind the prompt; float32[steps, batch, vocab]."""
    np.save(folder / "forced.npy", tokens)
    worker.ask("force", tokens=str(folder / "forced.npy"), logits=str(folder / "logits.npy"))
    return np.load(folder / "logits.npy")


def check_logits(
    workers: Mapping[str, Worker],
    sizes: Sizes,
    batch: int,
    dtype: str,
    folder: Path,
    *,
    steps: int,
    seed: int,
    whole: bool = True,
) -> tuple[dict[str, Any], list[int]]:
    """Logits after the prompt and after the same forced tokens, against the reference's.

    Also the first fill, which no time is taken of. `whole`: kvjax's pass without a cache too.
    Returns the greedy token after the prompt beside what was found.
    """
    rng = np.random.default_rng([seed, batch])
    tokens = rng.integers(0, sizes.vocab_size, (steps, batch), np.int32)
    logits: dict[str, np.ndarray] = {}
    for name, worker in workers.items():
        worker.ask("prefill", logits=str(folder / "prompt-logits.npy"))
        last = np.load(folder / "prompt-logits.npy")
        logits[name] = np.concatenate([last[None], _forced(worker, tokens, folder)])
    reference = reference_of(logits)
    expected = logits[reference]
    differences = {
        name: difference(found, expected) for name, found in logits.items() if name != reference
    }
    if whole and "kvjax" in workers:
        workers["kvjax"].ask("uncached", logits=str(folder / "pass-logits.npy"))
        found = np.load(folder / "pass-logits.npy")
        differences["kvjax-uncached"] = difference(found, expected[0])
    tolerances = {name: tolerance_of(name, dtype, sizes.from_file) for name in differences}
    check = {
        "reference": reference,
        "tolerance": TOLERANCE[dtype],
        "tolerances": tolerances,
        "difference": differences,
        "passed": all(found <= tolerances[name] for name, found in differences.items()),
    }
    return check, expected[0].argmax(-1).tolist()


def check_greedy(
    workers: Mapping[str, Worker],
    check: dict[str, Any],
    token: list[int],
    continuations: Mapping[str, list[list[int]]],
    folder: Path,
) -> None:
    """Add to `check` which engines decoded other tokens, and how near the choice was.

    Where a row first leaves the reference's tokens, the reference's logits of both tokens may be
    apart by twice the tolerance, as each may be off by it.
    """
    reference = check["reference"]
    expected = np.array(continuations[reference])
    check["greedy_equal"] = {
        name: made == continuations[reference] for name, made in continuations.items()
    }
    check["greedy_gap"] = {}
    if all(check["greedy_equal"].values()):
        return
    fed = np.concatenate([np.array(token)[:, None], expected[:, :-1]], axis=1)
    logits = _forced(workers[reference], fed.T.astype(np.int32), folder)
    largest = float(np.abs(logits).max())
    for name, made in continuations.items():
        gaps = [0.0]
        for row, (own, true) in enumerate(zip(np.array(made), expected, strict=True)):
            for step in np.flatnonzero(own != true)[:1]:
                here = logits[step, row]
                gaps.append(float(here[true[step]] - here[own[step]]) / largest)
        if not check["greedy_equal"][name]:
            check["greedy_gap"][name] = max(gaps)
            limit = 2 * check["tolerances"].get(name, check["tolerance"])
            check["passed"] &= max(gaps) <= limit
