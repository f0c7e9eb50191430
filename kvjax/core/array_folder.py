"""Arrays in a folder that is the old one or the new one, whenever its writer was stopped.

Orbax writes the arrays, beside those that stand there; then one small file, which names them and
says how large they are, takes the place of its forerunner.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  # its hook stands before ours
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
from typing import Any

import numpy as np

from kvjax.core.errors import CheckpointError

NAME = "kvjax.json"
_FORM = 1
_ARRAYS = re.compile(r"arrays-[0-9a-f]{16}(\..*)?")
"""Folders of arrays, and what Orbax calls them until they are whole."""
_BESIDE = re.compile(re.escape(NAME) + r"(\.[0-9a-f]{16})?")

_ORBAX = threading.Lock()
"""It numbers what it does by one counter, and of two writers at once one waits for the other's."""


class PendingSave:
    """A folder that is being written by a second thread.

    A program that ends meanwhile waits for it; where its Python lets Orbax write no more by then
    (from 3.12 on), it is told that the folder was not saved, and the old one stands.
    """

    def __init__(
        self, path: Path, arrays: Mapping[str, np.ndarray], told: Mapping[str, Any]
    ) -> None:
        self._path = path
        self._error: Exception | None = None
        self._before = _RUNNING.get(path)  # two that write at once would each take the other away
        _RUNNING[path] = self
        self._thread = threading.Thread(target=self._write, args=(arrays, told))
        self._thread.start()

    def _write(self, arrays: Mapping[str, np.ndarray], told: Mapping[str, Any]) -> None:
        if self._before is not None:
            self._before._thread.join()
            self._before = None
        try:
            _write(self._path, arrays, told)
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait until it is written.

        Raises:
          OSError: if it could not be.
        """
        self._thread.join()
        if _RUNNING.get(self._path) is self:
            del _RUNNING[self._path]
        if self._error is not None:
            raise self._error


_RUNNING: dict[Path, PendingSave] = {}
"""The last saving of each folder, until somebody has waited for it."""


def _wait_for_all() -> None:
    for path, saving in list(_RUNNING.items()):
        try:
            saving.wait()
        except Exception as error:
            warnings.warn(f"{path} was not saved: {error}", stacklevel=1)


# Orbax writes by executors, which take nothing new from the moment that a program begins to end.
getattr(threading, "_register_atexit", atexit.register)(_wait_for_all)


def save_folder(
    path: str | Path, arrays: Mapping[str, np.ndarray], told: Mapping[str, Any]
) -> PendingSave:
    """Write arrays, and what is ``told`` of them as JSON, into a folder of their own.

    ``path``: a folder that is not there, is empty, or was written by this. ``arrays``: nobody's but
    the writer's from here on, none of them without numbers.

    Raises:
      CheckpointError: if something else stands there.
    """
    path = check_writable_folder(path)
    return PendingSave(path.resolve(), dict(arrays), told)


def expand_user(path: str | Path) -> Path:
    """A path with a leading ``~`` expanded. That of an unknown user stays as it is, where
    ``Path.expanduser`` raises."""
    return Path(os.path.expanduser(path))


def check_writable_folder(path: str | Path) -> Path:
    """The path of a folder that may be written.

    Raises:
      CheckpointError: if something else stands there.
    """
    path = expand_user(path)
    if path.exists() and not (path.is_dir() and all(map(_is_ours, path.iterdir()))):
        raise CheckpointError(f"{path}: there is something else, which is not written over")
    return path


def read_folder(path: str | Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What ``save_folder`` was told, and the arrays.

    Raises:
      CheckpointError: if nothing was written there, or it was cut or changed since.
    """
    path = expand_user(path)
    try:
        data = (path / NAME).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: nothing was saved there: it has no {NAME}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error
    try:
        return _read(path, data)
    except CheckpointError:
        with contextlib.suppress(OSError):
            if (path / NAME).read_bytes() != data:  # a new one took its place in the meantime
                return read_folder(path)
        raise


@contextlib.contextmanager
def report_format_errors(path: str | Path) -> Iterator[None]:
    """What is not as this version writes it is told by the folder's name.

    Raises:
      CheckpointError: in place of what came up.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not what this version saves: {error}") from error


def _read(path: Path, data: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    import orbax.checkpoint as ocp

    try:
        words = json.loads(data)
        form, check = words.pop("form"), words.pop("check")
        if form == _FORM and check != _check_of(words):
            raise ValueError("its checksum is another")
        folder, told = path / words["arrays"], dict(words["told"])
        files = [(folder / name, size, crc) for name, (size, crc) in words["files"].items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / NAME}: was cut or changed: {error}") from None
    if form != _FORM:
        raise CheckpointError(f"{path / NAME}: form {form!r}, and this version reads {_FORM}")
    for file in files:
        _check_file(*file)
    try:
        with _ORBAX, ocp.StandardCheckpointer() as reader:
            found: dict[str, Any] = reader.restore(folder.absolute())
        return told, {name: np.asarray(x) for name, x in found.items()}
    except Exception as error:  # whatever Orbax and what it stands on raise
        raise CheckpointError(f"{folder}: can't be read: {error}") from error


def _write(path: Path, arrays: Mapping[str, np.ndarray], told: Mapping[str, Any]) -> None:
    import orbax.checkpoint as ocp

    path.mkdir(parents=True, exist_ok=True)
    with _alone_in(path):
        folder = path / f"arrays-{secrets.token_hex(8)}"
        with _ORBAX, ocp.StandardCheckpointer() as writer:
            writer.save(folder.absolute(), dict(arrays))
            writer.wait_until_finished()
        files = {
            str(file.relative_to(folder)): (file.stat().st_size, _checksum(file))
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        }
        words = {"arrays": folder.name, "files": files, "told": dict(told)}
        beside = path / f"{NAME}.{secrets.token_hex(8)}"
        with beside.open("w", encoding="utf-8") as file:
            json.dump(words | {"form": _FORM, "check": _check_of(words)}, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path / NAME)
        for other in path.iterdir():  # what stood there, and what was not ended
            if _ARRAYS.fullmatch(other.name) and other.name != folder.name:
                shutil.rmtree(other, ignore_errors=True)
            elif _BESIDE.fullmatch(other.name) and other.name != NAME:
                other.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """No other process writes there meanwhile, where the system can see to that."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    folder = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # nor on every file system
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _is_ours(file: Path) -> bool:
    return bool(_BESIDE.fullmatch(file.name) or _ARRAYS.fullmatch(file.name))


def _check_of(words: Any) -> int:
    """A checksum of what JSON makes of something."""
    return zlib.crc32(json.dumps(words, sort_keys=True).encode())


def _check_file(file: Path, size: int, check: int) -> None:
    """Raise ``CheckpointError`` for a file that is not what was written."""
    if not file.is_file():
        raise CheckpointError(f"{file}: is not there")
    if (found := file.stat().st_size) != size:
        raise CheckpointError(f"{file}: was cut or changed: it has {found} bytes of {size}")
    if _checksum(file) != check:
        raise CheckpointError(f"{file}: was changed since it was written")


def _checksum(file: Path) -> int:
    found = 0
    with file.open("rb") as stream:
        while part := stream.read(2**20):
            found = zlib.crc32(part, found)
    return found
