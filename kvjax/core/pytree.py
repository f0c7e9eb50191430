"""Frozen dataclasses that are pytrees, and their static fields as JSON."""

import dataclasses
import json
import sys
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import export

_T = TypeVar("_T")
_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])
_made: list[type] = []


def static_field(**kwargs: Any) -> Any:
    """A hashable field of a ``pytree_dataclass``, part of the tree's structure."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
def pytree_dataclass(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass and a pytree: its fields are leaves unless static. Programs
    that take it can be kept (``jax.export``)."""
    made = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
    export.register_pytree_node_serialization(
        made,
        serialized_name=_name(cls),
        serialize_auxdata=serialize_static,
        deserialize_auxdata=deserialize_static,
    )
    _made.append(made)
    return made


def register_with_flax() -> None:
    """Let modules of Flax NNX have these as attributes, where it is imported: kvjax alone does
    without, so whatever makes one for users calls this."""
    register = getattr(sys.modules.get("flax.nnx"), "register_data_type", None)
    if register is not None:
        for each in _made:
            register(each)


def exportable_namedtuple(cls: type[_Tuple]) -> type[_Tuple]:
    """The same of a named tuple of arrays, as codecs store numbers in."""
    return export.register_namedtuple_serialization(cls, serialized_name=_name(cls))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, by their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def serialize_static(settings: tuple[Any, ...]) -> bytes:
    """Settings as JSON, with the name of each class.

    Raises:
      ValueError: if something is neither a number, a string, a dtype nor a dataclass of such.
    """
    return json.dumps([_plain(each) for each in settings]).encode()


def deserialize_static(written: bytes) -> tuple[Any, ...]:
    """Inverse of ``serialize_static``. Only dataclasses of already imported modules are built.

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
