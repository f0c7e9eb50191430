"""Tokens per second on the device that is here: raw and quantized caches, and Transformers."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.abstract import POLICIES
from kvjax import bench
from kvjax.cli.bench_command import random_model
from kvjax.core.target import spec_of, target_of
from kvjax.memory.shapes import SHAPES, ModelShape

CACHES = ("raw", "8 bits", "4 bits")
FIGURES = (
    "ms", "ms_per_run", "steps", "tokens_per_second", "weight_bytes", "cache_bytes", "bandwidth",
    "capacity", "compile_seconds", "compilations",
)  # fmt: skip
"""What is kept of a ``kvjax.bench.Cell``."""
TIMEOUT = 300
"""Seconds that Transformers may take."""


@dataclass(frozen=True)
class Work:
    """What is timed: runs of ``steps`` decode steps of ``batch`` rows after prompts of ``prompt``
    tokens, ``repeats`` times."""

    shape: ModelShape
    batch: int
    prompt: int
    steps: int
    repeats: int


# In 16 bits a step reads 2.0 GB of weights and 537 MB of a raw cache: a T4 has 15 GB.
FULL = Work(replace(SHAPES["llama-3-8b"], num_hidden_layers=4, vocab_size=32000), 8, 4096, 32, 3)
QUICK = Work(ModelShape(2, 64, 128, 4, 2, 16, 256, context=1024), 2, 256, 4, 1)


def kvjax_tokens(work: Work, device: Any) -> dict[str, Any]:
    """Tokens per second of a model with random weights, for each of ``CACHES``, and the share of
    the memory's bandwidth that a step achieves."""
    target = target_of(device)
    dtype = {"cpu": "float32"}.get(
        target.platform, "float16" if target.before_ampere else "bfloat16"
    )
    lm = random_model("random weights", work.shape, dtype)
    measured, kind = bench.measure_bandwidth(), spec_of(device)
    bandwidth = measured.read if kind is None else kind.bandwidth
    found: dict[str, Any] = {}
    for name in CACHES:
        try:
            timed = bench.measure(
                lm, {name: POLICIES[name]}, prompts=[work.prompt], batches=[work.batch],
                steps=work.steps, repeats=work.repeats, prefill=False, bandwidth=measured,
            )  # fmt: skip
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            found[name] = {"failed": " ".join(str(error).split())[:300]}
            continue
        (cell,) = timed.cells
        figures = {name: getattr(cell, name) for name in FIGURES}
        found[name] = figures | {"share": cell.bandwidth / bandwidth}
    return {
        "shape": asdict(work.shape), "dtype": dtype, "batch": work.batch, "prompt": work.prompt,
        "bandwidth": bandwidth, "bandwidth_of": "measured" if kind is None else "the data sheet",
        "read_bandwidth": measured.read, "caches": found,
    }  # fmt: skip


def transformers_tokens(work: Work, *, on_cpu: bool) -> dict[str, Any]:
    """Tokens per second of Transformers with a model of that shape, or the ``reason`` for none. It
    runs in a process of its own, which should end before JAX fills the device's memory."""
    missing = [x for x in ("torch", "transformers") if importlib.util.find_spec(x) is None]
    if missing:
        return {"reason": f"not installed: {', '.join(missing)}"}
    given = json.dumps({"shape": asdict(work.shape), "on_cpu": on_cpu} | {
        name: getattr(work, name) for name in ("batch", "prompt", "steps", "repeats")
    })  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.tokens_transformers", given]
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            command,
            cwd=root,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT,
            check=True,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"reason": f"it took more than {TIMEOUT} s"}
    except subprocess.CalledProcessError as error:
        return {"reason": "it failed: " + (error.stderr.strip().splitlines() or ["no message"])[-1]}
