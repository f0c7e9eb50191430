"""Rotary tables for every rope type that Transformers supports for these families.

Inverse frequencies are computed in float32 with the same sequence of operations as Transformers, so
the rounding is the same. Powers are computed in float64 and then rounded; in fewer than 1 % of
cases this differs from Transformers by one unit in the last place.

Sources: Su et al., RoFormer, arXiv:2104.09864; Chen et al., arXiv:2306.15595 (linear); bloc97,
"NTK-aware scaled RoPE" (dynamic); Peng et al., YaRN, arXiv:2309.00071; Ding et al., LongRoPE,
arXiv:2402.13753; Dubey et al., Llama 3, arXiv:2407.21783; Barbero et al.,
arXiv:2410.06205 (proportional).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.rotary import RotaryTable, rotary_table

from .config import DecoderConfig

Frequencies = tuple[np.ndarray, float]
"""Inverse frequencies, float32[half], and the scale of the cosines and sines."""


@functools.lru_cache(maxsize=64)
def model_rotary(config: DecoderConfig, max_len: int, limit: int | None = None) -> RotaryTable:
    """The rotary table of a model for sequences of up to ``max_len`` tokens.

    Rope types with length-dependent frequencies (dynamic, longrope) use the frequencies that
    Transformers uses at length ``max_len``. Transformers changes the frequencies as the sequence
    grows, without rotating the cached keys again.

    Args:
      config: the model's configuration, including its rope type.
      max_len: an exclusive limit on the distance between a query and a key.
      limit: the number of positions in the table. The default is ``max_len``.

    Raises:
      ValueError: if ``max_len`` is not positive.
    """
    frequencies, scale = inverse_frequencies(config, max_len)
    return rotary_table(frequencies, max_len if limit is None else limit, scale=scale)


def layer_rotary(config: DecoderConfig, max_len: int, limit: int) -> tuple[RotaryTable | None, ...]:
    """The ``model_rotary`` table of each layer; None for layers without rotary positions. Layers
    with equal settings share one table."""
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
    """Radians per position for each pair of channels, float32[half], and the attention scale."""
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
        """The channel pair that makes ``rotations`` full rotations in the trained length."""
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
    """Correctly rounded float32 powers of a float32 base."""
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
