"""Codecs: how the numbers of a cache are stored. Pure functions on arrays; they know no slots."""

from kvjax.codecs._tiles import in_tiles as in_tiles
from kvjax.codecs.centered import Centered
from kvjax.codecs.codec import Codec, Store, plain_mix, plain_scores
from kvjax.codecs.codec import long_mix as long_mix
from kvjax.codecs.codec import long_scores as long_scores
from kvjax.codecs.codec import tokens_of as tokens_of
from kvjax.codecs.float8 import Float8
from kvjax.codecs.half_quadratic import HalfQuadratic
from kvjax.codecs.integer import BITS as BITS
from kvjax.codecs.integer import MULTIPLE as MULTIPLE
from kvjax.codecs.integer import Int1, Int2, Int3, Int4, Int8, Integer
from kvjax.codecs.quantized import Quantized, dequantize_kv, quantize_kv, quantized_codec
from kvjax.codecs.raw import Raw
from kvjax.codecs.rotated import Rotated
from kvjax.codecs.unrotated import Unrotated

__all__ = [
    "Centered",
    "Codec",
    "Float8",
    "HalfQuadratic",
    "Int1",
    "Int2",
    "Int3",
    "Int4",
    "Int8",
    "Integer",
    "Quantized",
    "Raw",
    "Rotated",
    "Store",
    "Unrotated",
    "dequantize_kv",
    "plain_mix",
    "plain_scores",
    "quantize_kv",
    "quantized_codec",
]
