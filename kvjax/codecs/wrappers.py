"""Codecs that wrap another codec and change one of its steps."""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.codecs.codec import Codec, Raw, Store, product
from kvjax.codecs.scales import finite, in_range, mean, rounded, undifferentiable, with_dtypes
from kvjax.core import control_flow
from kvjax.core.pytree import exportable_namedtuple


@dataclass(frozen=True)
class CodecWrapper(Codec):
    """A codec that changes one step of ``codec`` and delegates the others. The class is
    abstract."""

    codec: Any

    blockwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.codec, type) or not hasattr(self.codec, "blockwise"):
            raise ValueError(f"{type(self).__name__} wraps a codec, not {self.codec!r}")

    @property
    def dtype(self) -> str | None:
        return self.codec.dtype

    @property
    def before_rotary(self) -> bool:
        return self.codec.before_rotary

    @property
    def joins_heads(self) -> bool:
        return self.codec.joins_heads

    def resolve(self, model_dtype: str | None, platform: str) -> Self:
        return replace(self, codec=self.codec.resolve(model_dtype, platform))

    def empty(self, shape: tuple[int, ...]) -> Store:
        return self.codec.empty(shape)

    def encode(self, x: Array) -> Store:
        return self.codec.encode(x)

    def decode(self, store: Store) -> Array:
        return self.codec.decode(store)

    def scores(self, queries: Array, store: Store) -> Array:
        return self.codec.scores(queries, store)

    def weighted_values(self, weights: Array, store: Store) -> Array:
        return self.codec.weighted_values(weights, store)


NORM = 0.7
"""The exponent of the error norm. An exponent below 1 gives little weight to outliers."""
FIRST_WEIGHT, GROWTH = 10.0, 1.01
"""The initial weight of the penalty on the split error (beta in HQQ), and the factor by which it
grows per step."""


@dataclass(frozen=True)
class HalfQuadratic(CodecWrapper):
    """Optimize the zero points of an ``Integer`` codec by half-quadratic splitting (HQQ, Badri and
    Shaji, 2023, https://mobiusml.github.io/hqq_blog/).

    The zero points minimize the error in a norm that gives little weight to outliers. Each step
    shrinks the current error (a proximal step). It subtracts the scaled codes and the shrunk error
    from a group's numbers, and takes the mean of the result as the group's zero point. The scales
    do not change. A group keeps its original zero point if the search does not reduce its error.

    ``steps`` is the number of steps.

    Example:
      ```python
      values = kvjax.codecs.HalfQuadratic(kvjax.codecs.Int2(zero_point=True))
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(values=values), max_len=64)
      ```
    """

    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not getattr(self.codec, "zero_point", False):
            raise ValueError(
                f"HalfQuadratic optimizes zero points, and {self.codec!r} has none: give it an "
                "integer codec with zero_point=True"
            )

    def encode(self, x: Array) -> Store:
        codec, dtype = self.codec, self.codec.scales.dtype
        x = codec.groups.split(undifferentiable(finite(x)))
        axes = codec.groups.axes(x.ndim)
        scale, start = codec.fit(x)

        def step(n: Array, zero: Array) -> Array:
            coded = scale * codec.codes(x, scale, zero)
            error = _shrink((x - coded) - zero, FIRST_WEIGHT * GROWTH ** n.astype(jnp.float32))
            return mean((x - coded) - error, axes)

        def loss(zero: Array) -> Array:
            error = (x - scale * codec.codes(x, scale, zero)) - zero
            return mean(jnp.abs(error) ** NORM, axes)

        zero = rounded(control_flow.fori_loop(0, self.steps, step, start), dtype, up=False)
        return codec.store(x, scale, jnp.where(loss(zero) < loss(start), zero, start))


def _shrink(x: Array, weight: Array) -> Array:
    """Apply the proximal operator of the norm, which moves ``x`` toward 0, and small numbers to
    0."""
    size = jnp.abs(x)
    pull = jnp.where(size > 0, size, 1.0) ** (NORM - 1) / weight
    return jnp.sign(x) * jnp.maximum(size - pull, 0.0)


PARTS = 8
"""The radix of the Hadamard butterfly: how many parts of the channels one pass combines. With more
parts, arrays are read and written fewer times, but a pass computes each number with more
additions."""


@dataclass(frozen=True)
class Rotated(CodecWrapper):
    """Apply a randomized Hadamard transform to the channels before ``codec`` encodes them (QuIP#,
    Tseng et al., arXiv:2402.04396; QuaRot, Ashkboos et al., arXiv:2404.00456).

    Attention applies the same transform to the queries, and the inverse transform to the weighted
    sum of values. Attention never transforms the stored numbers back. If head_dim is not a power of
    two, the transform applies to runs of channels whose length is the largest power of two that
    divides it. If head_dim is odd, channels are not mixed, and only some signs change.

    ``seed`` is the seed of the transform's random signs.

    Example:
      ```python
      keys = kvjax.codecs.Rotated(kvjax.codecs.Int4())
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=keys), max_len=64)
      ```
    """

    seed: int = 0

    def encode(self, x: Array) -> Store:
        return self.codec.encode(self._transform_exactly(x.astype(jnp.float32)))

    def decode(self, store: Store) -> Array:
        numbers = self.codec.decode(store)
        restored = self.inverse_transform(numbers.astype(jnp.float32))
        return in_range(restored, self.dtype).astype(numbers.dtype)

    def scores(self, queries: Array, store: Store) -> Array:
        """Multiply transformed queries and the stored (transformed) keys."""
        return self.codec.scores(self.transform(queries), store)

    def weighted_values(self, weights: Array, store: Store) -> Array:
        """Weight the stored (transformed) values, and apply the inverse transform to the result."""
        return self.inverse_transform(self.codec.weighted_values(weights, store))

    def transform(self, queries: Array) -> Array:
        """Transform queries [..., head_dim], so that they can be multiplied with stored keys."""
        return _times(queries, self._matrices(queries.shape[-1])[0])

    def inverse_transform(self, x: Array) -> Array:
        """Undo the transform of stored numbers, or of sums of them: [..., head_dim]."""
        return _times(x, self._matrices(x.shape[-1])[1])

    def _transform_exactly(self, x: Array) -> Array:
        """Apply the transform as a fast Walsh-Hadamard butterfly of sums and differences.

        So rounding does not depend on how many blocks are encoded together. The result is scaled by
        a power of two, which ``_matrices`` corrects.
        """
        signs, size, power = _settings(x.shape[-1], self.seed)
        shape, x = x.shape, x * signs.reshape(*[1] * (x.ndim - 1), -1)
        done = 1
        while done < size:
            parts = min(PARTS, size // done)
            x = x.reshape(*shape[:-1], -1, parts, done)
            x = jnp.stack(_butterfly([x[..., n, :] for n in range(parts)]), axis=-2)
            done *= parts
        return x.reshape(shape) * 2.0**-power

    def _matrices(self, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """Return two matrices [head_dim, head_dim]: one for queries, and one for stored numbers."""
        signs, size, power = _settings(head_dim, self.seed)
        hadamard = np.ones((1, 1), np.float32)
        for _ in range(size.bit_length() - 1):
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        whole = np.kron(np.eye(head_dim // size, dtype=np.float32), hadamard)
        scale = np.float32(2.0**power / size)
        return signs[:, None] * whole * scale, whole * signs * scale


def _butterfly(parts: list[Array]) -> list[Array]:
    """Apply a Hadamard transform to a list of 2, 4, 8 ... arrays of one shape."""
    half = 1
    while half < len(parts):
        pairs = [(parts[n & ~half], parts[n | half]) for n in range(len(parts))]
        parts = [a - b if n & half else a + b for n, (a, b) in enumerate(pairs)]
        half *= 2
    return parts


def _times(x: Array, matrix: np.ndarray) -> Array:
    return jnp.matmul(x, matrix.astype(x.dtype), precision="highest")


@functools.cache
def _settings(head_dim: int, seed: int) -> tuple[np.ndarray, int, int]:
    """Return the signs (float32[head_dim]), the number of channels that are transformed together,
    and the exponent of the scale."""
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), head_dim)
    size = head_dim & -head_dim
    return signs, size, (size.bit_length() - 1) // 2


@dataclass(frozen=True)
class Unrotated(CodecWrapper):
    """Store keys before the rotary embedding is applied (KVQuant, Hooper et al., arXiv:2401.18079).

    Before rotation, the numbers of a channel are closer together, and a bias of the key projection
    is constant. Attention rotates the keys to their positions each time it reads a block.

    Use this codec for keys. Values have no positions, so for values it changes nothing.

    Example:
      ```python
      keys = kvjax.codecs.Unrotated(kvjax.codecs.Int4())
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=keys), max_len=64)
      ```
    """

    @property
    def before_rotary(self) -> bool:
        """Always True, because ``encode`` receives unrotated keys."""
        return True

    # Stored keys must be decoded and rotated before the product, so ``codec.scores`` can't be used.
    scores = Codec.scores


@exportable_namedtuple
class CenteredStore(NamedTuple):
    """The store of a ``Centered``: the 16-bit ``mean`` of each channel over a block's tokens, and
    ``rest``, the encoded deviations from the mean."""

    mean: Array
    rest: Store


@dataclass(frozen=True)
class Centered(CodecWrapper):
    """Store the mean of each channel over a block in 16 bits, and the deviations from it with
    ``codec``. SageAttention smooths keys in a similar way (Zhang et al., arXiv:2410.02367).

    Use this codec for keys with large biases (Qwen 2). Without this codec, if a group spans several
    channels, large biases of a few of these channels use up the range of the group's codes. The
    codec does not need to know the bias, because the bias is part of the mean.

    Products with the means are computed once per block, not once per token.

    Example:
      ```python
      keys = kvjax.codecs.Centered(kvjax.codecs.Int4())
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=keys), max_len=64)
      ```
    """

    means: Raw | None = None

    def resolve(self, model_dtype: str | None, platform: str) -> "Centered":
        codec = self.codec.resolve(model_dtype, platform)
        return Centered(codec, with_dtypes(codec.dtype, self.means, None, platform)[1])

    def empty(self, shape: tuple[int, ...]) -> CenteredStore:
        means = self._means.empty((*shape[:-2], 1, shape[-1]))
        return CenteredStore(means, self.codec.empty(shape))

    def encode(self, x: Array) -> CenteredStore:
        """Encode the means, and then the deviations from the encoded means."""
        x = finite(x)
        largest = float(jnp.finfo(self._means.dtype).max)
        means = self._means.encode(jnp.clip(mean(x, (x.ndim - 2,)), -largest, largest))
        rest = x - self._means.decode(means).astype(jnp.float32)
        return CenteredStore(means, self.codec.encode(rest))

    def decode(self, store: CenteredStore) -> Array:
        rest = self.codec.decode(store.rest)
        numbers = rest.astype(jnp.float32) + self.decode_mean(store)
        return in_range(numbers, self.dtype).astype(rest.dtype)

    def decode_mean(self, store: CenteredStore) -> Array:
        """Decode the means to float32."""
        return self._means.decode(store.mean).astype(jnp.float32)

    def scores(self, queries: Array, store: CenteredStore) -> Array:
        """Multiply queries with the deviations, and add the product of the queries with each
        block's mean."""
        scores = self.codec.scores(queries, store.rest)
        mean = self.decode_mean(store)[..., 0, :].astype(queries.dtype)
        shared = product("bhqd,bhnd->bhqn", queries, mean)
        return scores + jnp.repeat(shared, scores.shape[-1] // shared.shape[-1], axis=-1)

    def weighted_values(self, weights: Array, store: CenteredStore) -> Array:
        """Weight the deviations, and add each block's mean times the sum of the block's weights."""
        mean = self.decode_mean(store)[..., 0, :]
        blocks = weights.reshape(*weights.shape[:-1], mean.shape[2], -1).sum(-1)
        shared = product("bhqn,bhnd->bhqd", blocks, mean)
        return shared + self.codec.weighted_values(weights, store.rest)

    @property
    def _means(self) -> Raw:
        if self.means is None:
            raise ValueError(f"{self} has no dtype for its means yet: call resolve first")
        return self.means
