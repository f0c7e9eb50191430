"""Tensors in safetensors files: where they lie, and their values one by one.

Files are read, not mapped: mapped pages would count as memory until they are unmapped, and change
with the file.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.core.errors import CheckpointError

from .json_fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

STORED_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""The dtypes of weights that are read, by their names in the files."""
_OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.gguf", "*.ckpt", "*.npz")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: a file, and ``count`` bytes of it from ``start``; ``dtype`` is "" where
    the file is not there, and not needed."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    def read(self) -> np.ndarray:
        """The tensor's values, in a new array; those of float64 in float32.

        Raises:
          CheckpointError: if the file ends before the tensor does, or can't be read, or float32
            can't hold the values.
        """
        raw = np.empty(self.count, np.uint8)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.start)
                got = stream.readinto(raw.data)
        except OSError as error:
            raise CheckpointError(f"{self.file}: can't be read: {error}") from error
        if got != self.count:
            raise CheckpointError(f"{self.file}: truncated: it ends inside the tensor {self.name}")
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
    """No tensor is unused."""


def find_tensors(folder: Path, unused: Callable[[str], Any] = _none) -> Stored:
    """All tensors of a checkpoint's safetensors files, by name; nothing but headers is read.

    ``unused``: whether a tensor of this name is not needed. A file of such tensors alone need not
    be there.

    Raises:
      CheckpointError: if there are no such files, an index names a file or tensor that is not
        there, a file is truncated, or its header makes no sense.
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
            raise CheckpointError(f"{folder / name}: the tensor {tensor} is missing; {index} "
                                  "says that it is there")  # fmt: skip
    return stored


def weight_files(folder: Path, unused: Callable[[str], Any] = _none) -> list[str]:
    """The names of a checkpoint's files of weights, which need not be there yet: by its index,
    whatever they are called, or the one file. Those of ``unused`` tensors alone are left out.
    Those that are no safetensors files beside it are left to ``find_tensors``, which refuses them.

    Raises:
      CheckpointError: if the index is damaged.
    """
    if not (folder / INDEX).is_file():
        return [SINGLE]
    names = sorted({name for tensor, name in _places(folder).items() if not unused(tensor)})
    return [name for name in names if Path(name).name == name and name.endswith(".safetensors")]


def _places(folder: Path) -> dict[str, str]:
    """In which file each tensor is, by the index."""
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise CheckpointError(f"{folder / INDEX}: weight_map: expected an object of file names")
    return places


def _no_weights(folder: Path) -> CheckpointError:
    found = sorted(path.name for kind in _OTHER_FORMATS for path in folder.glob(kind))
    found += sorted(path.name for path in folder.glob("pytorch_model.bin.index.json"))
    message = f"{folder}: no weights: expected {SINGLE} or {INDEX}"
    if found:
        message = (
            f"{folder}: the weights are in {found[0]}, which is not read: unpickling can run any "
            f'code. Convert them once, where torch and transformers are installed: python -c "'
            "from transformers import AutoModelForCausalLM as M; "
            f"M.from_pretrained('{folder}').save_pretrained('{folder}')\""
        )
    return CheckpointError(message)


def _read_header(file: Path) -> Stored:
    """The tensors of one file: 8 bytes of header length, a JSON header, the data."""
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
            raise ValueError("a tensor's bytes begin before the data or end before they begin")
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file}: the header is not one of a safetensors file") from error
    end = max((tensor.start + tensor.count for tensor in stored.values()), default=0)
    if end > size:
        raise CheckpointError(f"{file}: truncated: it has {size:,} bytes of {end:,}")
    return stored
