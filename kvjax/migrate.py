"""A cache's layers in other places: parked on the host, taken up again, or moved to make room."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax._checks import refuse_traced, whole_number
from kvjax._tree import tree_bytes
from kvjax.cache import KVCache
from kvjax.convert import converted
from kvjax.layer import LayerCache, layer_sizes
from kvjax.operations import enlarged, grow
from kvjax.placement import Device
from kvjax.status import LOST


@dataclass(frozen=True)
class Move:
    """A layer that was moved: which of ``KVCache.layers``, the ``place`` where it is now, the
    ``bytes`` of its body, and the ``tokens`` a row that room was made for."""

    layer: int
    place: str
    bytes: int
    tokens: int


def migrate(cache: KVCache, placement: Device, layers: Sequence[int] | None = None) -> KVCache:
    """Move a cache, or some of its layers, to another place; numbers stay what they are.

    It is done outside ``jit``, one layer after the other, and the cache given is used up, so that
    never more than one layer is held twice; a ``fork`` of it survives. The last layer may still be
    on its way when this returns. A raw layer has a tail on the host alone, and is laid out anew
    when it moves; others move as they are. There and back, a text goes on bit for bit.

    Args:
      cache: the cache; the arrays of what moves are deleted.
      placement: where to: ``Device()``, ``Host()``.
      layers: which layers of the model; by default all.

    Raises:
      ValueError: if there is no such layer, or the placement is none; inside ``jit``.
    """
    refuse_traced("kvjax.migrate", cache.length)
    if isinstance(placement, type) or not hasattr(placement, "store"):
        raise ValueError(f"{placement!r} is no placement: give Device() or Host()")
    places = range(len(cache.layers))
    if layers is not None:
        places = sorted({cache.place(whole_number("layer", number, 0)) for number in layers})
    return _moved(cache, placement, places)


def make_room(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """Grow a cache until rows hold so many tokens, where it can grow, and keep to its memory.

    A cache of ``policy("auto")`` first moves layers to the host, the last ones first, where the
    device would not hold them all; one comes back only where that leaves a quarter of the memory
    free, so that none goes to and fro. It is done outside ``jit``, and the cache given is used up.

    Args:
      cache: the cache.
      tokens: what each row is to hold.

    Returns:
      The cache, and what was moved.

    Raises:
      ValueError: as of ``grow``; if what stays on the device of layers on the host, the newest
        tokens, takes more than the memory.
    """
    refuse_traced("kvjax.make_room", cache.length)
    tokens = whole_number("tokens", tokens, 1)
    grows = cache.grows_to is not None and tokens > cache.max_len
    moves = []
    if cache.budget is not None:
        out, away = _out(cache), _away(cache, tokens if grows else cache.max_len, grows)
        cache, moves = _rearranged(cache, away - out, out - away, tokens)
    return (grow(cache, tokens) if grows else cache), moves


def brought_back(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """A cache with those layers back on the device that its memory has room for even when rows
    hold so many tokens, and what was moved; the cache given is used up.

    Raises:
      ValueError: if the memory has no room for so many tokens though all layers are on the host.
    """
    if cache.budget is None:
        return cache, []
    back = _out(cache) - _away(cache, max(tokens, cache.max_len), False)
    return _rearranged(cache, frozenset(), back, tokens)


def check_room(cache: KVCache, tokens: int) -> None:
    """Raise ``ValueError`` if a cache's memory has no room for so many tokens a row."""
    if cache.budget is not None:
        _away(cache, max(tokens, cache.max_len), False)


def _out(cache: KVCache) -> frozenset[int]:
    """Layers that are on the host."""
    away = [layer.policy.placement.behind_tail for layer in cache.layers]
    return frozenset(n for n, on_host in enumerate(away) if on_host)


def _away(cache: KVCache, tokens: int, grows: bool) -> frozenset[int]:
    """Layers that are to be on the host when rows hold so many tokens."""
    assert cache.budget is not None
    layouts, out = enlarged(cache, tokens), _out(cache)
    sizes = [
        layer_sizes(
            replace(layer.policy, layout=layout), cache.budget.placement, cache.batch,
            layer.kv_heads, layer.head_dim,
        )
        for layer, layout in zip(cache.layers, layouts, strict=True)
    ]  # fmt: skip
    growing = [
        tree_bytes(layer)
        for n, (layer, layout) in enumerate(zip(cache.layers, layouts, strict=True))
        if n not in out and layout != layer.policy.layout
    ]
    return cache.budget.away(sizes, out, max(growing, default=0) if grows else 0)


def _rearranged(
    cache: KVCache, leave: frozenset[int], back: frozenset[int], tokens: int
) -> tuple[KVCache, list[Move]]:
    """Layers moved to the host, the last ones first, and others to the device."""
    assert cache.budget is not None
    moves: list[Move] = []
    steps = [(place, cache.budget.placement) for place in sorted(leave, reverse=True)]
    for place, placement in [*steps, *((place, Device()) for place in sorted(back))]:
        cache = _moved(cache, placement, [place])
        size = tree_bytes((cache.layers[place].keys, cache.layers[place].values))
        moves.append(Move(place, placement.place, size, tokens))
    return cache, moves


def _moved(cache: KVCache, placement: Device, places: Iterable[int]) -> KVCache:
    held, marks, status = list(cache.layers), list(cache.written.T), cache.status
    moving: Any = None
    for place in places:
        old = held[place]
        policy = old.policy.elsewhere(placement)
        if policy.placement.place == old.policy.placement.place:
            held[place] = replace(old, policy=policy)
            continue
        jax.block_until_ready(moving)
        if policy.has_tail == old.policy.has_tail:
            keys, values = placement.store((old.keys, old.values))
            moving = replace(old, keys=keys, values=values, policy=policy)
        else:
            moving, marks[place], _, lost = _laid_out(old, cache.length, marks[place], policy)
            moving = moving.placed()
            status |= jnp.where(lost, LOST, 0)
        held[place] = moving
        _let_go(old, moving)
    written = jnp.stack(marks, axis=1)
    return replace(cache, layers=tuple(held), written=written, status=status)


# In one program: operation by operation each of them would be compiled, and keep what it makes.
_laid_out = jax.jit(converted, static_argnames="policy")


def _let_go(old: LayerCache, new: LayerCache) -> None:
    """Delete the arrays that are no longer needed; what still reads them does so to the end."""
    kept = {id(array) for array in jax.tree.leaves(new)}
    for array in jax.tree.leaves(old):
        if id(array) not in kept:
            array.delete()
