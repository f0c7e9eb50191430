"""Cache policies by name."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvjax.codecs import MULTIPLE, Codec, HalfQuadratic, Integer, quantized_codec
from kvjax.core.reporting import parse_bytes
from kvjax.core.validation import as_int, as_python, normalize_int_field
from kvjax.layouts import Dense, Growing, Paged, Ring
from kvjax.placement.device import Budget, Device, Host
from kvjax.policies.cache_policy import CachePolicy, Hybrid, PerLayer
from kvjax.policies.model_config import decoder_config

PolicyChoice = str | PerLayer | Sequence[CachePolicy]


PRESETS: dict[str, tuple[str, ...]] = {
    "static": (),
    "dynamic": (),
    "sliding_window": ("window", "sinks", "slack"),
    "hybrid": ("slack",),
    "quantized": (),
    "offloaded": ("prefetch",),
    "offloaded_static": ("prefetch",),
    "auto": ("prefetch", "memory"),
    "paged": ("slack", "page_size", "pages"),
}
"""The names, and the settings that each has beside those of all."""


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
    prefetch: int | None = None,
    memory: int | str | None = None,
    page_size: int | None = None,
    pages: int | None = None,
) -> "CachePolicy | Hybrid | Auto":
    """A policy by its well-known name.

    Args:
      name: ``"static"``: all of a row's capacity allocated at once. ``"dynamic"``: allocated small
        and doubled as the text grows. ``"sliding_window"``: the last ``window`` tokens on every
        layer. ``"hybrid"``: those on layers that have a window of their own, static elsewhere.
        ``"quantized"``: static with ``bits=4``. ``"offloaded"`` and ``"offloaded_static"``:
        dynamic and static, with all but the newest tokens in the host's memory (see ``Host``).
        ``"auto"``: dynamic, with layers that the device has no room for on the host. ``"paged"``:
        hybrid, in pages of a pool that rows share (see ``Paged``).
      dtype: what keys and values are stored in, and, where they are quantized, what the newest
        tokens are; by default what the model computes in.
      window: of ``sliding_window``; by default each layer's own, from the model's config.
      sinks: of ``sliding_window``: first tokens that are kept for ever; by default 0. Layers whose
        own window is not wider than ``window`` have none: see ``Ring``.
      slack: of ``sliding_window``, ``hybrid`` and ``paged``: see ``Ring``.
      bits: of each number, 1, 2, 3, 4 or 8 (see ``quantized_codec``); 16 is not quantized.
      key_bits, value_bits: the same for keys or for values alone.
      group: numbers that share a scale; by default 64, or all of a head's channels where there are
        fewer.
      block, recent, prefill: of a quantized or offloaded cache: see ``CachePolicy``.
      prefetch: of an offloaded or automatic cache: see ``Host``; by default 0.
      memory: of an automatic cache: bytes that it may take of the device, or ``"8GiB"``. By default
        ``generate`` takes what its limits allow or the device has left.
      page_size: of a paged cache: tokens of a page, by default 256.
      pages: of a paged cache: of the pool of the layers that see everything; by default as many as
        all rows can need.

    Raises:
      ValueError: if the name or the dtype is not known, or a setting is none of that policy's.
    """
    if name not in PRESETS:
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"unknown cache policy {name!r}: this version has {known}")
    given = {"window": window, "sinks": sinks, "slack": slack, "prefetch": prefetch,
             "memory": memory, "page_size": page_size, "pages": pages}  # fmt: skip
    for setting, value in given.items():
        if value is not None and setting not in PRESETS[name]:
            raise ValueError(f"the cache policy {name!r} has no setting {setting!r}")
    bits, key_bits, value_bits = map(as_python, (bits, key_bits, value_bits))
    bits = 4 if bits is None and name == "quantized" else bits
    key_bits, value_bits = (bits if own is None else own for own in (key_bits, value_bits))
    of_blocks = {"group": group, "block": block, "recent": recent, "prefill": prefill}
    chosen = {key: value for key, value in of_blocks.items() if value is not None}
    tailed = name.startswith("offloaded") or name == "auto"
    raw = all(b in (None, 16) for b in (key_bits, value_bits))
    if chosen and raw and not (tailed and group is None):
        setting = next(iter(chosen))
        raise ValueError(f"{setting}={chosen[setting]!r} is of a quantized cache: give bits=")
    keys = quantized_codec(key_bits, "keys", group=group, dtype=dtype)
    values = quantized_codec(value_bits, "values", group=group, dtype=dtype)
    chosen.pop("group", None)
    ring = Ring(window, sinks or 0, slack)
    growing = dict.fromkeys(("dynamic", "offloaded", "auto"), Growing())
    layout = {**growing, "sliding_window": ring}.get(name, Dense())
    host = Host(prefetch or 0)
    placement = host if name.startswith("offloaded") else Device()
    whole = CachePolicy(layout, keys, values, placement, **chosen)
    if name == "auto":
        return Auto(whole, parse_bytes(memory) if isinstance(memory, str) else memory, host)
    if name == "paged":
        every = Paged(pages=pages) if page_size is None else Paged(page_size, pages=pages)
        sliding = replace(every, inner=ring, pages=None)
        return Hybrid(replace(whole, layout=every), replace(whole, layout=sliding))
    return Hybrid(whole, replace(whole, layout=ring)) if name == "hybrid" else whole


@dataclass(frozen=True)
class Edges:
    """One policy for most layers, another for the ``first`` and the ``last`` ones, which often bear
    fewer bits worse: ``Edges(policy("quantized", bits=2), policy("quantized", bits=8))``."""

    inner: Any
    edge: Any
    first: int = 1
    last: int = 1

    def __post_init__(self) -> None:
        normalize_int_field(self, "first", 0)
        normalize_int_field(self, "last", 0)
        _refuse_auto(self.inner)
        _refuse_auto(self.edge)

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]:
        """A policy a layer."""
        inner, edge = per_layer(self.inner, config), per_layer(self.edge, config)
        count = len(inner)
        return tuple(
            edge[n] if n < self.first or n >= count - self.last else inner[n] for n in range(count)
        )


@dataclass(frozen=True)
class Auto:
    """A policy of layers on the device, of which so many go to the host as its memory asks for.

    ``inner``: their policy, as for ``init_cache``. ``memory``: bytes that the cache may take of the
    device; None leaves it to ``generate``, which knows the weights. ``placement``: where layers go
    that would be too much.
    """

    inner: Any
    memory: int | None = None
    placement: Device = field(default_factory=Host)

    def __post_init__(self) -> None:
        Budget(1 if self.memory is None else self.memory, self.placement)
        _refuse_auto(self.inner)

    @property
    def budget(self) -> Budget:
        """The memory to keep to.

        Raises:
          ValueError: if none is given.
        """
        if self.memory is None:
            raise ValueError(
                "policy('auto') must know how much of the device the cache may take: give memory="
            )
        return Budget(self.memory, self.placement)

    def per_layer(self, config: Any) -> tuple[CachePolicy, ...]:
        """The policy of each layer as long as it is on the device."""
        policies = per_layer(self.inner, config)
        for number, each in enumerate(policies):
            if each.placement.needs_tail:
                raise ValueError(
                    f"the policy of layer {number} puts it on the host, but Auto decides where "
                    "layers are: give policies of the device"
                )
        return policies


def _refuse_auto(inner: Any) -> None:
    if isinstance(inner, Auto):
        raise ValueError("an automatic policy can't be part of another: put Auto around the whole")


def budget_of(choice: PolicyChoice | None) -> Budget | None:
    """The memory that a policy, or its name, keeps to, if any."""
    choice = policy(choice) if isinstance(choice, str) else choice
    return choice.budget if isinstance(choice, Auto) else None


def per_layer(choice: PolicyChoice, config: Any) -> tuple[CachePolicy, ...]:
    """One policy a layer, from a name, one for all, or a list of them.

    Raises:
      ValueError: if it is neither, or a list has not as many policies as the model has layers.
    """
    choice = policy(choice) if isinstance(choice, str) else choice
    config = decoder_config(config)
    if isinstance(choice, Sequence):
        policies: Any = tuple(policy(each) if isinstance(each, str) else each for each in choice)
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
    if not hasattr(choice, "per_layer"):
        raise ValueError(
            f"a policy, its name or a list of policies is needed, not a {type(choice).__name__}; a "
            "layout alone goes into CachePolicy(layout)"
        )
    return choice.per_layer(config)


def transformers_policy(
    backend: str = "quanto",
    *,
    nbits: int = 4,
    axis_key: int = 0,
    axis_value: int = 0,
    q_group_size: int = 64,
    residual_length: int = 128,
) -> CachePolicy:
    """The policy of the settings of a quantized cache of Transformers, under their names.

    An axis means different things to the two backends: groups along a token's channels are axis 0
    of quanto and axis 1 of HQQ, groups along a channel's tokens axis -1 of quanto and axis 0 of HQQ
    (docs/quantization.md).

    Args:
      backend: ``"quanto"`` or ``"hqq"``.
      nbits: of each number: 2 or 4 with quanto, 1, 2, 3, 4 or 8 with HQQ.
      axis_key, axis_value: 0 or -1 with quanto, 0 or 1 with HQQ.
      q_group_size: numbers that share a scale. Along tokens, no more than a block of 64, nor than
        ``residual_length``.
      residual_length: the most tokens that stay raw, rounded down to whole blocks of 64, or of 8
        where it is less; 8 at least.

    Raises:
      ValueError: if a setting is none of the backend's.
    """
    known = {"quanto": ((2, 4), {0: "token", -1: "channel"}),
             "hqq": ((1, 2, 3, 4, 8), {1: "token", 0: "channel"})}  # fmt: skip
    if backend not in known:
        raise ValueError(f"backend={backend!r}: there are {', '.join(map(repr, known))}")
    widths, axes = known[backend]
    of_axes = ("axis_key", axis_key, axes), ("axis_value", axis_value, axes)
    for name, given, has in (("nbits", nbits, widths), *of_axes):
        if given not in has:
            raise ValueError(f"{name}={given!r}: {backend} has {', '.join(map(str, has))}")
    residual = max(as_int("residual_length", residual_length, 1), MULTIPLE)
    block = min(64, residual // MULTIPLE * MULTIPLE)

    def codec(axis: int) -> Codec:
        group = min(q_group_size, block) if axes[axis] == "channel" else q_group_size
        plain = Integer(nbits, axes[axis], group, zero_point=True)
        return plain if backend == "quanto" else HalfQuadratic(plain)

    keys, values = codec(axis_key), codec(axis_value)
    return CachePolicy(Dense(), keys, values, block=block, recent=residual // block - 1)


def parse_policy(words: str, **more: Any) -> PolicyChoice:
    """A policy from words: ``bits=4``, ``sliding_window,window=128,bits=8``.

    Args:
      words: a name, by default ``static``, and settings of ``kvjax.policy``.
      more: further settings; None is none.

    Raises:
      ValueError: if a setting is not one of ``kvjax.policy`` or is given twice; for two names.
    """
    names: list[str] = []
    settings: dict[str, Any] = {}
    for part in words.split(","):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if setting in settings or (names and not equals):
            twice = f"{setting} twice" if equals else f"two names, {names[0]} and {setting}"
            raise ValueError(f"the policy {words!r} has {twice}: two policies are given one by one")
        if not equals:
            names.append(setting)
        else:
            settings[setting] = int(value) if value.lstrip("-").isdigit() else value
    name = names[0] if names else "static"
    for setting, value in more.items():
        if value is not None and settings.setdefault(setting, value) != value:
            raise ValueError(
                f"{setting} is {settings[setting]} in {words!r}, and {value} beside it"
            )
    known = [name for name in inspect.signature(policy).parameters if name != "name"]
    if unknown := [setting for setting in settings if setting not in known]:
        raise ValueError(
            f"the policy {words!r} has {unknown[0]!r}: settings are {', '.join(known)}"
        )
    return policy(name, **settings)
