"""Models in GGUF files, the format of llama.cpp.

A file has everything in one: the metadata becomes the config, the tokenizer and the settings of
generation, and the tensors are decoded to floats when they are read.
"""

from pathlib import Path

from kvjax.core.validation import CheckpointError

from .config import ARCHITECTURES, GGUFArchitecture, config_values
from .file import GGUFFile, other_shards, read_gguf
from .generation import read_generation
from .saving import write_settings
from .tensors import match_tensors
from .tokenizer import gguf_tokenizer


def find_gguf(path: Path) -> Path | None:
    """The GGUF file at a path: the file itself, or the only one in a folder without another
    format. Of a model in several shards, the first. None if there is none.

    Raises:
      CheckpointError: if the folder has several models.
    """
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    if (path / "config.json").exists() and any(path.glob("*.safetensors")):
        return None
    return only_model(str(path), sorted(path.glob("*.gguf")))


def only_model(where: str, files: list[Path]) -> Path | None:
    """The only model among the GGUF files of a folder; None without files.

    Files of vision parts (``mmproj``) and shards after the first are not counted.

    Raises:
      CheckpointError: if there are several models. The message lists them.
    """
    models = [
        file
        for file in files
        if not file.name.startswith("mmproj")
        and ("-of-" not in file.name or "-00001-of-" in file.name)
    ]
    if len(models) > 1:
        names = ", ".join(file.name for file in models[:6])
        more = f" and {len(models) - 6} more" if len(models) > 6 else ""
        raise CheckpointError(
            f"{where}: {len(models)} models: {names}{more}; give the path of one of them"
        )
    return models[0] if models else None


__all__ = [
    "ARCHITECTURES",
    "GGUFArchitecture",
    "GGUFFile",
    "config_values",
    "find_gguf",
    "gguf_tokenizer",
    "match_tensors",
    "only_model",
    "other_shards",
    "read_generation",
    "read_gguf",
    "write_settings",
]
