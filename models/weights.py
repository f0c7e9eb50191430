"""A model's parameters from a checkpoint's tensors.

Each tensor is read into memory of its own, converted, put on the device, and let go before the
next, so that loading needs little more than the model and its largest tensor.
"""

import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from kvjax.core.errors import CheckpointError
from kvjax.core.reporting import report_progress
from kvjax.placement.device import Device

from .config import NARROWED, TensorNames
from .moe import stack_experts
from .multimodal import TEXT_PREFIX
from .stored import STORED_DTYPES, Stored, StoredTensor

HEAD = "lm_head.weight"


class OutOfRangeError(ValueError):
    """A tensor whose numbers float16 can't hold."""


def match_names(
    stored: Stored, expected: Iterable[str], names: TensorNames, *, tied: bool
) -> Stored:
    """Give stored tensors the names that the model's parameters have.

    A model saved without its head lacks a prefix, and as a part of another has one more; of a tied
    pair either may be stored. Buffers that Transformers ignores too are left out, and what files
    call otherwise is renamed.
    """
    wanted, result = set(expected), {}
    stored = _renamed_all(stored, names)
    if names.experts:
        stored = stack_experts(stored, names.experts)
    for name, tensor in stored.items():
        known = name if name in wanted or name == HEAD else names.prefix + name
        if known in wanted or (known == HEAD and tied):
            _enter_once(result, known, tensor)
        elif not names.buffers.search(name):
            result[name] = tensor
    if tied and names.embedding not in result and HEAD in result:
        result[names.embedding] = result[HEAD]
    return result


def _renamed_all(stored: Stored, names: TensorNames) -> Stored:
    """Stored tensors by the names that are used here; what files hold twice must be the same."""
    result: Stored = {}
    for name, tensor in stored.items():
        _enter_once(result, renamed(name, ((TEXT_PREFIX, ""), *names.renamed)), tensor)
    return result


def _enter_once(result: Stored, name: str, tensor: StoredTensor) -> None:
    known = result.setdefault(name, tensor)
    if known is not tensor and not _same(known, tensor):
        raise CheckpointError(
            f"{tensor.file}: the tensors {known.name} and {tensor.name} are one in this model, "
            "and differ"
        )


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for tensor in (one, other):
        _check_dtype(tensor)
    return np.array_equal(one.read().view(np.uint8), other.read().view(np.uint8))


def renamed(name: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    """A tensor's name where some parts of names are called otherwise."""
    for pattern, other in rules:
        name = pattern.sub(other, name)
    return name


def head_differs(stored: Stored, names: TensorNames) -> bool:
    """Whether ``lm_head.weight`` is stored beside the embedding it is tied to, and is another.

    Transformers then does not tie them, so neither does ``load``.
    """
    if HEAD not in stored or names.embedding not in stored:
        return False
    return not _same(stored[HEAD], stored[names.embedding])


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
    if tensor.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{tensor.file}: the tensor {tensor.name} has dtype {tensor.dtype}; expected one of "
            f"{', '.join(STORED_DTYPES)}: quantized weights are not read"
        )
    if tensor.count != int(np.prod(tensor.shape)) * jnp.dtype(STORED_DTYPES[tensor.dtype]).itemsize:
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
    """The dtype of most of a checkpoint's bytes of weights, float32 in place of float64."""
    sizes = {"float32": 0}
    for tensor in stored.values():
        if dtype := STORED_DTYPES.get(tensor.dtype):
            dtype = NARROWED.get(dtype, dtype)
            sizes[dtype] = sizes.get(dtype, 0) + tensor.count
    return max(sizes, key=lambda dtype: sizes[dtype])


def count_float64(stored: Stored) -> int:
    """How many of the tensors are float64."""
    return sum(STORED_DTYPES.get(tensor.dtype) in NARROWED for tensor in stored.values())


def load_tensors(
    stored: Stored,
    shapes: dict[str, tuple[int, ...]],
    names: TensorNames,
    dtype: str,
    device: Device,
    check_range: bool = False,
) -> dict[str, Any]:
    """Read tensors and put them on a device: a nested dict by the parts of their names.

    Raises:
      OutOfRangeError: with ``check_range``, if float16 can't hold a tensor.
    """
    params: dict[str, Any] = {}
    room = _Room(shapes.values(), dtype) if device.platform() == "cpu" else None
    for number, (name, shape) in enumerate(shapes.items()):
        report_progress("loading", number, len(shapes))
        values = stored[name].read()
        if is_transposed(name, names):
            values = values.T
        if room is None:
            values = np.ascontiguousarray(_converted(name, values, dtype, check_range))
        else:
            place = room.take(shape)
            place[...] = values
            values = place
        _enter(params, name, jax.block_until_ready(jax.device_put(values)))
        del values  # before the next is read
    return params


def load_shares(
    stored: Stored,
    shapes: dict[str, tuple[int, ...]],
    names: TensorNames,
    dtype: str,
    shardings: dict[str, NamedSharding],
    check_range: bool = False,
) -> dict[str, Any]:
    """Read tensors, and give every device of a mesh its share of each: a nested dict.

    Raises:
      OutOfRangeError: as of ``load_tensors``.
    """
    params: dict[str, Any] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        report_progress("loading", number, len(shapes))
        values = stored[name].read()
        if is_transposed(name, names):
            values = values.T
        if check_range:
            values = _converted(name, values, dtype, check_range)

        shares: dict[Any, np.ndarray] = {}

        def share(
            index: Any, values: np.ndarray = values, shares: dict[Any, np.ndarray] = shares
        ) -> np.ndarray:
            # One for all devices that have the same, and a copy: a view would keep the whole.
            place = tuple((each.start, each.stop) for each in index)
            if place not in shares:
                shares[place] = np.array(values[index], jnp.dtype(dtype), order="C")
            return shares[place]

        array = jax.make_array_from_callback(shape, shardings[name], share)
        _enter(params, name, jax.block_until_ready(array))
        del values, shares, share  # before the next is read
    return params


def _converted(name: str, values: np.ndarray, dtype: str, check_range: bool) -> np.ndarray:
    """A tensor in another dtype. With ``check_range``, which is for float16, its largest magnitude
    must be a normal number of it, or 0."""
    given = values
    with np.errstate(over="ignore"):
        values = values.astype(jnp.dtype(dtype), copy=False)
    if check_range and values.size:
        # By their bits, which numpy compares faster than float16.
        largest = (values.view(np.uint16) & 0x7FFF).max()
        if not 0x0400 <= largest < 0x7C00 and (largest or given.any()):
            raise OutOfRangeError(f"the tensor {name} is not in the range of float16")
    return values


def _enter(params: dict[str, Any], name: str, array: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        params = params.setdefault(part, {})
    params[last] = array


class _Room:
    """One stretch of memory for all parameters of a model on a CPU.

    numpy asks the system for huge pages for it, which a CPU reads several per cent faster than
    thousands of small ones; and arrays that begin where ``ALIGNED`` says are taken by JAX as they
    are, without a copy. It is let go with the last of them.
    """

    ALIGNED = 64
    """Bytes of which every array's address is a multiple."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], dtype: str):
        self._dtype = jnp.dtype(dtype)
        size = sum(self._bytes(shape) for shape in shapes)
        memory = np.empty(size + self.ALIGNED, np.uint8)
        start = -memory.ctypes.data % self.ALIGNED
        self._left = memory[start : start + size]

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """An array with any values."""
        size = self._bytes(shape)
        taken, self._left = self._left[:size], self._left[size:]
        return taken[: self._count(shape) * self._dtype.itemsize].view(self._dtype).reshape(shape)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of an array, rounded up."""
        return -(-self._count(shape) * self._dtype.itemsize // self.ALIGNED) * self.ALIGNED

    @staticmethod
    def _count(shape: tuple[int, ...]) -> int:
        return int(np.prod(shape))
