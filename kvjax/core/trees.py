"""Pytree helpers: frozen dataclasses whose fields are arrays or static settings."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

_T = TypeVar("_T")


def static_field(**kwargs: Any) -> Any:
    """A field of a ``state`` class that is a setting (hashable, part of the tree's structure)."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(static_field,))
def state(cls: type[_T]) -> type[_T]:
    """Make ``cls`` a frozen dataclass and a pytree: its fields are leaves unless static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


def tree_bytes(tree: Any) -> int:
    """Bytes of all arrays of a pytree, by their shapes and dtypes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
