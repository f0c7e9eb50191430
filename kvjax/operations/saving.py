"""Caches into files, as they are stored, wherever they were."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.checks import check, usable
from kvjax.cache.layer import LayerCache
from kvjax.cache.state import KVCache
from kvjax.core.array_folder import PendingSave, save_folder
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import serialize_static
from kvjax.core.transfer import fetch
from kvjax.operations.fingerprints import Weighed, fingerprint
from kvjax.operations.migration import migrate
from kvjax.operations.rows import fork
from kvjax.operations.stacks import unstack

KIND = "a cache"


@without_mesh_context
def save_cache(
    path: str | Path,
    cache: KVCache,
    *,
    model: Weighed | str | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    wait: bool = True,
) -> PendingSave:
    """Write a cache into a folder, as it is stored: codes stay codes. What rows hold is written,
    not what they have room for.

    The folder is the old one or the new one, whenever the writer is stopped: arrays are written
    beside those that stand there (by Orbax), and then named in their place.

    Args:
      path: the folder; one that is there must be empty, or written by this.
      cache: the cache; it stays as it is. One on a mesh comes to the default device first, if slots
        or pools are divided. One that is stacked is written layer by layer: ``stack`` what is
        loaded.
      model: the model that it is of, or a name for its weights, which ``load_cache`` is asked for.
      tokens: of each row's text; the cache may lack the last ones (``GenerationResult.unfed``).
      wait: until it is written; else a second thread writes it, and ``wait()`` of the result waits,
        which is to be called before the program ends.

    Raises:
      ValueError: if ``tokens`` are fewer than rows hold, the cache has been used up or is in the
        middle of a call, other processes have a part of it; inside ``jit``.
      CacheOverflowError: what ``check`` raises of the cache.
      CheckpointError: if something else stands at ``path``.
    """
    cache = unstack(usable("kvjax.save_cache", cache, outside=True))
    check(cache)
    length = fetch(cache.length)
    texts = None if tokens is None else [[int(n) for n in row] for row in tokens]
    if texts is not None and (
        len(texts) != len(length) or any(n > len(x) for n, x in zip(length, texts, strict=True))
    ):
        raise ValueError(
            f"tokens has {[len(row) for row in texts]} for rows that hold {length.tolist()}"
        )
    told = {
        "kind": KIND, "model": fingerprint(model), "tokens": texts,
        "settings": json.loads(serialize_static(_settings(cache := _on_one_device(cache)))),
    }  # fmt: skip
    saving = save_folder(path, _arrays(cache), told)
    if wait:
        saving.wait()
    return saving


def _on_one_device(cache: KVCache) -> KVCache:
    """A cache as it is on one device, where its arrays may still be spread over several."""
    spread = cache.spread
    if spread is None:
        return cache
    if not cache.length.is_fully_addressable:
        raise ValueError("other processes have a part of the cache: each can save its own alone")
    policies = [
        replace(x.policy, placement=x.policy.placement.over(None).fixed()) for x in cache.layers
    ]
    alike = all(
        x.orders == replace(x, policy=each).orders and x.policy.stored == each.stored
        for x, each in zip(cache.layers, policies, strict=True)
    )
    if not alike or (cache.pools and spread.rows > 1):
        return migrate(fork(cache), mesh=None)
    layers = [replace(x, policy=each) for x, each in zip(cache.layers, policies, strict=True)]
    return replace(cache, layers=tuple(layers))


def _settings(cache: KVCache) -> tuple[Any, ...]:
    """What is static of a cache."""
    layers = tuple((x.policy, x.kv_heads, x.head_dim, x.window) for x in cache.layers)
    return layers, cache.sources, cache.positions, cache.turned_for, cache.budget


def _arrays(cache: KVCache) -> dict[str, np.ndarray]:
    """A cache's arrays by name, as far as they are filled, on the host."""
    found: dict[str, Any] = {
        "length": cache.length, "written": cache.written, "status": cache.status
    }  # fmt: skip
    used = []
    for number, pool in enumerate(cache.pools):
        table = fetch(pool.table)
        pages = np.unique(table[table >= 0]).astype(np.int32)
        found[f"table {number}"] = np.where(table >= 0, np.searchsorted(pages, table), -1)
        used.append(pages if len(pages) else np.zeros(1, np.int32))
    for entry, held in enumerate(cache.layers):
        near, paging = held.near(), held.policy.paging
        if paging is None:
            units = _filled(cache, entry)
            body = jax.tree.map(
                lambda x, order, units=units: order.piece(x, 0, units), body_of(near), held.orders
            )
        else:
            pages = used[cache.pagings.index(paging)]
            body = jax.tree.map(functools.partial(jnp.take, indices=pages, axis=0), body_of(near))
        for number, x in enumerate(jax.tree.leaves((body, held.tail, held.low))):
            found[f"layer {entry} {number}"] = x
    # The writer's own: a second thread writes them, whatever becomes of the cache.
    return {name: np.array(x) for name, x in fetch(found).items()}


def _filled(cache: KVCache, entry: int) -> int:
    """Units of a layer's body, from the first on, in which something was written."""
    policy = cache.layers[entry].policy
    marks = jnp.maximum(cache.length, cache.written[:, entry])
    units = policy.split.flushed(marks) if policy.has_tail else marks
    return max(int(policy.stored.occupied(units)), 1)


def body_of(held: LayerCache) -> tuple[Any, Any]:
    """What a file keeps of it as its keys and values."""
    return held.keys, held.values
