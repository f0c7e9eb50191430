"""Experts in files: a tensor of each, or one of all that joins two matrices.

Here each of the three matrices of a layer's experts is one array [experts, out, in], read at once
and put together as it is read.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvjax.core.errors import CheckpointError

from .stored import Stored, StoredTensor

Form = Literal["apart", "joined", "stacked"]
"""How published files have experts: one by one, or all of a layer, gate before up: joined ones as
[experts, in, out], stacked ones as [experts, out, in]. Those that have them apart may also be saved
stacked."""

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
class _Part(StoredTensor):
    """Rows of all experts, of a tensor that joins two matrices, or that has [in, out]."""

    joined: StoredTensor
    turned: bool
    first_row: int

    def read(self) -> np.ndarray:
        whole = self.joined.read()
        whole = whole.swapaxes(1, 2) if self.turned else whole
        return whole[:, self.first_row : self.first_row + self.shape[1]]


def stack_experts(stored: Stored, form: Form) -> Stored:
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
            halves = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
            parts = _parted(tensor, len(halves), form == "joined")
            result |= {
                f"{found[1]}.{half}.weight": part for half, part in zip(halves, parts, strict=True)
            }
        else:
            result[name] = tensor
    return result | {name: _stacked(name, parts) for name, parts in experts.items()}


def unstack_experts(
    tensors: dict[str, np.ndarray], form: Form | None
) -> Iterator[tuple[str, np.ndarray]]:
    """Parameters as files have them: each in a tensor of its own, but of experts."""
    for name, values in tensors.items():
        stack, inside, matrix = name.partition(".experts.")
        if form is None or not inside:
            yield name, values
        elif form == "apart":
            for number, each in enumerate(values):
                yield f"{stack}.experts.{number}.{matrix}", each
        elif matrix == "down_proj.weight":
            yield f"{stack}.experts.down_proj", _written(values, form)
        elif matrix == "gate_proj.weight":
            both = np.concatenate([values, tensors[f"{stack}.experts.up_proj.weight"]], axis=1)
            yield f"{stack}.experts.gate_up_proj", _written(both, form)


def _written(values: np.ndarray, form: Form) -> np.ndarray:
    return np.ascontiguousarray(values.swapaxes(1, 2)) if form == "joined" else values


def _parted(tensor: StoredTensor, count: int, turned: bool) -> Iterator[_Part]:
    experts, rows, columns = tensor.shape
    if turned:
        rows, columns = columns, rows
    rows //= count
    for number in range(count):
        yield _Part(
            tensor.file, tensor.name, tensor.dtype, (experts, rows, columns), tensor.start,
            tensor.count // count, tensor, turned, number * rows,
        )  # fmt: skip


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
