"""Decoding with caches on the host beside one on the device: ``python -m benchmarks.placement``.

The random checkpoint of ``benchmarks.decode``; one prompt fills a raw cache, which is converted to
each policy. Groups of steps are timed in turn, so that all policies meet the same machine. Beside
them the link is measured: a large array put on the device and back. On a CPU both memories are the
same chips, and the figures say what the transfers' code costs, nothing of a link.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
from benchmarks.quantized import run
from kvjax.placement.order import AS_IS

POLICIES: dict[str, dict[str, Any]] = {
    "device": {},
    "host": {"name": "offloaded_static"},
    "host, 1 ahead": {"name": "offloaded_static", "prefetch": 1},
    "host, 2 ahead": {"name": "offloaded_static", "prefetch": 2},
    "device, 4 bits": {"bits": 4},
    "host, 4 bits": {"name": "offloaded_static", "bits": 4},
    "host, 4 bits, 1 ahead": {"name": "offloaded_static", "bits": 4, "prefetch": 1},
}


def link(size: int, repeats: int = 5) -> dict[str, float]:
    """Bytes a second of an array of ``size`` bytes, from the host to the device and back."""
    device, host = kvjax.Device(), kvjax.Host()
    near = jax.block_until_ready(device.put(jnp.ones(size // 4, jnp.float32)))
    speeds: dict[str, list[float]] = {"to_device": [], "to_host": []}
    for _ in range(repeats):
        start = time.perf_counter()
        far = jax.block_until_ready(host.store(near, AS_IS))
        middle = time.perf_counter()
        near = jax.block_until_ready(device.put(far))
        speeds["to_host"].append(size / (middle - start))
        speeds["to_device"].append(size / (time.perf_counter() - middle))
    return {way: statistics.median(found) for way, found in speeds.items()}


def markdown(results: dict[str, Any]) -> str:
    """The figures as a page."""
    speed = results["link"]
    lines = [
        f"# Caches on the host, after a prompt of {results['prompt']:,} tokens, one row",
        "",
        f"{results['device']}, JAX {results['versions']['jax']}; medians of {results['rounds']} "
        f"rounds of {results['steps']} steps. An array to the device: "
        f"{speed['to_device'] / 1e9:.1f} GB/s, to the host: {speed['to_host'] / 1e9:.1f} GB/s.",
        "",
        "| dtype | cache | body, MB | ms a token | to the device's raw one | body, GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for dtype, found in results["dtypes"].items():
        for name, row in found.items():
            ms = statistics.median(row["ms"])
            lines.append(
                f"| {dtype} | {name} | {row['body_bytes'] / 1e6:.0f} | {ms:.1f} "
                f"| {row['ratio']:.2f} | {row['body_bytes'] / ms / 1e6:.1f} |"
            )
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write ``placement.json`` and ``.md``."""
    run(
        "placement", __doc__, POLICIES, markdown, arguments, dtypes="float32",
        before=lambda quick: {"link": link(2**20 if quick else 2**28)},
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
