"""Metrics of cache policies as tables and a plot."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvjax.core.array_folder import expand_user
from kvjax.core.reporting import pyplot
from kvjax.quality.evaluation import CacheBytes, Quality, pareto_front

DEFAULT_POLICIES = ("bits=8", "bits=4", "bits=3", "key_bits=4,value_bits=2", "bits=2", "bits=1")


def quality_rows(qualities: Mapping[str, Quality]) -> list[list[str]]:
    """Make the main table: a heading, a row for full precision, and one row per policy.

    Columns are the bytes of a row, their ratio to bfloat16, encoded tokens, perplexity, divergence
    and top-1 agreement.
    """
    first = next(iter(qualities.values()))
    overall, timed = first.overall, any(q.step_ms is not None for q in qualities.values())
    head = ["policy", "kB a row", "of bf16", "encoded", "perplexity", "mean KL", "top-1"]
    exact = [f"{overall.perplexity / overall.perplexity_ratio:.3f}", "0", "100.00 %"]
    rows = [head, ["full precision", *_size_row(first.full), *exact]]
    for name, quality in qualities.items():
        f = quality.overall
        figures = [f"{f.perplexity:.3f}", f"{f.mean_kl:.2g}", f"{100 * f.top1:.2f} %"]
        rows.append([name, *_size_row(quality.bytes), *figures])
    if timed:
        times = ["" if q.step_ms is None else f"{q.step_ms:.1f}" for q in qualities.values()]
        rows = [[*row, more] for row, more in zip(rows, ["ms a step", "", *times], strict=True)]
    return rows


def _size_row(b: CacheBytes | None) -> list[str]:
    if b is None:
        return ["", "", ""]
    return [f"{b.row / 1000:,.0f}", f"{100 * b.row_of_bfloat16:.1f} %", f"{b.encoded:,}"]


def range_rows(qualities: Mapping[str, Quality]) -> list[list[str]]:
    """Make a table of the mean divergence in ranges of positions: a heading, and one row per
    policy."""
    ends = list(next(iter(qualities.values())).by_position)
    starts = [0, *ends]
    head = [f"{start}-{end - 1}" for start, end in zip(starts, ends, strict=False)]
    rows = [
        [name, *(f"{f.mean_kl:.2g}" for f in quality.by_position.values())]
        for name, quality in qualities.items()
    ]
    return [["mean KL at positions", *head], *rows]


def format_columns(rows: Sequence[Sequence[str]]) -> str:
    """Format rows of cells as aligned columns."""
    padded = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width, pad = max(map(len, column)), str.rjust if number else str.ljust
        padded.append([pad(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def as_dicts(results: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each policy's result, a dataclass, to a dict for JSON."""
    return {name: asdict(result) for name, result in results.items()}


def plot_quality(qualities: Mapping[str, Quality], path: Path, *, title: str = "") -> None:
    """Plot divergence against bytes, with the Pareto front."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    front = pareto_front(qualities)
    points = {n: (100 * q.bytes.of_bfloat16, q.overall.mean_kl) for n, q in qualities.items()}
    labels = []
    for name, at in points.items():
        axes.plot(*at, "o", color="tab:blue" if name in front else "tab:gray", markersize=7)
        labels.append(axes.annotate(name, at, (7, -3), textcoords="offset points", fontsize=8))
    axes.plot(
        *zip(*(points[name] for name in front), strict=True),
        "-",
        color="tab:blue",
        linewidth=1,
        label="Pareto front",
    )
    axes.set(
        xlabel="bytes per token of the body, % of bfloat16",
        ylabel="mean KL divergence from the full-precision cache (nats)",
        yscale="log",
        title=title,
    )
    axes.margins(x=0.1, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    _move_apart(axes, labels, [*points.values()])
    figure.savefig(expand_user(path), dpi=150)
    plt.close(figure)


def _move_apart(axes: Any, labels: list[Any], points: list[tuple[float, float]]) -> None:
    """Move each label close to its point, so that labels do not overlap and stay within the
    axes."""
    from matplotlib.transforms import Bbox

    figure = axes.figure
    figure.canvas.draw()  # computes the layout in pixels
    radius = figure.dpi * 7 / 72 / 2  # of a marker
    places = [axes.transData.transform(at) for at in points]
    taken = [Bbox.from_extents(*(at - radius), *(at + radius)) for at in places]
    frame = axes.get_window_extent()
    for label in labels:
        for up, (right, side) in itertools.product(
            (-3, 5, -11, 14, -20, 23, -29, 32), ((7, "left"), (-7, "right"))
        ):
            label.set(position=(right, up), horizontalalignment=side)
            box = label.get_window_extent()
            inside = frame.x0 < box.x0 and box.x1 < frame.x1 and frame.y0 < box.y0 < frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(label.get_window_extent())
