"""Arrays in a folder that is the old one or the new one, whenever its writer was stopped.

Orbax writes the arrays, beside those that stand there; then one small file, which names them and
says how large they are, takes the place of its forerunner.
"""

import json
import os
import secrets
import shutil
import threading
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.core.errors import CheckpointError

NAME = "kvjax.json"
_PREFIX, _FORM = "arrays-", 1


class Saving:
    """A folder that is being written by a second thread, which ends before the program does."""

    def __init__(self, path: Path, arrays: Mapping[str, np.ndarray], told: Any) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._write, args=(path, arrays, told))
        self._thread.start()

    def _write(self, path: Path, arrays: Mapping[str, np.ndarray], told: Any) -> None:
        try:
            _write(path, arrays, told)
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Wait until it is written.

        Raises:
          OSError: if it could not be.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


def save_folder(path: str | Path, arrays: Mapping[str, np.ndarray], told: Any) -> Saving:
    """Write arrays, and what is ``told`` of them as JSON, into a folder of their own.

    ``path``: a folder that is not there, is empty, or was written by this. ``arrays``: nobody's but
    the writer's from here on, none of them without numbers.

    Raises:
      CheckpointError: if something else stands there.
    """
    path = Path(path)
    others = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if others and not (path.is_dir() and _is_ours(path)):
        raise CheckpointError(f"{path}: there is something else, which is not written over")
    return Saving(path, dict(arrays), told)


def read_folder(path: str | Path) -> tuple[Any, dict[str, np.ndarray]]:
    """What ``save_folder`` was told, and the arrays.

    Raises:
      CheckpointError: if nothing was written there, or it was cut or changed since.
    """
    path = Path(path)
    try:
        found = json.loads((path / NAME).read_bytes())
        form, folder, told = found["form"], path / found["arrays"], dict(found["told"])
        files = [(folder / name, size, check) for name, (size, check) in found["files"].items()]
    except FileNotFoundError:
        raise CheckpointError(f"{path}: nothing was saved there: it has no {NAME}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / NAME}: was cut or changed: {error}") from None
    if form != _FORM:
        raise CheckpointError(f"{path / NAME}: form {form!r}, and this version reads {_FORM}")
    for file in files:
        _check_file(*file)
    try:
        return told, {name: np.asarray(x) for name, x in _restored(folder).items()}
    except Exception as error:  # whatever Orbax and what it stands on raise
        raise CheckpointError(f"{folder}: can't be read: {error}") from error


def _write(path: Path, arrays: Mapping[str, np.ndarray], told: Any) -> None:
    import orbax.checkpoint as ocp

    path.mkdir(parents=True, exist_ok=True)
    folder = path / f"{_PREFIX}{secrets.token_hex(8)}"
    with ocp.StandardCheckpointer() as writer:
        writer.save(folder.absolute(), dict(arrays))
        writer.wait_until_finished()
    files = {
        str(file.relative_to(folder)): (file.stat().st_size, _checksum(file))
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    words = {"form": _FORM, "arrays": folder.name, "files": files, "told": told}
    beside = path / f"{NAME}.{secrets.token_hex(8)}"
    with beside.open("w") as file:
        json.dump(words, file)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path / NAME)
    for other in path.iterdir():  # what stood there, and what was not ended
        if other.name.startswith(_PREFIX) and other.name != folder.name:
            shutil.rmtree(other, ignore_errors=True)
        elif other.name.startswith(f"{NAME}."):
            other.unlink(missing_ok=True)


def _restored(folder: Path) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as reader:
        found: dict[str, Any] = reader.restore(folder.absolute())
    return found


def _is_ours(path: Path) -> bool:
    return all(each.name.startswith((NAME, _PREFIX)) for each in path.iterdir())


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
