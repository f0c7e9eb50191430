"""The path ``pages``: products with a pool's pages where they lie, of which rows then take theirs.

Pages of rows of any length must be copied together to be multiplied row by row, and a CPU takes as
long for that as for all else. Where most of a pool is somebody's, and no page is of two rows, all
pages are multiplied, each with its owner's queries, and not copied at all.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.attention.alike import evenly
from kvjax.attention.blocks import FILLED, SCORES, as_stored
from kvjax.attention.call import Call
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.core.device import on_cpu
from kvjax.core.typing import Array, Mixed


def over_pages(call: Call) -> Mixed:
    """Softmax over pages in place where that is faster, else evenly."""
    if not _served(call):
        return evenly(call)
    (section,) = call.sections
    pages, page, table = len(section.keys), section.page, section.pages
    assert table is not None
    batch, columns = table.shape
    slots = jnp.arange(columns * page, dtype=jnp.int32)
    positions = jnp.where(slots < section.size, section.positions(slots, 0), -1)
    positions = positions.reshape(batch, columns, page)
    there = jnp.any(positions >= 0, axis=2) & (table >= 0)
    to = jnp.where(there, table, pages).ravel()
    times = jnp.zeros(pages, jnp.int32).at[to].add(1, mode="drop")
    pays = (jnp.sum(there) >= FILLED * pages) & (jnp.max(times) <= 1)

    def in_place() -> tuple[Mixed, Array]:
        rows, found = jnp.repeat(jnp.arange(batch), columns), jnp.full((pages, page), -1)
        owner = jnp.zeros(pages, jnp.int32).at[to].set(rows, mode="drop")
        found = found.at[to].set(positions.reshape(-1, page), mode="drop")
        queries, mask = call.rows(section)[owner], call.mask.taken(owner)
        products = section.scores(queries, section.keys, found, long=True)
        scores, seen = mask.scores(products, found, section)
        scores = jnp.where(seen, scores, LOWEST)
        own, here = jnp.where(there, table, 0), there[:, :, None, None]
        highest = jnp.where(here, scores.max(-1)[own], LOWEST / 2).max(1)
        highest = jnp.maximum(highest, LOWEST / 2)
        weights = jnp.exp(scores - highest[owner][..., None])
        total = jnp.where(here, weights.sum(-1)[own], 0).sum(1)
        mixed = section.mix(weights, section.values, None, queries.dtype.name)

        def column(number: Array, sums: Array) -> Array:
            pages, here = own[:, number], there[:, number, None, None, None]
            return sums + jnp.where(here, mixed[pages], 0)

        last = jnp.max(jnp.where(there, jnp.arange(columns) + 1, 0))
        sums = lax.fori_loop(0, last, column, jnp.zeros((batch, *mixed.shape[1:]), mixed.dtype))
        # An empty slot may hold what is no number, which no weight makes 0.
        return call.finish(Partial(highest, total, sums)), jnp.all(jnp.isfinite(sums))

    def nothing() -> tuple[Mixed, Array]:
        return jnp.zeros_like(call.queries), jnp.bool_(False)

    mixed, done = lax.cond(pays, in_place, nothing)
    mixture: jax.Array = lax.cond(done, lambda: mixed, lambda: evenly(call))
    return mixture


def _served(call: Call) -> bool:
    """Whether pages can be multiplied as they lie, and scores of all take less memory than half of
    them."""
    if not on_cpu() or call.share is not None or len(call.sections) > 1 or call.mask.bias:
        return False
    (section,), new = call.sections, call.queries.shape[2]
    rows = call.rows(section)
    near = not section.placement.behind_tail and section.pages is not None
    few = new == 1 and SCORES * rows.shape[2] <= rows.shape[3] // 2
    return near and few and section.unit == 1 and as_stored(section, rows)
