"""The paths ``blocks`` and ``buckets``: softmax block by block, or over a prefix of every section.

The prefix of ``buckets`` contains all filled slots.

``blocks`` has a conditional per block, to skip empty blocks. An accelerator receives its work ahead
of time, and may have to wait for its host at every conditional. ``buckets`` has only one
conditional per layer. It has at most ``MAX_BUCKETS`` branches, one for each size of the prefix, and
all are compiled with the step.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention.mask import Mask
from kvjax.attention.softmax import AttentionInputs, Partial, softmax_over
from kvjax.cache.sections import Section
from kvjax.codecs import Rotated
from kvjax.core import control_flow
from kvjax.core.target import on_cpu
from kvjax.core.typing import Array, AttentionOutput

FINE_BLOCK = 128
"""The tokens of a fine block. Fine blocks cover the end of the filled part."""
COARSE_BLOCK = 1024
"""The maximum number of tokens of a coarse block. It is large enough that the CPU's threads can
share the work of copying a block."""
MAX_KEY_NUMBERS = 3 * 2**17
"""The maximum number of numbers in the keys of a block. Their copy then stays in the CPU's
caches."""
QUERY_CHUNK = 256
"""The number of queries that are processed together, block by block. More queries would see fewer
blocks in common."""
WIDEN_BELOW = 16
"""With fewer query rows than this, a CPU multiplies 16-bit numbers faster after converting them to
float32."""
FEW_ROWS = 16
"""With fewer query rows than this, reading a partly filled coarse block is cheaper than reading
fine blocks."""
MIN_FILLED_PART = 4
"""With fewer query rows than ``FEW_ROWS``, a coarse block is read if more than
``1 / MIN_FILLED_PART`` of it is filled."""
MIN_FILLED = 5 / 8
"""The fraction of a section that queries must see for the section to be multiplied in one piece."""
EVEN_BLOCK = 256
"""The tokens of a block if all blocks have the same size."""
SCORE_ARRAYS = 4
"""The number of score-sized arrays when a section is multiplied in one piece: the products, their
transpose, the masked scores and the weights."""


def blockwise(inputs: AttentionInputs, *, even: bool = False) -> AttentionOutput:
    """Compute attention over all sections, block by block, for a chunk of queries at a time.

    If ``even``, all blocks have the same size. The result of a row is then bitwise independent of
    the lengths of other rows.
    """
    # If both variants of the queries are the same array, it is carried once.
    queries = (
        (inputs.queries,) if inputs.queries is inputs.capped else (inputs.queries, inputs.capped)
    )
    new = inputs.queries.shape[2]
    whole = new // QUERY_CHUNK * QUERY_CHUNK if new > QUERY_CHUNK else 0

    def attend_chunk(queries: tuple[Array, ...], at: Array) -> Array:
        mask = replace(inputs.mask, queries=at)
        chunk = replace(inputs, queries=queries[0], capped=queries[-1], mask=mask)
        partial = Partial.empty(chunk.rows(chunk.sections[0]))
        for section in chunk.sections:
            partial = _add_section(_walk_evenly if even else _walk_section, partial, section, chunk)
        return chunk.finish(partial)

    def next_chunk(chunks: tuple[Array, ...], number: Array) -> tuple[tuple[Array, ...], None]:
        chunk = tuple(lax.dynamic_index_in_dim(x, number, keepdims=False) for x in chunks)
        output = attend_chunk(chunk, lax.dynamic_index_in_dim(at, number, keepdims=False))
        # The output overwrites its queries. A separate output array of zeros depends on nothing, so
        # a CPU would allocate one for every layer before the first layer runs.
        return (lax.dynamic_update_index_in_dim(chunks[0], output, number, 0), *chunks[1:]), None

    outputs = []
    if whole:
        count = whole // QUERY_CHUNK
        chunks = tuple(jnp.stack(jnp.split(x[:, :, :whole], count, axis=2)) for x in queries)
        at = jnp.stack(jnp.split(inputs.mask.queries[:, :whole], count, axis=1))
        stacked = control_flow.scan(next_chunk, chunks, jnp.arange(count, dtype=jnp.int32))[0][0]
        outputs = list(stacked)
    if whole < new:
        rest = tuple(x[:, :, whole:] for x in queries)
        outputs.append(attend_chunk(rest, inputs.mask.queries[:, whole:]))
    return outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)


def reference(inputs: AttentionInputs) -> AttentionOutput:
    """Compute attention by the path ``reference``, which processes each section in one piece."""
    partials = [
        softmax_over(
            section, inputs.mask, inputs.rows(section), jnp.int32(section.first), section.size
        )
        for section in inputs.sections
    ]
    return inputs.finish(*partials)


def without_rotation(section: Section, rows: Array) -> tuple[Section, Array, tuple[Rotated, ...]]:
    """Remove the outermost ``Rotated`` codecs of a section, and transform the query rows instead.
    Returns the section, the rows, and the codecs for ``rotate_back``."""
    keys, values = section.codecs
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    dtype = wide if is_widened(rows) else rows.dtype
    while isinstance(keys, Rotated) and section.rotary is None:
        rows, keys = keys.transform(rows.astype(wide)), keys.codec
    transforms: tuple[Rotated, ...] = ()
    while isinstance(values, Rotated):
        transforms, values = (values, *transforms), values.codec
    if keys is not section.codecs[0]:
        rows = rows.astype(dtype)
    return replace(section, codecs=(keys, values)), rows, transforms


def rotate_back(partial: Partial, transforms: tuple[Rotated, ...]) -> Partial:
    """Undo the transforms of weighted values, the innermost first."""
    weighted = partial.weighted
    for each in transforms:
        weighted = each.inverse_transform(weighted)
    return partial._replace(weighted=weighted)


def is_widened(rows: Array) -> bool:
    """Return whether a CPU multiplies these query rows in float32, even if they have 16 bits."""
    return on_cpu() and rows.shape[2] < WIDEN_BELOW


def has_product_dtype(section: Section, rows: Array) -> bool:
    """Return whether a section can be multiplied as it is stored. Numbers in float16, and 16-bit
    floats whose bits are stored as integers, would first be converted, in a copy."""
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves((section.keys, section.values))}
    dtypes |= {str(codec.dtype) for codec in section.codecs}
    return dtypes == {rows.dtype.name} and rows.dtype != jnp.float16


def _add_section(
    walk: Callable[[Partial, Section, Array, AttentionInputs], Partial],
    partial: Partial,
    section: Section,
    inputs: AttentionInputs,
) -> Partial:
    """Add a section by ``walk``. ``Rotated`` codecs are applied once, not in each block."""
    section, rows, values = without_rotation(section, inputs.rows(section))
    if not values:
        return walk(partial, section, rows, inputs)
    return partial.merge(rotate_back(walk(Partial.empty(rows), section, rows, inputs), values))


def _walk_section(
    partial: Partial, section: Section, rows: Array, inputs: AttentionInputs
) -> Partial:
    """Add a section in one piece if that is faster, otherwise block by block."""
    whole = section.whole and on_cpu() and _fits(section, rows)
    whole = whole and _is_mostly_visible(section, inputs.mask)

    def walk(partial: Partial) -> Partial:
        widen = rows.dtype.itemsize == 2 and is_widened(rows)
        return _by_blocks(partial, section, rows.astype(jnp.float32) if widen else rows, inputs)

    if not whole:
        return walk(partial)
    # A slice is copied before it is multiplied, but a whole array is not. So multiplying the whole
    # array is faster if most of it is filled. Empty slots may hold NaN of an earlier sequence, and
    # 0 * NaN is NaN. If the result is not finite, it is computed again block by block, which masks
    # empty slots.
    full = jnp.max(section.filled(inputs.length)) >= math.ceil(MIN_FILLED * section.size)

    @jax.checkpoint
    def in_one_piece(partial: Partial) -> tuple[Partial, Array]:
        begin, size = jnp.int32(0), section.size
        partial = softmax_over(section, inputs.mask, rows, begin, size, before=partial, whole=True)
        return partial, jnp.all(jnp.isfinite(partial.weighted))

    result, done = control_flow.cond(
        full, in_one_piece, lambda partial: (partial, jnp.bool_(False)), partial
    )
    return control_flow.cond(
        done, lambda result, _: result, lambda _, partial: walk(partial), result, partial
    )


def _walk_evenly(
    partial: Partial, section: Section, rows: Array, inputs: AttentionInputs
) -> Partial:
    """Add a section in blocks of one size, up to the length of the longest row."""
    mask = inputs.mask
    size = section.fit_units(min(max(EVEN_BLOCK // section.unit, 1), section.size))
    limited = (mask.window, mask.chunk, section.split, mask.bias) != (None,) * 4

    def visit_block(number: Array, partial: Partial) -> Partial:
        start = section.first + number * size

        def visit(partial: Partial) -> Partial:
            return _visit(partial, section, rows, mask, start, size)

        if not limited:
            return visit(partial)
        reached = mask.reaches(*section.span(start, size), section)
        return control_flow.cond(reached, visit, lambda partial: partial, partial)

    filled = jnp.clip(section.filled(inputs.visible_length()), 0, section.size)
    # A bias may be differentiated, and a loop of dynamic length has no derivative.
    end = section.size if mask.bias else filled
    return control_flow.fori_loop(0, -(-end // size), visit_block, partial)


def _fits(section: Section, rows: Array) -> bool:
    """Return whether a section may be multiplied in one piece: without a conversion, and with
    scores that take no more memory than the float32 copies of a block. The limit keeps memory from
    growing with the capacity."""
    batch, kv_heads, count, head_dim = rows.shape
    coarse = block_sizes(section.size, section.unit, batch * kv_heads * head_dim)[1]
    scores = SCORE_ARRAYS * count * section.size
    return has_product_dtype(section, rows) and scores <= 2 * coarse * head_dim


def _is_mostly_visible(section: Section, mask: Mask) -> bool:
    """Return whether queries may see most of a section. Otherwise it is faster to skip blocks."""
    size = section.size
    return min(mask.window or size, mask.chunk or size) >= MIN_FILLED * size


def _visit(
    partial: Partial, section: Section, rows: Array, mask: Mask, start: Array, size: int
) -> Partial:
    """Add a block. If the last block would extend past the end, it begins earlier. Units that it
    shares with the previous block are not counted again."""
    origin = jnp.minimum(start, section.first + section.size - size)
    return softmax_over(section, mask, rows, origin, size, start=start, before=partial)


def _by_blocks(partial: Partial, section: Section, rows: Array, inputs: AttentionInputs) -> Partial:
    """Add a section: coarse blocks as long as they are filled, then fine blocks."""
    sinks = section.split.sinks if section.split is not None else 0
    if section.raw and section.size - sinks <= 2 * FINE_BLOCK:
        fine = coarse = section.size
    else:
        numbers = rows.shape[0] * rows.shape[1] * rows.shape[3]
        # On a CPU, one operation copies all pages of a block, and all threads share its work.
        limits = (1, 1) if section.pages is not None and on_cpu() else (numbers, 4)
        fine, coarse = block_sizes(section.size, section.unit, *limits)
        fine = section.fit_units(fine)
        coarse = max(section.fit_units(coarse, fine), fine)

    stop = jnp.int32(section.first + section.size)

    def visit(start: Array, size: int, partial: Partial) -> Partial:
        return _visit(partial, section, rows, inputs.mask, start, size)

    def walk(partial: Partial, first: Array, blocks: int, size: int, end: Array) -> Partial:
        def one(carry: tuple[Array, Partial], _: None) -> tuple[tuple[Array, Partial], None]:
            start, partial = carry
            reached = (start < end) & inputs.mask.reaches(*section.span(start, size), section)
            partial = control_flow.cond(
                reached, lambda p: visit(start, size, p), lambda p: p, partial
            )
            return (start + size, partial), None

        # The start is part of the carry, because an array of starts would grow with the capacity.
        step = jax.checkpoint(one, prevent_cse=False)
        return control_flow.scan(step, (first, partial), length=blocks)[0][1]

    begin = jnp.int32(section.first)
    if coarse == fine:
        return walk(partial, begin, -(-section.size // fine), fine, stop)
    filled = jnp.clip(section.filled(inputs.visible_length()), 0, section.size)
    # Units of several tokens may be in host memory. Fetch only filled ones.
    round_up = rows.shape[2] < FEW_ROWS and section.unit == 1
    rest = coarse // MIN_FILLED_PART if round_up else coarse - 1
    whole = (filled + coarse - 1 - rest) // coarse
    fine_begin = begin + whole * coarse
    partial = walk(partial, begin, -(-section.size // coarse), coarse, fine_begin)

    def walk_rest(partial: Partial) -> Partial:
        return walk(partial, fine_begin, -(-rest // fine), fine, stop)

    # An iteration that skips its block still costs as much as a small block.
    return control_flow.cond(filled > whole * coarse, walk_rest, lambda partial: partial, partial)


def block_sizes(size: int, unit: int = 1, numbers: int = 1, parts: int = 4) -> tuple[int, int]:
    """Return the sizes of fine and coarse blocks, in units. A unit is a token, or a block that is
    quantized or moved together.

    Args:
      size: the number of units of the section.
      unit: the number of tokens per unit.
      numbers: how many numbers the keys of all rows have per token.
      parts: a coarse block is at most this fraction (``1 / parts``) of the section, rounded up to
        whole fine blocks.
    """
    fine = min(max(FINE_BLOCK // unit, 1), size)
    tokens = min(COARSE_BLOCK, max(MAX_KEY_NUMBERS // numbers, FINE_BLOCK))
    most = tokens // unit // fine
    return fine, fine * max(min(-(-size // (parts * fine)), most), 1)


MAX_BUCKETS = 8
"""The maximum number of prefix sizes. Each is a separate branch in every layer."""
MIN_SIZE = 256
"""Prefixes of this many tokens or fewer are not halved again."""
TILE = 128
"""Prefix sizes, except for the largest, are multiples of this number of tokens."""
CHUNK = 2048
"""The maximum number of tokens of a prefix that are sliced, decoded or fetched together."""
MAX_QUERIES = 32
"""The maximum number of queries per row. Longer calls would need large score matrices, whose size
is the number of queries times the capacity."""


def bucketed(inputs: AttentionInputs) -> AttentionOutput:
    """Compute attention over the smallest prefixes that contain all filled slots. Long calls use
    the path ``blocks``."""
    if inputs.queries.shape[2] > MAX_QUERIES:
        return blockwise(inputs)
    sections = inputs.sections

    def over(tokens: int) -> Partial:
        partials = []
        for whole in sections:
            section, rows, values = without_rotation(whole, inputs.rows(whole))
            partial = prefix(section, _units(section, tokens), rows, inputs.mask)
            partials.append(rotate_back(partial, values))
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
    # Devices with different keys may take different branches. They synchronize in ``finish``.
    return inputs.finish(
        control_flow.switch(index, [functools.partial(over, size) for size in sizes])
    )


def bucket_sizes(tokens: list[int]) -> list[int]:
    """Return prefix sizes in tokens, in ascending order, for sections of the sizes ``tokens``. The
    last prefix size is the size of the largest section. Each other one is about half of the
    next."""
    sizes = [max(tokens)]
    while len(sizes) < MAX_BUCKETS and sizes[-1] > MIN_SIZE:
        sizes.append(-(-sizes[-1] // (2 * TILE)) * TILE)
    return sizes[::-1]


def prefix(
    section: Section, units: int, rows: Array, mask: Mask, before: Partial | None = None
) -> Partial:
    """Compute the softmax over the first ``units`` units of a section, and merge it with
    ``before``, the softmax over other keys. A long prefix is processed in chunks by a scan of
    static length, which bounds the memory for decoded copies."""
    chunk = section.fit_units(min(units, max(CHUNK // section.unit, 1)))
    stop = section.first + units

    def over(start: Array, before: Partial | None = None) -> Partial:
        # If the last chunk would extend past the end, it begins earlier. Units that it shares with
        # the previous chunk are not counted again.
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
    """Return the number of units of a section in a prefix of ``tokens`` tokens, rounded up to whole
    pages."""
    units = -(-tokens // section.unit)
    return min(section.size, units + -units % section.page)
