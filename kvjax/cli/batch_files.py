"""The results of ``kvjax batch``: a file that one process appends whole lines to."""

import contextlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.cli.output import to_json

HEAD = b'{"line": '
"""How each result begins."""
SECONDS = 5.0
"""After which results are on the disk, if the machine fails."""


class _Result(NamedTuple):
    """What is asked of a result that is there."""

    line: int
    key: int
    bad: bool


class Results:
    """Results in the order in which they come, each on a line of its own: ``{"line": its number,
    "input": its key, ...}``.

    A line is one write at the file's end. So whoever is killed leaves whole lines, and one at most
    that is torn, which the next process cuts off. The file is locked until ``close``.

    Args:
      path: of the file; it is made if it is not there.
      again: whether those with an ``error`` count as not there; see ``begin``.

    Raises:
      ValueError: if another process has it, or something else stands there.
    """

    def __init__(self, path: Path, *, again: bool = False) -> None:
        self.path, self._again = path, again
        self._file = _opened(path)
        self._synced = time.monotonic()
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        return self._lines.size

    @property
    def last(self) -> int:
        """The highest number of a line that was there, 0 without any."""
        return int(self._lines[-1]) if len(self) else 0

    def has(self, line: int, key: str) -> bool:
        """Whether the result of a line was there.

        Raises:
          ValueError: if it is that of another one, by its key.
        """
        at = int(np.searchsorted(self._lines, line))
        if at == len(self) or self._lines[at] != line:
            return False
        if self._keys[at] != int(key, 16):
            raise self.foreign(line)
        return True

    def bad(self, line: int) -> bool:
        """Whether the result of a line that ``has`` one is an error."""
        return line in self._bad

    def foreign(self, line: int) -> ValueError:
        """The error for a result that is of nothing that was asked for."""
        return ValueError(
            f"{self.path} holds results of other lines or of other settings: line {line}; give "
            "another --out"
        )

    def begin(self) -> None:
        """Before the first result, take out those that are tried again: a new file takes the place
        of the old one."""
        if self._dropped:
            self._rewrite()
        with contextlib.suppress(OSError):  # the name must not be lost with the machine either
            folder = os.open(self.path.resolve().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _rewrite(self) -> None:
        real = self.path.resolve()
        beside = real.with_name(f".{real.name}.kvjax-new")
        beside.unlink(missing_ok=True)
        file = _opened(beside)
        with open(self._file, "rb", closefd=False) as old, open(file, "wb", closefd=False) as new:
            old.seek(0)
            for line in old:
                found = _result(line)
                if found is not None and not found.bad:
                    new.write(line)
        shutil.copymode(real, beside)
        os.fsync(file)
        os.replace(beside, real)
        os.close(self._file)
        self._file, self._dropped = file, 0

    def add(self, line: int, key: str, result: dict[str, Any]) -> None:
        """Append a result."""
        words = to_json({"line": line, "input": key, **result})
        # JSON writes halves of characters just so.
        data = words.encode("utf-8", "backslashreplace") + b"\n"
        while data:  # once, but on a disk that is full, whose error comes with the second
            data = data[os.write(self._file, data) :]
        if time.monotonic() - self._synced > SECONDS:
            self._sync()

    def close(self) -> None:
        """See all to the disk, and let others have the file."""
        try:
            self._sync()
        finally:
            os.close(self._file)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def _read(self) -> None:
        """Find what is there, and cut off a last line that is torn."""
        lines, keys = array("q"), array("Q")
        self._bad: set[int] = set()
        self._dropped = end = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, (raw, found) in enumerate(_results(file), 1):
                if found is None:
                    if not _torn(raw) or file.read(1):
                        raise ValueError(
                            f"{self.path} has something else than results of kvjax batch, on its "
                            f"line {number}"
                        )
                    os.ftruncate(self._file, end)
                    break
                end += len(raw)
                if self._again and found.bad:
                    self._dropped += 1
                else:
                    lines.append(found.line)
                    keys.append(found.key)
                    if found.bad:
                        self._bad.add(found.line)
        found = np.frombuffer(lines, np.int64) if lines else np.zeros(0, np.int64)
        order = np.argsort(found, kind="stable")
        self._lines = found[order]
        self._keys = (np.frombuffer(keys, np.uint64) if keys else np.zeros(0, np.uint64))[order]
        twice = self._lines[1:][self._lines[1:] == self._lines[:-1]]
        if twice.size:
            raise ValueError(f"{self.path} holds line {twice[0]} twice")


def _results(file: Any) -> Iterator[tuple[bytes, _Result | None]]:
    for raw in file:
        yield raw, _result(raw)


def _result(raw: bytes) -> _Result | None:
    """A line of the file, None if it is not whole, or no result."""
    try:
        found: Any = json.loads(raw) if raw.endswith(b"\n") else None
        line, key = found["line"], int(found["input"], 16)
        fits = type(line) is int and 0 < line < 2**63 and 0 <= key < 2**64
        return _Result(line, key, "error" in found) if fits else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _torn(raw: bytes) -> bool:
    """Whether it may be what is left of a result: its beginning, or what a disk had not yet."""
    return HEAD.startswith(raw[: len(HEAD)]) or not raw.strip(b"\0")


def _opened(path: Path) -> int:
    """A file to append to, which no other process has; a ``ValueError`` if one has."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    file = os.open(path, how, 0o666)
    try:
        _lock(file)
        if not os.path.samestat(os.fstat(file), os.stat(path)):  # it has made place for a new one
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        raise ValueError(f"{path}: another process writes its results there") from None
    return file


def _lock(file: int) -> None:
    """Keep others out as long as it is open, where the system can see to that."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # nor on every file system
        return
