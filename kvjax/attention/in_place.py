"""The path ``pages``: products with a pool's pages where they lie, of which rows then take theirs.

Pages of rows of any length must be copied together to be multiplied row by row, and a CPU takes as
long for that as for all else. Where most of a pool is somebody's, and no page is of two rows, all
pages are multiplied, each with its owner's queries, and not copied at all.
"""

import math

import jax.numpy as jnp

from kvjax.attention.alike import evenly
from kvjax.attention.blocks import FILLED, SCORES, as_stored
from kvjax.attention.inputs import AttentionInputs
from kvjax.attention.softmax import LOWEST, Partial
from kvjax.cache.sections import Section
from kvjax.core import control_flow
from kvjax.core.array_ops import arange_row
from kvjax.core.target import on_cpu
from kvjax.core.typing import Array, AttentionOutput, PerRow


def over_pages(inputs: AttentionInputs) -> AttentionOutput:
    """Softmax over pages in place where that is faster, else evenly."""
    if not _served(inputs):
        return evenly(inputs)
    (section,) = inputs.sections
    count, table = len(section.keys), section.pages
    assert table is not None
    batch, columns = table.shape
    slots = jnp.arange(columns * section.page, dtype=jnp.int32)
    positions = section.positions(slots, 0).reshape(batch, columns, section.page)
    # Columns of a table whose pages have tokens that may be seen, and where in the pool these are.
    there = jnp.any(positions >= 0, axis=2) & (table >= 0)
    at = jnp.where(there, table, count)
    times = jnp.zeros(count, jnp.int32).at[at].add(1, mode="drop")
    pays = (jnp.sum(there, dtype=jnp.int32) >= math.ceil(FILLED * count)) & (jnp.max(times) <= 1)

    def try_it() -> tuple[AttentionOutput, Array]:
        owner = jnp.broadcast_to(jnp.arange(batch, dtype=jnp.int32)[:, None], at.shape)
        owner = jnp.zeros(count, jnp.int32).at[at].set(owner, mode="drop")
        tokens = jnp.full((count, section.page), -1, jnp.int32).at[at].set(positions, mode="drop")
        found = _multiplied(inputs, section, owner, tokens, at)
        # An empty slot may hold what is no number, which no weight makes 0.
        return inputs.finish(found), jnp.all(jnp.isfinite(found.weighted))

    def nothing() -> tuple[AttentionOutput, Array]:
        return jnp.zeros_like(inputs.queries), jnp.bool_(False)

    mixed, done = control_flow.cond(pays, try_it, nothing)
    mixture: AttentionOutput = control_flow.cond(done, lambda: mixed, lambda: evenly(inputs))
    return mixture


def _multiplied(
    inputs: AttentionInputs, section: Section, owner: PerRow, tokens: Array, at: Array
) -> Partial:  # fmt: skip
    """The softmax of rows over their pages: int32[batch, columns], ``at`` the end for none.

    ``owner``: int32[pages], whose each is; ``tokens``: int32[pages, page], their positions.
    """
    mask, queries = inputs.mask.taken(owner), inputs.rows(section)[owner]
    products = section.scores(queries, section.keys, tokens, long=True)
    scores, seen = mask.scores(products, tokens, section)
    scores = jnp.where(seen, scores, LOWEST)
    highest = scores.max(-1).at[at].get(mode="fill", fill_value=LOWEST).max(1)
    # Never as low as what is not seen, whose weights are 0 then.
    highest = jnp.maximum(highest, LOWEST / 2)
    weights = jnp.exp(scores - highest[owner][..., None])
    total = weights.sum(-1).at[at].get(mode="fill", fill_value=0).sum(1)
    mixed = section.weighted_values(weights, section.values, None, queries.dtype.name)

    def column(number: Array, sums: Array) -> Array:
        return sums + mixed.at[at[:, number]].get(mode="fill", fill_value=0)

    last = jnp.max(jnp.where(at < len(owner), arange_row(at.shape[1]) + 1, 0))
    sums = jnp.zeros((len(at), *mixed.shape[1:]), mixed.dtype)
    return Partial(highest, total, control_flow.fori_loop(0, last, column, sums))


def _served(inputs: AttentionInputs) -> bool:
    """Whether pages can be multiplied as they lie, for so few queries that what is made for each
    page is much smaller than it."""
    if not on_cpu() or inputs.share is not None or len(inputs.sections) > 1 or inputs.mask.bias:
        return False
    (section,), new = inputs.sections, inputs.queries.shape[2]
    rows = inputs.rows(section)
    # Of the pages of a stack most are other layers'.
    alone = section.pages is not None and section.layer is None
    near = alone and not section.placement.needs_tail
    # Scores, and queries and mixtures: beside what a page has of keys.
    group, head_dim = rows.shape[2:]
    few = SCORES * group <= head_dim // 2 and SCORES * group <= section.page
    return near and new == 1 and few and section.unit == 1 and as_stored(section, rows)
