"""Layers shared by the model families, and how their parameters are sharded.

Parameters have the same names as in Transformers.

Tensor parallelism shards them along a mesh's ``tensor`` axis. Each family declares which axis of
which weight is sharded, as Megatron-LM does (Shoeybi et al., arXiv:1909.08053): the first matrix of
a pair by its outputs, the second by its inputs. So a layer needs two all-reduces, one after each
pair. Parameters are replicated along ``data`` and ``sequence``.
"""

import math
from collections.abc import Callable, Mapping
from enum import Enum

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Array, Float, Int, PyTree

from kvjax.core.array_ops import contract_last
from kvjax.placement.mesh import COPIES, TENSOR, MeshSharding, shard_over

Hidden = Float[Array, "batch new hidden"]
Heads = Float[Array, "batch heads new head_dim"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
"""Activation functions by their names in ``config.json``."""


class Linear(nnx.Module):
    """``x @ weight.T + bias`` with ``weight`` [out, in], as checkpoints store it.

    The product contracts the last axis of both operands, because a transpose would copy the weights
    in decode steps with a single row.
    """

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: str, rngs: nnx.Rngs
    ):
        self.weight = nnx.Param(normal(rngs, (out_features, in_features), dtype))
        self.bias = nnx.Param(jnp.zeros(out_features, dtype)) if bias else None

    def __call__(self, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
        y = contract_last(x, self.weight[...]).astype(x.dtype)
        return y if self.bias is None else y + along(self.bias, y)


class Embedding(nnx.Module):
    """Embedding table ``weight`` [count, features], which can also compute tied logits."""

    def __init__(self, count: int, features: int, *, dtype: str, rngs: nnx.Rngs):
        self.weight = nnx.Param(normal(rngs, (count, features), dtype))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... features"]:
        return jnp.take(self.weight[...], ids, axis=0, mode="clip")

    def logits(self, x: Float[Array, "... features"]) -> Float[Array, "... count"]:
        """Compute float32 dot products of ``x`` with every row of the table."""
        return contract_last(x, self.weight[...])


def unit(x: Float[Array, "... features"], epsilon: float) -> Float[Array, "... features"]:
    """Divide ``x`` by its root mean square, in float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)


def centered(x: Float[Array, "... features"]) -> Float[Array, "... features"]:
    """Subtract the mean from ``x``, in float32."""
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True)


class RMSNorm(nnx.Module):
    """Root mean square norm (Zhang and Sennrich, arXiv:1910.07467), normalized in float32.

    The scale is ``offset + weight``. Gemma uses an offset of 1. The multiplication by the scale is
    done in float32 if ``wide`` is set or the offset is not 0. If ``centered`` is set, the mean is
    subtracted first, which is a layer norm without a bias.
    """

    def __init__(
        self,
        features: int,
        *,
        epsilon: float,
        dtype: str,
        offset: float = 0.0,
        wide: bool = False,
        centered: bool = False,
    ):
        self.weight = nnx.Param(jnp.full(features, 1 - offset, dtype))
        self.epsilon, self.offset, self.wide = epsilon, offset, wide or offset != 0
        self.centered = centered

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        normal = unit(centered(x) if self.centered else x, self.epsilon)
        if self.wide:
            weight = self.offset + along(self.weight, x).astype(jnp.float32)
            return (normal * weight).astype(x.dtype)
        return along(self.weight, x) * normal.astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm (Ba et al., arXiv:1607.06450), normalized in float32."""

    def __init__(self, features: int, *, epsilon: float, dtype: str):
        self.weight = nnx.Param(jnp.ones(features, dtype))
        self.bias = nnx.Param(jnp.zeros(features, dtype))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... features"]) -> Float[Array, "... features"]:
        normal = unit(centered(x), self.epsilon).astype(x.dtype)
        return along(self.weight, x) * normal + along(self.bias, x)


class FeedForward(nnx.Module):
    """Gated feed-forward layer ``down(act(gate(x)) * up(x))`` (Shazeer, arXiv:2002.05202)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        dtype: str,
        rngs: nnx.Rngs,
    ):
        self.activation = ACTIVATIONS[activation]

        def linear(fan_in: int, fan_out: int) -> Linear:
            return Linear(fan_in, fan_out, bias=bias, dtype=dtype, rngs=rngs)

        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, x: Float[Array, "... hidden"]) -> Float[Array, "... hidden"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def along(weight: nnx.Param, x: Array) -> Array:
    """Reshape a weight [features] so that it broadcasts against ``x`` [..., features]."""
    return weight[...].reshape(*[1] * (x.ndim - 1), -1)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: str) -> Array:
    """Create random initial weights from a normal distribution with standard deviation 0.02."""
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def split_heads(x: Float[Array, "batch new features"], heads: int) -> Heads:
    """Reshape [batch, new, heads * head_dim] to [batch, heads, new, head_dim]."""
    batch, new, features = x.shape
    return x.reshape(batch, new, heads, features // heads).swapaxes(1, 2)


def rotary_halves(x: Heads) -> Heads:
    """Reorder the channels, so that rotated pairs (2i, 2i + 1) become pairs (i, i + half)."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)


def merge_heads(x: Heads) -> Float[Array, "batch new features"]:
    """Reshape [batch, heads, new, head_dim] to [batch, new, heads * head_dim]."""
    batch, heads, new, head_dim = x.shape
    return x.swapaxes(1, 2).reshape(batch, new, heads * head_dim)


class Divided(Enum):
    """The sharded axis of a weight [out, in] or [experts, out, in], and of a bias [out]."""

    OUTPUTS = "outputs"
    INPUTS = "inputs"
    """The inputs of the layer. The bias is not sharded, because it is added once."""
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
    """Return the sharding of each parameter, in nested dicts like ``shapes``.

    Args:
      shapes: nested dicts of objects with a ``shape``.
      rules: the rules of the model's family.
      mesh: a mesh with the axes of ``kvjax.make_mesh``.
      heads, kv_heads: the numbers of the model's query heads and key-value heads.
    """
    mesh_sharding = shard_over(mesh, kv_heads)
    axes = {Divided.HEADS: (TENSOR,)}
    if COPIES not in _names(mesh_sharding.query_spec(heads, kv_heads)):
        # Sharding over COPIES too would split heads, but every device needs whole heads.
        axes |= {Divided.QUERIES: (TENSOR,), Divided.ATTENDED: (TENSOR,)}

    def one(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        rule = rules.get(path[-2].key) if len(path) > 1 else None
        if rule is None:
            return mesh_sharding.sharding(PartitionSpec())
        along = axes.get(rule, (TENSOR, COPIES))
        return mesh_sharding.sharding(_spec(mesh_sharding, rule, along, tuple(leaf.shape)))

    return jax.tree_util.tree_map_with_path(one, shapes)


def _names(spec: PartitionSpec) -> set[str]:
    """Return the mesh axes in a spec."""
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
