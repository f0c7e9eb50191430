"""The laws and the speed of the device that is here: logits compared with the CPU's, the copy law
by the device's own compiler, times, and tokens per second (`benchmarks.tokens`)."""

import functools
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from benchmarks import tokens
from benchmarks.abstract import (
    CHUNK,
    LOOP,
    NEW,
    POLICIES,
    STEP,
    Cell,
    Found,
    cell_of,
    compiled,
    obeys,
)
from benchmarks.report import markdown_table
from kvjax import models
from kvjax.core.target import spec_of
from kvjax.memory.hlo import bytes_moved

STEPS, REPEATS = 20, 5
"""Steps that are timed together, and how often."""
LOOPED = 100
"""Steps of a loop, in one call."""
TOLERANCE = {"raw": 1e-3, "lossy": 2e-2}
"""Largest difference of logits from the CPU's, relative to the largest logit, in float32 at the
highest precision of products. Quantized caches differ more: a number halfway between two codes may
round up on one device and down on the other."""
_EXACT = ("raw", "growing", "sinks", "hybrid", "host", "host 1 ahead")
_TEXT = "Once upon a time there was a cache that never forgot what it had been told, "


@dataclass
class Run:
    """What was found for a cell: what its compiler says of the copy law, ``milliseconds`` of a call
    of one layer (in a loop, of one step), and the bytes that the program of a step moves."""

    policy: str
    feature: str
    form: str
    cache: dict[str, int] = field(default_factory=dict)
    whole: bool = False
    obeys: bool = False
    temporaries: int = 0
    large: int = 0
    moved: int = 0
    milliseconds: float = 0.0
    refused: str = ""
    failed: str = ""


def run_cells(policy: str, features: Sequence[str], device: Any) -> list[Run]:
    """A policy, with every shape and form, compiled and run."""
    found = []
    for feature in features:
        for form in (STEP, LOOP, CHUNK):
            found.append(run(policy, feature, form, device))
            print(device.device_kind, *list(asdict(found[-1]).values())[:3], file=sys.stderr)
    return found


@functools.lru_cache(maxsize=4)  # the call of 512 tokens fills the caches of the other forms too
def _compiled(cell: Cell, device: Any) -> Found:
    return compiled(cell, device)


def run(policy: str, feature: str, form: str, device: Any) -> Run:
    """One of them."""
    cell = cell_of(policy, feature, form)
    try:
        law = _compiled(cell, device)
        with jax.default_device(device):
            milliseconds = timed(cell, law, device)
    except ValueError as error:
        return Run(policy, feature, form, refused=" ".join(str(error).split())[:300])
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:  # of its compiler
        return Run(policy, feature, form, failed=" ".join(str(error).split())[:300])
    # A loop's turns are not in its text, and count once: a step. A CPU's text has no such traffic.
    fine = law.whole if device.platform == "cpu" else obeys(law, cell, policy)
    moved = 0 if form == CHUNK or device.platform == "cpu" else bytes_moved(law.text)
    return Run(
        policy, feature, form, law.cache, law.whole, fine, law.temporaries, len(law.large), moved,
        milliseconds,
    )  # fmt: skip


def timed(cell: Cell, law: Found, device: Any) -> float:
    """Milliseconds of a call behind a text that fills the cache, but for the calls to come."""
    coming = (REPEATS + 1) * {STEP: STEPS, LOOP: LOOPED, CHUNK: NEW[CHUNK]}[cell.form]
    fill = _compiled(replace(cell, form=CHUNK), device).program
    cache = kvjax.init_cache(cell.config, cell.policy, batch=cell.batch, max_len=cell.max_len)
    for _ in range(max(cell.max_len - coming, 0) // NEW[CHUNK]):
        cache = fill(*_tokens(cell, NEW[CHUNK]), cache)[1]
    queries, keys = _tokens(cell, NEW[cell.form])
    seconds = []
    each = {STEP: STEPS, LOOP: LOOPED, CHUNK: 1}[cell.form]
    calls = STEPS if cell.form == STEP else 1
    # Of long calls no more than a short cache has room for.
    for _ in range(min(REPEATS + 1, cell.max_len // NEW[CHUNK]) if each == 1 else REPEATS + 1):
        jax.block_until_ready(cache)
        start = time.perf_counter()
        for _ in range(calls):
            mixed, cache = law.program(queries, keys, cache)
        jax.block_until_ready(mixed)
        seconds.append(time.perf_counter() - start)
    kvjax.check(cache)
    return 1e3 * statistics.median(seconds[1:]) / each


def _tokens(cell: Cell, new: int) -> tuple[Any, Any]:
    """Queries and keys of a call."""
    generator = np.random.default_rng(0)
    queries, keys = (
        jnp.asarray(generator.normal(size=(cell.batch, heads, new, cell.head_dim)), cell.dtype)
        for heads in (cell.heads, cell.kv_heads)
    )
    return queries, keys


def logits(policy: str, device: Any) -> np.ndarray:
    """Of the embedded model: of a prompt, of a chunk behind it, and of eight tokens one by one."""
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        lm = models.load(dtype="float32")
        ids = lm.encode([_TEXT * 12])[0]
        cache = kvjax.init_cache(lm.config, POLICIES[policy], batch=1, max_len=512)
        step = jax.jit(lm.architecture.apply, donate_argnums=2)
        found = []
        for start, stop in [(0, 150), (150, 171), *((n, n + 1) for n in range(171, 179))]:
            some, cache = step(lm.params, ids[:, start:stop], cache)
            found.append(np.asarray(some[0], np.float32))
        kvjax.check(cache)
    return np.concatenate(found)


def disagreement(policy: str, device: Any) -> dict[str, Any]:
    """How far logits are from those of the CPU: of the largest, and what is allowed."""
    allowed = TOLERANCE["raw" if policy in _EXACT else "lossy"]
    try:
        here, there = logits(policy, device), logits(policy, jax.devices("cpu")[0])
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:  # of its compiler
        return {"policy": policy, "agrees": False, "failed": " ".join(str(error).split())[:300]}
    except ValueError as error:
        return {"policy": policy, "refused": " ".join(str(error).split())[:300]}
    error = float(np.abs(here - there).max() / np.abs(there).max())
    return {"policy": policy, "error": error, "allowed": allowed, "agrees": error <= allowed}


def results(
    policies: Sequence[str], features: Sequence[str], work: tokens.Work, minutes: float
) -> dict[str, Any]:
    """All of it, on the default device. No policy begins after ``minutes``: ``left_out`` names
    the others."""
    start = time.perf_counter()
    # First, while JAX has taken none of the device's memory.
    other = tokens.transformers_tokens(work, on_cpu=work is tokens.QUICK)
    device = jax.devices()[0]
    kind = spec_of(device)
    found: dict[str, Any] = {
        "device": device.device_kind,
        "platform": device.platform,
        "bandwidth": None if kind is None else kind.bandwidth,
        "versions": {"kvjax": kvjax.__version__, "python": sys.version.split()[0]}
        | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")},
        "tokens": tokens.kvjax_tokens(work, device),
        "transformers": other,
        "logits": [],
        "cells": [],
        "left_out": [],
    }
    for policy in policies:
        if time.perf_counter() - start > 60 * minutes:
            found["left_out"].append(policy)
            continue
        found["logits"].append(disagreement(policy, device))
        found["cells"] += [asdict(each) for each in run_cells(policy, features, device)]
    return found | {"seconds": round(time.perf_counter() - start)}


def wrong(found: dict[str, Any]) -> list[str]:
    """Policies that differ from the CPU, break the copy law or failed."""
    names = [x["policy"] for x in found["logits"] if not x.get("agrees", "refused" in x)]
    names += [x["policy"] for x in found["cells"] if not (x["obeys"] or x["refused"])]
    names += [name for name, x in found["tokens"]["caches"].items() if "failed" in x]
    return list(dict.fromkeys(names))


def _logits(found: dict[str, Any], policy: str) -> str:
    each = next((x for x in found["logits"] if x["policy"] == policy), None)
    if each is None:
        return ""
    if why := each.get("failed"):
        return f"**failed**: {why[:80]}"
    if "refused" in each:
        return "refused"
    return ("agree" if each["agrees"] else "**differ**") + f", {each['error']:.1e}"


def _law(cells: Sequence[dict[str, Any]]) -> str:
    """Whether the copy law holds in all forms, or in which not."""
    if not cells:
        return ""
    names = [x["form"] for x in cells if not (x["obeys"] or x["refused"])]
    if failed := [x["failed"] for x in cells if x["failed"]]:
        return f"**failed**: {failed[0][:80]}"
    if names:
        return f"**broken**: {', '.join(names)}"
    return "refused" if all(x["refused"] for x in cells) else "holds"


def _layer(found: dict[str, Any], cells: Sequence[dict[str, Any]]) -> str:
    """The share of the bandwidth that a step of one layer achieves, in a loop on the device."""
    loops = [x for x in cells if x["form"] == LOOP and x["moved"] and x["milliseconds"]]
    if not loops or not found["bandwidth"]:
        return ""
    speed = loops[0]["moved"] / loops[0]["milliseconds"] * 1e3
    return f"{100 * speed / found['bandwidth']:.0f} %"


def markdown(found: dict[str, Any]) -> str:
    """The table, a row for each cache and one for Transformers."""
    timed, rows = found["tokens"], []
    checked = [x["policy"] for x in found["logits"] + found["cells"]]
    for policy in dict.fromkeys([*checked, *timed["caches"]]):
        cells = [x for x in found["cells"] if x["policy"] == policy]
        laws = [_logits(found, policy), _law(cells), _layer(found, cells)]
        speed = timed["caches"].get(policy, {})
        if "failed" in speed:
            both = [f"**failed**: {speed['failed'][:80]}", ""]
        elif speed:
            both = [f"{speed['tokens_per_second']:,.0f}", f"{100 * speed['share']:.0f} %"]
        else:
            both = ["", ""]
        rows.append([policy, *laws, *both])
    other = found["transformers"]
    speed = other.get("reason") or f"{other['tokens_per_second']:,.0f}"
    where = f", {other['dtype']}" if "dtype" in other else ""
    rows.append([f"Transformers, dynamic cache{where}", "", "", "", speed, ""])
    head = ["cache", "logits", "copy law", "layer, bandwidth", "tokens/s", "model, bandwidth"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [f"{found['device']}, {versions}; {found['seconds']:,} s.", ""]
    lines += [*markdown_table(head, rows), "", _columns(timed)]
    if found["left_out"]:
        lines += ["", f"Left out when time was up: {', '.join(found['left_out'])}."]
    return "\n".join(lines)


def _columns(timed: dict[str, Any]) -> str:
    """What the columns of the table are."""
    shape = timed["shape"]
    return (
        "*Logits* of the embedded model in float32: the largest difference from the CPU's, "
        "relative to the largest logit. *Copy law*: a step, a loop and a call of 512 tokens update "
        "the donated cache in place and copy nothing of it, by the device's compiler. *Layer*: the "
        "bytes that a step of one layer moves, per second, of the data sheet's bandwidth; a CPU's "
        "program does not say how many. *Tokens/s*: a decode loop of "
        f"{shape['num_hidden_layers']} layers of {shape['hidden_size']:,} with random weights in "
        f"{timed['dtype']}, {timed['batch']} rows after {timed['prompt']:,} tokens. *Model*: its "
        "weights and cache, read once a step, per second, of the bandwidth "
        f"({timed['bandwidth'] / 1e9:,.0f} GB/s, {timed['bandwidth_of']})."
    )


def main(
    policies: Sequence[str],
    features: Sequence[str],
    out: Path | None,
    work: tokens.Work = tokens.FULL,
    minutes: float = 12,
) -> None:
    """Check and time the device that is here, print the table and write one file."""
    found = results(policies, features, work, minutes)
    name = f"{found['device'].lower().replace(' ', '-')}-jax{jax.__version__}"
    out = out or Path(__file__).parent / "results" / name
    out.mkdir(parents=True, exist_ok=True)
    (out / "devices.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(markdown(found))
    print(f"\nwritten: {out / 'devices.json'}")
    if names := wrong(found):
        raise SystemExit(f"not as they should be: {', '.join(names)}")
