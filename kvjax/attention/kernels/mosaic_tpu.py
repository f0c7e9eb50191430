"""A kernel for TPUs: queries over a long text, read as it is kept.

Every row walks its own tiles, from the first that its queries may see to the last that is filled,
with the online softmax: how many there are is known when the kernel starts, so one program serves
every length, and what is not filled is not read. Scales of tokens are folded into scores and
weights, so no decoded number leaves the kernel, and most are never made. Positions are made in the
kernel of the row's cursors: no mask is read either.

It is ``pallas_call`` for TPUs (Mosaic). No device has run it: it is compiled for v5e and v6e, and
interpreted on CPUs.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.attention.kernels.common import Reading, compiled, folded_sides, refuse
from kvjax.attention.kernels.folding import mixture_of, scores_of, spread_out, times
from kvjax.attention.kernels.tiling import sizes_of
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.codecs import in_tiles
from kvjax.core import control_flow
from kvjax.core.compat import jax_0_8_in_hbm, jax_0_10_varying_shape
from kvjax.core.typing import Array
from kvjax.placement.order import LANES, SUBLANES
from kvjax.placement.tpu import Turned


def decode(reading: Reading, before: Partial | None = None) -> Partial:
    """The softmax of rows of queries over a section, not yet divided by its total. ``before``: that
    over other keys, which goes on where it stands."""
    section = reading.section
    values = in_tiles(section.codecs[1])
    if before is not None and values.turning:  # another's mixtures are not turned back
        return before.merge(decode(reading))
    batch, kv_heads, rows, head_dim = reading.queries.shape
    if head_dim % LANES and section.unit == 1:
        section = _turned(section)
        reading = replace(reading, section=section)
    leaves = jax.tree.leaves((section.keys, section.values))
    orders = jax.tree.leaves(section.orders)
    capacity = leaves[0].shape[orders[0].axis] // orders[0].step * section.unit
    heads, tile, together = sizes_of(reading, capacity)
    # A row that has one page alone passes its end as one without pages does.
    several = section.pages is not None and section.pages.shape[1] > 1
    refuse("pallas", {f"reads no pages of {capacity} tokens": several and capacity % tile})
    blocks = -(-rows // together)
    padded = blocks * together
    queries = jnp.pad(reading.queries, ((0, 0), (0, 0), (0, padded - rows), (0, 0)))
    at = reading.at(blocks, together)
    scalars, tiles = reading.scalars(tile, at)
    pages = jnp.zeros((1, 1), jnp.int32) if section.pages is None else section.pages
    each = -(-capacity // tile)  # tiles of a page
    at = jnp.broadcast_to(at.reshape(batch, padded, 1), (batch, padded, LANES))
    scalars = scalars.reshape(batch * blocks, -1)

    def of_rows(*block: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, heads, *block), lambda b, h, q, j, *s: (b, h, q, 0))

    def of_store(x: Array, order: Any) -> pl.BlockSpec:
        whole, block = x.shape[1], [1, heads, *x.shape[2:]]
        own = 1 if whole == 1 and kv_heads > 1 else heads
        block[1] = own
        block[order.axis] = min(tile // section.unit * order.step, x.shape[order.axis])

        def index(b: Array, h: Array, q: Array, j: Array, s: Any, t: Any) -> tuple[Any, ...]:
            n = b * blocks + q
            # Behind their last tile rows read nothing anew.
            number = s[n, 0] + jnp.minimum(j, jnp.maximum(s[n, 1] - 1, 0))
            place: list[Any] = [b, 0 if own < heads else h, 0, 0]
            place[order.axis] = number
            if section.pages is not None:
                place[0] = jnp.maximum(t[b, number // each], 0)
                place[order.axis] = number % each
            return tuple(place)

        return pl.BlockSpec(tuple(block), index)

    specs = [of_rows(together, head_dim)]
    specs += [pl.BlockSpec((1, together, LANES), lambda b, h, q, j, *s: (b, q, 0))]
    specs += [of_store(x, order) for x, order in zip(leaves, orders, strict=True)]
    stats_of = pl.BlockSpec((1, heads, SUBLANES, together), lambda b, h, q, j, *s: (b, h, 0, q))
    out_specs = [stats_of, of_rows(together, head_dim)]
    widths = 1, 1, reading.sides * head_dim
    scratch = [pltpu.VMEM((heads, together, n), jnp.float32) for n in widths]
    goes_on = () if before is None else _in_stats(before, padded)
    aliases = {2 + len(specs) + n: n for n in range(len(goes_on))}  # behind scalars and pages
    specs += out_specs[: len(goes_on)]
    # What mixtures are turned back by, as a matrix: a kernel makes no constants.
    back = [values.unturn(jnp.eye(head_dim, dtype=jnp.float32))] if values.turning else []
    specs += [pl.BlockSpec((head_dim, head_dim), lambda b, h, q, j, *s: (0, 0)) for _ in back]
    given, tree = jax.tree.flatten(((section.keys, section.values), goes_on, back))
    arrays, axes = control_flow.match_varying([scalars, pages, queries, at, tiles, *given])
    found = [
        jax_0_10_varying_shape((batch, kv_heads, *shape), jnp.float32, axes)
        for shape in ((SUBLANES, padded), (padded, head_dim))
    ]

    def run(
        scalars: Array, pages: Array, queries: Array, at: Array, tiles: Array, *given: Array,
        interpret: Any,
    ) -> Any:  # fmt: skip
        if interpret is False:
            stores, *rest = jax.tree.unflatten(tree, given)
            given = tuple(jax.tree.leaves((jax.tree.map(_where_it_is, stores), *rest)))
        return pl.pallas_call(
            functools.partial(_kernel, reading.bare(), tree, tile, blocks),
            out_shape=found,
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
        )(scalars, pages, queries, at, *given)

    # JAX's own rule for kernels whose grids differ is such a loop, and knows no aliases.
    call = custom_batching.sequential_vmap(functools.partial(compiled, run))
    stats, mixed = call(*arrays)
    return Partial(stats[:, :, 0, :rows], stats[:, :, 1, :rows], mixed[:, :, :rows])


def _where_it_is(store: Array) -> Array:
    """A store, not moved before its tiles are fetched, each once: a compiler with room for it in
    the fast memory would copy it there first, and back behind its update. Rows narrower than the
    lanes are left to the compiler: they have to be turned, and are copied in any case."""
    narrow = store.shape[3] < LANES
    return store if narrow else jax_0_8_in_hbm(store)


def _in_stats(found: Partial, rows: int) -> tuple[Array, Array]:
    """A softmax as the kernel keeps it, of so many rows: the highest score and the total along the
    lanes, [batch, kv_heads, 8, rows], and mixtures."""
    more = rows - found.total.shape[2]
    both = jnp.stack([found.highest, *[found.total] * (SUBLANES - 1)], axis=2)
    both = jnp.pad(both, ((0, 0), (0, 0), (0, 0), (0, more)))
    return both, jnp.pad(found.mixed, ((0, 0), (0, 0), (0, more), (0, 0)))


def _turned(section: Section) -> Section:
    """A raw section with its channels before its tokens, which is how they lie in memory."""
    turn = Turned(axis=3)
    return replace(
        section, keys=turn.keep(section.keys), values=turn.keep(section.values), orders=(turn, turn)
    )


def _kernel(
    reading: Reading, tree: Any, tile: int, blocks: int, scalars_ref: Any, _: Any,
    queries_ref: Any, at_ref: Any, *refs: Any,
) -> None:  # fmt: skip
    """One tile of a row, for some of its heads of keys and some of its queries."""
    stores, goes_on, back = jax.tree.unflatten(tree, refs[:-5])
    stats_ref, mixed_out, highest_ref, total_ref, mixed_ref = refs[-5:]
    row, number = pl.program_id(0) * blocks + pl.program_id(2), pl.program_id(3)
    head_dim = mixed_out.shape[3]

    @pl.when(number == 0)
    def _() -> None:
        highest_ref[...] = jnp.full(highest_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        mixed_ref[...] = jnp.zeros(mixed_ref.shape, jnp.float32)
        if goes_on:
            stats = jnp.swapaxes(goes_on[0][0], 1, 2)
            highest_ref[...], total_ref[...] = stats[:, :, :1], stats[:, :, 1:2]
            mixed_ref[:, :, :head_dim] = goes_on[1][0]

    @pl.when(number < scalars_ref[row, 1])
    def _() -> None:
        numbers = [jnp.full((1, 1), scalars_ref[row, n]) for n in range(2, scalars_ref.shape[1])]
        start = (scalars_ref[row, 0] + number) * tile
        runs = range(reading.parts)
        keys, values = (jax.tree.map(lambda ref: ref[0], store) for store in stores)
        queries = spread_out(queries_ref[0], reading.sides, reading.groups[0])
        found = []
        for part in runs:
            slots = start + reading.slots(part, tile, lambda n: _along(n, 1))
            positions = reading.positions(slots, numbers)
            seen = reading.sees(at_ref[0, :, :1][None], positions, numbers)
            tiles = reading.tiles(0, keys, part)
            every = [scores_of(each, queries, reading) for each in tiles]
            products = functools.reduce(jnp.add, every)
            found.append((jnp.where(seen, reading.scores(products), LOWEST), positions))
        before = highest_ref[...]
        above = jnp.maximum(before, LOWEST / 2)  # see Partial.of
        for scores, _ in found:
            above = jnp.maximum(above, scores.max(-1, keepdims=True))
        shrink = jnp.exp(before - above)
        total, mixed = total_ref[...] * shrink, mixed_ref[...] * shrink
        for part, (scores, positions) in zip(runs, found, strict=True):
            weights = jnp.exp(scores - above)
            total += weights.sum(-1, keepdims=True)

            def there(part: int = part) -> Array:
                down = start + reading.slots(part, tile, lambda n: _along(n, 0))
                return reading.positions(down, numbers) >= 0

            tiles = reading.tiles(1, values, part)
            for each in tiles:
                mixed += mixture_of(
                    each, weights, positions >= 0, there, reading, queries_ref.dtype
                )
        highest_ref[...], total_ref[...], mixed_ref[...] = above, total, mixed

    @pl.when(number == pl.num_programs(3) - 1)
    def _() -> None:
        # Along the lanes, of which one for each row would be a whole tile.
        highest, total = (
            jnp.swapaxes(jnp.broadcast_to(ref[...], (*ref.shape[:2], LANES)), 1, 2)[:, :SUBLANES]
            for ref in (highest_ref, total_ref)
        )
        first = lax.broadcasted_iota(jnp.int32, highest.shape, 1) == 0
        stats_ref[0] = jnp.where(first, highest, total)
        mixed = mixed_ref[...]
        sides = [mixed[:, :, n : n + head_dim] for n in range(0, mixed.shape[2], head_dim)]
        found = functools.reduce(jnp.add, sides)
        mixed_out[0] = times(found, back[0][...]) if back else found


def _along(count: int, axis: int) -> Array:
    """0, 1, 2 … along an axis of two."""
    return lax.broadcasted_iota(jnp.int32, (1, count) if axis else (count, 1), axis)


def refusals(section: Section, rows: Array) -> dict[str, object]:
    """What the kernel can't read for rows of queries [batch, kv_heads, rows, head_dim], and whether
    a section is such."""
    head_dim = rows.shape[3]
    parts = max(in_tiles(codec).parts for codec in section.codecs) * folded_sides(section.orders)
    ordered = all(order.read_by_tiles for order in jax.tree.leaves(section.orders))
    readable = (section.unit == 1 or ordered) and all(
        in_tiles(codec).core.tiled(section.unit, parts, head_dim) for codec in section.codecs
    )
    return {
        f"can't read {section.codecs} tile by tile": not readable,
        f"takes blocks of {SUBLANES * parts} tokens at least here": (
            section.unit > 1 and section.unit < SUBLANES * parts
        ),
    }
