"""What is fetched of layers on the host ahead of their turn."""

from dataclasses import replace

from kvjax.cache.layer import Body, LayerCache
from kvjax.core.typing import KeysValues, PerRow


def fetched_ahead(
    layers: tuple[LayerCache, ...],
    entry: int,
    sources: tuple[int, ...] | None,
    number: int,
    after: tuple[KeysValues, PerRow],
) -> tuple[LayerCache, ...]:
    """The layers, with those bodies on the device, or on their way, that are to be by the turn of
    layer ``number`` of the model at ``entry``, and no others: but for the first layer, fetching
    begins when ``after`` is there, its keys and the rows' lengths."""
    later = set(() if sources is None else sources[number:])
    found = list(layers)
    for n, held in enumerate(layers):
        placement = held.policy.placement
        ahead = placement.ahead if held.stack is None and placement.memory_kind else 0
        if n < entry and n not in later:
            found[n] = replace(held, fetched=None)
        elif ahead and entry <= n <= entry + ahead and held.fetched is None:
            found[n] = replace(held, fetched=_near(held, after if entry else None))
    return tuple(found)


def _near(held: LayerCache, after: tuple[KeysValues, PerRow] | None) -> Body:
    """A layer's body on the device; on a mesh, each device's own."""
    placement, stores = held.policy.placement, (held.keys, held.values)
    spread = placement.spread
    if spread is None or after is None:
        return placement.near(stores, after)
    specs = held.specs()
    bodies, rest = (specs.keys, specs.values), (spread.of_tokens(), spread.of_rows())
    return spread.run(placement.near, (bodies, rest), bodies, stores, after)
