"""Chats in folders: what was said as JSON, and the cache beside it.

The cache is written first, with the tokens that it holds. So whenever the writer is stopped, the
text that stands there goes on with what fits of the cache that does.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvjax.chats.held import Held
from kvjax.core.array_folder import expand_user, report_format_errors
from kvjax.core.errors import CheckpointError
from kvjax.generation.loaded_model import LanguageModel
from kvjax.operations.saving import fingerprint, load_cache, save_cache

_NAME, _CACHE, _FORM = "chat.json", "cache", 1
_BESIDE = _NAME + ".new"


def write(
    folder: str | Path, told: Mapping[str, Any], held: Held | None, lm: LanguageModel
) -> None:
    """Write a chat into a folder: a new one, an empty one, or one of a chat.

    Raises:
      CheckpointError: if something else stands there.
    """
    folder, model = expand_user(folder), fingerprint(lm)
    ours = {_NAME, _CACHE, _BESIDE}
    if folder.exists() and not (folder.is_dir() and {x.name for x in folder.iterdir()} <= ours):
        raise CheckpointError(f"{folder}: there is something else, which is not written over")
    words = json.dumps(
        {"form": _FORM, "model": model, "cache": held is not None, **told},
        ensure_ascii=False, indent=1,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if held is not None:
        save_cache(folder / _CACHE, held.cache, model=model, tokens=[held.tokens])
    with (folder / _BESIDE).open("w", encoding="utf-8") as file:
        file.write(words)
        file.flush()
        os.fsync(file.fileno())
    (folder / _BESIDE).replace(folder / _NAME)


def read(
    folder: str | Path, lm: LanguageModel, max_len: int | None
) -> tuple[dict[str, Any], Held | None]:
    """What was told, and what the cache holds.

    Raises:
      CheckpointError: if there is no chat, it is of another model, or a file was cut or changed.
      ValueError: if ``max_len`` is less than the cache holds.
    """
    folder = expand_user(folder)
    file = folder / _NAME
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        form, model, cached = told["form"], told["model"], told["cache"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no chat was saved there: it has no {_NAME}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file}: was cut or changed: {error}") from None
    if form != _FORM:
        raise CheckpointError(f"{file}: form {form!r}, and this version reads {_FORM}")
    if model != (own := fingerprint(lm)):
        raise CheckpointError(
            f"{folder}: a chat with the model {model}, and this one is {own}: its tokens and its "
            "cache are of no use to another"
        )
    if not cached:
        return told, None
    cache, texts = load_cache(folder / _CACHE, model=own, max_len=max_len, mesh=lm.mesh)
    with report_format_errors(folder):
        if texts is None or len(texts) != 1:
            raise ValueError(f"a cache of {len(texts or ())} texts")
        return told, Held(cache, tuple(texts[0]))
