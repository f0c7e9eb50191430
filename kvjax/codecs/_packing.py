"""Codes of 1, 2, 3, 4 and 8 bits in bytes, exactly as many as they need.

Codes are packed along a block's tokens: the first of a byte's codes belong to the first part of
the tokens, and so on, so that unpacking is a shift by a constant over whole rows of channels.
"""

import functools
import operator

import jax.numpy as jnp
from jaxtyping import Array

MULTIPLE = 8
"""A block's tokens are a multiple of this: then they fill bytes at every number of bits."""


def pack(codes: Array, bits: int) -> Array:
    """uint8[..., block, n] of codes below ``2 ** bits`` to uint8[..., block * bits / 8, n]."""
    if bits == 8:
        return codes
    if bits == 3:
        return jnp.concatenate([pack(codes & 3, 2), pack(codes >> 2, 1)], axis=-2)
    parts = jnp.split(codes, 8 // bits, axis=-2)
    return functools.reduce(operator.or_, (part << (bits * i) for i, part in enumerate(parts)))


def unpack(packed: Array, bits: int) -> Array:
    """Undo ``pack``."""
    if bits == 8:
        return packed
    if bits == 3:
        whole = packed.shape[-2]
        low, high = packed[..., : whole * 2 // 3, :], packed[..., whole * 2 // 3 :, :]
        return unpack(low, 2) | unpack(high, 1) << 2
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None, None]
    codes = (packed[..., None, :, :] >> shifts) & jnp.uint8(2**bits - 1)
    return codes.reshape(*packed.shape[:-2], -1, packed.shape[-1])


def packed_rows(block: int, bits: int) -> int:
    """Rows of bytes that a block's codes take."""
    return block * bits // 8
