"""A flash-decoding kernel for NVIDIA GPUs since Ampere, which reads the cache as it is stored.

A program of four warps reads the tiles of one row, or of a part of it (a split), for one key-value
head and one block of query rows, with the online softmax (FlashAttention, Dao, Fu, Ermon, Rudra and
Ré, arXiv:2205.14135). Splits are merged by log-sum-exp (Dao, Haziza, Massa and Sizov,
"Flash-Decoding for long-context inference", 2023). A pipeline fetches tiles into shared memory
ahead of time, with TMA from Hopper on and with ``cp.async`` on Ampere. Tensor cores multiply 16-bit
numbers with ``mma``.

The kernel is a ``mosaic_gpu.kernel`` of Pallas. Tests compile it for A100, L4, H100, H200, B200 and
others, and interpret it on CPUs with race detection. It was never executed on a device. The
interpreter supports only TMA, so copies with ``cp.async`` are compiled but not interpreted.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu

from kvjax.attention.kernels import common
from kvjax.attention.kernels._mosaic_gpu_plan import KIB, MMA_K, Layout, Operand, Plan, plan_of
from kvjax.attention.kernels.common import (
    KernelInputs,
    Ref,
    core_of,
    merge_splits,
    refuse,
    splits_of,
)
from kvjax.attention.kernels.mosaic_gpu_formats import TERMS, arrays_of, format_of, terms_of
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.core.target import check_mosaic_capability, current_target, default_device
from kvjax.core.typing import Array

plgpu: Any = mosaic_gpu  # parts of it are missing before JAX 0.12
Carry = tuple[Array, Array, list[Array], list[Array]]
"""What a program carries from tile to tile: the highest scores, the sums of the weights (separate
for each token of a subblock until the end), the weighted values of each group, and for each group
the products of weights and offsets."""


def refusals(section: Section, rows: Array) -> dict[str, object]:
    """Return the possible reasons why the kernel can't read a section, and whether each applies.
    ``rows`` are the query rows, [batch, kv_heads, rows, head_dim]."""
    head_dim = rows.shape[3]
    cores = [core_of(codec).codec for codec in section.codecs]
    known = None not in [format_of(core, section.unit, head_dim) for core in cores]
    fits = known and plan_of(section, head_dim, rows.shape[2], rows.dtype) is not None
    return {
        f"can't read {section.codecs} in a kernel": not known,
        f"needs multiples of {MMA_K} tokens and channels that share bytes and scales, and tiles "
        "that fit in a GPU's shared memory": known and not fits,
    }


def decode(inputs: KernelInputs, before: Partial | None = None) -> Partial:
    """Compute the softmax of queries over a section, not yet divided by its total, and merge it
    with ``before``, the softmax over other keys. Only tiles that a query of the row sees are
    read."""
    section = inputs.section
    batch, kv_heads, rows, head_dim = inputs.queries.shape
    dtype = inputs.queries.dtype
    plan = plan_of(section, head_dim, rows, dtype)
    refuse("pallas", {f"can't read {section.codecs} here": plan is None})
    assert plan is not None
    interpret = _interpret()
    capability = current_target().capability or (9, 0)
    if interpret is None:
        check_mosaic_capability(capability)
    blocks = -(-rows // plan.rows)
    queries = jnp.pad(inputs.queries, ((0, 0), (0, 0), (0, blocks * plan.rows - rows), (0, 0)))
    queries = queries.reshape(batch, kv_heads * blocks, plan.rows, head_dim)
    at = inputs.at(blocks, plan.rows)
    scalars, _ = inputs.scalars(plan.tile * section.unit, at)
    tiles = -(-(section.first + section.size) // plan.tile)
    splits = splits_of(batch * kv_heads * blocks, tiles)
    keys, values = (
        arrays_of(core_of(codec).codec, store)
        for codec, store in zip(section.codecs, (section.keys, section.values), strict=True)
    )
    units = keys[0].shape[2] // plan.formats[0].rows
    columns = 0 if section.pages is None else section.pages.shape[1]
    output_rows, grid = plan.output_rows(rows), (batch, kv_heads * blocks, splits)
    barriers = capability[0] >= 9 or interpret is not None
    program = functools.partial(
        _program,
        inputs.without_arrays(),
        plan,
        blocks,
        splits,
        units,
        columns,
        output_rows,
        barriers,
        interpret is not None,
    )
    run = plgpu.kernel(
        program,
        out_type=[
            jax.ShapeDtypeStruct((*grid, *shape), jnp.float32)
            for shape in ((plan.rows,), (plan.rows,), (output_rows, head_dim))
        ],
        grid=grid,
        grid_names=("row", "head", "split"),
        scratch_types=plan.scratch(output_rows, barriers),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=2 * KIB, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    tables = [] if section.pages is None else [section.pages]
    highest, total, output = run(queries, scalars, at, *tables, *keys, *values)
    # A program writes fewer outputs than it has rows if it has few queries.
    outputs = Partial(highest[..., :output_rows], total[..., :output_rows], output)
    return merge_splits(outputs, inputs, blocks, splits, before)


def _interpret() -> Any:
    """Return the ``interpret`` argument of the kernel if the default device is a CPU, otherwise
    None."""
    if default_device().platform != "cpu":
        return None
    return plgpu.InterpretGPUParams() if common.INTERPRETED is True else common.INTERPRETED


def _program(
    inputs: KernelInputs,
    plan: Plan,
    blocks: int,
    splits: int,
    units: int,
    columns: int,
    output_rows: int,
    barriers: bool,
    interpreted: bool,
    *refs: Ref,
    **shared: Ref,
) -> None:
    """Run one program: a split of a row's tiles, for one key-value head and one block of query
    rows.

    Args:
      inputs: the inputs, without arrays.
      plan: how the kernel divides the call.
      blocks: number of blocks of query rows.
      splits: number of programs that share a row's tiles.
      units: number of units of a page, or of a row if slots are not in pages.
      columns: maximum number of pages of a row; 0 without pages.
      output_rows: number of output rows that the program writes.
      barriers: whether TMA fetches tiles and barriers signal that they have arrived.
      interpreted: whether the kernel is interpreted.
      refs: queries, scalars, positions, the page table (if there are pages), stores, and the
        outputs.
      shared: arrays in shared memory, by name.
    """
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    queries_ref, scalars_ref, at_ref, *rest = refs[:-3]
    outs = [ref.at[row, head, split] for ref in refs[-3:]]
    table_ref = rest.pop(0) if columns else None
    block, kv_head = lax.rem(head, blocks), lax.div(head, blocks)
    operands = []
    for which, form in enumerate(plan.formats):
        stores = [rest.pop(0) for _ in form.arrays]
        # Arrays that all heads share have a head axis of size 1.
        heads = [ref.at[:, pl.ds(kv_head if ref.shape[1] > 1 else 0, 1)] for ref in stores]
        operands.append(Operand(plan, which, dict(zip(form.arrays, heads, strict=True)), shared))
    keys, values = operands
    scalars = [scalars_ref[row, block, n] for n in range(2, scalars_ref.shape[2])]
    tiles = lax.div(scalars_ref[row, block, 1] + splits - 1, splits)
    begin = scalars_ref[row, block, 0] + split * tiles
    end = jnp.minimum(begin + tiles, scalars_ref[row, block, 0] + scalars_ref[row, block, 1])
    count, stages = max(columns, 1) * units, plan.stages
    tile_tokens = plan.tile * plan.unit

    def locate(tile: Array) -> tuple[Array, Array, Array]:
        """Return three indices for a tile: of its first unit in the row, of the row or page of the
        store that contains it, and of its first unit in this row or page. If the last tile would
        extend past the end, it begins earlier. Slots that it shares with the previous tile are not
        counted again."""
        start = jnp.minimum(tile * plan.tile, count - plan.tile)
        if table_ref is None:
            return start, row, start
        page = table_ref[row, lax.div(start, jnp.int32(units))]
        return start, jnp.maximum(page, 0), lax.rem(start, jnp.int32(units))

    def fetch(tile: Array) -> None:
        _, place, unit = locate(tile)
        stage = lax.rem(tile - begin, jnp.int32(stages))
        arrived = shared["arrived"].at[stage] if barriers else None
        for operand in operands:
            operand.fetch(place, unit, stage, arrived)

    def wait(tile: Array, stage: Array) -> None:
        if barriers:
            plgpu.barrier_wait(shared["arrived"].at[stage])
            return
        # Each copy is a separate group. Near the end, fewer copies are in flight after this tile's
        # copy.
        last = tile + stages - 2
        pl.when(last < end)(lambda: plgpu.wait_gmem_to_smem(2 * (stages - 2)))
        pl.when(last >= end)(lambda: plgpu.wait_gmem_to_smem(0))

    def load_rhs(ref: Ref) -> Array:
        return plgpu.load(ref, layout=plan.rhs, optimized=False)

    def multiply(a: list[Array], b: list[Array], acc: Array) -> Array:
        """Multiply two sums of terms. For float32 numbers, only the significant products of terms
        are computed."""
        most = max(len(a), len(b))
        pairs = itertools.product(range(len(a)), range(len(b)))
        for i, j in ((i, j) for i, j in pairs if i + j < most):
            acc = _dot(acc, a[i], b[j], interpreted)
        return acc

    def zeros(*shape: int) -> Array:
        layout = plan.acc if len(shape) == 2 else plan.acc.reduce(1)
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

    rows, head_dim, tokens = plan.rows, plan.head_dim, plan.tokens
    float32 = plan.queries == jnp.float32
    terms = TERMS if float32 else 1
    queries = plgpu.load(queries_ref.at[row, head], layout=plan.lhs, optimized=False)
    queries = queries.astype(jnp.float32)
    query_terms = terms_of(queries, plan.product, terms)
    at = plgpu.load(at_ref.at[row, block], layout=plan.acc.reduce(1), optimized=False)
    at = plgpu.layout_cast(lax.broadcast_in_dim(at, (rows, tokens), (0,)), plan.acc)
    groups = [form.groups for form in plan.formats]
    widths = [head_dim // form.groups for form in plan.formats]
    # With four warps, both layouts distribute rows in the same way, but Mosaic does not know that.
    own_rows = plan.acc if plan.warps == 4 else plan.lhs

    def sum_queries(
        channels: pl.Slice | slice, factor: Callable[[Layout], Array] | None = None
    ) -> Array:
        """Sum queries, or their products with a factor, over channels. Returns float32[rows]."""
        x = queries_ref.at[row, head, :, channels]
        x = plgpu.load(x, layout=own_rows, optimized=False).astype(jnp.float32)
        if factor is not None:
            x = x * _per_column(factor(own_rows.reduce(0)), x, own_rows)
        return plgpu.layout_cast(jnp.sum(x, axis=1), plan.acc.reduce(1))

    all_channels = pl.ds(0, head_dim)
    sums = [
        sum_queries(pl.ds(n * widths[0], widths[0]))
        for n in range(groups[0] if keys.format.offsets_tokens else 0)
    ]

    def key_products(subblock: tuple[int, int], place: Array, unit: Array, stage: Array) -> Array:
        """Multiply queries and a subblock of keys. Returns float32[rows, tokens]."""
        lhs, offset = query_terms, None
        scales = functools.partial(keys.channel_scales, place, unit, subblock, all_channels)
        if keys.format.tokens_per_scale:
            scale = scales(plan.lhs.reduce(0)).scale
            lhs = terms_of(queries * _per_column(scale, queries, plan.lhs), plan.product, terms)
        if keys.format.offsets_channels:
            offset = sum_queries(all_channels, lambda layout: scales(layout).offset)
        total = None
        for group in range(groups[0]):
            channels = slice(group * widths[0], (group + 1) * widths[0])
            transposed = [
                load_rhs(x.transpose((1, 0))) for x in keys.numbers(subblock, stage, group)
            ]
            product = multiply([x[:, channels] for x in lhs], transposed, zeros(rows, tokens))
            if keys.format.token_arrays:
                scale, token_offset = keys.token_scales(subblock, group)
                if scale is not None:
                    product = product * _per_column(scale, product, plan.acc)
                if token_offset is not None:
                    product = product + _per_row(sums[group], product, plan.acc) * _per_column(
                        token_offset, product, plan.acc
                    )
            total = product if total is None else total + product
        assert total is not None
        return total if offset is None else total + _per_row(offset, total, plan.acc)

    def visible(subblock: tuple[int, int], tile: Array, start: Array) -> tuple[Array, Array]:
        """Return which tokens of a subblock each query sees, and the subblock's first slot."""
        first = (start + subblock[0]) * plan.unit + subblock[1] * tokens
        slots = plgpu.broadcasted_iota(jnp.int32, (rows, tokens), 1, layout=plan.acc) + first
        positions = inputs.positions(slots, scalars)
        positions = jnp.where(slots >= tile * tile_tokens, positions, -1)
        return inputs.sees(at, positions, scalars), first

    def present(first: Array, tile: Array, shape: tuple[int, int]) -> Array:
        """Return whether the slots of a subblock contain tokens, in the shape of the subblock's
        numbers, [tokens, channels]."""
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plan.rhs) + first
        return (inputs.positions(slots, scalars) >= 0) & (slots >= tile * tile_tokens)

    def store_weights(n: int, weights: Array, offsets: list[Array]) -> list[Array]:
        """Multiply the weights of the n-th subblock by the token scales of each group, and store
        them for the product with values. Returns ``offsets``, the accumulated products of weights
        and offsets, with this subblock added."""
        offsets = list(offsets)
        for group in range(groups[1]):
            scaled, offset = weights, None
            if values.format.token_arrays:
                scale, offset = values.token_scales(plan.subblocks[n], group)
                assert scale is not None
                scaled = weights * _per_column(scale, weights, plan.acc)
            stored = scaled.astype(shared["weights"].dtype)
            plgpu.store(shared["weights"].at[n, group], stored, optimized=False)
            if offset is None:
                continue
            if values.format.middle:  # sum the rounded weights, so that rounding errors cancel
                plane = plan.plane_row(1, plan.subblocks[n])[0]
                lower = values.format.middle * values.format.plane_scale(plane)
                offsets[group] = offsets[group] - stored.astype(jnp.float32) * lower
            else:
                offsets[group] = offsets[group] + weights * _per_column(offset, weights, plan.acc)
        return offsets

    def add_values(
        n: int,
        weighted: list[Array],
        tile: Array,
        first: Array,
        place: Array,
        unit: Array,
        stage: Array,
    ) -> list[Array]:
        """Add the n-th subblock to the weighted values of each group, which are float32[rows,
        width]."""
        results = []
        raw, subblock = "scale" not in values.format.arrays, plan.subblocks[n]
        for group, total in enumerate(weighted):
            weights = plgpu.load(shared["weights"].at[n, group], layout=plan.lhs, optimized=False)
            lhs = terms_of(weights, plan.product, TERMS) if float32 else [weights]
            rhs = [load_rhs(x) for x in values.numbers(subblock, stage, group)]
            if raw:  # empty slots may hold NaN, and 0 * NaN is NaN
                mask = present(first, tile, (tokens, widths[1]))
                rhs = [jnp.where(mask, x, jnp.zeros_like(x)) for x in rhs]
            channels = pl.ds(group * widths[1], widths[1])
            scale = offset = None
            if values.format.tokens_per_scale or "mean" in values.format.arrays:
                scale, offset = values.channel_scales(
                    place, unit, subblock, channels, plan.acc.reduce(0)
                )
            if scale is None:
                product = multiply(lhs, rhs, total)
            else:
                product = multiply(lhs, rhs, zeros(rows, widths[1]))
                product = total + product * _per_column(scale, product, plan.acc)
            if offset is not None:
                ones = plgpu.layout_cast(jnp.ones((tokens, widths[1]), plan.product), plan.rhs)
                weight_sums = multiply(lhs, [ones], zeros(rows, widths[1]))
                product = product + weight_sums * _per_column(offset, product, plan.acc)
            results.append(product)
        return results

    def visit(tile: Array, carry: Carry) -> Carry:
        highest, total, weighted, offsets = carry
        stage = lax.rem(tile - begin, jnp.int32(stages))
        wait(tile, stage)
        if barriers:
            plgpu.commit_smem()  # reads of the next stage must end before it is overwritten
        pl.when(tile + stages - 1 < end)(lambda: fetch(tile + stages - 1))
        start, place, unit = locate(tile)
        keys.convert(place, unit, stage)
        scores, firsts = [], []
        for subblock in plan.subblocks:
            products = inputs.scores(key_products(subblock, place, unit, stage))
            seen, first = visible(subblock, tile, start)
            scores.append(jnp.where(seen, products, LOWEST))
            firsts.append(first)
        values.convert(place, unit, stage)
        new_highest = jnp.max(functools.reduce(jnp.maximum, scores), axis=1)
        new_highest = jnp.maximum(highest, jnp.maximum(new_highest, LOWEST / 2))  # Partial.of
        shrink = jnp.exp(highest - new_highest)
        total = total * _per_row(shrink, total, plan.acc)
        offsets = [x * _per_row(shrink, x, plan.acc) for x in offsets]
        for n, products in enumerate(scores):
            weights = jnp.exp(products - _per_row(new_highest, products, plan.acc))
            total = total + weights
            offsets = store_weights(n, weights, offsets)
        weighted = [x * _per_row(shrink, x, plan.acc) for x in weighted]
        for n in range(len(plan.subblocks)):
            weighted = add_values(n, weighted, tile, firsts[n], place, unit, stage)
        return new_highest, total, weighted, offsets

    for n in range(stages - 1):
        pl.when(begin + n < end)(functools.partial(fetch, begin + n))
    initial = (
        zeros(rows) + LOWEST,
        zeros(rows, tokens),
        [zeros(rows, widths[1])] * groups[1],
        [zeros(rows, tokens)] * (groups[1] if values.format.offsets_tokens else 0),
    )
    highest, total, weighted, offsets = lax.fori_loop(begin, end, visit, initial)
    for n, x in enumerate(offsets):
        weighted[n] = weighted[n] + _per_row(jnp.sum(x, axis=1), weighted[n], plan.acc)
    plgpu.store(outs[0], highest, optimized=False)
    plgpu.store(outs[1], jnp.sum(total, axis=1), optimized=False)
    into = shared.get("output", outs[2])
    for n, x in enumerate(weighted):
        plgpu.store(into.at[:, pl.ds(n * widths[1], widths[1])], x, optimized=False)
    if "output" in shared:
        plgpu.store(outs[2], into[pl.ds(0, output_rows)], optimized=False)


def _dot(acc: Array, a: Array, b: Array, interpreted: bool) -> Array:
    """Add a matrix product to an accumulator. The interpreter does not support ``mma``."""
    if interpreted:
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, b)


def _per_column(numbers: Array, like: Array, layout: Layout) -> Array:
    """Broadcast numbers [columns] over rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers, like.shape, (1,)), layout)


def _per_row(numbers: Array, like: Array, layout: Layout) -> Array:
    """Broadcast numbers [rows] over columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers, like.shape, (0,)), layout)
