"""Load a model's parameters from a checkpoint's tensors, and save a model as a checkpoint.

Each tensor is read, converted, moved to the device, and freed before the next one is read. Peak
memory is therefore about the size of the model plus its largest tensor.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from safetensors.numpy import save_file

from kvjax.core.reporting import report_progress
from kvjax.core.transfer import fetch
from kvjax.core.validation import CheckpointError
from kvjax.placement.device import Device

from . import gguf
from .config import NARROWED, Config, TensorNames
from .files import STORED_DTYPES, Stored, StoredTensor
from .moe import stack_experts, unstack_experts
from .multimodal import TEXT_PREFIX, text_config

HEAD = "lm_head.weight"


Params = dict[str, Any]
"""Nested dicts of arrays. The keys on the path to an array are the parts of its name."""


class OutOfRangeError(ValueError):
    """A tensor's values are outside the range of float16."""


def match_names(
    stored: Stored, expected: Iterable[str], names: TensorNames, *, tied: bool
) -> Stored:
    """Rename stored tensors to the names of the model's parameters.

    A model saved without its head lacks a prefix, and a model saved as part of another has an extra
    one. Of two tied tensors, either may be stored. Buffers that Transformers also ignores are
    dropped.
    """
    parameters, result = set(expected), {}
    stored = _renamed_all(stored, names)
    if names.experts:
        stored = stack_experts(stored, names.experts)
    for name, tensor in stored.items():
        known = name if name in parameters or name == HEAD else names.prefix + name
        if known in parameters or (known == HEAD and tied):
            _enter_once(result, known, tensor)
        elif not names.buffers.search(name):
            result[name] = tensor
    if tied and names.embedding not in result and HEAD in result:
        result[names.embedding] = result[HEAD]
    return result


def _renamed_all(stored: Stored, names: TensorNames) -> Stored:
    """Rename all tensors. If two map to the same name, their values must be equal."""
    result: Stored = {}
    for name, tensor in stored.items():
        _enter_once(result, renamed(name, ((TEXT_PREFIX, ""), *names.renamed)), tensor)
    return result


def _enter_once(result: Stored, name: str, tensor: StoredTensor) -> None:
    known = result.setdefault(name, tensor)
    if known is not tensor and not _same(known, tensor):
        raise CheckpointError(
            f"{tensor.file}: the tensors {known.name} and {tensor.name} are the same parameter "
            "of this model, but differ in the file"
        )


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    for tensor in (one, other):
        tensor.check()
    return np.array_equal(one.read().view(np.uint8), other.read().view(np.uint8))


def renamed(name: str, rules: tuple[tuple[re.Pattern[str], str], ...]) -> str:
    """Apply renaming rules, pairs of pattern and replacement, to a tensor's name."""
    for pattern, other in rules:
        name = pattern.sub(other, name)
    return name


def head_differs(stored: Stored, names: TensorNames) -> bool:
    """Whether both ``lm_head.weight`` and the embedding it is tied to are stored and differ.

    Transformers does not tie them then, and neither does ``load``.
    """
    if HEAD not in stored or names.embedding not in stored:
        return False
    return not _same(stored[HEAD], stored[names.embedding])


def check_tensors(stored: Stored, shapes: dict[str, tuple[int, ...]], names: TensorNames) -> None:
    """Check the stored tensors against the model's parameters.

    Raises:
      CheckpointError: if tensors are missing or unexpected, or have the wrong shape or an
        unsupported dtype. The message names them.
    """
    files = ", ".join(sorted({str(tensor.file) for tensor in stored.values()})) or "the weights"
    if missing := [name for name in shapes if name not in stored]:
        raise CheckpointError(f"{files}: {_list('missing tensor', missing)}")
    if surplus := [name for name in stored if name not in shapes]:
        raise CheckpointError(
            f"{stored[surplus[0]].file}: {_list('surplus tensor', surplus)}: the model described "
            "by config.json does not use them"
        )
    for name, shape in shapes.items():
        tensor = stored[name]
        expected_shape = shape[::-1] if is_transposed(name, names) else shape
        if tensor.shape != expected_shape:
            raise CheckpointError(
                f"{tensor.file}: the tensor {name} has shape {list(tensor.shape)}; expected "
                f"{list(expected_shape)} according to config.json"
            )
        tensor.check()


def _list(what: str, names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{what}{'s' if len(names) > 1 else ''} {', '.join(names[:3])}{more}"


def is_transposed(name: str, names: TensorNames) -> bool:
    """Whether files store a parameter as [in, out]."""
    return names.transposed is not None and names.transposed.search(name) is not None


def stored_dtype(stored: Stored) -> str:
    """The dtype with the largest share of the checkpoint's bytes. float64 counts as float32."""
    sizes = {"float32": 0}
    for tensor in stored.values():
        if dtype := STORED_DTYPES.get(tensor.dtype):
            dtype = NARROWED.get(dtype, dtype)
            sizes[dtype] = sizes.get(dtype, 0) + tensor.count
    return max(sizes, key=lambda dtype: sizes[dtype])


def count_float64(stored: Stored) -> int:
    """The number of float64 tensors."""
    return sum(STORED_DTYPES.get(tensor.dtype) in NARROWED for tensor in stored.values())


def load_tensors(
    stored: Stored,
    shapes: dict[str, tuple[int, ...]],
    names: TensorNames,
    dtype: str,
    device: Device,
    check_range: bool = False,
) -> Params:
    """Read tensors onto one device.

    Returns:
      Nested dicts of arrays, keyed by the dot-separated parts of the names.

    Raises:
      OutOfRangeError: with ``check_range``, if a tensor is outside the range of float16.
    """
    params: Params = {}
    buffer = _Buffer(shapes.values(), dtype) if device.platform() == "cpu" else None
    for number, (name, shape) in enumerate(shapes.items()):
        report_progress("loading", number, len(shapes))
        values = stored[name].read()
        if is_transposed(name, names):
            values = values.T
        if buffer is None:
            values = np.ascontiguousarray(_converted(name, values, dtype, check_range))
        else:
            array = buffer.take(shape)
            array[...] = values
            values = array
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
) -> Params:
    """Read tensors onto a mesh: each device gets its shard of each tensor.

    Returns:
      Nested dicts of arrays, as ``load_tensors`` returns.

    Raises:
      OutOfRangeError: with ``check_range``, if a tensor is outside the range of float16.
    """
    params: Params = {}
    for number, (name, shape) in enumerate(shapes.items()):
        report_progress("loading", number, len(shapes))
        values = stored[name].read()
        if is_transposed(name, names):
            values = values.T
        if check_range:
            values = _converted(name, values, dtype, check_range)

        shares: dict[tuple[object, ...], np.ndarray] = {}

        def share(index: Any, values: np.ndarray = values, shares: dict = shares) -> np.ndarray:
            # Devices with the same shard share one copy. A view would keep the whole tensor alive.
            place = tuple((each.start, each.stop) for each in index)
            if place not in shares:
                shares[place] = np.array(values[index], jnp.dtype(dtype), order="C")
            return shares[place]

        array = jax.make_array_from_callback(shape, shardings[name], share)
        _enter(params, name, jax.block_until_ready(array))
        del values, shares, share  # before the next is read
    return params


def _converted(name: str, values: np.ndarray, dtype: str, check_range: bool) -> np.ndarray:
    """Convert a tensor to ``dtype``. With ``check_range`` (for float16), its largest magnitude must
    be a normal float16 number or 0."""
    stored = values
    with np.errstate(over="ignore"):
        values = values.astype(jnp.dtype(dtype), copy=False)
    if check_range and values.size:
        # Compare bit patterns: numpy does this faster than comparing float16 values.
        largest = (values.view(np.uint16) & 0x7FFF).max()
        if not 0x0400 <= largest < 0x7C00 and (largest or stored.any()):
            raise OutOfRangeError(f"the tensor {name} is not in the range of float16")
    return values


def flatten(params: Params, path: str = "") -> Iterator[tuple[str, Any]]:
    """The arrays, or other leaves, of nested dicts, with their names in files."""
    for key, child in params.items():
        if isinstance(child, dict):
            yield from flatten(child, f"{path}{key}.")
        else:
            yield path + key, child


def _enter(params: Params, name: str, array: jax.Array) -> None:
    *path, last = name.split(".")
    for part in path:
        params = params.setdefault(part, {})
    params[last] = array


class _Buffer:
    """One contiguous buffer for all parameters of a model on a CPU.

    numpy requests huge pages for it, which a CPU reads a few percent faster than many small pages.
    JAX uses the aligned arrays directly, without a copy. The buffer is freed with the last array.
    """

    ALIGNED = 64
    """Alignment of every array's address, in bytes."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], dtype: str):
        self._dtype = jnp.dtype(dtype)
        size = sum(self._bytes(shape) for shape in shapes)
        memory = np.empty(size + self.ALIGNED, np.uint8)
        start = -memory.ctypes.data % self.ALIGNED
        self._left = memory[start : start + size]

    def take(self, shape: tuple[int, ...]) -> np.ndarray:
        """Allocate an uninitialized array."""
        size = self._bytes(shape)
        taken, self._left = self._left[:size], self._left[size:]
        return taken[: self._count(shape) * self._dtype.itemsize].view(self._dtype).reshape(shape)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        """An array's size in bytes, rounded up to the alignment."""
        return -(-self._count(shape) * self._dtype.itemsize // self.ALIGNED) * self.ALIGNED

    @staticmethod
    def _count(shape: tuple[int, ...]) -> int:
        return int(np.prod(shape))


SHARD = 4 * 2**30
"""Maximum size of a weight file in bytes. A single larger tensor gets its own file."""
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "*.jinja", "*.model",
)  # fmt: skip


def save(config: Config, params: Params, source: Path, folder: Path) -> None:
    """Write a checkpoint in the Transformers format.

    Args:
      config: the model's configuration.
      params: nested dicts of arrays, as ``load`` returns. They are copied to the host one file at
        a time.
      source: the checkpoint that the model was loaded from, a folder or a GGUF file. Its config,
        tokenizer and generation settings are copied.
      folder: the destination, created if necessary.

    Raises:
      ValueError: if ``source`` is not a checkpoint, or ``folder`` is not empty.
    """
    from_gguf = source.is_file() and gguf.is_gguf(source.name)
    if not from_gguf and not (source / "config.json").is_file():
        raise ValueError(
            f"the model was loaded from {source}, which has no config.json to copy: save its "
            "parameters as arrays instead"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    if from_gguf:
        written = gguf.write_settings(source, folder)
    else:
        written = text_config(source)
        for pattern in _COPIED:
            for file in source.glob(pattern):
                shutil.copyfile(file, folder / file.name)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    written.pop("torch_dtype", None)  # the older name of dtype
    written |= {"dtype": dtypes.pop() if len(dtypes) == 1 else config.dtype}
    written |= {"tie_word_embeddings": config.tie_word_embeddings}
    written |= getattr(config, "written", {})
    written.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    shards = list(_shards(flatten(params)))
    total = sum(leaf.nbytes for shard in shards for leaf in shard.values())
    where = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = _as_stored(shard, config)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors makes new files readable by their owner only
        where |= dict.fromkeys(tensors, name)
        report_progress("writing the weights", number, len(shards))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _as_stored(shard: dict[str, jax.Array], config: Config) -> dict[str, np.ndarray]:
    """Parameters on the host, with the names and layouts of the files."""
    names, tensors = config.names, {}
    for name, leaf in shard.items():
        values = np.asarray(fetch(leaf))
        tensors[name] = np.ascontiguousarray(values.T if is_transposed(name, names) else values)
    parts = unstack_experts(tensors, names.experts)
    return {renamed(name, names.written): values for name, values in parts}


def _shards(leaves: Iterator[tuple[str, jax.Array]]) -> Iterator[dict[str, jax.Array]]:
    """Group named arrays into files."""
    shard: dict[str, jax.Array] = {}
    for name, leaf in leaves:
        # Keep a layer's experts in one file: two of their matrices may be fused into one tensor.
        stack, inside, _ = name.partition(".experts.")
        together = inside and any(other.startswith(stack + inside) for other in shard)
        full = sum(x.nbytes for x in shard.values()) + leaf.nbytes > SHARD
        if shard and full and not together:
            yield shard
            shard = {}
        shard[name] = leaf
    yield shard
