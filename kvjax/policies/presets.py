"""Cache policies by name, from Transformers' settings, and from text."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvjax.codecs import MULTIPLE, Codec, HalfQuadratic, Integer, quantized_codec
from kvjax.core.reporting import parse_bytes
from kvjax.core.validation import ArgumentError, as_int, as_python, normalize_int_field
from kvjax.layouts import Dense, Growing, Paged, Ring
from kvjax.placement.device import Budget, Device, Host
from kvjax.policies.cache_policy import CachePolicy, Hybrid, PerLayer
from kvjax.policies.model_config import decoder_config

PolicyChoice = str | PerLayer | Sequence[CachePolicy]
RAW_SINKS = 4
"""How many first tokens a quantized cache keeps raw by default."""


PRESETS: dict[str, tuple[str, ...]] = {
    "static": (),
    "dynamic": (),
    "sliding_window": ("window", "slack"),
    "hybrid": ("slack",),
    "quantized": (),
    "offloaded": ("prefetch",),
    "offloaded_static": ("prefetch",),
    "auto": ("prefetch", "memory"),
    "paged": ("slack", "page_size", "pages"),
}
"""The settings of each preset, in addition to the settings that all presets have."""


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
    group_size: int | None = None,
    block: int | None = None,
    recent: int | None = None,
    prefill: str | None = None,
    prefetch: int | None = None,
    memory: int | str | None = None,
    page_size: int | None = None,
    pages: int | None = None,
) -> "CachePolicy | Hybrid | Auto":
    """Create a cache policy from the name of a preset.

    Args:
      name: ``"static"`` allocates the whole capacity of a row at once. ``"dynamic"`` starts small
        and doubles the capacity as rows grow. ``"sliding_window"`` keeps the last ``window`` tokens
        in every layer. ``"hybrid"`` does the same in layers that have a window in the model's
        config, and is static in the others. ``"quantized"`` is static with ``bits=4``.
        ``"offloaded"`` and ``"offloaded_static"`` are dynamic and static, with all but the newest
        tokens in host memory (see ``Host``). ``"auto"`` is dynamic, and moves layers that do not
        fit on the device to host memory. ``"paged"`` is hybrid, in pages of a pool that rows share
        (see ``Paged``).
      dtype: the dtype of keys and values. In a quantized cache it is the dtype of the newest
        tokens. By default it is the dtype in which the model computes.
      window: for ``"sliding_window"``: the window in tokens. By default each layer uses its window
        in the model's config, and a layer without one raises an error.
      sinks: for ``"sliding_window"``: number of first tokens that are never overwritten; by default
        0. Layers whose window in the config is at most ``window`` keep no sinks (see ``Ring``). For
        the other presets, if the cache is quantized: the number of first tokens that stay raw, by
        default 4. Layers with a ring ignore it.
      slack: for ``"sliding_window"``, ``"hybrid"`` and ``"paged"``: see ``Ring``.
      bits: bits per number: 1, 2, 3, 4 or 8 (see ``quantized_codec``), or 16 for no quantization.
      key_bits, value_bits: like ``bits``, for keys or values only.
      group_size: how many numbers share a scale; by default as many as possible, up to 64.
      block, recent, prefill: for quantized and offloaded caches: see ``CachePolicy``.
      prefetch: for ``"offloaded"``, ``"offloaded_static"`` and ``"auto"``: see ``Host``; by default
        0.
      memory: for ``"auto"``: device memory that the cache may use, in bytes or as ``"8GiB"``. By
        default ``generate`` uses what its ``limits`` allow or, without limits, all free memory.
      page_size: for paged caches: tokens per page, by default 256.
      pages: for paged caches: pages in the pool of the layers with full attention; by default
        enough for all rows at full length.

    Raises:
      ValueError: if the name or the dtype is unknown, or a setting does not apply to the policy.

    Example:
      ```python
      kvjax.policy("static", bits=4)  # 4-bit keys and values
      kvjax.policy("sliding_window", window=128, sinks=4)
      cache = kvjax.init_cache(lm.config, kvjax.policy("quantized"), max_len=64)
      ```
    """
    if name not in PRESETS:
        known = ", ".join(map(repr, PRESETS))
        raise ValueError(f"unknown cache policy {name!r}: this version has {known}")
    bits, key_bits, value_bits = map(as_python, (bits, key_bits, value_bits))
    bits = 4 if bits is None and name == "quantized" else bits
    key_bits, value_bits = (bits if own is None else own for own in (key_bits, value_bits))
    raw = all(b in (None, 16) for b in (key_bits, value_bits))
    special = dict(
        window=window,
        slack=slack,
        prefetch=prefetch,
        memory=memory,
        page_size=page_size,
        pages=pages,
    )
    for setting, value in special.items():
        if value is not None and setting not in PRESETS[name]:
            raise ValueError(f"the cache policy {name!r} has no setting {setting!r}")
    if sinks is not None and raw and name != "sliding_window":
        raise ValueError(
            f"sinks={sinks!r} applies to sliding_window and to quantized caches only: give bits="
        )
    of_blocks = {"group_size": group_size, "block": block, "recent": recent, "prefill": prefill}
    chosen = {key: value for key, value in of_blocks.items() if value is not None}
    tailed = name.startswith("offloaded") or name == "auto"
    if chosen and raw and not (tailed and group_size is None):
        setting = next(iter(chosen))
        raise ValueError(
            f"{setting}={chosen[setting]!r} applies to quantized caches only: give bits="
        )
    keys = quantized_codec(key_bits, "keys", group_size=group_size, dtype=dtype)
    values = quantized_codec(value_bits, "values", group_size=group_size, dtype=dtype)
    chosen.pop("group_size", None)
    in_window = name == "sliding_window"
    if not raw and not in_window:
        chosen["sinks"] = RAW_SINKS if sinks is None else sinks
    ring = Ring(window, (sinks or 0) if in_window else 0, slack)
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
        return Hybrid(replace(whole, layout=every), replace(whole, layout=sliding, sinks=0))
    return Hybrid(whole, replace(whole, layout=ring, sinks=0)) if name == "hybrid" else whole


@dataclass(frozen=True)
class Edges:
    """One policy for most layers, and another for the first and last layers.

    Quantization often harms the first and last layers more than others. The policy ``edge`` applies
    to the ``first`` layers at the beginning and the ``last`` layers at the end, and ``inner`` to
    all others.

    Example:
      ```python
      policy = kvjax.policies.Edges(kvjax.policy(bits=2), kvjax.policy(bits=8), first=1, last=1)
      cache = kvjax.init_cache(lm.config, policy, max_len=64)
      ```
    """

    inner: PolicyChoice
    edge: PolicyChoice
    first: int = 1
    last: int = 1

    def __post_init__(self) -> None:
        normalize_int_field(self, "first", 0)
        normalize_int_field(self, "last", 0)
        _refuse_auto(self.inner)
        _refuse_auto(self.edge)

    def per_layer(self, config: object) -> tuple[CachePolicy, ...]:
        """Return one policy per layer."""
        inner, edge = per_layer(self.inner, config), per_layer(self.edge, config)
        count = len(inner)
        return tuple(
            edge[n] if n < self.first or n >= count - self.last else inner[n] for n in range(count)
        )


@dataclass(frozen=True)
class Auto:
    """A policy that keeps layers on the device, and moves the last ones to the host when the cache
    would exceed its budget.

    ``inner`` is the policy of the layers, as for ``init_cache``. ``memory`` is the device memory
    that the cache may use, in bytes. If it is None, ``generate`` chooses it, because it knows the
    size of the weights. ``placement`` is where layers that do not fit are moved.

    Example:
      ```python
      policy = kvjax.policies.Auto(kvjax.policy("dynamic"), memory=2**20)
      result = kvjax.generate(lm, "The json module", cache=policy, max_new_tokens=8)
      print(result.stats.moves)
      ```
    """

    inner: PolicyChoice
    memory: int | None = None
    placement: Device = field(default_factory=Host)

    def __post_init__(self) -> None:
        Budget(1 if self.memory is None else self.memory, self.placement)
        _refuse_auto(self.inner)

    @property
    def budget(self) -> Budget:
        """The device memory that the cache may use.

        Raises:
          ValueError: if ``memory`` is None.
        """
        if self.memory is None:
            raise ValueError(
                "policy('auto') needs memory=, the bytes of the device that the cache may use"
            )
        return Budget(self.memory, self.placement)

    def per_layer(self, config: object) -> tuple[CachePolicy, ...]:
        """Return the policy that each layer has while it is on the device.

        Raises:
          ValueError: if the policy of a layer puts it on the host.
        """
        policies = per_layer(self.inner, config)
        for number, layer_policy in enumerate(policies):
            if layer_policy.placement.needs_tail:
                raise ValueError(
                    f"the policy of layer {number} puts it on the host, but Auto places layers "
                    "itself: give policies on the device"
                )
        return policies


def _refuse_auto(inner: object) -> None:
    if isinstance(inner, Auto):
        raise ValueError("Auto can't be part of another policy: put Auto around the whole")


def budget_of(choice: PolicyChoice | None) -> Budget | None:
    """Return the budget of a policy, which may be given by a preset's name. Returns None if the
    policy has no budget."""
    choice = policy(choice) if isinstance(choice, str) else choice
    return choice.budget if isinstance(choice, Auto) else None


def per_layer(choice: PolicyChoice, config: object) -> tuple[CachePolicy, ...]:
    """Return one policy per layer. ``choice`` is a preset's name, one policy for all layers, or a
    list of policies.

    Raises:
      ValueError: if ``choice`` is none of these, or the length of the list is not the number of
        layers.
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
            f"a policy, its name or a list of policies is needed, not a {type(choice).__name__}; "
            "make a layout into a policy with CachePolicy(layout)"
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
    """Return the policy that corresponds to the settings of a quantized cache in Transformers.

    The backends number axes differently. Groups of channels of one token are axis 0 in quanto and
    axis 1 in HQQ. Groups of tokens of one channel are axis -1 in quanto and axis 0 in HQQ
    (docs/quantization.md).

    Args:
      backend: ``"quanto"`` or ``"hqq"``.
      nbits: bits per number: 2 or 4 with quanto; 1, 2, 3, 4 or 8 with HQQ.
      axis_key, axis_value: 0 or -1 with quanto, 0 or 1 with HQQ.
      q_group_size: how many numbers share a scale. Groups of tokens have at most 64 tokens (a
        block), and at most ``residual_length``.
      residual_length: maximum number of tokens that stay unquantized. Numbers below 8 are raised to
        8, and others are rounded down to a multiple of 64, or of 8 if they are below 64.

    Raises:
      ValueError: if the backend does not support a setting.

    Example:
      ```python
      policy = kvjax.policies.transformers_policy("quanto", nbits=4, q_group_size=64)
      cache = kvjax.init_cache(lm.config, policy, max_len=256)
      ```
    """
    backends = {
        "quanto": ((2, 4), {0: "token", -1: "channel"}),
        "hqq": ((1, 2, 3, 4, 8), {1: "token", 0: "channel"}),
    }
    if backend not in backends:
        raise ArgumentError(
            f"backend={backend!r}: use {' or '.join(map(repr, backends))}", param="backend"
        )
    widths, axes = backends[backend]
    settings = (
        ("nbits", nbits, widths),
        ("axis_key", axis_key, axes),
        ("axis_value", axis_value, axes),
    )
    for name, value, supported in settings:
        if value not in supported:
            raise ValueError(
                f"{name}={value!r}: {backend} supports {', '.join(map(str, supported))}"
            )
    residual = max(as_int("residual_length", residual_length, 1), MULTIPLE)
    block = min(64, residual // MULTIPLE * MULTIPLE)

    def codec(axis: int) -> Codec:
        size = min(q_group_size, block) if axes[axis] == "channel" else q_group_size
        plain = Integer(nbits, axes[axis], size, zero_point=True)
        return plain if backend == "quanto" else HalfQuadratic(plain)

    keys, values = codec(axis_key), codec(axis_value)
    return CachePolicy(Dense(), keys, values, block=block, recent=residual // block - 1)


def parse_policy(text: str, **more: object) -> PolicyChoice:
    """Parse a policy in the notation of the command line, such as ``bits=4`` or
    ``sliding_window,window=128,bits=8``.

    Args:
      text: a preset's name (``static`` if it is missing) and settings of ``kvjax.policy``,
        separated by commas.
      more: further settings. A setting of None is ignored.

    Raises:
      ValueError: if ``kvjax.policy`` has no such setting, a setting is given twice, or there are
        two names.
    """
    names: list[str] = []
    settings: dict[str, Any] = {}
    for part in text.split(","):
        setting, equals, value = (piece.strip() for piece in part.partition("="))
        if setting in settings or (names and not equals):
            twice = f"{setting} twice" if equals else f"two names, {names[0]} and {setting}"
            raise ValueError(f"the policy {text!r} has {twice}: give one policy at a time")
        if not equals:
            names.append(setting)
        else:
            settings[setting] = int(value) if value.lstrip("-").isdigit() else value
    name = names[0] if names else "static"
    for setting, value in more.items():
        if value is not None and settings.setdefault(setting, value) != value:
            raise ValueError(
                f"{setting} is {settings[setting]} in {text!r}, but {value} was also given"
            )
    known = [name for name in inspect.signature(policy).parameters if name != "name"]
    if unknown := [setting for setting in settings if setting not in known]:
        raise ValueError(f"the policy {text!r} has {unknown[0]!r}: settings are {', '.join(known)}")
    return policy(name, **settings)
