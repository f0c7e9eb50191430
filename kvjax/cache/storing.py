"""A call's tokens as a device stores them: encoded in their slots, or raw in the tail, from where
whole blocks go to the body, encoded once."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from kvjax.cache.layer import Body, LayerCache, Strip, Tail, index_stack, update_stack
from kvjax.codecs import Codec, Store
from kvjax.core import control_flow
from kvjax.core.array_ops import arange_row
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.target import current_platform
from kvjax.core.typing import Array, PerRow, Positions
from kvjax.layouts import Ring, Run, split_slots
from kvjax.placement.mesh import TENSOR, MeshSharding
from kvjax.placement.writing import write_far, write_row, write_rows

Arrays = tuple[Store, Store, Tail | None, Strip | None, Body | None]
"""Keys, values, tail, strip and copy of a layer."""


def store_tokens(
    old: LayerCache, keys: Array, values: Array, length: PerRow, count: PerRow,
    rotary: RotaryTable | None, table: Array | None = None, layer: Array | None = None,
) -> Arrays:  # fmt: skip
    """A layer's arrays after a call, of a device's own slots and blocks.

    Args:
      old: the layer before the call, or a stack.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      length: int32[batch], tokens before the call.
      count: int32[batch], how many of ``new`` each row takes.
      rotary: the layer's table.
      table: int32[batch, columns], where its slots are in pages, those of each row.
      layer: int32[], which one of a stack.
    """
    policy, new = old.policy, keys.shape[2]
    if not policy.keys.before_rotary:
        keys = apply_rotary(keys, positions_from(length, new), rotary)
    if old.tail is not None:
        return _behind_tail(old, old.tail, keys, values, length, count, table, layer)
    shard = policy.placement.shard()
    layout = policy.stored_layout if shard is None else split_slots(policy.stored_layout, shard)
    runs = layout.runs(length, new)
    body, fresh = (old.keys, old.values), (policy.keys.encode(keys), policy.values.encode(values))
    body = jax.tree.map(
        lambda into, x: write_rows(into, x, runs, count, table=table, layer=layer), body, fresh
    )
    return *body, None, None, None


def _behind_tail(
    old: LayerCache, tail: Tail, keys: Array, values: Array, length: PerRow, count: PerRow,
    table: Array | None, layer: Array | None,
) -> Arrays:  # fmt: skip
    policy, body, fetched = old.policy, (old.keys, old.values), old.fetched
    split, raw = replace(policy.split, shard=policy.placement.shard()), policy.raw
    assert raw is not None
    new, batch = keys.shape[2], count.shape[0]
    fresh = Tail(raw[0].encode(keys), raw[1].encode(values))
    short = new <= split.block
    if short:
        runs = split.tail.runs(length, new)
        after = jax.tree.map(
            lambda into, x: write_rows(into, x, runs, count, layer=layer), tail, fresh
        )
    else:
        stack, tail = tail, index_stack(tail, layer)
        after = update_stack(stack, _last_of(split.tail, tail, fresh, length, count), layer)

    start, stop = split.flushed(length), split.flushed(length + count)
    leaving = -(-new // split.block)
    ids = start[:, None] + arange_row(leaving)
    positions = ids[:, :, None] * split.block + arange_row(split.block)[None]
    positions = positions.reshape(batch, -1)
    slots = split.tail.slot_of(positions)

    def encoded(some: Callable[[Array], Array] = lambda x: x) -> Body:
        """The blocks that leave, of all rows or of some."""
        if short:
            newest = index_stack(after, layer)
            whole = jax.tree.map(lambda x: _taken(some(x), some(slots)), newest)
        else:
            before = length[:, None]
            # A call's own tokens stand behind its tail.
            index = jnp.where(positions < before, slots, tail.keys.shape[2] + positions - before)
            whole = jax.tree.map(
                lambda *x: _taken(jnp.concatenate([*map(some, x)], axis=2), some(index)),
                tail, fresh,
            )  # fmt: skip
        shape = (whole.keys.shape[0], keys.shape[1], leaving, split.block, keys.shape[3])
        numbers = raw[0].decode(whole.keys), raw[1].decode(whole.values)
        spread = policy.placement.spread
        return (
            _encoded(policy.keys, numbers[0].reshape(shape), spread),
            _encoded(policy.values, numbers[1].reshape(shape), spread),
        )

    runs, placement = split.body.runs(start, leaving), policy.placement
    strip = None if short else Strip(tail, fresh.keys, fresh.values)
    if current_platform() == "tpu":
        bodies = _row_after_row(old, runs, stop - start, encoded, table, layer)
        return *bodies[0], after, strip, bodies[1]
    if short:
        # Without the axis of the one block: where it stands among axes of length 1 is open to the
        # compiler, which in a loop would order the whole body so, in a copy.
        def one() -> Body:
            return jax.tree.map(lambda x: x[:, :, 0], encoded())

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one))
        block = control_flow.cond(jnp.any(stop > start), one, lambda: nothing)
        blocks = jax.tree.map(lambda x: x[:, :, None], block)
    else:
        blocks = encoded()
    if placement.needs_tail:
        stores, kind = jax.tree.flatten(body)
        copies = [None] * len(stores) if fetched is None else jax.tree.leaves(fetched)
        each = zip(
            stores, copies, jax.tree.leaves(blocks), jax.tree.leaves(old.orders), strict=True
        )
        both = [
            write_far(placement, into, near, x, runs, stop - start, order, table, layer)
            for into, near, x, order in each
        ]
        body = kind.unflatten([into for into, _ in both])
        fetched = None if fetched is None else kind.unflatten([near for _, near in both])
    else:
        body = jax.tree.map(
            lambda into, x, order: write_rows(into, x, runs, stop - start, order, table, layer),
            body, blocks, old.orders,
        )  # fmt: skip
    return *body, after, strip, fetched


def _row_after_row(
    old: LayerCache, runs: Sequence[Run], count: PerRow, encoded: Callable[..., Body],
    table: Array | None, layer: Array | None,
) -> tuple[Body, Body | None]:  # fmt: skip
    """A body, and its copy on the device, with the block of every row that has one to put away, in
    a loop: rows are written one by one on a TPU, and so no more than one is there as numbers."""
    placement, orders = old.policy.placement, jax.tree.leaves(old.orders)
    body, kind = jax.tree.flatten((old.keys, old.values))

    def one(row: Array, stores: tuple[list[Array], list[Array]]) -> tuple[list[Array], ...]:
        blocks = encoded(lambda x: lax.dynamic_slice_in_dim(x, row, 1))
        far, near = stores
        fresh = [x[0] for x in jax.tree.leaves(blocks)]
        for run in runs:
            where = [
                (row, x, run, count, order, table, layer)
                for x, order in zip(fresh, orders, strict=True)
            ]
            near = [write_row(x, *each) for x, each in zip(near, where, strict=bool(near))]
            copies = near or [None] * len(far)
            far = [
                write_row(x, *each, placement.near, placement.far, copy)
                for x, each, copy in zip(far, where, copies, strict=True)
            ]
        return far, near

    rows = jnp.where(jnp.any(count > 0), count.shape[0], 0)
    far, near = control_flow.fori_loop(0, rows, one, (body, jax.tree.leaves(old.fetched)))
    return kind.unflatten(far), kind.unflatten(near) if near else None


def _encoded(codec: Codec, numbers: Array, spread: MeshSharding | None) -> Store:
    """Blocks as the codec stores them; of heads that share a scale, those of this device."""
    if spread is None or spread.heads == 1 or not codec.joins_heads:
        return codec.encode(numbers)
    heads = numbers.shape[1]
    every = codec.encode(lax.all_gather(numbers, TENSOR, axis=1, tiled=True))
    first = heads * spread.index(TENSOR)
    return jax.tree.map(
        lambda x: x if x.shape[1] == 1 else lax.dynamic_slice_in_dim(x, first, heads, 1), every
    )


def _last_of(ring: Ring, tail: Tail, fresh: Tail, length: PerRow, count: PerRow) -> Tail:
    """The tail after a call that is longer than it may be: each slot's last token."""
    end = length + count
    held = ring.positions(end, end, jnp.arange(ring.slots, dtype=jnp.int32))
    mine = held >= length[:, None]
    index = jnp.clip(held - length[:, None], 0, fresh.keys.shape[2] - 1)
    return jax.tree.map(
        lambda old, x: jnp.where(mine[:, None, :, None], _taken(x, index), old), tail, fresh
    )


def positions_from(length: PerRow, new: int) -> Positions:
    """int32[batch, new]: the positions of a call's tokens, in rows of ``length``."""
    return length[:, None] + arange_row(new)


def _taken(x: Array, index: Array) -> Array:
    """[batch, kv_heads, n, head_dim] of ``x`` at int[batch, n], each row's own."""
    return jnp.take_along_axis(x, index[:, None, :, None], axis=2, mode="clip")
