"""Logits to tokens: the filters of Transformers, in its order, and one draw a row.

The order is repetition penalty, ``min_new_tokens``, temperature, top-k, top-p, min-p. Nothing is
sorted: top-k and top-p keep what lies at or above some threshold, found by bisection over the
2**32 ordered bit patterns of float32: on a CPU a twentieth of the time of a sort of 49,152 logits.
So ``k`` and ``p`` are traced numbers, and tokens that tie at the threshold are all kept.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

from kvjax.core.trees import state
from kvjax.core.typing import Rows, SomeRows

Logits = Float[Array, "batch vocab"]
Seen = Bool[Array, "batch vocab"]

_NO_TOKEN = 2**31 - 1
_TINY = float(np.finfo(np.float32).tiny)
_RANGES = {
    "temperature": ("a finite number, at least 0", lambda x: 0 <= x < math.inf),
    "top_k": ("a whole number, at least 1", lambda x: 1 <= x < 2**64 and x == int(x)),
    "top_p": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "min_p": ("from 0 to 1", lambda x: 0 <= x <= 1),
    # Beyond this, finite logits might not stay finite.
    "repetition_penalty": ("from 1e-6 to 1e6", lambda x: 1e-6 <= x <= 1e6),
    "seed": ("a whole number from 0 to 2**64 - 1", lambda x: 0 <= x < 2**64 and x == int(x)),
}


@dataclass(frozen=True)
class Filters:
    """Which steps of ``sample`` are compiled in; hashable, a static argument of ``jit``."""

    greedy: bool = True
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    repetition_penalty: bool = False
    min_new_tokens: bool = False


@state
class Sampling:
    """The numbers of ``sample``, traced, so that a new value compiles nothing.

    Scalars, but for ``seeds``: uint32[batch, 2], each row's seed as low and high word, and
    ``eos``: int32[n], padded with a number that is no token's.
    """

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    repetition_penalty: Array
    min_new_tokens: Array
    seeds: Array
    eos: Array


def make_settings(
    *,
    seeds: Sequence[int],
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    min_new_tokens: int = 0,
    eos_token_ids: Sequence[int] = (),
) -> tuple[Filters, Sampling]:
    """What ``sample`` needs, from the numbers as a user gives them.

    Args:
      seeds: one a row.
      temperature: 0 is greedy: the likeliest token, whatever ``top_k``, ``top_p``, ``min_p`` say.
      top_k: draw among the k likeliest tokens.
      top_p: draw among the fewest likeliest tokens that hold this share of the probability.
      min_p: draw among tokens at least this share as likely as the likeliest.
      repetition_penalty: above 1 makes tokens that the row has already less likely.
      min_new_tokens: none of ``eos_token_ids`` before a row has so many new tokens.

    Raises:
      ValueError: naming the value that is out of its range, and the range.
    """
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    given |= {"repetition_penalty": repetition_penalty}
    for name, value in [*given.items(), *(("seed", seed) for seed in seeds)]:
        limits, fits = _RANGES[name]
        optional = name not in ("temperature", "seed")
        try:
            fine = (value is None and optional) or fits(value)
        except TypeError:
            fine = False
        if not fine:
            raise ValueError(f"{name} must be {limits}, got {value!r}")
    # A temperature that processors may round to nothing is the limit: greedy.
    greedy = temperature < _TINY
    filters = Filters(
        greedy=greedy,
        top_k=not greedy and top_k is not None,
        top_p=not greedy and top_p is not None and top_p < 1,
        min_p=not greedy and min_p is not None and min_p > 0,
        repetition_penalty=repetition_penalty not in (None, 1),
        min_new_tokens=min_new_tokens > 0 and len(eos_token_ids) > 0,
    )
    eos = np.full(max(8, 1 << len(eos_token_ids).bit_length()), _NO_TOKEN, np.int32)
    eos[: len(eos_token_ids)] = list(eos_token_ids)
    words = [(int(seed) & 0xFFFFFFFF, int(seed) >> 32) for seed in seeds]
    numbers: dict[str, Any] = {  # of the host, until jit takes them
        "temperature": np.float32(temperature),
        "top_k": np.int32(min(top_k or 1, _NO_TOKEN)),
        "top_p": np.float32(1 if top_p is None else max(top_p, _TINY)),
        "min_p": np.float32(min_p or 0),
        "repetition_penalty": np.float32(repetition_penalty or 1),
        "min_new_tokens": np.int32(min(min_new_tokens, _NO_TOKEN)),
        "seeds": np.asarray(words, np.uint32).reshape(-1, 2),
        "eos": eos,
    }
    return filters, Sampling(**numbers)


def sample(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: Rows,
    seen: Seen | None = None,
) -> tuple[Rows, SomeRows]:
    """Choose each row's next token, and say whether its logits were finite numbers; where they
    were not, the token means nothing.

    Args:
      logits, filters, settings: the last two as ``make_settings`` gives them.
      count: new tokens of each row so far: with its seed, all its draw depends on.
      seen: tokens that stand in a row; for the repetition penalty.
    """
    logits = logits.astype(jnp.float32)
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    logits = filter_logits(logits, filters, settings, count=count, seen=seen)
    if filters.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), finite
    return draw(logits, settings.seeds, count), finite


def filter_logits(
    logits: Logits,
    filters: Filters,
    settings: Sampling,
    *,
    count: Rows,
    seen: Seen | None = None,
) -> Logits:
    """The logits that ``sample``, with the same arguments, draws from; where it is greedy, the
    largest of them is its token. What can't be drawn is at minus infinity."""
    if filters.repetition_penalty:
        assert seen is not None
        logits = penalize(logits, seen, settings.repetition_penalty)
    if filters.min_new_tokens:
        early = (count < settings.min_new_tokens)[:, None]
        masked = logits.at[:, settings.eos].set(-jnp.inf, mode="drop")
        logits = jnp.where(early, masked, logits)
    if filters.greedy:
        return logits
    # The largest is moved to 0 first, so that no temperature can make it overflow.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / settings.temperature
    if filters.top_k:
        logits = keep_top_k(logits, settings.top_k)
    if filters.top_p:
        logits = keep_top_p(logits, settings.top_p)
    if filters.min_p:
        logits = keep_min_p(logits, settings.min_p)
    return logits


def penalize(logits: Logits, seen: Seen, penalty: Array | float) -> Logits:
    """Divide the positive logits of ``seen`` tokens by ``penalty``, multiply the negative ones.

    Source: Keskar et al., CTRL, arXiv:1909.05858, in the form of Transformers.
    """
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Logits, k: Array | int) -> Logits:
    """Keep a row's ``k`` largest, and what ties with the k-th; the rest become minus infinity.

    Source: Fan et al., arXiv:1805.04833.
    """
    return _keep_below(logits, jnp.ones_like(logits, jnp.int32), k)


def keep_top_p(logits: Logits, p: Array | float) -> Logits:
    """Keep the tokens with less than ``p`` of the probability above them, so always the likeliest.

    Source: Holtzman et al., arXiv:1904.09751.
    """
    return _keep_below(logits, jax.nn.softmax(logits, axis=-1), p)


def keep_min_p(logits: Logits, min_p: Array | float) -> Logits:
    """Keep the tokens that are at least ``min_p`` times as likely as the likeliest.

    Source: Nguyen et al., arXiv:2407.01082.
    """
    largest = jnp.max(logits, axis=-1, keepdims=True)
    return jnp.where(logits - largest >= jnp.log(min_p), logits, -jnp.inf)


def draw(logits: Logits, seeds: UInt[Array, "batch 2"], count: Rows) -> Rows:
    """Draw one token a row, in proportion to ``exp(logits)``; never one at minus infinity.

    Equal ``seeds`` (low and high word) and ``count``, the row's how-manieth draw this is, draw
    equally, in any batch and on any platform.
    """

    def noise(seed: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(seed[0], impl="threefry2x32"), seed[1])
        return jax.random.gumbel(jax.random.fold_in(key, count), logits.shape[-1:], jnp.float32)

    return jnp.argmax(logits + jax.vmap(noise)(seeds, count), axis=-1).astype(jnp.int32)


def _keep_below(logits: Logits, weights: Array, limit: Array | float) -> Logits:
    """Keep what has weights of less than ``limit``, in sum, strictly above it."""
    bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)
    ordered = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.sum(jnp.where(ordered > middle[:, None], weights, 0), axis=-1)
        below_limit = above < limit
        return jnp.where(below_limit, low, middle + 1), jnp.where(below_limit, middle, high)

    low = jnp.full(logits.shape[:1], -(2**31), jnp.int32)
    _, threshold = lax.fori_loop(0, 32, halve, (low, jnp.full_like(low, 2**31 - 1)))
    return jnp.where(ordered >= threshold[:, None], logits, -jnp.inf)
