"""Frozen dataclasses that are pytrees, and their static fields as JSON."""

import dataclasses
import json
import sys
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np
from jax import export
from jaxtyping import PyTree

_T = TypeVar("_T")
_Tuple = TypeVar("_Tuple", bound=tuple[object, ...])
_registered: list[type] = []


def static_field(**kwargs: Any) -> Any:
    """Declare a field of a ``pytree_dataclass`` that is part of the tree's structure. Its value
    must be hashable."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
def pytree_dataclass(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass and a pytree whose leaves are its non-static fields.

    Programs with such arguments can be serialized by ``jax.export``.
    """
    new_class = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
    export.register_pytree_node_serialization(
        new_class,
        serialized_name=_name(cls),
        serialize_auxdata=serialize_static,
        deserialize_auxdata=deserialize_static,
    )
    _registered.append(new_class)
    return new_class


def exportable_namedtuple(cls: type[_Tuple]) -> type[_Tuple]:
    """Register a named tuple of arrays for ``jax.export``."""
    return export.register_namedtuple_serialization(cls, serialized_name=_name(cls))


def register_with_flax() -> None:
    """Let Flax NNX modules have instances of ``pytree_dataclass`` classes as attributes, if Flax
    NNX is imported.

    kvjax does not import Flax NNX itself, so functions that return such instances to users call
    this.
    """
    register = getattr(sys.modules.get("flax.nnx"), "register_data_type", None)
    if register is not None:
        for cls in _registered:
            register(cls)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def tree_bytes(tree: PyTree) -> int:
    """Return the bytes of all arrays of a pytree, computed from their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def serialize_static(settings: tuple[object, ...]) -> bytes:
    """Convert static fields to JSON that includes the name of each class.

    Raises:
      ValueError: for a value other than a number, a string, a dtype, or a dataclass of these.
    """
    return json.dumps([_to_json(value) for value in settings]).encode()


def deserialize_static(data: bytes) -> tuple[Any, ...]:
    """Undo ``serialize_static``. Only dataclasses of modules that are already imported are created.

    Raises:
      ValueError: if a class is missing.
    """
    return tuple(_from_json(value) for value in json.loads(bytes(data).decode()))


def _to_json(value: object) -> object:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return {"tuple": [_to_json(item) for item in value]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        cls = type(value)
        return {
            "module": cls.__module__,
            "class": cls.__qualname__,
            "fields": {name: _to_json(getattr(value, name)) for name in names},
        }
    raise ValueError(
        f"a {type(value).__name__} can't be exported with a program: settings must be numbers, "
        "strings, dtypes or dataclasses of these, and the cache must not be on a mesh"
    )


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(item) for item in value["tuple"])
    if "dtype" in value:
        return np.dtype(value["dtype"])
    cls = getattr(sys.modules.get(value["module"]), value["class"], None)
    fields = {name: _from_json(field) for name, field in value["fields"].items()}
    if not dataclasses.is_dataclass(cls) or not fields.keys() <= {
        field.name for field in dataclasses.fields(cls)
    }:
        raise ValueError(
            f"the program was exported with {value['class']} of {value['module']}: import that "
            "module first, in the version that exported the program"
        )
    return cls(**fields)  # pyright: ignore[reportCallIssue]  # a class, not an object
