"""Softmax over a prefix of every section, of one of few sizes that the step itself chooses.

Where a conditional is cheap, the walk of ``blocks.py`` follows the filled length block by block. An
accelerator is given its work ahead, and may have to wait for its host at every conditional: here
there is one a layer, over at most ``BUCKETS`` programs that are all compiled with the step.
"""

import functools

import jax.numpy as jnp

from kvjax.attention.blocks import blockwise
from kvjax.attention.inputs import AttentionInputs, softmax_over
from kvjax.attention.mask import Mask
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import Section
from kvjax.core import control_flow
from kvjax.core.typing import Array, AttentionOutput

BUCKETS = 8
"""Sizes of prefix, at most: each is a program of its own in every layer."""
LEAST = 256
"""Tokens of the smallest, at least."""
TILE = 128
"""Sizes are multiples of it."""
PIECE = 2048
"""Tokens of a prefix that are sliced, decoded or fetched together, at most."""
SHORT = 32
"""Queries of a call, at most: more of them would make scores of queries times capacity."""


def bucketed(inputs: AttentionInputs) -> AttentionOutput:
    """Softmax over the smallest prefixes that hold all that is filled; long calls are walked."""
    if inputs.queries.shape[2] > SHORT:
        return blockwise(inputs)
    sections = inputs.sections

    def over(tokens: int) -> Partial:
        found = (
            prefix(each, _units(each, tokens), inputs.rows(each), inputs.mask) for each in sections
        )
        return functools.reduce(Partial.merge, found)

    sizes = bucket_sizes([each.size * each.unit for each in sections])
    filled = [each.filled(inputs.near()) for each in sections]
    beyond = [
        jnp.stack([n > _units(each, size) for n, each in zip(filled, sections, strict=True)]).any()
        for size in sizes[:-1]
    ]
    if not beyond:
        return inputs.finish(over(sizes[0]))
    index = jnp.stack(beyond).sum(dtype=jnp.int32)
    # Devices that divide the keys may each take another size: they meet behind it.
    return inputs.finish(
        control_flow.switch(index, [functools.partial(over, size) for size in sizes])
    )


def bucket_sizes(tokens: list[int]) -> list[int]:
    """Tokens of the prefixes of sections of so many: the largest whole, and halves of it."""
    found = [max(tokens)]
    while len(found) < BUCKETS and found[-1] > LEAST:
        found.append(-(-found[-1] // (2 * TILE)) * TILE)
    return found[::-1]


def prefix(
    section: Section, units: int, rows: Array, mask: Mask, before: Partial | None = None
) -> Partial:
    """The softmax over a section's first ``units``, and what was looked at ``before``. A long
    prefix is taken in pieces, a number that the compiler knows: what is made of the stores is never
    larger than one of them."""
    piece = section.fit_units(min(units, max(PIECE // section.unit, 1)))
    stop = section.first + units

    def over(start: Array, after: Partial | None = None) -> Partial:
        # A last piece that would pass the end is moved down; what it shares is not seen twice.
        origin = jnp.minimum(start, stop - piece)
        return softmax_over(section, mask, rows, origin, piece, start=start, after=after)

    def one(carry: tuple[Array, Partial], _: None) -> tuple[tuple[Array, Partial], None]:
        start, found = carry
        return (start + piece, over(start, found)), None

    begin = jnp.int32(section.first)
    if piece == units:
        return over(begin, before)
    found = Partial.of_none(rows) if before is None else before
    return control_flow.scan(one, (begin, found), length=-(-units // piece))[0][1]


def _units(section: Section, tokens: int) -> int:
    """Units of a section's prefix of so many tokens."""
    units = -(-tokens // section.unit)
    return min(section.size, units + -units % section.page)
