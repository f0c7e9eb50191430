"""A kernel for queries over a long text: flash attention and flash decoding, in Pallas.

Rows of queries are divided among programs, each of which walks the text with the online softmax
(Dao, Fu, Ermon, Rudra and Ré, arXiv:2205.14135). Where there are few, the filled part of a row is
divided as well, and results are merged by log-sum-exp (Dao, Haziza, Massa and Sizov,
"Flash-Decoding for long-context inference", 2023). Stores are read as they lie: a codec's own
``decode`` runs in the kernel, on a tile, and no decoded tile leaves it.

It is plain ``pallas_call``, for GPUs, where Pallas lowers it by Triton. No device has run it.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kvjax.attention.kernels.common import Reading, compiled, refuse
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.codecs import Codec, in_tiles
from kvjax.core import control_flow
from kvjax.core.compat import jax_0_10_varying_shape
from kvjax.core.target import current_target
from kvjax.core.typing import Array

TILE = 64
"""Tokens that a program reads together, at least a block."""
MOST = 64
"""Rows of queries of a program, at most: they all stay in its registers."""
PROGRAMS = 256
"""Programs of a call, about: some for each of a GPU's multiprocessors."""
FEWEST = 4
"""Tiles that a program walks, at least, where a row's text is shared."""
LEAST = 16
"""Tokens that a program reads together, at least, of a page."""
ROWS = 16
"""Rows of queries that a matrix unit takes together, at least."""
STAGES = 3
"""Tiles of keys and values that are in shared memory at once, at most: Triton's own choice."""


def decode(reading: Reading, before: Partial | None = None) -> Partial:
    """The softmax of rows of queries over a section, not yet divided by its total, merged with that
    over other keys, ``before``. Tiles before the first and behind the last that any of a row's
    queries sees are not read."""
    section = reading.section
    batch, kv_heads, rows, head_dim = reading.queries.shape
    leaves, tree = jax.tree.flatten((section.keys, section.values))
    units = page = leaves[0].shape[2]
    tile = min(max(TILE // section.unit, 1), units)
    tile = 1 << tile.bit_length() - 1  # a power of two
    pages = []
    if section.pages is not None:
        pages, units = [section.pages], section.pages.shape[1] * page
        if units > page:
            tile = min(tile, page & -page)
            refuse("pallas", {f"reads no pages of {page} units": tile * section.unit < LEAST})
    written = min(pl.next_power_of_2(rows), MOST)
    blocks = -(-rows // written)
    same = max(ROWS // written, 1)  # a matrix unit takes so many more
    padding = blocks * written - rows
    queries = jnp.pad(reading.queries, ((0, 0), (0, 0), (0, padding), (0, 0)))
    queries = jnp.repeat(queries, same, axis=2)
    at = reading.at(blocks, written)
    scalars, _ = reading.scalars(tile * section.unit, at)
    at = jnp.repeat(at, same, axis=2)
    splits = _splits(batch * kv_heads * blocks, -(-(section.first + section.size) // tile))
    queries = queries.reshape(batch, kv_heads * blocks, written * same, head_dim)
    arrays = [queries, scalars, at]
    # A program for each row, head of keys and block of queries, and share of the text.
    specs = [
        pl.BlockSpec((None, None, *queries.shape[2:]), lambda b, h, s: (b, h, 0, 0)),
        *(
            pl.BlockSpec((None, None, x.shape[2]), lambda b, h, s: (b, h % blocks, 0))
            for x in (scalars, at)
        ),
        *(pl.BlockSpec((None, x.shape[1]), lambda b, h, s: (b, 0)) for x in pages),
        *(_store(x.shape, kv_heads, blocks, bool(pages)) for x in leaves),
    ]
    shapes: list[tuple[int, ...]] = [(written,), (written,), (written, head_dim)]
    kernel = functools.partial(_kernel, reading.bare(), tree, tile, units, page, splits)
    # Of 16 bits, as they are multiplied, or more; and beside them the queries.
    numbers = head_dim * max(queries.dtype.itemsize, 2)
    room = current_target().shared_memory - written * same * numbers
    stages = min(STAGES, max(room // (2 * tile * section.unit * numbers), 1))

    def run(*arrays: Array, interpret: bool) -> Any:
        return pl.pallas_call(
            kernel,
            grid=(batch, kv_heads * blocks, splits),
            in_specs=specs,
            out_specs=[_share_of(each) for each in shapes],
            out_shape=[
                jax_0_10_varying_shape((batch, kv_heads * blocks, splits, *each), jnp.float32, axes)
                for each in shapes
            ],
            interpret=interpret,
            compiler_params=triton.CompilerParams(num_stages=stages),
        )(*arrays)

    given, axes = control_flow.match_varying([*arrays, *pages, *leaves])
    parts = compiled(run, *given)
    joined = Partial(*parts).joined(2) if splits > 1 else Partial(*(x[:, :, 0] for x in parts))
    every = (x.reshape(batch, kv_heads, blocks * written, *x.shape[3:]) for x in joined)
    found = Partial(*(x[:, :, :rows] for x in every))
    found = found._replace(mixed=in_tiles(section.codecs[1]).unturn(found.mixed))
    return found if before is None else before.merge(found)


def refusals(section: Section, rows: Array) -> dict[str, object]:
    """What the kernel can't read for rows of queries [batch, kv_heads, rows, head_dim], and whether
    a section is such."""
    head_dim = rows.shape[3]
    stores = section.keys, section.values
    cores = [in_tiles(codec).core for codec in section.codecs]
    units = [math.prod(x.shape[3:]) for x in jax.tree.leaves(stores)]
    plain = all(core.known for core in cores) and all(map(_plain, section.codecs, stores))
    return {
        f"takes a head_dim that is a power of two, not {head_dim}": head_dim & head_dim - 1,
        f"can't decode {section.codecs} in a kernel": not plain,
        "takes units of a power of two of numbers": any(unit & unit - 1 for unit in units),
    }


def _plain(codec: Codec, store: Any) -> bool:
    """Whether a codec decodes without arrays of its own, which a kernel can't hold."""
    return not jax.make_jaxpr(in_tiles(codec).core.decode)(store).consts


def _splits(programs: int, tiles: int) -> int:
    """Programs that share a row's text: so many that all units of a GPU have work, but with some
    tiles each."""
    wanted = max(PROGRAMS // programs, 1)
    return min(1 << wanted.bit_length() - 1, 1 << max(tiles // FEWEST, 1).bit_length() - 1)


def _kernel(
    reading: Reading, tree: Any, tile: int, units: int, page: int, splits: int, *refs: Any
) -> None:
    """One program: a share of a row's tiles, of ``tile`` of its ``units`` each, for the queries of
    one head of keys; its units are in pages of ``page``, or those of a row alone."""
    queries_ref, scalars_ref, at_ref, *stores = refs[:-3]
    table_ref = stores.pop(0) if len(stores) > tree.num_leaves else None
    highest_ref, total_ref, mixed_ref = refs[-3:]
    section, queries, at = reading.section, queries_ref[...], at_ref[...]
    unit, tokens = section.unit, tile * section.unit
    share = (scalars_ref[1] + splits - 1) // splits
    begin = scalars_ref[0] + pl.program_id(2) * share
    numbers = [scalars_ref[n][None] for n in range(2, scalars_ref.shape[0])]
    precision = lax.Precision.HIGHEST if queries.dtype == jnp.float32 else None
    dot = functools.partial(jnp.dot, precision=precision, preferred_element_type=jnp.float32)

    def visit(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, mixed = carry
        # A last tile that would pass the end is moved down; what it shares is not seen twice.
        start = jnp.minimum(number * tile, units - tile)
        at_page: tuple[Any, ...] = (pl.ds(start, tile),)
        if table_ref is not None:
            at_page = jnp.maximum(table_ref[start // page], 0), pl.ds(start % page, tile)
        block = jax.tree.unflatten(tree, [ref[at_page] for ref in stores])
        keys, values = (
            in_tiles(codec).core.decode(store).reshape(tokens, -1).astype(queries.dtype)
            for codec, store in zip(section.codecs, block, strict=True)
        )
        slots = start * unit + jnp.arange(tokens, dtype=jnp.int32)
        # One row of positions: a reduction over one row Triton can't turn into a column.
        positions = reading.positions(slots, numbers).reshape(tokens)
        positions = jnp.where(slots >= number * tokens, positions, -1)
        scores = reading.scores(dot(queries, keys.T))
        seen = reading.sees(at[:, None], positions[None, :], numbers)
        scores = jnp.where(seen, scores, LOWEST)
        above = jnp.maximum(highest, jnp.maximum(scores.max(1), LOWEST / 2))  # see Partial.of
        weights = jnp.exp(scores - above[:, None])
        shrink = jnp.exp(highest - above)
        # No weight makes 0 of what is no number, in slots that hold nothing.
        values = jnp.where((positions >= 0)[:, None], values, jnp.zeros_like(values))
        mixed = mixed * shrink[:, None] + dot(weights.astype(values.dtype), values)
        return above, total * shrink + weights.sum(1), mixed

    nothing = jnp.zeros(queries.shape[0], jnp.float32)
    end = jnp.minimum(begin + share, scalars_ref[0] + scalars_ref[1])
    found = lax.fori_loop(
        begin, end, visit,
        (nothing + LOWEST, nothing, jnp.zeros(queries.shape, jnp.float32)),
    )  # fmt: skip
    for ref, x in zip((highest_ref, total_ref, mixed_ref), found, strict=True):
        # Of rows that are the same one is written.
        ref[...] = x.reshape(ref.shape[0], -1, *x.shape[1:]).max(1)


def _store(shape: tuple[int, ...], kv_heads: int, blocks: int, pages: bool) -> pl.BlockSpec:
    """A row of an array, or all of its pages, of one head where it has heads."""
    rest = (0,) * (len(shape) - 2)
    own = int(shape[1] > 1 or kv_heads == 1)
    if pages:
        whole = (shape[0], None, *shape[2:])
        return pl.BlockSpec(whole, lambda b, h, s: (0, h // blocks * own, *rest))
    return pl.BlockSpec((None, None, *shape[2:]), lambda b, h, s: (b, h // blocks * own, *rest))


def _share_of(shape: tuple[int, ...]) -> pl.BlockSpec:
    """What one program finds of a row and a head."""
    rest = (0,) * len(shape)
    return pl.BlockSpec((None, None, None, *shape), lambda b, h, s: (b, h, s, *rest))
