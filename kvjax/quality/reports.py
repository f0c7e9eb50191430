"""Qualities of caches as a table and as a plot, and policies from words."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvjax.policies.presets import PolicyChoice, policy
from kvjax.quality.figures import Quality, pareto_front

DEFAULT_POLICIES = (
    "bits=8", "bits=4", "bits=3", "key_bits=4,value_bits=2", "bits=2", "bits=1",
)  # fmt: skip


def parse_policy(words: str) -> PolicyChoice:
    """A policy from ``name,setting=value,...``: ``bits=4``, ``sliding_window,window=128,bits=8``.

    Raises:
      ValueError: if a setting is not one of ``kvjax.policy``.
    """
    name, settings = "static", {}
    for part in words.split(","):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            name = setting
        else:
            settings[setting] = int(value) if value.lstrip("-").isdigit() else value
    try:
        return policy(name, **settings)
    except TypeError:
        known = ", ".join(name for name in inspect.signature(policy).parameters if name != "name")
        raise ValueError(f"the policy {words!r}: settings are {known}") from None


def quality_rows(qualities: Mapping[str, Quality]) -> list[list[str]]:
    """A heading, and a row a policy."""
    head = ["policy", "bytes a token", "of bfloat16", "tail", "perplexity", "change", "mean KL",
            "median KL", "99.9 % KL", "top-1", "ms a step"]  # fmt: skip
    rows = [head]
    for name, quality in qualities.items():
        f, b = quality.overall, quality.bytes
        rows.append(
            [
                name, f"{b.body:,.0f}", f"{100 * b.of_bfloat16:.1f} %", f"{b.tail / 1000:,.0f} kB",
                f"{f.perplexity:.3f}", f"{100 * (f.perplexity_ratio - 1):+.3f} %",
                f"{f.mean_kl:.2g}", f"{f.median_kl:.2g}", f"{f.high_kl:.2g}",
                f"{100 * f.top1:.2f} %",
                "" if quality.step_ms is None else f"{quality.step_ms:.1f}",
            ]
        )  # fmt: skip
    return rows


def range_rows(qualities: Mapping[str, Quality]) -> list[list[str]]:
    """The mean divergence by range of positions: a heading, and a row a policy."""
    ends = list(next(iter(qualities.values())).by_position)
    starts = [0, *ends]
    head = [f"{start}-{end - 1}" for start, end in zip(starts, ends, strict=False)]
    rows = [
        [name, *(f"{f.mean_kl:.2g}" for f in quality.by_position.values())]
        for name, quality in qualities.items()
    ]
    return [["mean KL at positions", *head], *rows]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows as aligned columns."""
    padded = []
    for number, column in enumerate(zip(*rows, strict=True)):
        width, pad = max(map(len, column)), str.rjust if number else str.ljust
        padded.append([pad(cell, width) for cell in column])
    return "\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True))


def as_figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of each policy (of any dataclass), to be written as JSON."""
    return {name: asdict(each) for name, each in found.items()}


def pyplot() -> Any:
    """Matplotlib, drawing into files.

    Raises:
      ValueError: if it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ValueError('a plot needs matplotlib: pip install "kvjax[plots]" installs it')
    from matplotlib import pyplot

    pyplot.switch_backend("agg")
    return pyplot


def plot_quality(qualities: Mapping[str, Quality], path: Path, *, title: str = "") -> None:
    """Draw divergence against bytes, with the front of policies that no other beats."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    front = pareto_front(qualities)
    points = {n: (100 * q.bytes.of_bfloat16, q.overall.mean_kl) for n, q in qualities.items()}
    shares = [share for share, _ in points.values()]
    middle, labels = (min(shares) + max(shares)) / 2, []
    for name, at in points.items():
        axes.plot(*at, "o", color="tab:blue" if name in front else "tab:gray", markersize=7)
        side, right = ("right", -7) if at[0] > middle else ("left", 7)
        labels.append(
            axes.annotate(name, at, (right, 5), textcoords="offset points", ha=side, fontsize=8)
        )
    axes.plot(
        *zip(*(points[name] for name in front), strict=True),
        "-", color="tab:blue", linewidth=1, label="no other is better in both",
    )  # fmt: skip
    axes.set(
        xlabel="bytes of the body, % of bfloat16", yscale="log",
        ylabel="mean KL divergence from the full-precision cache (nats)", title=title,
    )  # fmt: skip
    axes.margins(x=0.1, y=0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    _move_apart(figure, labels)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _move_apart(figure: Any, labels: list[Any]) -> None:
    """Move labels upwards, the lowest first, until none covers another."""
    figure.canvas.draw()
    taken: list[Any] = []
    for label in sorted(labels, key=lambda each: each.get_window_extent().y0):
        while any(label.get_window_extent().overlaps(other) for other in taken):
            right, up = label.get_position()
            label.set_position((right, up + 1))
        taken.append(label.get_window_extent())
