"""What a codec that wraps another leaves to it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxtyping import Array

from kvjax.codecs._tiles import InTiles, in_tiles
from kvjax.codecs.codec import Store


@dataclass(frozen=True)
class Wrapping(InTiles):
    """A codec that changes something about ``codec``, and leaves the rest to it. Abstract."""

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

    @property
    def parts(self) -> int:
        return in_tiles(self.codec).parts

    @property
    def core(self) -> Any:
        return in_tiles(self.codec).core

    @property
    def turning(self) -> bool:
        return in_tiles(self.codec).turning

    def turn(self, queries: Array) -> Array:
        return in_tiles(self.codec).turn(queries)

    def unturn(self, mixed: Array) -> Array:
        return in_tiles(self.codec).unturn(mixed)

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

    def mix(self, weights: Array, store: Store) -> Array:
        return self.codec.mix(weights, store)
