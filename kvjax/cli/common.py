"""Helpers of several commands: meshes, dtypes, text files, the compilation cache, Ctrl-C."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

import jax
from jax.sharding import Mesh

from kvjax.core.validation import ArgumentError
from kvjax.memory.shapes import SHAPES, ModelShape
from kvjax.placement.mesh import make_mesh, parse_mesh


def mesh_from_option(value: str) -> Mesh | Literal["auto"]:
    """Make the mesh for the value of ``--mesh``. ``"auto"`` is returned unchanged in a single
    process, and the model loader then chooses a mesh."""
    if value == "auto":
        if jax.process_count() == 1:
            return "auto"
        return make_mesh(tensor=jax.device_count())
    mesh = make_mesh(**parse_mesh(value))
    processes = {device.process_index for device in mesh.devices.flat}
    if len(processes) < jax.process_count():
        raise ValueError(
            f"--mesh {value} has {mesh.size} of {jax.device_count()} devices, in {len(processes)} "
            f"of {jax.process_count()} processes: every process must have a device of the mesh"
        )
    return mesh


def check_dtype(dtype: str | None) -> None:
    """Raise ``ValueError`` for a dtype that models can't use."""
    from kvjax.models.config import DTYPES

    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(f"dtype is {dtype!r}: give one of {', '.join(DTYPES)}", param="dtype")


def known_shape(name: str) -> ModelShape:
    """Return the well-known model shape with this name."""
    if name not in SHAPES:
        raise ValueError(f"unknown shape {name!r}: give one of {', '.join(SHAPES)}")
    return SHAPES[name]


def read_text(file: Path | None) -> str:
    """Read the UTF-8 text of a file, or of standard input if ``file`` is None.

    Raises:
      ValueError: if the text is not UTF-8.
    """
    raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        source = file or "standard input"
        raise ValueError(f"{source}: the text is not UTF-8 (byte {error.start})") from None


def use_compilation_cache() -> None:
    """Keep compiled programs between runs, in JAX_COMPILATION_CACHE_DIR or the user's cache."""
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(_user_cache() / "kvjax" / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


INTERRUPTED = 130
"""The exit code after an interrupt, by the convention of shells."""

_MESSAGES: list[Callable[[], str]] = []
_EXITING = threading.RLock()
"""A lock, because two threads may notice the same interrupt, and only one should exit the
process."""

_RESET_TERMINAL = "\r\x1b[2K\x1b[?25h"
"""Clears the terminal's line, and shows the cursor that a progress display has hidden."""


def exit_now(code: int) -> NoReturn:
    """Exit the process immediately, after flushing standard output."""
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

    ``KeyboardInterrupt`` does not suffice. Compilers and running programs do not let exceptions
    through, JAX discards some exceptions in its callbacks, and at exit Python waits for all
    dispatched work. So a thread waits for the signal.
    """
    # A shell may have set interrupts to be ignored, and only the main thread receives signals.
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
    """Within ``exit_on_interrupt``, let an interrupt raise ``KeyboardInterrupt`` instead of
    exiting. Use this for work that continues after an interrupt. Ignored interrupts stay
    ignored."""
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
