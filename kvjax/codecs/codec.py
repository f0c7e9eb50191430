"""What a codec answers: how numbers are stored, and how attention reads them."""

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array

from kvjax.core.pytree import tree_bytes
from kvjax.core.target import current_target, on_cpu

FEW = 64
"""Rows below which a CPU multiplies float32 keys faster as the first factor."""
SINGLY = 4
"""Rows up to which one text's are multiplied one by one."""
SUMMED = 16
"""Rows up to which a GPU multiplies and sums in one program, which reads keys and values as they
are stored. Its libraries of matrix products are given copies of them, decoded."""

Store = Any
"""A pytree of arrays [batch, ...]: what a codec keeps, units or blocks of tokens on axis 2."""


class Codec(Protocol):
    """A codec. Frozen, hashable, and static. ``class Mine(Codec)`` has answers here for the last
    three methods, and for the last two of what may be fields, properties or ``ClassVar``:

    ``dtype``: what ``decode`` gives, None until ``resolve``. ``blockwise``: numbers of a block
    share scales, so that whole blocks are encoded, and stand behind a tail; without it every
    number stands alone. ``before_rotary``: keys are stored unrotated and turned when they are read.
    ``joins_heads``: heads share scales, which have a 1 in their place.

    Shapes: numbers of a blockwise codec are [batch, kv_heads, blocks, block, head_dim]; their
    store's leaves have the blocks on axis 2, and the batch on axis 0.
    """

    if TYPE_CHECKING:  # as properties they are read-only, so that fields of frozen classes will do

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
        """Fix what was left open, from the model's dtype and the platform."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...]) -> Store:
        """A zeroed store for numbers of ``shape``; a ``ValueError`` where it can't hold them."""

    @abstractmethod
    def encode(self, x: Array) -> Store:
        """Numbers to their stored form."""

    @abstractmethod
    def decode(self, store: Store) -> Array:
        """The stored form back to numbers in ``dtype``."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the store of numbers of ``shape``."""
        return tree_bytes(jax.eval_shape(lambda: self.empty(shape)))

    def scores(self, queries: Array, store: Store) -> Array:
        """Queries [batch, kv_heads, rows, head_dim] times stored keys, which need not be decoded
        for it: float32[batch, kv_heads, rows, tokens]."""
        return plain_scores(queries, self.decode(store))

    def mix(self, weights: Array, store: Store) -> Array:
        """Weights [batch, kv_heads, rows, tokens] times stored values:
        float32[batch, kv_heads, rows, head_dim]."""
        return plain_mix(weights, self.decode(store))


def tokens_of(numbers: Array) -> Array:
    """[batch, kv_heads, blocks, block, head_dim], or without blocks, as [batch, kv_heads, tokens,
    head_dim]."""
    return numbers.reshape(*numbers.shape[:2], -1, numbers.shape[-1])


def product(form: str, a: Array, b: Array) -> Array:
    """``einsum``, summed in float32."""
    return jnp.einsum(form, a, b, preferred_element_type=jnp.float32)


def plain_scores(queries: Array, keys: Array) -> Array:
    """Scores with keys as numbers: see ``Codec.scores``. With few queries, CPUs multiply float32
    keys many times faster as the first factor, and a text's very few queries one by one; without
    the barrier the compiler would exchange the factors again."""
    keys = tokens_of(keys)
    if _is_summed(queries):
        return _summed(queries[:, :, :, None], keys[:, :, None], 4)
    keys = keys.astype(queries.dtype)
    if queries.shape[2] >= FEW or queries.dtype.itemsize != 4 or not on_cpu():
        return product("bhqd,bhkd->bhqk", queries, keys)
    if queries.shape[0] == 1 and queries.shape[2] <= SINGLY:
        rows = jnp.unstack(queries, axis=2)
        alone = [lax.optimization_barrier(product("bhkd,bhd->bhk", keys, row)) for row in rows]
        return jnp.stack(alone, axis=2)
    return lax.optimization_barrier(product("bhkd,bhqd->bhkq", keys, queries)).swapaxes(2, 3)


def plain_mix(weights: Array, values: Array, present: Array | None = None) -> Array:
    """A mixture of values as numbers: see ``Codec.mix``.

    ``present``: bool, of the values' shape or broadcast to it: which of them hold tokens. The
    others may be NaN, and their weights must be exactly 0: on GPUs products of few rows go by the
    weights alone. None: all hold tokens.
    """
    values = tokens_of(values)
    weights = weights.astype(values.dtype)
    if _is_summed(weights):
        # Without the barrier the compiler would keep them in float32, twice the bytes.
        weights = lax.optimization_barrier(weights)[..., None]
        # Zeros in the place of absent values would be a copy of all values.
        where = None if present is None else weights != 0
        return _summed(weights, values[:, :, None], 3, where)
    if present is not None:
        values = jnp.where(present, values, 0)  # no weight makes 0 of NaN
    return product("bhqk,bhkd->bhqd", weights, values)


def _is_summed(rows: Array) -> bool:
    """Whether rows are so few that a GPU multiplies them by ``_summed``."""
    return rows.shape[2] <= SUMMED and current_target().platform == "gpu"


def _summed(a: Array, b: Array, axis: int, where: Array | None = None) -> Array:
    """Products of numbers, summed along an axis in float32; 0 but ``where``. The order of the
    products is pinned: a compiler would have the numbers turned round to sum along the last axis,
    in a copy of all."""
    products = a.astype(jnp.float32) * b.astype(jnp.float32)
    if where is not None:
        products = jnp.where(where, products, 0)
    order = Layout(major_to_minor=tuple(range(products.ndim)))
    return jnp.sum(with_layout_constraint(products, order), axis)


def long_scores(queries: Array, keys: Array) -> Array:
    """``plain_scores`` with many keys and few queries, for CPUs."""
    return _with_company(plain_scores, queries, keys, queries.dtype)


def long_mix(weights: Array, values: Array) -> Array:
    """``plain_mix`` with many values and few rows of weights, for CPUs."""
    return _with_company(plain_mix, weights, values, values.dtype)


def _with_company(product: Any, rows: Array, numbers: Array, dtype: Any) -> Array:
    """A product: for one row of 16-bit numbers alone a CPU would widen all of them in a copy."""
    if rows.shape[2] > 1 or dtype.itemsize >= 4:
        return product(rows, numbers)
    return product(jnp.pad(rows, ((0, 0), (0, 0), (0, 1), (0, 0))), numbers)[:, :, :1]
