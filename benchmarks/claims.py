"""What the project promises about speed, held against one run's figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

NEWEST = (0, 12)
"""From this version of JAX on everything is promised; with older ones, a part of it."""
SPEEDUP_PROMPT = 2048
PREFILL_CELLS = {(1, 2048), (1, 8192)}
PREFILL_LIMIT = {"float32": 1.0, "bfloat16": 0.5}
MEDIAN_LIMIT = 1.3
CACHE_READ = 12e9
"""Bytes of a float32 cache that a step should read a second, as its time grows with the text."""


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of measurements made side by side."""
    pairs = zip(numerators, denominators, strict=True)
    return statistics.median(above / below for above, below in pairs)


def is_eager(name: str) -> bool:
    """Whether an engine is Transformers without `torch.compile`."""
    return name.startswith("transformers") and not name.endswith("-compile")


def fastest(engines: dict[str, Any], among: Callable[[str], bool]) -> str | None:
    """The engine with the shortest median step among some; None without one."""
    names = [name for name in engines if among(name)]
    if not names:
        return None
    return min(names, key=lambda name: statistics.median(engines[name]["decode_seconds"]))


def fastest_peer(engines: dict[str, Any]) -> str | None:
    """The engine with the shortest median step beside kvjax; None without one."""
    return fastest(engines, lambda name: name != "kvjax")


def prefill_seconds(found: dict[str, Any]) -> float | None:
    """The median of a whole prompt and its cache's allocation; None where none was timed."""
    if not found["prefill_seconds"]:
        return None
    both = zip(found["prefill_seconds"], found["prefill_init_seconds"], strict=True)
    return statistics.median(map(sum, both))


def is_newest(results: dict[str, Any]) -> bool:
    """Whether a run's JAX is one that everything is promised of."""
    first, second, *_ = results["versions"]["jax"].split(".")
    return (int(first), int(second)) >= NEWEST


def _claim(
    text: str, dtype: str, cell: str, measured: float, sense: str, limit: float, required: bool
) -> dict[str, Any]:
    passed = {"<": measured < limit, "<=": measured <= limit, ">=": measured >= limit}[sense]
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


def peer_claims(cell: dict[str, Any], newest: bool, full_size: bool) -> list[dict[str, Any]]:
    """Steps against the faster of each kind of peer, and prompts against Transformers."""
    dtype, engines = cell["dtype"], cell["engines"]
    where = f"{cell['batch']}x{cell['prompt']}"
    float32 = dtype == "float32"
    held = [
        # What we are held against, the limit, and where that is promised.
        (is_eager, "<" if newest else "<=", 1.0, newest or float32),
        (lambda name: name.endswith("-compile"), "<", 1.0, newest),
        (lambda name: name.startswith("llama_cpp"), "<=", 1.10, newest and float32),
    ]
    claims = []
    for among, sense, limit, promised in held:
        peer = fastest(engines, among)
        if peer is not None:
            steps = (engines[name]["decode_seconds"] for name in ("kvjax", peer))
            text = f"a step against {peer}'s (kvjax / peer)"
            required = full_size and promised
            claims.append(_claim(text, dtype, where, paired_ratio(*steps), sense, limit, required))
    prefills = {name: prefill_seconds(found) for name, found in engines.items()}
    theirs = {name: s for name, s in prefills.items() if s is not None and is_eager(name)}
    ours = prefills["kvjax"]
    if theirs and ours and (cell["batch"], cell["prompt"]) in PREFILL_CELLS:
        peer = min(theirs, key=lambda name: theirs[name])
        text = f"a prompt's tokens a second against {peer}'s (kvjax / peer)"
        limit, required = PREFILL_LIMIT[dtype], full_size and newest
        claims.append(_claim(text, dtype, where, theirs[peer] / ours, ">=", limit, required))
    return claims


def cell_claims(cell: dict[str, Any], newest: bool, full_size: bool) -> list[dict[str, Any]]:
    """The claims one cell can answer, of the full-size model."""
    dtype, prompt = cell["dtype"], cell["prompt"]
    where = f"{cell['batch']}x{prompt}"
    ours = cell["engines"]["kvjax"]
    claims = peer_claims(cell, newest, full_size)
    at_length = full_size and dtype == "float32" and prompt == SPEEDUP_PROMPT
    step = 1e-3 * ours["milliseconds_per_token"]
    speedup = statistics.median(ours["uncached_seconds"]) / step
    text = "a step without the cache / with it"
    claims.append(_claim(text, dtype, where, speedup, ">=", 10.0, at_length))
    ratio = paired_ratio(ours["uncached_seconds"], ours["prefill_seconds"])
    text = "a step without the cache / our prefill"
    claims.append(_claim(text, dtype, where, ratio, "<=", 1.10, at_length))
    return claims


def median_claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """How much faster than Transformers, not compiled, a step is in the middle of all cells."""
    required = results["settings"]["full_size"] and is_newest(results)
    claims = []
    for dtype in dict.fromkeys(cell["dtype"] for cell in results["cells"]):
        ratios = []
        for cell in results["cells"]:
            peer = fastest(cell["engines"], is_eager)
            if cell["dtype"] == dtype and peer is not None:
                steps = (cell["engines"][name]["decode_seconds"] for name in (peer, "kvjax"))
                ratios.append(paired_ratio(*steps))
        if ratios:
            text = "the faster Transformers' step / ours, the median of all cells"
            measured = statistics.median(ratios)
            claims.append(_claim(text, dtype, "all", measured, ">=", MEDIAN_LIMIT, required))
    return claims


def read_rate(cells: Sequence[dict[str, Any]], name: str) -> float:
    """Bytes of the cache that an engine's step reads a second: those that the longest text has more
    than the shortest, over the time that its step takes longer. Infinite if it takes no longer."""
    first, *_, last = sorted(cells, key=lambda cell: cell["cache_bytes_filled"])
    short, long = (
        statistics.median(cell["engines"][name]["decode_seconds"]) / cell["steps"]
        for cell in (first, last)
    )
    grown = last["cache_bytes_filled"] - first["cache_bytes_filled"]
    return grown / (long - short) if long > short else float("inf")


def slope_claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """How fast the cache is read, alone and against torch's `scaled_dot_product_attention`."""
    required = results["settings"]["full_size"] and is_newest(results)
    claims = []
    for dtype in dict.fromkeys(cell["dtype"] for cell in results["cells"]):
        cells = [
            {**cell, "steps": results["settings"].get("steps")}
            for cell in results["cells"]
            if cell["dtype"] == dtype and cell["batch"] == 1
        ]
        prompts = sorted({cell["prompt"] for cell in cells})
        if len(prompts) < 2:
            continue
        where = f"1x{prompts[0]}-1x{prompts[-1]}"
        ours = read_rate(cells, "kvjax")
        if dtype == "float32":
            text = "GB/s of the cache that a step reads"
            claim = _claim(text, dtype, where, ours / 1e9, ">=", CACHE_READ / 1e9, required)
            claims.append(claim)
        for name in cells[0]["engines"]:
            if name.endswith("-sdpa") and all(name in cell["engines"] for cell in cells):
                text = f"the cache is read faster than by {name} (kvjax / peer)"
                ratio = ours / read_rate(cells, name)
                claims.append(_claim(text, dtype, where, ratio, ">=", 1.0, required))
    return claims


def capacity_claim(capacity: dict[str, Any], full_size: bool) -> dict[str, Any]:
    """A step costs the same however much room the cache has."""
    small, large = capacity["max_lens"]
    ratio = paired_ratio(capacity["seconds"][1], capacity["seconds"][0])
    text = f"a step with max_len {large:,} / {small:,}"
    required = full_size and capacity["dtype"] == "float32"
    where = f"1x{capacity['prompt']}"
    return _claim(text, capacity["dtype"], where, ratio, "<=", 1.05, required)


def all_claims(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Every claim of a run, cells first."""
    full_size, newest = results["settings"]["full_size"], is_newest(results)
    claims = [claim for cell in results["cells"] for claim in cell_claims(cell, newest, full_size)]
    claims += median_claims(results) + slope_claims(results)
    return claims + [capacity_claim(capacity, full_size) for capacity in results["capacity"]]
