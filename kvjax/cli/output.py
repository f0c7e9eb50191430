"""Output of commands: progress, statistics, tables, JSON, and the setup of the standard streams."""

import contextlib
import io
import itertools
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import typer

from kvjax.core.reporting import (
    ProgressCallback,
    progress_callback,
    readable_bytes,
    report_progress,
)
from kvjax.generation.results import GenerationResult, GenerationStats
from kvjax.sampling.scores import TokenScore


def prepare_streams() -> None:
    """Make the standard streams independent of the locale.

    Characters that the console can't show are printed as escapes. Input from a file or a pipe is
    read as UTF-8. Closed streams are replaced by the null device.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the parent process closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, io.TextIOWrapper) and not sys.stdin.isatty():
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")


def to_json(value: Mapping[str, object]) -> str:
    """Format a JSON object on one line."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def echo_json(value: Mapping[str, object]) -> None:
    """Print a JSON object on one line.

    If the console lacks a character, all non-ASCII characters are written as JSON escapes, because
    the stream's own escapes are not valid JSON.
    """
    text = to_json(value)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(value, allow_nan=False)
    typer.echo(text)


def context_warning(tokens: int) -> str:
    """Return the warning for a text that is ``tokens`` tokens longer than the model was trained
    for."""
    return (
        f"kvjax: warning: the text is {tokens:,} token{'s' if tokens > 1 else ''} longer than the "
        "model was trained for: the output may be nonsense"
    )


def stats_line(stats: GenerationStats) -> str:
    """Format the statistics of one generation on one line."""
    moves, speculation = len(stats.moves), stats.speculation
    parts = [
        f"{stats.prompt_tokens} prompt + {stats.new_tokens} new tokens",
        f"compile {stats.compile_seconds:.2f} s ({stats.compilations} programs)",
        f"prefill {stats.prefill_seconds:.3f} s",
        f"decode {stats.decode_seconds:.3f} s, {stats.decode_tokens_per_second:.1f} tokens/s",
        f"cache {bytes_by_place(stats.cache_bytes) or 'none'}",
    ]
    if moves:
        parts.append(f"{moves} layer{'s' if moves > 1 else ''} moved")
    if speculation is not None:
        passes = speculation.passes + speculation.saved_passes
        parts.append(
            f"{speculation.accepted_tokens} of {speculation.drafted_tokens} drafted tokens "
            f"accepted, {speculation.saved_passes} of {passes} passes saved"
        )
    return " · ".join(parts)


def bytes_by_place(sizes: Mapping[str, float]) -> str:
    """Format sizes in bytes with their places, such as ``1.5 MB device, 3 MB host``."""
    return ", ".join(f"{readable_bytes(size)} {place}" for place, size in sizes.items())


def format_table(report: Mapping[str, object]) -> str:
    """Format a table with one line per entry: its name and its value."""
    width = max(map(len, report)) + 2
    return "\n".join(f"{k.replace('_', ' '):<{width}}{_format(v)}" for k, v in report.items())


def _format(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_format(v)}" for k, v in value.items())
    if isinstance(value, list):
        return ", ".join(map(_format, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def texts_as_json(result: GenerationResult) -> list[dict[str, object]]:
    """Convert the texts of one prompt to JSON objects, with their scores."""
    texts: list[dict[str, object]] = []
    for row, (text, tokens) in enumerate(zip(result.text, result.tokens, strict=True)):
        entry: dict[str, object] = {"text": text, "tokens": tokens}
        if result.sequence_scores is not None:
            entry["sequence_score"] = _finite(result.sequence_scores[row])
        if result.logprobs is not None:
            entry["logprobs"] = [score_as_json(score) for score in result.logprobs[row]]
        texts.append(entry)
    return texts


def texts_with_headings(result: GenerationResult) -> str:
    """Format the texts of one prompt, each after a line with its number and score."""
    parts = []
    for row, text in enumerate(result.text):
        scores = result.sequence_scores
        score = "" if scores is None else f" ({scores[row]:.4f})"
        parts.append(f"--- {row + 1}{score}\n{text}")
    return "\n".join(parts)


def score_as_json(score: TokenScore) -> dict[str, object]:
    """Convert a token's log-probabilities to a JSON object."""
    likeliest = [[token, _finite(logprob)] for token, logprob in score.top_logprobs]
    return {"logprob": _finite(score.logprob), "top_logprobs": likeliest}


def _finite(number: float) -> float | None:
    """Return a number, or None for an infinity, which JSON can't represent."""
    return number if math.isfinite(number) else None


_T = TypeVar("_T")

DELAY = 1.5
"""Seconds before the progress of a task is shown."""
SHORT_DELAY = 0.3
"""Seconds before progress is shown where a user waits for an answer."""
LINE_INTERVAL = 15.0
"""Seconds between lines of progress, if standard error is not a terminal."""


@contextmanager
def show_progress(
    task: str, *, after: float = DELAY, lines: bool = False
) -> Iterator[Callable[[str], None]]:
    """Show the progress of the work in this context on standard error.

    On a terminal, a progress bar appears after ``after`` seconds. The bar also says when a program
    is compiled. If standard error is not a terminal, a line is printed at intervals if ``lines``.
    Yields a function that prints a line on standard error. Within this context, nothing else may
    write to the terminal.
    """
    if not sys.stderr.isatty():
        with progress_callback(_print_lines(_print)) if lines else contextlib.nullcontext():
            yield _print
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    # The default spinner has Braille characters, which older encodings lack.
    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    display = Progress(
        spinner,
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    bar = display.add_task(task, total=None)

    def on_progress(current: str, done: int, total: int) -> None:
        nonlocal task
        task = current
        display.update(bar, description=task, completed=done, total=total)

    def on_compile(begins: bool) -> None:
        display.update(bar, description=f"{task}: compiling (once)" if begins else task)

    # The display runs in another thread, so that it is drawn while this thread waits.
    timer = threading.Timer(after, display.start)
    timer.daemon = True
    timer.start()
    try:
        with progress_callback(on_progress, on_compile):
            yield lambda line: display.console.print(
                line, markup=False, emoji=False, highlight=False, soft_wrap=True
            )
    finally:
        timer.cancel()
        timer.join()
        if display.live.is_started:
            display.stop()


def first_pieces(pieces: Iterator[_T], task: str) -> list[_T]:
    """Return the first piece of a text, and show progress until it arrives.

    On a terminal, return the first two pieces. The second one compiles the decode loop, and
    progress can't be shown after text has been printed.
    """
    with show_progress(task, after=SHORT_DELAY):
        first = list(itertools.islice(pieces, 1))
        if sys.stderr.isatty():
            report_progress("generating", 0, 1)
            first += itertools.islice(pieces, 1)
    return first


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_lines(print_line: Callable[[str], None]) -> ProgressCallback:
    """Return a callback that prints a line of progress at intervals of at least ``LINE_INTERVAL``
    seconds."""
    last = time.monotonic()

    def on_progress(task: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_INTERVAL:
            last = time.monotonic()
            print_line(f"kvjax: {task} ({done / total:.0%})")

    return on_progress
