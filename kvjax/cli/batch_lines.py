"""Lines of ``kvjax batch``: what each of them asks for."""

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

PROMPTS = ("prompt", "tokens", "messages")
SETTINGS = (
    "max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "no_repeat_ngram_size", "logit_bias", "seed", "stop", "logprobs", "priority",
)  # fmt: skip
_GOES_ON = "continue_final_message"
_KNOWN = ("id", *PROMPTS, _GOES_ON, *SETTINGS)
_KINDS = {
    "prompt": (str, "a text"),
    "tokens": (list, "a list of token ids"),
    "messages": (list, "a list of messages"),
    _GOES_ON: (bool, "true or false"),
    "logit_bias": (dict, "an object: token ids, and what is added to their logits"),
    "stop": ((str, list), "a text, or a list of texts"),
}


def numbered(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines without white space around them, by their numbers, from 1 on."""
    for number, line in enumerate(file, 1):
        yield number, line.strip()


def key_of(line: bytes, settings: str) -> str:
    """16 hexadecimal digits that tell a line, under settings, from others."""
    return hashlib.sha256(settings.encode() + b"\n" + line).hexdigest()[:16]


def object_of(line: bytes) -> dict[str, Any]:
    """A line as it is read; what is null is as good as not there.

    Raises:
      ValueError: if it is no JSON object.
    """
    try:
        found = json.loads(line)
    except RecursionError:
        raise ValueError("it is not JSON that can be read: it is too deep") from None
    except json.JSONDecodeError as error:
        where = f"at character {error.pos + 1}"
        raise ValueError(f"it is not JSON, {where}: {error.msg}") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON that can be read: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return {name: value for name, value in found.items() if value is not None}


def name_of(entry: dict[str, Any]) -> str | int | None:
    """The ``id`` of a line, as far as it is one."""
    name = entry.get("id")
    return name if isinstance(name, str | int) else None


class DuplicateError(ValueError):
    """An id that two lines have."""


class Names:
    """The ids of lines, each of one line."""

    def __init__(self) -> None:
        self._lines: dict[str | int, int] = {}

    def add(self, number: int, name: str | int | None) -> None:
        """The id of the line of that number, None where it has none.

        Raises:
          DuplicateError: if another line has it.
        """
        if name is not None and self._lines.setdefault(name, number) != number:
            raise DuplicateError(f"its id {name!r} is that of line {self._lines[name]} too")


def asked_for(entry: dict[str, Any], lm: Any, chat: bool) -> tuple[Any, dict[str, Any]]:
    """The prompt of a line, a text or token ids, and its settings.

    ``lm``: whose chat template ``messages`` go into, and with ``chat`` a ``prompt`` too.

    Raises:
      ValueError: naming what is wrong with it.
    """
    if unknown := [name for name in entry if name not in _KNOWN]:
        near = difflib.get_close_matches(unknown[0], _KNOWN, 1)
        known = f"{near[0]!r} perhaps" if near else f"there are {', '.join(_KNOWN)}"
        raise ValueError(f"it has {unknown[0]!r}: {known}")
    if "id" in entry and name_of(entry) is None:
        raise ValueError("id must be a text or a whole number")
    given = [name for name in PROMPTS if name in entry]
    if len(given) != 1:
        raise ValueError(f"it has {' and '.join(given) or 'no prompt'}: give one of "
                         f"{', '.join(PROMPTS)}")  # fmt: skip
    for name, (kind, words) in _KINDS.items():
        if name in entry and not isinstance(entry[name], kind):
            raise ValueError(f"{name} must be {words}")
    try:
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"it has half a character: {error.object[error.start]!r}") from None
    settings = {name: entry[name] for name in SETTINGS if name in entry}
    if "logit_bias" in settings:
        settings["logit_bias"] = {_token(each): x for each, x in entry["logit_bias"].items()}
    prompt, how = entry[given[0]], {_GOES_ON: True} if entry.get(_GOES_ON) else {}
    if how and given != ["messages"]:
        raise ValueError(f"{_GOES_ON} is of messages: it has {given[0]}")
    if given == ["prompt"] and chat:
        prompt = lm.chat([{"role": "user", "content": prompt}])
    return lm.chat(prompt, **how) if given == ["messages"] else prompt, settings


def _token(written: str) -> int:
    if not (written.isascii() and written.isdecimal()):
        raise ValueError(f"logit_bias has {written!r}, which is no token id")
    return int(written)
