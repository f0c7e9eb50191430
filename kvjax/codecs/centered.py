"""The mean of each channel taken out first."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs._scales import finite, in_range, with_dtypes
from kvjax.codecs._scales import mean as mean_of
from kvjax.codecs._tiles import Tile, each_token, in_tiles
from kvjax.codecs._wrapping import Wrapping
from kvjax.codecs.codec import Store, product
from kvjax.codecs.raw import Raw
from kvjax.core.pytree import exportable_namedtuple


@exportable_namedtuple
class CenteredStore(NamedTuple):
    """A store: the ``mean`` of each channel over a block's tokens, in 16 bits, and the rest."""

    mean: Array
    rest: Store


@dataclass(frozen=True)
class Centered(Wrapping):
    """Store each channel's mean over a block in 16 bits, and what is left of the numbers as
    ``codec`` does: for keys with large biases (Qwen 2), which would take up all the codes of a
    group that spans channels. Their bias is part of the mean, whatever the model calls it.

    Products with the mean are made once a block, not once a token.
    """

    means: Raw | None = None

    def resolve(self, model_dtype: str | None, platform: str) -> "Centered":
        codec = self.codec.resolve(model_dtype, platform)
        return Centered(codec, with_dtypes(codec.dtype, self.means, None, platform)[1])

    def empty(self, shape: tuple[int, ...]) -> CenteredStore:
        means = self._means.empty((*shape[:-2], 1, shape[-1]))
        return CenteredStore(means, self.codec.empty(shape))

    def encode(self, x: Array) -> CenteredStore:
        """Means, and the wrapped codec's store of what is left."""
        x = finite(x)
        largest = float(jnp.finfo(self._means.dtype).max)
        mean = self._means.encode(jnp.clip(mean_of(x, (x.ndim - 2,)), -largest, largest))
        rest = x - self._means.decode(mean).astype(jnp.float32)
        return CenteredStore(mean, self.codec.encode(rest))

    def decode(self, store: CenteredStore) -> Array:
        rest = self.codec.decode(store.rest)
        numbers = rest.astype(jnp.float32) + self._wide(store)
        return in_range(numbers, self.dtype).astype(rest.dtype)

    def scores(self, queries: Array, store: CenteredStore) -> Array:
        """Scores with what is left, and with a block's mean for all of its tokens."""
        scores = self.codec.scores(queries, store.rest)
        mean = self._wide(store)[..., 0, :].astype(queries.dtype)
        shared = product("bhqd,bhnd->bhqn", queries, mean)
        return scores + jnp.repeat(shared, scores.shape[-1] // shared.shape[-1], axis=-1)

    def mix(self, weights: Array, store: CenteredStore) -> Array:
        """What is left, mixed, and each block's mean times its weights."""
        mean = self._wide(store)[..., 0, :]
        blocks = weights.reshape(*weights.shape[:-1], mean.shape[2], -1).sum(-1)
        return product("bhqn,bhnd->bhqd", blocks, mean) + self.codec.mix(weights, store.rest)

    @property
    def core(self) -> Any:
        """Itself: means are not turned."""
        return self

    def tiled(self, block: int, parts: int, head_dim: int) -> bool:
        inner = in_tiles(self.codec)
        return inner.core is self.codec and inner.tiled(block, parts, head_dim)

    def tiles(self, store: CenteredStore, orders: Any, part: int, parts: int) -> list[Tile]:
        """What is left, and each block's mean."""
        rest = self.codec.tiles(store.rest, orders.rest, part, parts)
        _, tokens, lanes = rest[0].numbers.shape
        mean = self._means.decode(store.mean).astype(jnp.float32)
        return [*rest, Tile(each_token(mean, tokens, lanes), rest[0].side)]

    @property
    def turning(self) -> bool:
        return False

    def turn(self, queries: Array) -> Array:
        return queries

    def unturn(self, mixed: Array) -> Array:
        return mixed

    def _wide(self, store: CenteredStore) -> Array:
        return self._means.decode(store.mean).astype(jnp.float32)

    @property
    def _means(self) -> Raw:
        if self.means is None:
            raise ValueError(f"{self} has no dtype for its means yet: resolve gives it one")
        return self.means
