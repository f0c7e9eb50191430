"""Experts in files: a tensor of each, or one of all that joins two matrices.

Here each of the three matrices of a layer's experts is one array [experts, out, in], read at once
and put together as it is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvjax.core.errors import CheckpointError

from .stored import Stored, StoredTensor

_ONE = re.compile(r"^(.*\bexperts)\.(\d+)\.(.+)$")
_ALL = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class _Stack(StoredTensor):
    """The same matrix of all experts."""

    parts: tuple[StoredTensor, ...]

    def read(self) -> np.ndarray:
        first = self.parts[0].read()
        whole = np.empty(self.shape, first.dtype)
        whole[0] = first
        for place, part in zip(whole[1:], self.parts[1:], strict=True):
            place[...] = part.read()
        return whole


@dataclass(frozen=True)
class _Half(StoredTensor):
    """Rows of all experts, of a tensor that joins two matrices."""

    joined: StoredTensor
    first_row: int

    def read(self) -> np.ndarray:
        return self.joined.read()[:, self.first_row : self.first_row + self.shape[1]]


def stack_experts(stored: Stored) -> Stored:
    """The tensors, those of experts as ``<...>.experts.<matrix>.weight`` [experts, out, in].

    Raises:
      CheckpointError: if an expert lacks a matrix that others have, or has it in another shape or
        dtype.
    """
    result: Stored = {}
    experts: dict[str, dict[int, StoredTensor]] = {}
    for name, tensor in stored.items():
        if found := _ONE.match(name):
            stack, number, matrix = found.groups()
            experts.setdefault(f"{stack}.{matrix}", {})[int(number)] = tensor
        elif (found := _ALL.match(name)) and len(tensor.shape) == 3:
            result |= _parted(found[1], found[2], tensor)
        else:
            result[name] = tensor
    return result | {name: _stacked(name, parts) for name, parts in experts.items()}


def unstack_experts(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """A parameter as files have it: of experts, a tensor of each."""
    stack, inside, matrix = name.partition(".experts.")
    if not inside:
        yield name, values
        return
    for number, each in enumerate(values):
        yield f"{stack}.experts.{number}.{matrix}", each


def _parted(stack: str, matrix: str, tensor: StoredTensor) -> Stored:
    if matrix == "down_proj":
        return {f"{stack}.down_proj.weight": tensor}
    count, rows, columns = tensor.shape
    place = tensor.file, tensor.name, tensor.dtype, (count, rows // 2, columns), tensor.start
    return {
        f"{stack}.{half}.weight": _Half(*place, tensor.count // 2, tensor, first_row)
        for half, first_row in (("gate_proj", 0), ("up_proj", rows // 2))
    }


def _stacked(name: str, parts: dict[int, StoredTensor]) -> _Stack:
    count, first = max(parts) + 1, parts[min(parts)]
    for number in range(count):
        part = parts.get(number)
        if part is None:
            raise CheckpointError(f"{first.file}: missing tensor {name} of expert {number}")
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{part.file}: the tensor {part.name} is {part.dtype} {list(part.shape)}; expected "
                f"{first.dtype} {list(first.shape)}, as of the other experts"
            )
    tensors = tuple(parts[number] for number in range(count))
    size, shape = sum(part.count for part in tensors), (count, *first.shape)
    return _Stack(first.file, name, first.dtype, shape, first.start, size, tensors)
