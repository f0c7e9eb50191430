"""The path ``blocks``: softmax over sections block by block, merged as it goes."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention.inputs import AttentionInputs, softmax_over
from kvjax.attention.mask import Mask
from kvjax.attention.softmax import Partial
from kvjax.cache.sections import Section
from kvjax.core import control_flow
from kvjax.core.target import on_cpu
from kvjax.core.typing import Array, AttentionOutput

FINE = 128
"""Tokens of a block where the filled part ends."""
COARSE = 1024
"""Tokens of a block elsewhere, at most: large enough that its copy is shared among the CPU's
threads."""
NUMBERS = 3 * 2**17
"""Numbers of a block's keys, at most: small enough that its copy stays in the CPU's caches."""
QUERIES = 256
"""Queries that walk the blocks together: more of them would see more blocks in vain."""
WIDENED = 16
"""Rows below which a CPU multiplies 16-bit numbers faster after widening them."""
FEW = 16
"""Rows of queries that take a coarse block more rather than walk fine ones."""
SPARE = 4
"""Of that block, the part that must be filled."""
FILLED = 5 / 8
"""Of a section, the part that must be seen for it to be multiplied in one piece."""
EVEN = 256
"""Tokens of a block where all are of one size."""
SCORES = 4
"""Arrays of scores that a section in one piece is counted with: products, and turned round, masked
scores, weights."""


def blockwise(inputs: AttentionInputs, *, even: bool = False) -> AttentionOutput:
    """Softmax block by block, for some queries at a time. ``even``: by blocks of one size, so that
    what a row gets does not depend, to the last bit, on how long the others are."""
    # The same queries twice are carried once.
    kinds = (
        (inputs.queries,) if inputs.queries is inputs.capped else (inputs.queries, inputs.capped)
    )
    new = inputs.queries.shape[2]
    whole = new // QUERIES * QUERIES if new > QUERIES else 0

    def some(turned: tuple[Array, ...], at: Array) -> Array:
        mask = replace(inputs.mask, queries=at)
        part = replace(inputs, queries=turned[0], capped=turned[-1], mask=mask)
        found = Partial.of_none(part.rows(part.sections[0]))
        for section in part.sections:
            found = (_evenly if even else _walk_section)(found, section, part)
        return part.finish(found)

    def next_part(split: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], None]:
        turned = tuple(lax.dynamic_index_in_dim(x, number, keepdims=False) for x in split)
        mixed = some(turned, lax.dynamic_index_in_dim(at, number, keepdims=False))
        # Written over the queries that it is of: zeros to write over, which depend on nothing, a
        # CPU makes for all layers before the first, and keeps.
        return (lax.dynamic_update_index_in_dim(split[0], mixed, number, 0), *split[1:]), None

    mixed = []
    if whole:
        count = whole // QUERIES
        split = tuple(jnp.stack(jnp.split(x[:, :, :whole], count, axis=2)) for x in kinds)
        at = jnp.stack(jnp.split(inputs.mask.queries[:, :whole], count, axis=1))
        found = control_flow.scan(next_part, split, jnp.arange(count, dtype=jnp.int32))[0][0]
        mixed = list(found)
    if whole < new:
        rest = tuple(x[:, :, whole:] for x in kinds)
        mixed.append(some(rest, inputs.mask.queries[:, whole:]))
    return mixed[0] if len(mixed) == 1 else jnp.concatenate(mixed, axis=2)


def at_once(inputs: AttentionInputs) -> AttentionOutput:
    """The path ``reference``: softmax over every section in one piece."""
    found = [
        softmax_over(each, inputs.mask, inputs.rows(each), jnp.int32(each.first), each.size)
        for each in inputs.sections
    ]
    return inputs.finish(*found)


def _walk_section(found: Partial, section: Section, inputs: AttentionInputs) -> Partial:
    """In one piece where that is faster, else block by block."""
    rows = inputs.rows(section)
    whole = section.whole and on_cpu() and _fits(section, rows) and _all_seen(section, inputs.mask)

    def walk(found: Partial) -> Partial:
        narrow = rows.dtype.itemsize == 2 and rows.shape[2] < WIDENED and on_cpu()
        return _by_blocks(found, section, rows.astype(jnp.float32) if narrow else rows, inputs)

    if not whole:
        return walk(found)
    # Slices are copied before they are multiplied, a whole array is not: worth it where most of it
    # is filled. What an earlier text left in empty slots may be no number, which no weight makes 0:
    # then the blocks are walked, which leave it out.
    full = jnp.max(section.filled(inputs.length)) >= math.ceil(FILLED * section.size)

    @jax.checkpoint
    def in_one_piece(found: Partial) -> tuple[Partial, Array]:
        begin, size = jnp.int32(0), section.size
        found = softmax_over(section, inputs.mask, rows, begin, size, after=found, whole=True)
        return found, jnp.all(jnp.isfinite(found.weighted))

    more, done = control_flow.cond(
        full, in_one_piece, lambda found: (found, jnp.bool_(False)), found
    )
    return control_flow.cond(done, lambda more, _: more, lambda _, found: walk(found), more, found)


def _evenly(found: Partial, section: Section, inputs: AttentionInputs) -> Partial:
    """Block by block, all of one size, as far as any row is filled."""
    rows, mask = inputs.rows(section), inputs.mask
    size = section.fit_units(min(max(EVEN // section.unit, 1), section.size))
    limited = (mask.window, mask.chunk, section.split, mask.bias) != (None,) * 4

    def one(number: Array, found: Partial) -> Partial:
        start = section.first + number * size

        def visit(found: Partial) -> Partial:
            return _visit(found, section, rows, mask, start, size)

        if not limited:
            return visit(found)
        wanted = mask.reaches(*section.span(start, size), section)
        return control_flow.cond(wanted, visit, lambda found: found, found)

    filled = jnp.clip(section.filled(inputs.near()), 0, section.size)
    # A bias may be asked for its derivative, which a loop of any length has not.
    stop_at = section.size if mask.bias else filled
    return control_flow.fori_loop(0, -(-stop_at // size), one, found)


def _fits(section: Section, rows: Array) -> bool:
    """Whether a section's numbers can be multiplied as they are, and all of its scores take no more
    memory than the copies of a block do, in float32: so memory does not grow with the capacity."""
    batch, kv_heads, count, head_dim = rows.shape
    coarse = _block_sizes(section.size, section.unit, batch * kv_heads * head_dim)[1]
    return as_stored(section, rows) and SCORES * count * section.size <= 2 * coarse * head_dim


def as_stored(section: Section, rows: Array) -> bool:
    """Whether a section's numbers can be multiplied as they are: kept as bits, or in float16, all
    would be copied in another form first."""
    stored = {leaf.dtype.name for leaf in jax.tree.leaves((section.keys, section.values))}
    stored |= {str(codec.dtype) for codec in section.codecs}
    return stored == {rows.dtype.name} and rows.dtype != jnp.float16


def _all_seen(section: Section, mask: Mask) -> bool:
    """Whether queries may see most of a section: else blocks that they do not see are left out."""
    return min(mask.window or section.size, mask.chunk or section.size) >= FILLED * section.size


def _visit(
    found: Partial, section: Section, rows: Array, mask: Mask, start: Array, size: int
) -> Partial:
    """And over a block. A last one that would pass the end is moved down; what it shares is not
    seen twice."""
    origin = jnp.minimum(start, section.first + section.size - size)
    return softmax_over(section, mask, rows, origin, size, start=start, after=found)


def _by_blocks(found: Partial, section: Section, rows: Array, inputs: AttentionInputs) -> Partial:
    """Coarse blocks up to where all is filled, fine ones after that."""
    if section.raw and section.size <= 2 * FINE:
        fine = coarse = section.size
    else:
        numbers = rows.shape[0] * rows.shape[1] * rows.shape[3]
        # Pages are copied by one operation however many they are, for which a CPU's threads divide
        # the work.
        shared = (1, 1) if section.pages is not None and on_cpu() else (numbers, 4)
        fine, coarse = _block_sizes(section.size, section.unit, *shared)
        fine = section.fit_units(fine)
        coarse = max(section.fit_units(coarse, fine), fine)

    stop = jnp.int32(section.first + section.size)

    def visit(start: Array, size: int, found: Partial) -> Partial:
        return _visit(found, section, rows, inputs.mask, start, size)

    def walk(found: Partial, first: Array, blocks: int, size: int, end: Array) -> Partial:
        def one(carry: tuple[Array, Partial], _: None) -> tuple[tuple[Array, Partial], None]:
            start, found = carry
            wanted = (start < end) & inputs.mask.reaches(*section.span(start, size), section)
            found = control_flow.cond(wanted, lambda f: visit(start, size, f), lambda f: f, found)
            return (start + size, found), None

        # The start is carried: a list of starts would be memory that grows with the capacity.
        step = jax.checkpoint(one, prevent_cse=False)
        return control_flow.scan(step, (first, found), length=blocks)[0][1]

    begin = jnp.int32(section.first)
    if coarse == fine:
        return walk(found, begin, -(-section.size // fine), fine, stop)
    filled = jnp.clip(section.filled(inputs.near()), 0, section.size)
    # Blocks behind a tail may be on the host, from where only what is filled is fetched.
    rounded = rows.shape[2] < FEW and section.unit == 1
    rest = coarse // SPARE if rounded else coarse - 1
    whole = (filled + coarse - 1 - rest) // coarse
    behind = begin + whole * coarse
    found = walk(found, begin, -(-section.size // coarse), coarse, behind)

    def finely(found: Partial) -> Partial:
        return walk(found, behind, -(-rest // fine), fine, stop)

    # A few turns of a loop that skip all they see cost as much as a small block.
    return control_flow.cond(filled > whole * coarse, finely, lambda found: found, found)


def _block_sizes(size: int, unit: int = 1, numbers: int = 1, parts: int = 4) -> tuple[int, int]:
    """Fine and coarse block sizes of ``size`` units of ``unit`` tokens, whose keys have so many
    numbers each: a coarse block is one of so many ``parts`` of them at most, rounded up to whole
    fine ones."""
    fine = min(max(FINE // unit, 1), size)
    tokens = min(COARSE, max(NUMBERS // numbers, FINE))
    most = tokens // unit // fine
    return fine, fine * max(min(-(-size // (parts * fine)), most), 1)
