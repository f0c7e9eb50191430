"""What the project promises about speed, held against one run's figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

# Cells (batch, prompt) in which kvjax must keep up with Transformers.
PEER_CELLS = {(1, 64), (1, 2048), (1, 8192), (8, 64), (8, 2048)}
SPEEDUP_PROMPT = 2048


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of measurements made side by side."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(above / below for above, below in pairs)


def fastest_peer(engines: dict[str, Any]) -> str | None:
    """The engine of Transformers with the shortest median step; None without one."""
    peers = [name for name in engines if name.startswith("transformers")]
    if not peers:
        return None
    return min(peers, key=lambda name: statistics.median(engines[name]["decode_seconds"]))


def _claim(
    text: str, dtype: str, cell: str, measured: float, sense: str, limit: float, required: bool
) -> dict[str, Any]:
    passed = measured <= limit if sense == "<=" else measured >= limit
    return {
        "claim": text,
        "dtype": dtype,
        "cell": cell,
        "measured": measured,
        "sense": sense,
        "limit": limit,
        "required": required,
        "passed": passed,
    }


def cell_claims(cell: dict[str, Any], full_size: bool) -> list[dict[str, Any]]:
    """The claims one cell can answer; required are those in float32 on the full-size model."""
    batch, prompt, dtype = cell["batch"], cell["prompt"], cell["dtype"]
    where = f"{batch}x{prompt}"
    promised = full_size and dtype == "float32"
    engines = cell["engines"]
    ours = engines["kvjax"]
    claims = []
    peer = fastest_peer(engines)
    if peer is not None:
        ratio = paired_ratio(ours["decode_seconds"], engines[peer]["decode_seconds"])
        text = f"a step against {peer}'s (kvjax / peer)"
        required = promised and (batch, prompt) in PEER_CELLS
        claims.append(_claim(text, dtype, where, ratio, "<=", 1.10, required))
    at_length = promised and prompt == SPEEDUP_PROMPT
    step = 1e-3 * ours["milliseconds_per_token"]
    speedup = statistics.median(ours["uncached_seconds"]) / step
    text = "a step without the cache / with it"
    claims.append(_claim(text, dtype, where, speedup, ">=", 10.0, at_length))
    ratio = paired_ratio(ours["uncached_seconds"], ours["prefill_seconds"])
    text = "a step without the cache / our prefill"
    claims.append(_claim(text, dtype, where, ratio, "<=", 1.10, at_length))
    return claims


def capacity_claim(capacity: dict[str, Any], full_size: bool) -> dict[str, Any]:
    """A step costs the same however much room the cache has."""
    small, large = capacity["max_lens"]
    ratio = paired_ratio(capacity["seconds"][1], capacity["seconds"][0])
    text = f"a step with max_len {large:,} / {small:,}"
    required = full_size and capacity["dtype"] == "float32"
    where = f"1x{capacity['prompt']}"
    return _claim(text, capacity["dtype"], where, ratio, "<=", 1.10, required)


def all_claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every claim of a run, cells first."""
    full_size = results["settings"]["full_size"]
    claims = [claim for cell in results["cells"] for claim in cell_claims(cell, full_size)]
    return claims + [capacity_claim(capacity, full_size) for capacity in results["capacity"]]
