"""``--distributed``: several processes that run one command together."""

import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, NoReturn

import jax
import numpy as np
import typer
from jax.errors import JaxRuntimeError
from jax.experimental import multihost_utils

from kvjax.cli.common import INTERRUPTED, exit_now
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_9_shutdown_timeout, jax_0_10_error_code
from kvjax.core.validation import as_optional_int


@dataclass(frozen=True, kw_only=True)
class DistributedOptions:
    """The processes of a command, and how they find each other."""

    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="Run as one of several processes with the same command, each with its own "
            "devices; only process 0 prints. On a cluster that JAX knows (Slurm, Open MPI, "
            "Kubernetes, TPU) the next three options are not needed.",
        ),
    ] = False
    coordinator: Annotated[
        str | None,
        typer.Option(
            envvar="JAX_COORDINATOR_ADDRESS",
            help="Host and port of process 0: 10.0.0.1:1234.",
        ),
    ] = None
    processes: Annotated[
        int | None, typer.Option(envvar="JAX_NUM_PROCESSES", help="The number of processes.")
    ] = None
    process_id: Annotated[
        int | None,
        typer.Option(envvar="JAX_PROCESS_ID", help="The number of this process, from 0."),
    ] = None
    start_timeout: Annotated[
        int, typer.Option(help="Seconds to wait for the other processes at the start.")
    ] = 60
    heartbeat_timeout: Annotated[
        int, typer.Option(help="Seconds without a heartbeat until a process counts as dead.")
    ] = 20

    def check(self) -> None:
        """Raise ``ValueError`` for an option that is out of range."""
        for name, value, least in (
            ("--processes", self.processes, 1),
            ("--process-id", self.process_id, 0),
            ("--start-timeout", self.start_timeout, 1),
            ("--heartbeat-timeout", self.heartbeat_timeout, 1),
        ):
            as_optional_int(name, value, least)
        count, number = self.processes, self.process_id
        if count is not None and number is not None and number >= count:
            raise ValueError(f"--process-id is {number}, but must be less than {count}")
        host, _, port = (self.coordinator or "host:1").rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise ValueError(
                f"--coordinator is {self.coordinator!r}: give host and port, such as 10.0.0.1:1234"
            )


@contextmanager
def join_processes(options: DistributedOptions, settings: object) -> Iterator[bool]:
    """Join the other processes, and yield whether this process prints the results.

    A process that fails exits immediately. Otherwise it would wait for the others at exit, and they
    would wait for it. ``settings`` must be the same in all processes.
    """
    if not options.distributed:
        yield True
        return
    options.check()
    _reserve_stdout()
    missing = (
        f"the {options.processes or 'other'} processes did not start within "
        f"{options.start_timeout} seconds: check that all are running, with ids from 0, and that "
        f"process 0 can be reached at {options.coordinator or 'the address from the cluster'}"
    )
    # JAX aborts with a stack trace at its own timeout, so JAX's timeout is set to a later time.
    timer = threading.Timer(options.start_timeout, _fail, [missing])
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            options.coordinator,
            options.processes,
            options.process_id,
            initialization_timeout=options.start_timeout + 60,
            heartbeat_timeout_seconds=options.heartbeat_timeout,
            **jax_0_9_shutdown_timeout(options.heartbeat_timeout),
        )
        count = jax.process_count()
    except ValueError as error:
        raise ValueError(
            "--distributed: no cluster was found, so give --coordinator, --processes and "
            f"--process-id ({error})"
        ) from error
    except JaxRuntimeError as error:
        _fail(f"{missing} ({_short(error)})")
    finally:
        timer.cancel()
    if options.processes not in (None, count):
        _fail(f"--processes is {options.processes}, but process 0 has {count}")
    try:
        _check_settings(settings)
        yield jax.process_index() == 0
    except KeyboardInterrupt:
        exit_now(INTERRUPTED)
    except Exception as error:
        message = _short(error)
        # A device error other than out-of-memory means that a message did not arrive.
        if jax_0_10_error_code(error) not in (None, RESOURCE_EXHAUSTED):
            message = f"another process of this run has ended, so this one must stop ({message})"
        _fail(message)
    jax.distributed.shutdown()


def _check_settings(settings: object) -> None:
    """End all processes if their settings differ, because they would wait for each other
    forever."""
    checksum = np.uint32(zlib.crc32(repr(settings).encode()))
    checksums = np.ravel(multihost_utils.process_allgather(checksum))
    different = np.flatnonzero(checksums != checksums[0])
    if different.size:
        time.sleep(1)  # so that the other processes see this error too, not the end of this one
        _fail(
            f"process {different[0]} has another prompt, mesh or setting than process 0: only "
            "--process-id may differ"
        )


def _reserve_stdout() -> None:
    """Redirect what libraries print to standard output to standard error. ``sys.stdout`` still
    prints to the real standard output."""
    sys.stdout.flush()
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(descriptor, "w", 1, sys.stdout.encoding, sys.stdout.errors)


def _short(error: BaseException) -> str:
    message = " ".join(str(error).split()) or type(error).__name__
    return message if len(message) < 300 else message[:300] + " ..."


def _fail(message: str) -> NoReturn:
    """Print an error, and exit immediately."""
    print(f"kvjax: error: {message}", file=sys.stderr, flush=True)
    exit_now(2)
