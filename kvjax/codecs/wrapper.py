"""The base of codecs that wrap another codec."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxtyping import Array

from kvjax.codecs.codec import Codec, Store


@dataclass(frozen=True)
class CodecWrapper(Codec):
    """A codec that changes one step of ``codec`` and delegates the rest. Abstract."""

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
