"""Read weights from safetensors files, tensor by tensor.

Each tensor is read into memory of its own, converted, put on the device, and let go before the
next, so that loading needs little more than the model and its largest tensor. Files are read, not
mapped: mapped pages would count as memory until they are unmapped, and change with the file.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax._errors import CheckpointError

from .config import TensorNames
from .fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_OTHER_FORMATS = ("*.bin", "*.pth", "*.pt", "*.h5", "*.msgpack", "*.gguf", "*.ckpt", "*.npz")
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: a file, and ``count`` bytes of it from ``start``."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int

    def read(self) -> np.ndarray:
        """The tensor's values, in a new array.

        Raises:
          CheckpointError: if the file ends before the tensor does, or can't be read.
        """
        raw = np.empty(self.count, np.uint8)
        try:
            with self.file.open("rb") as stream:
                stream.seek(self.start)
                got = stream.readinto(memoryview(raw)) if self.count else 0
        except OSError as error:
            raise CheckpointError(f"{self.file}: can't be read: {error}") from error
        if got != self.count:
            raise CheckpointError(f"{self.file}: truncated: it ends inside the tensor {self.name}")
        return raw.view(jnp.dtype(_DTYPES[self.dtype])).reshape(self.shape)


Stored = dict[str, StoredTensor]


def find_tensors(folder: Path) -> Stored:
    """All tensors of a checkpoint's safetensors files, by name; nothing but headers is read.

    Raises:
      CheckpointError: if there are no such files, an index names a file or tensor that is not
        there, a file is truncated, or its header makes no sense.
    """
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    if not (folder / INDEX).is_file():
        raise _no_weights(folder)
    index = folder / INDEX
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
        raise CheckpointError(f"{index}: weight_map: expected an object of file names")
    stored: Stored = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{index}: weight_map: there is no file {name} in this folder")
        stored.update(_read_header(folder / name))
    for tensor, name in places.items():
        if tensor not in stored:
            raise CheckpointError(f"{folder / name}: the tensor {tensor} is missing; {index} "
                                  "says that it is there")  # fmt: skip
    return stored


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


def match_names(
    stored: Stored, expected: Iterable[str], names: TensorNames, *, tied: bool
) -> Stored:
    """Give stored tensors the names that the model's parameters have.

    A model saved without its head lacks a prefix; of a tied pair either may be stored. Buffers
    that Transformers ignores too are left out.
    """
    wanted, result = set(expected), {}
    for name, tensor in stored.items():
        known = name if name in wanted or name == HEAD else names.prefix + name
        if known in wanted or (known == HEAD and tied):
            result[known] = tensor
        elif not names.buffers.search(name):
            result[name] = tensor
    if tied and names.embedding not in result and HEAD in result:
        result[names.embedding] = result[HEAD]
    return result


def head_differs(stored: Stored, names: TensorNames) -> bool:
    """Whether ``lm_head.weight`` is stored beside the embedding it is tied to, and is another.

    Transformers then does not tie them, so neither does ``load``.
    """
    if HEAD not in stored or names.embedding not in stored:
        return False
    head, embedding = stored[HEAD], stored[names.embedding]
    if (head.dtype, head.shape) != (embedding.dtype, embedding.shape):
        return True
    for tensor in (head, embedding):
        _check_dtype(tensor)
    return not np.array_equal(head.read().view(np.uint8), embedding.read().view(np.uint8))


def check_tensors(stored: Stored, shapes: dict[str, tuple[int, ...]], names: TensorNames) -> None:
    """Compare what is stored with what the model has.

    Raises:
      CheckpointError: naming tensors that are missing, surplus, misshapen, or of a dtype that
        is not read.
    """
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()})) or "the weights"
    if missing := [name for name in shapes if name not in stored]:
        raise CheckpointError(f"{files}: {_list('missing tensor', missing)}")
    if surplus := [name for name in stored if name not in shapes]:
        raise CheckpointError(
            f"{stored[surplus[0]].file}: {_list('surplus tensor', surplus)}: the model that "
            "config.json describes has no such part"
        )
    for name, shape in shapes.items():
        tensor = stored[name]
        right = shape[::-1] if is_transposed(name, names) else shape
        if tensor.shape != right:
            raise CheckpointError(
                f"{tensor.file}: the tensor {name} has shape {list(tensor.shape)}; expected "
                f"{list(right)} by config.json"
            )
        _check_dtype(tensor)


def _check_dtype(tensor: StoredTensor) -> None:
    if tensor.dtype not in _DTYPES:
        raise CheckpointError(
            f"{tensor.file}: the tensor {tensor.name} has dtype {tensor.dtype}; expected one of "
            f"{', '.join(_DTYPES)}"
        )
    if tensor.count != int(np.prod(tensor.shape)) * jnp.dtype(_DTYPES[tensor.dtype]).itemsize:
        raise CheckpointError(
            f"{tensor.file}: the tensor {tensor.name} has {tensor.count:,} bytes, which does not "
            f"fit its shape {list(tensor.shape)} of {tensor.dtype}"
        )


def _list(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


def is_transposed(name: str, names: TensorNames) -> bool:
    """Whether files hold a parameter as [in, out]."""
    return names.transposed is not None and names.transposed.search(name) is not None


def stored_dtype(stored: Stored) -> str:
    """The dtype of most of a checkpoint's bytes."""
    sizes: dict[str, int] = {}
    for tensor in stored.values():
        dtype = _DTYPES.get(tensor.dtype, "float32")
        sizes[dtype] = sizes.get(dtype, 0) + tensor.count
    return max(sizes, key=lambda dtype: sizes[dtype])


def load_tensors(
    stored: Stored,
    shapes: dict[str, tuple[int, ...]],
    names: TensorNames,
    dtype: str,
    put: Callable[[np.ndarray], jax.Array],
) -> dict[str, Any]:
    """Read tensors and put them on a device: a nested dict by the parts of their names."""
    params: dict[str, Any] = {}
    for name in shapes:
        values = stored[name].read()
        if is_transposed(name, names):
            values = values.T
        values = np.ascontiguousarray(values.astype(jnp.dtype(dtype), copy=False))
        node = params
        *path, last = name.split(".")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = jax.block_until_ready(put(values))
    return params
