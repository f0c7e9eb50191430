"""Bytes of a model's parameters, and how many of them a token meets."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kvjax.policies.model_config import model_dtype

_LOOKUPS = {"embed_tokens", "wte", "embed_in"}
_POSITIONS = {"wpe"}
_HEADS = {"lm_head", "embed_out"}


class Plannable(Protocol):
    """What can be planned for: an ``Architecture``, or a ``kvjax.memory.shapes.ModelShape``.

    ``apply`` is None, and ``param_shardings`` raises ``ValueError``, where kvjax does not run it.
    """

    @property
    def config(self) -> Any: ...
    @property
    def apply(self) -> Callable[..., Any] | None: ...
    def abstract_params(self) -> Any: ...
    def param_shardings(self, mesh: Mesh | AbstractMesh, /) -> Any: ...


def plannable(model: Any) -> Plannable:
    """What can be planned for, of that or of a loaded model.

    Raises:
      ValueError: if it is neither.
    """
    found: Any = getattr(model, "architecture", model)
    for part in ("config", "apply", "abstract_params"):
        if not hasattr(found, part):
            raise ValueError(
                f"a model is needed, loaded, its architecture or a ModelShape, not a "
                f"{type(found).__name__}: it has no {part}"
            )
    if encodes(found):
        raise ValueError(
            "plans are of models without an encoder: what one reads has a length of its own"
        )
    return found  # type: ignore[no-any-return]


def encodes(model: Any) -> bool:
    """Whether a model, loaded or its architecture alone, has an encoder."""
    return bool(getattr(getattr(model, "architecture", model), "encodes", False))


class Loaded(Protocol):
    """A model with its parameters, on one device or a mesh."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...
    @property
    def mesh(self) -> Mesh | None: ...


def weight_bytes(model: Plannable, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Bytes of a model's parameters, as its config says that they are stored; on a device of a
    mesh, those that it has.

    Raises:
      ValueError: if kvjax does not run the model, and so divides it among no devices.
    """
    dtype = jnp.dtype(model_dtype(model.config))
    shapes = [leaf.shape for leaf in jax.tree.leaves(model.abstract_params())]
    if mesh is not None:
        shardings = jax.tree.leaves(model.param_shardings(mesh))
        shapes = [each.shard_shape(shape) for each, shape in zip(shardings, shapes, strict=True)]
    return sum(math.prod(shape) * dtype.itemsize for shape in shapes)


def weight_bytes_read(params: Any, batch: int) -> int:
    """Bytes of a model's parameters that a step reads: every one once, but of positions, and of an
    embedding that is not the head as well, only as many rows as there are texts."""
    total = 0
    for leaf, looked_up in _tables(params):
        size = leaf.size * leaf.dtype.itemsize
        total += min(batch, leaf.shape[0]) * size // leaf.shape[0] if looked_up else size
    return total


def multiplied(params: Any) -> int:
    """Parameters that a token is multiplied by: matrices, but not tables that are looked up in."""
    return sum(x.size for x, looked_up in _tables(params) if x.ndim > 1 and not looked_up)


def _tables(params: Any) -> list[tuple[Any, bool]]:
    """All arrays, and whether a token looks up a row of it."""
    leaves = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaves.append(({str(getattr(key, "key", key)) for key in path}, leaf))
    has_head = any(names & _HEADS for names, _ in leaves)
    tables = _POSITIONS | _LOOKUPS if has_head else _POSITIONS
    return [(leaf, bool(names & tables)) for names, leaf in leaves]
