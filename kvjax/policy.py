"""A cache policy: one layout, a codec for keys and one for values, and one placement."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from kvjax._checks import whole_number
from kvjax.codecs import BITS, MULTIPLE, Codec, Integer, Raw
from kvjax.layouts import Dense, Growing, Layout, Ring, Split
from kvjax.placement import Device
from kvjax.shape import layer_windows


@dataclass(frozen=True)
class CachePolicy:
    """How a layer's cache is laid out, stored and placed: three choices that do not interfere.

    Where a codec encodes whole blocks, the newest tokens stand before them in a raw tail: the
    query at position ``p`` sees its own block of ``block`` tokens and the ``recent`` blocks before
    it raw, and everything older through the codec, however the text was cut into calls. With
    ``prefill="exact"`` a call sees all of its own tokens raw, as in Transformers and KIVI, and its
    logits depend on the cut.

    ``raw``: the codecs of the tail's keys and values; ``resolve`` sets them, None without a tail.
    """

    layout: Any = field(default_factory=Dense)
    keys: Codec = field(default_factory=Raw)
    values: Codec = field(default_factory=Raw)
    placement: Device = field(default_factory=Device)
    block: int = 64
    recent: int = 1
    prefill: str = "sight"
    raw: tuple[Raw, Raw] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        parts = {"layout": "resolve", "keys": "encode", "values": "encode", "placement": "put"}
        for part, needed in parts.items():
            given = getattr(self, part)
            if isinstance(given, type) or not hasattr(given, needed):
                raise ValueError(
                    f"{part} of a CachePolicy is {given!r}: give an object, such as "
                    f"{CachePolicy.__dataclass_fields__[part].default_factory()!r}"
                )
        whole_number("recent", self.recent, 0)
        if whole_number("block", self.block, 1) % MULTIPLE:
            raise ValueError(f"block={self.block}: packed codes need a multiple of {MULTIPLE}")
        if self.prefill not in ("sight", "exact"):
            raise ValueError(f"prefill={self.prefill!r}: there are 'sight' and 'exact'")

    @property
    def has_tail(self) -> bool:
        """Whether tokens stand in a raw tail before they are encoded, in blocks."""
        return self.keys.blockwise or self.values.blockwise

    @property
    def split(self) -> Split:
        """Which tokens stand in the tail, and which in the body; of a policy that has a tail."""
        return Split(self.layout, self.block, self.recent)

    @property
    def stored(self) -> Layout:
        """The layout of what the codecs keep: of tokens, or behind a tail of blocks."""
        return self.split.body if self.has_tail else self.layout

    @property
    def revocable(self) -> int | None:
        """How many of its newest tokens a row can forget at any time; None for all."""
        own = None if self.layout.chunk is None else self.layout.chunk - 1
        if not self.has_tail:
            return own
        return self.block if own is None else min(self.block, own)

    def rewindable(self, length: Any, written: Any) -> Any:
        """int32[batch]: how many of its newest tokens each row can forget now."""
        return (self.split if self.has_tail else self.layout).rewindable(length, written)

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
        keys = self.keys.resolve(model_dtype, platform)
        values = self.values.resolve(values_dtype or model_dtype, platform)
        raw = tuple(Raw(codec.dtype).resolve(None, platform) for codec in (keys, values))
        return replace(
            self, layout=layout, keys=keys, values=values, raw=raw if self.has_tail else None
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

PRESETS = ("static", "dynamic", "sliding_window", "hybrid", "quantized")
PLANNED = ("offloaded", "offloaded_static", "paged")


def policy(
    name: str = "static",
    *,
    dtype: str | None = None,
    window: int | None = None,
    sinks: int | None = None,
    slack: int | None = None,
    bits: int | None = None,
    key_bits: int | None = None,
    value_bits: int | None = None,
    group: int | None = None,
    block: int | None = None,
    recent: int | None = None,
    prefill: str | None = None,
) -> CachePolicy | Hybrid:
    """A policy by its well-known name.

    Args:
      name: ``"static"``: all of a row's capacity allocated at once. ``"dynamic"``: allocated small
        and doubled as the text grows. ``"sliding_window"``: the last ``window`` tokens on every
        layer. ``"hybrid"``: those on layers that have a window of their own, static elsewhere.
        ``"quantized"``: static with ``bits=4``.
      dtype: what keys and values are stored in, and, where they are quantized, what the newest
        tokens are; by default what the model computes in.
      window: of ``sliding_window``; by default each layer's own, from the model's config.
      sinks: of ``sliding_window``: first tokens that are kept for ever; by default 0.
      slack: of ``sliding_window`` and ``hybrid``: see ``Ring``.
      bits: of each number, 1, 2, 3, 4 or 8 (see ``quantized_codec``); 16 is not quantized.
      key_bits, value_bits: the same for keys or for values alone.
      group: numbers that share a scale; by default 64, or all of a head's channels where there are
        fewer.
      block, recent, prefill: of a quantized cache: see ``CachePolicy``.

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
    bits = 4 if bits is None and name == "quantized" else bits
    each = [bits if own is None else own for own in (key_bits, value_bits)]
    of_blocks = {"group": group, "block": block, "recent": recent, "prefill": prefill}
    chosen = {key: value for key, value in of_blocks.items() if value is not None}
    if chosen and all(b in (None, 16) for b in each):
        setting = next(iter(chosen))
        raise ValueError(f"{setting}={chosen[setting]!r} is of a quantized cache: give bits=")
    keys, values = (
        quantized_codec(b, kind, group=group, dtype=dtype)
        for b, kind in zip(each, ("keys", "values"), strict=True)
    )
    chosen.pop("group", None)
    ring = Ring(window, sinks or 0, slack)
    layouts = {"dynamic": Growing(), "sliding_window": ring}
    whole = CachePolicy(layouts.get(name, Dense()), keys, values, **chosen)
    return Hybrid(whole, replace(whole, layout=ring)) if name == "hybrid" else whole


def quantized_codec(
    bits: int | None, kind: str, *, group: int | None = None, dtype: str | None = None
) -> Codec:
    """The codec that was measured best at so many bits (docs/quantization.md).

    Args:
      bits: 1, 2, 3, 4 or 8; None and 16 are not quantized.
      kind: ``"keys"`` or ``"values"``.
      group: numbers that share a scale.
      dtype: what the codec decodes to; by default what the model computes in.
    """
    if bits in (None, 16):
        return Raw(dtype)
    if bits not in BITS:
        known = ", ".join(map(str, BITS))
        raise ValueError(f"{bits!r} bits for {kind}: there are {known}, and 16")
    if bits == 8:
        return Integer(8, "token", group, dtype=dtype)
    per = "channel" if kind == "keys" else "token"
    return Integer(bits, per, group, zero_point=True, dtype=dtype)


_SETTINGS = {"sliding_window": ("window", "sinks", "slack"), "hybrid": ("slack",)}


@dataclass(frozen=True)
class Edges:
    """One policy for most layers, another for the ``first`` and the ``last`` ones, which often bear
    fewer bits worse: ``Edges(policy("quantized", bits=2), policy("quantized", bits=8))``."""

    inner: Any
    edge: Any
    first: int = 1
    last: int = 1

    def __post_init__(self) -> None:
        whole_number("first", self.first, 0)
        whole_number("last", self.last, 0)

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]:
        """A policy a layer."""
        inner, edge = per_layer(self.inner, config), per_layer(self.edge, config)
        count = len(inner)
        return tuple(
            edge[n] if n < self.first or n >= count - self.last else inner[n] for n in range(count)
        )


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
