"""Check a cache: its arrays before an operation, and its status bits after traced steps."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import LayerCache, layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import flag_where
from kvjax.core.transfer import commit_together, fetch
from kvjax.core.typing import Array, LayerNumber
from kvjax.core.validation import (
    CacheOverflowError,
    NonFiniteError,
    check_not_donated,
    check_not_symbolic,
    check_not_traced,
    is_traced,
)
from kvjax.placement.device import on_device_of


def validated(
    what: str,
    cache: KVCache,
    *,
    layer: LayerNumber | None = None,
    between: bool = True,
    outside: bool = False,
) -> KVCache:
    """Check the cache that a function received, and put every array where its policy places it.

    NumPy arrays, and arrays in another kind of memory, are moved.

    Args:
      what: the function's name, for error messages.
      cache: the argument.
      layer: the only layer that the function reads; None for all.
      between: whether the function needs a cache with no call in progress.
      outside: whether the function needs concrete arrays.

    Raises:
      ValueError: if ``cache`` is not a cache, its arrays were donated or do not fit its policies, a
        call is in progress, or the cache is traced although it must not be.
    """
    check_cache(what, cache)
    entries, seen = range(len(cache.layers)), cache
    if layer is not None:
        entries = [cache.entry(layer)]
        seen = replace(cache, layers=(cache.layers[entries[0]],))
    check_arrays(what, seen)
    if outside:
        check_not_traced(what, *jax.tree.leaves(seen))
    _check_shapes(what, cache, entries)
    if between and (pending := cache.pending) is not None:
        raise ValueError(
            f"{what}: a call has begun, and its {pending.new} token(s) a row do not count yet: "
            f"append them to all layers, then call kvjax.advance(cache, {pending.new}) first"
        )
    return _in_place(what, cache, entries)


def check_cache(what: str, cache: object) -> None:
    """Raise ``ValueError`` if ``cache`` is not a `KVCache`."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"{what} takes a KVCache, see init_cache, not a {type(cache).__name__}")


def check_arrays(what: str, cache: object) -> None:
    """Raise ``ValueError`` if ``cache`` is not a `KVCache`, or its leaves are not arrays or were
    donated."""
    check_cache(what, cache)
    for x in jax.tree.leaves(cache):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{what}: the cache consists of shapes only: use jax.eval_shape({what}, ...)"
            )
        if not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(f"{what}: the cache has a {type(x).__name__} in place of an array")
    check_not_donated(cache)


def _check_shapes(what: str, cache: KVCache, entries: Iterable[int]) -> None:
    """Raise ``ValueError`` for arrays whose shapes or dtypes do not fit the policies."""
    rows, layers = cache.length.shape, len(cache.layers)
    if len(rows) != 1:
        raise ValueError(
            f"{what}: length is {list(rows)}, not [batch]: jax.vmap maps over whole caches, each "
            "with rows of its own"
        )
    check_not_symbolic(f"{what}: the rows of a cache", rows)
    shapes = {"length": rows, "written": (*rows, layers), "status": rows}
    for name, shape in shapes.items():
        x = getattr(cache, name)
        if x.shape != shape or x.dtype != jnp.int32:
            raise ValueError(
                f"{what}: {name} is {x.dtype}{list(x.shape)}, but must be int32{list(shape)}"
            )
    _check_pools(what, cache)
    for entry in entries:
        x = cache.layers[entry]
        expected = layer_shapes(x.policy, cache.batch, x.kv_heads, x.head_dim, x.stack)
        for part in ("keys", "values", "tail", "low"):
            actual, required = _describe(x, part), _describe(expected, part)
            if actual != required:
                raise ValueError(
                    f"{what}: {part} of layer {entry} are {actual}, but its policy needs {required}"
                )


def _check_pools(what: str, cache: KVCache) -> None:
    """Raise ``ValueError`` for pools that do not fit the policies."""
    page_groups = cache.page_groups
    if len(page_groups) != len(cache.pools):
        raise ValueError(
            f"{what}: the cache has {len(cache.pools)} pool(s) of pages, but its policies need "
            f"{len(page_groups)}"
        )
    for group, pool in zip(page_groups, cache.pools, strict=True):
        shape, pages = (cache.batch, group.layout.columns), group.layout.pool
        if (pool.table.shape, pool.pages) != (shape, pages):
            raise ValueError(
                f"{what}: a page table is {list(pool.table.shape)} and its pool has {pool.pages} "
                f"pages, but the policy needs {list(shape)} and {pages}"
            )


def _describe(layer_cache: LayerCache, part: str) -> str:
    """Return the dtypes and shapes of a part of a layer as text, for error messages."""
    arrays = jax.tree.leaves(getattr(layer_cache, part))
    return " and ".join(f"{x.dtype}{list(x.shape)}" for x in arrays) or "none"


def _in_place(what: str, cache: KVCache, entries: Iterable[int]) -> KVCache:
    """Put NumPy arrays, and arrays in another kind of memory, where the policies place them."""
    rows = cache.length, cache.written, cache.status, cache.pools
    layers = list(cache.layers)
    misplaced = [entry for entry in entries if not layers[entry].in_place]
    if not misplaced and all(isinstance(x, jax.Array) for x in jax.tree.leaves(rows)):
        return cache
    arrays = [x for x in jax.tree.leaves(cache) if isinstance(x, jax.Array)]
    traced = any(is_traced(x) for x in arrays)
    if traced and not misplaced:
        length, written, status, pools = jax.tree.map(jnp.asarray, rows)
        return replace(cache, length=length, written=written, status=status, pools=pools)
    if traced:
        raise ValueError(
            f"{what}: some arrays of the cache are not in the kind of memory of their policies: "
            "call kvjax.fork(cache) outside jit, which moves them there"
        )
    with on_device_of(arrays[0]) if arrays else nullcontext():
        length, written, status, pools = layers[0].policy.placement.put(rows)
        for entry in misplaced:
            layers[entry] = layers[entry].placed()
    placed = replace(
        cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
    )
    return commit_together(placed)


(
    OVERFLOW,
    NON_FINITE,
    REWOUND_TOO_FAR,
    BAD_LENGTHS,
    LOST,
    NO_SUCH_ROW,
    BAD_NUMBERS,
    OUT_OF_STEP,
    NO_SUCH_TOKEN,
    OUT_OF_PAGES,
    BAD_PAGE,
    MISSED_LAYER,
) = (1 << bit for bit in range(12))
"""Bits of ``KVCache.status``. ``LOST`` means that the cache was converted to a layout that needs
tokens which the cache no longer had. ``BAD_PAGE`` means that a page table has a number outside the
pool. ``MISSED_LAYER`` means that a call did not append exactly once to every layer of a stack."""

_ERRORS: dict[type[Exception], dict[int, str]] = {
    CacheOverflowError: {
        OVERFLOW: (
            "the cache holds {cache.max_len} tokens a row, and row(s) {rows} were given more: the "
            "tokens of those calls were dropped; {way}"
        ),
        OUT_OF_PAGES: (
            "the pool has no pages left for row(s) {rows}: the tokens of those calls were dropped; "
            "give the policy more pages, or free some (kvjax.reset, kvjax.rewind, kvjax.select)"
        ),
    },
    ValueError: {
        REWOUND_TOO_FAR: (
            "row(s) {rows} were to forget more tokens than kvjax.rewindable allows, and are "
            "unchanged"
        ),
        LOST: "row(s) {rows} had forgotten tokens that the layout they were converted to needs",
        NO_SUCH_ROW: "row(s) {rows} were selected by numbers of rows that do not exist",
        BAD_LENGTHS: "lengths of row(s) {rows} was negative or above the tokens of its call",
        BAD_PAGE: (
            "the tables of row(s) {rows} refer to pages outside the pool: tokens for those pages "
            "were dropped"
        ),
        MISSED_LAYER: (
            "a call appended to some layer of a stack more than once, or never (row(s) {rows}): "
            "scan over each layer's number, from 0, once"
        ),
        NO_SUCH_TOKEN: "row(s) {rows} were given a token id that is not in the vocabulary",
        OUT_OF_STEP: (
            "append or advance was given other lengths of row(s) {rows} than the first append of "
            "its call, whose lengths were used"
        ),
    },
    NonFiniteError: {
        BAD_NUMBERS: (
            "keys or values of row(s) {rows} are not finite numbers, which a quantized cache can't "
            "hold"
        ),
        NON_FINITE: "the logits of row(s) {rows} are not finite numbers",
    },
}
"""The errors that ``check`` raises. If several bits are set, the first error in this order is
raised."""


def note_non_finite(cache: KVCache, rows: Array) -> KVCache:
    """Record in the status that the logits of the rows where ``rows`` (bool[batch]) is true are not
    finite; see ``check``."""
    return replace(cache, status=cache.status | flag_where(rows, NON_FINITE))


def note_tokens(cache: KVCache, rows: Array) -> KVCache:
    """Record in the status that the rows where ``rows`` (bool[batch]) is true received tokens
    outside the vocabulary."""
    return replace(cache, status=cache.status | flag_where(rows, NO_SUCH_TOKEN))


def check(cache: KVCache) -> None:
    """Raise the errors that traced steps could only record.

    Raises:
      CacheOverflowError: if the tokens of a row did not fit.
      NonFiniteError: if logits, or keys or values for a quantized cache, were not finite.
      ValueError: if a traced argument was wrong (``lengths``, a token, a row index, or a number of
        tokens to rewind), or a conversion needed tokens that the cache no longer had. Also if
        ``check`` is called inside ``jit``.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      kvjax.check(cache)  # raises if a row has overflowed
      ```
    """
    check_arrays("kvjax.check", cache)
    check_not_traced("kvjax.check", cache.status)
    status = fetch(cache.status)
    grows = cache.grows_to is not None and cache.max_len < cache.grows_to
    limit = "rotary_len" if cache.max_len == cache.positions == cache.rotary_len else "max_len"
    way = "kvjax.grow it before the step" if grows else f"start with a larger {limit}"
    for error, messages in _ERRORS.items():
        for bit, message in messages.items():
            if np.any(status & bit):
                rows = ", ".join(str(row) for row in np.flatnonzero(status & bit))
                raise error(message.format(cache=cache, rows=rows, way=way))


@automatic_axes
def clear_status(cache: KVCache) -> KVCache:
    """Clear the status of a cache, so that ``check`` raises nothing. Call this after handling the
    cause.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      cache = kvjax.clear_status(cache)
      ```
    """
    check_arrays("kvjax.clear_status", cache)
    status = jnp.zeros_like(cache.status)
    if cache.mesh_sharding is not None:
        status = cache.mesh_sharding.put(status, cache.mesh_sharding.row_spec)
    return replace(cache, status=status)
