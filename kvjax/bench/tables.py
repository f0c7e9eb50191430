"""Results of ``kvjax.bench`` as tables and a plot."""

import itertools
from dataclasses import astuple
from pathlib import Path
from typing import Any

from kvjax.bench import Bench, Cell
from kvjax.core.array_folder import expand_user
from kvjax.core.reporting import pyplot, readable_bytes

# Colors for color-blind readers (Okabe and Ito).
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^Dv<>"


def decode_rows(bench: Bench) -> list[list[str]]:
    """A heading, and one row per result: a step, the bytes that it reads, and bandwidth."""
    head = ["batch x prompt", "policy", "ms a step", "tokens/s", "weights read", "cache read",
            "bandwidth", "of read"]  # fmt: skip
    rows = [
        [
            _place(cell), cell.policy, f"{cell.ms:.3g}", f"{cell.tokens_per_second:,.1f}",
            readable_bytes(cell.weight_bytes), readable_bytes(cell.cache_bytes),
            f"{readable_bytes(cell.bandwidth)}/s", f"{100 * cell.of_read:.0f} %",
        ]
        for cell in bench.cells
    ]  # fmt: skip
    return [head, *rows]


def part_rows(bench: Bench) -> list[list[str]]:
    """A heading, and one row per result: the parts of a step, prefill and compile times."""
    head = ["batch x prompt", "policy", "weights", "attention", "sampling", "+ overhead",
            "prefill ms", "tokens/s", "compile s"]  # fmt: skip
    rows = [
        [
            _place(cell), cell.policy, *map(_part, astuple(cell.split)),
            _known(cell.prefill_ms, ".4g"), _known(cell.prefill_tokens_per_second, ",.0f"),
            f"{cell.compile_seconds:.1f}",
        ]
        for cell in bench.cells
    ]  # fmt: skip
    return [head, *rows]


def _part(milliseconds: float) -> str:
    """Milliseconds of a part; a dash if it is negative, since parts are noisy differences."""
    return f"{milliseconds:.3g}" if milliseconds >= 0 else "–"


def device_line(bench: Bench) -> str:
    """The device's bandwidth, and the peak memory use."""
    speed = bench.bandwidth
    read, copied = readable_bytes(speed.read), readable_bytes(speed.copy)
    words = f"this device reads {read}/s and copies {copied}/s"
    if bench.peak_bytes is None:
        return words
    return f"{words}; peak memory of the {bench.peak_of} {readable_bytes(bench.peak_bytes)}"


def plot(bench: Bench, path: Path, *, title: str = "") -> None:
    """Plot milliseconds per step against prompt length, and bandwidth against bytes.

    Each policy and batch has a line.
    """
    plt = pyplot()
    figure, (time, roof) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    cells = sorted(bench.cells, key=lambda cell: cell.prompt)
    batches = dict.fromkeys(cell.batch for cell in bench.cells)
    policies = dict.fromkeys(cell.policy for cell in bench.cells)
    for (b, batch), (p, policy) in itertools.product(enumerate(batches), enumerate(policies)):
        line = [cell for cell in cells if (cell.batch, cell.policy) == (batch, policy)]
        style: Any = {
            "color": _COLORS[p % len(_COLORS)],
            "marker": _MARKERS[b % len(_MARKERS)],
            "linestyle": ("-", "--", ":", "-.")[b % 4],
            "label": f"{policy}, batch {batch}",
        }
        time.plot([cell.prompt for cell in line], [cell.ms for cell in line], **style)
        read = [(cell.weight_bytes + cell.cache_bytes) / 1e6 for cell in line]
        roof.plot(read, [cell.bandwidth / 1e9 for cell in line], **style)
    prompts = sorted({cell.prompt for cell in bench.cells})
    ceiling = bench.bandwidth.read / 1e9
    roof.axhline(ceiling, color="#777777", linestyle=":")
    roof.annotate(
        f"reading, {ceiling:.3g} GB/s",
        (0.02, ceiling),
        xycoords=("axes fraction", "data"),
        xytext=(0, -10),
        textcoords="offset points",
        fontsize=8,
        color="#555555",
    )
    time.set_xscale("log", base=2)
    for axes in (time, roof):
        axes.set_yscale("log")
        axes.grid(alpha=0.3, which="both")
        axes.margins(x=0.1, y=0.15)
        axes.tick_params(which="both", labelsize=8)
    roof.set_xscale("log")
    for axis in (time.yaxis, roof.yaxis, roof.xaxis):
        axis.set_major_formatter(_tick)
        axis.set_minor_formatter(_tick)
    time.set_xticks(prompts, [f"{prompt:,}" for prompt in prompts])
    time.xaxis.set_minor_formatter("")
    time.set(xlabel="tokens of the prompt", ylabel="milliseconds per step")
    roof.set(xlabel="megabytes that a step must read", ylabel="GB/s reached")
    time.legend(fontsize=8)
    figure.suptitle(f"{title} in {bench.dtype} on {bench.device}", fontsize=11)
    figure.savefig(expand_user(path), dpi=150)
    plt.close(figure)


def _tick(value: float, _: int | None) -> str:
    """A label at 1, 2 and 5 of each decade; more labels would overlap."""
    return f"{value:,.4g}" if f"{value:e}"[0] in "125" else ""


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _place(cell: Cell) -> str:
    return f"{cell.batch} x {cell.prompt:,}"
