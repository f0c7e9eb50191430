"""A random Hadamard transform of the channels, which spreads outliers over all of them."""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.codecs.codec import Store
from kvjax.codecs.scales import in_range
from kvjax.codecs.wrapper import CodecWrapper


@dataclass(frozen=True)
class Rotated(CodecWrapper):
    """Apply a randomized Hadamard transform to the channels before ``codec`` encodes them (QuIP#,
    Tseng et al., arXiv:2402.04396; QuaRot, Ashkboos et al., arXiv:2404.00456).

    Attention applies the same transform to the queries, and the inverse transform to the weighted
    sum of values. It never transforms the stored numbers back. If head_dim is not a power of two,
    the transform applies to runs of channels whose length is the largest power of two that divides
    it.

    ``seed``: the seed of the random signs.
    """

    seed: int = 0

    def empty(self, shape: tuple[int, ...]) -> Store:
        if shape[-1] % 2:
            raise ValueError(f"head_dim={shape[-1]} must be even for a Hadamard transform")
        return self.codec.empty(shape)

    def encode(self, x: Array) -> Store:
        return self.codec.encode(self._transform_exactly(x.astype(jnp.float32)))

    def decode(self, store: Store) -> Array:
        numbers = self.codec.decode(store)
        restored = self.inverse_transform(numbers.astype(jnp.float32))
        return in_range(restored, self.dtype).astype(numbers.dtype)

    def scores(self, queries: Array, store: Store) -> Array:
        """Transformed queries times the keys as stored."""
        return self.codec.scores(self.transform(queries), store)

    def weighted_values(self, weights: Array, store: Store) -> Array:
        """The inverse transform of the weighted values as stored."""
        return self.inverse_transform(self.codec.weighted_values(weights, store))

    def transform(self, queries: Array) -> Array:
        """Queries [..., head_dim], transformed to be multiplied with stored keys."""
        return _times(queries, self._matrices(queries.shape[-1])[0])

    def inverse_transform(self, x: Array) -> Array:
        """Undo the transform of stored numbers, or of sums of them: [..., head_dim]."""
        return _times(x, self._matrices(x.shape[-1])[1])

    def _transform_exactly(self, x: Array) -> Array:
        """The transform by a fast Walsh-Hadamard butterfly of sums and differences.

        Its rounding does not depend on how many blocks are encoded together. It scales by a power
        of two, and the matrices correct for that.
        """
        signs, size, power = _settings(x.shape[-1], self.seed)
        shape, x = x.shape, x * signs.reshape(*[1] * (x.ndim - 1), -1)
        half = 1
        while half < size:
            x = x.reshape(*shape[:-1], -1, 2, half)
            x = jnp.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], axis=-2)
            half *= 2
        return x.reshape(shape) * 2.0**-power

    def _matrices(self, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """The matrices [head_dim, head_dim] that multiply queries, and stored numbers."""
        signs, size, power = _settings(head_dim, self.seed)
        hadamard = np.ones((1, 1), np.float32)
        for _ in range(size.bit_length() - 1):
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        whole = np.kron(np.eye(head_dim // size, dtype=np.float32), hadamard)
        scale = np.float32(2.0**power / size)
        return signs[:, None] * whole * scale, whole * signs * scale


def _times(x: Array, matrix: np.ndarray) -> Array:
    return jnp.matmul(x, matrix.astype(x.dtype), precision="highest")


@functools.cache
def _settings(head_dim: int, seed: int) -> tuple[np.ndarray, int, int]:
    """The signs float32[head_dim], the number of channels that are transformed together, and the
    exponent of the scale."""
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), head_dim)
    size = head_dim & -head_dim
    return signs, size, (size.bit_length() - 1) // 2
