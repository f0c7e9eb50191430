"""Codecs: how the numbers of a cache are stored. Pure functions on arrays; they know no slots."""

from kvjax.codecs._tiles import in_tiles
from kvjax.codecs.centred import Centred
from kvjax.codecs.codec import (
    Codec,
    Store,
    long_mix,
    long_scores,
    plain_mix,
    plain_scores,
    tokens_of,
)
from kvjax.codecs.float8 import Float8
from kvjax.codecs.half_quadratic import HalfQuadratic
from kvjax.codecs.integer import BITS, MULTIPLE, Int1, Int2, Int3, Int4, Int8, Integer
from kvjax.codecs.raw import Raw
from kvjax.codecs.rotated import Rotated
from kvjax.codecs.unrotated import Unrotated

__all__ = [
    "BITS", "MULTIPLE", "Centred", "Codec", "Float8", "HalfQuadratic", "Int1", "Int2", "Int3",
    "Int4", "Int8", "Integer", "Raw", "Rotated", "Store", "Unrotated", "in_tiles", "long_mix",
    "long_scores", "plain_mix", "plain_scores", "tokens_of",
]  # fmt: skip
