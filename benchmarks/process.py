"""The parent's end of a worker: start it, ask it, stop it."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class WorkerError(RuntimeError):
    """A worker failed; the message holds its traceback or the end of its standard error."""


class Worker:
    """An engine in its own process, which starts at once; `ready` waits until it has loaded.

    `about` is what the engine says of itself, `peak_bytes` the most memory resident during the
    last request, and `peak_resettable` whether it could be measured for that request alone.
    """

    def __init__(self, engine: str, checkpoint: Path, dtype: str, interpreter: Sequence[str]):
        self.engine = engine
        self.peak_bytes = 0
        self.peak_resettable = True
        self.about: dict[str, Any] = {}
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed in `close`
        command = [*interpreter, "-m", "benchmarks.worker"]
        command += ["--engine", engine, "--checkpoint", str(checkpoint), "--dtype", dtype]
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            encoding="utf-8",
        )

    def ready(self) -> None:
        """Wait until the engine has loaded its weights.

        Raises:
          WorkerError: if it could not.
        """
        self._reply()
        self.about = self.ask("describe")

    def ask(self, op: str, **args: Any) -> Any:
        """Run `op` in the worker, after a moment in which other workers' threads fall asleep.

        Raises:
          WorkerError: if it failed or the process ended.
        """
        assert self._process.stdin is not None
        # A thread pool spins a while after its last task, on the core the next engine needs.
        time.sleep(0.05)
        try:
            self._process.stdin.write(json.dumps({"op": op, "args": args}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            self._process.wait()
        return self._reply()

    def _reply(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            tail = self._errors.read()[-4000:]
            raise WorkerError(f"the worker {self.engine} ended with code {code}:\n{tail}")
        reply = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"the worker {self.engine} failed:\n{reply['error']}")
        self.peak_bytes = reply["peak_bytes"]
        self.peak_resettable = reply.get("peak_resettable", self.peak_resettable)
        return reply["value"]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
