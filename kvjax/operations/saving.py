"""Save a cache to a folder, and load it."""

import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.checks import check, validated
from kvjax.cache.layer import LayerCache, layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.array_folder import PendingSave, read_folder, report_format_errors, save_folder
from kvjax.core.errors import CheckpointError
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.core.target import current_target
from kvjax.core.transfer import commit_together, fetch
from kvjax.core.typing import Array
from kvjax.core.validation import as_optional_int
from kvjax.layouts import UNLIMITED, paged
from kvjax.operations.capacity import grow
from kvjax.operations.conversion import with_policies
from kvjax.operations.migration import migrate
from kvjax.operations.rows import fork
from kvjax.operations.stacks import unstack
from kvjax.paging.allocator import PageAllocator

CACHE_KIND = "a cache"


class ModelWithParams(Protocol):
    """A loaded model."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> Any: ...


def fingerprint(model: ModelWithParams | str | None) -> str | None:
    """A short text that tells one model's weights from another's: of a model, or as it is given.

    Of each weight two sums of its bits go into it, one of them by their places. They are of whole
    numbers, and so the same on any device and any mesh, and no array is moved.
    """
    if model is None or isinstance(model, str):
        return model
    named, _ = jax.tree_util.tree_flatten_with_path(model.params)
    found = hashlib.sha256(repr(model.config).encode())
    for (path, x), sums in zip(named, fetch([_sums(x) for _, x in named]), strict=True):
        found.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape} {sums}".encode())
    return found.hexdigest()[:32]


@jax.jit
def _sums(x: Array) -> Array:
    """Of an array's bits as uint32[2], modulo 2**32: their sum, and that by odd weights, which
    differ along each axis."""
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.int8)
    of = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    size = of(x.dtype).bits
    if size < 8:
        x, size = x.astype(jnp.float32), 32
    word = {8: jnp.uint8, 16: jnp.uint16}.get(size, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    places = jnp.uint32(1)
    for axis, _ in enumerate(bits.shape):
        step = jnp.uint32(2 * (7919 * axis + 1013))
        places = places + step * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(bits * places, dtype=jnp.uint32)])


@without_mesh_context
def save_cache(
    path: str | Path,
    cache: KVCache,
    *,
    model: ModelWithParams | str | None = None,
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
    cache = unstack(validated("kvjax.save_cache", cache, outside=True))
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
        "kind": CACHE_KIND, "model": fingerprint(model), "tokens": texts,
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
        replace(x.policy, placement=x.policy.placement.on_mesh(None).with_target())
        for x in cache.layers
    ]
    alike = all(
        x.orders == replace(x, policy=each).orders and x.policy.stored_layout == each.stored_layout
        for x, each in zip(cache.layers, policies, strict=True)
    )
    if not alike or (cache.pools and spread.rows > 1):
        return migrate(fork(cache), mesh=None)
    layers = [replace(x, policy=each) for x, each in zip(cache.layers, policies, strict=True)]
    return replace(cache, layers=tuple(layers))


def _settings(cache: KVCache) -> tuple[Any, ...]:
    """What is static of a cache."""
    layers = tuple((x.policy, x.kv_heads, x.head_dim, x.window) for x in cache.layers)
    return layers, cache.sources, cache.positions, cache.rotary_len, cache.budget


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
        near, page_group = held.near(), held.policy.page_group
        if page_group is None:
            units = _filled(cache, entry)
            body = jax.tree.map(
                lambda x, order, units=units: order.slice_units(x, 0, units),
                body_of(near),
                held.orders,
            )
        else:
            pages = used[cache.page_groups.index(page_group)]
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
    return max(int(policy.stored_layout.occupied(units)), 1)


def body_of(held: LayerCache) -> tuple[Any, Any]:
    """What a file keeps of it as its keys and values."""
    return held.keys, held.values


class SavedCache(NamedTuple):
    """What ``load_cache`` gives: the cache, and the tokens that were saved with it, None if none
    were."""

    cache: KVCache
    tokens: list[list[int]] | None


@without_mesh_context
def load_cache(
    path: str | Path,
    *,
    model: ModelWithParams | str | None = None,
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
    if told.get("kind") != CACHE_KIND:
        raise CheckpointError(f"{path}: holds {told.get('kind')}, and not {CACHE_KIND}")
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
    saved, sources, positions, rotary_len, budget = settings
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
        rotary_len=rotary_len, budget=budget,
    )  # fmt: skip
    pools = [
        _pool(kind.layout.pool or 0, arrays[f"table {number}"])
        for number, kind in enumerate(cache.page_groups)
    ]
    cache = commit_together(replace(cache, pools=put(tuple(pools))))
    if all(layer.policy.placement.compute_target == here for layer in layers):
        return cache
    there = [
        replace(x, placement=x.placement.on_mesh(None).with_target())
        for x in (y.policy for y in layers)
    ]
    return with_policies(cache, there)


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
