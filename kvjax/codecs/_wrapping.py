"""What a codec that wraps another leaves to it."""

from dataclasses import dataclass, replace
from typing import Any, Self

from jaxtyping import Array

from kvjax.codecs.codec import Codec, Store


@dataclass(frozen=True)
class Wrapping:
    """A codec that changes something about ``codec``, and leaves the rest to it. Abstract."""

    codec: Any

    def __post_init__(self) -> None:
        if isinstance(self.codec, type) or not hasattr(self.codec, "blockwise"):
            raise ValueError(f"{type(self).__name__} wraps a codec, not {self.codec!r}")

    @property
    def inner(self) -> Codec:
        """The codec that is wrapped."""
        return self.codec

    @property
    def dtype(self) -> str | None:
        """What ``decode`` gives."""
        return self.inner.dtype

    @property
    def blockwise(self) -> bool:
        """Whether whole blocks are encoded, behind a tail."""
        return True

    @property
    def before_rotary(self) -> bool:
        """Whether keys are stored unrotated."""
        return self.inner.before_rotary

    @property
    def joins_heads(self) -> bool:
        """Whether heads share scales."""
        return self.inner.joins_heads

    def resolve(self, model_dtype: str | None, platform: str) -> Self:
        """Fix what the wrapped codec left open."""
        return replace(self, codec=self.inner.resolve(model_dtype, platform))

    def empty(self, shape: tuple[int, ...]) -> Store:
        """The wrapped codec's."""
        return self.inner.empty(shape)

    def encode(self, x: Array) -> Store:
        """The wrapped codec's."""
        return self.inner.encode(x)

    def decode(self, store: Store) -> Array:
        """The wrapped codec's."""
        return self.inner.decode(store)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """The wrapped codec's."""
        return self.inner.nbytes(shape)

    def scores(self, queries: Array, store: Store) -> Array:
        """The wrapped codec's."""
        return self.inner.scores(queries, store)

    def mix(self, weights: Array, store: Store) -> Array:
        """The wrapped codec's."""
        return self.inner.mix(weights, store)
