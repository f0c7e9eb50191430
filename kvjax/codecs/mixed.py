"""Mixed precision: more bits for a block's large channels than for its small ones."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs.codec import Codec, Store, plain_scores, product
from kvjax.codecs.integer import WIDTHS, Integer
from kvjax.codecs.scales import finite, in_range, undifferentiable
from kvjax.core.pytree import exportable_namedtuple
from kvjax.core.target import on_cpu

FEW_ROWS = 16
"""Up to this many query rows, a CPU reorders the queries for each block instead of the keys."""


@exportable_namedtuple
class Mixed(NamedTuple):
    """The store of a ``MixedPrecision``.

    ``order`` has the channels of each block from the largest to the smallest, as unsigned integers
    [batch, kv_heads, blocks, 1, head_dim]. In this order, ``high`` is the store of the first half
    of the channels, and ``low`` is the store of the second half.
    """

    order: Array
    high: Store
    low: Store


@dataclass(frozen=True)
class MixedPrecision(Codec):
    """Encode the larger half of a block's channels with one bit more than ``codec`` has, and the
    other half with one bit less.

    The size of a channel is its range over the block's tokens, times its largest magnitude.
    Channels that are large in keys are also large in queries (Jin et al., arXiv:2502.01563), so the
    errors of these channels count most. Every block chooses its own channels, as in Kitty (Xia et
    al., arXiv:2511.18643), which adds bits to a few channels and removes none.

    Use this codec for keys. Attention kernels do not support it, so GPUs and TPUs decode the keys
    first.

    Attributes:
      codec: an ``Integer`` of 2, 3 or 4 bits with scales per channel.

    Example:
      ```python
      keys = kvjax.codecs.MixedPrecision(kvjax.codecs.Int2("channel", zero_point=True))
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=keys), max_len=64)
      ```
    """

    codec: Any

    blockwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Integer) or self.codec.per != "channel":
            raise ValueError(
                f"MixedPrecision needs an Integer with scales per channel, not {self.codec!r}"
            )
        if not {self.codec.bits - 1, self.codec.bits + 1} <= set(WIDTHS):
            raise ValueError(
                f"MixedPrecision needs codes of 2, 3 or 4 bits, not of {self.codec.bits}"
            )

    @property
    def dtype(self) -> str | None:
        return self.codec.dtype

    @property
    def high(self) -> Integer:
        """The codec of the large channels."""
        return replace(self.codec, bits=self.codec.bits + 1)

    @property
    def low(self) -> Integer:
        """The codec of the other channels."""
        return replace(self.codec, bits=self.codec.bits - 1)

    def resolve(self, model_dtype: str | None, platform: str) -> Self:
        return replace(self, codec=self.codec.resolve(model_dtype, platform))

    def empty(self, shape: tuple[int, ...]) -> Mixed:
        if shape[-1] % 2:
            raise ValueError(f"head_dim={shape[-1]} must be even for two equal sets of channels")
        half = (*shape[:-1], shape[-1] // 2)
        order = jnp.zeros((*shape[:-2], 1, shape[-1]), _index_dtype(shape[-1]))
        return Mixed(order, self.high.empty(half), self.low.empty(half))

    def encode(self, x: Array) -> Mixed:
        """Encode blocks [..., block, head_dim]. NaN is encoded as 0."""
        x = undifferentiable(finite(x))
        half = x.shape[-1] // 2
        # No operation here rounds differently if XLA fuses it with others, so the order does not
        # depend on how the sequence was divided. The quotients can't overflow.
        size = jnp.max(jnp.abs(x), -2, keepdims=True)
        span = jnp.max(x, -2, keepdims=True) - jnp.min(x, -2, keepdims=True)
        most = jnp.max(size, -1, keepdims=True)
        most = jnp.where(most == 0, 1.0, most)
        order = jnp.argsort(-((span / most) * (size / most)), axis=-1)
        ordered = jnp.take_along_axis(x, order, axis=-1)
        high, low = self.high.encode(ordered[..., :half]), self.low.encode(ordered[..., half:])
        return Mixed(order.astype(_index_dtype(x.shape[-1])), high, low)

    def decode(self, store: Mixed) -> Array:
        return self._to_float32(store).astype(self.dtype)

    def scores(self, queries: Array, store: Mixed) -> Array:
        if not on_cpu() or queries.shape[2] > FEW_ROWS:
            return plain_scores(queries, self._to_float32(store))
        numbers = self._stored_numbers(store).astype(queries.dtype)
        order = store.order.astype(jnp.int32)
        rows = jnp.take_along_axis(queries[:, :, None], order, axis=-1)
        scores = product("bhntd,bhnrd->bhrnt", numbers, rows)
        return scores.reshape(*scores.shape[:3], -1)

    def _to_float32(self, store: Mixed) -> Array:
        order = store.order.astype(jnp.int32)
        channels = jnp.broadcast_to(jnp.arange(order.shape[-1], dtype=jnp.int32), order.shape)
        place = jnp.put_along_axis(jnp.zeros_like(order), order, channels, axis=-1, inplace=False)
        restored = jnp.take_along_axis(self._stored_numbers(store), place, axis=-1)
        return in_range(restored, self.dtype)

    def _stored_numbers(self, store: Mixed) -> Array:
        """The numbers in float32, in the order of the store."""
        high, low = self.high.to_float32(store.high), self.low.to_float32(store.low)
        return jnp.concatenate([high, low], axis=-1)


def _index_dtype(head_dim: int) -> jnp.dtype:
    """The dtype of channel numbers."""
    return jnp.dtype("uint8" if head_dim <= 256 else "uint16")
