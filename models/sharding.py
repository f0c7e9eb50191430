"""Tensor parallelism: how parameters are sharded along a mesh's ``tensor`` axis.

Each family declares which axis of which weight is sharded, as Megatron-LM does (Shoeybi et al.,
arXiv:1909.08053): the first matrix of a pair by its outputs, the second by its inputs. So a layer
needs two all-reduces, one after each pair. Parameters are replicated along ``data`` and
``sequence``.
"""

import math
from collections.abc import Mapping
from enum import Enum

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from kvjax.placement.mesh import COPIES, TENSOR, MeshSharding, shard_over


class Divided(Enum):
    """The sharded axis of a weight [out, in] or [experts, out, in], and of a bias [out]."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    """The bias is not sharded: it is added once."""
    QUERIES = "queries"
    """Outputs that are queries. A device has whole heads."""
    ATTENDED = "attended"
    """Inputs that are the attention outputs of query heads."""
    HEADS = "heads"
    """Outputs that are keys or values. A device has whole key-value heads."""
    ROWS = "rows"
    """The rows of a table, or its columns if the devices do not divide the rows."""


Rules = Mapping[str, Divided]
"""The sharded axis by layer name, the second to last part of a parameter's name. Parameters without
a rule are replicated."""


def param_shardings(
    shapes: PyTree, rules: Rules, mesh: Mesh | AbstractMesh, *, heads: int, kv_heads: int
) -> PyTree:
    """The sharding of each parameter, in the same nested dicts.

    Args:
      shapes: nested dicts of objects with a ``shape``.
      rules: the rules of the model's family.
      mesh: a mesh with the axes of ``kvjax.make_mesh``.
      heads, kv_heads: the model's query heads and key-value heads.
    """
    mesh_sharding = shard_over(mesh, kv_heads)
    axes = {Divided.HEADS: (TENSOR,)}
    if COPIES not in _names(mesh_sharding.query_spec(heads, kv_heads)):
        # Sharding over COPIES too would split heads, and every device needs whole heads.
        axes |= {Divided.QUERIES: (TENSOR,), Divided.ATTENDED: (TENSOR,)}

    def one(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        rule = rules.get(path[-2].key) if len(path) > 1 else None
        if rule is None:
            return mesh_sharding.sharding(PartitionSpec())
        along = axes.get(rule, (TENSOR, COPIES))
        return mesh_sharding.sharding(_spec(mesh_sharding, rule, along, tuple(leaf.shape)))

    return jax.tree_util.tree_map_with_path(one, shapes)


def _names(spec: PartitionSpec) -> set[str]:
    """The mesh axes in a spec."""
    return {name for each in spec for name in ((each,) if isinstance(each, str) else each or ())}


def _spec(
    mesh_sharding: MeshSharding, rule: Divided, axes: tuple[str, ...], shape: tuple[int, ...]
) -> PartitionSpec:
    inputs = {Divided.INPUTS: (1,), Divided.ATTENDED: (1,)}
    tries = (inputs | {Divided.ROWS: (0, 1)}).get(rule, (0,))
    if rule in inputs and len(shape) < 2:
        return PartitionSpec()
    stacked = max(len(shape) - 2, 0)
    while axes:
        count = math.prod(mesh_sharding.mesh.shape.get(axis, 1) for axis in axes)
        for axis in (stacked + each for each in tries):
            if axis < len(shape) and shape[axis] % count == 0:
                return mesh_sharding.spec(*[None] * axis, axes)
        axes = axes[:-1]
    return PartitionSpec()
