"""A run's figures as a table, as Markdown and as a plot."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.claims import fastest_peer, paired_ratio, prefill_seconds

COLUMNS = (
    "dtype",
    "batch x prompt",
    "engine",
    "ms/token",
    "tokens/s",
    "of bandwidth",
    "peak MB",
    "prefill ms",
    "prefill tokens/s",
    "prefill peak MB",
    "kvjax / peer",
)
CLAIM_COLUMNS = ("claim", "dtype", "cell", "measured", "limit", "")


def bandwidth_fraction(results: dict[str, Any], engine: dict[str, Any]) -> float:
    """Bytes a step must read, over the bytes the machine could have read in its time."""
    seconds = 1e-3 * engine["milliseconds_per_token"]
    return engine["bytes_per_step"] / seconds / results["bandwidth"]["bytes_per_second"]


def _megabytes(nbytes: float | None) -> str:
    return "" if nbytes is None else f"{nbytes / 1e6:,.0f}"


def _prefill_columns(found: dict[str, Any], tokens: int) -> tuple[str, str, str]:
    """Milliseconds, tokens a second and peak of a prefill; empty where none was timed."""
    seconds = prefill_seconds(found)
    if seconds is None:
        return "", "", ""
    peak = _megabytes(found["prefill_peak_bytes"])
    return f"{1e3 * seconds:,.0f}", f"{tokens / seconds:,.0f}", peak


def rows(results: dict[str, Any]) -> list[tuple[str, ...]]:
    """One row an engine and cell, as strings in the order of `COLUMNS`."""
    table = []
    for cell in results["cells"]:
        engines, tokens = cell["engines"], cell["batch"] * cell["prompt"]
        place = (cell["dtype"], f"{cell['batch']} x {cell['prompt']:,}")
        ours, fastest = engines["kvjax"], fastest_peer(engines)
        for name, found in engines.items():
            prefill = _prefill_columns(found, tokens)
            ratio = ""
            if name != "kvjax":
                ratio = f"{paired_ratio(ours['decode_seconds'], found['decode_seconds']):.2f}"
            table.append(
                (
                    *place,
                    name + (" *" if name == fastest else ""),
                    f"{found['milliseconds_per_token']:.2f}",
                    f"{found['tokens_per_second']:.1f}",
                    f"{bandwidth_fraction(results, found):.0%}",
                    _megabytes(found["decode_peak_bytes"]),
                    *prefill,
                    ratio,
                )
            )
        if "generate" in cell:
            speed = cell["generate"]["decode_tokens_per_second"]
            figures = (f"{1e3 * cell['batch'] / speed:.2f}", f"{speed:.1f}")
            table.append((*place, "kvjax.generate", *figures, *[""] * 6))
        whole = statistics.median(ours["uncached_seconds"])
        figures = (f"{1e3 * whole:,.2f}", f"{cell['batch'] / whole:.2f}", "")
        peak = _megabytes(ours["uncached_peak_bytes"])
        table.append((*place, "kvjax without a cache", *figures, peak, "", "", "", ""))
    return table


def claim_rows(claims: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row a claim, as strings in the order of `CLAIM_COLUMNS`."""
    found = []
    for claim in claims:
        verdict = "pass" if claim["passed"] else "FAIL"
        if not claim["required"]:
            verdict = f"({verdict.lower()})"
        limit = f"{claim['sense']} {claim['limit']:.2f}"
        text = (claim["claim"], claim["dtype"], claim["cell"], f"{claim['measured']:.2f}")
        found.append((*text, limit, verdict))
    return found


def _tolerance(check: dict[str, Any], name: str) -> float:
    return check.get("tolerances", {}).get(name, check["tolerance"])


def _greedy_limit(check: dict[str, Any], name: str) -> float:
    """How far apart the logits of a near tie may be, of the largest: each may be off."""
    return 2 * _tolerance(check, name)


def mismatches(results: dict[str, Any]) -> list[str]:
    """A sentence for every cell whose engines do not compute the same."""
    found = []
    for cell in results["cells"]:
        check = cell["check"]
        where = f"{cell['dtype']} {cell['batch']}x{cell['prompt']}"
        for name, value in check["difference"].items():
            limit = _tolerance(check, name)
            if value > limit:
                found.append(
                    f"{where}: the logits of {name} differ from {check['reference']}'s by "
                    f"{value:.1e} of the largest, more than {limit:.0e}"
                )
        for name, gap in check.get("greedy_gap", {}).items():
            if gap > _greedy_limit(check, name):
                found.append(
                    f"{where}: greedy tokens of {name} left those of {check['reference']} where "
                    f"its logits are {gap:.1e} of the largest apart: no near tie"
                )
    return found


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader must know to read the table."""
    settings, bandwidth = results["settings"], results["bandwidth"]
    resettable = all(
        engine["peak_resettable"]
        for cell in results["cells"]
        for engine in cell["engines"].values()
    )
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    speed = f"{bandwidth['bytes_per_second'] / 1e9:.1f} GB/s ({bandwidth['method']})"
    lines = [
        f"{results['device']}, {results['threads']} threads; {versions}; read bandwidth {speed}.",
        f"Medians of {settings['repeats']} groups of {settings['steps']} greedy steps, engines in "
        "turn. ms/token: from a row's token to its next, a step of the whole batch. "
        "kvjax / peer: the median of the ratios of neighbouring groups, below 1 where kvjax is "
        "faster; * marks the fastest peer.",
        "Of bandwidth: the bytes of the weights and of the filled cache, over what the machine "
        "reads in the time of a step. Prefill: the whole prompt into a new cache, its allocation "
        f"included; with more than {settings['pass_tokens']:,} tokens once, and without the peers "
        "whose attention makes all scores at once; with more than "
        f"{settings['peer_pass_tokens']:,}, of kvjax alone. "
        "Each engine has a process of its own; peak: the most it had resident"
        + (" while it did that." if resettable else " since it began: no mark can be reset here."),
    ]
    lines += results["left_out"]
    return lines + _greedy_notes(results) + _engine_notes(results)


def _greedy_notes(results: dict[str, Any]) -> list[str]:
    lines = []
    for cell in results["cells"]:
        check = cell["check"]
        gaps = {
            name: gap
            for name, gap in check.get("greedy_gap", {}).items()
            if gap <= _greedy_limit(check, name)
        }
        if gaps:
            lines.append(
                f"{cell['dtype']} {cell['batch']}x{cell['prompt']}: greedy tokens of "
                f"{', '.join(gaps)} left those of {check['reference']} at a near tie: there the "
                f"logits of both tokens were {max(gaps.values()):.1e} of the largest apart or less."
            )
    return lines


def _engine_notes(results: dict[str, Any]) -> list[str]:
    """What must be known of single engines, where they ran."""
    names = {name for cell in results["cells"] for name in cell["engines"]}
    lines = []
    compiled = [
        f"{found['compile_seconds']:.0f} s ({cell['dtype']} {cell['batch']}x{cell['prompt']})"
        for cell in results["cells"]
        for name, found in cell["engines"].items()
        if name.endswith("-compile")
    ]
    if compiled:
        lines.append(
            "transformers-static-compile: the decode step by torch.compile in its default mode, "
            "prompts as transformers-static-sdpa; to compile took " + ", ".join(compiled) + "."
        )
    if any(name.startswith("llama_cpp") for name in names):
        weights = (
            "the file's own weights" if results.get("file") else "the weights in the run's dtype"
        )
        lines.append(
            f"llama_cpp: {weights}, with a thread a core; its caches hold "
            "float16 (f16) or 8 bits with a scale for 32 (q8_0), so that its logits may differ "
            "more. With flash attention, but for plain: that makes prompts faster and steps about "
            "as fast."
        )
    return lines


def show(results: dict[str, Any], console: Console) -> None:
    """Print tables, notes, and mismatches in red."""
    table = Table(title="Decode", caption_justify="left")
    for index, column in enumerate(COLUMNS):
        side = "left" if index in (0, 2) else "right"
        table.add_column(textwrap.fill(column, 9), justify=side, no_wrap=True)
    last = None
    for row in rows(results):
        if row[:2] != last:
            table.add_section()
            table.add_row(*row)
        else:
            table.add_row("", "", *row[2:])
        last = row[:2]
    console.print(table)
    for line in notes(results):
        console.print(line)
    claims = Table(title="Claims", caption="(results in brackets are not required)")
    for index, column in enumerate(CLAIM_COLUMNS):
        claims.add_column(column, justify="right" if index in (3, 4) else "left")
    for row in claim_rows(results["claims"]):
        claims.add_row(*row, style="red" if row[-1] == "FAIL" else "")
    console.print(claims)
    for sentence in mismatches(results):
        console.print(f"MISMATCH: {sentence}", style="bold red")


def markdown_table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = [columns, ["---"] * len(columns), *body]
    return ["| " + " | ".join(line) + " |" for line in lines]


def markdown(results: dict[str, Any]) -> str:
    """The same as a Markdown page."""
    lines = [f"# Decode: {results['device']}, JAX {results['versions']['jax']}", ""]
    lines += [f"`{results['command']}`, {results['created']}.", ""]
    lines += ["![Milliseconds a token against prompt length](decode.png)", ""]
    lines += ["![What the cache saves against prompt length](speedup.png)", ""]
    # A star would open emphasis.
    body = [[text.replace("*", "\\*") for text in row] for row in rows(results)]
    lines += [*markdown_table(COLUMNS, body), ""]
    for note in notes(results):
        lines += [note.replace("*", "\\*"), ""]
    lines += ["Results in brackets are not required.", ""]
    lines += [*markdown_table(CLAIM_COLUMNS, claim_rows(results["claims"])), ""]
    for sentence in mismatches(results):
        lines += [f"**Mismatch**: {sentence}.", ""]
    return "\n".join(lines)


def write(results: dict[str, Any], folder: Path) -> None:
    """Write `decode.md` and its two plots to `folder`."""
    from benchmarks.plot import draw, draw_speedup

    (folder / "decode.md").write_text(markdown(results), encoding="utf-8")
    draw(results, folder / "decode.png")
    draw_speedup(results, folder / "speedup.png")
