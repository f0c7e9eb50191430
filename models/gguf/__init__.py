"""Models in GGUF files, the format of llama.cpp.

A file has everything in one: the metadata becomes the config, the tokenizer and the settings of
generation, and the tensors are decoded to floats when they are read.
"""

from collections.abc import Iterable
from pathlib import Path

from kvjax.core.validation import CheckpointError

from .config import ARCHITECTURES, GGUFConfig, config_values
from .file import GGUFFile, printable, read_gguf, shard_names
from .generation import read_generation
from .saving import write_settings
from .tensors import match_tensors
from .tokenizer import gguf_tokenizer


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file at a path: the file itself, or the only GGUF model in a folder without
    safetensors files (its first shard, if it has several). None if the path has no such file.

    Raises:
      CheckpointError: if the folder has several models.
    """
    if path.is_file():
        return path if is_gguf(path.name) else None
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return None
    names = sorted(file.name for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    name = only_model(str(path), names)
    return None if name is None else path / name


def is_gguf(name: str) -> bool:
    """Whether a file's name is the name of a GGUF file."""
    return name.lower().endswith(".gguf")


def only_model(where: str, names: Iterable[str]) -> str | None:
    """Return the only GGUF model among the files with these names, or None.

    Vision parts (``mmproj``), importance matrices and shards after the first are not counted.

    Args:
      where: the folder or the repository, for messages.
      names: names or paths of files, also of other formats.

    Raises:
      CheckpointError: if several of the files are models. The message lists them.
    """
    models = []
    for name in names:
        file = Path(name).name
        part = any(word in file.lower() for word in ("mmproj", "imatrix"))
        if is_gguf(file) and not part and file == shard_names(file)[0]:
            models.append(name)
    if len(models) > 1:
        names = ", ".join(map(printable, models[:6]))
        more = f" and {len(models) - 6} more" if len(models) > 6 else ""
        raise CheckpointError(
            f"{where}: {len(models)} models: {names}{more}; give the path of one of them"
        )
    return models[0] if models else None


__all__ = [
    "ARCHITECTURES",
    "GGUFConfig",
    "GGUFFile",
    "config_values",
    "find_gguf",
    "gguf_tokenizer",
    "is_gguf",
    "match_tensors",
    "only_model",
    "read_generation",
    "read_gguf",
    "shard_names",
    "write_settings",
]
