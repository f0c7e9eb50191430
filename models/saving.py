"""A model as a checkpoint again: its parameters, and the files of the one that it came from."""

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
"""Bytes of a file of tensors, at most, but of one that is larger alone."""
_COPIED = (
    "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template*", "*.jinja", "*.model",
)  # fmt: skip


def save(config: Config, params: Any, source: Path, folder: Path) -> None:
    """Write a checkpoint in the Transformers format.

    Args:
      config: the model's.
      params: nested dicts, as ``load`` gives them; they are fetched a file's worth at a time.
      source: the checkpoint that it came from: its config, tokenizer and settings are copied.
      folder: where to; made if it is not there.

    Raises:
      ValueError: if ``source`` is no checkpoint's folder, or ``folder`` has files.
    """
    if not (source / "config.json").is_file():
        raise ValueError(
            f"the model is from {source}, which has no config.json to go on from: save its "
            "parameters as arrays"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there, and not an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
    written = text_config(source)
    dtypes = {str(leaf.dtype) for leaf in jax.tree.leaves(params)}
    written.pop("torch_dtype", None)  # its older name
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
        (folder / name).chmod(0o644)  # the library keeps new files to their owner
        where |= dict.fromkeys(tensors, name)
        report_progress("writing the weights", number, len(shards))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(index, indent=2) + "\n"
        (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _as_stored(shard: dict[str, Any], config: Config) -> dict[str, np.ndarray]:
    """Parameters on the host, as files have them and by the names that they have there."""
    names, found = config.names, {}
    for name, leaf in shard.items():
        values = np.asarray(fetch(leaf))
        found[name] = np.ascontiguousarray(values.T if is_transposed(name, names) else values)
    parts = unstack_experts(found, names.experts)
    return {renamed(name, names.written): values for name, values in parts}


def _shards(leaves: Iterator[tuple[str, Any]]) -> Iterator[dict[str, Any]]:
    """Arrays by their names, a file's worth at a time."""
    shard: dict[str, Any] = {}
    for name, leaf in leaves:
        # A layer's experts stay together: two of their matrices may be one tensor of a file.
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
