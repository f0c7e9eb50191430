"""The files of ``kvjax batch``: input lines, and a file to which their results are appended."""

import contextlib
import difflib
import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.cli.output import to_json
from kvjax.core.validation import ArgumentError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.sampling.params import PARAMS

PROMPTS = ("prompt", "tokens", "messages")
SETTINGS = (
    "max_new_tokens",
    *PARAMS,
    "logit_bias",
    "seed",
    "stop",
    "logprobs",
    "priority",
)
_CONTINUE = "continue_final_message"
_FIELDS = ("id", *PROMPTS, _CONTINUE, *SETTINGS)
_TYPES = {
    "prompt": (str, "a string"),
    "tokens": (list, "a list of token ids"),
    "messages": (list, "a list of messages"),
    _CONTINUE: (bool, "true or false"),
    "logit_bias": (dict, "an object of token ids and biases"),
    "stop": ((str, list), "a string or a list of strings"),
}

RESULT_START = b'{"line": '
"""The text with which every result starts."""
SYNC_SECONDS = 5.0
"""Results older than this number of seconds are on the disk, so that a failure of the machine does
not lose them."""


def number_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file without surrounding whitespace, each with its number, counted from
    1."""
    for number, line in enumerate(file, 1):
        yield number, line.strip()


def input_key(line: bytes, settings: str) -> str:
    """Return a hash of an input line and its settings, as 16 hexadecimal digits."""
    return hashlib.sha256(settings.encode() + b"\n" + line).hexdigest()[:16]


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse the JSON object of an input line, and drop fields that are null.

    Raises:
      ValueError: if the line is not a JSON object.
    """
    try:
        entry = json.loads(line)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON, at character {error.pos + 1}: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    return {name: value for name, value in entry.items() if value is not None}


def line_id(entry: dict[str, object]) -> str | int | None:
    """Return the ``id`` of an input line, or None if it has no valid one."""
    value = entry.get("id")
    return value if isinstance(value, str | int) else None


class DuplicateIdError(ValueError):
    """Two input lines have the same id."""


class LineIds:
    """The ids of all lines, used to detect duplicates."""

    def __init__(self) -> None:
        self._lines: dict[str | int, int] = {}

    def add(self, number: int, value: str | int | None) -> None:
        """Add the id of a line; None if it has none.

        Raises:
          DuplicateIdError: if another line has the same id.
        """
        if value is not None and self._lines.setdefault(value, number) != number:
            raise DuplicateIdError(f"line {self._lines[value]} has the same id {value!r}")


def parse_prompt(
    entry: dict[str, Any], lm: LanguageModel, chat: bool
) -> tuple[Any, dict[str, Any]]:
    """Return the prompt of an input line, as text or token ids, and the line's own settings.

    The chat template of ``lm`` renders ``messages``. If ``chat`` is True, it renders a ``prompt``
    too.

    Raises:
      ValueError: if a field is wrong. The error names it.
    """
    if unknown := [name for name in entry if name not in _FIELDS]:
        similar = difflib.get_close_matches(unknown[0], _FIELDS, 1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"use {', '.join(_FIELDS)}"
        raise ValueError(f"unknown field {unknown[0]!r}: {hint}")
    if "id" in entry and line_id(entry) is None:
        raise ValueError("id must be a string or an integer")
    prompts = [name for name in PROMPTS if name in entry]
    if len(prompts) != 1:
        message = f"the line has {' and '.join(prompts) or 'no prompt'}"
        raise ValueError(f"{message}: give one of {', '.join(PROMPTS)}")
    for name, (kind, expected) in _TYPES.items():
        if name in entry and not isinstance(entry[name], kind):
            raise ArgumentError(f"{name} must be {expected}", param=name)
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise ValueError(f"the line has an unpaired surrogate {surrogate!r}") from None
    settings = {name: entry[name] for name in SETTINGS if name in entry}
    if "logit_bias" in settings:
        settings["logit_bias"] = {_token_id(k): x for k, x in entry["logit_bias"].items()}
    (source,) = prompts
    prompt = entry[source]
    arguments = {_CONTINUE: True} if entry.get(_CONTINUE) else {}
    if arguments and source != "messages":
        raise ValueError(f"{_CONTINUE} needs messages, but the line has {source}")
    if source == "messages":
        prompt = lm.chat(prompt, **arguments)
    elif source == "prompt" and chat:
        prompt = lm.chat([{"role": "user", "content": prompt}])
    return prompt, settings


def _token_id(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(f"logit_bias has {text!r}, which is not a token id")
    return int(text)


class _Result(NamedTuple):
    """An existing result: its line number, its key, and whether it is an error."""

    line: int
    key: int
    is_error: bool


class ResultsFile:
    """A file of results, one per line: ``{"line": number, "input": key, ...}``.

    Results are in any order. Each is appended with a single write. So a process that is killed
    leaves complete lines and at most one partial line, which the next process removes. The file is
    locked until ``close``.

    Args:
      path: the file. It is created if it does not exist.
      retry_errors: whether errors count as missing results; see ``prepare``.

    Raises:
      ValueError: if another process uses the file, or it contains something else.
    """

    def __init__(self, path: Path, *, retry_errors: bool = False) -> None:
        self.path, self._retry_errors = path, retry_errors
        self._file = _open_locked(path)
        self._synced = time.monotonic()
        try:
            self._read()
        except BaseException:
            os.close(self._file)
            raise

    def __len__(self) -> int:
        return self._lines.size

    @property
    def last_line(self) -> int:
        """The highest line number that has a result; 0 if there are no results."""
        return int(self._lines[-1]) if len(self) else 0

    def has(self, line: int, key: str) -> bool:
        """Return whether a line has an existing result.

        Raises:
          ValueError: if the result's key is not ``key``.
        """
        index = int(np.searchsorted(self._lines, line))
        if index == len(self) or self._lines[index] != line:
            return False
        if self._keys[index] != int(key, 16):
            raise self.mismatch(line)
        return True

    def is_error(self, line: int) -> bool:
        """Return whether the existing result of a line is an error."""
        return line in self._errors

    def mismatch(self, line: int) -> ValueError:
        """Create the error for a result that does not belong to the input."""
        return ValueError(
            f"{self.path} holds results of other lines or of other settings, first at line {line}: "
            "give another --out"
        )

    def prepare(self) -> None:
        """Prepare the file for the first new result.

        With ``retry_errors``, results that are errors are removed by replacing the file.
        """
        if self._num_retried:
            self._remove_errors()
        with contextlib.suppress(OSError):  # so that the file's name survives a machine failure
            folder = os.open(self.path.resolve().parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _remove_errors(self) -> None:
        path = self.path.resolve()
        new_path = path.with_name(f".{path.name}.kvjax-new")
        new_path.unlink(missing_ok=True)
        file = _open_locked(new_path)
        with open(self._file, "rb", closefd=False) as old, open(file, "wb", closefd=False) as new:
            old.seek(0)
            for line in old:
                result = _parse_result(line)
                if result is not None and not result.is_error:
                    new.write(line)
        shutil.copymode(path, new_path)
        os.fsync(file)
        os.replace(new_path, path)
        os.close(self._file)
        self._file, self._num_retried = file, 0

    def append(self, line: int, key: str, result: dict[str, object]) -> None:
        """Append the result of a line."""
        text = to_json({"line": line, "input": key, **result})
        # ``backslashreplace`` gives the same escape for an unpaired surrogate as JSON.
        data = text.encode("utf-8", "backslashreplace") + b"\n"
        while data:  # a full disk writes only a part, and the next write raises
            data = data[os.write(self._file, data) :]
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def close(self) -> None:
        """Flush the file to the disk, and release the lock."""
        try:
            self._sync()
        finally:
            os.close(self._file)

    def _sync(self) -> None:
        os.fsync(self._file)
        self._synced = time.monotonic()

    def _read(self) -> None:
        """Read the existing results, and cut off a partial last line."""
        lines, keys = array("q"), array("Q")
        self._errors: set[int] = set()
        self._num_retried = end = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, raw in enumerate(file, 1):
                result = _parse_result(raw)
                if result is None:
                    if not _may_be_partial(raw) or file.read(1):
                        raise ValueError(
                            f"{self.path} is not a file of results: its line {number} was not "
                            "written by kvjax batch"
                        )
                    os.ftruncate(self._file, end)
                    break
                end += len(raw)
                if self._retry_errors and result.is_error:
                    self._num_retried += 1
                else:
                    lines.append(result.line)
                    keys.append(result.key)
                    if result.is_error:
                        self._errors.add(result.line)
        unsorted = np.frombuffer(lines, np.int64) if lines else np.zeros(0, np.int64)
        order = np.argsort(unsorted, kind="stable")
        self._lines = unsorted[order]
        self._keys = (np.frombuffer(keys, np.uint64) if keys else np.zeros(0, np.uint64))[order]
        repeated = self._lines[1:][self._lines[1:] == self._lines[:-1]]
        if repeated.size:
            raise ValueError(f"{self.path} has two results for line {repeated[0]}")


def _parse_result(raw: bytes) -> _Result | None:
    """Parse a line of the file; None if it is incomplete or not a result."""
    try:
        value: Any = json.loads(raw) if raw.endswith(b"\n") else None
        line, key = value["line"], int(value["input"], 16)
        valid = type(line) is int and 0 < line < 2**63 and 0 <= key < 2**64
        return _Result(line, key, "error" in value) if valid else None
    except (ValueError, TypeError, LookupError, RecursionError):
        return None


def _may_be_partial(raw: bytes) -> bool:
    """Return whether a line may be a partial result: the start of one, or zeros from an unfinished
    disk write."""
    return RESULT_START.startswith(raw[: len(RESULT_START)]) or not raw.strip(b"\0")


def _open_locked(path: Path) -> int:
    """Open a file for appending, and lock it.

    Raises:
      ValueError: if another process has locked it.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file")
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)
    file = os.open(path, flags, 0o666)
    try:
        _lock(file)
        if not os.path.samestat(os.fstat(file), os.stat(path)):  # it was replaced meanwhile
            raise BlockingIOError
    except (BlockingIOError, FileNotFoundError):
        os.close(file)
        raise ValueError(f"{path}: another process is writing its results there") from None
    return file


def _lock(file: int) -> None:
    """Lock a file while it is open, on systems that support it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:  # a file system without locks
        return
