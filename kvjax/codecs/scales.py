"""Codecs with 16-bit scales: groups of numbers, rounding of scales, and 8-bit floats."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from kvjax.codecs.codec import Codec, Raw, Store, plain_scores, without_gradient
from kvjax.core.pytree import exportable_namedtuple
from kvjax.core.validation import ArgumentError, as_int

PER = ("token", "channel", "head", "tensor")
DEFAULT_GROUP = 64
"""The maximum group size that is chosen by default."""


@dataclass(frozen=True)
class Groups:
    """Which numbers of a block [block, head_dim] share a scale.

    With ``per="token"``, a group is ``size`` channels of one token. With ``"channel"``, it is
    ``size`` tokens of one channel. With ``"head"``, it is all numbers of a head, and with
    ``"tensor"`` all numbers of all heads of a row. ``size`` is the number of numbers in a group;
    None means as many as possible, up to 64.
    """

    per: str
    size: int | None = None

    def __post_init__(self) -> None:
        if self.per not in PER:
            raise ArgumentError(f"per={self.per!r}: choose from {', '.join(PER)}", param="per")
        if self.size is not None:
            object.__setattr__(self, "size", as_int("group_size", self.size, 1))
            if self.per in ("head", "tensor"):
                raise ValueError(
                    f"group_size={self.size}: scales per {self.per} have no groups, omit it"
                )

    def sizes(self, block: int, head_dim: int) -> tuple[int, int]:
        """Return the numbers of tokens and of channels of a group.

        Raises:
          ValueError: if the group size does not divide the block or head_dim.
        """
        if self.per in ("head", "tensor"):
            return block, head_dim
        tokens = self.per == "channel"
        whole, name = (block, "the block's tokens") if tokens else (head_dim, "head_dim")
        divisors = (n for n in range(1, min(DEFAULT_GROUP, whole) + 1) if whole % n == 0)
        size = max(divisors) if self.size is None else self.size
        if whole % size:
            raise ValueError(f"a group of {size} does not divide {name}, {whole}")
        return (size, 1) if tokens else (1, size)

    def split(self, x: Array) -> Array:
        """Reshape [..., block, head_dim] to [..., groups of tokens, tokens, groups of channels,
        channels]. Scales of split numbers have length 1 on axes -3 and -1."""
        block, head_dim = x.shape[-2:]
        tokens, channels = self.sizes(block, head_dim)
        return x.reshape(*x.shape[:-2], block // tokens, tokens, head_dim // channels, channels)

    def join(self, x: Array) -> Array:
        """Undo ``split``."""
        a, b, c, d = x.shape[-4:]
        return x.reshape(*x.shape[:-4], a * b, c * d)

    def axes(self, ndim: int) -> tuple[int, ...]:
        """Return the axes of split numbers along which numbers share a scale."""
        heads = (1,) if self.per == "tensor" else ()
        return (*heads, ndim - 3, ndim - 1)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the stored scales for blocks of the shape ``shape``."""
        tokens, channels = self.sizes(*shape[-2:])
        heads = 1 if self.per == "tensor" else shape[1]
        return (shape[0], heads, *shape[2:-2], shape[-2] // tokens, shape[-1] // channels)

    def pack(self, scale: Array) -> Array:
        """Remove the axes of length 1 from the scales of split numbers."""
        return scale.reshape(*scale.shape[:-4], scale.shape[-4], scale.shape[-2])

    def unpack(self, scale: Array) -> Array:
        """Undo ``pack``."""
        return scale[..., :, None, :, None]


class ScaledCodec(Codec):
    """A blockwise codec with a 16-bit scale for each group of numbers.

    The class is abstract. Subclasses define the fields, and decode a store to float32.
    """

    per: str
    group_size: int | None
    scales: Raw | None
    dtype: str | None

    blockwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "group_size", Groups(self.per, self.group_size).size)
        if self.scales is not None and self.scales.dtype not in (None, "float16", "bfloat16"):
            raise ValueError(f"scales are float16 or bfloat16, not {self.scales.dtype}")

    @property
    def groups(self) -> Groups:
        """Which numbers share a scale."""
        return Groups(self.per, self.group_size)

    @property
    def scale_codec(self) -> Raw:
        """How scales are stored."""
        if self.scales is None:
            raise ValueError(f"{self} has no dtype for its scales yet: call resolve first")
        return self.scales

    @property
    def joins_heads(self) -> bool:
        return self.per == "tensor"

    def resolve(self, model_dtype: str | None, platform: str) -> Self:
        dtype, scales = with_dtypes(self.dtype, self.scales, model_dtype, platform)
        changed: Any = self
        return replace(changed, scales=scales, dtype=dtype)

    @abstractmethod
    def to_float32(self, store: Store) -> Array:
        """Decode a store to float32."""

    def decode(self, store: Store) -> Array:
        return self.to_float32(store).astype(self.dtype)

    def scores(self, queries: Array, store: Store) -> Array:
        return plain_scores(queries, self.to_float32(store))

    def decode_scale(self, scale: Array) -> Array:
        """Decode scales or zero points to float32, in a shape that broadcasts to split numbers."""
        return self.groups.unpack(self.scale_codec.decode(scale).astype(jnp.float32))


undifferentiable = without_gradient(
    lambda x: x,
    "a quantized cache has no gradient, because its codes are integers: use a raw cache to "
    "differentiate",
)
"""Return ``x`` unchanged. Differentiating this function raises ``ValueError``."""


def in_range(x: Array, dtype: str | None) -> Array:
    """Clip float32 numbers to the range of ``dtype``. Scales that were rounded up may decode to
    numbers beyond the range of float16."""
    if dtype != "float16":
        return x
    largest = float(jnp.finfo(jnp.float16).max)
    return jnp.clip(x, -largest, largest)


def with_dtypes(
    dtype: str | None, scales: Raw | None, model_dtype: str | None, platform: str
) -> tuple[str | None, Raw]:
    """Return the dtype to which numbers are decoded, and the codec of scales. By default scales are
    float16 if numbers are float16, otherwise bfloat16, which has the range of float32."""
    fixed = Raw(dtype).resolve(model_dtype, platform).dtype
    usual = "float16" if fixed == "float16" else "bfloat16"
    return fixed, (scales or Raw()).resolve(usual, platform)


def rounded(x: Array, dtype: str, *, up: bool) -> Array:
    """Round float32 numbers to a 16-bit ``dtype``, up if ``up`` is True, otherwise down. The
    results stay float32. Numbers out of range are clipped."""
    kind = jnp.dtype(dtype)
    largest = float(jnp.finfo(kind).max)
    x = jnp.clip(x, -largest, largest)
    near = x.astype(kind)
    wide = near.astype(jnp.float32)
    bits = lax.bitcast_convert_type(near, jnp.uint16)
    # Adding 1 to the bits of a float moves it away from zero, for either sign.
    wrong = (wide < x) if up else (wide > x)
    away = (x > 0) if up else (x < 0)
    beyond = lax.bitcast_convert_type(bits + jnp.uint16(1), kind).astype(jnp.float32)
    within = lax.bitcast_convert_type(bits - jnp.uint16(1), kind).astype(jnp.float32)
    # Either the nearest number or its neighbor is on the requested side.
    return jnp.where(wrong, jnp.where(away, beyond, within), wide)


def mean(x: Array, axes: tuple[int, ...]) -> Array:
    """Compute the mean over ``axes``, which stay as axes of length 1. The sum can't overflow,
    because the numbers are first divided by a power of two, which is exact.

    The numbers are added in a fixed order: one half is added to the other until one number is left.
    Compilers would choose the order of a reduction by the shape of the array, so rounding would
    depend on how many blocks are encoded together.
    """
    count = math.prod(x.shape[axis] for axis in axes)
    shrink = 2.0 ** -(count - 1).bit_length()
    x = x * shrink
    for axis in axes:
        while (size := x.shape[axis]) > 1:
            first, second, rest = jnp.split(x, [size // 2, size // 2 * 2], axis)
            x = jnp.concatenate([first + second, rest], axis)
    return x / (count * shrink)


def finite(x: Array) -> Array:
    """Convert numbers to float32, clip them to a quarter of its range, and replace NaN by 0. So
    their differences are finite."""
    x, largest = x.astype(jnp.float32), float(jnp.finfo(jnp.float32).max) / 4
    return jnp.where(jnp.isnan(x), 0.0, jnp.clip(x, -largest, largest))


KINDS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
FIELDS = {"e4m3": (3, 7), "e5m2": (2, 15)}
"""The number of fraction bits, and the exponent bias, of each kind of 8-bit float."""


def float8_to_float32(bits: Array, kind: str) -> Array:
    """Decode 8-bit floats, given as uint8.

    The bits are moved to their places in a float16, and a product with a power of two corrects the
    exponent. This is exact. A conversion from JAX's own 8-bit dtypes would crash the process on
    NVIDIA GPUs below compute capability 8.9, because Triton in JAX 0.10 and older lacks this
    conversion. The TPU kernel has a version of its own, because TPUs have no float16.
    """
    fraction, bias = FIELDS[kind]
    bits = bits.astype(jnp.uint16)
    moved = (bits & 127) << (10 - fraction) | (bits & 128) << 8
    return lax.bitcast_convert_type(moved, jnp.float16).astype(jnp.float32) * 2.0 ** (15 - bias)


@exportable_namedtuple
class Scaled(NamedTuple):
    """The store of a ``Float8``: ``bits``, uint8 in the shape of the numbers, and the 16-bit
    ``scale`` of each group."""

    bits: Array
    scale: Array


@dataclass(frozen=True)
class Float8(ScaledCodec):
    """Store numbers as 8-bit floats, multiplied by a 16-bit scale per group (Micikevicius et al.,
    arXiv:2209.05433). Small numbers of a group keep their relative precision.

    A scale maps the largest magnitude of a group to the largest 8-bit float. Every block computes
    its own scales.

    ``kind`` is ``"e4m3"`` (relative error up to 1/16) or ``"e5m2"`` (up to 1/8, with a wider
    range). ``per``, ``group_size``, ``scales`` and ``dtype`` are as in ``Integer``.

    Example:
      ```python
      codec = kvjax.codecs.Float8("e4m3")
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=codec, values=codec), max_len=64)
      ```
    """

    kind: str = "e4m3"
    per: str = "token"
    group_size: int | None = None
    scales: Raw | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ArgumentError(f"kind={self.kind!r}: choose from {', '.join(KINDS)}", param="kind")
        super().__post_init__()

    def empty(self, shape: tuple[int, ...]) -> Scaled:
        scale = self.scale_codec.empty(self.groups.scale_shape(shape))
        return Scaled(jnp.zeros(shape, jnp.uint8), scale)

    def encode(self, x: Array) -> Scaled:
        """Encode blocks [..., block, head_dim]. NaN is encoded as 0."""
        x = self.groups.split(undifferentiable(finite(x)))
        kind, axes = jnp.dtype(KINDS[self.kind]), self.groups.axes(x.ndim)
        top = float(jnp.finfo(kind).max)
        largest = jnp.max(jnp.abs(x), axes, keepdims=True)
        scale = rounded(largest / top, str(self.scale_codec.dtype), up=True)
        small = jnp.clip(x / jnp.where(scale == 0, 1.0, scale), -top, top).astype(kind)
        bits = lax.bitcast_convert_type(self.groups.join(small), jnp.uint8)
        return Scaled(bits, self.scale_codec.encode(self.groups.pack(scale)))

    def to_float32(self, store: Scaled) -> Array:
        split = self.groups.split(float8_to_float32(store.bits, self.kind))
        return in_range(self.groups.join(split * self.decode_scale(store.scale)), self.dtype)
