"""What the table of attention's paths goes by on TPUs and GPUs: `python -m benchmarks.paths`.

Each path is compiled for a layer and a call, by the compiler of a device that need not be here:
bytes that it moves behind full rows, temporaries, and whether a result is as large as half a layer.
The one that moves fewest and obeys is the table's. Writes
`results/abstract-devices/paths-DEVICE.md`.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from benchmarks.abstract import STEP, cell_of, compiled
from benchmarks.report import markdown_table
from kvjax.attention.blocks import CHUNK, COARSE_BLOCK, MAX_QUERIES
from kvjax.attention.paths import default_paths
from kvjax.core.target import DEVICE_SPECS
from kvjax.memory.hlo import bytes_moved

POLICIES = "raw", "sinks", "8 bits", "4 bits", "2 bits", "rotated", "host"
CALLS = 1, MAX_QUERIES, 2 * MAX_QUERIES, 512
"""Tokens of a row's call: a step, the most of short ones, more, and a chunk of a prompt."""
PATHS = "pallas", "buckets", "blocks"
TURNS = {"buckets": 8192 // CHUNK, "blocks": 8192 // COARSE_BLOCK}
"""Of loops behind full rows, where the text does not say."""


def row(device: str, policy: str, new: int, path: str) -> dict[str, Any]:
    """A path for a call of a layer."""
    cell = replace(cell_of(policy, "8,192", STEP), path=path, new=new)
    about = {"policy": policy, "new": new, "path": path}
    try:
        found = compiled(cell, device)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
        return about | {"refused": " ".join(str(error).split())[:100]}
    moved = bytes_moved(found.text, TURNS.get(path, 1)) / sum(found.cache.values())
    return about | {
        "moved": moved, "temporaries": found.temporaries / 1e6,
        "large": len(found.large), "whole": found.whole,
    }  # fmt: skip


def chosen(device: str, policy: str, new: int) -> str:
    """The path that the table takes first."""
    return default_paths(DEVICE_SPECS[device].target, policy == "host", new)[0]


def markdown(device: str) -> str:
    """All of them, a row each; bold what the table takes."""
    head = ["cache", "tokens", "path", "moves, over the cache", "temporaries, MB", "large"]
    rows = []
    for policy, new, path in itertools.product(POLICIES, CALLS, PATHS):
        found = row(device, policy, new, path)
        print(device, *found.values(), flush=True)
        name = f"**{path}**" if path == chosen(device, policy, new) else path
        figures = [f"refused: {found['refused']}", "", ""] if "refused" in found else [
            f"{found['moved']:.2f}", f"{found['temporaries']:,.1f}", str(found["large"] or ""),
        ]  # fmt: skip
        rows.append([policy, str(new), name, *figures])
    return "\n".join(markdown_table(head, rows))


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description=__doc__)
    parser.add_argument("--devices", default="v5e,h200")
    folder = Path(__file__).parent / "results" / "abstract-devices"
    for device in parser.parse_args().devices.split(","):
        text = f"""# Paths of attention compiled for a {device}, JAX {jax.__version__}

`python -m benchmarks.paths`: a layer in bfloat16, 8 rows, 32 heads of queries, 8 of keys, 128
channels, 8,192 slots, full. Bold: what the table takes. *Moves*: bytes of the device's memory, over
those of the cache; a kernel reads its operands once there, all of them, so that a ring with sinks,
which two kernels are given, counts twice, though the second reads the sinks alone; what is fetched
again for other queries does not count; of walks on TPUs it is the least, for the text does not tell
their turns. *Large*: results of half a layer's body, those of the queries of long calls among
them. Nothing ran.

{markdown(device)}
"""
        (folder / f"paths-{device}.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
