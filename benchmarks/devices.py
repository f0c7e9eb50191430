"""The copy law and the bytes that a step moves, for devices that need not be here:
`python -m benchmarks.devices --devices v5e,h200`.

Every cell is compiled by the device's own compiler; nothing runs. Writes
`results/abstract-devices/DEVICE-jaxVERSION.md`, `.json` and `.png`.

`python -m benchmarks.devices --here` checks and times the device that JAX sees here: it prints one
table of laws, achieved bandwidth and tokens per second, and writes one file to send back,
`results/DEVICE-jaxVERSION/devices.json`. On a CPU it is a trial run, as with `--quick`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax

import kvjax
from benchmarks import abstract, here, tokens
from benchmarks.abstract import CHUNK, FEATURES, LOOP, POLICIES, STEP, cell_of, compiled
from benchmarks.report import markdown_table
from kvjax.core.topology import compiling_for, resolve_device
from kvjax.memory.device_plan import compiled_call, plan_on
from kvjax.memory.shapes import SHAPES, ModelShape
from kvjax.memory.sizes import abstract_cache

LIMITS = {"raw": 1.10, "8 bits": 1.15, "4 bits": 1.25}
"""Bytes that a step may move, over the ideal."""
SHAPE, BATCH, FILLED = "llama-3-8b", 8, 8192


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.devices", description=__doc__)
    parser.add_argument("--devices", default="v5e,h200", help="default: v5e,h200")
    parser.add_argument("--policies", default=",".join(POLICIES), help="default: all")
    parser.add_argument("--shapes", help="of benchmarks.abstract.FEATURES, with ';'; default: all")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/abstract-devices")
    parser.add_argument("--here", action="store_true", help="on the device that is here")
    parser.add_argument("--quick", action="store_true", help="one policy and shape: a trial run")
    parser.add_argument(
        "--minutes", type=float, default=12, help="with --here: no policy begins after these"
    )
    given = parser.parse_args(arguments)
    if given.here:
        # Transformers needs a part of the device's memory, before JAX does.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        given.quick = given.quick or jax.default_backend() == "cpu"
    usual = ["8,192"] if given.here else list(FEATURES)
    given.features = given.shapes.split(";") if given.shapes else usual
    if given.quick:
        given.policies = "raw"
        given.features = [*abstract.SMALL] if given.here else ["8,192", "32,768"]
    return given


def cell(device: str, policy: str, feature: str, form: str) -> dict[str, Any]:
    """What a cell's compiler says, or why there is none."""
    start = time.perf_counter()
    one = cell_of(policy, feature, form)
    about = {"policy": policy, "feature": feature, "form": form}
    try:
        found = compiled(one, device)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return about | {"refused": " ".join(str(error).split())[:200]}
    figures = {k: v for k, v in vars(found).items() if k not in ("text", "program")}
    return about | figures | {
        "whole": found.whole, "limit": abstract.limit(found, form),
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


def moved(device: str, policy: str) -> dict[str, Any]:
    """The bytes of a step of the whole model beside the ideal, and the seconds that one of four
    layers takes to compile."""
    model = model_for(policy, SHAPES[SHAPE].num_hidden_layers)
    try:
        found = plan_on(model, POLICIES[policy], device=device, batch=BATCH, max_len=FILLED)
        seconds = compiling(device, policy)
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return {"policy": policy, "refused": " ".join(str(error).split())[:200]}
    return {"policy": policy, **asdict(found), "least": found.seconds, "compiling": seconds}


def compiling(device: str, policy: str) -> float:
    """Seconds to compile a step of four layers."""
    model, there = model_for(policy, 4), resolve_device(device)
    with compiling_for(there):
        cache = abstract_cache(model, POLICIES[policy], batch=BATCH, max_len=FILLED)
        start = time.perf_counter()
        compiled_call(model, cache, FILLED, None, [0, 1, 2, 3], there, 1)
        return round(time.perf_counter() - start, 1)


def model_for(policy: str, layers: int) -> ModelShape:
    """The model with so many layers, of which every other one has a window where that counts."""
    windows = abstract.LAYERS.get(policy, {}).get("windows")
    each = None if windows is None else tuple(windows) * (layers // len(windows))
    return replace(SHAPES[SHAPE], num_hidden_layers=layers, windows=each)


def run(device: str, given: argparse.Namespace) -> dict[str, Any]:
    """All cells of a device."""
    policies = given.policies.split(",")
    cells = []
    for policy in policies:
        for feature in given.features:
            for form in (STEP, LOOP, CHUNK):
                cells.append(cell(device, policy, feature, form))
                print(device, *list(cells[-1].values())[:3], file=sys.stderr)
    steps = [moved(device, policy) for policy in policies if policy != "growing"]
    versions = {"kvjax": kvjax.__version__, "jax": jax.__version__}
    return {"device": device, "versions": versions, "cells": cells, "steps": steps}


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows, the first one their heads, as Markdown."""
    return "\n".join(markdown_table(rows[0], rows[1:]))


def markdown(results: dict[str, Any]) -> str:
    """The law, a row a policy and shape; and the bytes of a step."""
    by_cell: dict[tuple[str, str], dict[str, Any]] = {}
    for found in results["cells"]:
        by_cell.setdefault((found["policy"], found["feature"]), {})[found["form"]] = found
    rows = [["cache", "shape", "MB", STEP, LOOP, CHUNK, "whole", "large", "s"]]
    for (policy, feature), forms in by_cell.items():
        there = [each for each in forms.values() if "refused" not in each]
        size = f"{sum(there[0]['cache'].values()) / 1e6:,.1f}" if there else ""
        rows.append([
            policy, feature, size, *(_temporaries(forms[form]) for form in (STEP, LOOP, CHUNK)),
            "yes" if all(each["whole"] for each in there) else "**no**",
            str(sum(len(each["large"]) for each in there if each["form"] != CHUNK) or ""),
            f"{sum(each['seconds'] for each in there):.0f}",
        ])  # fmt: skip
    steps = [[
        "cache", "moves, MB", "ideal, MB", "over the ideal", "limit", "at least, ms",
        "4 layers compile, s",
    ]]  # fmt: skip
    for found in results["steps"]:
        if "refused" in found:
            steps.append([found["policy"], found["refused"], "", "", "", "", ""])
            continue
        most = LIMITS.get(found["policy"])
        steps.append([
            found["policy"], f"{found['moved'] / 1e6:,.0f}", f"{found['ideal'] / 1e6:,.0f}",
            f"{found['moved'] / found['ideal']:.3f}", "" if most is None else f"{most:.2f}",
            f"{1e3 * found['least']:.1f}", f"{found['compiling']:.1f}",
        ])  # fmt: skip
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return f"""# Compiled for a {results["device"]}, of which nothing ran

{versions}. A layer in bfloat16, 8 rows, 32 heads of queries, 8 of keys, 128 channels, 8,192
slots where the shape says nothing else. Megabytes of temporaries beside the donated cache; bold:
above {100 * abstract.SHARE:.0f} % of the cache, or, of 512 tokens, above {abstract.LONG} times the
queries, beside layers that are fetched ahead. *whole*: the cache is updated where it stands.
*large*: results of half a layer's body, of a step and of a loop. *s*: seconds to compile, all
three.

{table(rows)}

A decode step of {SHAPE}, {BATCH} rows behind {FILLED:,} tokens: bytes that its program moves
through the device's memory, beside weights and cache once; and what that takes at its bandwidth.

{table(steps)}
"""


def _temporaries(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"refused: {found['refused'][:60]}"
    size = f"{found['temporaries'] / 1e6:,.2f}"
    far = found["host_temporaries"]
    size += f" (host {far / 1e6:,.0f})" if far else ""
    return f"**{size}**" if found["temporaries"] > found["limit"] else size


def plot(results: dict[str, Any], path: Path) -> None:
    """Bytes moved beside the ideal."""
    from matplotlib.figure import Figure

    steps = [found for found in results["steps"] if "refused" not in found]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(steps))
    axes.barh([p + 0.2 for p in places], [s["ideal"] / 1e9 for s in steps], 0.38, color="#999999",
              label="weights and cache, once")  # fmt: skip
    axes.barh([p - 0.2 for p in places], [s["moved"] / 1e9 for s in steps], 0.38, color="#0072B2",
              label="what the program moves")  # fmt: skip
    axes.set_yticks(list(places), [s["policy"] for s in steps])
    axes.invert_yaxis()
    axes.set_xlabel(f"GB a step ({SHAPE}, {BATCH} rows behind {FILLED:,} tokens)")
    axes.set_title(f"compiled for a {results['device']}")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    given = parse(arguments)
    if given.here:
        work = tokens.QUICK if given.quick else tokens.FULL
        here.main(given.policies.split(","), given.features, given.out, work, given.minutes)
        return
    out = given.out or Path(__file__).parent / "results" / "abstract-devices"
    out.mkdir(parents=True, exist_ok=True)
    for device in given.devices.split(","):
        results = run(device, given)
        stem = out / f"{device}-jax{jax.__version__}"
        text = json.dumps(results, indent=1) + "\n"
        stem.with_name(stem.name + ".json").write_text(text, encoding="utf-8")
        stem.with_name(stem.name + ".md").write_text(markdown(results), encoding="utf-8")
        plot(results, stem.with_name(stem.name + ".png"))
        print(markdown(results))


if __name__ == "__main__":
    main()
