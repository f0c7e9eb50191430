"""Save a model as a checkpoint: its parameters, and the other files of its source checkpoint."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from kvjax.core.reporting import report_progress
from kvjax.core.transfer import fetch

from .config import Config
from .moe import unstack_experts
from .multimodal import text_config
from .weights import is_transposed, renamed

SHARD = 4 * 2**30
"""Maximum size of a weight file in bytes. A single larger tensor gets its own file."""
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "*.jinja", "*.model",
)  # fmt: skip


def save(config: Config, params: Any, source: Path, folder: Path) -> None:
    """Write a checkpoint in the Transformers format.

    Args:
      config: the model's configuration.
      params: nested dicts of arrays, as ``load`` returns. They are copied to the host one file at
        a time.
      source: the checkpoint that the model was loaded from. Its config, tokenizer and generation
        settings are copied.
      folder: the destination, created if necessary.

    Raises:
      ValueError: if ``source`` is not a checkpoint, or ``folder`` is not empty.
    """
    if not (source / "config.json").is_file():
        raise ValueError(
            f"the model was loaded from {source}, which has no config.json to copy: save its "
            "parameters as arrays instead"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists and is not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    written = text_config(source)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    written.pop("torch_dtype", None)  # the older name of dtype
    written |= {"dtype": dtypes.pop() if len(dtypes) == 1 else config.dtype}
    written |= {"tie_word_embeddings": config.tie_word_embeddings}
    written |= getattr(config, "written", {})
    written.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    shards = list(_shards(_flat(params)))
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


def _as_stored(shard: dict[str, Any], config: Config) -> dict[str, np.ndarray]:
    """Parameters on the host, with the names and layouts of the files."""
    names, tensors = config.names, {}
    for name, leaf in shard.items():
        values = np.asarray(fetch(leaf))
        tensors[name] = np.ascontiguousarray(values.T if is_transposed(name, names) else values)
    parts = unstack_experts(tensors, names.experts)
    return {renamed(name, names.written): values for name, values in parts}


def _shards(leaves: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Group named arrays into files."""
    shard: dict[str, Any] = {}
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


def _flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for key, child in node.items():
        if isinstance(child, dict):
            yield from _flat(child, f"{path}{key}.")
        else:
            yield path + key, child
