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
from jaxtyping import PyTree

from kvjax.cache.checks import check, validated
from kvjax.cache.layer import layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.array_folder import PendingSave, read_folder, report_format_errors, save_folder
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import deserialize_static, serialize_static
from kvjax.core.target import current_target
from kvjax.core.transfer import commit_together, fetch
from kvjax.core.typing import Array
from kvjax.core.validation import ArgumentError, CheckpointError, as_optional_int
from kvjax.layouts import UNLIMITED, as_paged
from kvjax.operations.capacity import grow
from kvjax.operations.conversion import with_policies
from kvjax.operations.migration import migrate
from kvjax.operations.rows import fork
from kvjax.operations.stacks import unstack
from kvjax.paging.allocator import PageAllocator

CACHE_KIND = "a cache"


class ModelWithParams(Protocol):
    """A model with its parameters."""

    @property
    def config(self) -> Any: ...
    @property
    def params(self) -> PyTree: ...


def fingerprint(model: ModelWithParams | str | None) -> str | None:
    """Return a short hash of a model's config and weights. A string or None is returned unchanged.

    The hash includes two checksums of the bits of each weight. The checksums are integer sums, so
    they are the same on all devices and meshes, and no weight is moved.
    """
    if model is None or isinstance(model, str):
        return model
    leaves, _ = jax.tree_util.tree_flatten_with_path(model.params)
    digest = hashlib.sha256(repr(model.config).encode())
    for (path, x), sums in zip(leaves, fetch([_checksums(x) for _, x in leaves]), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape} {sums}".encode())
    return digest.hexdigest()[:32]


@jax.jit
def _checksums(x: Array) -> Array:
    """Return the sum of an array's bit patterns, and their sum weighted by position, as uint32[2].

    Both are modulo 2**32. The weights are odd.
    """
    if jnp.iscomplexobj(x):
        x = jnp.stack([x.real, x.imag])
    if x.dtype == bool:
        x = x.astype(jnp.int8)
    info = jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo
    size = info(x.dtype).bits
    if size < 8:
        x, size = x.astype(jnp.float32), 32
    word = {8: jnp.uint8, 16: jnp.uint16}.get(size, jnp.uint32)
    bits = jax.lax.bitcast_convert_type(x, word).astype(jnp.uint32)
    weights = jnp.uint32(1)
    for axis, _ in enumerate(bits.shape):
        step = jnp.uint32(2 * (7919 * axis + 1013))
        weights = weights + step * jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
    return jnp.stack([jnp.sum(bits, dtype=jnp.uint32), jnp.sum(bits * weights, dtype=jnp.uint32)])


@without_mesh_context
def save_cache(
    path: str | Path,
    cache: KVCache,
    *,
    model: ModelWithParams | str | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    wait: bool = True,
) -> PendingSave:
    """Save a cache to a folder, in its stored form, so quantized layers stay quantized.

    Only the filled part of each layer is written. The folder is replaced atomically: if the writer
    is stopped, the folder contains the old or the new cache.

    Args:
      path: the folder. It must be new, empty, or written by this function before.
      cache: the cache. It is not changed. A cache on a mesh is first moved to the default device if
        slots or pools are divided. A stacked cache is saved unstacked. Call ``stack`` after loading
        it.
      model: the cache's model, or a name for its weights, which ``load_cache`` compares.
      tokens: the tokens of each row. The cache may lack the last of them
        (``GenerationResult.pending_tokens``).
      wait: whether to wait until the folder is written. Otherwise a second thread writes it, and
        you must call ``wait()`` on the result before the program ends.

    Raises:
      ValueError: if a row has fewer ``tokens`` than the cache; if the cache's arrays have been
        donated or deleted, a call on it is unfinished, or other processes have a part of it; or
        inside ``jit``.
      CacheOverflowError: if ``check`` raises it for the cache.
      CheckpointError: if ``path`` is a file, or a folder that contains anything but a saved cache.

    Example:
      ```python
      result = kvjax.generate(lm, "The json module", max_new_tokens=8)
      kvjax.save_cache("my-cache", result.cache, model=lm)
      cache, tokens = kvjax.load_cache("my-cache", model=lm)
      ```
    """
    cache = unstack(validated("kvjax.save_cache", cache, outside=True))
    check(cache)
    length = fetch(cache.length)
    texts = None if tokens is None else [[int(n) for n in row] for row in tokens]
    if texts is not None and (
        len(texts) != len(length) or any(n > len(x) for n, x in zip(length, texts, strict=True))
    ):
        raise ArgumentError(
            f"tokens has {[len(row) for row in texts]} tokens, but the rows hold {length.tolist()}",
            param="tokens",
        )
    cache = _on_one_device(cache)
    metadata = {
        "kind": CACHE_KIND,
        "model": fingerprint(model),
        "tokens": texts,
        "settings": json.loads(serialize_static(_settings(cache))),
    }
    saving = save_folder(path, _arrays(cache), metadata)
    if wait:
        saving.wait()
    return saving


def _on_one_device(cache: KVCache) -> KVCache:
    """Give a cache single-device policies. Arrays that have the same layout on one device are not
    moved."""
    mesh_sharding = cache.mesh_sharding
    if mesh_sharding is None:
        return cache
    if not cache.length.is_fully_addressable:
        raise ValueError(
            "other processes hold a part of the cache: save_cache needs all of it in one process"
        )
    policies = [
        replace(x.policy, placement=x.policy.placement.on_mesh(None).with_target())
        for x in cache.layers
    ]
    unchanged = all(
        layer.orders == replace(layer, policy=policy).orders
        and layer.policy.stored_layout == policy.stored_layout
        for layer, policy in zip(cache.layers, policies, strict=True)
    )
    if not unchanged or (cache.pools and mesh_sharding.rows > 1):
        return migrate(fork(cache), mesh=None)
    layers = [replace(x, policy=policy) for x, policy in zip(cache.layers, policies, strict=True)]
    return replace(cache, layers=tuple(layers))


def _settings(cache: KVCache) -> tuple[object, ...]:
    """Return the static fields of a cache."""
    layers = tuple((x.policy, x.kv_heads, x.head_dim, x.window) for x in cache.layers)
    return layers, cache.sources, cache.positions, cache.rotary_len, cache.budget


def _arrays(cache: KVCache) -> dict[str, np.ndarray]:
    """Return the filled part of a cache's arrays by name, on the host."""
    arrays: dict[str, Any] = {
        "length": cache.length,
        "written": cache.written,
        "status": cache.status,
    }
    used_pages = []
    for number, pool in enumerate(cache.pools):
        table = fetch(pool.table)
        pages = np.unique(table[table >= 0]).astype(np.int32)
        arrays[f"table {number}"] = np.where(table >= 0, np.searchsorted(pages, table), -1)
        used_pages.append(pages if len(pages) else np.zeros(1, np.int32))
    for entry, layer in enumerate(cache.layers):
        near, page_group = layer.near(), layer.policy.page_group
        body = near.keys, near.values
        if page_group is None:
            units = _filled(cache, entry)
            body = jax.tree.map(
                lambda x, order, units=units: order.slice_units(x, 0, units), body, layer.orders
            )
        else:
            pages = used_pages[cache.page_groups.index(page_group)]
            body = jax.tree.map(functools.partial(jnp.take, indices=pages, axis=0), body)
        for number, x in enumerate(jax.tree.leaves((body, layer.tail, layer.low))):
            arrays[f"layer {entry} {number}"] = x
    # Make copies, because a second thread writes them while the cache may be donated.
    return {name: np.array(x) for name, x in fetch(arrays).items()}


def _filled(cache: KVCache, entry: int) -> int:
    """Return the number of units of a layer's body up to the last written one."""
    policy = cache.layers[entry].policy
    written = jnp.maximum(cache.length, cache.written[:, entry])
    units = policy.split.flushed(written) if policy.has_tail else written
    return max(int(policy.stored_layout.occupied(units)), 1)


class SavedCache(NamedTuple):
    """The result of ``load_cache``: the cache, and the tokens that were saved with it, or None.

    Example:
      ```python
      kvjax.save_cache("my-cache", kvjax.init_cache(lm.config, max_len=64), model=lm)
      saved = kvjax.load_cache("my-cache", model=lm)
      print(saved.cache.length, saved.tokens)
      ```
    """

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
    """Load a cache that ``save_cache`` has written, on this or another machine.

    On the same type of device and with the same ``max_len``, it is bitwise identical to the saved
    cache. CPUs and accelerators store some numbers in different forms, which are converted without
    loss.

    Args:
      path: the folder.
      model: the model with which the cache will be used, or the name given to ``save_cache``.
      max_len: the new capacity in tokens per row; by default the saved one. It has no effect on
        rings.
      mesh: the mesh on which the cache is put. By default it is on one device.

    Raises:
      CheckpointError: if the folder contains no cache, the cache belongs to a different model, or a
        file was truncated or modified.
      ValueError: if ``max_len`` is less than the saved capacity, or for the same reasons as
        ``grow`` and ``migrate``.

    Example:
      ```python
      result = kvjax.generate(lm, "The json module", max_new_tokens=8)
      kvjax.save_cache("my-cache", result.cache, model=lm)
      cache, tokens = kvjax.load_cache("my-cache", model=lm, max_len=128)
      ```
    """
    max_len = as_optional_int("max_len", max_len, 1)
    metadata, arrays = read_folder(path)
    if metadata.get("kind") != CACHE_KIND:
        raise CheckpointError(f"{path}: holds {metadata.get('kind')}, not {CACHE_KIND}")
    expected, saved = fingerprint(model), metadata.get("model")
    if None not in (expected, saved) and expected != saved:
        raise CheckpointError(
            f"{path}: was saved for model {saved}, but the model here is {expected}: a cache works "
            "only with the model that computed it"
        )
    with report_format_errors(path):
        texts: list[list[int]] | None = metadata["tokens"]
        settings = deserialize_static(json.dumps(metadata["settings"]).encode())
        cache = _restore(settings, arrays, max_len or 0)
    most = cache.max_len if cache.grows_to is None else cache.grows_to
    if max_len is not None and UNLIMITED > most > max_len:
        raise ArgumentError(
            f"max_len is {max_len}, but the cache in {path} holds {most}: load it without max_len "
            "and shrink it with kvjax.convert",
            param="max_len",
        )
    if max_len is not None and most < max_len and cache.grows_to is None:
        cache = grow(cache, max_len)
    return SavedCache(cache if mesh is None else migrate(cache, mesh=mesh), texts)


def _restore(settings: tuple[Any, ...], arrays: dict[str, np.ndarray], max_len: int) -> KVCache:
    """Restore a cache from static fields and arrays, in the form of the current device.

    A growing cache may grow to at least ``max_len``.
    """
    saved, sources, positions, rotary_len, budget = settings
    target, layers = current_target(), []
    length = arrays["length"]
    for entry, (policy, kv_heads, head_dim, window) in enumerate(saved):
        raw = policy.raw and tuple(codec.resolve(None, target.platform) for codec in policy.raw)
        policy = replace(
            policy,
            keys=policy.keys.resolve(None, target.platform),
            values=policy.values.resolve(None, target.platform),
            raw=raw,
            layout=_growing_to(policy.layout, max_len),
        )
        like = layer_shapes(policy, len(length), kv_heads, head_dim)
        shapes, structure = jax.tree.flatten(((like.keys, like.values), like.tail, like.low))
        filled = [_pad_to(arrays[f"layer {entry} {n}"], shape) for n, shape in enumerate(shapes)]
        (keys, values), tail, low = jax.tree.unflatten(structure, filled)
        layers.append(replace(like, keys=keys, values=values, tail=tail, low=low, window=window))
    put = layers[0].policy.placement.put
    rows = put((length, arrays["written"], arrays["status"]))
    cache = KVCache(
        tuple(layer.placed() for layer in layers),
        *rows,
        sources=sources,
        positions=positions,
        rotary_len=rotary_len,
        budget=budget,
    )
    pools = [
        _restore_pool(group.layout.pool or 0, arrays[f"table {number}"])
        for number, group in enumerate(cache.page_groups)
    ]
    cache = commit_together(replace(cache, pools=put(tuple(pools))))
    if all(layer.policy.placement.compute_target == target for layer in layers):
        return cache
    policies = [layer.policy for layer in layers]
    return with_policies(
        cache, [replace(x, placement=x.placement.on_mesh(None).with_target()) for x in policies]
    )


def _growing_to(layout: Any, max_len: int) -> Any:
    """Let a growing layout grow to at least ``max_len``."""
    if pages := as_paged(layout):
        return replace(pages, inner=_growing_to(pages.inner, max_len))
    if layout.grows_to is None or layout.grows_to >= max_len:
        return layout
    return replace(layout, grows_to=max_len)


def _pad_to(filled: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """Pad an array with zeros to the shape of ``like``, along one axis at most.

    A dtype of the same size is reinterpreted, since 16-bit numbers may be stored as their bits.
    """
    if filled.dtype != like.dtype:
        if filled.dtype.itemsize != like.dtype.itemsize:
            raise ValueError(f"{filled.dtype} where {like.dtype} was expected")
        filled = filled.view(like.dtype)
    if filled.ndim != len(like.shape) or any(
        n > m for n, m in zip(filled.shape, like.shape, strict=True)
    ):
        raise ValueError(f"{list(filled.shape)} where {list(like.shape)} was expected")
    padded = np.zeros(like.shape, like.dtype)
    padded[tuple(slice(n) for n in filled.shape)] = filled
    return padded


def _restore_pool(pages: int, table: np.ndarray) -> PageAllocator:
    """Restore the pool for a page table that uses the first pages."""
    refs = np.bincount(table[table >= 0], minlength=pages).astype(np.int32)
    free = np.flatnonzero(refs == 0)[::-1]
    stack = np.zeros(pages, np.int32)
    stack[: len(free)] = free
    left = np.array([len(free)], np.int32)
    return PageAllocator(table.astype(np.int32), refs, stack, left)  # type: ignore[arg-type]
