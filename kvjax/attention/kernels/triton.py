"""A flash-attention and flash-decoding kernel for GPUs, which Pallas lowers by Triton.

Query rows are divided among programs. Each program reads the keys tile by tile, with the online
softmax (FlashAttention, Dao, Fu, Ermon, Rudra and Ré, arXiv:2205.14135). If there are few programs,
the filled part of a row is divided too, and the results are merged by log-sum-exp (Dao, Haziza,
Massa and Sizov, "Flash-Decoding for long-context inference", 2023). The kernel reads the cache as
it is stored: the codec's ``decode`` is traced into it and applied to one tile at a time.

The kernel was never executed on a device.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kvjax.attention.kernels.common import (
    KernelInputs,
    Ref,
    compiled,
    core_of,
    merge_splits,
    refuse,
    splits_of,
)
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.codecs import Codec, CodecWrapper, Raw, Store
from kvjax.codecs.scales import ScaledCodec
from kvjax.core import control_flow
from kvjax.core.compat import jax_0_10_varying_shape
from kvjax.core.target import current_target
from kvjax.core.typing import Array

TILE = 64
"""The tokens of a tile. A tile has at least one block, even if that is larger."""
MAX_ROWS = 64
"""The maximum number of query rows of a program. They all stay in registers."""
MIN_PAGE_TOKENS = 16
"""The minimum number of tokens of a page that are read at once."""
MMA_ROWS = 16
"""The minimum number of rows of a matrix product."""
STAGES = 3
"""The maximum number of pipeline stages, which is the number of tiles of keys and values in shared
memory. It is Triton's default."""


@functools.singledispatch
def decodes_in_kernel(codec: Codec) -> bool:
    """Return whether ``codec.decode`` can run in the kernel, on blocks without the axes of rows and
    heads. The default is False; codecs that can are registered here."""
    return False


@decodes_in_kernel.register(Raw)
@decodes_in_kernel.register(ScaledCodec)
def _(codec: Codec) -> bool:
    return True


@decodes_in_kernel.register
def _(codec: CodecWrapper) -> bool:
    return decodes_in_kernel(codec.codec)


def refusals(section: Section, rows: Array) -> dict[str, object]:
    """Return the possible reasons why the kernel can't read a section, and whether each applies.
    ``rows`` are the query rows, [batch, kv_heads, rows, head_dim]."""
    head_dim = rows.shape[3]
    stores = section.keys, section.values
    cores = [core_of(codec).codec for codec in section.codecs]
    units = [math.prod(x.shape[3:]) for x in jax.tree.leaves(stores)]
    decodes = all(map(decodes_in_kernel, cores)) and all(map(_has_no_constants, cores, stores))
    return {
        f"needs a head_dim that is a power of two, not {head_dim}": head_dim & head_dim - 1,
        f"can't decode {section.codecs} in a kernel": not decodes,
        "needs units of a power of two of numbers": any(unit & unit - 1 for unit in units),
    }


def _has_no_constants(codec: Codec, store: Store) -> bool:
    """Return whether ``decode`` uses no constant arrays, which a kernel can't hold."""
    return not jax.make_jaxpr(codec.decode)(store).consts


def decode(inputs: KernelInputs, before: Partial | None = None) -> Partial:
    """Compute the softmax of queries over a section, not yet divided by its total, and merge it
    with ``before``, the softmax over other keys. Only tiles that a query of the row sees are
    read."""
    section = inputs.section
    batch, kv_heads, rows, head_dim = inputs.queries.shape
    leaves, tree = jax.tree.flatten((section.keys, section.values))
    units = page = leaves[0].shape[2]
    tile = min(max(TILE // section.unit, 1), units)
    tile = 1 << tile.bit_length() - 1  # a power of two
    pages = []
    if section.pages is not None:
        pages, units = [section.pages], section.pages.shape[1] * page
        if units > page:
            tile = min(tile, page & -page)
            too_short = tile * section.unit < MIN_PAGE_TOKENS
            refuse("pallas", {f"can't read pages of {page} units": too_short})
    block_rows = min(pl.next_power_of_2(rows), MAX_ROWS)
    blocks = -(-rows // block_rows)
    copies = max(MMA_ROWS // block_rows, 1)  # repeat rows to fill a matrix product
    padding = blocks * block_rows - rows
    queries = jnp.pad(inputs.queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    queries = jnp.repeat(queries, copies, axis=2)
    at = inputs.at(blocks, block_rows)
    scalars, _ = inputs.scalars(tile * section.unit, at)
    at = jnp.repeat(at, copies, axis=2)
    splits = splits_of(batch * kv_heads * blocks, -(-(section.first + section.size) // tile))
    queries = queries.reshape(batch, kv_heads * blocks, block_rows * copies, head_dim)
    arrays = [queries, scalars, at]
    # The three axes of the grid are rows of the batch, key-value heads with blocks of query rows,
    # and splits of the keys.
    specs = [
        pl.BlockSpec((None, None, *queries.shape[2:]), lambda b, h, s: (b, h, 0, 0)),
        *(
            pl.BlockSpec((None, None, x.shape[2]), lambda b, h, s: (b, h % blocks, 0))
            for x in (scalars, at)
        ),
        *(pl.BlockSpec((None, x.shape[1]), lambda b, h, s: (b, 0)) for x in pages),
        *(_store_spec(x.shape, kv_heads, blocks, bool(pages)) for x in leaves),
    ]
    shapes: list[tuple[int, ...]] = [(block_rows,), (block_rows,), (block_rows, head_dim)]
    kernel = functools.partial(_kernel, inputs.without_arrays(), tree, tile, units, page, splits)
    # Shared memory holds the queries, and tiles in the dtype of the products (16 bits or more).
    number_bytes = head_dim * max(queries.dtype.itemsize, 2)
    free = current_target().shared_memory - block_rows * copies * number_bytes
    stages = min(STAGES, max(free // (2 * tile * section.unit * number_bytes), 1))

    def run(*arrays: Array, interpret: bool) -> list[Array]:
        return pl.pallas_call(
            kernel,
            grid=(batch, kv_heads * blocks, splits),
            in_specs=specs,
            out_specs=[_output_spec(shape) for shape in shapes],
            out_shape=[
                jax_0_10_varying_shape(
                    (batch, kv_heads * blocks, splits, *shape), jnp.float32, axes
                )
                for shape in shapes
            ],
            interpret=interpret,
            compiler_params=triton.CompilerParams(num_stages=stages),
        )(*arrays)

    arrays, axes = control_flow.match_varying([*arrays, *pages, *leaves])
    outputs = compiled(run, *arrays)
    return merge_splits(Partial(*outputs), inputs, blocks, splits, before)


def _kernel(
    inputs: KernelInputs, tree: Any, tile: int, units: int, page: int, splits: int, *refs: Ref
) -> None:
    """Run one program: a split of a row's keys, for one key-value head and one block of query rows.

    Args:
      inputs: the inputs, without arrays.
      tree: the structure of the stores of keys and values.
      tile: units per tile.
      units: units per row.
      page: units per page.
      splits: number of programs that share a row's keys.
      refs: queries, scalars, positions, the page table (if there are pages), stores, and the
        outputs.
    """
    queries_ref, scalars_ref, at_ref, *stores = refs[:-3]
    table_ref = stores.pop(0) if len(stores) > tree.num_leaves else None
    highest_ref, total_ref, weighted_ref = refs[-3:]
    section, queries, at = inputs.section, queries_ref[...], at_ref[...]
    unit, tokens = section.unit, tile * section.unit
    tiles = (scalars_ref[1] + splits - 1) // splits
    begin = scalars_ref[0] + pl.program_id(2) * tiles
    scalars = [scalars_ref[n][None] for n in range(2, scalars_ref.shape[0])]
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, weighted = carry
        # If the last tile would extend past the end, it begins earlier. Slots that it shares with
        # the previous tile are not counted again.
        start = jnp.minimum(number * tile, units - tile)
        place: tuple[object, ...] = (pl.ds(start, tile),)
        if table_ref is not None:
            place = jnp.maximum(table_ref[start // page], 0), pl.ds(start % page, tile)
        block = jax.tree.unflatten(tree, [ref[place] for ref in stores])
        keys, values = (
            core_of(codec).codec.decode(store).reshape(tokens, -1).astype(queries.dtype)
            for codec, store in zip(section.codecs, block, strict=True)
        )
        slots = start * unit + jnp.arange(tokens, dtype=jnp.int32)
        # Positions have one axis: Triton can't turn a reduction over a row into a column.
        positions = inputs.positions(slots, scalars).reshape(tokens)
        positions = jnp.where(slots >= number * tokens, positions, -1)
        scores = inputs.scores(dot(queries, keys.T))
        seen = inputs.sees(at[:, None], positions[None, :], scalars)
        scores = jnp.where(seen, scores, LOWEST)
        new_highest = jnp.maximum(highest, jnp.maximum(scores.max(1), LOWEST / 2))  # Partial.of
        weights = jnp.exp(scores - new_highest[:, None])
        shrink = jnp.exp(highest - new_highest)
        # Empty slots may hold NaN, and 0 * NaN is NaN.
        values = jnp.where((positions >= 0)[:, None], values, jnp.zeros_like(values))
        weighted = weighted * shrink[:, None] + dot(weights.astype(values.dtype), values)
        return new_highest, total * shrink + weights.sum(1), weighted

    zeros = jnp.zeros(queries.shape[0], jnp.float32)
    end = jnp.minimum(begin + tiles, scalars_ref[0] + scalars_ref[1])
    initial = zeros + LOWEST, zeros, jnp.zeros(queries.shape, jnp.float32)
    outputs = lax.fori_loop(begin, end, visit, initial)
    for ref, x in zip((highest_ref, total_ref, weighted_ref), outputs, strict=True):
        # All copies of a row are equal, so their maximum is any of them. Triton can reduce
        # registers, but not slice them.
        ref[...] = x.reshape(ref.shape[0], -1, *x.shape[1:]).max(1)


def _store_spec(shape: tuple[int, ...], kv_heads: int, blocks: int, pages: bool) -> pl.BlockSpec:
    """Return the spec of one head of a row, or of all pages. Arrays that all heads share have a
    head axis of size 1."""
    rest = (0,) * (len(shape) - 2)
    own = int(shape[1] > 1 or kv_heads == 1)
    if pages:
        whole = (shape[0], None, *shape[2:])
        return pl.BlockSpec(whole, lambda b, h, s: (0, h // blocks * own, *rest))
    return pl.BlockSpec((None, None, *shape[2:]), lambda b, h, s: (b, h // blocks * own, *rest))


def _output_spec(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Return the spec of the output of one program."""
    rest = (0,) * len(shape)
    return pl.BlockSpec((None, None, None, *shape), lambda b, h, s: (b, h, s, *rest))
