"""What codecs with scales have in common: groups of numbers that share one, its 16 bits, and what
stores decode to."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs._tiles import InTiles, Tile, each_token
from kvjax.codecs.codec import Store, plain_scores
from kvjax.codecs.raw import Raw, without_gradient
from kvjax.core.validation import as_int

PER = ("token", "channel", "head", "tensor")
DEFAULT_GROUP = 64
"""Numbers that share a scale, at most, where the user does not say."""


@dataclass(frozen=True)
class Groups:
    """Which numbers of a block [block, head_dim] share a scale.

    ``per``: ``"token"``: ``size`` channels of one token. ``"channel"``: ``size`` tokens of one
    channel. ``"head"``: all of a head's. ``"tensor"``: those of all heads together, a row.
    ``size``: None is all, up to 64.
    """

    per: str
    size: int | None = None

    def __post_init__(self) -> None:
        if self.per not in PER:
            raise ValueError(f"per={self.per!r}: scales are per {', '.join(PER)}")
        if self.size is not None:
            object.__setattr__(self, "size", as_int("group", self.size, 1))
            if self.per in ("head", "tensor"):
                raise ValueError(f"group={self.size}: a scale per {self.per} has no groups")

    def sizes(self, block: int, head_dim: int) -> tuple[int, int]:
        """Tokens and channels of a group.

        Raises:
          ValueError: if the size is larger than what it divides, or does not divide it.
        """
        if self.per in ("head", "tensor"):
            return block, head_dim
        tokens = self.per == "channel"
        whole, name = (block, "the block's tokens") if tokens else (head_dim, "head_dim")
        fitting = (n for n in range(1, min(DEFAULT_GROUP, whole) + 1) if whole % n == 0)
        size = max(fitting) if self.size is None else self.size
        if whole % size:
            raise ValueError(f"a group of {size} does not divide {name}, {whole}")
        return (size, 1) if tokens else (1, size)

    def split(self, x: Array) -> Array:
        """[..., block, head_dim] as [..., groups of tokens, tokens, groups of channels, channels];
        a scale stands at index 0 of axes -3 and -1."""
        block, head_dim = x.shape[-2:]
        tokens, channels = self.sizes(block, head_dim)
        return x.reshape(*x.shape[:-2], block // tokens, tokens, head_dim // channels, channels)

    def join(self, x: Array) -> Array:
        """Undo ``split``."""
        a, b, c, d = x.shape[-4:]
        return x.reshape(*x.shape[:-4], a * b, c * d)

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Axes of what ``split`` gives that share a scale."""
        heads = (1,) if self.per == "tensor" else ()
        return (*heads, ndim - 3, ndim - 1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of blocks of ``shape``."""
        tokens, channels = self.sizes(*shape[-2:])
        heads = 1 if self.per == "tensor" else shape[1]
        return (shape[0], heads, *shape[2:-2], shape[-2] // tokens, shape[-1] // channels)

    def pack(self, scale: Array) -> Array:
        """A scale of ``split`` numbers without the axes of length 1."""
        return scale.reshape(*scale.shape[:-4], scale.shape[-4], scale.shape[-2])

    def unpack(self, scale: Array) -> Array:
        """Undo ``pack``."""
        return scale[..., :, None, :, None]


class WithScales(InTiles):
    """A codec of blocks whose groups of numbers have scales in 16 bits. Abstract: the fields are
    the codec's own, and it says what its store is in float32."""

    per: str
    group: int | None
    scales: Raw | None
    dtype: str | None

    blockwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", Groups(self.per, self.group).size)
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


def rounded(x: Array, dtype: str, *, up: bool) -> Array:
    """float32 numbers that ``dtype``, of 16 bits, has: the nearest one that is not below ``x``
    (``up``), or not above. Beyond its range, its largest number."""
    kind: Any = jnp.dtype(dtype)
    largest = float(jnp.finfo(kind).max)
    x = jnp.clip(x, -largest, largest)
    near = x.astype(kind)
    wide = near.astype(jnp.float32)
    bits = lax.bitcast_convert_type(near, jnp.uint16)
    # Away from zero is one more as a whole number, whatever the sign.
    wrong = (wide < x) if up else (wide > x)
    away = (x > 0) if up else (x < 0)
    beyond = lax.bitcast_convert_type(bits + jnp.uint16(1), kind).astype(jnp.float32)
    within = lax.bitcast_convert_type(bits - jnp.uint16(1), kind).astype(jnp.float32)
    # Of the nearest number and its neighbour towards zero, one lies on the wanted side.
    return jnp.where(wrong, jnp.where(away, beyond, within), wide)


def mean(x: Array, axes: tuple[int, ...]) -> Array:
    """The mean over ``axes``, kept, by a sum that can't overflow: of what a power of two, and so
    exactly, made smaller."""
    count = math.prod(x.shape[axis] for axis in axes)
    shrink = 2.0 ** -(count - 1).bit_length()
    return jnp.sum(x * shrink, axes, keepdims=True) / (count * shrink)


def finite(x: Array) -> Array:
    """float32 within a quarter of its range, so that differences are numbers too; 0 for what is
    none."""
    x, largest = x.astype(jnp.float32), float(jnp.finfo(jnp.float32).max) / 4
    return jnp.where(jnp.isnan(x), 0.0, jnp.clip(x, -largest, largest))
