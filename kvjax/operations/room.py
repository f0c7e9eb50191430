"""Layers moved, and capacity grown, to make room within a memory."""

from dataclasses import dataclass, replace

from kvjax.cache.checks import usable
from kvjax.cache.sizes import layer_sizes
from kvjax.cache.state import KVCache
from kvjax.core.pytree import tree_bytes
from kvjax.core.validation import as_int
from kvjax.operations.growth import enlarged, grow
from kvjax.operations.migration import moved
from kvjax.operations.stacks import layer_by_layer
from kvjax.placement.device import Device


@dataclass(frozen=True)
class Move:
    """A layer that was moved: which of ``KVCache.layers``, the ``place`` where it is now, the
    ``bytes`` of its body, and the ``tokens`` a row that room was made for."""

    layer: int
    place: str
    bytes: int
    tokens: int


@layer_by_layer
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
    cache = usable("kvjax.make_room", cache, outside=True)
    tokens = as_int("tokens", tokens, 1)
    grows = cache.grows_to is not None and tokens > cache.max_len
    moves = []
    if cache.budget is not None:
        out, away = _out(cache), _away(cache, tokens if grows else cache.max_len)
        cache, moves = _rearranged(cache, away - out, out - away, tokens)
    return (grow(cache, tokens) if grows else cache), moves


def settled(cache: KVCache, tokens: int) -> tuple[KVCache, list[Move]]:
    """A cache that keeps to its memory as it is, with those layers back on the device that there is
    room for even when rows hold so many tokens; and what was moved. The cache given is used up.

    Raises:
      ValueError: if the memory has no room for so many tokens though all layers are on the host.
    """
    if cache.budget is None:
        return cache, []
    out = _out(cache)
    leave = _away(cache, cache.max_len) - out
    back = frozenset() if leave else out - _away(cache, max(tokens, cache.max_len))
    return _rearranged(cache, leave, back, tokens)


def check_room(cache: KVCache, tokens: int) -> None:
    """Raise ``ValueError`` if a cache's memory has no room for so many tokens a row."""
    if cache.budget is not None:
        _away(cache, max(tokens, cache.max_len))


def _out(cache: KVCache) -> frozenset[int]:
    """Layers that are on the host."""
    away = [layer.policy.placement.behind_tail for layer in cache.layers]
    return frozenset(n for n, on_host in enumerate(away) if on_host)


def _away(cache: KVCache, tokens: int) -> frozenset[int]:
    """Layers that are to be on the host when rows hold so many tokens."""
    assert cache.budget is not None
    sizes = [
        layer_sizes(
            replace(layer.policy, layout=layout), cache.budget.placement, cache.batch,
            layer.kv_heads, layer.head_dim,
        )
        for layer, layout in zip(cache.layers, enlarged(cache, tokens), strict=True)
    ]  # fmt: skip
    return cache.budget.away(sizes, _out(cache))


def _rearranged(
    cache: KVCache, leave: frozenset[int], back: frozenset[int], tokens: int
) -> tuple[KVCache, list[Move]]:
    """Layers moved to the host, the last ones first, and others to the device."""
    assert cache.budget is not None
    moves: list[Move] = []
    steps = [(entry, cache.budget.placement) for entry in sorted(leave, reverse=True)]
    for entry, placement in [*steps, *((entry, Device()) for entry in sorted(back))]:
        cache = moved(cache, placement, [entry])
        size = tree_bytes((cache.layers[entry].keys, cache.layers[entry].values))
        moves.append(Move(entry, placement.place, size, tokens))
    return cache, moves
