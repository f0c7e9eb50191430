"""Ctrl-C: exit at once, or raise ``KeyboardInterrupt``."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

INTERRUPTED = 130
"""The exit code after an interrupt, by the convention of shells."""

_MESSAGES: list[Callable[[], str]] = []
_EXITING = threading.RLock()
"""Two threads may notice the same interrupt; only one of them exits the process."""

_RESET_TERMINAL = "\r\x1b[2K\x1b[?25h"
"""Clears the terminal's line, and shows the cursor that a progress display has hidden."""


def exit_now(code: int) -> NoReturn:
    """Exit the process at once, after flushing standard output."""
    with _EXITING:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            if os.isatty(2):
                os.write(2, _RESET_TERMINAL.encode())
            for message in _MESSAGES if code == INTERRUPTED else ():
                os.write(2, f"{message()}\n".encode(errors="backslashreplace"))
        os._exit(code)


@contextmanager
def message_on_interrupt(message: Callable[[], str]) -> Iterator[None]:
    """Print ``message()`` on standard error if an interrupt exits the process in this context."""
    _MESSAGES.append(message)
    try:
        yield
    finally:
        _MESSAGES.remove(message)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Exit the process on an interrupt, even during compilation or a running program.

    ``KeyboardInterrupt`` would not do: compilers and running programs do not let exceptions
    through, JAX discards some that its callbacks raise, and at exit Python would wait for all
    dispatched work. So a thread waits for the signal.
    """
    # A shell may have told the process to ignore interrupts; and only the main thread gets signals.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    handler = signal.signal(signal.SIGINT, lambda number, frame: exit_now(INTERRUPTED))
    threading.Thread(target=_exit_on_signal, args=(receiver,), daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.set_wakeup_fd(wakeup)
        sender.close()


def _exit_on_signal(receiver: socket.socket) -> None:
    with receiver:
        while numbers := receiver.recv(64):
            if signal.SIGINT in numbers:
                exit_now(INTERRUPTED)


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Inside ``exit_on_interrupt``, raise ``KeyboardInterrupt`` instead, for work that continues
    after an interrupt. Ignored interrupts stay ignored."""
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
