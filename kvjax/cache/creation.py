"""Allocate an empty cache."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import ParamSpec

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.layer import LayerCache, empty_layer
from kvjax.cache.paging import with_pools
from kvjax.cache.sizes import place_within
from kvjax.cache.state import KVCache
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_10_error_code
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import register_with_flax, tree_bytes
from kvjax.core.reporting import readable_bytes
from kvjax.core.transfer import check_not_target_mesh, commit_together
from kvjax.core.validation import (
    MAX_DIMENSION,
    ArgumentError,
    CacheMemoryError,
    as_bool,
    as_int,
    as_optional_int,
)
from kvjax.placement.device import Budget
from kvjax.placement.mesh import shard_over
from kvjax.policies.cache_policy import CachePolicy
from kvjax.policies.model_config import (
    CacheShape,
    common_heads,
    decoder_config,
    layer_heads,
    layer_sources,
    layer_windows,
    model_dtype,
    position_limit,
    resolve_rotary_len,
    scanned,
)
from kvjax.policies.presets import PolicyChoice, budget_of, per_layer

_P = ParamSpec("_P")


@without_mesh_context
def init_cache(
    config: CacheShape,
    policy: PolicyChoice | None = None,
    *,
    batch: int = 1,
    max_len: int | None = None,
    mesh: Mesh | None = None,
    stacked: bool | None = None,
    rotary_len: int | None = None,
) -> KVCache:
    """Allocate an empty cache.

    Args:
      config: the model's config, from kvjax, from Transformers or your own. It must have
        ``num_hidden_layers``, ``num_key_value_heads`` and ``head_dim``, and also ``dtype`` unless
        the policy sets it. If present, ``position_limit`` (the number of positions that the model
        supports) and the attributes for windows (``windows``, or ``layer_types`` and
        ``sliding_window``) and for shared layers (``cache_sources`` or ``num_kv_shared_layers``)
        are used as well.
      policy: one policy for all layers, a preset's name, or a list with one policy per layer. The
        default is ``policy("static")``.
      batch: the number of rows.
      max_len: the maximum number of tokens per row. A dense layout requires it. A growing layout
        can grow up to it. A ring uses only ``max_len`` slots if that is less than its sinks, window
        and slack together.
      mesh: the mesh to shard the cache over, see ``make_mesh``. By default the cache is on one
        device.
      stacked: whether to store equal layers in one array, [layers, batch, kv_heads, max_len,
        head_dim], for models that run their layers in a ``lax.scan``; see ``stack``. The default is
        the config's ``stacked``, or False if it has none.
      rotary_len: the sequence length for rotary frequencies that depend on it (longrope, dynamic
        NTK). The default is the longest that fits in the cache. If sequences longer than
        ``rotary_len`` need different frequencies, a row has at most ``rotary_len`` tokens, because
        cached keys keep the rotation with which they were written.

    Raises:
      ValueError: if ``batch``, ``max_len`` or ``rotary_len`` is not a positive integer, ``max_len``
        exceeds the model's positions, a list of policies has the wrong length, the mesh does not
        divide the rows, or ``stacked`` is True and a layer reads another layer's keys.
      CacheMemoryError: if the cache does not fit in the memory of the device or the host.

    Example:
      ```python
      cache = kvjax.init_cache(lm.config, kvjax.policy(bits=8), batch=2, max_len=64)
      print(kvjax.nbytes(cache))
      ```
    """
    return allocate(
        config,
        policy,
        batch=batch,
        max_len=max_len,
        mesh=mesh,
        stacked=stacked,
        rotary_len=rotary_len,
    )


@contextlib.contextmanager
def as_memory_error(message: Callable[[], str]) -> Iterator[None]:
    """Raise ``CacheMemoryError(message())`` if an allocation inside runs out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax_0_10_error_code(error) != RESOURCE_EXHAUSTED:
            raise
        raise CacheMemoryError(message()) from error


def _with_size_in_errors(make: Callable[_P, KVCache]) -> Callable[_P, KVCache]:
    """Decorate ``make`` so that it raises ``CacheMemoryError``, with the size of the cache, if it
    runs out of memory."""

    @functools.wraps(make)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> KVCache:
        def message() -> str:
            cache = jax.eval_shape(functools.partial(make, *args, **kwargs))
            tokens = kwargs["max_len"] or kwargs.get("initial_len")
            return (
                f"the cache does not fit in memory: {cache.batch} row(s) of {tokens:,} tokens "
                f"take {readable_bytes(tree_bytes(cache))}; use fewer tokens (max_new_tokens, "
                "max_len), fewer rows, or a smaller policy (kvjax.memory.what_fits lists some)"
            )

        with as_memory_error(message):
            return make(*args, **kwargs)

    return wrapped


@_with_size_in_errors
def allocate(
    config: CacheShape,
    policy: PolicyChoice | None,
    *,
    batch: int,
    max_len: int | None,
    initial_len: int | None = None,
    mesh: Mesh | None = None,
    stacked: bool | None = None,
    rotary_len: int | None = None,
) -> KVCache:
    """Do the work of ``init_cache``. Layouts that can grow start with a capacity of ``initial_len``
    tokens. Other layouts use it as their capacity if ``max_len`` is not given."""
    register_with_flax()
    batch = as_int("batch", batch, 1, MAX_DIMENSION)
    config = decoder_config(config)
    limit = position_limit(config)
    max_len = as_optional_int("max_len", max_len, 1, MAX_DIMENSION)
    if limit is not None and (max_len or 0) > limit:
        raise ArgumentError(
            f"max_len is {max_len}, but the model has only {limit} positions", param="max_len"
        )
    max_len = limit if max_len is None and initial_len is None else max_len
    policies = per_layer(CachePolicy() if policy is None else policy, config)
    windows, sources = layer_windows(config), layer_sources(config)
    heads = layer_heads(config)
    mesh_sharding = None if mesh is None else shard_over(mesh, common_heads(config))
    if mesh_sharding is not None:
        mesh_sharding.check_rows(batch)
        check_not_target_mesh(mesh_sharding.mesh)
    # A policy from another cache may name a different platform. The arrays are for the current one.
    policies = [
        replace(x, placement=x.placement.on_mesh(mesh_sharding or x.placement.mesh_sharding))
        for x in policies
    ]
    # Layers that read another layer's keys and values get no arrays.
    own = [n for n in range(len(policies)) if sources is None or sources[n] == n]

    def resolve(max_len: int | None) -> list[CachePolicy]:
        return [
            policies[n].resolve(
                max_len, windows[n], model_dtype(config), initial_len=initial_len, rows=batch
            )
            for n in own
        ]

    resolved = resolve(max_len)
    reach = max(x.layout.reach for x in resolved)
    rotary_len, rotary_limit = resolve_rotary_len(config, reach, rotary_len)
    if rotary_limit is not None:
        limit = rotary_limit
        if (max_len or 0) > limit:
            resolved = resolve(max_len := limit)  # no row could use the rest
    budget = budget_of(policy)
    if budget is not None:
        resolved = place_within(budget, resolved, [(batch, *heads[n]) for n in own])
    kinds = [(x, *heads[n], windows[n]) for n, x in zip(own, resolved, strict=True)]
    stacks = None
    if as_bool("stacked", scanned(config) if stacked is None else stacked):
        check_stacks(len(own), sources, budget)
        sources, stacks = None, stacks_of(kinds)
        counts = Counter(entry for entry, _ in stacks)
        layers = [
            new_layer(kind[0], batch, *kind[1:], counts[entry])
            for entry, kind in enumerate(dict.fromkeys(kinds))
        ]
    else:
        layers = [new_layer(kind[0], batch, *kind[1:]) for kind in kinds]
    shapes = (batch,), (batch, len(layers)), (batch,)
    rows = policies[0].placement.put([np.zeros(shape, np.int32) for shape in shapes])
    if sources is not None:
        sources = tuple(own.index(source) for source in sources)
    cache = KVCache(
        tuple(layers),
        *rows,
        sources=sources,
        positions=limit,
        rotary_len=rotary_len,
        budget=budget,
        stacks=stacks,
    )
    return commit_together(with_pools(cache))


def check_stacks(layers: int, sources: Sequence[int] | None, budget: Budget | None) -> None:
    """Raise ``ValueError`` if layers can't be stacked. ``layers`` is the number of layers with
    their own keys and values."""
    if sources is not None and layers < len(sources):
        raise ValueError(
            "layers that read the keys of an earlier one can't be stacked: in a scan every layer "
            "has its own"
        )
    if budget is not None:
        raise ValueError(
            "layers with policy('auto') can't be stacked: it moves them one by one, but a stack "
            "is in one place"
        )


def stacks_of(kinds: Sequence[Hashable]) -> tuple[tuple[int, int], ...]:
    """For each layer, return the index of its stack and its index in that stack. Layers of the same
    kind are in one stack."""
    entries = {kind: entry for entry, kind in enumerate(dict.fromkeys(kinds))}
    sizes: Counter[int] = Counter()
    stacks = []
    for kind in kinds:
        entry = entries[kind]
        stacks.append((entry, sizes[entry]))
        sizes[entry] += 1
    return tuple(stacks)


def new_layer(
    policy: CachePolicy,
    batch: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    stack: int | None = None,
) -> LayerCache:
    """Allocate an empty layer, or an empty stack, in the memory that the policy chooses. On a mesh,
    each device allocates its own shard."""
    if policy.placement.mesh_sharding is None:
        return empty_layer(policy, batch, kv_heads, head_dim, window, stack).placed()
    return _sharded_layer(policy, batch, kv_heads, head_dim, window, stack)()


@functools.lru_cache(maxsize=256)
def _sharded_layer(policy: CachePolicy, *shape: int | None) -> Callable[[], LayerCache]:
    """Return the program that allocates an empty layer on the devices of a mesh."""
    make, placement = functools.partial(empty_layer, policy, *shape), policy.placement
    mesh_sharding = placement.mesh_sharding
    assert mesh_sharding is not None
    specs = jax.eval_shape(make).partition_specs()
    near = mesh_sharding.sharding
    far = functools.partial(mesh_sharding.sharding, kind=placement.memory_kind)
    shardings = replace(
        jax.tree.map(near, specs),
        keys=jax.tree.map(far, specs.keys),
        values=jax.tree.map(far, specs.values),
    )
    return jax.jit(make, out_shardings=shardings)
