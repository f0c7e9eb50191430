"""A retrieval run as tables and as a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import markdown_table
from kvjax.core.reporting import pyplot

Z = 1.96
"""Standard deviations of a 95 % interval."""
AT_CHANCE = "raw at chance"


def interval(share: float, items: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of ``items``.

    Where an item has several answers its score is a fraction. The variance of fractions is at most
    that of right and wrong, so the interval is then wider than necessary.
    """
    if not items:
        return 0.0, 1.0
    center = share + Z * Z / (2 * items)
    half = Z * math.sqrt(share * (1 - share) / items + Z * Z / (4 * items * items))
    scale = 1 + Z * Z / items
    return max((center - half) / scale, 0.0), min((center + half) / scale, 1.0)


def summary(
    task: str, length: int, items: Sequence[dict[str, Any]], policies: Sequence[str]
) -> dict[str, Any]:
    """The scores of a cell, and the items that they are from.

    For each policy: ``likelihood``, the fraction of answers that are more likely than all
    distractors; ``text``, the fraction of answers in the greedy text; their 95 % intervals; and
    ``nats``, the mean change of the answers' log-probabilities from the raw cache.
    ``raw_at_chance`` has the scores of the raw cache that are not above chance: a likelihood whose
    interval contains the chance of guessing, and a text without any answer.
    """
    found: dict[str, Any] = {}
    for policy in policies:
        scores = [item["scores"][policy] for item in items]
        nats = [_mean(x["logprobs"]) for x in scores]
        raw = [_mean(item["scores"]["raw"]["logprobs"]) for item in items]
        likelihood = _mean([_mean(x["right"]) for x in scores])
        text = _mean([x["found"] for x in scores])
        found[policy] = {
            "likelihood": likelihood, "likelihood_interval": interval(likelihood, len(items)),
            "text": text, "text_interval": interval(text, len(items)),
            "nats": _mean(nats) - _mean(raw),
        }  # fmt: skip
    lengths = [item["prompt_tokens"] for item in items]
    chance = 1 / (1 + len(items[0]["distractors"]))
    raw = found["raw"]
    at_chance = {
        "likelihood": raw["likelihood_interval"][0] <= chance,
        "text": raw["text"] == 0,
    }
    return {
        "task": task, "length": length, "count": len(items), "chance": chance,
        "prompt_tokens": [min(lengths), max(lengths)], "raw_at_chance": at_chance,
        "policies": found, "items": list(items),
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values))


def table(results: dict[str, Any], score: str) -> list[str]:
    """Lines of a Markdown table of one score: a row for each cell, a column for each policy."""
    policies = results["policies"]
    body = []
    for cell in results["cells"]:
        row = [cell["task"], f"{cell['length']:,}", str(cell["count"])]
        for policy in policies:
            row.append(_entry(results, cell, policy, score))
        body.append(row)
    return markdown_table(["task", "tokens", "items", *policies], body)


def _entry(results: dict[str, Any], cell: dict[str, Any], policy: str, score: str) -> str:
    if policy in results["same_as_raw"]:
        return "as raw"
    at_chance = cell["raw_at_chance"]["likelihood" if score == "nats" else score]
    if at_chance and policy != "raw":
        return AT_CHANCE
    found = cell["policies"][policy]
    if score == "nats":
        return f"{found['nats']:+.2f}"
    low, high = found[f"{score}_interval"]
    return f"{100 * found[score]:.0f} % ({100 * low:.0f}–{100 * high:.0f})"


def markdown(results: dict[str, Any]) -> str:
    """The run as a page."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    chances = {cell["chance"] for cell in results["cells"]}
    chance = ", ".join(f"{100 * x:.0f} %" for x in sorted(chances))
    prefill = {
        "exact": "The context, up to the end of the haystack, is prefilled once with the raw "
        "cache, which is then converted to each policy. The question and the answers are processed "
        "with the converted cache.",
        "policy": "Each policy's cache processes the whole prompt.",
    }[results["prefill"]]
    same = [
        f"{name} is the raw cache for this model, which has no layers with a window."
        for name in results["same_as_raw"]
    ]
    if results["missing"]:
        same.append(f"{results['missing']} cells are missing.")
    prompts = "its chat template" if results["chat_template"] else "plain text"
    return "\n".join(
        [
            f"# Retrieval: {results['model']}, {results['device']}",
            "",
            f"RULER's tasks with {results['parameters']}, {versions}, {results['created']}; "
            f"prompts in {prompts}. {prefill} Tokens: the most tokens of the prompt and the new "
            "tokens. raw: full precision; a number: bits; sinks: a ring in which a query "
            "sees the first 4 and the last 508 tokens. Intervals are 95 % intervals. "
            + " ".join(same),
            "",
            f"**{AT_CHANCE}**: the raw cache's likelihood interval contains the chance of guessing "
            f"({chance}), or its text has none of the answers. Such a cell says nothing about the "
            "other policies.",
            "",
            "![Scores by task, length and policy](retrieval.png)",
            "",
            "## Right answers by likelihood",
            "",
            f"The fraction of answers that are more likely than all {results['distractors']} "
            "distractors.",
            "",
            *table(results, "likelihood"),
            "",
            "## Answers in greedy text",
            "",
            "The fraction of answers that occur in the text.",
            "",
            *table(results, "text"),
            "",
            "## Change of the answers' log-probability",
            "",
            "The mean difference from the raw cache, in nats per answer, on the same items.",
            "",
            *table(results, "nats"),
            "",
            "## Bytes",
            "",
            "Bytes of a row that is full, relative to bfloat16. The raw cache has the dtype of the "
            f"run, {results['dtype']}.",
            "",
            *markdown_table(
                ["cache", *(f"{length:,} tokens" for length in results["lengths"])],
                [
                    [policy, *(f"{100 * share:.0f} %" for share in shares)]
                    for policy, shares in results["bytes"].items()
                ],
            ),
            "",
        ]
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Both scores as tables of colored cells: a row for each policy, a column for each cell."""
    plt = pyplot()
    policies = [name for name in results["policies"] if name not in results["same_as_raw"]]
    tasks = list(dict.fromkeys(cell["task"] for cell in results["cells"]))
    cells = sorted(results["cells"], key=lambda x: (tasks.index(x["task"]), x["length"]))
    size = (max(2.2 + 0.46 * len(cells), 10.5), 1.7 + 0.62 * len(policies))
    figure, panels = plt.subplots(2, 1, figsize=size, layout="constrained", sharex=True)
    titles = {
        "likelihood": "answers that are more likely than all distractors, %",
        "text": "answers in greedy text, %",
    }
    image = None
    for axes, (score, title) in zip(panels, titles.items(), strict=True):
        values = np.array([[c["policies"][p][score] for c in cells] for p in policies])
        hidden = np.array([c["raw_at_chance"][score] for c in cells])
        shown = np.ma.masked_array(100 * values, np.broadcast_to(hidden, values.shape))
        colors = plt.get_cmap("viridis").with_extremes(bad="#dddddd")
        image = axes.imshow(shown, cmap=colors, vmin=0, vmax=100, aspect="auto")
        for row, column in np.ndindex(values.shape):
            value = 100 * values[row, column]
            if not hidden[column] or policies[row] == "raw":
                dark = hidden[column] or value > 60
                axes.text(
                    column, row, f"{value:.0f}", ha="center", va="center", fontsize=7,
                    color="black" if dark else "white",
                )  # fmt: skip
        axes.set_title(title, fontsize=10)
        axes.set_yticks(range(len(policies)), [_label(name) for name in policies], fontsize=8)
        axes.set_xticks(range(len(cells)), [f"{c['length']:,}" for c in cells], fontsize=7)
        axes.tick_params(axis="x", rotation=90, length=0)
        axes.tick_params(axis="y", length=0)
        for column in range(1, len(cells)):
            if cells[column]["task"] != cells[column - 1]["task"]:
                axes.axvline(column - 0.5, color="white", linewidth=4)
    for task in tasks:
        at = [n for n, cell in enumerate(cells) if cell["task"] == task]
        panels[1].text(
            sum(at) / len(at), -0.3, task.replace(" ", "\n"), ha="center", va="top", fontsize=8,
            transform=panels[1].get_xaxis_transform(),
        )  # fmt: skip
    figure.colorbar(image, ax=panels, fraction=0.02, pad=0.01)
    figure.suptitle(
        f"Retrieval by {results['model']}, by prompt length in tokens (gray: {AT_CHANCE})",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(policy: str) -> str:
    return f"{policy} bits" if policy.isdigit() else policy


def write(results: dict[str, Any], folder: Path) -> None:
    """Write ``retrieval.json``, ``.md`` and ``.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(results, indent=1)
    (folder / "retrieval.json").write_text(text + "\n", encoding="utf-8")
    (folder / "retrieval.md").write_text(markdown(results), encoding="utf-8")
    plot(results, folder / "retrieval.png")
