"""Progress on a terminal while a command works."""

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvjax.core.reporting import ProgressCallback, progress_callback, report_progress

_T = TypeVar("_T")

DELAY = 1.5
"""Seconds before the progress of a task is shown."""
SHORT_DELAY = 0.3
"""The same, where a user waits for an answer."""
LINE_INTERVAL = 15.0
"""Seconds between lines of progress, where standard error is no terminal."""


@contextmanager
def show_progress(
    task: str, *, after: float = DELAY, lines: bool = False
) -> Iterator[Callable[[str], None]]:
    """Show the progress of the work in this context on standard error.

    On a terminal, a progress bar appears after ``after`` seconds. It also says when a program is
    compiled. Elsewhere ``lines`` prints a line now and then. Yields a function that prints a line
    on standard error; nothing else may write to the terminal meanwhile.
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

    # The display has a thread of its own, so that it is drawn while this thread waits.
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
    """The first piece of a text, with progress shown until it arrives.

    On a terminal, the first two: progress can't be shown after text has been printed, and the
    second piece compiles the decode loop.
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
    """A callback that prints a line of progress at intervals of at least ``LINE_INTERVAL``."""
    last = time.monotonic()

    def on_progress(task: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_INTERVAL:
            last = time.monotonic()
            print_line(f"kvjax: {task} ({done / total:.0%})")

    return on_progress
