"""The path ``buckets``: softmax over a prefix of every section, in one of a few sizes.

The path ``blocks`` follows the filled length by a conditional per block. An accelerator receives
its work ahead of time, and may wait for its host at every conditional. This path has one
conditional per layer, among at most ``MAX_BUCKETS`` branches, which are compiled with the step.
"""

import functools

import jax.numpy as jnp

from kvjax.attention.blocks import blockwise
from kvjax.attention.inputs import AttentionInputs
from kvjax.attention.mask import Mask
from kvjax.attention.softmax import Partial, softmax_over
from kvjax.cache.sections import Section
from kvjax.core import control_flow
from kvjax.core.typing import Array, AttentionOutput

MAX_BUCKETS = 8
"""The most sizes of prefixes. Each is a separate branch in every layer."""
MIN_SIZE = 256
"""Tokens of the smallest prefix, at least."""
TILE = 128
"""Sizes are multiples of this many tokens."""
CHUNK = 2048
"""The most tokens of a prefix that are sliced, decoded or fetched together."""
MAX_QUERIES = 32
"""The most queries per row. Longer calls would need score matrices of queries times capacity."""


def bucketed(inputs: AttentionInputs) -> AttentionOutput:
    """Attention over the smallest prefixes that contain all filled slots. Long calls use the path
    ``blocks``."""
    if inputs.queries.shape[2] > MAX_QUERIES:
        return blockwise(inputs)
    sections = inputs.sections

    def over(tokens: int) -> Partial:
        partials = (
            prefix(section, _units(section, tokens), inputs.rows(section), inputs.mask)
            for section in sections
        )
        return functools.reduce(Partial.merge, partials)

    sizes = bucket_sizes([section.size * section.unit for section in sections])
    filled = [section.filled(inputs.visible_length()) for section in sections]
    beyond = [
        jnp.stack(
            [n > _units(section, size) for n, section in zip(filled, sections, strict=True)]
        ).any()
        for size in sizes[:-1]
    ]
    if not beyond:
        return inputs.finish(over(sizes[0]))
    index = jnp.stack(beyond).sum(dtype=jnp.int32)
    # Devices that divide the keys may take different branches. They synchronize in ``finish``.
    return inputs.finish(
        control_flow.switch(index, [functools.partial(over, size) for size in sizes])
    )


def bucket_sizes(tokens: list[int]) -> list[int]:
    """Tokens of the prefixes of sections of these sizes: the largest section, and halvings of it,
    in ascending order."""
    sizes = [max(tokens)]
    while len(sizes) < MAX_BUCKETS and sizes[-1] > MIN_SIZE:
        sizes.append(-(-sizes[-1] // (2 * TILE)) * TILE)
    return sizes[::-1]


def prefix(
    section: Section, units: int, rows: Array, mask: Mask, before: Partial | None = None
) -> Partial:
    """The softmax over the first ``units`` of a section, merged with ``before``, the softmax over
    other keys. A long prefix is divided into chunks by a scan of static length, which bounds the
    memory for decoded copies."""
    chunk = section.fit_units(min(units, max(CHUNK // section.unit, 1)))
    stop = section.first + units

    def over(start: Array, before: Partial | None = None) -> Partial:
        # The last chunk is moved down if it would pass the end. Units that the chunk before has
        # already covered do not count again.
        origin = jnp.minimum(start, stop - chunk)
        return softmax_over(section, mask, rows, origin, chunk, start=start, before=before)

    def one(carry: tuple[Array, Partial], _: None) -> tuple[tuple[Array, Partial], None]:
        start, partial = carry
        return (start + chunk, over(start, partial)), None

    begin = jnp.int32(section.first)
    if chunk == units:
        return over(begin, before)
    partial = Partial.empty(rows) if before is None else before
    return control_flow.scan(one, (begin, partial), length=-(-units // chunk))[0][1]


def _units(section: Section, tokens: int) -> int:
    """Units of a section in a prefix of ``tokens`` tokens, rounded up to whole pages."""
    units = -(-tokens // section.unit)
    return min(section.size, units + -units % section.page)
