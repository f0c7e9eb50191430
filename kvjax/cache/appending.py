"""A layer with a call's tokens, as one program: on one device, or on each of a mesh."""

import functools
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from kvjax.cache.admission import positions_from
from kvjax.cache.layer import LayerCache
from kvjax.cache.tail import append_behind
from kvjax.cache.writing import write_rows
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.typing import Array, Rows
from kvjax.layouts import Run, Share, shared
from kvjax.placement.mesh import SEQUENCE
from kvjax.placement.spread import Spread


@functools.partial(jax.jit, static_argnames="device")
def with_tokens(
    device: Any, old: LayerCache, keys: Array, values: Array, length: Rows, count: Rows,
    rotary: RotaryTable | None,
) -> LayerCache:  # fmt: skip
    """A layer with the first ``count`` tokens of a call behind the ``length`` of each row. Layers
    that are alike share a trace, which is made for a device."""
    spread = old.policy.placement.spread
    if spread is None:
        parts = _share_with_tokens(old, keys, values, length, count, rotary)
    else:
        specs, tokens, rows = old.specs(), spread.of_tokens(), spread.of_rows()

        def on_each(*call: Any) -> Any:
            return _share_with_tokens(*call, share=shared_by(spread))

        parts = spread.run(
            on_each, (specs, tokens, tokens, rows, rows, PartitionSpec()),
            (specs.keys, specs.values, tokens, tokens, specs.fetched),
            old, keys, values, length, count, rotary,
        )  # fmt: skip
    keys, values, tail, strip, fetched = parts
    return replace(old, keys=keys, values=values, tail=tail, strip=strip, fetched=fetched)


def _share_with_tokens(
    old: LayerCache, keys: Array, values: Array, length: Rows, count: Rows,
    rotary: RotaryTable | None, share: Share | None = None,
) -> Any:  # fmt: skip
    """Keys, values, tail, strip and copy of a layer after a call, of a device's own slots."""
    policy = old.policy
    if not policy.keys.before_rotary:
        keys = apply_rotary(keys, positions_from(length, keys.shape[2]), rotary)
    body = old.keys, old.values
    if old.tail is None:
        stored = policy.stored if share is None else shared(policy.stored, share)
        runs = stored.runs(length, keys.shape[2])
        body = _written(body, (policy.keys.encode(keys), policy.values.encode(values)), runs, count)
        return *body, None, None, None
    tail = old.tail if old.strip is None else old.strip.tail
    body, tail, strip, fetched = append_behind(
        policy, body, tail, length, count, keys, values, old.fetched, share
    )
    return *body, tail, strip, fetched


def shared_by(spread: Spread) -> Share | None:
    """The share of the slots that a device of a mesh has, on it; None for all."""
    return Share(spread.index(SEQUENCE), spread.parts) if spread.parts > 1 else None


def _written(stores: Any, encoded: Any, runs: list[Run], count: Rows) -> Any:
    return jax.tree.map(lambda into, x: write_rows(into, x, runs, count), stores, encoded)
