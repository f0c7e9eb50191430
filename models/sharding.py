"""How a model's parameters are divided among the devices along a mesh's axis ``tensor``.

Each family says beside its layers which axis of which weight is divided, as Shoeybi et al.
(Megatron-LM, arXiv:1909.08053) do: the first of two matrices by its outputs, the second by its
inputs, so that a layer's devices meet twice, once behind each second one. Along ``data`` and
``sequence`` every device has all of them.
"""

import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from kvjax.placement.mesh import COPIES, TENSOR, MeshSharding, shard_over


class Divided(Enum):
    """What of a weight [out, in] or [experts, out, in] is divided, and of a bias [out]."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    """And not the bias, which is added once."""
    QUERIES = "queries"
    """The outputs, which are queries of whole heads."""
    MIXTURES = "mixtures"
    """The inputs, which are what these heads have seen."""
    HEADS = "heads"
    """The outputs, which are keys or values of as many heads as the cache has."""
    ROWS = "rows"
    """The rows of a table, or its columns where rows do not come out even."""


Rules = Mapping[str, Divided]
"""By the name of the layer, the last part but one of a parameter's; what is in no rule is whole on
every device."""


def param_shardings(
    shapes: Any, rules: Rules, mesh: Mesh | AbstractMesh, *, heads: int, kv_heads: int
) -> Any:
    """The sharding of each parameter: nested dicts, as the parameters are.

    Args:
      shapes: nested dicts of what has a ``shape``.
      rules: the family's.
      mesh: with the axes of ``kvjax.make_mesh``.
      heads, kv_heads: the model's, of queries and of keys and values.
    """
    spread = shard_over(mesh, kv_heads)
    axes = {Divided.HEADS: (TENSOR,)}
    if COPIES not in _names(spread.query_spec(heads, kv_heads)):
        # A share of them would cut across heads, of which every device takes whole ones.
        axes |= {Divided.QUERIES: (TENSOR,), Divided.MIXTURES: (TENSOR,)}

    def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        rule = rules.get(path[-2].key) if len(path) > 1 else None
        if rule is None:
            return spread.sharding(PartitionSpec())
        along = axes.get(rule, (TENSOR, COPIES))
        return spread.sharding(_spec(spread, rule, along, tuple(leaf.shape)))

    return jax.tree_util.tree_map_with_path(one, shapes)


def _names(spec: PartitionSpec) -> set[str]:
    """The mesh's axes in a spec."""
    return {name for each in spec for name in ((each,) if isinstance(each, str) else each or ())}


def _spec(
    spread: MeshSharding, rule: Divided, axes: tuple[str, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    inputs = {Divided.INPUTS: (1,), Divided.MIXTURES: (1,)}
    tries = (inputs | {Divided.ROWS: (0, 1)}).get(rule, (0,))
    if rule in inputs and len(shape) < 2:
        return PartitionSpec()
    stacked = max(len(shape) - 2, 0)
    while axes:
        count = math.prod(spread.mesh.shape.get(axis, 1) for axis in axes)
        for axis in (stacked + each for each in tries):
            if axis < len(shape) and shape[axis] % count == 0:
                return spread.spec(*[None] * axis, axes)
        axes = axes[:-1]
    return PartitionSpec()
