"""A flash-decoding kernel for TPUs that reads the cache as it is stored.

Each row of the batch processes only its own tiles, with the online softmax (Milakov and Gimelshein,
arXiv:1805.02867; FlashAttention, Dao, Fu, Ermon, Rudra and Ré, arXiv:2205.14135), from the first
tile that its queries may see to the last filled one. The number of tiles is an argument of the
kernel, so one program works for every length and does not read empty tiles. Scales per token are
applied to scores and weights, so most numbers are never dequantized. The kernel computes positions
from the row's cursors and needs no mask array.

The kernel is a ``pallas_call``, lowered by Mosaic. Tests compile it for v5e and v6e, and interpret
it on CPUs. It was never executed on a device.
"""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.attention.kernels.common import (
    KernelInputs,
    Ref,
    compiled,
    core_of,
    refuse,
    section_subblocks,
)
from kvjax.attention.kernels.tpu_tiles import (
    can_tile,
    repeat_queries,
    tile_scores,
    tile_weighted_values,
    tiles_of,
    times_matrix,
)
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.core import control_flow
from kvjax.core.compat import jax_0_8_in_hbm, jax_0_10_varying_shape
from kvjax.core.typing import Array
from kvjax.placement.order import LANES, SUBLANES, Order, Transposed

MAX_ROWS = 512
"""The maximum number of query rows that are processed together, tile by tile."""
MAX_BYTES = 2**21
"""The maximum size of a subblock's numbers in float32, in bytes. VMEM must hold several such arrays
at once."""
ROW_MULTIPLE = 16
"""Query rows are padded to a multiple of this number, which is the number of rows in a TPU tile of
16-bit numbers."""
OUTPUT_ARRAYS = 4
"""The number of output-sized arrays for which VMEM is reserved. If the kernel continues an earlier
softmax, that softmax must also be in VMEM. It fits without a reservation."""
MAX_TOKENS = 1024
"""The maximum number of tokens of a subblock of a tile."""


def refusals(section: Section, rows: Array) -> dict[str, object]:
    """Return the possible reasons why the kernel can't read a section, and whether each applies.
    ``rows`` are the query rows, [batch, kv_heads, rows, head_dim]."""
    head_dim, subblocks = rows.shape[3], section_subblocks(section)
    tileable = all(order.tileable for order in jax.tree.leaves(section.orders))
    readable = (section.unit == 1 or tileable) and all(
        can_tile(core_of(codec).codec, section.unit, subblocks, head_dim)
        for codec in section.codecs
    )
    return {
        f"can't read {section.codecs} tile by tile": not readable,
        f"needs blocks of at least {SUBLANES * subblocks} tokens here": (
            section.unit > 1 and section.unit < SUBLANES * subblocks
        ),
    }


def decode(inputs: KernelInputs, before: Partial | None = None) -> Partial:
    """Compute the softmax of queries over a section, not yet divided by its total. The kernel
    continues from ``before``, the softmax over other keys."""
    section = inputs.section
    values = core_of(section.codecs[1])
    if before is not None and values.transforms:  # the earlier output is not transformed
        return before.merge(decode(inputs))
    batch, kv_heads, rows, head_dim = inputs.queries.shape
    if head_dim % LANES and section.unit == 1:
        section = _transposed(section)
        inputs = replace(inputs, section=section)
    leaves = jax.tree.leaves((section.keys, section.values))
    orders = jax.tree.leaves(section.orders)
    capacity = leaves[0].shape[orders[0].axis] // orders[0].stride * section.unit
    heads, tile, block_rows = tile_sizes(inputs, capacity)
    # With a single page per row, the last tile may extend past the end, as it may without pages.
    has_many_pages = section.pages is not None and section.pages.shape[1] > 1
    refuse("pallas", {f"can't read pages of {capacity} tokens": has_many_pages and capacity % tile})
    blocks = -(-rows // block_rows)
    padded = blocks * block_rows
    queries = jnp.pad(inputs.queries, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    at = inputs.at(blocks, block_rows)
    scalars, tiles = inputs.scalars(tile, at)
    pages = jnp.zeros((1, 1), jnp.int32) if section.pages is None else section.pages
    tiles_per_page = -(-capacity // tile)
    at = jnp.broadcast_to(at.reshape(batch, padded, 1), (batch, padded, LANES))
    scalars = scalars.reshape(batch * blocks, -1)

    def row_spec(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *block), lambda b, h, q, j, *s: (b, h, q, 0))

    def store_spec(x: Array, order: Order) -> pl.BlockSpec:
        own_heads = 1 if x.shape[1] == 1 and kv_heads > 1 else heads
        block = [1, own_heads, *x.shape[2:]]
        block[order.axis] = min(tile // section.unit * order.stride, x.shape[order.axis])

        def index(
            b: Array, h: Array, q: Array, j: Array, s: Ref, t: Ref
        ) -> tuple[Array | int, ...]:
            n = b * blocks + q
            # After its last tile a row keeps the same index, so that nothing new is fetched.
            number = s[n, 0] + jnp.minimum(j, jnp.maximum(s[n, 1] - 1, 0))
            place: list[Array | int] = [b, 0 if own_heads < heads else h, 0, 0]
            place[order.axis] = number
            if section.pages is not None:
                place[0] = jnp.maximum(t[b, number // tiles_per_page], 0)
                place[order.axis] = number % tiles_per_page
            return tuple(place)

        return pl.BlockSpec(tuple(block), index)

    specs = [row_spec(block_rows, head_dim)]
    specs += [pl.BlockSpec((1, block_rows, LANES), lambda b, h, q, j, *s: (b, q, 0))]
    specs += [store_spec(x, order) for x, order in zip(leaves, orders, strict=True)]
    stats_spec = pl.BlockSpec((1, heads, SUBLANES, block_rows), lambda b, h, q, j, *s: (b, h, 0, q))
    out_specs = [stats_spec, row_spec(block_rows, head_dim)]
    widths = 1, 1, inputs.fold * head_dim
    scratch = [pltpu.VMEM((heads, block_rows, n), jnp.float32) for n in widths]
    start_from = () if before is None else _as_outputs(before, padded)
    aliases = {2 + len(specs) + n: n for n in range(len(start_from))}  # after scalars and pages
    specs += out_specs[: len(start_from)]
    # The inverse transform as a matrix, because a kernel can't hold constants.
    inverse = []
    if values.transforms:
        inverse.append(values.inverse_transform(jnp.eye(head_dim, dtype=jnp.float32)))
    specs += [pl.BlockSpec((head_dim, head_dim), lambda b, h, q, j, *s: (0, 0)) for _ in inverse]
    flat, tree = jax.tree.flatten(((section.keys, section.values), start_from, inverse))
    arrays, axes = control_flow.match_varying([scalars, pages, queries, at, tiles, *flat])
    out_shapes = [
        jax_0_10_varying_shape((batch, kv_heads, *shape), jnp.float32, axes)
        for shape in ((SUBLANES, padded), (padded, head_dim))
    ]

    def run(
        scalars: Array,
        pages: Array,
        queries: Array,
        at: Array,
        tiles: Array,
        *flat: Array,
        interpret: object,
    ) -> list[Array]:
        if interpret is False:
            stores, *rest = jax.tree.unflatten(tree, flat)
            flat = tuple(jax.tree.leaves((jax.tree.map(_in_hbm, stores), *rest)))
        return pl.pallas_call(
            functools.partial(_kernel, inputs.without_arrays(), tree, tile, blocks),
            out_shape=out_shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=(batch, kv_heads // heads, blocks, tiles),
                in_specs=specs,
                out_specs=out_specs,
                scratch_shapes=scratch,
            ),
            input_output_aliases=aliases,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
            ),
            interpret=interpret,
        )(scalars, pages, queries, at, *flat)

    # Under vmap, run the kernel in a loop. JAX's own rule for kernels whose grids differ also makes
    # a loop, but does not support aliases.
    call = custom_batching.sequential_vmap(functools.partial(compiled, run))
    stats, output = call(*arrays)
    return Partial(stats[:, :, 0, :rows], stats[:, :, 1, :rows], output[:, :, :rows])


def tile_sizes(inputs: KernelInputs, capacity: int) -> tuple[int, int, int]:
    """Return how many key-value heads, tokens and query rows a step of the kernel processes, so
    that its arrays fit in VMEM."""
    _, kv_heads, rows, head_dim = inputs.queries.shape
    block_rows = min(-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, MAX_ROWS)
    lanes = inputs.fold * head_dim
    # The numbers per token: keys or values, or scores. The scores of all subblocks are computed
    # before the first weights.
    width = max(lanes, block_rows * max(*inputs.groups, inputs.subblocks // 2)) * 4
    section, least = inputs.section, LANES
    if section.unit > 1:
        for order in jax.tree.leaves(section.orders):
            units = -(-order.alignment // order.stride)
            least = max(least, units * section.unit // inputs.subblocks)
    # The accumulator, and the output twice.
    per_head = max(least * width, OUTPUT_ARRAYS * block_rows * lanes * 4)
    fitting = (n for n in range(2, kv_heads + 1) if n * per_head <= MAX_BYTES)
    heads = max((n for n in fitting if kv_heads % n == 0), default=1)
    tokens = max(MAX_BYTES // (heads * width), least)
    tokens = min(1 << tokens.bit_length() - 1, max(MAX_TOKENS, least))
    # Sinks are in the same array as a ring. Read only the sinks.
    multiple = max(ROW_MULTIPLE, *(order.alignment for order in jax.tree.leaves(section.orders)))
    needed = -(-(section.first + section.size) * section.unit // multiple) * multiple
    tile = min(tokens * inputs.subblocks, capacity, needed if section.unit == 1 else capacity)
    return heads, tile, block_rows


def _in_hbm(store: Array) -> Array:
    """Pin a store to HBM. Otherwise XLA may copy it to fast memory before the kernel and back after
    its update, although each tile is fetched only once. Rows narrower than the lanes are left to
    XLA, which must transpose and copy them in any case."""
    narrow = store.shape[3] < LANES
    return store if narrow else jax_0_8_in_hbm(store)


def _as_outputs(partial: Partial, rows: int) -> tuple[Array, Array]:
    """Convert a softmax to the form of the kernel's outputs, padded to ``rows`` rows. Returns the
    highest scores and the totals along the lanes, [batch, kv_heads, 8, rows], and the weighted
    values."""
    padding = rows - partial.total.shape[2]
    stats = jnp.stack([partial.highest, *[partial.total] * (SUBLANES - 1)], axis=2)
    stats = jnp.pad(stats, ((0, 0), (0, 0), (0, 0), (0, padding)))
    return stats, jnp.pad(partial.weighted, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _transposed(section: Section) -> Section:
    """Return a raw section with channels before tokens, which is how XLA stores it in memory."""
    order = Transposed(axis=3)
    return replace(
        section,
        keys=order.arrange(section.keys),
        values=order.arrange(section.values),
        orders=(order, order),
    )


def _kernel(
    inputs: KernelInputs,
    tree: object,
    tile: int,
    blocks: int,
    scalars_ref: Ref,
    _: Ref,
    queries_ref: Ref,
    at_ref: Ref,
    *refs: Ref,
) -> None:
    """Process one tile of a row, for some key-value heads and one block of query rows."""
    stores, start_from, inverse = jax.tree.unflatten(tree, refs[:-5])
    stats_ref, output_ref, highest_ref, total_ref, weighted_ref = refs[-5:]
    row, number = pl.program_id(0) * blocks + pl.program_id(2), pl.program_id(3)
    head_dim = output_ref.shape[3]

    @pl.when(number == 0)
    def _() -> None:
        highest_ref[...] = jnp.full(highest_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        weighted_ref[...] = jnp.zeros(weighted_ref.shape, jnp.float32)
        if start_from:
            stats = jnp.swapaxes(start_from[0][0], 1, 2)
            highest_ref[...], total_ref[...] = stats[:, :, :1], stats[:, :, 1:2]
            weighted_ref[:, :, :head_dim] = start_from[1][0]

    @pl.when(number < scalars_ref[row, 1])
    def _() -> None:
        scalars = [jnp.full((1, 1), scalars_ref[row, n]) for n in range(2, scalars_ref.shape[1])]
        start = (scalars_ref[row, 0] + number) * tile
        subblocks = range(inputs.subblocks)
        keys, values = (jax.tree.map(lambda ref: ref[0], store) for store in stores)
        key_codec, value_codec = (core_of(codec).codec for codec in inputs.section.codecs)
        key_orders, value_orders = inputs.section.orders
        queries = repeat_queries(queries_ref[0], inputs.fold, inputs.groups[0])
        scored = []
        for index in subblocks:
            slots = start + inputs.slots(index, tile, lambda n: _iota(n, 1))
            positions = inputs.positions(slots, scalars)
            seen = inputs.sees(at_ref[0, :, :1][None], positions, scalars)
            tiles = tiles_of(key_codec, keys, key_orders, index, inputs.subblocks)
            products = functools.reduce(
                jnp.add, [tile_scores(each, queries, inputs) for each in tiles]
            )
            scored.append((jnp.where(seen, inputs.scores(products), LOWEST), positions))
        before = highest_ref[...]
        highest = jnp.maximum(before, LOWEST / 2)  # see Partial.of
        for scores, _ in scored:
            highest = jnp.maximum(highest, scores.max(-1, keepdims=True))
        shrink = jnp.exp(before - highest)
        total, weighted = total_ref[...] * shrink, weighted_ref[...] * shrink
        for index, (scores, positions) in zip(subblocks, scored, strict=True):
            weights = jnp.exp(scores - highest)
            total += weights.sum(-1, keepdims=True)

            def present_rows(index: int = index) -> Array:
                slots = start + inputs.slots(index, tile, lambda n: _iota(n, 0))
                return inputs.positions(slots, scalars) >= 0

            for each in tiles_of(value_codec, values, value_orders, index, inputs.subblocks):
                weighted += tile_weighted_values(
                    each, weights, positions >= 0, present_rows, inputs, queries_ref.dtype
                )
        highest_ref[...], total_ref[...], weighted_ref[...] = highest, total, weighted

    @pl.when(number == pl.num_programs(3) - 1)
    def _() -> None:
        # Store statistics along the lanes. Columns with one number per row would take a tile each.
        highest, total = (
            jnp.swapaxes(jnp.broadcast_to(ref[...], (*ref.shape[:2], LANES)), 1, 2)[:, :SUBLANES]
            for ref in (highest_ref, total_ref)
        )
        first = lax.broadcasted_iota(jnp.int32, highest.shape, 1) == 0
        stats_ref[0] = jnp.where(first, highest, total)
        weighted = weighted_ref[...]
        folds = [weighted[:, :, n : n + head_dim] for n in range(0, weighted.shape[2], head_dim)]
        output = functools.reduce(jnp.add, folds)
        output_ref[0] = times_matrix(output, inverse[0][...]) if inverse else output


def _iota(count: int, axis: int) -> Array:
    """Return 0 to ``count - 1`` along one of two axes."""
    return lax.broadcasted_iota(jnp.int32, (1, count) if axis else (count, 1), axis)
