"""Chats in folders: turns and settings as JSON, and the cache."""

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.chats.conversation import Held
from kvjax.chats.rendering import Known, Turn
from kvjax.core.array_folder import expand_user, report_format_errors
from kvjax.core.errors import CheckpointError
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.generation.drafts.draft_model import PromptLookup
from kvjax.generation.loaded_model import LanguageModel
from kvjax.operations.saving import fingerprint, load_cache, save_cache

Kept = tuple[list[Turn], Known, Counter[str]]


def to_told(settings: Mapping[str, Any], turns: list[Turn], known: Known, counts: Counter) -> dict:
    """What is written of a chat, all but its cache. Settings that are no data, as a hook, are named
    alone."""
    plain, others = {}, []
    for name, value in settings.items():
        try:
            plain[name] = json.loads(json.dumps(_written(name, value), default=_number))
        except TypeError:
            others.append(name)
    return {
        "settings": plain,
        "others": others,
        "turns": [asdict(turn) for turn in turns],
        "known": asdict(known),
        "counts": dict(counts),
    }


def from_told(
    folder: str | Path, told: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[dict[str, Any], Kept]:
    """A chat's settings, some of which are ``given`` anew, and the rest of it.

    Raises:
      CheckpointError: if something is not as it was written.
      ValueError: if a setting that could not be saved is not given.
    """
    with report_format_errors(folder):
        settings = {name: _read(name, value) for name, value in told["settings"].items()}
        turns = [Turn(**each | {"tokens": tuple(each["tokens"])}) for each in told["turns"]]
        known = told["known"]
        known = Known(known["text"], tuple(known["ids"]), tuple(map(tuple, known["marks"])))
        missing = [name for name in told["others"] if name not in given]
        counts = Counter(told["counts"])
        if not all(isinstance(turn.user, str) and isinstance(turn.answer, str) for turn in turns):
            raise CheckpointError(f"{folder}: a turn has no text")
    if missing:
        raise ValueError(f"{folder}: {missing[0]} could not be saved: give it again")
    return {**settings, **given}, (turns, known, counts)


def _written(name: str, value: Any) -> Any:
    if name == "cache":
        return json.loads(serialize_static((tuple(value) if isinstance(value, list) else value,)))
    if name == "logit_bias" and value is not None:
        return list(value.items())  # JSON has texts alone as keys
    if isinstance(value, PromptLookup):
        return asdict(value)
    return value


def _read(name: str, value: Any) -> Any:
    if name == "cache":
        (value,) = deserialize_static(json.dumps(value).encode())
        return list(value) if isinstance(value, tuple) else value
    if name == "logit_bias" and value is not None:
        return {token: bias for token, bias in value}
    if name == "draft" and isinstance(value, dict):
        return PromptLookup(**value)
    return value


def _number(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r:.80} is no data")


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
        ensure_ascii=False,
        indent=1,
    )
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
