"""Allocate an empty cache."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.cache.layer import LayerCache, empty_layer
from kvjax.cache.paging import with_pools
from kvjax.cache.sizes import place_within
from kvjax.cache.state import KVCache
from kvjax.core.compat import RESOURCE_EXHAUSTED, jax_0_10_error_code
from kvjax.core.errors import CacheMemoryError
from kvjax.core.mesh_context import without_mesh_context
from kvjax.core.pytree import register_with_flax, tree_bytes
from kvjax.core.reporting import readable_bytes
from kvjax.core.transfer import check_not_target_mesh, commit_together
from kvjax.core.validation import MAX_DIMENSION, as_bool, as_int, as_optional_int
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
      config: the model's config, kvjax's, Transformers' or one's own; its ``num_hidden_layers``,
        ``num_key_value_heads``, ``head_dim`` and ``dtype`` are read; ``position_limit`` (how many
        positions the model has), and what ``layer_heads``, ``layer_windows`` and ``layer_sources``
        go by, where it has them. ``dtype`` may be missing where the policy names one.
      policy: one for all layers, a preset's name, or a list with one a layer; by default
        ``policy("static")``.
      batch: rows.
      max_len: tokens a row can hold. A dense layout needs it; a growing one takes it as its limit;
        a ring is made smaller by it where the text is shorter than its window.
      mesh: devices to spread it over, see ``make_mesh``; by default it is on one.
      stacked: layers that are alike have their arrays in one, [layers, batch, kv_heads, max_len,
        head_dim], for models that go through their layers by ``lax.scan``; see ``stack``. By
        default what the config's ``stacked`` says, False where it has none.
      rotary_len: the length of text that rotary frequencies go by where they depend on it
        (longrope, dynamic NTK); by default the longest that the cache can hold. Where longer texts
        have other frequencies, a row holds at most ``rotary_len`` tokens: keys in the cache keep
        the rotation that they were written with.

    Raises:
      ValueError: if ``batch``, ``max_len`` or ``rotary_len`` is not a positive whole number,
        ``max_len`` is more than the model has positions, a list of policies has the wrong length,
        or the mesh does not divide the rows; if layers are to be stacked, and one reads another's
        keys.
      CacheMemoryError: if the device or the host has no memory for it.
    """
    return allocate(
        config, policy, batch=batch, max_len=max_len, mesh=mesh, stacked=stacked,
        rotary_len=rotary_len,
    )  # fmt: skip


@contextlib.contextmanager
def as_memory_error(sentence: Callable[[], str]) -> Iterator[None]:
    """Raise ``CacheMemoryError(sentence())`` if there is no memory for what is made inside."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax_0_10_error_code(error) != RESOURCE_EXHAUSTED:
            raise
        raise CacheMemoryError(sentence()) from error


def _told_by_size(make: Callable[..., KVCache]) -> Callable[..., KVCache]:
    """``make``, whose error says how much the cache takes where there is no memory for it."""

    @functools.wraps(make)
    def made(*given: Any, **named: Any) -> KVCache:
        def sentence() -> str:
            cache = jax.eval_shape(functools.partial(make, *given, **named))
            return (
                f"there is no memory for the cache: {cache.batch} row(s) of "
                f"{named['max_len'] or named.get('initial_len'):,} tokens take "
                f"{readable_bytes(tree_bytes(cache))}; give fewer tokens (max_new_tokens, "
                "max_len), fewer rows, or a smaller policy (kvjax.memory.what_fits lists some)"
            )

        with as_memory_error(sentence):
            return make(*given, **named)

    return made


@_told_by_size
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
    """``init_cache`` for rows of ``initial_len`` tokens at first. Layouts that can grow start with
    it; the others use it as their capacity if ``max_len`` is not given."""
    register_with_flax()
    batch = as_int("batch", batch, 1, MAX_DIMENSION)
    config = decoder_config(config)
    limit = position_limit(config)
    max_len = as_optional_int("max_len", max_len, 1, MAX_DIMENSION)
    if limit is not None and (max_len or 0) > limit:
        raise ValueError(f"max_len is {max_len}, but the model has only {limit} positions")
    max_len = limit if max_len is None and initial_len is None else max_len
    policies = per_layer(CachePolicy() if policy is None else policy, config)
    windows, sources = layer_windows(config), layer_sources(config)
    heads = layer_heads(config)
    spread = None if mesh is None else shard_over(mesh, common_heads(config))
    if spread is not None:
        spread.check_rows(batch)
        check_not_target_mesh(spread.mesh)
    # The platform that computes is this one, whatever it was of a cache that a policy comes from.
    policies = [
        replace(each, placement=each.placement.on_mesh(spread or each.placement.spread))
        for each in policies
    ]
    # A layer that reads another's has none of its own.
    own = [n for n in range(len(policies)) if sources is None or sources[n] == n]

    def resolve(max_len: int | None) -> list[CachePolicy]:
        return [
            policies[n].resolve(
                max_len, windows[n], model_dtype(config), initial_len=initial_len, rows=batch
            )
            for n in own
        ]

    resolved = resolve(max_len)
    reach = max(each.layout.reach for each in resolved)
    rotary_len, most = resolve_rotary_len(config, reach, rotary_len)
    if most is not None and (max_len or 0) > most:
        resolved = resolve(max_len := most)  # no row could use the rest
    budget = budget_of(policy)
    if budget is not None:
        resolved = place_within(budget, resolved, [(batch, *heads[n]) for n in own])
    kinds = [(each, *heads[n], windows[n]) for n, each in zip(own, resolved, strict=True)]
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
    rows: Any = policies[0].placement.put([np.zeros(shape, np.int32) for shape in shapes])
    if sources is not None:
        sources = tuple(own.index(source) for source in sources)
    cache = KVCache(
        tuple(layers), *rows, sources=sources, positions=limit if most is None else most,
        rotary_len=rotary_len, budget=budget, stacks=stacks,
    )  # fmt: skip
    return commit_together(with_pools(cache))


def check_stacks(layers: int, sources: Sequence[int] | None, budget: Budget | None) -> None:
    """Raise ``ValueError`` for layers with arrays of their own, so many, that can't be stacked."""
    if sources is not None and layers < len(sources):
        raise ValueError(
            "layers that read the keys of an earlier one can't be stacked: a scan gives every "
            "layer some of its own"
        )
    if budget is not None:
        raise ValueError(
            "stacked layers are all in one place: policy('auto') moves them one by one"
        )


def stacks_of(kinds: Sequence[Hashable]) -> tuple[tuple[int, int], ...]:
    """For each layer, in which stack it is, and as which of its layers: all of a kind in one."""
    entries = {kind: entry for entry, kind in enumerate(dict.fromkeys(kinds))}
    seen: Counter[int] = Counter()
    found = []
    for kind in kinds:
        entry = entries[kind]
        found.append((entry, seen[entry]))
        seen[entry] += 1
    return tuple(found)


def new_layer(
    policy: CachePolicy, batch: int, kv_heads: int, head_dim: int, window: int | None,
    stack: int | None = None,
) -> LayerCache:  # fmt: skip
    """An empty layer, or a stack, where the policy says; on a mesh each device makes its own."""
    if policy.placement.spread is None:
        return empty_layer(policy, batch, kv_heads, head_dim, window, stack).placed()
    return _on_each(policy, batch, kv_heads, head_dim, window, stack)()


@functools.lru_cache(maxsize=256)
def _on_each(policy: CachePolicy, *shape: Any) -> Callable[[], LayerCache]:
    """The program that makes an empty layer on the devices of a mesh."""
    make, placement = functools.partial(empty_layer, policy, *shape), policy.placement
    spread = placement.spread
    assert spread is not None
    specs = jax.eval_shape(make).partition_specs()
    near, far = spread.sharding, functools.partial(spread.sharding, kind=placement.memory_kind)
    shardings = replace(
        jax.tree.map(near, specs),
        keys=jax.tree.map(far, specs.keys), values=jax.tree.map(far, specs.values),
    )  # fmt: skip
    return jax.jit(make, out_shardings=shardings)
