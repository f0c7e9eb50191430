"""A cache policy: one layout, a codec for keys and one for values, and one placement."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvjax.codecs import Raw
from kvjax.layouts import Dense
from kvjax.placement import Device


@dataclass(frozen=True)
class CachePolicy:
    """How a layer's cache is laid out, stored and placed: three choices that do not interfere."""

    layout: Dense = field(default_factory=Dense)
    keys: Raw = field(default_factory=Raw)
    values: Raw = field(default_factory=Raw)
    placement: Device = field(default_factory=Device)

    def resolve(self, max_len: int, model_dtype: str | None) -> "CachePolicy":
        """Fix what was left open, from the capacity, the model's dtype and the platform."""
        platform = self.placement.platform()
        return replace(
            self,
            layout=self.layout.resolve(max_len),
            keys=self.keys.resolve(model_dtype, platform),
            values=self.values.resolve(model_dtype, platform),
        )


PRESETS = ("static",)


def policy(name: str = "static", *, dtype: str | None = None) -> CachePolicy:
    """A policy by its well-known name.

    Args:
      name: ``"static"``: preallocated, full precision, on the device.
      dtype: what keys and values are stored in; by default what the model computes in.

    Raises:
      ValueError: if the name or the dtype is not known.
    """
    if name not in PRESETS:
        known = ", ".join(repr(preset) for preset in PRESETS)
        raise ValueError(f"unknown cache policy {name!r}: this version has {known}")
    return CachePolicy(keys=Raw(dtype), values=Raw(dtype))


named = policy


def per_layer(
    policy: str | CachePolicy | Sequence[CachePolicy], layers: int
) -> tuple[CachePolicy, ...]:
    """One policy a layer, from one for all or a list of them.

    Raises:
      ValueError: if a list has not as many policies as the model has layers.
    """
    if isinstance(policy, str):
        policy = named(policy)
    if isinstance(policy, CachePolicy):
        return (policy,) * layers
    policies = tuple(policy)
    if len(policies) != layers:
        raise ValueError(f"{len(policies)} policies for a model of {layers} layers")
    return policies
