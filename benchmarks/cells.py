"""One cell of the benchmark: a batch and a prompt length, all engines in turn."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint import Sizes
from benchmarks.process import Worker

ITEMSIZE = {"float32": 4, "bfloat16": 2}

# Largest difference of logits, as a part of the largest |logit|, before two engines that were fed
# the same tokens count as computing different things.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Settings:
    """How often everything is done.

    Whole passes are timed `pass_repeats` times, of the peers once;
    `pass_seconds`: after this long no further round of kvjax alone is begun in a cell, but there
    are never fewer than three, for one disturbed pass must not decide.
    `pass_tokens`: in a cell of more tokens than this, batch times prompt, whole passes are timed
    once and of kvjax alone; the peers only fill their caches, and those whose attention makes
    all scores at once (eager) stay out.
    """

    repeats: int = 7
    steps: int = 12
    warm: int = 2
    check_steps: int = 4
    pass_repeats: int = 5
    pass_seconds: float = 45.0
    pass_tokens: int = 4096
    seed: int = 0

    def max_len(self, prompt: int) -> int:
        """Room for the prompt and the steps of one group, the same for every engine."""
        return prompt + max(self.warm + self.steps, self.check_steps)


def prompt_tokens(sizes: Sizes, batch: int, prompt: int, seed: int) -> np.ndarray:
    """Random token ids, int32[batch, prompt]."""
    rng = np.random.default_rng([seed, batch, prompt])
    return rng.integers(0, sizes.vocab_size, (batch, prompt), np.int32)


def difference(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference as a part of the largest |expected|; NaN anywhere gives infinity."""
    if not np.isfinite(found).all():
        return float("inf")
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def run_cell(
    workers: Mapping[str, Worker],
    sizes: Sizes,
    dtype: str,
    batch: int,
    prompt: int,
    settings: Settings,
) -> dict[str, Any]:
    """Check and time every engine on one prompt.

    Whole passes (prefill, and a step without a cache) come first, in rounds; then groups of
    decode steps. Within a round the engines follow one another, each round beginning with the
    next engine, so that a drift of the machine meets all alike.
    """
    tokens = prompt_tokens(sizes, batch, prompt, settings.seed)
    large = batch * prompt > settings.pass_tokens
    if large:
        workers = {name: worker for name, worker in workers.items() if "-eager" not in name}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompt.npy"
        np.save(path, tokens)
        engines: dict[str, dict[str, Any]] = {}
        for name, worker in workers.items():
            worker.ask("drop")
            engines[name] = worker.ask("setup", prompt=str(path), max_len=settings.max_len(prompt))
        check, token = _check(workers, sizes, batch, dtype, Path(folder), settings)
    _passes(workers, engines, settings, large=large)
    continuations = _decode(workers, engines, token, settings)
    reference = next(reversed(continuations.values()))
    check["greedy_equal"] = {name: made == reference for name, made in continuations.items()}
    itemsize = ITEMSIZE[dtype]
    held = sizes.cache_bytes_per_token(itemsize) * batch
    filled = prompt + settings.warm + (settings.steps + 1) / 2
    for name, found in engines.items():
        step = statistics.median(found["decode_seconds"]) / settings.steps
        found["milliseconds_per_token"] = 1e3 * step
        found["tokens_per_second"] = batch / step
        found["bytes_per_step"] = workers[name].about["weight_bytes"] + held * filled
    for worker in workers.values():
        worker.ask("drop")
    return {
        "dtype": dtype,
        "batch": batch,
        "prompt": prompt,
        "max_len": settings.max_len(prompt),
        "cache_bytes_filled": int(held * filled),
        "engines": engines,
        "check": check,
    }


def _check(
    workers: Mapping[str, Worker],
    sizes: Sizes,
    batch: int,
    dtype: str,
    folder: Path,
    settings: Settings,
) -> tuple[dict[str, Any], list[int]]:
    """Logits after the prompt and after the same forced tokens, against the last engine's.

    Also the first fill, which no time is taken of. Returns the greedy token after the prompt.
    """
    rng = np.random.default_rng([settings.seed, batch])
    forced = rng.integers(0, sizes.vocab_size, (settings.check_steps, batch), np.int32)
    np.save(folder / "forced.npy", forced)
    logits: dict[str, np.ndarray] = {}
    for name, worker in workers.items():
        worker.ask("prefill", logits=str(folder / "prompt-logits.npy"))
        last = np.load(folder / "prompt-logits.npy")
        worker.ask(
            "force", tokens=str(folder / "forced.npy"), logits=str(folder / "step-logits.npy")
        )
        logits[name] = np.concatenate([last[None], np.load(folder / "step-logits.npy")])
    reference = next(reversed(logits))
    differences = {
        name: difference(found, logits[reference])
        for name, found in logits.items()
        if name != reference
    }
    if "kvjax" in workers:
        workers["kvjax"].ask("uncached", logits=str(folder / "pass-logits.npy"))
        whole = np.load(folder / "pass-logits.npy")
        differences["kvjax-uncached"] = difference(whole, logits[reference][0])
    tolerance = TOLERANCE[dtype]
    check = {
        "reference": reference,
        "tolerance": tolerance,
        "difference": differences,
        "passed": all(found <= tolerance for found in differences.values()),
    }
    return check, logits[reference][0].argmax(-1).tolist()


def _passes(
    workers: Mapping[str, Worker],
    engines: dict[str, dict[str, Any]],
    settings: Settings,
    *,
    large: bool,
) -> None:
    for found in engines.values():
        found["prefill_seconds"], found["prefill_init_seconds"] = [], []
    if "kvjax" in engines:
        engines["kvjax"]["uncached_seconds"] = []
    began = math.inf
    alone = {"kvjax": workers["kvjax"]} if "kvjax" in workers else workers
    for round_ in range(1 if large else settings.pass_repeats):
        if round_ == 1:
            began = time.monotonic()
        if round_ >= 3 and time.monotonic() - began > settings.pass_seconds:
            break
        timed = alone if large or round_ else workers
        for name in _order(timed, round_):
            worker, found = workers[name], engines[name]
            worker.ask("drop")
            if name == "kvjax":
                found["uncached_seconds"].append(worker.ask("uncached")["seconds"])
                found["uncached_peak_bytes"] = worker.peak_bytes
            filled = worker.ask("prefill")
            found["prefill_seconds"].append(filled["seconds"])
            found["prefill_init_seconds"].append(filled["init_seconds"])
            found["prefill_peak_bytes"] = worker.peak_bytes


def _decode(
    workers: Mapping[str, Worker],
    engines: dict[str, dict[str, Any]],
    token: list[int],
    settings: Settings,
) -> dict[str, list[list[int]]]:
    continuations: dict[str, list[list[int]]] = {}
    for found in engines.values():
        found["decode_seconds"] = []
    # One round first that is not kept: it meets cold caches and, in kvjax, compiles a rewind.
    for round_ in range(-1, settings.repeats):
        for name in _order(workers, round_):
            made = workers[name].ask(
                "decode", token=token, warm=settings.warm, steps=settings.steps
            )
            if round_ < 0:
                continue
            engines[name]["decode_seconds"].append(made["seconds"])
            engines[name]["decode_peak_bytes"] = workers[name].peak_bytes
            engines[name]["peak_resettable"] = workers[name].peak_resettable
            continuations[name] = made["tokens"]
    return {name: continuations[name] for name in workers}


def _order(workers: Mapping[str, Worker], round_: int) -> list[str]:
    names = list(workers)
    shift = round_ % len(names)
    return names[shift:] + names[:shift]
