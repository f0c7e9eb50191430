"""Read a checkpoint's JSON files field by field, with errors that name file, field and value."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.core.typing import Json
from kvjax.core.validation import CheckpointError


def read_text(path: Path) -> str:
    """Read a text file of a checkpoint.

    Raises:
      CheckpointError: if the file does not exist, can't be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: file not found") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: can't be read as text: {error}") from error


def read_json(path: Path) -> Json:
    """Read a JSON object from a file of a checkpoint.

    Raises:
      CheckpointError: if the file can't be read, or is not a JSON object.
    """
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Fields:
    """The fields of a JSON object. A null field counts as missing."""

    file: Path
    values: Mapping[str, object]
    parent: str = ""

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a field with an invalid value."""
        value = json.dumps(self.values.get(name), default=str)
        if len(value) > 200:
            value = value[:200] + "..."
        return CheckpointError(f"{self.file}: {self.parent}{name} is {value}; expected {expected}")

    def raw(self, name: str, default: object = None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.raw(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.wrong(name, f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        value = self.raw(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self.wrong(name, "a number")
        if positive and not value > 0:
            raise self.wrong(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
        value = self.raw(name, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(name, f"one of {', '.join(sorted(known))}")
        return value

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        value = self.raw(name)
        good = isinstance(value, list) and all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and x > 0 for x in value
        )
        if not good or len(value) != count:
            suffix = f", found {len(value)}" if isinstance(value, list) else ""
            raise self.wrong(name, f"a list of {count} numbers above 0{suffix}")
        return tuple(float(x) for x in value)

    def inner(self, name: str) -> "Fields | None":
        """A nested object, or None if the field is missing."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(self.file, value, f"{self.parent}{name}.")
