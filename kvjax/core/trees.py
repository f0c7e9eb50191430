"""Pytree helpers: frozen dataclasses whose fields are arrays or static settings."""

import dataclasses
import sys
from typing import Any, TypeVar, dataclass_transform

import jax
from jax import export

from kvjax.core.settings import from_bytes, to_bytes

_T = TypeVar("_T")
_Tuple = TypeVar("_Tuple", bound=tuple[Any, ...])
_made: list[type] = []


def static_field(**kwargs: Any) -> Any:
    """A field of a ``state`` class that is a setting (hashable, part of the tree's structure)."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
def state(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass and a pytree: its fields are leaves unless static. Programs
    that take it can be kept (``jax.export``)."""
    made = jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))
    export.register_pytree_node_serialization(
        made, serialized_name=_name(cls), serialize_auxdata=to_bytes, deserialize_auxdata=from_bytes
    )
    _made.append(made)
    return made


def tell_flax() -> None:
    """Let modules of Flax NNX have these as attributes, where it is imported: kvjax alone does
    without, so whatever makes one for users calls this."""
    register = getattr(sys.modules.get("flax.nnx"), "register_data_type", None)
    if register is not None:
        for each in _made:
            register(each)


def store(cls: type[_Tuple]) -> type[_Tuple]:
    """The same of a named tuple of arrays, as codecs store numbers in."""
    return export.register_namedtuple_serialization(cls, serialized_name=_name(cls))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, by their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
