"""A layer of a cache: its arrays, what they take, and what is fetched of them ahead of its turn."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.tail import Body, Strip, Tail
from kvjax.core.trees import state, static_field, tree_bytes
from kvjax.core.typing import KeysValues, Rows
from kvjax.placement.budget import Budget, Sizes
from kvjax.placement.device import Device
from kvjax.placement.spread import Spread
from kvjax.policies.cache_policy import CachePolicy


@state
class LayerCache:
    """Keys and values of one layer, as their codecs store them, and the policy they follow.

    With ``Raw`` codecs both are arrays [batch, kv_heads, slots, head_dim]. With codecs of whole
    blocks they are the body, stored as [batch, kv_heads, blocks, block, head_dim], and ``tail`` has
    the newest tokens; ``strip`` is there between ``append`` and ``advance`` alone, and ``low``,
    int32[batch], is the first position that a conversion left behind the sinks. ``fetched`` is the
    body on the device, where a placement fetches it ahead, within a call. ``window`` is the layer's
    own, from the model's config.
    """

    keys: Any
    values: Any
    policy: CachePolicy = static_field()
    kv_heads: int = static_field()
    head_dim: int = static_field()
    window: int | None = static_field(default=None)
    tail: Tail | None = None
    strip: Strip | None = None
    low: Rows | None = None
    fetched: Body | None = None

    def near(self) -> "LayerCache":
        """With the body on the device, to compute with all of it."""
        place = self.policy.placement
        return replace(self, keys=place.near(self.keys), values=place.near(self.values))

    def placed(self) -> "LayerCache":
        """With every array where the policy says, committed."""
        place = self.policy.placement
        return replace(
            self, keys=place.store(self.keys), values=place.store(self.values),
            tail=place.put_tokens(self.tail), low=place.put(self.low),
        )  # fmt: skip

    def specs(self) -> "LayerCache":
        """How each array is spread over the mesh."""
        spread = self.policy.placement.spread
        assert spread is not None

        def each(part: Any, spec: Callable[[tuple[int, ...]], Any]) -> Any:
            return jax.tree.map(lambda x: spec(x.shape), part)

        def tokens(shape: tuple[int, ...]) -> Any:
            return spread.of_tokens()

        return replace(
            self, keys=each(self.keys, spread.of_body), values=each(self.values, spread.of_body),
            tail=each(self.tail, tokens), strip=each(self.strip, tokens),
            low=each(self.low, spread.of_rows), fetched=each(self.fetched, spread.of_body),
        )  # fmt: skip

    def on_one(self) -> "LayerCache":
        """On a device of a mesh, from its arrays: the layer of the heads that it has."""
        place = self.policy.placement
        assert place.spread is not None
        return replace(self, kv_heads=self.kv_heads // place.spread.heads)


def empty_layer(
    policy: CachePolicy, batch: int, kv_heads: int, head_dim: int, window: int | None
) -> LayerCache:
    """A layer that holds nothing."""
    slots: tuple[int, ...] = (policy.stored.slots,)
    tail = low = None
    if policy.raw is not None:
        slots, low = (*slots, policy.block), jnp.zeros(batch, jnp.int32)
        in_tail = (batch, kv_heads, policy.split.tail.slots, head_dim)
        tail = Tail(*(codec.empty(in_tail) for codec in policy.raw))
    shape = (batch, kv_heads, *slots, head_dim)
    keys, values = policy.keys.empty(shape), policy.values.empty(shape)
    return LayerCache(keys, values, policy, kv_heads, head_dim, window, tail, low=low)


def new_layer(
    policy: CachePolicy, batch: int, kv_heads: int, head_dim: int, window: int | None
) -> LayerCache:
    """An empty layer where the policy says; on a mesh each device makes its own."""
    if policy.placement.spread is None:
        return empty_layer(policy, batch, kv_heads, head_dim, window).placed()
    return _on_each(policy, batch, kv_heads, head_dim, window)()


@functools.lru_cache(maxsize=256)
def _on_each(policy: CachePolicy, *shape: Any) -> Callable[[], LayerCache]:
    """The program that makes an empty layer on the devices of a mesh."""
    make, place = functools.partial(empty_layer, policy, *shape), policy.placement
    spread = place.spread
    assert spread is not None
    specs = jax.eval_shape(make).specs()
    kind = {"host": "pinned_host"}.get(place.place)
    near, far = spread.sharding, functools.partial(spread.sharding, kind=kind)
    shardings = replace(
        jax.tree.map(near, specs),
        keys=jax.tree.map(far, specs.keys), values=jax.tree.map(far, specs.values),
    )  # fmt: skip
    return jax.jit(make, out_shardings=shardings)


def share_of(held: LayerCache, spread: Spread) -> LayerCache:
    """What a device has of an empty layer like this one, as shapes."""
    policy = replace(held.policy, placement=held.policy.placement.over(spread))
    batch = jax.tree.leaves(held.keys)[0].shape[0]
    shape = policy, batch, held.kv_heads, held.head_dim, held.window
    whole = jax.eval_shape(functools.partial(empty_layer, *shape))

    def part(x: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(spread.sharding(spec).shard_shape(x.shape), x.dtype)

    return jax.tree.map(part, whole, whole.specs())


@functools.lru_cache(maxsize=1024)
def layer_sizes(
    policy: CachePolicy, host: Device, batch: int, kv_heads: int, head_dim: int
) -> Sizes:
    """What a layer of a resolved policy takes, on the device and with ``host``; on a mesh, of one
    of its devices."""

    def parts(placement: Device) -> tuple[int, int]:
        moved = policy.elsewhere(placement)
        make = functools.partial(empty_layer, moved, batch, kv_heads, head_dim, None)
        layer = jax.eval_shape(make)
        spread = policy.placement.spread
        layer = layer if spread is None else share_of(layer, spread)
        return tree_bytes((layer.keys, layer.values)), tree_bytes(layer.tail)

    body, tail = parts(host)
    return Sizes(sum(parts(Device())), tail, body, policy.layout.grows_to is not None)


def within(
    budget: Budget, policies: Sequence[CachePolicy], shapes: Sequence[tuple[int, int, int]]
) -> list[CachePolicy]:
    """Resolved policies of layers with batch, kv_heads and head_dim, with so many of them on the
    host as a budget asks for."""
    sizes = [
        layer_sizes(policy, budget.placement, *shape)
        for policy, shape in zip(policies, shapes, strict=True)
    ]
    away = budget.away(sizes, ())
    return [
        policy.elsewhere(budget.placement if n in away else Device())
        for n, policy in enumerate(policies)
    ]


def fetched_ahead(
    layers: tuple[LayerCache, ...],
    place: int,
    sources: tuple[int, ...] | None,
    number: int,
    after: tuple[KeysValues, Rows],
) -> tuple[LayerCache, ...]:
    """The layers, with those bodies on the device, or on their way, that are to be by the turn of
    layer ``number`` of the model at ``place``, and no others: but for the first layer, fetching
    begins when ``after`` is there, its keys and the rows' lengths."""
    later = set(() if sources is None else sources[number:])
    found = list(layers)
    for n, held in enumerate(layers):
        ahead = held.policy.placement.ahead
        if n < place and n not in later:
            found[n] = replace(held, fetched=None)
        elif ahead and place <= n <= place + ahead and held.fetched is None:
            found[n] = replace(held, fetched=_near(held, after if place else None))
    return tuple(found)


def _near(held: LayerCache, after: tuple[KeysValues, Rows] | None) -> Body:
    """A layer's body on the device; on a mesh, each device's own."""
    place, stores = held.policy.placement, (held.keys, held.values)
    spread = place.spread
    if spread is None or after is None:
        return place.near(stores, after)
    specs = held.specs()
    bodies, rest = (specs.keys, specs.values), (spread.of_tokens(), spread.of_rows())
    return spread.run(place.near, (bodies, rest), bodies, stores, after)
