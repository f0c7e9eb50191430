"""Quantization of arrays outside of a cache, and the codecs that presets use."""

import jax.numpy as jnp
import numpy as np

from kvjax.codecs.codebook import Codebook
from kvjax.codecs.codec import Codec, Raw, Store, merge_blocks
from kvjax.codecs.integer import BITS, MULTIPLE, Integer
from kvjax.codecs.wrappers import Centered, Rotated
from kvjax.core.pytree import pytree_dataclass, static_field, tree_bytes
from kvjax.core.target import default_device
from kvjax.core.typing import CachedKeysValues, KeysValues
from kvjax.core.validation import ArgumentError, as_int


@pytree_dataclass
class Quantized:
    """Quantized keys or values [batch, kv_heads, tokens, head_dim].

    ``store`` is a pytree of arrays with the batch on axis 0 and the blocks on axis 2. ``codec``
    decodes the store. ``tokens`` is the number of tokens, without the padding of the last block.

    Example:
      ```python
      keys = values = jax.random.normal(jax.random.key(0), (1, 2, 100, 64))
      stored, _ = kvjax.codecs.quantize_kv(keys, values, kvjax.codecs.Int4())
      print(stored.nbytes, keys.nbytes)
      ```
    """

    store: Store
    codec: Codec = static_field()
    tokens: int = static_field()

    @property
    def nbytes(self) -> int:
        """The size of the store in bytes, including the padding of the last block."""
        return tree_bytes(self.store)


def quantize_kv(
    keys: KeysValues,
    values: KeysValues,
    codec: Codec,
    value_codec: Codec | None = None,
    *,
    block: int | None = 64,
) -> tuple[Quantized, Quantized]:
    """Quantize keys and values outside of a cache.

    For example, ``quantize_kv(k, v, Int8(per="tensor"), block=None)`` is absmax int8 quantization
    with one scale for all numbers of a row.

    Args:
      keys, values: [batch, kv_heads, tokens, head_dim].
      codec: the codec of the keys, and of the values unless ``value_codec`` is given.
      value_codec: the codec of the values.
      block: the number of tokens per block, a multiple of 8. None means one block of all tokens.

    Returns:
      The quantized keys and values, for ``dequantize_kv``.

    Raises:
      ValueError: if ``block`` is not a multiple of 8, or the codec can't store the shapes.

    Example:
      ```python
      keys = values = jax.random.normal(jax.random.key(0), (1, 2, 100, 64))
      stored = kvjax.codecs.quantize_kv(keys, values, kvjax.codecs.Int8())
      keys, values = kvjax.codecs.dequantize_kv(*stored)
      ```
    """
    second = codec if value_codec is None else value_codec
    return _quantize(keys, codec, block), _quantize(values, second, block)


def dequantize_kv(keys: Quantized, values: Quantized) -> tuple[CachedKeysValues, CachedKeysValues]:
    """Undo ``quantize_kv``. Returns keys and values [batch, kv_heads, tokens, head_dim] in the
    dtype that they had before ``quantize_kv``, unless the codec sets a different one.

    Example:
      ```python
      keys = values = jax.random.normal(jax.random.key(0), (1, 2, 100, 64))
      stored = kvjax.codecs.quantize_kv(keys, values, kvjax.codecs.Int8())
      print(jnp.abs(kvjax.codecs.dequantize_kv(*stored)[0] - keys).max())
      ```
    """
    first, second = (
        merge_blocks(x.codec.decode(x.store))[:, :, : x.tokens] for x in (keys, values)
    )
    return first, second


def _quantize(numbers: KeysValues, codec: Codec, block: int | None) -> Quantized:
    if jnp.ndim(numbers) != 4 or 0 in jnp.shape(numbers):
        shape = list(jnp.shape(numbers))
        raise ValueError(f"keys and values are [batch, kv_heads, tokens, head_dim], got {shape}")
    x = jnp.asarray(numbers)
    tokens = x.shape[2]
    size = tokens if block is None else as_int("block", block, 1)
    if block is not None and block % MULTIPLE:
        raise ArgumentError(
            f"block={block} must be a multiple of {MULTIPLE}, for packed codes", param="block"
        )
    size = -(-size // MULTIPLE) * MULTIPLE
    # The padding of the last block repeats its own tokens. This does not change the minimum and the
    # maximum of a group, and hardly changes its mean.
    at = np.arange(-(-tokens // size) * size)
    last = (tokens - 1) // size * size
    x = x[:, :, np.where(at < tokens, at, last + (at - last) % (tokens - last))]
    codec = codec.resolve(x.dtype.name, default_device().platform)
    blocks = x.reshape(*x.shape[:2], -1, size, x.shape[3])
    codec.empty(blocks.shape)  # raises if the codec can't store this shape
    return Quantized(codec.encode(blocks), codec, tokens)


def quantized_codec(
    bits: int | None, kind: str, *, group_size: int | None = None, dtype: str | None = None
) -> Codec:
    """Return the codec that ``policy`` uses for a number of bits. It is among the best simple
    codecs in our measurements (docs/quantization.md).

    With 8 bits it is symmetric quantization per token. With fewer bits, channels go through a
    randomized Hadamard transform first, as in QuaRot (Ashkboos et al., arXiv:2404.00456):

    - Values: asymmetric quantization per token.
    - Keys with 4 or 3 bits: asymmetric quantization per channel. Apart from the transform, this is
      the quantization of KIVI (Liu et al., arXiv:2402.02750).
    - Keys with 2 bits or 1: the mean of each transformed channel over a block in 16 bits, and the
      deviations from it as in TurboQuant (Zandieh et al., arXiv:2504.19874).

    Args:
      bits: 1, 2, 3, 4 or 8. With None or 16, numbers are not quantized.
      kind: ``"keys"`` or ``"values"``.
      group_size: how many numbers share a scale; by default as many as possible, up to 64.
      dtype: the dtype to decode to; by default the model's.

    Raises:
      ValueError: if no codec has this number of bits.

    Example:
      ```python
      keys = kvjax.codecs.quantized_codec(4, "keys")
      values = kvjax.codecs.quantized_codec(2, "values", group_size=32)
      cache = kvjax.init_cache(lm.config, kvjax.CachePolicy(keys=keys, values=values), max_len=64)
      ```
    """
    if bits in (None, 16):
        return Raw(dtype)
    if bits not in BITS:
        choices = ", ".join(map(str, BITS))
        raise ValueError(f"{bits!r} bits for {kind}: choose from {choices} and 16")
    if bits == 8:
        return Integer(8, "token", group_size, dtype=dtype)
    if kind == "values":
        return Rotated(Integer(bits, "token", group_size, zero_point=True, dtype=dtype))
    if bits > 2:
        return Rotated(Integer(bits, "channel", group_size, zero_point=True, dtype=dtype))
    return Rotated(Centered(Codebook(bits, "token", group_size, dtype=dtype)))
