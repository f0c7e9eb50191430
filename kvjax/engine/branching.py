"""Rows of an engine that go on from others: what a step of a beam search does."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax

from kvjax.core.trees import state
from kvjax.core.typing import Array, PerRow
from kvjax.engine.calls import Held
from kvjax.placement.pages import copied_pages
from kvjax.prefixes.checkpoints import own, with_own


@state
class Branches:
    """``count``: int32[], rows that go on from others, the first of ``targets``, each from its
    entry of ``sources``, none of which is a target; ``pages``: of each kind of layers, pages and
    what is copied to them, -1 for none. ``rows``: whose newest tokens are ``tokens`` instead,
    numbers that are no row's behind the last. int32[rows] each."""

    count: Array
    sources: PerRow
    targets: PerRow
    pages: tuple[tuple[PerRow, PerRow], ...]
    rows: PerRow
    tokens: PerRow


@functools.partial(jax.jit, static_argnames="kinds", donate_argnames="held")
def branch(held: Held, branches: Branches, *, kinds: Any) -> tuple[Held, None]:
    """Let rows have what others have beside full pages, and stand where these do; and rows another
    newest token. ``kinds``: the numbers of the layers of each kind. Of the texts that filters go by
    nothing is taken along."""
    cache = held.cache

    def copy(number: Array, tree: Any) -> Any:
        source, target = branches.sources[number], branches.targets[number]
        return jax.tree.map(lambda x: x.at[target].set(x[source]), tree)

    owns = [own(layer.near()) for layer in cache.layers], cache.written, held.progress
    owns, written, progress = lax.fori_loop(0, branches.count, copy, owns)
    layers = [with_own(layer, mine) for layer, mine in zip(cache.layers, owns, strict=True)]
    for entries, (sources, targets) in zip(kinds, branches.pages, strict=True):
        for entry in entries:
            layer = layers[entry]
            body, placement = (layer.keys, layer.values), layer.policy.placement
            keys, values = copied_pages(body, layer.orders, placement, sources, targets)
            layers[entry] = replace(layer, keys=keys, values=values)
    token = progress.token.at[branches.rows].set(branches.tokens, mode="drop")
    cache = replace(cache, layers=tuple(layers), written=written)
    return replace(held, cache=cache, progress=replace(progress, token=token)), None


def branches_of(
    rows: int, pairs: Sequence[tuple[int, int]], pages: Sequence[Sequence[tuple[int, int]]],
    newest: Sequence[tuple[int, int]],
) -> Branches:  # fmt: skip
    """Of an engine of so many rows: ``pairs`` of rows, and of each kind of ``pages``, sources and
    targets; ``newest``: rows and tokens."""

    def columns(some: Sequence[tuple[int, int]], fill: int) -> Any:
        found = np.full((2, rows), fill, np.int32)
        found[:, : len(some)] = np.reshape(some, (-1, 2)).T
        return tuple(found)

    (sources, targets), (led, tokens) = columns(pairs, 0), columns(newest, rows)
    count, copied = np.int32(len(pairs)), tuple(columns(some, -1) for some in pages)
    return Branches(count, sources, targets, copied, led, tokens)  # type: ignore[arg-type]
