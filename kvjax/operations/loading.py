"""Caches from files, taken up by another process, on other devices."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.layer import layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.array_folder import read_folder, report_format_errors
from kvjax.core.errors import CheckpointError
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import deserialize_static
from kvjax.core.target import current_target
from kvjax.core.transfer import commit_together
from kvjax.core.validation import as_optional_int
from kvjax.layouts import UNLIMITED, paged
from kvjax.operations.conversion import under
from kvjax.operations.fingerprints import Weighed, fingerprint
from kvjax.operations.growth import grow
from kvjax.operations.migration import migrate
from kvjax.operations.saving import KIND, body_of
from kvjax.paging.allocator import PageAllocator


class SavedCache(NamedTuple):
    """What ``load_cache`` gives: the cache, and the tokens that were saved with it, None if none
    were."""

    cache: KVCache
    tokens: list[list[int]] | None


@without_mesh_context
def load_cache(
    path: str | Path,
    *,
    model: Weighed | str | None = None,
    max_len: int | None = None,
    mesh: Mesh | None = None,
) -> SavedCache:
    """Take up a cache from a folder that ``save_cache`` wrote, here or elsewhere.

    On the kind of device where it was saved, with the same ``max_len``, it is that cache, bit for
    bit. Between a CPU's and an accelerator's form its numbers stay what they are.

    Args:
      path: the folder.
      model: the model that goes on with it, or the name that it was saved with.
      max_len: tokens a row that it can hold; by default as many as it could. Rings have none.
      mesh: devices to spread it over; by default it is on one.

    Raises:
      CheckpointError: if it is no cache, one of another model, or a file was cut or changed.
      ValueError: if ``max_len`` is less than it could hold; as ``grow`` and ``migrate``.
    """
    max_len = as_optional_int("max_len", max_len, 1)
    told, arrays = read_folder(path)
    if told.get("kind") != KIND:
        raise CheckpointError(f"{path}: holds {told.get('kind')}, and not {KIND}")
    asked, known = fingerprint(model), told.get("model")
    if None not in (asked, known) and asked != known:
        raise CheckpointError(
            f"{path}: a cache of the model {known}, and this one is {asked}: the numbers of one "
            "model are of no use to another"
        )
    with report_format_errors(path):
        texts: list[list[int]] | None = told["tokens"]
        settings = deserialize_static(json.dumps(told["settings"]).encode())
        cache = _cache(settings, arrays, max_len or 0)
    most = cache.max_len if cache.grows_to is None else cache.grows_to
    if max_len is not None and UNLIMITED > most > max_len:
        raise ValueError(
            f"max_len is {max_len}, but the cache in {path} holds {most}: kvjax.convert makes it "
            "smaller"
        )
    if max_len is not None and most < max_len and cache.grows_to is None:
        cache = grow(cache, max_len)
    return SavedCache(cache if mesh is None else migrate(cache, mesh=mesh), texts)


def _cache(settings: tuple[Any, ...], arrays: dict[str, np.ndarray], max_len: int) -> KVCache:
    """The cache of settings and arrays, in the form of the device here; one that grows may do so to
    ``max_len``."""
    saved, sources, positions, turned_for, budget = settings
    here, layers = current_target(), []
    length = arrays["length"]
    for entry, (policy, kv_heads, head_dim, window) in enumerate(saved):
        raw = policy.raw and tuple(codec.resolve(None, here.platform) for codec in policy.raw)
        policy = replace(
            policy, keys=policy.keys.resolve(None, here.platform),
            values=policy.values.resolve(None, here.platform),
            raw=raw, layout=_growing_to(policy.layout, max_len),
        )  # fmt: skip
        like = layer_shapes(policy, len(length), kv_heads, head_dim)
        shapes, form = jax.tree.flatten((body_of(like), like.tail, like.low))
        some = [arrays[f"layer {entry} {n}"] for n in range(len(shapes))]
        body, tail, low = jax.tree.unflatten(
            form, [_whole(x, shape) for x, shape in zip(some, shapes, strict=True)]
        )
        layers.append(
            replace(like, keys=body[0], values=body[1], tail=tail, low=low, window=window)
        )
    put = layers[0].policy.placement.put
    rows = put((length, arrays["written"], arrays["status"]))
    cache = KVCache(
        tuple(layer.placed() for layer in layers), *rows, sources=sources, positions=positions,
        turned_for=turned_for, budget=budget,
    )  # fmt: skip
    pools = [
        _pool(kind.layout.pool or 0, arrays[f"table {number}"])
        for number, kind in enumerate(cache.pagings)
    ]
    cache = commit_together(replace(cache, pools=put(tuple(pools))))
    if all(layer.policy.placement.computes == here for layer in layers):
        return cache
    there = [
        replace(x, placement=x.placement.over(None).fixed()) for x in (y.policy for y in layers)
    ]
    return under(cache, there)


def _growing_to(layout: Any, max_len: int) -> Any:
    """A layout that may grow at least so far, if it grows."""
    if pages := paged(layout):
        return replace(pages, inner=_growing_to(pages.inner, max_len))
    if layout.grows_to is None or layout.grows_to >= max_len:
        return layout
    return replace(layout, grows_to=max_len)


def _whole(some: np.ndarray, like: Any) -> np.ndarray:
    """An array of a shape and dtype that begins with some numbers along one axis, or is these; 16
    bits stay what they are, whichever way they are kept."""
    if some.dtype != like.dtype:
        if some.dtype.itemsize != like.dtype.itemsize:
            raise ValueError(f"{some.dtype} where {like.dtype} was expected")
        some = some.view(like.dtype)
    if some.ndim != len(like.shape) or any(
        n > m for n, m in zip(some.shape, like.shape, strict=True)
    ):
        raise ValueError(f"{list(some.shape)} where {list(like.shape)} was expected")
    found = np.zeros(like.shape, like.dtype)
    found[tuple(slice(n) for n in some.shape)] = some
    return found


def _pool(pages: int, table: np.ndarray) -> PageAllocator:
    """The pool of which rows have the pages of a table, the first ones."""
    refs = np.bincount(table[table >= 0], minlength=pages).astype(np.int32)
    free = np.flatnonzero(refs == 0)[::-1]
    stack = np.zeros(pages, np.int32)
    stack[: len(free)] = free
    left = np.array([len(free)], np.int32)
    return PageAllocator(table.astype(np.int32), refs, stack, left)  # type: ignore[arg-type]
