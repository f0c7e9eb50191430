"""Match the tensors of a GGUF file to a model's parameters, and restore the order of their rows.

The package ``gguf`` knows the GGUF name of each tensor of Transformers. The converter of llama.cpp
also reorders or shifts some weights; reading undoes that.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping

import numpy as np

from kvjax.core.validation import CheckpointError

from ..config import Config, NeoXConfig
from ..files import Stored
from .config import GGUFArchitecture, GGUFConfig
from .file import GGUFFile, printable, tensor_names


def match_tensors(
    file: GGUFFile,
    described: GGUFConfig,
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
) -> Stored:
    """The tensor of each parameter.

    Args:
      file: the file.
      described: what its metadata says.
      config: the model's configuration.
      shapes: the shapes of the model's parameters by name.

    Raises:
      CheckpointError: if a tensor is missing, has another shape than its parameter, or belongs to
        no parameter. The message names the tensor.
    """
    names = tensor_names(str(file.metadata["general.architecture"]), config.num_hidden_layers)
    matched: Stored = {}
    for parameter, shape in shapes.items():
        base, _, kind = parameter.rpartition(".")
        name = f"{names(base)}.{kind}"
        tensor = file.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{file.path}: the tensor {name} is missing, which is the parameter {parameter}"
                f"{_fused(file, name)}"
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{file.path}: the tensor {name} has the shape {list(tensor.shape)}; expected "
                f"{list(shape)} according to the metadata"
            )
        matched[parameter] = dataclasses.replace(
            tensor, adjust=_adjustment(parameter, described.architecture, config)
        )
    used = described.read_tensors.union(tensor.name for tensor in matched.values())
    if surplus := [printable(name) for name in file.tensors if name not in used]:
        more = f" and {len(surplus) - 3} more" if len(surplus) > 3 else ""
        raise CheckpointError(
            f"{file.path}: the model does not use the tensors {', '.join(surplus[:3])}{more}"
        )
    return matched


def _fused(file: GGUFFile, name: str) -> str:
    """Why a tensor is missing, if the file stores it in a form that is not read."""
    block = ".".join(name.split(".")[:2])
    for part, why in (
        ("attn_qkv.weight", "queries, keys and values in one tensor"),
        ("ffn_gate_up_exps.weight", "gates and up projections of experts in one tensor"),
        ("ffn_gate.0.weight", "a tensor of each expert"),
    ):
        if f"{block}.{part}" in file.tensors:
            return f": the file has {why}, which is not read for this architecture"
    return ""


def _adjustment(
    parameter: str, architecture: GGUFArchitecture, config: Config
) -> Callable[[np.ndarray], np.ndarray] | None:
    """What undoes the converter's change of a parameter; None if it changes nothing."""
    if architecture.interleaved and (match := re.search(r"\.self_attn\.([qk])_proj\.", parameter)):
        heads = config.num_attention_heads if match[1] == "q" else config.num_key_value_heads
        return lambda values: _halves(values, heads)
    if architecture.norm_offset and parameter.endswith("norm.weight"):
        return lambda values: values.astype(np.float32) - np.float32(architecture.norm_offset)
    if isinstance(config, NeoXConfig) and ".query_key_value." in parameter:
        return lambda values: _by_head(values, config.num_attention_heads)
    if config.names.transposed is not None and config.names.transposed.search(parameter):
        return np.transpose
    return None


def _halves(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows: from pairs of neighbors to the first half and the second half of each head."""
    pairs = values.reshape(heads, len(values) // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _by_head(values: np.ndarray, heads: int) -> np.ndarray:
    """Reorder rows: from all queries, all keys and all values to these three for each head."""
    parts = values.reshape(3, heads, len(values) // heads // 3, *values.shape[1:])
    return parts.swapaxes(0, 1).reshape(values.shape)
