"""Attention of queries to a cache, or of a sequence to itself.

By default ``attend`` reads the cache block by block and merges the results with the online softmax
(Milakov and Gimelshein, arXiv:1805.02867; FlashAttention, Dao et al., arXiv:2205.14135). It never
forms the whole score matrix or a decoded copy of a layer. Its cost depends on the filled length:
``lax.cond`` inside a ``scan`` of static length skips blocks that no query sees. This is as cheap as
a loop of dynamic length, and also differentiable. ``paths.py`` lists the other implementations
(paths) and when each is used.
"""

import functools
from dataclasses import replace
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from kvjax.attention.blocks import blockwise
from kvjax.attention.mask import Bias, Mask, device_bias
from kvjax.attention.paths import DIFFERENTIABLE, Path, select_path
from kvjax.attention.softmax import AttentionInputs
from kvjax.cache.appending import check_lengths
from kvjax.cache.checks import validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import check_strip
from kvjax.cache.sections import LayerView
from kvjax.cache.state import KVCache, LayerCache
from kvjax.cache.storing import positions_from
from kvjax.codecs import Raw
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.target import Target, tracing_for
from kvjax.core.typing import Array, AttentionOutput, Counts, KeysValues, LayerNumber, Queries
from kvjax.core.validation import ArgumentError, check_not_symbolic
from kvjax.layouts import UNLIMITED, Dense
from kvjax.placement.mesh import SEQUENCE
from kvjax.policies.cache_policy import CachePolicy


class AttentionOptions(TypedDict, total=False):
    """The keywords that ``attend`` and ``self_attend`` share; ``attend`` explains them."""

    scale: float | None
    window: int | None
    sinks: int
    chunk: int | None
    soft_cap: float | None
    bias: Bias | None


@automatic_axes
def attend(
    queries: Queries,
    cache: KVCache,
    layer: LayerNumber,
    *,
    rotary: RotaryTable | None = None,
    lengths: Counts | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
    causal: bool = True,
    path: str | None = None,
) -> AttentionOutput:
    """Compute the attention of new queries to the cached keys and values of their rows.

    Call it after ``append`` and before ``advance``. Queries do not see tokens that the layout has
    dropped (``Ring``), even if ``window`` includes them.

    Args:
      queries: [batch, heads, new, head_dim], unrotated. ``heads`` is a multiple of the cache's
        ``kv_heads``. Consecutive query heads share a key-value head.
      cache: the cache that ``append`` returned.
      layer: the layer, as in ``append``.
      rotary: the table that ``append`` received.
      lengths: int32[batch], the lengths that ``append`` received. Optional: the cache knows them,
        and they are only checked.
      scale: the factor by which scores are multiplied; by default ``head_dim ** -0.5``.
      window: the query at position ``p`` sees only positions greater than ``p - window``.
      sinks: positions below ``sinks`` stay visible in spite of ``window`` (attention sinks, Xiao et
        al., arXiv:2309.17453).
      chunk: the query at position ``p`` sees only positions from ``p // chunk * chunk`` on (Llama
        4's ``attention_chunk_size``).
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)`` (Gemma 2, arXiv:2408.00118).
      bias: a function whose result is added to the scores, see ``Bias``.
      causal: if False, every query sees all tokens of its row, as a query at the last token would.
        Use this for cross-attention to a cache that was filled before. Don't append tokens in the
        same call.
      path: the name of an implementation (see ``kvjax.attention.paths``), or None for the device's
        default. All implementations compute the same output.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype. A query that sees no token gets zeros.

    Raises:
      ValueError: if shapes do not fit the cache; if nothing was appended to the layer since the
        last ``advance`` (with ``causal=False``: if tokens were appended since then); if ``lengths``
        differ from the lengths that ``append`` received; if ``window`` or ``soft_cap`` is not
        positive; if ``sinks`` exceeds what a ring keeps; or if ``path`` is unknown or does not
        support the inputs.
        A stack of layers with a tail has one more rule. If a call has more tokens than a block,
        call ``attend`` for each layer right after its ``append``. Otherwise ``attend`` raises this
        error too, or returns NaN if the layer's index is traced.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, max_len=64)
      queries = jnp.ones((1, 4, 3, 64))
      keys = values = jnp.ones((1, 2, 3, 64))
      cache = kvjax.append(cache, 0, keys, values)
      output = kvjax.attend(queries, cache, 0)  # [1, 4, 3, 64]
      ```
    """
    cache = validated("kvjax.attend", cache, layer=layer, between=False)
    entry, index = cache.at(layer)
    layer_cache, pending = cache.layers[entry], cache.pending
    if pending is not None and index is None and entry not in pending.entries:
        pending = None
    if cache.mesh_sharding is not None:
        cache.mesh_sharding.check_context()
    _check_queries(queries, layer_cache, cache.batch)
    new = queries.shape[2]
    attention_path = select_path(path, layer_cache.policy, new)
    layout = layer_cache.policy.layout
    if layout.window is not None and sinks > layout.sinks:
        raise ArgumentError(
            f"sinks={sinks}, but the layer's ring keeps only {layout.sinks}", param="sinks"
        )
    windows = [w for w in (window, layout.window) if w is not None]
    at, length = positions_from(cache.length, new), cache.length
    if causal:
        if pending is None:
            raise ValueError(
                f"layer {layer} has no new tokens: call kvjax.append before attend, and advance "
                "after it, or pass causal=False to attend to the tokens of earlier calls"
            )
        if new != pending.new:
            raise ValueError(f"queries of {new} token(s), but {pending.new} were appended")
        check_lengths(cache, lengths)  # if they are not traced
        length = length + pending.count
        if index is not None and (valid := check_strip(layer_cache, index, new)) is not None:
            queries = jnp.where(valid, queries, jnp.nan)
    else:
        if pending is not None:
            raise ArgumentError(
                "causal=False attends to the tokens of earlier calls, but a call is open: call "
                f"kvjax.advance(cache, {pending.new}) first",
                param="causal",
            )
        at = jnp.broadcast_to(jnp.maximum(length - 1, 0)[:, None], at.shape)
    # The model's own window may be narrower than the ring.
    cap = layout.sinks + min(windows) - 1 if layout.sinks else UNLIMITED
    mask = Mask(
        queries=at,
        scale=_scale_of(queries, scale),
        window=min(windows, default=None),
        sinks=max(sinks, layout.sinks),
        chunk=chunk,
        cap=cap,
        soft_cap=soft_cap,
        bias=bias,
        call_start=cache.length if layer_cache.policy.prefill == "exact" else None,
    )
    capped = rotated = apply_rotary(queries, at, rotary)
    if layout.sinks and rotary is not None:
        capped = apply_rotary(queries, jnp.minimum(at, cap), rotary)
    variants = (rotated,) if capped is rotated else (rotated, capped)
    marks, table = cache.written[:, entry], cache.table(entry)
    view = LayerView(layer_cache, cache.length, length, marks, rotary, table, index)
    return _attention_output(attention_path, variants, view, mask)


@automatic_axes
def self_attend(
    queries: Queries,
    keys: KeysValues,
    values: KeysValues,
    *,
    rotary: RotaryTable | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    chunk: int | None = None,
    soft_cap: float | None = None,
    bias: Bias | None = None,
) -> AttentionOutput:
    """Compute causal attention of a sequence to itself, without a cache, as in training.

    Args:
      queries: [batch, heads, new, head_dim], unrotated, at positions 0 to ``new - 1``.
      keys, values: [batch, kv_heads, new, head_dim]; keys unrotated.
      rotary, scale, window, sinks, chunk, soft_cap, bias: as in ``attend``.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype. The function is differentiable.

    Raises:
      ValueError: if shapes do not fit, or ``window`` or ``soft_cap`` is not positive.

    Example:
      ```python
      queries = jnp.ones((1, 4, 8, 64))
      keys = values = jnp.ones((1, 2, 8, 64))
      output = kvjax.self_attend(queries, keys, values, window=4)
      ```
    """
    policy = CachePolicy(Dense(keys.shape[2]), Raw(keys.dtype.name), Raw(values.dtype.name))
    layer_cache = LayerCache(keys, values, policy, keys.shape[1], keys.shape[3])
    _check_queries(queries, layer_cache, keys.shape[0])
    batch, _, new, _ = queries.shape
    positions = jnp.broadcast_to(jnp.arange(new, dtype=jnp.int32), (batch, new))
    queries = apply_rotary(queries, positions, rotary)
    keys = apply_rotary(keys, positions, rotary)
    layer_cache = replace(layer_cache, keys=keys)
    mask = Mask(
        positions, _scale_of(queries, scale), window, sinks, chunk, soft_cap=soft_cap, bias=bias
    )
    length = jnp.full((batch,), new, jnp.int32)
    view = LayerView(layer_cache, length, length, length)
    return _attention_output(blockwise, (queries,), view, mask)


def _check_queries(queries: Queries, layer_cache: LayerCache, batch: int) -> None:
    shape = jnp.shape(queries)
    check_not_symbolic("queries", shape)
    fits = len(shape) == 4 and shape[0] == batch and shape[3] == layer_cache.head_dim
    if not fits or shape[1] % layer_cache.kv_heads or 0 in shape[1:3]:
        raise ValueError(
            f"queries [batch, heads, new, head_dim] {list(shape)} do not fit keys with "
            f"batch={batch}, kv_heads={layer_cache.kv_heads}, head_dim={layer_cache.head_dim}"
        )
    if not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ArgumentError(
            f"queries must be floating-point numbers, got {queries.dtype}", param="queries"
        )


def _scale_of(queries: Queries, scale: float | None) -> float:
    return queries.shape[3] ** -0.5 if scale is None else scale


def _attention_output(
    path: Path, queries: tuple[AttentionOutput, ...], view: LayerView, mask: Mask
) -> AttentionOutput:
    """Call ``_attend`` with one trace for all equal layers. Tracing every layer separately would
    take half of the time that it takes to load a compiled program.

    If the bias is a pytree of arrays, layers share a trace as well. A bias that is a function may
    close over traced arrays that are differentiated, so its trace is not cached. All paths that
    support a bias are differentiable.
    """
    target = view.layer_cache.policy.placement.target()
    if mask.bias is not None:
        arrays, form = jax.tree.flatten(mask.bias)
        if _is_cacheable(arrays, form):
            unbiased = replace(mask, bias=None)
            return _attend_with_bias(target, path, form, queries, view, unbiased, arrays)
        return _attend(target, path, queries, view, mask)
    if path in DIFFERENTIABLE:
        return _attend_once(target, path, queries, view, mask)
    return _attend_by_kernel(target, path, queries, view, mask)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend_by_kernel(
    target: Target, path: Path, queries: tuple[AttentionOutput, ...], view: LayerView, mask: Mask
) -> AttentionOutput:
    """Compute attention by a path that has no derivative. Instead, the derivative of the path
    ``blocks`` is used."""
    output: AttentionOutput = _attend_once(target, path, queries, view, mask)
    return output


@_attend_by_kernel.defjvp
def _attend_by_kernel_jvp(
    target: Target, path: Path, primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]
) -> tuple[AttentionOutput, AttentionOutput]:
    return jax.jvp(functools.partial(_attend_once, target, blockwise), primals, tangents)


def _attend(
    target: Target, path: Path, queries: tuple[AttentionOutput, ...], view: LayerView, mask: Mask
) -> AttentionOutput:
    """Compute attention to a layer by a path, traced for a target device. On a mesh, each device
    computes its share.

    ``queries`` has one or two arrays: the queries rotated to their positions, and, if they differ,
    the queries rotated to capped positions (see ``Mask.cap``).
    """
    kv_heads = view.layer_cache.kv_heads
    mesh_sharding = view.layer_cache.policy.placement.mesh_sharding
    if mesh_sharding is None:
        with tracing_for(target):
            inputs = AttentionInputs(queries[0], queries[-1], kv_heads, view.unstacked(), mask)
            return path(inputs)
    heads = queries[0].shape[1]
    # Devices receive the arrays of a bias that is a pytree. Arrays in a closure are not visible.
    leaves, form = jax.tree.flatten(mask.bias)
    arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray) else None for leaf in leaves]
    rows: Any = mesh_sharding.row_spec()
    everywhere: Any = PartitionSpec()
    query_spec = mesh_sharding.query_spec(heads, kv_heads)

    def on_device(
        queries: tuple[AttentionOutput, ...],
        view: LayerView,
        mask: Mask,
        arrays: list[Array | None],
    ) -> AttentionOutput:
        own = [leaf if x is None else x for leaf, x in zip(leaves, arrays, strict=True)]
        bias = form.unflatten(own)
        if bias is not None:
            bias = device_bias(bias, mesh_sharding, heads, queries[0].shape[1])
        mask = replace(mask, axis=SEQUENCE if mesh_sharding.parts > 1 else None, bias=bias)
        kv_heads = view.layer_cache.kv_heads // mesh_sharding.heads
        shard = view.layer_cache.policy.placement.shard()
        return path(
            AttentionInputs(queries[0], queries[-1], kv_heads, view.unstacked(), mask, shard)
        )

    mask = replace(mask, bias=None)
    mask_specs = replace(mask, queries=rows, call_start=None if mask.call_start is None else rows)
    view_specs = LayerView(
        view.layer_cache.partition_specs(), rows, rows, rows, everywhere, rows, everywhere
    )
    with tracing_for(target):
        specs = query_spec, view_specs, mask_specs, everywhere
        return mesh_sharding.run(on_device, specs, query_spec, queries, view, mask, arrays)


_attend_once = jax.jit(_attend, static_argnames=("target", "path"))


def _is_cacheable(leaves: list[object], form: object) -> bool:
    """Return whether the trace of a bias can be cached. It can if its leaves are arrays and its
    structure is hashable."""
    try:
        hash(form)
    except TypeError:
        return False
    return bool(leaves) and all(isinstance(x, jax.Array | np.ndarray) for x in leaves)


@functools.partial(jax.jit, static_argnames=("target", "path", "form"))
def _attend_with_bias(
    target: Target,
    path: Path,
    form: Any,
    queries: tuple[AttentionOutput, ...],
    view: LayerView,
    mask: Mask,
    arrays: list[Array],
) -> AttentionOutput:
    """Call ``_attend_once`` with a bias, which is given as its tree structure and its arrays."""
    return _attend(target, path, queries, view, replace(mask, bias=form.unflatten(arrays)))
