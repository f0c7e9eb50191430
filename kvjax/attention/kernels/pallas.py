"""The path ``pallas``: a layer's body by the kernel, its tail and sinks beside it."""

from typing import Any

import jax
import jax.numpy as jnp

from kvjax.attention.blocks import Turned
from kvjax.attention.buckets import Partial, finished, grouped, prefix
from kvjax.attention.kernels._whole import refuse
from kvjax.attention.kernels.flash_decoding import decode
from kvjax.attention.mask import Sight
from kvjax.attention.segments import Segment
from kvjax.codecs import Codec
from kvjax.core.typing import Array, Mixed, Rows

MOST = 64
"""Rows of queries a head of keys, at most: they all stay in a program's registers."""


def attend(both: Turned, kv_heads: int, parts: list[Segment], length: Rows, sight: Sight) -> Mixed:
    """Softmax over the largest segment by flash decoding, over the others in one piece each.

    Raises:
      ValueError: if the call has a bias or too many queries, or the layer is stored in a way that
        the kernel can't read.
    """
    rows = grouped(both, kv_heads)
    largest = max(parts, key=lambda part: part.size * part.unit)
    _check(largest, rows[0].shape, sight)
    found = [
        _by_kernel(part, rows[1 if part.capped else 0], sight)
        if part is largest
        else prefix(part, part.size, rows[1 if part.capped else 0], sight)
        for part in parts
    ]
    return finished(found, both[0], sight)


def _by_kernel(segment: Segment, rows: Array, sight: Sight) -> Partial:
    units = jnp.arange(segment.first, segment.first + segment.size, dtype=jnp.int32)
    seen = sight.visible(segment.positions(units, segment.first), segment.part)
    if seen.shape[1] > 1:
        seen = jnp.tile(seen, (1, rows.shape[2] // seen.shape[1], 1))
    stores = segment.keys, segment.values
    return decode(
        rows, stores, seen, segment.codecs, unit=segment.unit, first=segment.first,
        scale=sight.scale, soft_cap=sight.soft_cap,
    )  # fmt: skip


def _check(segment: Segment, shape: tuple[int, ...], sight: Sight) -> None:
    stores = segment.keys, segment.values
    refuse("pallas", {
        "adds no bias to scores": sight.bias is not None,
        f"takes {MOST} rows of queries a head of keys, not {shape[2]}": shape[2] > MOST,
        f"takes a head_dim that is a power of two, not {shape[3]}": shape[3] & shape[3] - 1,
        f"takes blocks of a power of two, not {segment.unit}": segment.unit & segment.unit - 1,
        "reads no keys that are stored before their rotation": segment.table is not None,
        "reads nothing on the host": segment.placement.behind_tail,
        f"can't decode {segment.codecs} in a kernel": not all(map(_plain, segment.codecs, stores)),
    })  # fmt: skip


def _plain(codec: Codec, store: Any) -> bool:
    """Whether a codec decodes without arrays of its own, which a kernel can't hold."""
    return not jax.make_jaxpr(codec.decode)(store).consts
