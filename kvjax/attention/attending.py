"""Queries against a cache: causal by position, with cost that follows the filled length.

``attend`` walks the cache in blocks and merges them by the online softmax (Milakov and
Gimelshein, arXiv:1805.02867; Dao et al., arXiv:2205.14135), so no score matrix and no decoded copy
of a layer exist. Blocks that hold nothing to see are skipped by ``lax.cond`` inside a ``scan`` of
static length: as cheap as a loop of dynamic length, and differentiable. That is the path
``blocks``; ``paths.py`` has the table of where another is taken, and ``reference``, the same in
one piece, for tests and for reading.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kvjax.attention.blocks import blockwise
from kvjax.attention.inputs import AttentionInputs
from kvjax.attention.mask import Bias, Mask, bias_of_heads
from kvjax.attention.paths import DIFFERENTIABLE, Path, path_of
from kvjax.cache.appending import check_lengths
from kvjax.cache.checks import validated
from kvjax.cache.explicit_axes import automatic_axes
from kvjax.cache.layer import check_strip
from kvjax.cache.sections import LayerView
from kvjax.cache.state import KVCache, LayerCache
from kvjax.cache.storing import positions_from
from kvjax.core.rotary import RotaryTable, apply_rotary
from kvjax.core.target import Target, tracing_for
from kvjax.core.typing import AttentionOutput, Counts, LayerNumber, Queries
from kvjax.core.validation import check_not_symbolic
from kvjax.layouts import UNLIMITED
from kvjax.placement.mesh import SEQUENCE


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
    """Attention of a call's queries to all that their rows hold: after ``append``, before
    ``advance``.

    What the layout forgets (``Ring``), no query sees, whatever ``window`` says.

    Args:
      queries: [batch, heads, new, head_dim], unrotated; ``heads`` is a multiple of the cache's
        ``kv_heads``, and consecutive heads share one.
      cache: the cache that this call's keys and values were appended to.
      layer: which layer, as of ``append``.
      rotary: the table that ``append`` was given.
      lengths: int32[batch], as ``append`` was given; by those it goes in any case.
      scale: what scores are multiplied by; by default ``head_dim ** -0.5``.
      window: the query at ``p`` sees positions above ``p - window`` only.
      sinks: positions below ``sinks`` stay visible in spite of ``window``.
      chunk: the query at ``p`` sees positions from ``p // chunk * chunk`` on only (Llama 4's
        ``attention_chunk_size``).
      soft_cap: scores become ``soft_cap * tanh(scores / soft_cap)``.
      bias: added to the scores, see ``Bias``.
      causal: False lets every query see what a query at the row's last token would, wherever it
        stands itself: cross-attention to a cache that was filled once. Nothing is appended for it.
      path: how it is computed, by name, see ``kvjax.attention.paths``; None goes by its table. The
        mixture is the same.

    Returns:
      [batch, heads, new, head_dim] in the queries' dtype. A query that sees nothing gets zeros.

    Raises:
      ValueError: if shapes do not fit the cache, nothing was appended to the layer since the last
        ``advance`` (with ``causal=False``: if something was), ``lengths`` are other ones,
        ``window`` or ``soft_cap`` is not positive, ``sinks`` are more than a ring keeps, or
        ``path`` is not known or can't serve the call; if a long call's queries of a stack attend
        to another layer than the last one appended to (where traced, they get NaN).
    """
    cache = validated("kvjax.attend", cache, layer=layer, between=False)
    entry, index = cache.at(layer)
    held, pending = cache.layers[entry], cache.pending
    if pending is not None and index is None and entry not in pending.entries:
        pending = None
    if cache.spread is not None:
        cache.spread.check_context()
    check_queries(queries, held, cache.batch)
    new = queries.shape[2]
    way = path_of(path, held.policy, new)
    layout = held.policy.layout
    if layout.window is not None and sinks > layout.sinks:
        raise ValueError(f"sinks={sinks}, but the layer's ring keeps {layout.sinks} for ever")
    windows = [w for w in (window, layout.window) if w is not None]
    at, length = positions_from(cache.length, new), cache.length
    if causal:
        if pending is None:
            raise ValueError(
                f"layer {layer} has no tokens of a call: kvjax.append comes before attend, and "
                "advance behind it; causal=False looks at what was counted before"
            )
        if new != pending.new:
            raise ValueError(f"queries of {new} token(s), but {pending.new} were appended")
        check_lengths(cache, lengths)  # where that can be seen
        length = length + pending.count
        if index is not None and (mine := check_strip(held, index, new)) is not None:
            queries = jnp.where(mine, queries, jnp.nan)
    else:
        if pending is not None:
            raise ValueError(
                f"causal=False looks at what the rows hold: kvjax.advance(cache, {pending.new}) "
                "first, so that they hold what was appended"
            )
        at = jnp.broadcast_to(jnp.maximum(length - 1, 0)[:, None], at.shape)
    # A window of the model's own may be narrower than the ring.
    cap = layout.sinks + min(windows) - 1 if layout.sinks else UNLIMITED
    call = cache.length if held.policy.prefill == "exact" else None
    mask = Mask(
        at, scale_of(queries, scale), min(windows, default=None), max(sinks, layout.sinks), chunk,
        cap, soft_cap, bias, call,
    )  # fmt: skip
    capped = turned = apply_rotary(queries, at, rotary)
    if layout.sinks and rotary is not None:
        capped = apply_rotary(queries, jnp.minimum(at, cap), rotary)
    kinds = (turned,) if capped is turned else (turned, capped)
    marks, table = cache.written[:, entry], cache.table(entry)
    view = LayerView(held, cache.length, length, marks, rotary, table, index)
    return mixture(way, kinds, view, mask)


def mixture(
    way: Path, kinds: tuple[AttentionOutput, ...], view: LayerView, mask: Mask
) -> AttentionOutput:
    """``_traced``, by a trace that layers which are alike share: tracing each would be half of what
    a program takes that was compiled before. A bias that is a function may hold traced arrays, of
    which derivatives are asked for: its trace is not kept, but that of a pytree of arrays is. No
    way that serves one is without a derivative.
    """
    target = view.layer_cache.policy.placement.target()
    if mask.bias is not None:
        arrays, form = jax.tree.flatten(mask.bias)
        if _is_kept(arrays, form):
            return _biased(target, way, form, kinds, view, replace(mask, bias=None), arrays)
        return _traced(target, way, kinds, view, mask)
    if way in DIFFERENTIABLE:
        return _traced_once(target, way, kinds, view, mask)
    return _by_kernel(target, way, kinds, view, mask)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _by_kernel(
    target: Target, way: Path, kinds: tuple[AttentionOutput, ...], view: LayerView, mask: Mask
) -> AttentionOutput:
    """By a path that has no derivative; that of the walk is the same."""
    mixed: AttentionOutput = _traced_once(target, way, kinds, view, mask)
    return mixed


@_by_kernel.defjvp
def _by_walk(target: Target, way: Path, primals: Any, tangents: Any) -> Any:
    return jax.jvp(functools.partial(_traced_once, target, blockwise), primals, tangents)


def _traced(
    target: Target, way: Path, kinds: tuple[AttentionOutput, ...], view: LayerView, mask: Mask
) -> AttentionOutput:
    """What queries see of a layer, by a path, as it is traced for a target. ``kinds``: at their
    positions, and capped where that is something else."""
    kv_heads, spread = view.layer_cache.kv_heads, view.layer_cache.policy.placement.spread
    if spread is None:
        with tracing_for(target):
            return way(AttentionInputs(kinds[0], kinds[-1], kv_heads, view.unstacked(), mask))
    heads = kinds[0].shape[1]
    # The arrays of a bias that is a pytree are the devices' own; what a function holds is not seen.
    parts, form = jax.tree.flatten(mask.bias)
    arrays = [part if isinstance(part, jax.Array | np.ndarray) else None for part in parts]
    rows: Any = spread.row_spec()
    everywhere: Any = PartitionSpec()
    divided = spread.query_spec(heads, kv_heads)

    def on_each(
        kinds: tuple[AttentionOutput, ...], view: LayerView, mask: Mask, arrays: list[Any]
    ) -> AttentionOutput:
        here = [part if own is None else own for part, own in zip(parts, arrays, strict=True)]
        bias = form.unflatten(here)
        if bias is not None:
            bias = bias_of_heads(bias, spread, heads, kinds[0].shape[1])
        own = replace(mask, axis=SEQUENCE if spread.parts > 1 else None, bias=bias)
        kv_heads, share = (
            view.layer_cache.kv_heads // spread.heads,
            view.layer_cache.policy.placement.shard(),
        )
        return way(AttentionInputs(kinds[0], kinds[-1], kv_heads, view.unstacked(), own, share))

    mask = replace(mask, bias=None)
    specs = replace(mask, queries=rows, call=None if mask.call is None else rows)
    layer = LayerView(
        view.layer_cache.partition_specs(), rows, rows, rows, everywhere, rows, everywhere
    )
    with tracing_for(target):
        specs = divided, layer, specs, everywhere
        return spread.run(on_each, specs, divided, kinds, view, mask, arrays)


_traced_once = jax.jit(_traced, static_argnames=("target", "way"))


def _is_kept(arrays: list[Any], form: Any) -> bool:
    """Whether the trace of a bias of these parts is kept: of arrays alone, and of a form that can
    be looked up."""
    try:
        hash(form)
    except TypeError:
        return False
    return bool(arrays) and all(isinstance(x, jax.Array | np.ndarray) for x in arrays)


@functools.partial(jax.jit, static_argnames=("target", "way", "form"))
def _biased(
    target: Target,
    way: Path,
    form: Any,
    kinds: tuple[AttentionOutput, ...],
    view: LayerView,
    mask: Mask,
    arrays: list[Any],
) -> AttentionOutput:
    """``_traced_once`` with the bias of that form and those arrays."""
    return _traced(target, way, kinds, view, replace(mask, bias=form.unflatten(arrays)))


def check_queries(queries: Queries, held: LayerCache, batch: int) -> None:
    shape = jnp.shape(queries)
    check_not_symbolic("queries", shape)
    fits = len(shape) == 4 and shape[0] == batch and shape[3] == held.head_dim
    if not fits or shape[1] % held.kv_heads or 0 in shape[1:3]:
        raise ValueError(
            f"queries [batch, heads, new, head_dim] {list(shape)} do not fit keys with "
            f"batch={batch}, kv_heads={held.kv_heads}, head_dim={held.head_dim}"
        )
    if not jnp.issubdtype(queries.dtype, jnp.floating):
        raise ValueError(f"queries must be floating-point numbers, got {queries.dtype}")


def scale_of(queries: Queries, scale: float | None) -> float:
    return queries.shape[3] ** -0.5 if scale is None else scale
