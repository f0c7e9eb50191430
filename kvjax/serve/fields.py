"""Fields of a request's body, taken one by one, each with its type."""

import json
import math
from typing import Any, NoReturn

from kvjax.serve.errors import Refused


def read_object(raw: bytes) -> dict[str, Any]:
    """A body that is a JSON object.

    Raises:
      Refused: if it is not.
    """

    def no_number(word: str) -> NoReturn:
        raise ValueError(f"{word} is no number")

    try:
        found = json.loads(raw, parse_constant=no_number)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Refused(400, f"the body must be a JSON object, got {_short(found)}")
    return found


class Fields:
    """A JSON object whose fields are taken; what is left at the end is refused. None is as if a
    field were not there."""

    def __init__(self, values: dict[str, Any], within: str = "") -> None:
        self._values, self._within = dict(values), within

    def wrong(self, name: str, wanted: str, value: Any) -> Refused:
        """A field's error."""
        name = self._within + name
        return Refused(400, f"{name} must be {wanted}, got {_short(value)}", param=name)

    def raw(self, name: str) -> Any:
        """A field of any type."""
        return self._values.pop(name, None)

    def text(self, name: str) -> str | None:
        """A text."""
        value = self.raw(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a text", value)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.raw(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise self.wrong(name, "true or false", value)

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self.raw(name)
        if value is None or is_number(value):
            return value
        raise self.wrong(name, "a number", value)

    def whole(self, name: str, least: int, most: int | None = None) -> int | None:
        """A whole number."""
        value = self.raw(name)
        wanted = f"a whole number from {least} to {most}" if most is not None else (
            f"a whole number, at least {least}"
        )  # fmt: skip
        if value is None:
            return None
        if not is_number(value) or value != int(value) or value < least:
            raise self.wrong(name, wanted, value)
        if most is not None and value > most:
            raise self.wrong(name, wanted, value)
        return int(value)

    def inner(self, name: str) -> "Fields | None":
        """An object."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return Fields(value, f"{self._within}{name}.")

    def drop(self, *names: str) -> None:
        """Fields that change no result."""
        for name in names:
            self._values.pop(name, None)

    def neutral(self, name: str, *values: Any) -> None:
        """A field of which only such values are done, with which it changes nothing."""
        value = self.raw(name)
        if value is not None and not any(value == x and type(value) is type(x) for x in values):
            name = self._within + name
            message = f"{name} is not supported by this server: leave it out"
            raise Refused(400, message, param=name, code="unsupported_parameter")

    def end(self) -> None:
        """Refuse what is left."""
        for name, value in self._values.items():
            if value is not None:
                name = self._within + name
                message = f"{name[:80]!r} is no field that this server knows"
                raise Refused(400, message, param=name[:80], code="unknown_parameter")


def is_number(value: Any) -> bool:
    """Whether it is a finite number, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _short(value: Any) -> str:
    return f"{value!r:.60}" if isinstance(value, str | int | float | None) else (
        "a list" if isinstance(value, list) else "an object"
    )  # fmt: skip
