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

from benchmarks.agreement import check_greedy, check_logits
from benchmarks.checkpoint import Sizes
from benchmarks.process import Worker

ITEMSIZE = {"float32": 4, "bfloat16": 2}
# Parts of names: eager and plain attention are slow on prompts, and a compiled step's prompts go
# through the module that is not compiled.
ONCE = ("-eager", "-plain", "-compile")


@dataclass(frozen=True)
class Settings:
    """How often everything is done.

    Whole passes are timed `pass_repeats` times, of the peers `peer_passes` times, and once of those
    whose prompts are slow or another peer's (`ONCE`);
    `pass_seconds`: after this long no further round of kvjax alone is begun in a cell, but there
    are never fewer than three, for one disturbed pass must not decide.
    `pass_tokens`: in a cell of more tokens than this, batch times prompt, whole passes are timed
    once, and peers whose attention makes all scores at once (eager) stay out.
    `peer_pass_tokens`: with more than this the peers' are not timed at all; they only fill caches.
    """

    repeats: int = 7
    steps: int = 12
    warm: int = 2
    check_steps: int = 4
    pass_repeats: int = 5
    peer_passes: int = 3
    pass_seconds: float = 45.0
    pass_tokens: int = 4096
    peer_pass_tokens: int = 8192
    seed: int = 0

    def max_len(self, prompt: int) -> int:
        """Room for the prompt and the steps of one group, the same for every engine."""
        return prompt + max(self.warm + self.steps, self.check_steps)

    def filled(self, prompt: int) -> float:
        """Tokens in the cache at a timed step, on average."""
        return prompt + self.warm + (self.steps + 1) / 2


def prompt_tokens(sizes: Sizes, batch: int, prompt: int, seed: int) -> np.ndarray:
    """Random token ids, int32[batch, prompt]."""
    rng = np.random.default_rng([seed, batch, prompt])
    return rng.integers(0, sizes.vocab_size, (batch, prompt), np.int32)


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
        check, token = check_logits(
            workers, sizes, batch, dtype, Path(folder),
            steps=settings.check_steps, seed=settings.seed,
        )  # fmt: skip
        _passes(workers, engines, settings, batch * prompt)
        continuations = decode(workers, engines, token, settings)
        check_greedy(workers, check, token, continuations, Path(folder))
    add_speeds(workers, engines, sizes, dtype, batch, prompt, settings)
    for worker in workers.values():
        worker.ask("drop")
    return {
        "dtype": dtype,
        "batch": batch,
        "prompt": prompt,
        "max_len": settings.max_len(prompt),
        "cache_bytes_filled": int(
            sizes.cache_bytes_per_token(ITEMSIZE[dtype]) * batch * settings.filled(prompt)
        ),
        "engines": engines,
        "check": check,
    }


def add_speeds(
    workers: Mapping[str, Worker],
    engines: dict[str, dict[str, Any]],
    sizes: Sizes,
    dtype: str,
    batch: int,
    prompt: int,
    settings: Settings,
) -> None:
    """Add what follows from the groups' seconds to every engine's figures."""
    for name, found in engines.items():
        about = workers[name].about
        itemsize = about.get("cache_itemsize", ITEMSIZE[dtype])
        held = sizes.cache_bytes_per_token(1) * itemsize * batch
        step = statistics.median(found["decode_seconds"]) / settings.steps
        found["milliseconds_per_token"] = 1e3 * step
        found["tokens_per_second"] = batch / step
        found["bytes_per_step"] = about["weight_bytes"] + held * settings.filled(prompt)


def _passes(
    workers: Mapping[str, Worker],
    engines: dict[str, dict[str, Any]],
    settings: Settings,
    tokens: int,
) -> None:
    for found in engines.values():
        found["prefill_seconds"], found["prefill_init_seconds"] = [], []
    engines["kvjax"]["uncached_seconds"] = []
    rounds = {"kvjax": settings.pass_repeats}
    for name in engines.keys() - rounds:
        once = any(part in name for part in ONCE)
        rounds[name] = min(settings.pass_repeats, 1 if once else settings.peer_passes)
    if tokens > settings.pass_tokens:
        rounds = dict.fromkeys(rounds, 1)
    if tokens > settings.peer_pass_tokens:
        rounds = {"kvjax": 1}
    began = math.inf
    for round_ in range(max(rounds.values())):
        timed = {name: workers[name] for name in engines if rounds.get(name, 0) > round_}
        if round_ >= 3 and time.monotonic() - began > settings.pass_seconds:
            break
        if len(timed) == 1:
            began = min(began, time.monotonic())
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


def decode(
    workers: Mapping[str, Worker],
    engines: dict[str, dict[str, Any]],
    token: list[int],
    settings: Settings,
) -> dict[str, list[list[int]]]:
    """Time groups of steps in turn into `engines`; the tokens that each made."""
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
