"""One table of devices x caches, by the compilers of devices that need not be here; nothing is run.

    python -m benchmarks.device_table --devices t4,l4,a100,h100,h200,b200,v5e,v6e,v7x

Writes `results/abstract-devices/table-jaxVERSION.md` and `.json`; with `--without-triton` as if
JAX had no Pallas Triton, to `table-jaxVERSION-without-triton.md`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

import kvjax
from benchmarks import abstract, device_table
from benchmarks.abstract import CHUNK, POLICIES, SCAN, STEP, TRITON, cell_of, compiled, obeys
from benchmarks.devices import BATCH, FILLED, SHAPE, model_for
from benchmarks.report import markdown_table
from kvjax.attention.paths import kernels_for
from kvjax.core.target import target_of
from kvjax.core.topology import target_device
from kvjax.memory.device_plan import call_in_subprocess, plan_on

CACHES = {
    "raw": "raw", "8 bits": "8 bits", "4 bits": "4 bits", "ring with sinks": "sinks",
    "every other layer a window": "hybrid", "pages": "pages", "pages of 4 bits": "pages of 4 bits",
    "stacked": "raw", "stacked, 4 bits": "4 bits",
}  # fmt: skip
"""Rows of the table: policies of ``benchmarks.abstract``."""


def row(device: str, title: str) -> dict[str, Any]:
    """What a compiler says of a cache, or why it says nothing."""
    policy, start = CACHES[title], time.perf_counter()
    about: dict[str, Any] = {"device": device, "cache": title}
    try:
        step = cell_of(policy, "8,192", SCAN if title.startswith("stacked") else STEP)
        one = compiled(step, device)
        many = compiled(cell_of(policy, "8,192", CHUNK), device)
        if step.form == SCAN:
            # A kernel is given the whole stack and reads a layer, which a program's text hides.
            moved, ideal = None, None
        else:
            model = model_for(policy, 4)
            if target_of(target_device(device)).before_ampere:
                model = replace(model, dtype="float16")
            plan = plan_on(model, POLICIES[policy], device=device, batch=BATCH, max_len=FILLED)
            moved, ideal = plan.bytes_moved, plan.min_bytes_moved
    except (ValueError, NotImplementedError, ImportError, jax.errors.JaxRuntimeError) as error:
        return about | {"refused": " ".join(str(error).split())[:200]}
    return about | {
        "cache_bytes": sum(one.cache.values()), "aliased": one.aliased + one.host_aliased,
        "temporaries": one.temporaries, "prompt": many.temporaries, "moved": moved, "ideal": ideal,
        "obeys": obeys(one, step, policy) and many.whole, "path": _path(one, device),
        "seconds": round(time.perf_counter() - start, 1),
    }  # fmt: skip


KERNELS = {
    "mosaic_gpu": ('custom_call_target="mosaic_gpu', "Mosaic GPU"),
    "mosaic_tpu": ('custom_call_target="tpu_custom_call', "Mosaic TPU"),
    "triton": ('custom_call_target="__gpu$xla.gpu.triton', "Triton"),
}
"""Of each kernel: how its calls are written in a program's text, and its title in the table."""


def _path(found: abstract.Found, device: str) -> str:
    """The title of the kernel in a program, or the path without one."""
    for kernel in kernels_for(target_of(target_device(device))):
        name, title = KERNELS[kernel]
        if name in found.text:
            return title
    return "buckets"


def rows(device: str, titles: Sequence[str], without: Sequence[str]) -> list[dict[str, Any]]:
    """All rows of a device; see ``abstract.as_later``."""
    abstract.as_later(without)
    found = []
    for title in titles:
        found.append(row(device, title))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def markdown(found: Sequence[dict[str, Any]], versions: str) -> str:
    """The table."""
    heads = ["device", "cache", "path", "cache, MB", "aliased, MB", "temporaries, MB",
             "% of the cache", "of 512 tokens, MB", "moved / ideal", "law"]  # fmt: skip
    lines = []
    for each in found:
        if "refused" in each:
            lines.append([each["device"], each["cache"], each["refused"], *[""] * 7])
            continue
        cache = each["cache_bytes"]
        lines.append([
            each["device"], each["cache"], each["path"], f"{cache / 1e6:,.1f}",
            f"{each['aliased'] / 1e6:,.1f}", f"{each['temporaries'] / 1e6:.2f}",
            f"{100 * each['temporaries'] / cache:.2f}", f"{each['prompt'] / 1e6:,.1f}",
            f"{each['moved'] / each['ideal']:.3f}" if each["moved"] else "",
            "holds" if each["obeys"] else "**broken**",
        ])  # fmt: skip
    table = "\n".join(markdown_table(heads, lines))
    return f"""# Compiled for devices; nothing was run

{versions}.
Each line is one layer of attention in bfloat16: 8 rows, 32 query heads, 8 key/value heads, 128
channels, 8,192 slots; *stacked* is four such layers.

- *aliased*: bytes of the donated cache that are updated in place.
- *temporaries*: of a decode step, and of a call with 512 tokens a row.
- *moved / ideal*: bytes that a decode step moves through the device's memory, over those of the
  weights and the cache, read once. Measured on four layers of {SHAPE}, {BATCH} rows, {FILLED:,}
  tokens in the cache (in float16 on a T4). Not measured for stacks.
- *law*: whether the copy law holds (`obeys` in `benchmarks/abstract.py`).

{table}
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, each device in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_table", description=__doc__)
    parser.add_argument("--devices", default="t4,l4,a100,h100,h200,b200,v5e,v6e,v7x")
    parser.add_argument(
        "--without-triton", action="store_true", help="as a JAX that has no Pallas Triton"
    )
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/abstract-devices")
    given = parser.parse_args(arguments)
    out = given.out or Path(__file__).parent / "results" / "abstract-devices"
    found: list[dict[str, Any]] = []
    versions = f"kvjax {kvjax.__version__}, JAX {jax.__version__}"
    stem = f"table-jax{jax.__version__}"
    without: tuple[str, ...] = ()
    if given.without_triton:
        versions, stem, without = f"{versions} without Triton", f"{stem}-without-triton", TRITON
    for device in given.devices.split(","):
        # By the name that another process finds it by.
        found += call_in_subprocess(device_table.rows, device, [*CACHES], without)
        text = json.dumps({"versions": versions, "rows": found}, indent=1) + "\n"
        (out / f"{stem}.json").write_text(text, encoding="utf-8")
        (out / f"{stem}.md").write_text(markdown(found, versions), encoding="utf-8")
    print(markdown(found, versions))


if __name__ == "__main__":
    main()
