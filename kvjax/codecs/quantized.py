"""Quantization as plain functions, for a cache of one's own."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.codecs.codec import Codec, Store, merge_blocks
from kvjax.codecs.integer import BITS, MULTIPLE, Integer
from kvjax.codecs.raw import Raw
from kvjax.core.pytree import pytree_dataclass, static_field, tree_bytes
from kvjax.core.target import default_device
from kvjax.core.typing import CachedKeysValues, KeysValues
from kvjax.core.validation import as_int


@pytree_dataclass
class Quantized:
    """Numbers [batch, kv_heads, tokens, head_dim] as ``codec`` stores them, in blocks.

    ``store``: a pytree of arrays with the batch on axis 0 and the blocks on axis 2. ``tokens``: how
    many there are; the last block is filled up with its own tokens again.
    """

    store: Store
    codec: Any = static_field()
    tokens: int = static_field()

    @property
    def nbytes(self) -> int:
        """Bytes of the store, with the tokens that fill up the last block."""
        return tree_bytes(self.store)


def quantize_kv(
    keys: KeysValues,
    values: KeysValues,
    codec: Codec,
    value_codec: Codec | None = None,
    *,
    block: int | None = 64,
) -> tuple[Quantized, Quantized]:
    """Encode keys and values that stand outside of a cache.

    ``quantize_kv(k, v, Int8(per="tensor"), block=None)`` is absmax int8 with one scale per row.

    Args:
      keys, values: [batch, kv_heads, tokens, head_dim].
      codec: of the keys, and of the values too unless ``value_codec`` is given.
      value_codec: of the values.
      block: tokens that are encoded together, a multiple of 8; None is all of them.

    Returns:
      Both, to be given to ``dequantize_kv``.

    Raises:
      ValueError: if shapes, a group or the block do not fit.
    """
    second = codec if value_codec is None else value_codec
    return _quantized(keys, codec, block), _quantized(values, second, block)


def dequantize_kv(keys: Quantized, values: Quantized) -> tuple[CachedKeysValues, CachedKeysValues]:
    """What ``quantize_kv`` encoded, as numbers again: [batch, kv_heads, tokens, head_dim]."""
    first, second = (
        merge_blocks(x.codec.decode(x.store))[:, :, : x.tokens] for x in (keys, values)
    )
    return first, second


def _quantized(numbers: KeysValues, codec: Codec, block: int | None) -> Quantized:
    if jnp.ndim(numbers) != 4 or 0 in jnp.shape(numbers):
        found = list(jnp.shape(numbers))
        raise ValueError(f"keys and values are [batch, kv_heads, tokens, head_dim], got {found}")
    x = jnp.asarray(numbers)
    tokens = x.shape[2]
    size = tokens if block is None else as_int("block", block, 1)
    if block is not None and block % MULTIPLE:
        raise ValueError(f"block={block}: packed codes need a multiple of {MULTIPLE}")
    size = -(-size // MULTIPLE) * MULTIPLE
    # A last block that is not full is filled with its own tokens, again and again: that changes
    # neither the least nor the largest of a group, and hardly its mean.
    at = np.arange(-(-tokens // size) * size)
    last = (tokens - 1) // size * size
    x = x[:, :, np.where(at < tokens, at, last + (at - last) % (tokens - last))]
    codec = codec.resolve(x.dtype.name, default_device().platform)
    blocks = x.reshape(*x.shape[:2], -1, size, x.shape[3])
    codec.empty(blocks.shape)  # it raises where they do not fit
    return Quantized(codec.encode(blocks), codec, tokens)


def quantized_codec(
    bits: int | None, kind: str, *, group: int | None = None, dtype: str | None = None
) -> Codec:
    """The codec of presets: of the plain ones, among the best that were measured at so many bits
    (docs/quantization.md, How good).

    Args:
      bits: 1, 2, 3, 4 or 8; None and 16 are not quantized.
      kind: ``"keys"`` or ``"values"``.
      group: numbers that share a scale.
      dtype: what the codec decodes to; by default what the model computes in.
    """
    if bits in (None, 16):
        return Raw(dtype)
    if bits not in BITS:
        known = ", ".join(map(str, BITS))
        raise ValueError(f"{bits!r} bits for {kind}: there are {known}, and 16")
    if bits == 8:
        return Integer(8, "token", group, dtype=dtype)
    per = "channel" if kind == "keys" else "token"
    return Integer(bits, per, group, zero_point=True, dtype=dtype)
