"""Write the config, tokenizer and settings of a GGUF file for Transformers."""

import json
from dataclasses import asdict
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from kvjax.core.typing import Json

from ..text import Tokenizer
from .config import config_values
from .file import read_gguf
from .generation import read_generation
from .tokenizer import gguf_tokenizer


def write_settings(source: Path, folder: Path) -> Json:
    """Write the tokenizer, the chat templates and the settings of generation into a folder.

    Args:
      source: the GGUF file.
      folder: an existing folder.

    Returns:
      The fields of ``config.json``, which is not written.
    """
    file = read_gguf(source)
    values = config_values(file).values
    generation = asdict(read_generation(file))
    ends = generation.pop("eos_token_ids")
    generation |= {"eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None)}
    chosen = {name: value for name, value in generation.items() if value is not None}
    _write_json(folder / "generation_config.json", chosen)
    # A token that is missing here is null, or readers would take the family's default.
    ids = {name: chosen.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = gguf_tokenizer(source, file.metadata)
    if tokenizer is not None:
        _write_tokenizer(tokenizer, folder)
    return {**values, **ids}


def _write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    backend = Backend.from_str(tokenizer.backend.to_str())
    added, ids = tokenizer.encode(""), tokenizer.special_tokens
    before = [ids["bos_token"]] if tokenizer.bos_token_id in added else []
    after = [ids["eos_token"]] if tokenizer.eos_token_id in added else []
    if before or after:
        tokens = [(token, backend.token_to_id(token)) for token in (*before, *after)]
        single = [*before, "$A", *after]
        backend.post_processor = TemplateProcessing(
            single=single, pair=[*single, *before, "$B:1", *after], special_tokens=tokens
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **ids}
    config |= {"add_bos_token": bool(before), "add_eos_token": bool(after)}
    _write_json(folder / "tokenizer_config.json", config)
    for name, text in tokenizer.templates.texts.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
