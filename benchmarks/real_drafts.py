"""Drafts on a trained model and real requests: ``python -m benchmarks.real_drafts``.

Twenty requests to SmolLM2-135M-Instruct, one at a time, decoded greedily with and without drafts in
turn: by prompt lookup, and by the model's own first layers. The texts must be the same.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import jax

import kvjax
from benchmarks.bandwidth import cpu_name
from benchmarks.claims import paired_ratio
from benchmarks.decode import default_folder
from benchmarks.real import DRAFT_PROMPTS, REASON, real_model_file
from kvjax import models
from kvjax.core.reporting import pyplot

LAYERS = (3, 6, 10)
COLORS = "#0072B2", "#D55E00", "#009E73", "#CC79A7"


def measure(lm: Any, drafts: dict[str, Any], tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds of decoding each request with each draft, and how many drafts were accepted."""
    found = []
    for number, text in enumerate(DRAFT_PROMPTS):
        prompt = lm.tokenizer.chat([{"role": "user", "content": text}])
        cell: dict[str, Any] = {"request": text.splitlines()[0], "drafts": {}}
        seconds: dict[str, list[float]] = {name: [] for name in drafts}
        results: dict[str, Any] = {}
        for turn in range(rounds + 1):  # the first compiles
            for name, draft in drafts.items():
                result = kvjax.generate(lm, [prompt], max_new_tokens=tokens, draft=draft)
                results[name] = result
                if turn:
                    seconds[name].append(result.stats.decode_seconds)
        plain = results["none"]
        for name, result in results.items():
            drafted = result.stats.speculation
            cell["drafts"][name] = {
                "seconds": seconds[name],
                "same": result.tokens == plain.tokens,
                "tokens": plain.stats.new_tokens,
                "speed": paired_ratio(seconds["none"], seconds[name]),
                "drafted": drafted.drafted_tokens if drafted else 0,
                "accepted": drafted.accepted_tokens if drafted else 0,
            }
        found.append(cell)
        speeds = ", ".join(f"{name} {each['speed']:.2f}" for name, each in cell["drafts"].items())
        print(f"{number + 1}/{len(DRAFT_PROMPTS)} {cell['request']}: {speeds}", file=sys.stderr)
    return found


def table(found: list[dict[str, Any]]) -> str:
    """One line per draft: tokens a second, speed, and acceptance."""
    lines = [
        "| draft | tokens per second | speed against no draft: median (worst to best request) | "
        "accepted of drafted |",
        "| --- | --- | --- | --- |",
    ]
    for name in found[0]["drafts"]:
        cells = [cell["drafts"][name] for cell in found]
        rate = sum(c["tokens"] for c in cells) / sum(statistics.median(c["seconds"]) for c in cells)
        speeds = sorted(c["speed"] for c in cells)
        drafted, accepted = (sum(c[key] for c in cells) for key in ("drafted", "accepted"))
        share = f"{accepted / drafted:.0%} of {drafted:,}" if drafted else ""
        lines.append(
            f"| {name} | {rate:.1f} | {statistics.median(speeds):.2f} "
            f"({speeds[0]:.2f} to {speeds[-1]:.2f}) | {share} |"
        )
    return "\n".join(lines)


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Speed against no draft, a point for each request and draft."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 6.5), layout="constrained")
    drafts = [name for name in found[0]["drafts"] if name != "none"]
    rows = range(len(found))
    for name, marker, color in zip(drafts, "os^v", COLORS, strict=False):
        speeds = [cell["drafts"][name]["speed"] for cell in found]
        axes.plot(speeds, rows, marker, color=color, label=name)
    axes.axvline(1, color="#777777", linewidth=1)
    axes.set_yticks(rows, [cell["request"] for cell in found])
    axes.invert_yaxis()
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("speed, with no draft = 1")
    axes.grid(alpha=0.3)
    axes.legend(title="draft")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_drafts", description=__doc__)
    parser.add_argument("--tokens", type=int, default=96, help="new tokens per request, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    file = real_model_file()
    if file is None:
        print(f"error: {REASON}", file=sys.stderr)
        return 2
    lm = models.load(file)
    drafts: dict[str, Any] = {"none": None, "lookup": "lookup"}
    drafts |= {f"first {n} layers": models.first_layers(lm, n) for n in LAYERS}
    device = jax.devices()[0]
    results = {
        "device": cpu_name() if device.platform == "cpu" else device.device_kind,
        "versions": {"jax": jax.__version__, "kvjax": kvjax.__version__},
        "file": file.name,
        "tokens": given.tokens,
        "requests": measure(lm, drafts, given.tokens, given.rounds),
    }
    out = given.out or default_folder(results)
    out.mkdir(parents=True, exist_ok=True)
    (out / "drafts.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    heading = (
        f"{file.name} on {results['device']}, JAX {jax.__version__}: {len(DRAFT_PROMPTS)} requests"
    )
    text = f"{heading}, up to {given.tokens} tokens each, greedy.\n\n{table(results['requests'])}\n"
    (out / "drafts.md").write_text(text, encoding="utf-8")
    plot(results["requests"], out / "drafts.png")
    print(text)
    same = all(each["same"] for cell in results["requests"] for each in cell["drafts"].values())
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
