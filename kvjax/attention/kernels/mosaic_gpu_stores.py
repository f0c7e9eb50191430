"""Keys and values as the Mosaic GPU kernel reads them.

A store is fetched as rows of channels, as it lies. Where its numbers are not such as matrix units
multiply, they are made of it in shared memory, ``planes`` of 16-bit numbers: of codes the whole
numbers as they are, a plane for each of the numbers that share a byte; of float32 three numbers
that add up to each. Scales and zero points of tokens are undone in scores and weights, those of
channels in queries and mixtures.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.codecs import in_tiles
from kvjax.codecs.centered import Centered
from kvjax.codecs.float8 import FIELDS, Float8
from kvjax.codecs.integer import Integer
from kvjax.codecs.raw import Raw
from kvjax.core.typing import Array

TERMS = 3
"""16-bit numbers that add up to one of 32 bits, but for its last bit or so."""


def terms_of(x: Array, dtype: Any, count: int) -> list[Array]:
    """float32 numbers as a sum of so many in 16 bits."""
    found = []
    for n in range(count):
        found.append(x.astype(dtype))
        if n + 1 < count:
            x = x - found[-1].astype(jnp.float32)
    return found


@dataclass(frozen=True)
class Form:
    """How a codec's store is read.

    ``rows`` of numbers of a unit, of ``dtype``; ``bits`` of a number that shares its byte, 0 where
    it is a float; ``fraction``: its bits, of a float of 8. ``groups``: of channels that have a
    scale each for every token; ``along``: tokens that share a channel's scale, 0 where tokens have
    scales. ``middle``: the whole number that stands for 0, where there is no zero point.
    ``arrays``: what the kernel is given, in order.
    """

    rows: int
    dtype: Any
    bits: int = 0
    fraction: int = 0
    groups: int = 1
    along: int = 0
    middle: float = 0.0
    arrays: tuple[str, ...] = ("numbers",)

    @property
    def parts(self) -> int:
        """Runs of a unit's tokens whose numbers share bytes."""
        return 8 // self.bits if self.bits else 1

    @property
    def of_tokens(self) -> tuple[str, ...]:
        """What tokens have numbers of."""
        return () if self.along else tuple(x for x in self.arrays if x in ("scale", "zero"))

    @property
    def adds_to_tokens(self) -> bool:
        """Whether something is added to the scaled numbers of each token."""
        return bool(self.of_tokens) and (self.middle != 0 or "zero" in self.arrays)

    @property
    def adds_to_channels(self) -> bool:
        """Whether something is added to the scaled numbers of each channel."""
        shifted = self.along and (self.middle != 0 or "zero" in self.arrays)
        return bool(shifted) or "mean" in self.arrays

    def terms(self, queries: Any) -> int:
        """16-bit numbers that add up to a stored one, for queries of a dtype."""
        return TERMS if self.dtype == queries == jnp.float32 else 1

    def planes(self, queries: Any, product: Any) -> int:
        """Of numbers that are made in shared memory; 0 where they are multiplied as they lie."""
        if self.bits or self.fraction:
            return self.parts
        return 0 if self.dtype == product else self.terms(queries)

    def shift(self, part: int) -> float:
        """By what the numbers of a plane are larger than those that scales are of."""
        if self.fraction:  # the bias of 16-bit floats' exponents is another
            bias = next(bias for fraction, bias in FIELDS.values() if fraction == self.fraction)
            return 2.0 ** (bias - 15)
        return 2.0 ** (self.bits * part)  # of bits that are left where they are

    def made(self, stored: Array, queries: Any, product: Any) -> list[Array]:
        """The planes of fetched rows."""
        if self.fraction:
            wide = stored.astype(jnp.uint16)
            wide = ((wide & 128) << 8) | ((wide & 127) << (10 - self.fraction))
            floats = lax.bitcast_convert_type(wide, jnp.float16)
            return [
                floats if product == jnp.float16 else floats.astype(jnp.float32).astype(product)
            ]
        if self.bits:
            ones = 2**self.bits - 1
            each = [stored & jnp.uint8(ones << self.bits * part) for part in range(self.parts)]
            return [x.astype(product) for x in each]
        return terms_of(stored.astype(jnp.float32), product, self.terms(queries))


def form_of(codec: Any, block: int, head_dim: int) -> Form | None:
    """How the store of a codec is read, of units of ``block`` tokens; None where it can't be."""
    core = in_tiles(codec).core
    if isinstance(core, Centered):
        inner = form_of(core.codec, block, head_dim)
        return inner and replace(inner, arrays=(*inner.arrays, "mean"))
    if isinstance(core, Raw):
        return None if core.as_bits else Form(block, jnp.dtype(core.dtype))
    if not isinstance(core, Integer | Float8) or core.per not in ("token", "channel"):
        return None
    tokens, channels = core.groups.sizes(block, head_dim)
    each = {"along": tokens} if core.per == "channel" else {"groups": head_dim // channels}
    byte, arrays = jnp.dtype(jnp.uint8), ("numbers", "scale")
    if isinstance(core, Float8):
        return Form(block, byte, fraction=FIELDS[core.kind][0], arrays=arrays, **each)
    if core.bits == 3:
        return None
    zero = ("zero",) * core.zero_point
    return Form(
        block * core.bits // 8, byte, core.bits, middle=0.0 if zero else core.middle,
        arrays=(*arrays, *zero), **each,
    )  # fmt: skip


def arrays_of(codec: Any, store: Any) -> list[Array]:
    """The arrays of a store, [batch, kv_heads, units, ...], as its form names them: numbers as rows
    [batch, kv_heads, rows, head_dim]."""
    core, mean = in_tiles(codec).core, []
    if isinstance(core, Centered):
        core, store, mean = core.codec, store.rest, [store.mean]
    numbers, *rest = jax.tree.leaves(store)
    return [numbers.reshape(*numbers.shape[:2], -1, numbers.shape[-1]), *rest, *mean]


class Undone(NamedTuple):
    """What a number of a plane is times ``factor`` and plus ``offset``: of tokens, or of channels;
    None for 1, and for 0."""

    factor: Array | None
    offset: Array | None


def undone(form: Form, load: Callable[[str], Array], part: int) -> Undone:
    """What undoes the numbers of a plane; ``load`` gives a scale or a zero point, float32."""
    if "scale" not in form.arrays:
        return Undone(None, None)
    scale, offset = load("scale"), None
    if "zero" in form.arrays:
        offset = load("zero")
    elif form.middle:
        offset = scale * -form.middle
    shift = form.shift(part)
    return Undone(scale if shift == 1 else scale * (1 / shift), offset)
