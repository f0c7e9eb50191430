"""The mean of each channel, subtracted before quantization."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs.codec import Store, product
from kvjax.codecs.raw import Raw
from kvjax.codecs.scales import finite, in_range, with_dtypes
from kvjax.codecs.scales import mean as mean_of
from kvjax.codecs.wrapper import CodecWrapper
from kvjax.core.pytree import exportable_namedtuple


@exportable_namedtuple
class CenteredStore(NamedTuple):
    """A store: the 16-bit ``mean`` of each channel over a block's tokens, and the ``rest``."""

    mean: Array
    rest: Store


@dataclass(frozen=True)
class Centered(CodecWrapper):
    """Store the mean of each channel over a block in 16 bits, and the deviations with ``codec``,
    similar to how SageAttention smooths keys (Zhang et al., arXiv:2410.02367).

    Use it for keys with large biases (Qwen 2). Without it, the bias would take up most of the codes
    of a group that spans channels. The method needs no knowledge of the model, because a bias is
    part of the mean.

    Products with the means are computed once per block, not once per token.
    """

    means: Raw | None = None

    def resolve(self, model_dtype: str | None, platform: str) -> "Centered":
        codec = self.codec.resolve(model_dtype, platform)
        return Centered(codec, with_dtypes(codec.dtype, self.means, None, platform)[1])

    def empty(self, shape: tuple[int, ...]) -> CenteredStore:
        means = self._means.empty((*shape[:-2], 1, shape[-1]))
        return CenteredStore(means, self.codec.empty(shape))

    def encode(self, x: Array) -> CenteredStore:
        """Encode the means, and the deviations from the means as stored."""
        x = finite(x)
        largest = float(jnp.finfo(self._means.dtype).max)
        mean = self._means.encode(jnp.clip(mean_of(x, (x.ndim - 2,)), -largest, largest))
        rest = x - self._means.decode(mean).astype(jnp.float32)
        return CenteredStore(mean, self.codec.encode(rest))

    def decode(self, store: CenteredStore) -> Array:
        rest = self.codec.decode(store.rest)
        numbers = rest.astype(jnp.float32) + self.decode_mean(store)
        return in_range(numbers, self.dtype).astype(rest.dtype)

    def decode_mean(self, store: CenteredStore) -> Array:
        """The means in float32."""
        return self._means.decode(store.mean).astype(jnp.float32)

    def scores(self, queries: Array, store: CenteredStore) -> Array:
        """Scores with the deviations, plus each block's score with its mean."""
        scores = self.codec.scores(queries, store.rest)
        mean = self.decode_mean(store)[..., 0, :].astype(queries.dtype)
        shared = product("bhqd,bhnd->bhqn", queries, mean)
        return scores + jnp.repeat(shared, scores.shape[-1] // shared.shape[-1], axis=-1)

    def weighted_values(self, weights: Array, store: CenteredStore) -> Array:
        """The weighted deviations, plus each block's mean times the sum of its weights."""
        mean = self.decode_mean(store)[..., 0, :]
        blocks = weights.reshape(*weights.shape[:-1], mean.shape[2], -1).sum(-1)
        shared = product("bhqn,bhnd->bhqd", blocks, mean)
        return shared + self.codec.weighted_values(weights, store.rest)

    @property
    def _means(self) -> Raw:
        if self.means is None:
            raise ValueError(f"{self} has no dtype for its means yet: call resolve first")
        return self.means
