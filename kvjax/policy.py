"""A cache policy: one layout, a codec for keys and one for values, and one placement."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvjax.codecs import Raw
from kvjax.layouts import Dense, Growing, Layout, Ring
from kvjax.placement import Device
from kvjax.shape import layer_windows


@dataclass(frozen=True)
class CachePolicy:
    """How a layer's cache is laid out, stored and placed: three choices that do not interfere."""

    layout: Any = field(default_factory=Dense)
    keys: Raw = field(default_factory=Raw)
    values: Raw = field(default_factory=Raw)
    placement: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        parts = {"layout": "resolve", "keys": "resolve", "values": "resolve", "placement": "put"}
        for part, needed in parts.items():
            given = getattr(self, part)
            if isinstance(given, type) or not hasattr(given, needed):
                raise ValueError(
                    f"{part} of a CachePolicy is {given!r}: give an object, such as "
                    f"{CachePolicy.__dataclass_fields__[part].default_factory()!r}"
                )

    def resolve(
        self,
        max_len: int | None,
        window: int | None,
        model_dtype: str | None,
        *,
        values_dtype: str | None = None,
        room: int | None = None,
    ) -> "CachePolicy":
        """Fix what was left open: from the capacity, the layer's own window, the model's dtype
        (``values_dtype`` where values have another) and the platform."""
        platform = self.placement.platform()
        layout: Layout = self.layout.resolve(max_len, window, room)
        return replace(
            self,
            layout=layout,
            keys=self.keys.resolve(model_dtype, platform),
            values=self.values.resolve(values_dtype or model_dtype, platform),
        )

    def per_layer(self, config: Any) -> tuple["CachePolicy", ...]:
        """The same for every layer."""
        return (self,) * config.num_hidden_layers


@dataclass(frozen=True)
class Hybrid:
    """One policy for layers that see everything, another for those with a window of their own.

    Which is which, ``layer_windows`` says.
    """

    full: CachePolicy
    sliding: CachePolicy

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]:
        """A policy a layer."""
        windows = layer_windows(config)
        return tuple(self.full if window is None else self.sliding for window in windows)


class PerLayer(Protocol):
    """What can say the policy of each layer of a model."""

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]: ...


PolicyChoice = str | PerLayer | Sequence[CachePolicy]

PRESETS = ("static", "dynamic", "sliding_window", "hybrid")
PLANNED = ("quantized", "offloaded", "offloaded_static", "paged")


def policy(
    name: str = "static",
    *,
    dtype: str | None = None,
    window: int | None = None,
    sinks: int | None = None,
    slack: int | None = None,
) -> CachePolicy | Hybrid:
    """A policy by its well-known name.

    Args:
      name: ``"static"``: all of a row's capacity allocated at once. ``"dynamic"``: allocated small
        and doubled as the text grows. ``"sliding_window"``: the last ``window`` tokens on every
        layer. ``"hybrid"``: those on layers that have a window of their own, static elsewhere.
      dtype: what keys and values are stored in; by default what the model computes in.
      window: of ``sliding_window``; by default each layer's own, from the model's config.
      sinks: of ``sliding_window``: first tokens that are kept for ever; by default 0.
      slack: of ``sliding_window`` and ``hybrid``: see ``Ring``.

    Raises:
      ValueError: if the name or the dtype is not known, or a setting is none of that policy's.
    """
    if name not in PRESETS:
        known = ", ".join(repr(preset) for preset in PRESETS)
        if name in PLANNED:
            raise ValueError(
                f"the cache policy {name!r} is not built yet: this version has {known}"
            )
        raise ValueError(f"unknown cache policy {name!r}: this version has {known}")
    given = {"window": window, "sinks": sinks, "slack": slack}
    for setting, value in given.items():
        if value is not None and setting not in _SETTINGS.get(name, ()):
            raise ValueError(f"the cache policy {name!r} has no setting {setting!r}")
    ring = Ring(window, sinks or 0, slack)
    layouts = {"static": Dense(), "dynamic": Growing(), "sliding_window": ring, "hybrid": Dense()}
    chosen = CachePolicy(layouts[name], Raw(dtype), Raw(dtype))
    return Hybrid(chosen, replace(chosen, layout=ring)) if name == "hybrid" else chosen


_SETTINGS = {"sliding_window": ("window", "sinks", "slack"), "hybrid": ("slack",)}

named = policy


def per_layer(policy: PolicyChoice, config: Any) -> tuple[CachePolicy, ...]:
    """One policy a layer, from a name, one for all, or a list of them.

    Raises:
      ValueError: if it is neither, or a list has not as many policies as the model has layers.
    """
    if isinstance(policy, str):
        policy = named(policy)
    if isinstance(policy, Sequence):
        policies: tuple[Any, ...] = tuple(
            named(each) if isinstance(each, str) else each for each in policy
        )
        if len(policies) != config.num_hidden_layers:
            raise ValueError(
                f"{len(policies)} policies for a model of {config.num_hidden_layers} layers"
            )
        for number, each in enumerate(policies):
            if not isinstance(each, CachePolicy):
                raise ValueError(
                    f"the policy of layer {number} must be a CachePolicy, not a "
                    f"{type(each).__name__}"
                )
        return policies
    if not hasattr(policy, "per_layer"):
        raise ValueError(
            f"a policy, its name or a list of policies is needed, not a {type(policy).__name__}; a "
            "layout alone goes into CachePolicy(layout)"
        )
    return policy.per_layer(config)
