"""Write the tokens of a call to a layer: encoded into their slots, or raw into the tail.

If there is a tail, each block that leaves it is encoded once and written to the body.
"""

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
"""The ``keys``, ``values``, ``tail``, ``strip`` and ``fetched`` of a layer."""


def store_tokens(
    old: LayerCache,
    keys: Array,
    values: Array,
    length: PerRow,
    count: PerRow,
    rotary: RotaryTable | None,
    table: Array | None = None,
    layer: Array | None = None,
) -> Arrays:
    """Store the tokens of a call, and return the layer's new arrays. On a mesh, this runs on each
    device, with the device's shards.

    Args:
      old: the layer before the call, or a stack.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      length: int32[batch], the number of tokens of each row before the call.
      count: int32[batch], how many of the ``new`` tokens each row takes.
      rotary: the layer's rotary table.
      table: int32[batch, columns], the page table, if slots are in pages.
      layer: int32[], the index of the layer, if ``old`` is a stack.
    """
    policy, new = old.policy, keys.shape[2]
    if not policy.keys.before_rotary:
        keys = apply_rotary(keys, positions_from(length, new), rotary)
    if old.tail is not None:
        return _store_with_tail(old, old.tail, keys, values, length, count, table, layer)
    shard = policy.placement.shard()
    layout = policy.stored_layout if shard is None else split_slots(policy.stored_layout, shard)
    runs = layout.runs(length, new)
    body, fresh = (old.keys, old.values), (policy.keys.encode(keys), policy.values.encode(values))
    body = jax.tree.map(
        lambda into, x: write_rows(into, x, runs, count, table=table, layer=layer), body, fresh
    )
    return *body, None, None, None


def _store_with_tail(
    old: LayerCache,
    tail: Tail,
    keys: Array,
    values: Array,
    length: PerRow,
    count: PerRow,
    table: Array | None,
    layer: Array | None,
) -> Arrays:
    """Do the work of ``store_tokens`` for a layer with a tail."""
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
        after = update_stack(stack, _tail_after(split.tail, tail, fresh, length, count), layer)

    start, stop = split.flushed(length), split.flushed(length + count)
    num_blocks = -(-new // split.block)
    ids = start[:, None] + arange_row(num_blocks)
    positions = ids[:, :, None] * split.block + arange_row(split.block)[None]
    positions = positions.reshape(batch, -1)
    slots = split.tail.slot_of(positions)

    def leaving_blocks(rows: Callable[[Array], Array] = lambda x: x) -> Body:
        """Encode the blocks that leave the tail. ``rows`` selects rows of an array."""
        if short:
            newest = index_stack(after, layer)
            tokens = jax.tree.map(lambda x: _take(rows(x), rows(slots)), newest)
        else:
            before = length[:, None]
            # The tokens of the call come after the tokens of the old tail.
            index = jnp.where(positions < before, slots, tail.keys.shape[2] + positions - before)
            tokens = jax.tree.map(
                lambda *x: _take(jnp.concatenate([*map(rows, x)], axis=2), rows(index)), tail, fresh
            )
        shape = (tokens.keys.shape[0], keys.shape[1], num_blocks, split.block, keys.shape[3])
        numbers = raw[0].decode(tokens.keys), raw[1].decode(tokens.values)
        mesh_sharding = policy.placement.mesh_sharding
        return (
            _encode(policy.keys, numbers[0].reshape(shape), mesh_sharding),
            _encode(policy.values, numbers[1].reshape(shape), mesh_sharding),
        )

    runs, placement = split.body.runs(start, num_blocks), policy.placement
    strip = None if short else Strip(tail, fresh.keys, fresh.values)
    if current_platform() == "tpu":
        bodies = _store_row_by_row(old, runs, stop - start, leaving_blocks, table, layer)
        return *bodies[0], after, strip, bodies[1]
    if short:
        # The conditional returns one block without an axis of blocks. The compiler may place an
        # axis of length 1 anywhere, and in a loop would copy the whole body to that order.
        def one() -> Body:
            return jax.tree.map(lambda x: x[:, :, 0], leaving_blocks())

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one))
        block = control_flow.cond(jnp.any(stop > start), one, lambda: nothing)
        blocks = jax.tree.map(lambda x: x[:, :, None], block)
    else:
        blocks = leaving_blocks()
    if placement.needs_tail:
        stores, kind = jax.tree.flatten(body)
        copies = [None] * len(stores) if fetched is None else jax.tree.leaves(fetched)
        new_units, orders = jax.tree.leaves(blocks), jax.tree.leaves(old.orders)
        both = [
            write_far(placement, into, near, x, runs, stop - start, order, table, layer)
            for into, near, x, order in zip(stores, copies, new_units, orders, strict=True)
        ]
        body = kind.unflatten([into for into, _ in both])
        fetched = None if fetched is None else kind.unflatten([near for _, near in both])
    else:
        body = jax.tree.map(
            lambda into, x, order: write_rows(into, x, runs, stop - start, order, table, layer),
            body,
            blocks,
            old.orders,
        )
    return *body, after, strip, fetched


def _store_row_by_row(
    old: LayerCache,
    runs: Sequence[Run],
    count: PerRow,
    leaving_blocks: Callable[..., Body],
    table: Array | None,
    layer: Array | None,
) -> tuple[Body, Body | None]:
    """Write the blocks that leave the tail, one row after another. Returns the body, and its copy
    on the device if there is one.

    On a TPU, rows are written in a loop, so that the blocks of only one row are decoded at a time.
    """
    placement, orders = old.policy.placement, jax.tree.leaves(old.orders)
    body, kind = jax.tree.flatten((old.keys, old.values))

    def one(row: Array, stores: tuple[list[Array], list[Array]]) -> tuple[list[Array], ...]:
        blocks = leaving_blocks(lambda x: lax.dynamic_slice_in_dim(x, row, 1))
        far, near = stores
        units = [x[0] for x in jax.tree.leaves(blocks)]
        for run in runs:
            args = [
                (row, x, run, count, order, table, layer)
                for x, order in zip(units, orders, strict=True)
            ]
            near = [write_row(x, *arg) for x, arg in zip(near, args, strict=bool(near))]
            copies = near or [None] * len(far)
            far = [
                write_row(x, *arg, placement.near, placement.far, copy)
                for x, arg, copy in zip(far, args, copies, strict=True)
            ]
        return far, near

    rows = jnp.where(jnp.any(count > 0), count.shape[0], 0)
    far, near = control_flow.fori_loop(0, rows, one, (body, jax.tree.leaves(old.fetched)))
    return kind.unflatten(far), kind.unflatten(near) if near else None


def _encode(codec: Codec, numbers: Array, mesh_sharding: MeshSharding | None) -> Store:
    """Encode blocks. If heads on several devices share a scale, all heads are gathered and encoded,
    and the part with this device's heads is returned."""
    if mesh_sharding is None or mesh_sharding.heads == 1 or not codec.joins_heads:
        return codec.encode(numbers)
    heads = numbers.shape[1]
    all_heads = codec.encode(lax.all_gather(numbers, TENSOR, axis=1, tiled=True))
    first = heads * mesh_sharding.index(TENSOR)
    return jax.tree.map(
        lambda x: x if x.shape[1] == 1 else lax.dynamic_slice_in_dim(x, first, heads, 1), all_heads
    )


def _tail_after(ring: Ring, tail: Tail, fresh: Tail, length: PerRow, count: PerRow) -> Tail:
    """Return the tail after a call, with the newest token of each slot. The call may be longer than
    the tail."""
    end = length + count
    positions = ring.positions(end, end, jnp.arange(ring.slots, dtype=jnp.int32))
    is_new = positions >= length[:, None]
    index = jnp.clip(positions - length[:, None], 0, fresh.keys.shape[2] - 1)
    return jax.tree.map(
        lambda old, x: jnp.where(is_new[:, None, :, None], _take(x, index), old), tail, fresh
    )


def positions_from(length: PerRow, new: int) -> Positions:
    """Return the positions of a call's ``new`` tokens in rows with ``length`` tokens, int32[batch,
    new]."""
    return length[:, None] + arange_row(new)


def _take(x: Array, index: Array) -> Array:
    """Select the tokens ``index`` (int[batch, n]) of ``x``. Returns [batch, kv_heads, n,
    head_dim]."""
    return jnp.take_along_axis(x, index[:, None, :, None], axis=2, mode="clip")
