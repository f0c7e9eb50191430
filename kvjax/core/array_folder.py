"""Folders of arrays that are replaced atomically.

A folder contains either the old or the new arrays, no matter when its writer is stopped. Orbax
writes the new arrays next to the old ones. Then one small file, which lists the files with their
sizes and checksums, replaces its predecessor.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  # registers its exit hook before ours
import contextlib
import json
import os
import re
import secrets
import shutil
import threading
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from kvjax.core.typing import Json
from kvjax.core.validation import CheckpointError

NAME = "kvjax.json"
_FORMAT = 1
_ARRAYS = re.compile(r"arrays-[0-9a-f]{16}(\..*)?")
"""The names of folders of arrays, including Orbax's temporary names."""
_INDEX = re.compile(re.escape(NAME) + r"(\.[0-9a-f]{16})?")

_ORBAX = threading.Lock()
"""A lock that is held while Orbax reads or writes. Orbax numbers its operations with one global
counter, so two operations at the same time would block each other."""


class PendingSave:
    """A folder that a second thread is writing.

    A program that exits waits for the thread. From Python 3.12 on, Orbax can't write during exit.
    In this case a warning says that the folder was not saved, and the old contents stay.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]
    ) -> None:
        self._path = path
        self._error: Exception | None = None
        self._before = _RUNNING.get(path)  # simultaneous writers would delete each other's arrays
        _RUNNING[path] = self
        self._thread = threading.Thread(target=self._write, args=(arrays, metadata))
        self._thread.start()

    def _write(self, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        try:
            _write(self._path, arrays, metadata)
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait until the folder is written.

        Raises:
          OSError: if writing failed.
        """
        self._thread.join()
        if _RUNNING.get(self._path) is self:
            del _RUNNING[self._path]
        if self._error is not None:
            raise self._error


_RUNNING: dict[Path, PendingSave] = {}
"""The last save of each folder, until its ``wait`` was called."""


def _wait_for_all() -> None:
    for path, saving in list(_RUNNING.items()):
        try:
            saving.wait()
        except Exception as error:
            warnings.warn(f"{path} was not saved: {error}", stacklevel=1)


# Orbax writes with executors, which accept no work once the program begins to exit.
getattr(threading, "_register_atexit", atexit.register)(_wait_for_all)


def save_folder(
    path: str | Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]
) -> PendingSave:
    """Write arrays and JSON metadata into a folder that contains nothing else.

    Args:
      path: the folder. It must be new, empty, or written by this function before.
      arrays: non-empty arrays, which the caller must not change from now on.
      metadata: values that JSON can represent.

    Raises:
      CheckpointError: if ``path`` contains anything else.
    """
    path = check_writable_folder(path)
    return PendingSave(path.resolve(), dict(arrays), metadata)


def expand_user(path: str | Path) -> Path:
    """Expand a leading ``~``. Unlike ``Path.expanduser`` this keeps an unknown user's ``~name``."""
    return Path(os.path.expanduser(path))


def check_writable_folder(path: str | Path) -> Path:
    """Check that ``save_folder`` may write to a folder, and return its path.

    Raises:
      CheckpointError: if the folder contains something that ``save_folder`` did not write.
    """
    path = expand_user(path)
    if path.exists() and not (path.is_dir() and all(map(_is_ours, path.iterdir()))):
        raise CheckpointError(
            f"{path}: exists but was not saved by kvjax, so it is not overwritten"
        )
    return path


def read_folder(path: str | Path) -> tuple[Json, dict[str, np.ndarray]]:
    """Read the metadata and the arrays that ``save_folder`` wrote.

    Raises:
      CheckpointError: if the folder has no saved data, or its files were truncated or modified.
    """
    path = expand_user(path)
    try:
        data = (path / NAME).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: has no saved data: {NAME} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    try:
        return _read(path, data)
    except CheckpointError:
        with contextlib.suppress(OSError):
            if (path / NAME).read_bytes() != data:  # a writer has replaced it meanwhile
                return read_folder(path)
        raise


@contextlib.contextmanager
def report_format_errors(path: str | Path) -> Iterator[None]:
    """Turn errors about unexpected contents into a ``CheckpointError`` that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not in this version's format: {error}") from error


def _read(path: Path, data: bytes) -> tuple[Json, dict[str, np.ndarray]]:
    import orbax.checkpoint as ocp

    try:
        content = json.loads(data)
        form, check = content.pop("form"), content.pop("check")
        if form == _FORMAT and check != _json_checksum(content):
            raise ValueError("its checksum does not match")
        folder, metadata = path / content["arrays"], dict(content["told"])
        files = [(folder / name, size, crc) for name, (size, crc) in content["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / NAME}: was truncated or modified: {error}") from None
    if form != _FORMAT:
        raise CheckpointError(
            f"{path / NAME}: has format {form!r}, but this version reads {_FORMAT}"
        )
    for file in files:
        _check_file(*file)
    try:
        with _ORBAX, ocp.StandardCheckpointer() as reader:
            arrays = reader.restore(folder.absolute())
        return metadata, {name: np.asarray(x) for name, x in arrays.items()}
    except Exception as error:  # Orbax raises many types of errors
        raise CheckpointError(f"{folder}: can't be read: {error}") from error


def _write(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, object]) -> None:
    import orbax.checkpoint as ocp

    path.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        folder = path / f"arrays-{secrets.token_hex(8)}"
        with _ORBAX, ocp.StandardCheckpointer() as writer:
            writer.save(folder.absolute(), dict(arrays))
            writer.wait_until_finished()
        files = {
            str(file.relative_to(folder)): (file.stat().st_size, _checksum(file))
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        content = {"arrays": folder.name, "files": files, "told": dict(metadata)}
        temporary = path / f"{NAME}.{secrets.token_hex(8)}"
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(content | {"form": _FORMAT, "check": _json_checksum(content)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path / NAME)
        for other in path.iterdir():  # arrays of the old save and of interrupted writers
            if _ARRAYS.fullmatch(other.name) and other.name != folder.name:
                shutil.rmtree(other, ignore_errors=True)
            elif _INDEX.fullmatch(other.name) and other.name != NAME:
                other.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock a folder against writers in other processes, where the system supports it."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _is_ours(file: Path) -> bool:
    return bool(_INDEX.fullmatch(file.name) or _ARRAYS.fullmatch(file.name))


def _json_checksum(content: Json) -> int:
    """Return a checksum of a value's JSON."""
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _check_file(file: Path, size: int, checksum: int) -> None:
    """Raise ``CheckpointError`` if a file is missing, or does not have the size and checksum with
    which it was written."""
    if not file.is_file():
        raise CheckpointError(f"{file}: is missing")
    if (actual := file.stat().st_size) != size:
        raise CheckpointError(f"{file}: was truncated or modified: it has {actual} bytes of {size}")
    if _checksum(file) != checksum:
        raise CheckpointError(f"{file}: was modified after it was saved")


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while chunk := stream.read(2**20):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
