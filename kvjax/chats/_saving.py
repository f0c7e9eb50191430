"""Chats in folders: turns, settings and statistics as JSON, and the cache.

The cache is written first, with its tokens. If writing is interrupted after that, the old JSON file
still matches a prefix of the new cache. This prefix can be reused.
"""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.chats._conversation import ChatCache
from kvjax.chats.rendering import TokenizedText, Turn
from kvjax.core.array_folder import expand_user, report_format_errors
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.core.typing import Json
from kvjax.core.validation import CheckpointError
from kvjax.generation.drafts.draft_model import PromptLookup
from kvjax.generation.loaded_model import LanguageModel
from kvjax.operations.saving import fingerprint, load_cache, save_cache

_NAME, _CACHE, _VERSION = "chat.json", "cache", 1
_TEMPORARY = _NAME + ".new"

State = tuple[list[Turn], TokenizedText, Counter[str]]


def to_json(
    settings: Mapping[str, object],
    turns: list[Turn],
    tokenized: TokenizedText,
    counts: Counter[str],
) -> Json:
    """Convert a chat to JSON data, without its cache. A setting that JSON can't represent, such as
    a hook, is written as its name alone."""
    saved, others = {}, []
    for name, value in settings.items():
        try:
            saved[name] = json.loads(json.dumps(_setting_to_json(name, value), default=_number))
        except TypeError:
            others.append(name)
    return {
        "settings": saved,
        "others": others,
        "turns": [asdict(turn) for turn in turns],
        "known": {"text": tokenized.text, "ids": tokenized.ids, "marks": tokenized.cuts},
        "counts": dict(counts),
    }


def from_json(
    folder: str | Path, data: Json, overrides: Mapping[str, object]
) -> tuple[Json, State]:
    """Restore a chat's settings, updated by ``overrides``, and its state.

    Raises:
      CheckpointError: if the data does not have the expected form.
      ValueError: if a setting that could not be saved is not in ``overrides``.
    """
    with report_format_errors(folder):
        settings = {
            name: _setting_from_json(name, value) for name, value in data["settings"].items()
        }
        turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in data["turns"]]
        known = data["known"]
        cuts = tuple(map(tuple, known["marks"]))
        tokenized = TokenizedText(known["text"], tuple(known["ids"]), cuts)
        missing = [name for name in data["others"] if name not in overrides]
        counts = Counter(data["counts"])
        if not all(isinstance(turn.user, str) and isinstance(turn.answer, str) for turn in turns):
            raise CheckpointError(f"{folder}: a turn has no text")
    if missing:
        raise ValueError(f"{folder}: {missing[0]} could not be saved; give it again")
    return {**settings, **overrides}, (turns, tokenized, counts)


def _setting_to_json(name: str, value: Any) -> object:
    if name == "cache":
        return json.loads(serialize_static((tuple(value) if isinstance(value, list) else value,)))
    if name == "logit_bias" and value is not None:
        return list(value.items())  # keys of JSON objects are strings
    if isinstance(value, PromptLookup):
        return asdict(value)
    return value


def _setting_from_json(name: str, value: Any) -> object:
    if name == "cache":
        (value,) = deserialize_static(json.dumps(value).encode())
        return list(value) if isinstance(value, tuple) else value
    if name == "logit_bias" and value is not None:
        return {token: bias for token, bias in value}
    if name == "draft" and isinstance(value, dict):
        return PromptLookup(**value)
    return value


def _number(value: object) -> int | float:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r:.80} can't be written as JSON")


def write(folder: str | Path, data: Json, cached: ChatCache | None, lm: LanguageModel) -> None:
    """Write a chat into a folder that is new, is empty, or contains a chat.

    Raises:
      CheckpointError: if the folder contains something else.
    """
    folder, model = expand_user(folder), fingerprint(lm)
    ours = {_NAME, _CACHE, _TEMPORARY}
    if folder.exists() and not (folder.is_dir() and {x.name for x in folder.iterdir()} <= ours):
        raise CheckpointError(f"{folder}: exists and is not a chat, so it is not overwritten")
    text = json.dumps(
        {"form": _VERSION, "model": model, "cache": cached is not None, **data},
        ensure_ascii=False,
        indent=1,
    )
    folder.mkdir(parents=True, exist_ok=True)
    if cached is not None:
        save_cache(folder / _CACHE, cached.cache, model=model, tokens=[cached.tokens])
    with (folder / _TEMPORARY).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    (folder / _TEMPORARY).replace(folder / _NAME)


def read(
    folder: str | Path, lm: LanguageModel, max_len: int | None
) -> tuple[Json, ChatCache | None]:
    """Read the JSON data of a chat, and its cache.

    Raises:
      CheckpointError: if no chat is found, it belongs to another model, or a file is damaged.
      ValueError: if the cache has more than ``max_len`` tokens.
    """
    folder = expand_user(folder)
    file = folder / _NAME
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        version, model, has_cache = data["form"], data["model"], data["cache"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no chat was saved there, it has no {_NAME}") from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{file}: is damaged: {error}") from None
    if version != _VERSION:
        raise CheckpointError(
            f"{file}: has format {version!r}, but this version of kvjax reads {_VERSION}"
        )
    if model != (own := fingerprint(lm)):
        raise CheckpointError(
            f"{folder}: is a chat with the model {model}, but this is {own}, which can't use its "
            "tokens and cache"
        )
    if not has_cache:
        return data, None
    cache, sequences = load_cache(folder / _CACHE, model=own, max_len=max_len, mesh=lm.mesh)
    with report_format_errors(folder):
        if sequences is None or len(sequences) != 1:
            raise ValueError(f"a cache with {len(sequences or ())} sequences")
        return data, ChatCache(cache, tuple(sequences[0]))
