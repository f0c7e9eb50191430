"""Rotary tables: every kind that Transformers has for the families here.

The inverse frequencies are made in float32, step by step in the order that Transformers makes
them, so they round as there; powers are taken in float64 and rounded, which differs from the
library's approximation by one unit in the last place in less than one of a hundred.

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
"""Inverse frequencies float32[half], and what cosines and sines are multiplied by."""


@functools.lru_cache(maxsize=64)
def model_rotary(config: DecoderConfig, max_len: int, limit: int | None = None) -> RotaryTable:
    """The rotary table of a model for texts of up to ``max_len`` tokens.

    Kinds whose frequencies depend on the length of the text (dynamic, longrope) are fixed by
    ``max_len``: they are what Transformers has at that length. There they change as a text
    grows, and keys in the cache keep what they were rotated by.

    Args:
      config: the model's configuration; its ``rope`` says the kind.
      max_len: distances between queries and keys stay below it.
      limit: positions 0 to ``limit - 1`` can be asked for; by default ``max_len``.

    Raises:
      ValueError: if ``max_len`` is not positive.
    """
    frequencies, scale = inverse_frequencies(config, max_len)
    return rotary_table(frequencies, max_len if limit is None else limit, scale=scale)


def layer_rotary(config: DecoderConfig, max_len: int, limit: int) -> tuple[RotaryTable, ...]:
    """The table of each layer, as ``model_rotary`` makes it; layers that are alike share one."""
    layers = [
        replace(each, rope=rope)
        for each, rope in zip(config.per_layer_config, config.ropes, strict=True)
    ]
    # Once for all of these: each array made of a numpy table is a constant of the program.
    tables = {
        each: jax.tree.map(jnp.asarray, model_rotary(each, max_len, limit))
        for each in dict.fromkeys(layers)
    }
    return tuple(tables[each] for each in layers)


def inverse_frequencies(config: DecoderConfig, max_len: int) -> Frequencies:
    """Radians a position for each pair of channels, float32[half], and the attention scale."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return _KINDS[config.rope.kind](config, max_len, dict(config.rope.parameters))


def _default(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    return _inverse(config, config.rope.theta), 1.0


def _linear(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    return _inverse(config, config.rope.theta) / np.float32(given["factor"]), 1.0


def _proportional(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    dim, part = config.head_dim, config.rope.partial_rotary_factor
    frequencies = np.zeros(dim // 2, np.float32)
    turned = int(part * dim // 2)
    frequencies[:turned] = _inverse(config, config.rope.theta)[:turned]
    return frequencies / np.float32(given.get("factor", 1.0)), 1.0


def _dynamic(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    dim = config.rope.rotary_dim(config.head_dim)
    factor, trained = given["factor"], config.max_position_embeddings
    exponent = dim / (dim - 2)
    if max_len <= trained:
        growth = (factor * trained / trained) - (factor - 1)
        return _inverse(config, config.rope.theta * growth**exponent), 1.0
    # Beyond the trained length Transformers has the length in a tensor, and so rounds each step.
    length = np.float32(factor) * np.float32(max_len) / np.float32(trained)
    growth = _power(length - np.float32(factor - 1), np.float32(exponent))
    return _inverse(config, np.float32(config.rope.theta) * growth), 1.0


def _llama3(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    frequencies = _inverse(config, config.rope.theta)
    factor, trained = given["factor"], given["original_max_position_embeddings"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    is_long, is_short = wavelengths > trained / low, wavelengths < trained / high
    scaled = np.where(is_long, frequencies / factor, frequencies)
    smooth = (trained / wavelengths - low) / (high - low)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    return np.where(~is_long & ~is_short, smoothed, scaled), 1.0


def _yarn(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    dim, theta = config.rope.rotary_dim(config.head_dim), config.rope.theta
    trained = given["original_max_position_embeddings"]
    factor = given.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / trained

    def attention(mscale: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    def turns_at(turns: float) -> float:
        """The channel pair that turns so many times within the trained length."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    scale = given.get("attention_factor")
    if scale is None:
        mscale, all_dim = given.get("mscale"), given.get("mscale_all_dim")
        scale = attention(mscale) / attention(all_dim) if mscale and all_dim else attention()
    low, high = turns_at(given.get("beta_fast") or 32), turns_at(given.get("beta_slow") or 1)
    if given["truncate"]:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp.astype(np.float32)
    periods = _power(theta, _exponents(dim))
    return 1 / (factor * periods) * (1 - keep) + 1 / periods * keep, float(scale)


def _longrope(config: DecoderConfig, max_len: int, given: dict) -> Frequencies:
    trained, factor = given["original_max_position_embeddings"], given.get("factor")
    if factor is None:
        factor = config.max_position_embeddings / trained
    scale = given.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    stretch = given["long_factor" if max_len > trained else "short_factor"]
    dim = config.rope.rotary_dim(config.head_dim)
    periods = _power(config.rope.theta, _exponents(dim))
    return 1 / (np.asarray(stretch, np.float32) * periods), float(scale)


def _inverse(config: DecoderConfig, theta: float | np.ndarray) -> np.ndarray:
    return 1 / _power(theta, _exponents(config.rope.rotary_dim(config.head_dim)))


def _exponents(dim: int) -> np.ndarray:
    return np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)


def _power(base: Any, exponent: Any) -> np.ndarray:
    """float32 powers of a float32 base, correctly rounded."""
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
