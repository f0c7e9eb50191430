"""Check a cache: its arrays before an operation, its status bits after traced steps."""

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import LayerCache, layer_shapes
from kvjax.cache.state import KVCache
from kvjax.core.array_ops import flag_where
from kvjax.core.errors import CacheOverflowError, NonFiniteError
from kvjax.core.transfer import commit_together, fetch
from kvjax.core.typing import Array, LayerNumber
from kvjax.core.validation import check_not_donated, check_not_symbolic, check_not_traced, is_traced
from kvjax.placement.device import on_device_of


def validated(
    what: str,
    cache: Any,
    *,
    layer: LayerNumber | None = None,
    between: bool = True,
    outside: bool = False,
) -> KVCache:
    """The cache that ``what`` was given, with every array where its policies say: NumPy's, and
    those that came back from a file in another kind of memory, are put there.

    Args:
      what: the function's name, for its errors.
      cache: what it was given.
      layer: the only layer of the model that it looks at; None for all.
      between: whether no call may have begun.
      outside: whether the function must look at the numbers.

    Raises:
      ValueError: if it is no cache, its arrays were used up or are not those of its policies, a
        call has begun, or it is traced where it must not be.
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
            f"kvjax.advance(cache, {pending.new}) first, when all layers have them"
        )
    return _in_place(what, cache, entries)


def check_cache(what: str, cache: Any) -> None:
    """Raise ``ValueError`` for what is none."""
    if not isinstance(cache, KVCache):
        raise ValueError(f"{what} takes a KVCache, as of init_cache, not a {type(cache).__name__}")


def check_arrays(what: str, cache: Any) -> None:
    """``check_cache``, and a ``ValueError`` where its arrays are none, or are used up."""
    check_cache(what, cache)
    for x in jax.tree.leaves(cache):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise ValueError(
                f"{what}: the cache is of shapes alone: jax.eval_shape({what}, ...) goes on with it"
            )
        if not isinstance(x, jax.Array | np.ndarray):
            raise ValueError(f"{what}: the cache has a {type(x).__name__} in place of an array")
    check_not_donated(cache)


def _check_shapes(what: str, cache: KVCache, entries: Iterable[int]) -> None:
    """Raise ``ValueError`` for arrays that are not those of a cache."""
    rows, layers = cache.length.shape, len(cache.layers)
    if len(rows) != 1:
        raise ValueError(
            f"{what}: length is {list(rows)}, not [batch]: jax.vmap is over whole caches that were "
            "stacked, each with its rows"
        )
    check_not_symbolic(f"{what}: the rows of a cache", rows)
    shapes = {"length": rows, "written": (*rows, layers), "status": rows}
    for name, wanted in shapes.items():
        found = getattr(cache, name)
        if found.shape != wanted or found.dtype != jnp.int32:
            raise ValueError(
                f"{what}: {name} is {found.dtype}{list(found.shape)}, and must be "
                f"int32{list(wanted)}"
            )
    _check_pools(what, cache)
    for entry in entries:
        held = cache.layers[entry]
        wanted = layer_shapes(held.policy, cache.batch, held.kv_heads, held.head_dim, held.stack)
        for part in ("keys", "values", "tail", "low"):
            found, expected = _shapes(held, part), _shapes(wanted, part)
            if found != expected:
                raise ValueError(
                    f"{what}: {part} of layer {entry} are {found}, and its policy says {expected}"
                )


def _check_pools(what: str, cache: KVCache) -> None:
    """Raise ``ValueError`` for pools that are not those of the layers' pages."""
    page_groups = cache.page_groups
    if len(page_groups) != len(cache.pools):
        raise ValueError(
            f"{what}: the cache has {len(cache.pools)} pool(s) of pages, and its policies say "
            f"{len(page_groups)}"
        )
    for page_group, pool in zip(page_groups, cache.pools, strict=True):
        wanted = (cache.batch, page_group.layout.columns), page_group.layout.pool
        if (found := (pool.table.shape, pool.pages)) != wanted:
            raise ValueError(
                f"{what}: a table and a pool of {found[0]} and {found[1]} pages, and its policy "
                f"says {wanted[0]} and {wanted[1]}"
            )


def _shapes(held: LayerCache, part: str) -> str:
    """The arrays of a part of a layer, in words."""
    arrays = jax.tree.leaves(getattr(held, part))
    return " and ".join(f"{x.dtype}{list(x.shape)}" for x in arrays) or "none"


def _in_place(what: str, cache: KVCache, entries: Iterable[int]) -> KVCache:
    """With NumPy's arrays, and those of another kind of memory, where they belong."""
    rows = cache.length, cache.written, cache.status, cache.pools
    layers = list(cache.layers)
    away = [entry for entry in entries if not layers[entry].in_place]
    if not away and all(isinstance(x, jax.Array) for x in jax.tree.leaves(rows)):
        return cache
    arrays = [x for x in jax.tree.leaves(cache) if isinstance(x, jax.Array)]
    traced = any(is_traced(x) for x in arrays)
    if traced and not away:
        length, written, status, pools = jax.tree.map(jnp.asarray, rows)
        return replace(cache, length=length, written=written, status=status, pools=pools)
    if traced:
        raise ValueError(
            f"{what}: not all arrays of the cache are in the memory that its policies say: "
            "kvjax.fork(cache), outside jit, brings them there"
        )
    with on_device_of(arrays[0]) if arrays else nullcontext():
        length, written, status, pools = layers[0].policy.placement.put(rows)
        for entry in away:
            layers[entry] = layers[entry].placed()
    there = replace(
        cache, layers=tuple(layers), length=length, written=written, status=status, pools=pools
    )
    return commit_together(there)


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
"""Bits of ``KVCache.status``; ``LOST``: the cache was converted to a layout that keeps tokens that
it did not hold. ``BAD_PAGE``: a table names a page that is none. ``MISSED_LAYER``: a call did not
give every layer of a stack its tokens once."""

_ERRORS: dict[type[Exception], dict[int, str]] = {
    CacheOverflowError: {
        OVERFLOW: (
            "the cache holds {cache.max_len} tokens a row, and row(s) {rows} were given more than "
            "there was room for: those calls' tokens were dropped; {way}"
        ),
        OUT_OF_PAGES: (
            "the pool has no pages left for row(s) {rows}: what they were given was dropped; give "
            "the policy more pages, or others' back (kvjax.reset, kvjax.rewind, kvjax.select)"
        ),
    },
    ValueError: {
        REWOUND_TOO_FAR: (
            "row(s) {rows} were to forget more tokens than kvjax.rewindable says they can, and "
            "were left as they are"
        ),
        LOST: "row(s) {rows} had forgotten tokens that the layout they were converted to keeps",
        NO_SUCH_ROW: "row(s) {rows} were selected by a number that is no row's",
        BAD_LENGTHS: "lengths of row(s) {rows} was negative or above the tokens of its call",
        BAD_PAGE: (
            "the tables of row(s) {rows} name pages that the pool has not: what was to be written "
            "there was dropped"
        ),
        MISSED_LAYER: (
            "a call of row(s) {rows} gave some layer of a stack its tokens more than once, or "
            "never: a scan goes over each layer's number, 0 the first, once"
        ),
        NO_SUCH_TOKEN: "row(s) {rows} were given a token id that is not in the vocabulary",
        OUT_OF_STEP: (
            "append or advance was given other lengths of row(s) {rows} than the first append of "
            "its call, by which they went"
        ),
    },
    NonFiniteError: {
        BAD_NUMBERS: (
            "keys or values of row(s) {rows} are not finite numbers: a quantized cache can't hold "
            "them"
        ),
        NON_FINITE: "the logits of row(s) {rows} are not finite numbers",
    },
}
"""What ``check`` raises, the first one first."""


def note_non_finite(cache: KVCache, rows: Array) -> KVCache:
    """Record that the logits of ``rows``, bool[batch], are not finite numbers; see ``check``."""
    return replace(cache, status=cache.status | flag_where(rows, NON_FINITE))


def note_tokens(cache: KVCache, rows: Array) -> KVCache:
    """Record that ``rows``, bool[batch], were given tokens that the vocabulary has not."""
    return replace(cache, status=cache.status | flag_where(rows, NO_SUCH_TOKEN))


def check(cache: KVCache) -> None:
    """Raise what traced steps could only record.

    Raises:
      CacheOverflowError: if a row was given more tokens than it can hold.
      NonFiniteError: if the model gave logits that are not finite, or keys or values that are
        not to a quantized cache.
      ValueError: if what was traced was wrong: ``lengths``, a token, a row's number, tokens to
        forget, what a conversion was to keep; inside ``jit``.
    """
    check_arrays("kvjax.check", cache)
    check_not_traced("kvjax.check", cache.status)
    status = fetch(cache.status)
    grows = cache.grows_to is not None and cache.max_len < cache.grows_to
    limit = "rotary_len" if cache.max_len == cache.positions == cache.rotary_len else "max_len"
    way = "kvjax.grow it before the step" if grows else f"start with a larger {limit}"
    for error, words in _ERRORS.items():
        for bit, sentence in words.items():
            if np.any(status & bit):
                rows = ", ".join(str(row) for row in np.flatnonzero(status & bit))
                raise error(sentence.format(cache=cache, rows=rows, way=way))


@automatic_axes
def clear_status(cache: KVCache) -> KVCache:
    """The cache without what ``check`` would raise: when the reason has been dealt with."""
    check_arrays("kvjax.clear_status", cache)
    status = jnp.zeros_like(cache.status)
    if cache.spread is not None:
        status = cache.spread.put(status, cache.spread.row_spec)
    return replace(cache, status=status)
