"""Settings as text: what is static of a pytree, for programs that are kept (``jax.export``)."""

import dataclasses
import json
import sys
from typing import Any

import numpy as np


def to_bytes(settings: tuple[Any, ...]) -> bytes:
    """Settings as JSON, with the name of each class.

    Raises:
      ValueError: if something is neither a number, a string, a dtype nor a dataclass of such.
    """
    return json.dumps([_plain(each) for each in settings]).encode()


def from_bytes(written: bytes) -> tuple[Any, ...]:
    """The settings of ``to_bytes``. No code is run but of classes of this process's modules.

    Raises:
      ValueError: if a class is not there.
    """
    return tuple(_whole(each) for each in json.loads(bytes(written).decode()))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return {"tuple": [_plain(each) for each in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        kind = type(value)
        return {
            "module": kind.__module__,
            "class": kind.__qualname__,
            "fields": {name: _plain(getattr(value, name)) for name in fields},
        }
    raise ValueError(
        f"a {type(value).__name__} can't be written down with a program: a setting is a number, a "
        "string, a dtype or a dataclass of such, and a cache is on no mesh"
    )


def _whole(written: Any) -> Any:
    if not isinstance(written, dict):
        return written
    if "tuple" in written:
        return tuple(_whole(each) for each in written["tuple"])
    if "dtype" in written:
        return np.dtype(written["dtype"])
    kind: Any = getattr(sys.modules.get(written["module"]), written["class"], None)
    fields = {name: _whole(value) for name, value in written["fields"].items()}
    if not dataclasses.is_dataclass(kind) or not fields.keys() <= {
        field.name for field in dataclasses.fields(kind)
    }:
        raise ValueError(
            f"the program was exported with {written['class']} of {written['module']}: import that "
            "first, in the version that exported it"
        )
    return kind(**fields)  # pyright: ignore[reportCallIssue]  # a class, not an object
