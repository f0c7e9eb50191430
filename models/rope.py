"""Rotary positions: tables for every rope type of Transformers, and reading of their parameters.

Inverse frequencies are computed in float32 with the same sequence of operations as Transformers, so
the rounding is the same. Powers are computed in float64 and then rounded. In fewer than 1 % of
cases, the result differs from Transformers by one unit in the last place.

Sources: Su et al., RoFormer, arXiv:2104.09864; Chen et al., arXiv:2306.15595 (linear); bloc97,
"NTK-aware scaled RoPE" (dynamic); Peng et al., YaRN, arXiv:2309.00071; Ding et al., LongRoPE,
arXiv:2402.13753; Dubey et al., Llama 3, arXiv:2407.21783; Barbero et al.,
arXiv:2410.06205 (proportional).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.rotary import RotaryTable, rotary_table

from .config import DecoderConfig, Parameter, RopeConfig
from .files import Fields

Frequencies = tuple[np.ndarray, float]
"""Inverse frequencies, float32[half], and the scale of the cosines and sines."""


@functools.lru_cache(maxsize=64)
def model_rotary(config: DecoderConfig, max_len: int, limit: int | None = None) -> RotaryTable:
    """Return the rotary table of a model for sequences of up to ``max_len`` tokens.

    Rope types with length-dependent frequencies (dynamic, longrope) use the frequencies that
    Transformers uses at length ``max_len``. Transformers changes the frequencies as the sequence
    grows, without rotating the cached keys again.

    Args:
      config: the model's configuration, including its rope type.
      max_len: an exclusive limit on the distance between a query and a key.
      limit: the number of positions in the table. The default is ``max_len``.

    Raises:
      ValueError: if ``max_len`` is not positive.

    Example:
      ```python
      table = models.model_rotary(lm.config, 64)
      rotated = kvjax.apply_rotary(jnp.ones((1, 2, 3, 64)), jnp.array([[0, 1, 2]]), table)
      ```
    """
    frequencies, scale = inverse_frequencies(config, max_len)
    return rotary_table(frequencies, max_len if limit is None else limit, scale=scale)


def layer_rotary(config: DecoderConfig, max_len: int, limit: int) -> tuple[RotaryTable | None, ...]:
    """Return the ``model_rotary`` table of each layer; None for layers without rotary positions.
    Layers with equal settings share one table."""
    layers = [
        replace(layer, rope=rope) if rope else None
        for layer, rope in zip(config.per_layer_config, config.ropes, strict=True)
    ]
    # Convert each distinct table once: each array made from numpy is a constant in the program.
    tables = {
        layer: jax.tree.map(jnp.asarray, model_rotary(layer, max_len, limit))
        for layer in dict.fromkeys(layers)
        if layer
    }
    return tuple(tables[layer] if layer else None for layer in layers)


def inverse_frequencies(config: DecoderConfig, max_len: int) -> Frequencies:
    """Return the radians per position for each pair of channels, float32[half], and the attention
    scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _KINDS[config.rope.rope_type](config, max_len, dict(config.rope.parameters))


def _default(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    return _inverse(config, config.rope.theta), 1.0


def _linear(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    return _inverse(config, config.rope.theta) / np.float32(parameters["factor"]), 1.0


def _proportional(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    dim, part = config.head_dim, config.rope.partial_rotary_factor
    frequencies = np.zeros(dim // 2, np.float32)
    rotated = int(part * dim // 2)
    frequencies[:rotated] = _inverse(config, config.rope.theta)[:rotated]
    return frequencies / np.float32(parameters.get("factor", 1.0)), 1.0


def _dynamic(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    dim = config.rope.rotary_dim(config.head_dim)
    factor, trained = parameters["factor"], config.max_position_embeddings
    exponent = dim / (dim - 2)
    if max_len <= trained:
        growth = (factor * trained / trained) - (factor - 1)
        return _inverse(config, config.rope.theta * growth**exponent), 1.0
    # Beyond the trained length, Transformers computes this with tensors and rounds each step.
    length = np.float32(factor) * np.float32(max_len) / np.float32(trained)
    growth = _power(length - np.float32(factor - 1), np.float32(exponent))
    return _inverse(config, np.float32(config.rope.theta) * growth), 1.0


def _llama3(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    frequencies = _inverse(config, config.rope.theta)
    factor, trained = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > trained / low, wavelengths < trained / high
    scaled = np.where(is_long, frequencies / factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    return np.where(~is_long & ~is_short, smoothed, scaled), 1.0


def _yarn(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    dim, theta = config.rope.rotary_dim(config.head_dim), config.rope.theta
    trained = parameters["original_max_position_embeddings"]
    factor = parameters.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / trained

    def attention(mscale: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def correction_dim(rotations: float) -> float:
        """Return the index of the channel pair that makes ``rotations`` full rotations within the
        trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    scale = parameters.get("attention_factor")
    if scale is None:
        mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
        scale = attention(mscale) / attention(all_dim) if mscale and all_dim else attention()
    low = correction_dim(parameters.get("beta_fast") or 32)
    high = correction_dim(parameters.get("beta_slow") or 1)
    if parameters["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp.astype(np.float32)
    periods = _power(theta, _exponents(dim))
    return 1 / (factor * periods) * (1 - keep) + 1 / periods * keep, float(scale)


def _longrope(config: DecoderConfig, max_len: int, parameters: dict) -> Frequencies:
    trained, factor = parameters["original_max_position_embeddings"], parameters.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / trained
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    stretch = parameters["long_factor" if max_len > trained else "short_factor"]
    dim = config.rope.rotary_dim(config.head_dim)
    periods = _power(config.rope.theta, _exponents(dim))
    return 1 / (np.asarray(stretch, np.float32) * periods), float(scale)


def _inverse(config: DecoderConfig, theta: float | np.ndarray) -> np.ndarray:
    return 1 / _power(theta, _exponents(config.rope.rotary_dim(config.head_dim)))


def _exponents(dim: int) -> np.ndarray:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _power(base: Any, exponent: Any) -> np.ndarray:
    """Compute correctly rounded float32 powers of a float32 base."""
    return np.power(np.float64(np.float32(base)), np.float64(exponent)).astype(np.float32)


_KINDS: dict[str, Callable[[DecoderConfig, int, dict], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}


KINDS = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
"""The rotary kinds that Transformers supports for most of these families."""


@dataclass(frozen=True)
class RopeForm:
    """How a family's files describe rotary positions.

    Attributes:
      base, theta: the top-level name of ``rope_theta``, and its default.
      part, partial: the top-level name of ``partial_rotary_factor``, and its default.
      partial_default: whether the kind ``default`` uses ``partial_rotary_factor``.
      kinds: the kinds that the family supports.
      older: pairs of an older name of a kind and its present name.
      trained: the default context length before scaling, for families that read it only from the
        top level; None if the rotary parameters may contain it.
    """

    base: str = "rope_theta"
    theta: float = 1e4
    part: str = "partial_rotary_factor"
    partial: float = 1.0
    partial_default: bool = False
    kinds: tuple[str, ...] = KINDS
    older: tuple[tuple[str, str], ...] = ()
    trained: int | None = None


FULL, LOCAL = RopeForm(theta=1e6), RopeForm("rope_local_base_freq")
"""The rotary positions of Gemma 3's layers with full attention, and of its layers with a sliding
window."""


def read_rope(
    config: Fields, form: RopeForm, *, head_dim: int, max_position_embeddings: int
) -> RopeConfig:
    """Read ``rope_parameters``, or its older forms ``rope_scaling`` and ``rope_theta``.

    As in Transformers, ``rope_scaling`` has precedence over ``rope_parameters``, and their
    ``rope_theta`` and ``partial_rotary_factor`` over the top-level fields. A top-level
    ``original_max_position_embeddings`` has precedence over the one inside.

    Raises:
      CheckpointError: if the kind is unknown, or a parameter is missing or invalid.
    """
    rope = _rope_fields(config)
    name = "original_max_position_embeddings"
    outside = form.trained is not None or config.raw(name) is not None
    return _read(config, rope, form, outside, head_dim, max_position_embeddings)


def read_ropes(
    config: Fields,
    full_form: RopeForm,
    local_form: RopeForm,
    *,
    head_dim: int,
    max_position_embeddings: int,
    full_head_dim: int | None = None,
) -> tuple[RopeConfig, RopeConfig]:
    """Read the rotary positions of full and of sliding layers, for families in which they differ.

    New files have ``full_attention`` and ``sliding_attention`` in ``rope_parameters``. Older files
    have ``rope_theta`` and ``rope_scaling`` for full layers, and ``rope_local_base_freq`` for
    sliding layers, which are not scaled.

    Args:
      full_head_dim: the head dimension of full layers, if it differs.

    Raises:
      CheckpointError: if a kind is unknown, or a parameter is missing or invalid.
    """
    both = config.inner("rope_parameters") or Fields(config.file, {}, "rope_parameters.")
    for name in both.values:
        if name not in ("full_attention", "sliding_attention"):
            raise both.wrong(name, "only full_attention and sliding_attention")
    full = _inner(both, "full_attention")
    if (scaling := _inner(config, "rope_scaling")).values:
        if full.values:
            raise config.wrong(
                "rope_scaling", "null, because rope_parameters.full_attention is set"
            )
        # Versions of Transformers disagree about which of the two names has precedence.
        if scaling.raw("rope_type") is None:
            raise scaling.wrong("rope_type", f"one of {', '.join(KINDS)}")
        full = scaling
    local, positions = _inner(both, "sliding_attention"), max_position_embeddings
    return (
        _read(config, full, full_form, False, full_head_dim or head_dim, positions),
        _read(config, local, local_form, False, head_dim, positions),
    )


def _inner(fields: Fields, name: str) -> Fields:
    return fields.inner(name) or Fields(fields.file, {}, f"{fields.parent}{name}.")


def _read(
    config: Fields,
    rope: Fields,
    form: RopeForm,
    outside: bool,
    head_dim: int,
    max_position_embeddings: int,
) -> RopeConfig:
    """Read one set of parameters. ``outside`` says whether the length before scaling is a top-level
    field."""
    kind = _kind(rope, form)
    inside = rope.raw("rope_theta") is not None
    theta = rope.number("rope_theta") if inside else config.number(form.base, form.theta)
    outer = config.number(form.part, form.partial)
    # In most families of Transformers, the `default` kind ignores the factor.
    whole = kind == "default" and not form.partial_default
    partial = 1.0 if whole else rope.number("partial_rotary_factor", outer)
    if kind == "proportional" and partial > 1:
        raise rope.wrong("partial_rotary_factor", "a number above 0, and at most 1")
    result = RopeConfig(kind, theta, partial)
    dim = result.rotary_dim(head_dim)
    if dim < 2 or dim % 2 or dim > head_dim:
        where = config if "head_dim" in config.values else rope
        name = "head_dim" if where is config else "partial_rotary_factor"
        raise where.wrong(
            name, f"an even number of rotated channels, at most head_dim = {head_dim}, not {dim}"
        )
    parameters = _parameters(kind, rope, dim)
    if kind in ("llama3", "yarn", "longrope"):
        name = "original_max_position_embeddings"
        default = form.trained or max_position_embeddings
        parameters[name] = (config if outside else rope).integer(name, default)
    return RopeConfig(kind, theta, partial, tuple(sorted(parameters.items())))


def _rope_fields(config: Fields) -> Fields:
    for name in ("rope_scaling", "rope_parameters"):
        fields = config.inner(name)
        if fields is not None and fields.values:
            if nested := [key for key in fields.values if key.endswith("_attention")]:
                raise fields.wrong(nested[0], "one set of rotary parameters for all layers")
            return fields
    return Fields(config.file, {}, "rope_parameters.")


def _kind(rope: Fields, form: RopeForm) -> str:
    name = "rope_type" if rope.raw("rope_type") is not None else "type"
    older = dict(form.older)
    kind = rope.choice(name, "default", (*form.kinds, *older))
    return older.get(kind, kind)


def _parameters(kind: str, rope: Fields, dim: int) -> dict[str, Parameter]:
    """Return the parameters that this kind reads."""
    if kind == "default":
        return {}
    if kind == "dynamic" and dim < 4:
        raise rope.wrong("rope_type", f"another type: dynamic needs 4 rotated channels, not {dim}")
    if kind == "longrope":
        parameters: dict[str, Parameter] = {
            name: rope.numbers(name, dim // 2) for name in ("long_factor", "short_factor")
        }
        optional = ("factor", "attention_factor")
    elif kind == "yarn":
        if "factor" not in rope.values:
            raise rope.wrong("factor", "a number above 0")
        parameters = {"truncate": rope.flag("truncate", True)}
        optional = (
            "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
        )  # fmt: skip
    else:
        parameters = {} if kind == "proportional" else {"factor": rope.number("factor")}
        optional = ("factor",) if kind == "proportional" else ()
    if kind == "llama3":
        for name in ("low_freq_factor", "high_freq_factor"):
            parameters[name] = rope.number(name)
    for name in optional:
        if rope.raw(name) is not None:
            parameters[name] = rope.number(name, positive=name == "factor")
    return parameters
