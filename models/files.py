"""Read a checkpoint's files: JSON field by field, and tensors one at a time.

Errors name the file, the field and the value. Tensors are read rather than memory-mapped: mapped
pages count as used memory until they are unmapped, and change when the file changes.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.core.typing import Json
from kvjax.core.validation import CheckpointError


def read_text(path: Path) -> str:
    """Read a text file of a checkpoint.

    Raises:
      CheckpointError: if the file does not exist, can't be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file not found") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: can't be read as text: {error}") from error


def read_json(path: Path) -> Json:
    """Read a JSON object from a file of a checkpoint.

    Raises:
      CheckpointError: if the file can't be read, or is not a JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object. A null field counts as missing."""

    file: Path
    values: Mapping[str, object]
    parent: str = ""

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a field with an invalid value."""
        value = json.dumps(self.values.get(name), default=str)
        if len(value) > 200:
            value = value[:200] + "..."
        return CheckpointError(f"{self.file}: {self.parent}{name} is {value}; expected {expected}")

    def raw(self, name: str, default: object = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.raw(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self.raw(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        if positive and not value > 0:
            raise self.wrong(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"one of {', '.join(sorted(known))}")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self.raw(name)
        good = isinstance(value, list) and all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in value
        )
        if not good or len(value) != count:
            suffix = f", found {len(value)}" if isinstance(value, list) else ""
            raise self.wrong(name, f"a list of {count} numbers above 0{suffix}")
        return tuple(float(x) for x in value)

    def inner(self, name: str) -> "Fields | None":
        """A nested object, or None if the field is missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.file, value, f"{self.parent}{name}.")


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""The supported weight dtypes, by their safetensors names."""
_OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.ckpt", "*.npz")


@dataclass(frozen=True)
class StoredTensor:
    """The location of a tensor: ``count`` bytes of ``file``, from ``start``. ``dtype`` is "" if
    the file is absent because none of its tensors is needed."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    def check(self) -> None:
        """Check the dtype, and that the size fits the shape.

        Raises:
          CheckpointError: if the dtype is not supported, or the size is wrong.
        """
        if self.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"{self.file}: the tensor {self.name} has dtype {self.dtype}; expected one of "
                f"{', '.join(STORED_DTYPES)}: quantized weights are not read"
            )
        itemsize = jnp.dtype(STORED_DTYPES[self.dtype]).itemsize
        if self.count != math.prod(self.shape) * itemsize:
            raise CheckpointError(
                f"{self.file}: the tensor {self.name} has {self.count:,} bytes, which does not "
                f"fit its shape {list(self.shape)} of {self.dtype}"
            )

    def read(self) -> np.ndarray:
        """Read the tensor's values into a new array. float64 is converted to float32.

        Raises:
          CheckpointError: if the file can't be read or ends inside the tensor, or if a float64
            value exceeds the range of float32.
        """
        return self.floats(self.read_bytes())

    def read_bytes(self) -> np.ndarray:
        """Read the tensor's bytes, uint8[count].

        Raises:
          CheckpointError: if the file can't be read or ends inside the tensor.
        """
        raw = np.empty(self.count, np.uint8)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.start)
                got = stream.readinto(raw.data)
        except OSError as error:
            raise CheckpointError(f"{self.file}: can't be read: {error}") from error
        if got != self.count:
            raise CheckpointError(f"{self.file}: truncated: the tensor {self.name} is incomplete")
        return raw

    def floats(self, raw: np.ndarray) -> np.ndarray:
        """The values of a tensor that is stored as floats, from its bytes."""
        values = raw.view(jnp.dtype(STORED_DTYPES[self.dtype])).reshape(self.shape)
        return self._narrowed(values) if self.dtype == "F64" else values

    def _narrowed(self, values: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if np.any(np.isinf(narrow) & ~np.isinf(values)):
            raise CheckpointError(
                f"{self.file}: the tensor {self.name} is float64 and exceeds the range of float32"
            )
        return narrow


Stored = dict[str, StoredTensor]


def _none(name: str) -> None:
    """The default of ``unused``: every tensor is needed."""


def find_tensors(folder: Path, unused: Callable[[str], object] = _none) -> Stored:
    """All tensors of a checkpoint's safetensors files, by name. Reads only the headers.

    Args:
      folder: the checkpoint.
      unused: returns True for the names of tensors that are not needed. A file with only such
        tensors may be absent.

    Raises:
      CheckpointError: if the folder has no safetensors files, the index names an absent file or
        tensor, a file is truncated, or a header is invalid.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    index, places = folder / INDEX, _places(folder)
    needed = {name for tensor, name in places.items() if not unused(tensor)}
    stored: Stored = {}
    for name in sorted(set(places.values())):
        if name not in needed and not (folder / name).is_file():
            absent = [tensor for tensor, place in places.items() if place == name]
            stored |= {t: StoredTensor(folder / name, t, "", (), 0, 0) for t in absent}
            continue
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{index}: weight_map: there is no file {name} in this folder")
        stored.update(_read_header(folder / name))
    for tensor, name in places.items():
        if tensor not in stored:
            raise CheckpointError(
                f"{folder / name}: the tensor {tensor} is missing, but {index} lists it"
            )
    return stored


def weight_files(folder: Path, unused: Callable[[str], object] = _none) -> list[str]:
    """The names of a checkpoint's weight files, which may not be downloaded yet.

    The names come from the index. Without an index it is the single file. Files that contain only
    ``unused`` tensors are left out, and so are names that are not safetensors files in the same
    folder: ``find_tensors`` raises an error for those.

    Raises:
      CheckpointError: if the index is invalid.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    names = sorted({name for tensor, name in _places(folder).items() if not unused(tensor)})
    return [name for name in names if Path(name).name == name and name.endswith(".safetensors")]


def _places(folder: Path) -> dict[str, str]:
    """The file of each tensor, according to the index."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map: expected an object of file names")
    return places


def _no_weights(folder: Path) -> CheckpointError:
    other = sorted(path.name for kind in _OTHER_FORMATS for path in folder.glob(kind))
    other += sorted(path.name for path in folder.glob("pytorch_model.bin.index.json"))
    message = f"{folder}: no weights: expected {SINGLE} or {INDEX}"
    if other:
        message = (
            f"{folder}: the weights are in {other[0]}, which is not read: unpickling can run "
            f'arbitrary code. Convert them with torch and transformers: python -c "'
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return CheckpointError(message)


def _read_header(file: Path) -> Stored:
    """The tensors of one file. Its format: 8 bytes of header length, a JSON header, the data."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if size >= 8 + length else b""
    except OSError as error:
        raise CheckpointError(f"{file}: can't be read: {error}") from error
    if size < 8 or size < 8 + length:
        raise CheckpointError(
            f"{file}: truncated, or not a safetensors file: {size:,} bytes are too few for its "
            f"header of {length:,} bytes"
        )
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        stored = {
            name: StoredTensor(
                file, name, entry["dtype"], tuple(int(n) for n in entry["shape"]),
                8 + length + entry["data_offsets"][0],
                entry["data_offsets"][1] - entry["data_offsets"][0],
            )
            for name, entry in header.items()
        }  # fmt: skip
        if any(tensor.count < 0 or tensor.start < 8 + length for tensor in stored.values()):
            raise ValueError("invalid data_offsets")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file}: the header is not one of a safetensors file") from error
    end = max((tensor.start + tensor.count for tensor in stored.values()), default=0)
    if end > size:
        raise CheckpointError(f"{file}: truncated: it has {size:,} bytes of {end:,}")
    return stored
