"""While a command works: how far it is, on a terminal, and an end on Ctrl-C."""

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from kvjax.core.reporting import ProgressCallback, progress_callback, report_progress

_T = TypeVar("_T")

QUIET = 1.5
"""Seconds that work may take without a word."""
SOON = 0.3
"""The same, where somebody waits for an answer."""
LINES = 15.0
"""Seconds between lines about it, where no line can be written over."""
INTERRUPTED = 130
"""The exit code of what was interrupted, as shells have it."""

_PARTING: list[Callable[[], str]] = []
_LEAVING = threading.RLock()
"""Of two threads that hear of an interrupt, one ends the process."""

CLEAN = "\r\x1b[2K\x1b[?25h"
"""Clears a terminal's line and shows the cursor, which a display that is cut off has hidden."""


@contextmanager
def shown(
    what: str, *, after: float = QUIET, lines: bool = False
) -> Iterator[Callable[[str], None]]:
    """Show on standard error how far the work inside is, and whether it compiles, if it takes
    longer than ``after``, and that is a terminal; elsewhere nothing, or now and then a line.
    Nothing else may be written to a terminal meanwhile, but lines there, by what this gives."""
    if not sys.stderr.isatty():
        with progress_callback(_now_and_then(_print)) if lines else contextlib.nullcontext():
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
    # Those of Braille that others spin with are in no older encoding.
    spinner = SpinnerColumn("dots" if console.encoding.startswith("utf") else "line")
    columns = (
        spinner, TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
        TaskProgressColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    # What is written to either stream meanwhile stays where it was written to.
    display = Progress(
        *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    task = display.add_task(what, total=None)

    def listener(now: str, done: int, total: int) -> None:
        nonlocal what
        what = now
        display.update(task, description=what, completed=done, total=total)

    def compiles(begins: bool) -> None:
        display.update(task, description=f"{what}: compiling (once)" if begins else what)

    # The display is drawn by a thread of its own, whatever this one waits for.
    begin = threading.Timer(after, display.start)
    begin.daemon = True
    begin.start()
    try:
        with progress_callback(listener, compiles):
            yield lambda line: display.console.print(
                line, markup=False, emoji=False, highlight=False, soft_wrap=True
            )
    finally:
        begin.cancel()
        begin.join()
        if display.live.is_started:
            display.stop()


def begun(pieces: Iterator[_T], what: str) -> list[_T]:
    """The first piece of a text, with ``what`` shown until it comes. On a terminal the first two:
    no progress can be drawn once text is printed, and the second piece compiles the decode loop."""
    with shown(what, after=SOON):
        first = list(itertools.islice(pieces, 1))
        if sys.stderr.isatty():
            report_progress("generating", 0, 1)
            first += itertools.islice(pieces, 1)
    return first


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _now_and_then(say: Callable[[str], None]) -> ProgressCallback:
    """A line about what is done, if the last one is some time ago."""
    last = time.monotonic()

    def listener(what: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINES:
            last = time.monotonic()
            say(f"kvjax: {what} ({done / total:.0%})")

    return listener


@contextmanager
def parting(words: Callable[[], str]) -> Iterator[None]:
    """Say ``words`` on standard error, if an interrupt ends the work inside."""
    _PARTING.append(words)
    try:
        yield
    finally:
        _PARTING.remove(words)


@contextmanager
def interruptible() -> Iterator[None]:
    """End the process on an interrupt, whatever it does.

    Not by ``KeyboardInterrupt``: a compiler, or a program that runs, lets no exception through, JAX
    swallows some that come out of its callbacks, and at its end Python would wait for what was
    dispatched. So a thread waits for the signal beside what works.
    """
    # A shell may have shielded what it started; and only the main thread hears of signals.
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    mine, other = socket.socketpair()
    other.setblocking(False)
    wakeup = signal.set_wakeup_fd(other.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGINT, lambda number, frame: leave(INTERRUPTED))
    threading.Thread(target=_end_after, args=(mine,), daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(wakeup)
        other.close()


@contextmanager
def raised() -> Iterator[None]:
    """Inside ``interruptible``: let an interrupt be a ``KeyboardInterrupt``, for work that goes on
    after one. What is shielded from interrupts stays so."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    wakeup = signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(wakeup)


def _end_after(signals: socket.socket) -> None:
    """Wait for an interrupt, and end."""
    with signals:
        while numbers := signals.recv(64):
            if signal.SIGINT in numbers:
                leave(INTERRUPTED)


def leave(code: int) -> NoReturn:
    """End the process here and now, with what was written so far."""
    with _LEAVING:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            if os.isatty(2):
                os.write(2, CLEAN.encode())
            for words in _PARTING if code == INTERRUPTED else ():
                os.write(2, f"{words()}\n".encode(errors="backslashreplace"))
        os._exit(code)
