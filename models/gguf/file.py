"""Read a GGUF file: its metadata, and the positions and types of its tensors.

The header is checked against the size of the file before anything is allocated. If a count, length,
shape or offset does not fit, an error names the entry. Tensors are read
one at a time, and decoded to floats by the package ``gguf``.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

import functools
import math
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from kvjax.core.validation import CheckpointError, short_repr

from ..files import STORED_DTYPES, StoredTensor

Value = str | int | float | bool | list[str] | np.ndarray
"""A metadata value. Arrays of numbers are NumPy arrays."""

_MAGIC = b"GGUF"
_NUMBERS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
"""The dtypes of number types in metadata, by their codes."""
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_SMALLEST_ENTRY, _SMALLEST_TENSOR = 8 + 4 + 1, 8 + 4 + 8 + 4 + 8
_MAX_DIMENSIONS = 4
_MAX_KEY, _MAX_NAME, _MAX_SHARDS = 65_535, 64, 10_000
"""Bytes of a key and of a tensor's name, as in the format, and files of a model."""
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GGUFTensor(StoredTensor):
    """A tensor of a GGUF file. ``dtype``: its block type, such as ``Q4_K``. ``code``: the number
    of that type. ``adjust``: a function of the decoded array, applied when it is read."""

    code: int = 0
    adjust: Callable[[np.ndarray], np.ndarray] | None = None

    def check(self) -> None:
        """Nothing is left to check: ``read_gguf`` has compared sizes and types."""

    def read(self) -> np.ndarray:
        """Read and decode the tensor.

        Returns:
          float32[shape] for quantized types; the stored dtype for float types, with float64
          converted to float32.

        Raises:
          CheckpointError: if the file can't be read or ends inside the tensor.
        """
        values = self.decoded(self.read_bytes())
        return values if self.adjust is None else self.adjust(values)

    def decoded(self, raw: np.ndarray) -> np.ndarray:
        if self.dtype in STORED_DTYPES:
            return self.floats(raw)
        rows = math.prod(self.shape[:-1])
        return _package().dequantize(raw.reshape(rows, -1), _type(self.code)).reshape(self.shape)


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file, or all shards of one.

    Attributes:
      path: the file; of several shards the first.
      metadata: values by key.
      tensors: tensors by name. Shapes are in NumPy's order, the last dimension contiguous.
    """

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Read the headers of a GGUF file and of its other shards.

    Raises:
      CheckpointError: if the package ``gguf`` is missing, a file can't be read, is truncated, is
        not a GGUF file of version 2 or 3, has entries that do not fit its size, or has a tensor
        type that the package can't decode. Also if a shard is missing.
    """
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or count > _MAX_SHARDS:
        raise CheckpointError(
            f"{path}: split.count is {shown(count)}; expected at most {_MAX_SHARDS:,}"
        )
    if count <= 1:  # 0: merged again from several files
        return first
    match = _SHARD.match(path.name)
    if match is None or int(match[3]) != count:
        raise CheckpointError(
            f"{path}: split.count is {count}, so its name must end in -00001-of-{count:05}.gguf"
        )
    tensors: dict[str, GGUFTensor] = {}
    for number in range(1, count + 1):
        shard = path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf")
        read = _read(shard)
        first = read if number == 1 else first
        if twice := tensors.keys() & read.tensors.keys():
            name = printable(min(twice))
            raise CheckpointError(f"{shard}: another shard has the tensor {name} too")
        tensors |= read.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if type(total) is not int or total != len(tensors):
        raise CheckpointError(
            f"{path}: split.tensors.count is {shown(total)}, but the shards have {len(tensors)} "
            "tensors"
        )
    return GGUFFile(path, first.metadata, tensors)


def shard_names(name: str) -> list[str]:
    """Return the names of all shards of the model to which a shard belongs. For a file that is not
    a shard, return only its own name."""
    match = _SHARD.match(name)
    if match is None or int(match[3]) > _MAX_SHARDS:
        return [name]
    return [f"{match[1]}-{n:05}-of-{match[3]}.gguf" for n in range(1, int(match[3]) + 1)]


def shown(value: object) -> str:
    """A metadata value for a message: on one line, and not long."""
    if isinstance(value, np.ndarray):
        value = value[:20].tolist()
    elif isinstance(value, list):
        value = [text[:80] for text in value[:20]]
    elif isinstance(value, str):
        value = value[:160]
    return short_repr(value)


def printable(name: str) -> str:
    """A key or a tensor's name for a message: on one line, and not long."""
    return name if len(name) <= 80 and name.isprintable() else short_repr(name[:80])


def _read(path: Path) -> GGUFFile:
    _package()
    try:
        # Opening a pipe would wait for a writer.
        if not path.is_file():
            raise CheckpointError(f"{path}: not found, or not a regular file")
        with path.open("rb") as stream:
            return _parsed(path, _Header(path, stream, os.fstat(stream.fileno()).st_size))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from error


class _Header:
    """Reads numbers and strings from the start of a file, never more than the file has."""

    def __init__(self, path: Path, stream: BinaryIO, size: int):
        self.path, self.size, self.position, self._stream = path, size, 0, stream

    def wrong(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {message}")

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int, what: str) -> bytes:
        if count > self.left:
            raise self.wrong(
                f"truncated or damaged: {what} takes {count:,} bytes, and the file has "
                f"{self.left:,} left"
            )
        raw = self._stream.read(count)
        if len(raw) != count:
            raise self.wrong(f"truncated while it was read: {what} is incomplete")
        self.position += count
        return raw

    def number(self, form: str, what: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, smallest: int) -> int:
        """A number of entries of at least so many bytes each."""
        count = self.number("<Q", what)
        if count * smallest > self.left:
            raise self.wrong(
                f"truncated or damaged: {what} is {count:,}, and the file has {self.left:,} bytes "
                "left"
            )
        return count

    def text(self, what: str, most: int | None = None) -> str:
        """A string of at most ``most`` bytes."""
        count = self.count(f"the length of {what}", 1)
        if most is not None and count > most:
            raise self.wrong(f"{what} has {count:,} bytes; GGUF allows {most:,}")
        raw = self.take(count, what)
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} is not UTF-8: {error.reason}") from error

    def value(self, key: str) -> Value:
        """A metadata value. ``key``: its key, for messages."""
        code = self.number("<I", f"the type of {key}")
        if code == _STRING:
            return self.text(key)
        if code == _ARRAY:
            return self._array(key)
        number = self._numbers(key, code, 1)[0]
        # float32(1e-6) is 9.99999997e-07 as a Python float. Its digits give 1e-6 again.
        return float(str(number)) if code == _FLOAT32 else number.item()

    def _array(self, key: str) -> Value:
        code = self.number("<I", f"the type of {key}")
        if code == _STRING:
            count = self.count(f"the length of {key}", 8)
            return [self.text(f"an entry of {key}") for _ in range(count)]
        if code == _ARRAY:
            raise self.wrong(f"{key} is an array of arrays; expected strings or numbers")
        return self._numbers(key, code, self.count(f"the length of {key}", 1))

    def _numbers(self, key: str, code: int, count: int) -> np.ndarray:
        if code not in _NUMBERS:
            raise self.wrong(f"{key} has the type {code}; GGUF has types 0 to 12")
        dtype = np.dtype(_NUMBERS[code])
        raw = self.take(count * dtype.itemsize, key)
        if code == _BOOL and (bad := set(raw) - {0, 1}):
            raise self.wrong(f"{key} has the byte {min(bad)}; a boolean is 0 or 1")
        return np.frombuffer(raw, dtype)


def _parsed(path: Path, header: _Header) -> GGUFFile:
    if (magic := header.take(4, "the magic number")) != _MAGIC:
        raise header.wrong(f"not a GGUF file: it begins with {magic!r}; expected {_MAGIC!r}")
    version = header.number("<I", "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        form = "big-endian" if swapped in (2, 3) else f"version {version}"
        raise header.wrong(f"a GGUF file of {form}; expected version 2 or 3, little-endian")
    tensors = header.count("the number of tensors", _SMALLEST_TENSOR)
    entries = header.count("the number of metadata entries", _SMALLEST_ENTRY)
    metadata: dict[str, Value] = {}
    for number in range(entries):
        key = header.text(f"the key of metadata entry {number}", _MAX_KEY)
        if key in metadata:
            raise header.wrong(f"{printable(key)} occurs twice in the metadata")
        metadata[key] = header.value(printable(key))
    stored: dict[str, GGUFTensor] = {}
    for number in range(tensors):
        tensor = _tensor(path, header, number)
        if tensor.name in stored:
            raise header.wrong(f"the tensor {printable(tensor.name)} occurs twice")
        stored[tensor.name] = tensor
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise header.wrong(f"general.alignment is {shown(alignment)}; expected a power of 2")
    return GGUFFile(path, metadata, _placed(header, stored, alignment))


def _tensor(path: Path, header: _Header, number: int) -> GGUFTensor:
    """Read one tensor's entry. Its ``start`` is relative to the data section."""
    name = header.text(f"the name of tensor {number}", _MAX_NAME)
    what = f"the tensor {printable(name)}"
    count = header.number("<I", f"the number of dimensions of {what}")
    if not 1 <= count <= _MAX_DIMENSIONS:
        raise header.wrong(f"{what} has {count} dimensions; expected 1 to {_MAX_DIMENSIONS}")
    shape = tuple(header.number("<Q", f"the shape of {what}") for _ in range(count))[::-1]
    code, start = header.number("<I", f"the type of {what}"), header.number("<Q", what)
    if code not in _block_sizes():
        raise header.wrong(f"{what} has the type {code}, which is not a type of GGUF")
    block, nbytes = _block_sizes()[code]
    if not all(shape):
        raise header.wrong(f"{what} has the shape {list(shape)}; expected numbers above 0")
    if shape[-1] % block:
        raise header.wrong(
            f"{what} has rows of {shape[-1]:,} values, which do not fill blocks of {block} values"
        )
    total = math.prod(shape) // block * nbytes
    if total > header.size:
        raise header.wrong(
            f"truncated or damaged: {what} has the shape {list(shape)} and takes {total:,} bytes, "
            f"but the file has {header.size:,}"
        )
    dtype = _type(code).name
    if dtype not in STORED_DTYPES and not _can_decode(code):
        raise header.wrong(f"{what} has the type {dtype}, which the package gguf can't decode")
    return GGUFTensor(path, name, dtype, shape, start, total, code)


def _placed(
    header: _Header, tensors: Mapping[str, GGUFTensor], alignment: int
) -> dict[str, GGUFTensor]:
    """The tensors with their positions in the file. They may not overlap or pass its end."""
    begin = -(-header.position // alignment) * alignment
    end, before = 0, ""
    placed = {}
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.start):
        name = printable(tensor.name)
        if tensor.start % alignment:
            raise header.wrong(
                f"the tensor {name} has the offset {tensor.start:,}, which is not a multiple of "
                f"general.alignment = {alignment}"
            )
        if tensor.start < end:
            raise header.wrong(f"the tensors {before} and {name} overlap")
        end, before = tensor.start + tensor.count, name
        if begin + end > header.size:
            raise header.wrong(
                f"truncated or damaged: the tensor {name} ends at byte {begin + end:,} of "
                f"{header.size:,}"
            )
        placed[tensor.name] = GGUFTensor(
            tensor.file, tensor.name, tensor.dtype, tensor.shape, begin + tensor.start,
            tensor.count, tensor.code,
        )  # fmt: skip
    return {name: placed[name] for name in tensors}


def tensor_names(architecture: str, layers: int) -> Callable[[str], str | None]:
    """A function from a tensor's name in Transformers to its name in GGUF, both without the ending
    ``.weight`` or ``.bias``."""
    known = {name: code for code, name in _package().MODEL_ARCH_NAMES.items()}
    if architecture not in known:
        raise CheckpointError(
            f"the installed package gguf does not know the architecture {architecture}: update it"
        )
    return _package().get_tensor_name_map(known[architecture], layers).get_name


@functools.cache
def _package():
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            "reading GGUF files needs the package gguf: pip install 'kvjax[gguf]'"
        ) from error
    return gguf


@functools.cache
def _block_sizes() -> dict[int, tuple[int, int]]:
    """The numbers and the bytes of a block of each type, by the type's code."""
    return {int(known): size for known, size in _package().GGML_QUANT_SIZES.items()}


def _type(code: int):
    return _package().GGMLQuantizationType(code)


@functools.cache
def _can_decode(code: int) -> bool:
    """Whether the package decodes blocks of this type: tried on one of zeros."""
    _, nbytes = _package().GGML_QUANT_SIZES[_type(code)]
    try:
        _package().dequantize(np.zeros((1, nbytes), np.uint8), _type(code))
    except NotImplementedError:
        return False
    return True
