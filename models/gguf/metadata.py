"""Typed access to the keys of one architecture in a GGUF file's metadata."""

import math
from typing import TypeGuard

import numpy as np

from kvjax.core.validation import CheckpointError

from .file import GGUFFile, Value, printable, shown


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number, and not a bool."""
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


class Metadata:
    """Reads the keys of one architecture, checks their types, and remembers which were read."""

    def __init__(self, file: GGUFFile):
        self.path, self.tensors, self._values = file.path, file.tensors, file.metadata
        self.read_tensors: set[str] = set()
        self.architecture = self.text("general.architecture", None)
        self._read: set[str] = set()

    def wrong(self, key: str, expected: str) -> CheckpointError:
        value = self._values.get(key)
        found = "missing" if value is None else shown(value)
        return CheckpointError(f"{self.path}: {printable(key)} is {found}; expected {expected}")

    def text(self, key: str, default: str | None) -> str:
        value = self._values.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(key, "a string")
        return value

    def raw(self, name: str) -> Value | None:
        """The value of ``{architecture}.{name}``, or None if it is missing."""
        self._read.add(name)
        return self._values.get(f"{self.architecture}.{name}")

    def key(self, name: str) -> str:
        return f"{self.architecture}.{name}"

    def option(self, name: str, default: str) -> str:
        """Return a setting of the architecture that is a string, or ``default`` if it is
        missing."""
        value = self.raw(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(self.key(name), "a string")
        return default if value is None else value

    def only(self, name: str, *harmless: object) -> None:
        """Mark a key as read. The key has no effect if its value is one of ``harmless``.

        Raises:
          CheckpointError: if the key has another value.
        """
        value = self.raw(name)
        if value is not None and (isinstance(value, np.ndarray) or value not in harmless):
            raise self.wrong(self.key(name), " or ".join(map(str, harmless)))

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """An integer, or an array of equal ones with an entry per layer."""
        value = self._scalar(name)
        value = default if value is None else value
        if type(value) is not int or value < least:
            raise self.wrong(self.key(name), f"an integer of at least {least}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._scalar(name)
        value = default if value is None else value
        if not is_number(value) or value <= 0:
            raise self.wrong(self.key(name), "a finite number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if not isinstance(value, bool | None):
            raise self.wrong(self.key(name), "true or false")
        return default if value is None else value

    def _scalar(self, name: str) -> Value | None:
        value = self.raw(name)
        if not isinstance(value, np.ndarray):
            return value
        if value.size == 0 or (value != value[0]).any():
            raise self.wrong(self.key(name), "the same value in all layers")
        return value[0].item()

    def ignore(self, *names: str) -> None:
        """Mark keys as read. These keys have no effect on the output of kvjax's model."""
        self._read.update(names)

    def check_all_read(self) -> None:
        """Raise an error for a key of the architecture that nothing has read."""
        prefix = f"{self.architecture}."
        for key in self._values:
            if key.startswith(prefix) and key.removeprefix(prefix) not in self._read:
                raise self.wrong(key, "a file without this key, which kvjax does not know")
