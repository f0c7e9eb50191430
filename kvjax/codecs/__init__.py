"""Codecs: how the numbers of a cache are stored, as pure functions on arrays."""

from kvjax.codecs.codebook import Codebook, TurboQuant
from kvjax.codecs.codec import Codec, Raw, Store, plain_scores, plain_weighted_values
from kvjax.codecs.codec import long_scores as long_scores
from kvjax.codecs.codec import long_weighted_values as long_weighted_values
from kvjax.codecs.codec import merge_blocks as merge_blocks
from kvjax.codecs.integer import BITS as BITS
from kvjax.codecs.integer import MULTIPLE as MULTIPLE
from kvjax.codecs.integer import Int1, Int2, Int3, Int4, Int8, Integer
from kvjax.codecs.mixed import MixedPrecision
from kvjax.codecs.quantized import Quantized, dequantize_kv, quantize_kv, quantized_codec
from kvjax.codecs.scales import Float8
from kvjax.codecs.wrappers import Centered, HalfQuadratic, Rotated, Unrotated
from kvjax.codecs.wrappers import CodecWrapper as CodecWrapper

__all__ = [
    "Centered",
    "Codebook",
    "Codec",
    "Float8",
    "HalfQuadratic",
    "Int1",
    "Int2",
    "Int3",
    "Int4",
    "Int8",
    "Integer",
    "MixedPrecision",
    "Quantized",
    "Raw",
    "Rotated",
    "Store",
    "TurboQuant",
    "Unrotated",
    "dequantize_kv",
    "plain_scores",
    "plain_weighted_values",
    "quantize_kv",
    "quantized_codec",
]
