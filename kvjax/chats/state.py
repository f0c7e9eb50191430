"""A chat's turns, settings and figures as JSON, and back."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.chats.known import Known
from kvjax.chats.turns import Turn
from kvjax.core.array_folder import report_format_errors
from kvjax.core.errors import CheckpointError
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.generation.drafts.asked import PromptLookup

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
        "settings": plain, "others": others, "turns": [asdict(turn) for turn in turns],
        "known": asdict(known), "counts": dict(counts),
    }  # fmt: skip


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
