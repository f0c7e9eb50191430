"""A kernel for NVIDIA's GPUs from Ampere on: queries over a long text, read as it is kept.

Flash decoding (Dao, Haziza, Massa and Sizov, "Flash-Decoding for long-context inference", 2023): a
program of four warps walks a share of a row's text, for one head of keys and some rows of queries,
with the online softmax (Dao, Fu, Ermon, Rudra and Ré, arXiv:2205.14135), and shares are merged by
log-sum-exp. Pieces of the text are fetched ahead into shared memory, by the copy engine of Hopper
and later (TMA) or by Ampere's ``cp.async``, and multiplied by ``mma`` of 16-bit numbers.

It is ``mosaic_gpu.kernel`` of Pallas. No device has run it: it is compiled for A100, L4, H100,
H200, B200 and others, and interpreted on CPUs, with races detected. JAX's interpreter knows the
copy engine alone, so that the copies by ``cp.async`` are compiled only.
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
from kvjax.attention.kernels.common import Reading, refuse
from kvjax.attention.kernels.mosaic_gpu_plan import GRAIN, KIB, Plan, plan_of, splits_of
from kvjax.attention.kernels.mosaic_gpu_side import Side
from kvjax.attention.kernels.mosaic_gpu_stores import (
    TERMS,
    arrays_of,
    form_of,
    terms_of,
)
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.codecs import in_tiles
from kvjax.core.target import check_mosaic_capability, current_target, default_device
from kvjax.core.typing import Array

plgpu: Any = mosaic_gpu  # what of it is used here came with JAX 0.11 and 0.12


def decode(reading: Reading, before: Partial | None = None) -> Partial:
    """The softmax of rows of queries over a section, not yet divided by its total, merged with that
    over other keys, ``before``. Pieces before the first and behind the last that any of a row's
    queries sees are not read."""
    section = reading.section
    batch, kv_heads, rows, head_dim = reading.queries.shape
    dtype = reading.queries.dtype
    plan = plan_of(section, head_dim, rows, dtype)
    refuse("pallas", {f"can't read {section.codecs} here": plan is None})
    assert plan is not None
    interpret = _interpret()
    capability = current_target().capability or (9, 0)
    if interpret is None:
        check_mosaic_capability(capability)
    blocks = -(-rows // plan.rows)
    queries = jnp.pad(reading.queries, ((0, 0), (0, 0), (0, blocks * plan.rows - rows), (0, 0)))
    queries = queries.reshape(batch, kv_heads * blocks, plan.rows, head_dim)
    at = reading.at(blocks, plan.rows)
    scalars, _ = reading.scalars(plan.piece * section.unit, at)
    pieces = -(-(section.first + section.size) // plan.piece)
    splits = splits_of(batch * kv_heads * blocks, pieces)
    stores = [
        arrays_of(codec, store)
        for codec, store in zip(section.codecs, (section.keys, section.values), strict=True)
    ]
    units = stores[0][0].shape[2] // plan.forms[0].rows
    columns = 0 if section.pages is None else section.pages.shape[1]
    written, place = plan.written(rows), (batch, kv_heads * blocks, splits)
    fenced = capability[0] >= 9 or interpret is not None
    program = functools.partial(
        _program, reading.bare(), plan, blocks, splits, units, columns, written, fenced,
        interpret is not None,
    )  # fmt: skip
    run = plgpu.kernel(
        program,
        out_type=[
            jax.ShapeDtypeStruct((*place, *each), jnp.float32)
            for each in ((plan.rows,), (plan.rows,), (written, head_dim))
        ],
        grid=place,
        grid_names=("row", "head", "share"),
        scratch_types=plan.scratch(written, fenced),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=2 * KIB, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret,
    )
    tables = [] if section.pages is None else [section.pages]
    highest, total, mixed = run(queries, scalars, at, *tables, *stores[0], *stores[1])
    # Fewer than a program has are written where there are no more.
    found = Partial(highest[..., :written], total[..., :written], mixed)
    found = found.joined(2) if splits > 1 else Partial(*(x[:, :, 0] for x in found))
    every = (x.reshape(batch, kv_heads, blocks * written, *x.shape[3:]) for x in found)
    found = Partial(*(x[:, :, :rows] for x in every))
    found = found._replace(mixed=in_tiles(section.codecs[1]).unturn(found.mixed))
    return found if before is None else before.merge(found)


def refusals(section: Section, rows: Array) -> dict[str, object]:
    """What the kernel can't read for rows of queries [batch, kv_heads, rows, head_dim], and whether
    a section is such."""
    head_dim = rows.shape[3]
    forms = [form_of(codec, section.unit, head_dim) for codec in section.codecs]
    known = None not in forms
    fits = known and plan_of(section, head_dim, rows.shape[2], rows.dtype) is not None
    return {
        f"can't read {section.codecs} in a kernel": not known,
        f"takes multiples of {GRAIN} tokens and channels that share bytes and scales, and no more "
        "than fit in a GPU's shared memory": known and not fits,
    }


def _interpret() -> Any:
    """How it is interpreted where a CPU is the default device; None elsewhere."""
    if default_device().platform != "cpu":
        return None
    return plgpu.InterpretGPUParams() if common.INTERPRETED is True else common.INTERPRETED


def _program(
    reading: Reading, plan: Plan, blocks: int, splits: int, units: int, columns: int, written: int,
    fenced: bool, interpreted: bool, *refs: Any, **shared: Any,
) -> None:  # fmt: skip
    """One program: a share of a row's pieces, for a block of queries and their head of keys.

    ``units``: of a page, or of a row without; ``columns``: pages of a row, 0 where there are none.
    ``written``: rows of queries whose mixtures are written. ``fenced``: whether the copy engine
    fetches, and barriers tell what has arrived.
    """
    row, head, share = (lax.axis_index(name) for name in ("row", "head", "share"))
    queries_ref, scalars_ref, at_ref, *rest = refs[:-3]
    outs = [ref.at[row, head, share] for ref in refs[-3:]]
    table_ref = rest.pop(0) if columns else None
    block, own = lax.rem(head, blocks), lax.div(head, blocks)
    sides = []
    for which, form in enumerate(plan.forms):
        given = [rest.pop(0) for _ in form.arrays]
        # What all heads have in common has one.
        heads = [ref.at[:, pl.ds(own if ref.shape[1] > 1 else 0, 1)] for ref in given]
        sides.append(Side(plan, which, dict(zip(form.arrays, heads, strict=True)), shared))
    keys, values = sides
    numbers = [scalars_ref[row, block, n] for n in range(2, scalars_ref.shape[2])]
    each = lax.div(scalars_ref[row, block, 1] + splits - 1, splits)
    begin = scalars_ref[row, block, 0] + share * each
    end = jnp.minimum(begin + each, scalars_ref[row, block, 0] + scalars_ref[row, block, 1])
    count, steps, tokens = max(columns, 1) * units, plan.steps, plan.piece * plan.unit

    def where(piece: Any) -> tuple[Any, Any, Any]:
        """The first unit of a piece; and the row or page it is of, and where there. A last piece
        that would pass the end is moved down; what it shares is not seen twice."""
        start = jnp.minimum(piece * plan.piece, count - plan.piece)
        if table_ref is None:
            return start, row, start
        page = table_ref[row, lax.div(start, jnp.int32(units))]
        return start, jnp.maximum(page, 0), lax.rem(start, jnp.int32(units))

    def fetch(piece: Any) -> None:
        _, place, unit = where(piece)
        slot = lax.rem(piece - begin, jnp.int32(steps))
        arrived = shared["arrived"].at[slot] if fenced else None
        for side in sides:
            side.fetch(place, unit, slot, arrived)

    def wait(piece: Any, slot: Any) -> None:
        if fenced:
            plgpu.barrier_wait(shared["arrived"].at[slot])
            return
        # Each copy is a group of its own; near the end there are fewer behind this piece's.
        last = piece + steps - 2
        pl.when(last < end)(lambda: plgpu.wait_gmem_to_smem(2 * (steps - 2)))
        pl.when(last >= end)(lambda: plgpu.wait_gmem_to_smem(0))

    def loaded_of(numbers: Any) -> Array:
        return plgpu.load(numbers, layout=plan.second, optimized=False)

    def times(a: list[Array], b: list[Array], into: Array) -> Array:
        """A product of sums of terms; of those of numbers of 32 bits as many as count."""
        most = max(len(a), len(b))
        pairs = itertools.product(range(len(a)), range(len(b)))
        for i, j in ((i, j) for i, j in pairs if i + j < most):
            into = _dot(into, a[i], b[j], interpreted)
        return into

    def zeros(*shape: int) -> Array:
        layout = plan.sums if len(shape) == 2 else plan.sums.reduce(1)
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)

    rows, head_dim, run = plan.rows, plan.head_dim, plan.run
    wide = plan.queries == jnp.float32
    some = TERMS if wide else 1
    queries = plgpu.load(queries_ref.at[row, head], layout=plan.first, optimized=False)
    queries = queries.astype(jnp.float32)
    plain = terms_of(queries, plan.product, some)
    at = plgpu.load(at_ref.at[row, block], layout=plan.sums.reduce(1), optimized=False)
    at = plgpu.layout_cast(lax.broadcast_in_dim(at, (rows, run), (0,)), plan.sums)
    groups, widths = (
        [form.groups for form in plan.forms],
        [head_dim // form.groups for form in plan.forms],
    )
    # Four warps' rows are laid out as those of sums, but not to Mosaic's knowledge.
    own = plan.sums if plan.warps == 4 else plan.first

    def summed(channels: Any, factor: Callable[[Any], Array] | None = None) -> Array:
        """Queries, or products of them, summed over channels: float32[rows]."""
        found = queries_ref.at[row, head, :, channels]
        found = plgpu.load(found, layout=own, optimized=False).astype(jnp.float32)
        if factor is not None:
            found = found * _down(factor(own.reduce(0)), found, own)
        return plgpu.layout_cast(jnp.sum(found, axis=1), plan.sums.reduce(1))

    every = pl.ds(0, head_dim)
    sums = [
        summed(pl.ds(n * widths[0], widths[0]))
        for n in range(groups[0] if keys.form.adds_to_tokens else 0)
    ]

    def scores_of(which: tuple[int, int], place: Any, unit: Any, slot: Any) -> Array:
        """Of a run of keys: float32[rows, run]."""
        terms, offset = plain, None
        undoing = functools.partial(keys.of_channels, place, unit, which, every)
        if keys.form.along:
            factor = undoing(plan.first.reduce(0)).factor
            terms = terms_of(queries * _down(factor, queries, plan.first), plan.product, some)
        if keys.form.adds_to_channels:
            offset = summed(every, lambda layout: undoing(layout).offset)
        total = None
        for group in range(groups[0]):
            part = slice(group * widths[0], (group + 1) * widths[0])
            turned = [loaded_of(x.transpose((1, 0))) for x in keys.numbers(which, slot, group)]
            product = times([x[:, part] for x in terms], turned, zeros(rows, run))
            if keys.form.of_tokens:
                factor, more = keys.of_tokens(which, group)
                if factor is not None:
                    product = product * _down(factor, product, plan.sums)
                if more is not None:
                    product = product + _along(sums[group], product, plan.sums) * _down(
                        more, product, plan.sums
                    )
            total = product if total is None else total + product
        assert total is not None
        return total if offset is None else total + _along(offset, total, plan.sums)

    def seen_of(which: tuple[int, int], piece: Any, start: Any) -> tuple[Array, Array]:
        """Which of a run's tokens queries see, and the first slot."""
        first = (start + which[0]) * plan.unit + which[1] * run
        slots = plgpu.broadcasted_iota(jnp.int32, (rows, run), 1, layout=plan.sums) + first
        positions = reading.positions(slots, numbers)
        positions = jnp.where(slots >= piece * tokens, positions, -1)
        return reading.sees(at, positions, numbers), first

    def there(first: Any, piece: Any, shape: tuple[int, int]) -> Array:
        """Whether a run's slots hold tokens, for numbers of them [run, channels]."""
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plan.second) + first
        return (reading.positions(slots, numbers) >= 0) & (slots >= piece * tokens)

    def weigh(which: int, weights: Array, carry: list[Array]) -> list[Array]:
        """Keep a run's weights for the product with values: scaled by what undoes each token's
        number in each group. ``carry``: weights times what is added to a group's numbers."""
        after = list(carry)
        for group in range(groups[1]):
            scaled, more = weights, None
            if values.form.of_tokens:
                factor, more = values.of_tokens(plan.runs[which], group)
                assert factor is not None
                scaled = weights * _down(factor, weights, plan.sums)
            kept = scaled.astype(shared["weights"].dtype)
            plgpu.store(shared["weights"].at[which, group], kept, optimized=False)
            if more is None:
                continue
            if values.form.middle:  # of the weights as they are rounded: so their errors cancel
                plane = plan.where(1, plan.runs[which])[0]
                lower = values.form.middle * values.form.shift(plane)
                after[group] = after[group] - kept.astype(jnp.float32) * lower
            else:
                after[group] = after[group] + weights * _down(more, weights, plan.sums)
        return after

    def mixed_with(
        which: int, mixed: list[Array], piece: Any, first: Any, place: Any, unit: Any, slot: Any
    ) -> list[Array]:
        """Mixtures, float32[rows, width] of each group, with a run's values."""
        found = []
        raw, run_of = "scale" not in values.form.arrays, plan.runs[which]
        for group, total in enumerate(mixed):
            weights = plgpu.load(
                shared["weights"].at[which, group], layout=plan.first, optimized=False
            )
            terms = terms_of(weights, plan.product, TERMS) if wide else [weights]
            loaded = [loaded_of(x) for x in values.numbers(run_of, slot, group)]
            if raw:  # no weight makes 0 of what is no number
                seen = there(first, piece, (run, widths[1]))
                loaded = [jnp.where(seen, x, jnp.zeros_like(x)) for x in loaded]
            channels = pl.ds(group * widths[1], widths[1])
            factor = offset = None
            if values.form.along or "mean" in values.form.arrays:
                factor, offset = values.of_channels(
                    place, unit, run_of, channels, plan.sums.reduce(0)
                )
            if factor is None:
                product = times(terms, loaded, total)
            else:
                product = times(terms, loaded, zeros(rows, widths[1]))
                product = total + product * _down(factor, product, plan.sums)
            if offset is not None:
                ones = plgpu.layout_cast(jnp.ones((run, widths[1]), plan.product), plan.second)
                totals = times(terms, [ones], zeros(rows, widths[1]))
                product = product + totals * _down(offset, product, plan.sums)
            found.append(product)
        return found

    def visit(piece: Any, carry: Any) -> Any:
        highest, total, mixed, added = carry
        slot = lax.rem(piece - begin, jnp.int32(steps))
        wait(piece, slot)
        if fenced:
            plgpu.commit_smem()  # what was read of the next slot was read
        pl.when(piece + steps - 1 < end)(lambda: fetch(piece + steps - 1))
        start, place, unit = where(piece)
        keys.make(place, unit, slot)
        scores, firsts = [], []
        for which in plan.runs:
            products = reading.scores(scores_of(which, place, unit, slot))
            seen, first = seen_of(which, piece, start)
            scores.append(jnp.where(seen, products, LOWEST))
            firsts.append(first)
        values.make(place, unit, slot)
        above = jnp.max(functools.reduce(jnp.maximum, scores), axis=1)
        above = jnp.maximum(highest, jnp.maximum(above, LOWEST / 2))  # see Partial.of
        shrink = jnp.exp(highest - above)
        total = total * _along(shrink, total, plan.sums)
        added = [x * _along(shrink, x, plan.sums) for x in added]
        for n, products in enumerate(scores):
            weights = jnp.exp(products - _along(above, products, plan.sums))
            total = total + weights
            added = weigh(n, weights, added)
        mixed = [x * _along(shrink, x, plan.sums) for x in mixed]
        for n in range(len(plan.runs)):
            mixed = mixed_with(n, mixed, piece, firsts[n], place, unit, slot)
        return above, total, mixed, added

    for n in range(steps - 1):
        pl.when(begin + n < end)(functools.partial(fetch, begin + n))
    adding = groups[1] if values.form.adds_to_tokens else 0
    highest, total, mixed, added = lax.fori_loop(
        begin, end, visit,
        (zeros(rows) + LOWEST, zeros(rows, run), [zeros(rows, widths[1])] * groups[1],
         [zeros(rows, run)] * adding),
    )  # fmt: skip
    for n, x in enumerate(added):
        mixed[n] = mixed[n] + _along(jnp.sum(x, axis=1), mixed[n], plan.sums)
    plgpu.store(outs[0], highest, optimized=False)
    plgpu.store(outs[1], jnp.sum(total, axis=1), optimized=False)
    into = shared.get("mixed", outs[2])
    for n, x in enumerate(mixed):
        plgpu.store(into.at[:, pl.ds(n * widths[1], widths[1])], x, optimized=False)
    if "mixed" in shared:
        plgpu.store(outs[2], into[pl.ds(0, written)], optimized=False)


def _dot(total: Array, a: Array, b: Array, interpreted: bool) -> Array:
    """A product of matrices, added to ``total``. What is interpreted knows no ``mma``."""
    if interpreted:
        return total + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(total, a, b)


def _down(numbers: Array, like: Array, layout: Any) -> Array:
    """Numbers [columns], the same in all rows."""
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers, like.shape, (1,)), layout)


def _along(numbers: Array, like: Array, layout: Any) -> Array:
    """Numbers [rows], the same in all columns."""
    return plgpu.layout_cast(lax.broadcast_in_dim(numbers, like.shape, (0,)), layout)
