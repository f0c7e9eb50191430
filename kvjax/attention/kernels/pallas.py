"""The path ``pallas``: a layer's body by the kernel, its tail and sinks beside it."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.buckets import prefix
from kvjax.attention.call import Call
from kvjax.attention.kernels.common import refuse
from kvjax.attention.kernels.flash_decoding import decode
from kvjax.attention.mask import Mask
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import Section
from kvjax.codecs import Codec
from kvjax.core.typing import Array, Mixed

MOST = 64
"""Rows of queries a head of keys, at most: they all stay in a program's registers."""


def pallas(call: Call) -> Mixed:
    """Softmax over the largest section by flash decoding, over the others in one piece each.

    Raises:
      ValueError: if the call has a bias or too many queries, or the layer is stored in a way that
        the kernel can't read.
    """
    largest = max(call.sections, key=lambda each: each.size * each.unit)
    shape, stores = call.rows(largest).shape, (largest.keys, largest.values)
    refuse("pallas", {
        "adds no bias to scores": call.mask.bias is not None,
        f"takes {MOST} rows of queries a head of keys, not {shape[2]}": shape[2] > MOST,
        f"takes a head_dim that is a power of two, not {shape[3]}": shape[3] & shape[3] - 1,
        f"takes blocks of a power of two, not {largest.unit}": largest.unit & largest.unit - 1,
        "reads no keys that are stored before their rotation": largest.table is not None,
        "reads nothing on the host": largest.placement.behind_tail,
        f"can't decode {largest.codecs} in a kernel": not all(map(_plain, largest.codecs, stores)),
    })  # fmt: skip
    found = [
        _by_kernel(each, call.rows(each), call.mask)
        if each is largest
        else prefix(each, each.size, call.rows(each), call.mask)
        for each in call.sections
    ]
    return call.finish(*found)


def _by_kernel(section: Section, rows: Array, mask: Mask) -> Partial:
    units = jnp.arange(section.first, section.first + section.size, dtype=jnp.int32)
    seen = mask.visible(section.positions(units, section.first), section)
    if seen.shape[1] > 1:
        seen = jnp.tile(seen, (1, rows.shape[2] // seen.shape[1], 1))
    stores = section.keys, section.values
    return decode(
        rows, stores, seen, section.codecs, unit=section.unit, first=section.first,
        scale=mask.scale, soft_cap=mask.soft_cap,
    )  # fmt: skip


def _plain(codec: Codec, store: Any) -> bool:
    """Whether a codec decodes without arrays of its own, which a kernel can't hold."""
    return not jax.make_jaxpr(codec.decode)(store).consts
