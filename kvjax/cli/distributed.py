"""``--distributed``: many processes as one, with JAX's own machinery."""

import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from kvjax.cli.progress import INTERRUPTED, leave
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_9_shutdown_timeout, jax_0_10_error_code
from kvjax.core.validation import as_optional_int


@contextmanager
def joined(
    distributed: bool,
    coordinator: str | None,
    processes: int | None,
    process_id: int | None,
    start_timeout: int,
    heartbeat_timeout: int,
    told: Any,
) -> Iterator[bool]:
    """One of many processes, if this is; whether it is the one to print. ``told``: what all of them
    must have been told alike.

    A process that fails ends at once: at its end Python would wait for the others, and these for
    it.
    """
    if not distributed:
        yield True
        return
    for name, value, least in (
        ("--processes", processes, 1), ("--process-id", process_id, 0),
        ("--start-timeout", start_timeout, 1), ("--heartbeat-timeout", heartbeat_timeout, 1),
    ):  # fmt: skip
        as_optional_int(name, value, least)
    if processes is not None and process_id is not None and process_id >= processes:
        raise ValueError(
            f"--process-id is {process_id}, but there are {processes} processes, 0 the first"
        )
    host, _, port = (coordinator or "host:1").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"--coordinator is {coordinator!r}: give host and port, as 10.0.0.1:1234")
    _own_output()
    missing = (
        f"not all of {processes or 'the'} processes came together within {start_timeout} seconds: "
        "are there so many, with ids from 0 on, and does the first listen at "
        f"{coordinator or 'the address that the cluster says'}?"
    )
    # JAX's own time-out aborts with a trace of its functions: it is left to come later than this.
    alarm = threading.Timer(start_timeout, _leave, [missing])
    alarm.daemon = True
    alarm.start()
    try:
        jax.distributed.initialize(
            coordinator, processes, process_id, initialization_timeout=start_timeout + 60,
            heartbeat_timeout_seconds=heartbeat_timeout,
            **jax_0_9_shutdown_timeout(heartbeat_timeout),
        )  # fmt: skip
        count = jax.process_count()
    except ValueError as error:
        raise ValueError(
            "--distributed: give --coordinator, --processes and --process-id, for no cluster was "
            f"found that says them ({error})"
        ) from error
    except JaxRuntimeError as error:
        _leave(f"{missing} ({_short(error)})")
    finally:
        alarm.cancel()
    if processes not in (None, count):
        _leave(f"--processes is {processes}, but process 0 was told of {count}")
    try:
        _agree(told)
        yield jax.process_index() == 0
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except Exception as error:
        words = _short(error)
        # Beside its memory a device fails where what it waits for does not come.
        if jax_0_10_error_code(error) not in (None, RESOURCE_EXHAUSTED):
            words = f"another process of this run has ended, so this one can't go on ({words})"
        _leave(words)
    jax.distributed.shutdown()


def _agree(told: Any) -> None:
    """End all processes if some were told something else: they would wait for one another."""
    mine = np.uint32(zlib.crc32(repr(told).encode()))
    every = np.ravel(multihost_utils.process_allgather(mine))
    others = np.flatnonzero(every != every[0])
    if others.size:
        time.sleep(1)  # the others are to see it too, not this process's end
        _leave(
            f"process {others[0]} was given another prompt, mesh or setting than process 0: all "
            "must be given the same, but for --process-id"
        )


def _own_output() -> None:
    """Standard output for what is printed here alone: libraries below write their reports of
    connections there, and are led to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(kept, "w", 1, sys.stdout.encoding, sys.stdout.errors)


def _short(error: BaseException) -> str:
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) < 300 else words[:300] + " ..."


def _leave(message: str) -> None:
    """End at once: what Python does at its end would wait for processes that are gone."""
    print(f"kvjax: error: {message}", file=sys.stderr, flush=True)
    leave(2)
