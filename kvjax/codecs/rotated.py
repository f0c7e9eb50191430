"""A random rotation of the channels, which spreads outliers over all of them."""

import functools
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from kvjax.codecs._scales import in_range
from kvjax.codecs._wrapping import Wrapping
from kvjax.codecs.codec import Store


@dataclass(frozen=True)
class Rotated(Wrapping):
    """Store numbers with their channels mixed by a randomised Hadamard transform (QuIP#, Tseng et
    al., arXiv:2402.04396; QuaRot, Ashkboos et al., arXiv:2404.00456).

    Queries are mixed the same way and the mixture of values is mixed back once, so that nothing is
    undone when the cache is read. Where head_dim is not a power of two, runs of the largest power
    of two that divides it are transformed. ``seed``: of the random signs.
    """

    seed: int = 0

    def empty(self, shape: tuple[int, ...]) -> Store:
        if shape[-1] % 2:
            raise ValueError(f"head_dim is {shape[-1]}: an odd number of channels has no rotation")
        return self.codec.empty(shape)

    def encode(self, x: Array) -> Store:
        return self.codec.encode(self._mixed(x.astype(jnp.float32)))

    def decode(self, store: Store) -> Array:
        numbers = self.codec.decode(store)
        wide = self._unmixed(numbers.astype(jnp.float32))
        return in_range(wide, self.dtype).astype(numbers.dtype)

    @property
    def turning(self) -> bool:
        return True

    def turn(self, queries: Array) -> Array:
        return super().turn(self._turned(queries))

    def unturn(self, mixed: Array) -> Array:
        return self._unmixed(super().unturn(mixed))

    def scores(self, queries: Array, store: Store) -> Array:
        """Queries, mixed the same way, times the keys as they are stored."""
        return self.codec.scores(self._turned(queries), store)

    def mix(self, weights: Array, store: Store) -> Array:
        """The mixture of values as they are stored, mixed back."""
        return self._unmixed(self.codec.mix(weights, store))

    def _turned(self, queries: Array) -> Array:
        return _times(queries, self._matrices(queries.shape[-1])[0])

    def _mixed(self, x: Array) -> Array:
        """The transform by sums and differences alone: rounded in one way, however many blocks
        are encoded together. The scale is a power of two, and the matrices make up for it."""
        signs, size, power = _settings(x.shape[-1], self.seed)
        shape, x = x.shape, x * signs.reshape(*[1] * (x.ndim - 1), -1)
        half = 1
        while half < size:
            x = x.reshape(*shape[:-1], -1, 2, half)
            x = jnp.stack([x[..., 0, :] + x[..., 1, :], x[..., 0, :] - x[..., 1, :]], axis=-2)
            half *= 2
        return x.reshape(shape) * 2.0**-power

    def _unmixed(self, x: Array) -> Array:
        return _times(x, self._matrices(x.shape[-1])[1])

    def _matrices(self, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
        """For rows of numbers: what queries, and what mixed numbers are multiplied by."""
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
    """Signs float32[head_dim], the channels that are transformed together, and the exponent of
    the scale."""
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), head_dim)
    size = head_dim & -head_dim
    return signs, size, (size.bit_length() - 1) // 2
