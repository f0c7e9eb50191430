"""Plots of a run: milliseconds a token, and what the cache saves, against prompt length."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

matplotlib.use("Agg")

# Colours that stay apart for colour-blind readers (Okabe and Ito).
OURS, DYNAMIC, STATIC, FLOOR = "#0072B2", "#D55E00", "#009E73", "#777777"
COMPILED, LLAMA_CPP, OPENVINO, MLX = "#E69F00", "#CC79A7", "#56B4E9", "#000000"
PEERS = {
    "Transformers, static cache": (
        ("transformers-static-eager", "transformers-static-sdpa"),
        {"color": STATIC, "marker": "s"},
    ),
    "Transformers, dynamic cache": (("transformers-dynamic",), {"color": DYNAMIC, "marker": "^"}),
    "Transformers, compiled": (
        ("transformers-static-compile",),
        {"color": COMPILED, "marker": "D", "linestyle": "-."},
    ),
    "llama.cpp": (("llama_cpp",), {"color": LLAMA_CPP, "marker": "v"}),
    "OpenVINO": (("openvino",), {"color": OPENVINO, "marker": "P"}),
    "mlx-lm": (("mlx",), {"color": MLX, "marker": "x"}),
}
"""Beginnings of the names of engines that share a line, the fastest standing for all, its style."""


def _best(cell: dict[str, Any], kinds: tuple[str, ...]) -> float | None:
    found = [
        engine["milliseconds_per_token"]
        for name, engine in cell["engines"].items()
        if name.startswith(kinds)
    ]
    return min(found, default=None)


def _series(results: dict[str, Any], cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    speed = results["bandwidth"]["bytes_per_second"]
    ours = [cell["engines"]["kvjax"] for cell in cells]
    return [
        {
            "label": "kvjax, without a cache",
            "y": [1e3 * statistics.median(engine["uncached_seconds"]) for engine in ours],
            "style": {"color": OURS, "linestyle": "--", "marker": "o", "markerfacecolor": "white"},
        },
        *(
            {"label": label, "y": [_best(cell, kinds) for cell in cells], "style": style}
            for label, (kinds, style) in PEERS.items()
        ),
        {
            "label": "kvjax",
            "y": [engine["milliseconds_per_token"] for engine in ours],
            "style": {"color": OURS, "marker": "o", "linewidth": 2.4},
        },
        {
            "label": "reading weights and cache once",
            "y": [1e3 * engine["bytes_per_step"] / speed for engine in ours],
            "style": {"color": FLOOR, "linestyle": ":"},
        },
    ]


def _scales(axes: Any, prompts: set[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted(prompts))
    axes.tick_params(labelbottom=True, labelleft=True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def draw_speedup(results: dict[str, Any], path: Path) -> None:
    """Save how many times longer a step takes without the cache, against prompt length."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    lines: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for cell in results["cells"]:
        ours = cell["engines"]["kvjax"]
        whole = 1e3 * statistics.median(ours["uncached_seconds"])
        point = (cell["prompt"], whole / ours["milliseconds_per_token"])
        lines.setdefault((cell["dtype"], cell["batch"]), []).append(point)
    for (dtype, batch), points in lines.items():
        style: dict[str, Any] = {"color": OURS if dtype == "float32" else DYNAMIC, "marker": "o"}
        style["linestyle"] = "-" if batch == 1 else "--"
        label = f"{dtype}, batch {batch}"
        axes.plot(*zip(*sorted(points), strict=True), label=label, **style)
    _scales(axes, {cell["prompt"] for cell in results["cells"]})
    axes.set_xlabel("prompt length (tokens)")
    axes.set_ylabel("a step without the cache / with it")
    axes.legend(frameon=False, fontsize=9)
    version = results["versions"]["jax"]
    figure.suptitle(f"What the cache saves on {results['device']} (jax {version})", fontsize=11)
    figure.savefig(path, dpi=150)


def draw(results: dict[str, Any], path: Path) -> None:
    """Save milliseconds a token to `path`, in a panel for each dtype and batch."""
    cells = results["cells"]
    dtypes = sorted({cell["dtype"] for cell in cells}, reverse=True)
    batches = sorted({cell["batch"] for cell in cells})
    size = (0.9 + 4.6 * len(batches), 1.3 + 3.5 * len(dtypes))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(dtypes), len(batches), squeeze=False, sharex=True, sharey=True)
    handles: dict[str, Any] = {}
    for i, dtype in enumerate(dtypes):
        for j, batch in enumerate(batches):
            axes = panels[i][j]
            here = [cell for cell in cells if (cell["dtype"], cell["batch"]) == (dtype, batch)]
            here.sort(key=lambda cell: cell["prompt"])
            prompts = [cell["prompt"] for cell in here]
            for series in _series(results, here):
                points = [(x, y) for x, y in zip(prompts, series["y"], strict=True) if y]
                if points:
                    (line,) = axes.plot(*zip(*points, strict=True), **series["style"])
                    handles[series["label"]] = line
            _scales(axes, {cell["prompt"] for cell in cells})
            axes.set_title(f"{dtype}, batch {batch}", fontsize=10)
            if i == len(dtypes) - 1:
                axes.set_xlabel("prompt length (tokens)")
            if j == 0:
                axes.set_ylabel("milliseconds a token")
    versions = results["versions"]
    names = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch") if name in versions)
    figure.suptitle(f"One decode step on {results['device']} ({names})", fontsize=11)
    order = [label for label in handles if label != "kvjax"]
    order.insert(0, "kvjax")
    figure.legend(
        [handles[label] for label in order],
        order,
        loc="outside lower center",
        ncols=2 if len(batches) == 1 else 3,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, dpi=150)
