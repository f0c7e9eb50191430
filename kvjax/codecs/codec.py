"""The codec protocol, products with decoded keys and values, and the codec that stores raw
numbers."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from kvjax.core.pytree import tree_bytes
from kvjax.core.target import current_target, on_cpu

FEW_ROWS = 64
"""With fewer query rows than this, a CPU multiplies float32 keys faster as the left operand."""
SINGLE_ROWS = 4
"""If the batch has one row, up to this number of query rows are multiplied one at a time."""
SUMMED_ROWS = 16
"""Up to this number of query rows, a GPU multiplies and sums in one fusion, which reads keys and
values in their stored dtype. Its matrix-product libraries would need decoded copies."""

Store = Any
"""Encoded numbers: a pytree of arrays with the batch on axis 0 and units (tokens or blocks of
tokens) on axis 2.

Example:
  ```python
  codec = kvjax.codecs.Int8().resolve("float32", "cpu")
  store = codec.empty((1, 2, 1, 64, 64))
  print(jax.tree.map(jnp.shape, store))
  ```
"""


class Codec(Protocol):
    """How numbers are stored. A codec is a frozen, hashable dataclass with static fields.

    Numbers have the shape [batch, kv_heads, blocks, block, head_dim] for a blockwise codec, and
    [batch, kv_heads, tokens, head_dim] for other codecs. The encoded numbers (the store) are
    a pytree of arrays, each with the batch on axis 0 and the blocks or tokens on axis 2.

    A subclass inherits ``nbytes``, ``scores``, ``weighted_values``, ``before_rotary`` and
    ``joins_heads``, and defines everything else.

    Attributes:
      dtype: the dtype that ``decode`` returns. It may be None before ``resolve``.
      blockwise: whether the numbers of a block are encoded together, for example under one scale.
        The newest tokens are then kept unquantized, in the tail, until their block leaves it.
      before_rotary: whether keys are stored unrotated, and rotated when they are read.
      joins_heads: whether heads share scales. The head axis of the scales then has size 1.

    Example:
      ```python
      codec = kvjax.codecs.Int8().resolve("float32", "cpu")
      x = jax.random.normal(jax.random.key(0), (1, 2, 1, 64, 64))  # one block of 64 tokens
      print(codec.nbytes(x.shape), jnp.abs(codec.decode(codec.encode(x)) - x).max())
      ```
    """

    if TYPE_CHECKING:  # properties are read-only, so that the fields of frozen classes match them

        @property
        def dtype(self) -> str | None: ...
        @property
        def blockwise(self) -> bool: ...
        @property
        def before_rotary(self) -> bool:
            return False

        @property
        def joins_heads(self) -> bool:
            return False
    else:
        dtype: str | None
        blockwise: bool
        before_rotary = joins_heads = False

    @abstractmethod
    def resolve(self, model_dtype: str | None, platform: str) -> "Codec":
        """Return this codec with the settings that depend on the model's dtype and on the
        platform."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...]) -> Store:
        """Create a store of zeros for numbers of the shape ``shape``.

        Raises:
          ValueError: if the codec can't store numbers of this shape.
        """

    @abstractmethod
    def encode(self, x: Array) -> Store:
        """Encode numbers."""

    @abstractmethod
    def decode(self, store: Store) -> Array:
        """Decode a store to numbers in ``dtype``."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of a store for numbers of the shape ``shape``."""
        return tree_bytes(jax.eval_shape(lambda: self.empty(shape)))

    def scores(self, queries: Array, store: Store) -> Array:
        """Multiply queries [batch, kv_heads, rows, head_dim] and stored keys. Returns
        float32[batch, kv_heads, rows, tokens]. A codec may do this without decoding the keys."""
        return plain_scores(queries, self.decode(store))

    def weighted_values(self, weights: Array, store: Store) -> Array:
        """Multiply weights [batch, kv_heads, rows, tokens] and stored values. Returns
        float32[batch, kv_heads, rows, head_dim]."""
        return plain_weighted_values(weights, self.decode(store))


def merge_blocks(x: Array) -> Array:
    """Reshape [batch, kv_heads, blocks, block, head_dim] to [batch, kv_heads, tokens, head_dim].
    Numbers without an axis of blocks do not change."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def product(subscripts: str, a: Array, b: Array) -> Array:
    """Compute an ``einsum`` that accumulates in float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def plain_scores(queries: Array, keys: Array) -> Array:
    """Multiply queries and decoded keys, as ``Codec.scores`` does for stored keys.

    With few queries, a CPU computes the product many times faster if float32 keys are the left
    operand. With very few queries and a batch of one, it is faster to multiply the keys with one
    query at a time. The optimization barriers keep XLA from swapping the operands back.

    Example:
      ```python
      queries, keys = jnp.ones((1, 2, 4, 64)), jnp.ones((1, 2, 100, 64))
      scores = kvjax.codecs.plain_scores(queries, keys)  # [1, 2, 4, 100]
      ```
    """
    keys = merge_blocks(keys)
    if _sums_products(queries):
        return _summed_products(queries[:, :, :, None], keys[:, :, None], 4)
    keys = keys.astype(queries.dtype)
    if queries.shape[2] >= FEW_ROWS or queries.dtype.itemsize != 4 or not on_cpu():
        return product("bhqd,bhkd->bhqk", queries, keys)
    if queries.shape[0] == 1 and queries.shape[2] <= SINGLE_ROWS:
        rows = jnp.unstack(queries, axis=2)
        scores = [lax.optimization_barrier(product("bhkd,bhd->bhk", keys, row)) for row in rows]
        return jnp.stack(scores, axis=2)
    return lax.optimization_barrier(product("bhkd,bhqd->bhkq", keys, queries)).swapaxes(2, 3)


def plain_weighted_values(weights: Array, values: Array, present: Array | None = None) -> Array:
    """Multiply weights and decoded values, as ``Codec.weighted_values`` does for stored values.

    Args:
      weights: [batch, kv_heads, rows, tokens].
      values: [batch, kv_heads, tokens, head_dim], with or without an axis of blocks.
      present: a mask, broadcastable to ``values``, of the values that belong to tokens. The others
        may be NaN, and their weights must be exactly 0. None means all.

    Example:
      ```python
      weights, values = jnp.full((1, 2, 4, 100), 0.01), jnp.ones((1, 2, 100, 64))
      output = kvjax.codecs.plain_weighted_values(weights, values)  # [1, 2, 4, 64]
      ```
    """
    values = merge_blocks(values)
    weights = weights.astype(values.dtype)
    if _sums_products(weights):
        # Without the barrier the compiler would keep the weights in float32, which are twice the
        # bytes.
        weights = lax.optimization_barrier(weights)[..., None]
        # Replacing absent values by zeros would copy all values, so products with a weight of 0 are
        # excluded instead.
        where = None if present is None else weights != 0
        return _summed_products(weights, values[:, :, None], 3, where)
    if present is not None:
        values = jnp.where(present, values, 0)  # 0 * NaN is NaN
    return product("bhqk,bhkd->bhqd", weights, values)


def _sums_products(rows: Array) -> bool:
    """Return whether rows are few enough that a GPU should use ``_summed_products``."""
    return rows.shape[2] <= SUMMED_ROWS and current_target().platform == "gpu"


def _summed_products(a: Array, b: Array, axis: int, where: Array | None = None) -> Array:
    """Multiply two arrays and sum along an axis, in float32. Products where ``where`` is False are
    left out.

    The memory layout of the products is fixed. Otherwise XLA would transpose the numbers to sum
    along the last axis, which copies all of them.
    """
    products = a.astype(jnp.float32) * b.astype(jnp.float32)
    if where is not None:
        products = jnp.where(where, products, 0)
    layout = Layout(major_to_minor=tuple(range(products.ndim)))
    return jnp.sum(with_layout_constraint(products, layout), axis)


def long_scores(queries: Array, keys: Array) -> Array:
    """Do the work of ``plain_scores`` on a CPU, for many keys and few queries."""
    return _two_rows(plain_scores, queries, keys, queries.dtype)


def long_weighted_values(weights: Array, values: Array) -> Array:
    """Do the work of ``plain_weighted_values`` on a CPU, for many values and few rows of
    weights."""
    return _two_rows(plain_weighted_values, weights, values, values.dtype)


def _two_rows(
    product: Callable[[Array, Array], Array], rows: Array, numbers: Array, dtype: jnp.dtype
) -> Array:
    """Compute a product with at least two rows, by padding a single row. For a single row of 16-bit
    numbers, a CPU would convert all ``numbers`` to float32 in a copy."""
    if rows.shape[2] > 1 or dtype.itemsize >= 4:
        return product(rows, numbers)
    return product(jnp.pad(rows, ((0, 0), (0, 0), (0, 1), (0, 0))), numbers)[:, :, :1]


@dataclass(frozen=True)
class Raw(Codec):
    """Store numbers in ``dtype``. This is lossless if the model computes in the same dtype.

    ``dtype`` is the name of a floating-point dtype; None means the model's dtype. With ``as_bits``,
    the bits of 16-bit floats are stored in a ``uint16`` array. Values do not change, and ``decode``
    still returns ``dtype``. ``resolve`` sets ``as_bits`` on platforms whose compiler would
    otherwise convert the whole array to float32 at every write.

    Example:
      ```python
      codec = kvjax.codecs.Raw("bfloat16")
      policy = kvjax.CachePolicy(keys=codec, values=codec)
      cache = kvjax.init_cache(lm.config, policy, max_len=64)
      ```
    """

    dtype: str | None = None
    as_bits: bool = False

    blockwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype is None:
            return
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"unknown dtype {self.dtype!r}") from None
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"Raw stores floating-point numbers, got dtype {self.dtype!r}")
        object.__setattr__(self, "dtype", dtype.name)

    def resolve(self, model_dtype: str | None, platform: str) -> "Raw":
        """Return this codec with its dtype, and with the form in which bits are stored on
        ``platform``."""
        if self.dtype is None and model_dtype is None:
            raise ValueError(
                'the config has no dtype: name one, such as policy("static", dtype="float32")'
            )
        dtype = jnp.dtype(self.dtype or model_dtype)
        as_bits = dtype.itemsize == 2 and platform == "cpu" and _rewrites_16_bit_floats()
        return replace(self, dtype=dtype.name, as_bits=as_bits)

    def empty(self, shape: tuple[int, ...]) -> Array:
        return jnp.zeros(shape, self._stored_dtype)

    def encode(self, x: Array) -> Array:
        x = x.astype(self.dtype)
        return _to_bits(x) if self.as_bits else x

    def decode(self, store: Array) -> Array:
        return lax.bitcast_convert_type(store, jnp.dtype(self.dtype)) if self.as_bits else store

    @property
    def _stored_dtype(self) -> jnp.dtype:
        if self.dtype is None:
            raise ValueError("this Raw has no dtype yet: call resolve first")
        return jnp.dtype("uint16" if self.as_bits else self.dtype)


def _rewrites_16_bit_floats() -> bool:
    """Return whether the installed JAX's CPU compiler converts a whole 16-bit float array to
    float32 to update a slice."""
    return tuple(int(part) for part in jax.__version__.split(".")[:2]) < (0, 11)


def without_gradient(function: Callable[[Array], Array], reason: str) -> Callable[[Array], Array]:
    """Wrap ``function`` so that differentiating it raises ``ValueError(reason)``."""
    guarded = jax.custom_jvp(function)

    @guarded.defjvp
    def refuse(primals: tuple[Array], tangents: tuple[Array]) -> NoReturn:
        raise ValueError(reason)

    return guarded


_to_bits = without_gradient(
    lambda x: lax.bitcast_convert_type(x, jnp.uint16),
    "a 16-bit cache has no gradient on this CPU, because its bits are stored as integers: use "
    'policy("static", dtype="float32")',
)
