"""The cells of `benchmarks.devices` on a device that is here: the law by its compiler, logits
beside the CPU's, and times."""

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
from kvjax.core.absent import kind_of
from kvjax.memory.traffic import bytes_moved

STEPS, REPEATS = 20, 5
"""Steps that are timed together, and how often; a loop has steps of its own."""
LOOPED = 100
TOLERANCE = {"raw": 1e-3, "lossy": 2e-2}
"""Of logits beside the CPU's, of the largest of them: float32 with every bit of its products. A
number that stands between two codes may be encoded as the one here and as the other there."""
_EXACT = ("raw", "growing", "sinks", "hybrid", "host", "host 1 ahead")
_TEXT = "Once upon a time there was a cache that never forgot what it had been told, "


@dataclass
class Run:
    """What a cell did: its law, by the compiler, and the milliseconds of a call a layer, of a loop
    of each of its steps; bytes that a step moves, counted in its program."""

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


def run_cells(policies: Sequence[str], features: Sequence[str], device: Any) -> list[Run]:
    """Every policy, shape and form, compiled and run."""
    found = []
    for policy in policies:
        for feature in features:
            for form in (STEP, LOOP, CHUNK):
                found.append(run(policy, feature, form, device))
                print(device.device_kind, *list(asdict(found[-1]).values())[:3], file=sys.stderr)
    return found


def run(policy: str, feature: str, form: str, device: Any) -> Run:
    """One of them."""
    cell = cell_of(policy, feature, form)
    try:
        law = compiled(cell, device)
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
    fill = compiled(replace(cell, form=CHUNK), device).program
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


def results(policies: Sequence[str], features: Sequence[str]) -> dict[str, Any]:
    """All of it, on the default device."""
    device = jax.devices()[0]
    kind = kind_of(device)
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "bandwidth": None if kind is None else kind.bandwidth,
        "versions": {"kvjax": kvjax.__version__, "jax": jax.__version__},
        "logits": [disagreement(policy, device) for policy in policies],
        "cells": [asdict(each) for each in run_cells(policies, features, device)],
    }


def _none(found: dict[str, Any]) -> str:
    """Why there are no figures; empty where there are some."""
    kinds = ("refused", "refused"), ("failed", "**failed**")
    return next((f"{words}: {found[kind]}" for kind, words in kinds if found.get(kind)), "")


def markdown(found: dict[str, Any]) -> str:
    """The tables."""
    rows = []
    for each in found["logits"]:
        if why := _none(each):
            rows.append([each["policy"], why, "", ""])
            continue
        agrees = "agrees" if each["agrees"] else "**differs**"
        rows.append([each["policy"], f"{each['error']:.1e}", f"{each['allowed']:.0e}", agrees])
    logits = markdown_table(["cache", "of the largest logit", "allowed", ""], rows)
    head = [
        "cache", "shape", "call", "MB", "ms", "moves, MB", "GB/s", "temporaries, MB", "obeys",
        "large",
    ]  # fmt: skip
    cells = []
    for each in found["cells"]:
        first = [each["policy"], each["feature"], each["form"]]
        if why := _none(each):
            cells.append([*first, why, *[""] * 6])
            continue
        speed = each["moved"] / each["milliseconds"] / 1e6 if each["moved"] else 0
        cells.append([
            *first, f"{sum(each['cache'].values()) / 1e6:,.1f}", f"{each['milliseconds']:.3f}",
            f"{each['moved'] / 1e6:,.1f}" if speed else "", f"{speed:,.0f}" if speed else "",
            f"{each['temporaries'] / 1e6:,.2f}", "yes" if each["obeys"] else "**no**",
            str(each["large"] or ""),
        ])  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    both = ["\n".join(lines) for lines in (logits, markdown_table(head, cells))]
    return f"""# Run on a {found["device"]}

{versions}. Logits of the embedded model in float32 beside those of the CPU.

{both[0]}

A layer in bfloat16, 8 rows, 32 heads of queries, 8 of keys, 128 channels, 8,192 slots where the
shape says nothing else, behind a text that fills them: medians of {REPEATS} runs, a call of a
layer (of two, where the cache is hybrid, of three, where it is fetched ahead), of a loop each step
of it. *Moves*: counted in the program, and what that makes a second.

{both[1]}
"""


def main(policies: Sequence[str], features: Sequence[str], out: Path | None) -> None:
    """Run the cells on the device that is here, and write what is found."""
    found = results(policies, features)
    name = f"{found['device'].lower().replace(' ', '-')}-jax{jax.__version__}"
    out = out or Path(__file__).parent / "results" / name
    out.mkdir(parents=True, exist_ok=True)
    (out / "devices.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "devices.md").write_text(markdown(found), encoding="utf-8")
    print(markdown(found))
    print(f"written: {out / 'devices.json'}")
    wrong = [x["policy"] for x in found["logits"] if not x.get("agrees", True)]
    wrong += [x["policy"] for x in found["cells"] if not (x["obeys"] or x["refused"])]
    if wrong:
        raise SystemExit(f"not as they should be: {', '.join(dict.fromkeys(wrong))}")
