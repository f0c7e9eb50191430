"""What codecs with scales have in common: groups, 16 bits, and what they decode to."""

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array

from kvjax.codecs._groups import Groups
from kvjax.codecs._tiles import InTiles, Tile, each_token
from kvjax.codecs.codec import Store, plain_scores
from kvjax.codecs.raw import Raw, without_gradient


class WithScales(InTiles):
    """A codec of blocks whose groups of numbers have scales in 16 bits. Abstract: the fields are
    the codec's own, and it says what its store is in float32."""

    per: str
    group: int | None
    scales: Raw | None
    dtype: str | None

    blockwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        Groups(self.per, self.group)
        if self.scales is not None and self.scales.dtype not in (None, "float16", "bfloat16"):
            raise ValueError(f"scales have 16 bits, not those of {self.scales.dtype}")

    @property
    def groups(self) -> Groups:
        """Which numbers share a scale."""
        return Groups(self.per, self.group)

    @property
    def joins_heads(self) -> bool:
        return self.per == "tensor"

    def resolve(self, model_dtype: str | None, platform: str) -> Self:
        dtype, scales = with_dtypes(self.dtype, self.scales, model_dtype, platform)
        changed: Any = self
        return replace(changed, scales=scales, dtype=dtype)

    @abstractmethod
    def wide(self, store: Any) -> Array:
        """Numbers in float32."""

    def decode(self, store: Store) -> Array:
        return self.wide(store).astype(self.dtype)

    def scores(self, queries: Array, store: Store) -> Array:
        return plain_scores(queries, self.wide(store))

    def each(self, scale: Array) -> Array:
        """A store's scales, or zero points, in float32, for split numbers."""
        return self.groups.unpack(self._scales.decode(scale).astype(jnp.float32))

    def tiled(self, block: int, parts: int, head_dim: int) -> bool:
        if self.per not in ("token", "channel"):
            return False
        tokens, channels = self.groups.sizes(block, head_dim)
        return channels > 1 if self.per == "token" else tokens * parts >= block

    def scaled(
        self, numbers: Array, side: int, store: Any, orders: Any, part: int, parts: int
    ) -> Tile:
        """A tile of a run's ``numbers`` under a store's ``scale``, and its ``zero``, if it has one.
        Scales of channels are undone, those of tokens are left to who multiplies."""
        zero, zero_order = getattr(store, "zero", None), getattr(orders, "zero", None)
        if self.per == "token":

            def some(x: Array, order: Any) -> Array:
                return self._scales.decode(order.part(x, part)).astype(jnp.float32)

            offset = None if zero is None else some(zero, zero_order)
            return Tile(numbers, side, some(store.scale, orders.scale), offset)
        _, tokens, lanes = numbers.shape

        def each(x: Array, order: Any) -> Array:
            rows = order.of_each(x, part, parts)
            return each_token(self._scales.decode(rows).astype(jnp.float32), tokens, lanes)

        numbers = numbers * each(store.scale, orders.scale)
        return Tile(numbers if zero is None else numbers + each(zero, zero_order), side)

    @property
    def _scales(self) -> Raw:
        if self.scales is None:
            raise ValueError(f"{self} has no dtype for its scales yet: resolve gives it one")
        return self.scales


undifferentiable = without_gradient(
    lambda x: x,
    "no gradient passes through a quantized cache (its codes are whole numbers): use a raw one to "
    "differentiate",
)
"""``x`` as it is."""


def in_range(x: Array, dtype: str | None) -> Array:
    """float32 numbers that ``dtype`` has too: scales, rounded up, may lead beyond float16's."""
    if dtype != "float16":
        return x
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(x, -largest, largest)


def with_dtypes(
    dtype: str | None, scales: Raw | None, model_dtype: str | None, platform: str
) -> tuple[str | None, Raw]:
    """The dtype that is decoded to, and the codec of scales: float16 beside float16, else bfloat16,
    which has float32's range."""
    fixed = Raw(dtype).resolve(model_dtype, platform).dtype
    usual = "float16" if fixed == "float16" else "bfloat16"
    return fixed, (scales or Raw()).resolve(usual, platform)
